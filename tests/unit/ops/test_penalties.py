from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.ops import token_masks
from paceline.ops.penalties import PenaltyRows, apply_penalties_

VOCAB = 6


def rows_of(
    prompt: list[int], output: list[int], *, repetition: float = 1.0, frequency: float = 0.0, presence: float = 0.0
) -> PenaltyRows:
    return PenaltyRows(
        torch.tensor([[v in prompt for v in range(VOCAB)]]),
        torch.tensor([[output.count(v) for v in range(VOCAB)]], dtype=torch.int32),
        torch.tensor([repetition]),
        torch.tensor([frequency]),
        torch.tensor([presence]),
    )


def penalise(logits: list[float], drafts: list[int], rows: PenaltyRows) -> torch.Tensor:
    z = torch.tensor([[logits] * (len(drafts) + 1)])
    return apply_penalties_(z, torch.tensor([drafts], dtype=torch.int64), rows)[0]


@given(
    value=st.floats(-1e4, 1e4, width=32) | st.sampled_from([0.0, -0.0, math.inf, -math.inf]),
    ratio=st.floats(0.125, 8.0, width=32),
)
def test_repetition_divides_what_is_positive_and_multiplies_the_rest(value: float, ratio: float) -> None:
    z, r = torch.tensor(value), torch.tensor(ratio)
    found = penalise([value] * VOCAB, [], rows_of([1], [2], repetition=ratio))[0]
    wanted = z / r if value > 0 else z * r
    assert torch.equal(found[[1, 2]].view(torch.int32), wanted.expand(2).view(torch.int32))
    assert torch.equal(found[[0, 3]].view(torch.int32), z.expand(2).view(torch.int32))


def test_frequency_counts_outputs_and_presence_asks_once() -> None:
    rows = rows_of([0, 1], [1, 2, 2], frequency=0.5, presence=2.0)
    assert penalise([0.0] * VOCAB, [], rows).tolist() == [[0.0, -2.5, -3.0, 0.0, 0.0, 0.0]]


def test_a_repeated_draft_counts_as_often_as_it_stands_before_the_row() -> None:
    rows = rows_of([0], [3], frequency=1.0, presence=0.25)
    found = penalise([0.0] * VOCAB, [3, 4, 3, 3], rows)
    assert found[:, 3].tolist() == [-1.25, -2.25, -2.25, -3.25, -4.25]
    assert found[:, 4].tolist() == [0.0, 0.0, -1.25, -1.25, -1.25]
    assert (found[:, [0, 1, 2, 5]] == 0).all()


def test_a_draft_makes_the_token_seen() -> None:
    found = penalise([3.0, -1.0, 2.0, 2.0, 2.0, 2.0], [0, 1], rows_of([], [], repetition=2.0))
    assert found[:, 0].tolist() == [3.0, 1.5, 1.5]
    assert found[:, 1].tolist() == [-1.0, -1.0, -2.0]


@pytest.mark.parametrize("drafts", [[-1, -1, -1], [-1, 0, -1], [0, -1, 0]])
def test_a_missing_draft_is_not_token_zero(drafts: list[int]) -> None:
    found = penalise([1.0] * VOCAB, drafts, rows_of([], [0], frequency=1.0))
    assert found[:, 0].tolist() == [-float(drafts[:row].count(0)) for row in range(4)]
    assert (found[:, 1:] == 1).all()


def test_many_drafts_and_counts_stay_exact() -> None:
    rows = rows_of([], [5] * 300, frequency=2.0)
    found = penalise([0.0] * VOCAB, [5] * 32, rows)
    assert found[:, 5].tolist() == [-2.0 * (300 + row) for row in range(33)]


@given(seed=st.integers(0, 2**20), vocab_size=st.sampled_from([31, 64, 65, 100]))
def test_blocks_of_the_vocabulary_can_not_be_seen(seed: int, vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(2, 3, vocab_size, generator=generator)
    rows = PenaltyRows(
        torch.rand(2, vocab_size, generator=generator) < 0.3,
        torch.randint(0, 3, (2, vocab_size), generator=generator, dtype=torch.int32),
        torch.tensor([1.3, 0.7]),
        torch.tensor([0.4, -0.1]),
        torch.tensor([0.0, 0.3]),
    )
    drafts = torch.randint(-1, vocab_size, (2, 2), generator=generator)
    whole = apply_penalties_(z.clone(), drafts, rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_masks, "_CPU_BLOCK_BYTES", 1)
        assert torch.equal(apply_penalties_(z.clone(), drafts, rows), whole)
