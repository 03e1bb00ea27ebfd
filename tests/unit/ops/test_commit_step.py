"""What a verdict changes: worked steps, and what replaces the reference against it with every slot compared."""

from __future__ import annotations

import pytest
import torch
from tests.unit.ops.conftest import Version
from tests.unit.ops.slot_cases import VOCAB_SIZE, assert_same, moved, odd_slots
from torch import Tensor

from paceline.ops.commit_step import (
    ACCEPTED,
    FAULT,
    NUM_COUNTS,
    NUM_WAITING,
    NUM_ZERO_Q,
    POSITION,
    commit_step,
    commit_step_native,
    commit_step_reference,
    commit_step_triton,
)
from paceline.ops.finalise_block import Verdict
from paceline.ops.slot_columns import ANCHOR, FIRST_STOP, IS_ALIVE, LENGTH, LIMIT, STEP, SlotColumns

Case = tuple[SlotColumns, Tensor, Tensor, Tensor, Tensor, Tensor, Verdict]


def case(num_drafts: int, slots: list[int], *, seed: int = 0) -> Case:
    """Blocks that are kept to every length, with faults; slot 2 has ended and stands in the trash slot."""
    generator = torch.Generator().manual_seed(seed)
    columns, waiting = odd_slots(6, 4, 0, seed=seed)
    columns.whole_SX[4, LIMIT], columns.whole_SX[4, FIRST_STOP:] = 2**40, -1  # goes on for certain
    slots_B = torch.tensor(slots)
    count = len(slots)
    starts_B = columns.whole_SX[slots_B, LENGTH]
    drafts = torch.randint(-1, VOCAB_SIZE, (count, num_drafts), generator=generator)
    accepted = torch.randint(0, num_drafts + 1, (count,), generator=generator)
    fault = torch.randint(0, 3, (count,), generator=generator) * (torch.arange(count) % 2)
    bonus = torch.randint(0, VOCAB_SIZE, (count,), generator=generator).masked_fill(fault > 0, -1)
    positions = starts_B.masked_fill(slots_B == 6, -1)
    return columns, waiting.ids_SK, slots_B, starts_B, positions, drafts, Verdict(accepted, bonus, fault, accepted // 2)


def test_a_verdict_moves_a_request_on_and_is_reported() -> None:
    columns, waiting, *_ = case(3, [0])
    columns.whole_SX[1, [LENGTH, ANCHOR, STEP, IS_ALIVE, LIMIT]] = torch.tensor([9, 4, 2, 1, 30])
    columns.whole_SX[1, FIRST_STOP:] = -1
    others = columns.whole_SX[[0, 2, 3, 4, 5, 6]].clone()
    numbers = {"starts_B": torch.tensor([9]), "positions_B": torch.tensor([9])}
    verdict = Verdict(*(torch.tensor([value]) for value in (2, 33, 0, 1)))
    ends, report = commit_step(
        columns, waiting, torch.tensor([1]), draft_ids_BK=torch.tensor([[7, 8, 6]]), verdict=verdict, **numbers
    )
    assert ends.tolist() == [12]
    assert columns.whole_SX[1, [LENGTH, ANCHOR, STEP, IS_ALIVE]].tolist() == [12, 33, 3, 1]
    assert waiting[1].tolist() == [-1] * 4
    counts = report[0, :NUM_COUNTS].tolist()
    assert [counts[index] for index in (ACCEPTED, FAULT, NUM_ZERO_Q, NUM_WAITING, POSITION)] == [2, 0, 1, 0, 9]
    assert report[0, NUM_COUNTS:].tolist() == [7, 8, 33, -1, 7, 8, 6]
    assert torch.equal(columns.whole_SX[[0, 2, 3, 4, 5, 6]], others)


@pytest.mark.parametrize("num_drafts", [0, 1, 3, 4])
@pytest.mark.parametrize("slots", [[3], [5, 0, 6, 1, 4, 3]])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_every_version_agrees_with_the_reference(
    version: Version, num_drafts: int, slots: list[int], seed: int
) -> None:
    columns, waiting, *rest, verdict = case(num_drafts, slots, seed=seed)
    whole, kept, *others = moved((columns.whole_SX, waiting, *rest), version.device)
    there = Verdict(*moved(verdict, version.device))
    expected = commit_step_reference(columns.whole_SX, waiting, *rest, verdict)
    run = version.of(commit_step_triton, commit_step_native)
    assert_same(run(whole, kept, *others, there), expected)
    assert_same((whole, kept), (columns.whole_SX, waiting))
    assert len(slots) == 1 or 0 < columns.whole_SX[torch.tensor(slots), IS_ALIVE].sum() < len(slots)


@pytest.mark.parametrize(
    ("length", "accepted", "tokens", "fault", "goes_on"),
    [
        (20, 0, [5, 3], 0, True),
        (20, 1, [5, 3], 0, True),
        (28, 1, [5, 3], 0, False),  # the last token of the budget sits at 30
        (27, 1, [5, 3], 0, True),
        (20, 0, [5, 9], 0, False),  # a stop id as the target's own token
        (20, 1, [9, 3], 0, False),  # as a kept draft
        (20, 0, [9, 3], 0, True),  # as a refused one
        (20, 0, [5, -1], 1, False),
    ],
)
def test_ends_that_a_device_can_see(
    version: Version, length: int, accepted: int, tokens: list[int], fault: int, goes_on: bool
) -> None:
    columns, waiting, *_ = case(1, [0])
    columns.whole_SX[0, [LIMIT, IS_ALIVE]] = torch.tensor([30, 1])
    columns.whole_SX[0, FIRST_STOP:] = torch.tensor([9, -1, -1, -1, -1, -1, -1, 40])
    draft, bonus = tokens
    numbers = (torch.tensor([value]) for value in (0, length, length))
    device = version.device
    verdict = Verdict(*(torch.tensor([value]).to(device) for value in (accepted, bonus, fault, 0)))
    whole, kept = columns.whole_SX.to(device), waiting.to(device)
    slots, starts, positions = (value.to(device) for value in numbers)
    run = version.of(commit_step_triton, commit_step_native)
    run(whole, kept, slots, starts, positions, torch.tensor([[draft]]).to(device), verdict)
    assert bool(whole[0, IS_ALIVE]) is goes_on
