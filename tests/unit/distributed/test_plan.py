"""The decider's message: whatever a step is, of one shape, and all of it arrives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.distributed import plan as module
from paceline.distributed.choosing import Truncation
from paceline.distributed.places import DecodeRequest
from paceline.distributed.plan import Plan, hear, tell

PLACES, MOST_ROWS = 3, 9
PLANS = {
    "prompt": Plan.of_rows(
        [[5] * 9, [], [7, 8]],
        counts=[0, 4, 1],
        new_places=[0, 2],
        num_judged=[0, 0, 2],
        requests=[
            DecodeRequest((5,), temperature=0.7, seed=-5, top_k=2**40),
            None,
            DecodeRequest((5,), temperature=1e-7, seed=2**62, min_p=0.1),
        ],
    ),
    "block": Plan.of_rows(
        [[5, 6, 7], [9], []],
        counts=[3, 0, 1],
        new_places=[],
        num_judged=[3, 1, 0],
        requests=[DecodeRequest((5,)), None, None],
    ),
    "end": Plan.closing("end", PLACES),
    "failed": Plan.closing("failed", PLACES),
}


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """A broadcast within one process: what was told last is heard."""
    sent: list[Tensor] = []

    def broadcast(message: Tensor, source: int) -> None:
        if bool(message.any()) or not sent:
            sent.append(message.clone())
        else:
            assert message.shape == sent[-1].shape, "ranks that expect another shape wait for each other for good"
            message.copy_(sent[-1])

    monkeypatch.setattr(module.dist, "broadcast", broadcast)
    return sent


@pytest.mark.parametrize("name", PLANS)
def test_what_is_told_is_heard(name: str, wire: list[Tensor]) -> None:
    told: Any = PLANS[name]
    tell(told, MOST_ROWS, decider=0)
    heard: Any = hear(PLACES, MOST_ROWS, decider=0)
    assert heard.kind == told.kind
    for field in ("counts_B", "is_new_B", "num_judged_B", "token_ids_BT"):
        assert torch.equal(getattr(heard, field), getattr(told, field)), field
    for one, other in zip(heard.sampling, told.sampling, strict=True):
        assert torch.equal(one, other) and one.dtype == other.dtype
    assert heard.all_greedy == (name != "prompt")
    assert name not in ("prompt", "block") or (heard.truncation != Truncation()) == (name == "prompt")


def test_every_step_has_a_message_of_one_shape(wire: list[Tensor]) -> None:
    for told in PLANS.values():
        tell(told, MOST_ROWS, decider=0)
    assert {message.shape for message in wire} == {(PLACES + 1, 8 + MOST_ROWS)}


def test_rows_of_different_lengths_are_filled_up() -> None:
    assert PLANS["block"].token_ids_BT.tolist() == [[5, 6, 7], [9, 0, 0], [0, 0, 0]]
