"""A hybrid target over contiguous caches: any split into passes, and any verdict on drafts, commits the same bits."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from tests.tiny_kimi import kimi_target, small_kimi_config
from torch import Tensor

from paceline.errors import CapacityError
from paceline.models.sequence_attend import sequence_attend
from paceline.models.stepwise import StepwiseContext
from paceline.models.targets.kimi import KimiTarget
from paceline.ops.delta_commit import commit_delta

WINDOW = 5


@pytest.fixture(scope="module")
def target() -> KimiTarget:
    return kimi_target(small_kimi_config(8, 4), mode="row_invariant")


@pytest.fixture(scope="module")
def text() -> Tensor:
    return torch.randint(0, 64, (1, 20), generator=torch.Generator().manual_seed(2))


@pytest.fixture(scope="module")
def whole(target: KimiTarget, text: Tensor) -> Tensor:
    """Logits of the text, [20, 64]."""
    return target.logits(target(text, text, sequence_attend(target)))[0]


def context_of(target: KimiTarget, num_requests: int = 1, capacity: int = 32) -> StepwiseContext:
    return StepwiseContext(target.contract, num_requests, capacity, dtype=target.norm.weight.dtype, device="cpu")


def step(target: KimiTarget, context: StepwiseContext, rows: Tensor, counts: Sequence[int] | None = None) -> Tensor:
    logits = target.logits(target(rows, rows, context))
    context.commit(torch.tensor([rows.shape[1]] * rows.shape[0] if counts is None else counts))
    return logits


@pytest.mark.parametrize("splits", [[20], [1] * 20, [7, 1, 1, 11], [3, 17], [16, 4], [19, 1]])
def test_any_split_gives_the_bits_of_the_whole(
    splits: list[int], target: KimiTarget, text: Tensor, whole: Tensor
) -> None:
    context, found = context_of(target), []
    for rows in text.split(splits, dim=1):
        found.append(step(target, context, rows)[0])
    assert torch.equal(torch.cat(found), whole)
    assert context.lengths_B.tolist() == [20]


@pytest.mark.parametrize("accepted", range(1, WINDOW + 1))
def test_going_on_after_a_verdict_equals_plain_decoding(
    accepted: int, target: KimiTarget, text: Tensor, whole: Tensor
) -> None:
    """The window holds the text up to what is accepted and other tokens behind; then the text goes on."""
    context = context_of(target)
    step(target, context, text[:, :6])
    window = (text[:, 6 : 6 + WINDOW] + 1) % 64
    window[:, :accepted] = text[:, 6 : 6 + accepted]
    logits = step(target, context, window, [accepted])
    assert torch.equal(logits[0, :accepted], whole[6 : 6 + accepted])
    plain = context_of(target)
    for rows in text[:, : 6 + accepted].split(1, dim=1):
        step(target, plain, rows)
    assert torch.equal(_states(context), _states(plain)) and torch.equal(_histories(context), _histories(plain))
    rest = step(target, context, text[:, 6 + accepted :])
    assert torch.equal(rest[0], whole[6 + accepted :])


def test_verdicts_of_a_batch_are_each_requests_own(target: KimiTarget, text: Tensor, whole: Tensor) -> None:
    """Requests of different lengths, with 0 to all rows accepted, in one pass, time and again."""
    generator = torch.Generator().manual_seed(5)
    context, done = context_of(target, 3), [0, 0, 0]
    while min(done) < 15:
        counts = torch.randint(0, 4, (3,), generator=generator).tolist()
        rows = torch.stack([text[0, start : start + 4].clone() for start in done])
        for row, count in enumerate(counts):
            rows[row, count:] = 63 - rows[row, count:]
        counts = [count if start + 4 < 20 else 0 for count, start in zip(counts, done, strict=True)]
        logits = step(target, context, rows, counts)
        for row, count in enumerate(counts):
            assert torch.equal(logits[row, :count], whole[done[row] : done[row] + count])
            done[row] = min(done[row] + count, 16)
        assert context.lengths_B.tolist() == done


def test_a_place_is_empty_for_its_next_request(target: KimiTarget, text: Tensor, whole: Tensor) -> None:
    context = context_of(target, 2)
    step(target, context, text.flip(1).expand(2, -1).contiguous())
    context.clear(1)
    assert context.lengths_B.tolist() == [20, 0]
    logits = step(target, context, text[:, :8].expand(2, -1).contiguous(), [0, 8])
    assert torch.equal(logits[1], whole[:8])


def test_going_on_with_some_of_the_requests(target: KimiTarget, text: Tensor, whole: Tensor) -> None:
    context, reversed_text = context_of(target, 3), text.flip(1)
    step(target, context, torch.cat((reversed_text, text, reversed_text))[:, :9].contiguous())
    context.keep(torch.tensor([1]))
    logits = target.logits(target(text[:, 9:], text[:, 9:], context))
    context.commit_all()
    assert torch.equal(logits[0], whole[9:]) and context.lengths_B.tolist() == [20]


@pytest.mark.parametrize("fault", ["count", "history", "state"])
def test_a_planted_fault_of_the_rollback_is_seen(
    fault: str, target: KimiTarget, text: Tensor, whole: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(states: Tensor, histories: Tensor, slots: Tensor, records: object, counts: Tensor) -> None:
        kept = (states.clone(), histories.clone())
        moved = counts + (counts < WINDOW) if fault == "count" else counts  # a refused draft stays
        commit_delta(states, histories, slots, records, moved)  # type: ignore[arg-type]
        if fault == "history":
            histories.copy_(kept[1])
        elif fault == "state":
            states.copy_(kept[0])

    monkeypatch.setattr("paceline.models.stepwise.commit_delta", wrong)
    with pytest.raises(AssertionError):
        test_going_on_after_a_verdict_equals_plain_decoding(2, target, text, whole)


def test_more_rows_than_there_is_room_for_are_refused(target: KimiTarget, text: Tensor) -> None:
    context = context_of(target, 1, 12)
    step(target, context, text[:, :10])
    with pytest.raises(CapacityError, match="13 rows; the context holds 12 per request"):
        target(text[:, :3], text[:, :3], context)


def test_a_pass_must_be_committed_before_the_next(target: KimiTarget, text: Tensor) -> None:
    context = context_of(target)
    target(text[:, :3], text[:, :3], context)
    with pytest.raises(AssertionError, match="commit the last one first"):
        target(text[:, :2], text[:, :2], context)


def _states(context: StepwiseContext) -> Tensor:
    assert context.states_LBNKK is not None
    return context.states_LBNKK


def _histories(context: StepwiseContext) -> Tensor:
    assert context.histories_LBHC is not None
    return context.histories_LBHC
