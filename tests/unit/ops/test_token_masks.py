from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.ops import token_masks
from paceline.ops.token_masks import (
    add_at_ids_,
    column_blocks,
    forbid_by_mask_,
    forbid_ids_,
    num_mask_words,
    pack_token_mask,
)


def addend(mask: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """What a mask adds to logits of -0.0."""
    return forbid_by_mask_(torch.full((*mask.shape[:-1], vocab_size), -0.0), mask)


@given(allowed=st.lists(st.booleans(), min_size=1, max_size=130), num_rows=st.integers(1, 3))
def test_masks_hold_one_bit_per_token_lowest_first(allowed: list[bool], num_rows: int) -> None:
    vocab_size = len(allowed)
    mask = pack_token_mask(torch.tensor([allowed] * num_rows))
    assert mask.dtype is torch.int32
    assert mask.shape == (num_rows, num_mask_words(vocab_size))
    for words in mask.tolist():
        assert [bool(words[v // 32] >> (v % 32) & 1) for v in range(vocab_size)] == allowed
        assert (words[-1] & 0xFFFFFFFF) >> ((vocab_size - 1) % 32 + 1) == 0
    found = addend(mask, vocab_size)
    assert torch.equal(found == 0, torch.tensor([allowed] * num_rows))
    assert torch.equal(found.signbit(), torch.ones(num_rows, vocab_size, dtype=torch.bool))  # -inf and -0.0


def test_the_highest_bit_of_a_word_and_the_last_word_count() -> None:
    allowed = torch.zeros(1, 70, dtype=torch.bool).index_fill(1, torch.tensor([31, 63, 64, 69]), True)
    assert pack_token_mask(allowed).tolist() == [[-(2**31), -(2**31), 0b100001]]
    assert (addend(pack_token_mask(allowed), 70) == 0).nonzero()[:, 1].tolist() == [31, 63, 64, 69]


def test_masks_of_any_rank_and_stride() -> None:
    allowed = torch.rand(3, 4, 45, generator=torch.Generator().manual_seed(0)) < 0.5
    mask = pack_token_mask(allowed)
    assert mask.shape == (3, 4, 2)
    assert torch.equal(addend(mask.transpose(0, 1), 45) == 0, allowed.transpose(0, 1))
    assert torch.equal(addend(mask[:, 1:3], 45) == 0, allowed[:, 1:3])


def test_a_mask_of_ones_changes_no_bit() -> None:
    z = torch.tensor([[-0.0, 0.0, math.inf, -math.inf, 1e-42, -3.5]])
    allowed = forbid_by_mask_(z.clone(), torch.full((1, 1), -1, dtype=torch.int32))
    assert torch.equal(allowed.view(torch.int32), z.view(torch.int32))
    assert not torch.equal((z + 0.0).view(torch.int32), z.view(torch.int32))  # why the addend is -0.0


def test_lists_act_on_their_ids_only() -> None:
    z = torch.tensor([[[-0.0, 1.0, math.nan, -0.0]]])
    ids = torch.tensor([[[1, -1, 3, 2, 1]]])
    forbid_ids_(z, ids, torch.tensor([[[True, True, False, True, True]]]))
    assert z[0, 0].tolist() == pytest.approx([0.0, -math.inf, math.nan, 0.0], nan_ok=True)
    assert z[0, 0, [0, 3]].signbit().all()
    add_at_ids_(z, torch.tensor([[[3, -1]]]), torch.tensor([[[0.5, 9.0]]]))
    assert z[0, 0, [0, 1, 3]].tolist() == [0.0, -math.inf, 0.5]
    assert z[0, 0, 0].signbit()


def test_one_mask_can_stand_for_all_rows() -> None:
    allowed = torch.rand(2, 1, 45, generator=torch.Generator().manual_seed(1)) < 0.5
    z = forbid_by_mask_(torch.zeros(2, 3, 45), pack_token_mask(allowed))
    assert torch.equal(z == 0, allowed.expand(2, 3, 45))


@given(vocab_size=st.integers(1, 200), num_bytes=st.sampled_from([1, 400, 1000]))
def test_blocks_of_the_vocabulary_can_not_be_seen(vocab_size: int, num_bytes: int) -> None:
    allowed = torch.rand(2, 3, vocab_size, generator=torch.Generator().manual_seed(vocab_size)) < 0.5
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_masks, "_CPU_BLOCK_BYTES", num_bytes)
        blocks = column_blocks(torch.empty(2, 3, vocab_size))
        assert [block.start for block in blocks[1:]] == [block.stop for block in blocks[:-1]]
        assert blocks[0].start == 0 and blocks[-1].stop == vocab_size
        assert torch.equal(addend(pack_token_mask(allowed), vocab_size) == 0, allowed)
    assert len(column_blocks(torch.empty(2, 3, vocab_size, device="meta"))) == 1
