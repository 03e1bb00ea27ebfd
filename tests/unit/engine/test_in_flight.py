"""Passes in flight: numbered, read in order, and what they may bring is bounded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.unit.engine.test_batching import make_request

from paceline.engine.in_flight import Ahead, InFlight
from paceline.engine.step import StepOutput
from paceline.errors import EngineFaultError


def output_of(*, positions: list[int], tokens: list[list[int]]) -> StepOutput:
    zeros = torch.zeros(len(positions), dtype=torch.int64)
    return StepOutput.of(
        accepted_B=zeros,
        tokens_BT=torch.tensor(tokens),
        fault_B=zeros,
        draft_ids_BK=zeros.new_empty(len(positions), 0),
        num_zero_q_B=zeros,
        num_waiting_B=zeros,
        positions_B=torch.tensor(positions),
    )


def launch(in_flight: InFlight, requests: list[Any], positions: list[int], **changes: Any) -> None:
    in_flight.count()
    wanted: dict[str, Any] = {"num_drawn": [3] * len(requests), "num_rows": 4, "is_decode": True, "started_s": 0.0}
    tokens = [[7]] * len(requests)
    in_flight.keep(requests, output_of(positions=positions, tokens=tokens), **(wanted | changes))


def test_what_is_unread_bounds_where_a_request_stands() -> None:
    in_flight, first, second = InFlight(), make_request(0), make_request(1)
    first.num_waiting = 2
    assert in_flight.ahead([first, second]) == [Ahead(0, 0, 2), Ahead(0, 0, 0)]
    launch(in_flight, [second], [9], is_decode=False, num_rows=1, num_drawn=[5])
    launch(in_flight, [first, second], [9, 10])
    assert in_flight.ahead([second, first]) == [Ahead(2, 5, 3), Ahead(1, 4, 3)]
    first.epoch += 1  # what it had on the device became void
    assert in_flight.ahead([first]) == [Ahead(0, 0, 2)]
    in_flight.drop()
    assert in_flight.ahead([second]) == [Ahead(0, 0, 0)]


def test_a_single_step_in_flight_bounds_its_own_requests_in_any_order() -> None:
    in_flight, first, second, other = InFlight(), make_request(0), make_request(1), make_request(2)
    first.num_waiting = 2
    launch(in_flight, [first, second], [9, 10], num_drawn=[5, 0])
    assert in_flight.ahead([first, second]) == [Ahead(1, 4, 5), Ahead(1, 4, 0)]
    assert in_flight.ahead([second, first]) == [Ahead(1, 4, 0), Ahead(1, 4, 5)]
    assert in_flight.ahead([first, second, other]) == [Ahead(1, 4, 5), Ahead(1, 4, 0), Ahead(0, 0, 0)]
    first.epoch += 1  # what it had on the device became void
    assert in_flight.ahead([first, second]) == [Ahead(0, 0, 2), Ahead(1, 4, 0)]


def test_the_first_pass_of_a_resumed_request_gives_no_token() -> None:
    in_flight, request = InFlight(), make_request(0)
    request.output.extend([5, 6])
    launch(in_flight, [request], [0], is_decode=False, num_rows=1, num_drawn=[2])
    assert in_flight.ahead([request]) == [Ahead(0, 0, 2)]


def test_passes_are_told_apart_by_number() -> None:
    in_flight, request = InFlight(), make_request(0)
    assert not in_flight.has_before(100)
    in_flight.count()  # a chunk without results
    launch(in_flight, [request], [9])
    assert [in_flight.has_before(number) for number in (1, 2, 3)] == [False, False, True]
    assert in_flight.pop().number == 2 and in_flight.last == 2


def test_results_belong_to_a_request_and_not_to_what_became_of_it() -> None:
    in_flight, gone, void, here = InFlight(), make_request(0), make_request(1), make_request(2)
    here.output.extend([5])
    launch(in_flight, [gone, void, here], [9, 9, 10])
    gone.finish_reason, void.epoch = "abort", 1
    ((request, step, num_drawn),) = in_flight.pop().read()
    assert (request, step.token_ids, num_drawn) == (here, (7,), 3)


@pytest.mark.parametrize(("position", "text"), [(11, "stands at 11 on the device"), (-1, "has ended on the device")])
def test_host_and_device_have_to_agree(position: int, text: str) -> None:
    in_flight, request = InFlight(), make_request(0)
    request.output.extend([5])
    launch(in_flight, [request], [position])
    with pytest.raises(EngineFaultError, match=text):
        in_flight.pop().read()
