"""The number of drafts follows acceptance and cost: down to none, and back."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from paceline.engine.draft_length import AcceptanceRates, DraftLengthController, checked_draft_length
from paceline.errors import RequestError


@dataclass
class LinearCosts:
    """A plain step takes 10 ms per request, a row and a draft some more."""

    row_ms: float
    draft_ms: float

    def verify_ms(self, num_requests: int, num_drafts: int) -> float:
        return num_requests * (10 + self.row_ms * num_drafts)

    def step_ms(self, num_requests: int, num_drafts: int) -> float:
        return self.verify_ms(num_requests, num_drafts) + num_requests * self.draft_ms * num_drafts


def run(
    controller: DraftLengthController, rate: float, num_steps: int, generator: random.Random, num_requests: int = 1
) -> list[int]:
    """Serve blocks in which each draft is kept with one chance; returns the lengths chosen."""
    chosen = []
    waiting = 0
    for _ in range(num_steps):
        count = controller.next_num_drafts(num_requests)
        for _ in range(num_requests):
            accepted = next((i for i in range(waiting) if generator.random() >= rate), waiting)
            controller.observe(waiting, accepted)
        waiting = count
        chosen.append(count)
    return chosen


def test_modes() -> None:
    assert checked_draft_length("adaptive") == "adaptive"
    for wrong in ("on", None, 3, ["off"]):
        with pytest.raises(RequestError, match="draft_length"):
            checked_draft_length(wrong)


def test_before_anything_is_known_drafting_is_tried() -> None:
    assert DraftLengthController(7, LinearCosts(0.5, 0.5)).next_num_drafts(1) == 7


def test_perfect_drafts_keep_the_whole_block() -> None:
    controller = DraftLengthController(7, LinearCosts(0.5, 0.5))
    assert set(run(controller, 1.0, 200, random.Random(0))) == {7}
    assert (controller.num_switched_off, controller.num_probes) == (0, 0)


def test_useless_drafts_are_switched_off_within_fifty_steps_and_probing_costs_little() -> None:
    costs = LinearCosts(1.0, 1.0)
    controller = DraftLengthController(7, costs)
    chosen = run(controller, 0.0, 1000, random.Random(0))
    assert controller.num_drafts == 0
    assert all(count in (0, 7) for count in chosen[30:])
    spent_ms = sum(costs.step_ms(1, count) for count in chosen[50:])
    assert spent_ms < 1.03 * 10 * 950
    assert controller.num_switched_off == 1
    assert controller.num_probes == sum(count == 7 for count in chosen[30:]) > 0


def test_it_comes_back_when_drafts_get_good_again() -> None:
    controller = DraftLengthController(7, LinearCosts(1.0, 1.0))
    generator = random.Random(1)
    run(controller, 0.0, 300, generator)
    assert controller.num_drafts == 0
    later = run(controller, 0.95, 800, generator)
    assert min(later[-200:]) >= 5
    assert later.index(7) < 400


def test_it_gives_up_after_three_probes_and_tries_new_requests_after_that() -> None:
    controller = DraftLengthController(7, LinearCosts(1.0, 1.0))
    while controller.num_probes < 3:
        assert not controller.has_given_up
        assert controller.wants_another_request
        controller.observe(controller.next_num_drafts(1), 0)
    assert controller.has_given_up
    assert not controller.wants_another_request
    num_skipped = 0
    while not controller.wants_another_request:
        controller.skip_step()
        num_skipped += 1
    assert 100 < num_skipped < 1000
    assert controller.next_num_drafts(1) == 7  # its first block is a probe
    controller.observe(7, 0)
    assert controller.has_given_up
    controller.observe(7, 7)
    assert not controller.has_given_up


def test_one_probe_that_pays_in_time_keeps_it_from_giving_up() -> None:
    controller = DraftLengthController(7, LinearCosts(1.0, 1.0))
    run(controller, 0.0, 40, random.Random(0))
    for _ in range(2000):
        if controller.next_num_drafts(1) == 7:
            controller.observe(7, 6 if controller.num_probes % 3 == 0 else 0)
        assert not controller.has_given_up


def test_without_probes_it_never_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DraftLengthController, "_probe_interval", lambda _self: 10**9)
    controller = DraftLengthController(7, LinearCosts(1.0, 1.0))
    run(controller, 0.0, 300, random.Random(1))
    assert set(run(controller, 0.95, 800, random.Random(1))) == {0}


@pytest.mark.parametrize(("rate", "row_ms"), [(0.8, 1.0), (0.6, 1.0), (0.9, 2.0), (0.7, 0.2)])
def test_it_settles_near_the_best_constant_length(rate: float, row_ms: float) -> None:
    costs = LinearCosts(row_ms, 0.3)
    paces = [sum(rate**i for i in range(count + 1)) / costs.step_ms(1, count) for count in range(8)]
    chosen = run(DraftLengthController(7, costs), rate, 3000, random.Random(2))[200:]
    mean_pace = sum(paces[count] for count in chosen) / len(chosen)
    assert mean_pace > 0.95 * max(paces)


def test_larger_batches_get_fewer_drafts_where_rows_cost_more() -> None:
    class Crowded(LinearCosts):
        def verify_ms(self, num_requests: int, num_drafts: int) -> float:
            return 10 + max(0, num_requests * (1 + num_drafts) - 16) * self.row_ms

        def step_ms(self, num_requests: int, num_drafts: int) -> float:
            return self.verify_ms(num_requests, num_drafts) + 0.1 * num_drafts

    controller = DraftLengthController(7, Crowded(1.0, 0.0))
    run(controller, 0.7, 500, random.Random(3))
    lengths = [controller.next_num_drafts(size) for size in (1, 4, 16, 64)]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] == 7
    assert lengths[-1] < 3


def test_the_choice_is_the_pasts_alone() -> None:
    """Whatever happens to a block, its own length was fixed before; the same past gives the same length."""
    lengths = []
    for outcome in (0, 7):
        controller = DraftLengthController(7, LinearCosts(1.0, 1.0))
        run(controller, 0.6, 50, random.Random(4))
        lengths.append(controller.next_num_drafts(1))
        controller.observe(7, outcome)
    assert lengths[0] == lengths[1]


def test_rates_follow_recent_blocks_and_a_position_starts_from_the_one_before() -> None:
    rates = AcceptanceRates(3)
    assert rates.rates() == [1, 1, 1]
    for _ in range(300):
        rates.observe(3, 1)  # the first is kept, the second refused, of the third nothing is known
    first, second, third = rates.rates()
    assert first > 0.99
    assert second < 0.05
    assert third == pytest.approx(second)
    for _ in range(300):
        rates.observe(1, 1)  # shorter blocks: what is no longer drafted fades
    assert rates.rates()[1] > 0.9


def test_blocks_without_drafts_tell_nothing() -> None:
    controller = DraftLengthController(3, LinearCosts(1.0, 1.0))
    for _ in range(50):
        controller.observe(0, 0)
    assert controller.next_num_drafts(1) == 3


def test_thresholds_rise_with_a_rows_cost() -> None:
    for row_ms in (0.0, 1.0):
        controller = DraftLengthController(4, LinearCosts(row_ms, 0.0))
        thresholds = controller.thresholds(1, 4)
        # All drafts are taken to be good at first: 5 tokens in 10 + 4 rows ms.
        assert thresholds == pytest.approx([row_ms * 5 / (10 + 4 * row_ms)] * 4)
    assert max(DraftLengthController(4, LinearCosts(1e9, 0.0)).thresholds(1, 4)) <= 1
