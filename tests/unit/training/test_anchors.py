"""Anchors, labels and masks of training blocks: closed forms, brute force, and the tables of the serving rule."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import create_mask

from paceline.training.anchors import (
    all_anchors,
    anchor_candidates,
    block_visibility,
    make_blocks,
    sample_anchors,
    sees_context,
    sees_row,
)


def marks(text: str) -> Tensor:
    """One row: '.' is context, '#' is supervised."""
    return torch.tensor([[character == "#" for character in text]])


def counting_tokens(num_rows: int, width: int) -> Tensor:
    """x[t + 1] = x[t] + 1, so that a label tells where it was read."""
    return 100 * torch.arange(1, num_rows + 1)[:, None] + torch.arange(width)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("...####", [3, 4, 5]),  # not the last prompt token, not the last response token
        ("..##.###..", [2, 5, 6]),
        ("..#.#.", []),
        ("......", []),
        ("####", [1, 2]),  # nor the first token of all: serving has read one before it drafts
    ],
)
def test_an_anchor_is_supervised_and_has_a_supervised_successor(text: str, expected: list[int]) -> None:
    assert anchor_candidates(marks(text))[0].nonzero().flatten().tolist() == expected
    anchors, valid = all_anchors(marks(text))
    assert anchors[valid].tolist() == expected
    assert anchors[~valid].tolist() == [0] * int((~valid).sum())


def test_all_anchors_pads_shorter_rows_with_invalid_ones() -> None:
    supervised = torch.cat((marks("..####"), marks("....##"), marks("......")))
    anchors, valid = all_anchors(supervised)
    assert anchors.tolist() == [[2, 3, 4], [4, 0, 0], [0, 0, 0]]
    assert valid.tolist() == [[True] * 3, [True, False, False], [False] * 3]


@given(
    rows=st.lists(st.text(alphabet=".#", min_size=12, max_size=12), min_size=1, max_size=4), count=st.integers(1, 15)
)
def test_sampled_anchors_are_distinct_sorted_candidates_as_many_as_there_are(rows: list[str], count: int) -> None:
    supervised = torch.cat([marks(row) for row in rows])
    anchors, valid = sample_anchors(supervised, count, torch.Generator().manual_seed(3))
    assert anchors.shape == valid.shape == (len(rows), min(count, 12))
    candidates = anchor_candidates(supervised)
    for row in range(len(rows)):
        chosen = anchors[row][valid[row]].tolist()
        assert chosen == sorted(set(chosen))
        assert all(candidates[row, anchor] for anchor in chosen)
        assert len(chosen) == min(int(candidates[row].sum()), count, 12)
        assert anchors[row][~valid[row]].tolist() == [0] * int((~valid[row]).sum())


def test_sampling_is_uniform_and_follows_its_generator() -> None:
    supervised = marks("..########")
    counts = torch.zeros(10)
    for seed in range(2000):
        anchors, _ = sample_anchors(supervised, 3, torch.Generator().manual_seed(seed))
        counts[anchors[0]] += 1
    assert counts[:2].sum() == 0 and counts[9] == 0
    expected = 2000 * 3 / 7
    assert ((counts[2:9] - expected).abs() < 5 * (expected * (1 - 3 / 7)) ** 0.5).all()
    again = [sample_anchors(supervised, 3, torch.Generator().manual_seed(11))[0].tolist() for _ in range(2)]
    assert again[0] == again[1]


def test_a_block_is_laid_out_as_it_is_served() -> None:
    """Anchor 10, block of 4: positions 10..13, labels at 11, 12, 13, context 0..9."""
    tokens, supervised = counting_tokens(1, 20), torch.ones(1, 20, dtype=torch.bool)
    blocks = make_blocks(tokens, supervised, torch.tensor([[10]]), torch.tensor([[True]]), 4)
    assert blocks.positions_BAQ.tolist() == [[[10, 11, 12, 13]]]
    assert blocks.counts_BAQ.tolist() == [[[False, True, True, True]]]
    assert blocks.labels_BAQ[0, 0, 1:].tolist() == [111, 112, 113]
    visible = block_visibility(torch.tensor([[10]]), 4, 20, window=None, causal=False)[0]
    assert visible.shape == (4, 24)
    for row in range(4):
        assert visible[row].nonzero().flatten().tolist() == [*range(10), 20, 21, 22, 23]


def test_labels_are_the_closed_form_in_every_row_and_block() -> None:
    tokens, supervised = counting_tokens(3, 30), torch.ones(3, 30, dtype=torch.bool)
    anchors, valid = all_anchors(supervised)
    blocks = make_blocks(tokens, supervised, anchors, valid, 5)
    expected = 100 * torch.arange(1, 4)[:, None, None] + anchors[..., None] + torch.arange(5)
    assert torch.equal(blocks.labels_BAQ[blocks.counts_BAQ], expected[blocks.counts_BAQ])
    assert not torch.equal(blocks.labels_BAQ[blocks.counts_BAQ], expected[blocks.counts_BAQ] + 1)


@pytest.mark.parametrize(
    ("text", "anchor", "expected"),
    [
        ("..########", 2, ".###"),
        ("..###.####", 2, ".##."),  # the gap ends the run: what follows is another turn
        ("..###.####", 3, ".#.."),
        ("..###.####", 6, ".###"),
        ("......####", 8, ".#.."),  # past the end of the row
        ("..####....", 4, ".#.."),  # past the end of the response
    ],
)
def test_rows_count_until_the_first_gap(text: str, anchor: int, expected: str) -> None:
    blocks = make_blocks(counting_tokens(1, 10), marks(text), torch.tensor([[anchor]]), torch.tensor([[True]]), 4)
    assert "".join(".#"[int(c)] for c in blocks.counts_BAQ[0, 0].tolist()) == expected


def test_the_last_rows_keep_their_positions_past_the_end() -> None:
    """They are keys of rows that count, so their angles must be those of serving, not those of the last token."""
    blocks = make_blocks(counting_tokens(1, 10), marks("..########"), torch.tensor([[8]]), torch.tensor([[True]]), 4)
    assert blocks.positions_BAQ.tolist() == [[[8, 9, 10, 11]]]


def test_invalid_blocks_count_nothing() -> None:
    supervised = torch.ones(1, 10, dtype=torch.bool)
    blocks = make_blocks(counting_tokens(1, 10), supervised, torch.tensor([[4, 0]]), torch.tensor([[True, False]]), 4)
    assert blocks.counts_BAQ[0, 0].any() and not blocks.counts_BAQ[0, 1].any()


TABLE = {  # window 4, anchor 10: what each row position sees, z-lab and vLLM
    False: {10: range(7, 14), 11: range(8, 14), 12: range(9, 14), 13: range(10, 14)},
    True: {10: range(7, 11), 11: range(8, 12), 12: range(9, 13), 13: range(10, 14)},
}


def seen_positions(visible: Tensor, anchor: int, context_size: int) -> list[list[int]]:
    """Key positions per row of a single block."""
    key_position = [*range(context_size), *range(anchor, anchor + visible.shape[0])]
    return [[key_position[int(key)] for key in row.nonzero().flatten()] for row in visible]


@pytest.mark.parametrize("causal", [False, True])
def test_windows_of_the_serving_rule(causal: bool) -> None:
    visible = block_visibility(torch.tensor([[10]]), 4, 20, window=4, causal=causal)[0]
    assert seen_positions(visible, 10, 20) == [list(TABLE[causal][position]) for position in range(10, 14)]


def test_a_window_smaller_than_the_block_hides_far_rows_in_both_directions() -> None:
    visible = block_visibility(torch.tensor([[10]]), 4, 20, window=2, causal=False)[0]
    assert seen_positions(visible, 10, 20) == [[9, 10, 11], [10, 11, 12], [11, 12, 13], [12, 13]]


@given(
    anchors=st.lists(st.integers(0, 11), min_size=1, max_size=4),
    block_size=st.integers(1, 5),
    window=st.one_of(st.none(), st.integers(1, 14)),
    causal=st.booleans(),
)
def test_visibility_agrees_with_its_definition(
    anchors: list[int], block_size: int, window: int | None, causal: bool
) -> None:
    context_size = 12
    visible = block_visibility(torch.tensor([anchors]), block_size, context_size, window=window, causal=causal)[0]
    num_blocks = len(anchors)
    assert visible.shape == (num_blocks * block_size, context_size + num_blocks * block_size)
    for block in range(num_blocks):
        for row in range(block_size):
            position, seen = anchors[block] + row, visible[block * block_size + row]
            for key in range(context_size):
                near = window is None or position - key < window
                assert bool(seen[key]) == (key < anchors[block] and near)
            for other_block in range(num_blocks):
                for other_row in range(block_size):
                    near = window is None or abs(row - other_row) < window
                    expected = block == other_block and near and not (causal and other_row > row)
                    assert bool(seen[context_size + other_block * block_size + other_row]) == expected
            assert seen[context_size + block * block_size + row]  # itself, always


@given(
    anchors=st.lists(st.integers(0, 11), min_size=1, max_size=4),
    documents=st.lists(st.integers(-1, 2), min_size=12, max_size=12),
    window=st.one_of(st.none(), st.integers(1, 14)),
)
def test_documents_hide_context_and_nothing_else(anchors: list[int], documents: list[int], window: int | None) -> None:
    kind: dict[str, Any] = {"window": window, "causal": False}
    plain = block_visibility(torch.tensor([anchors]), 3, 12, **kind)[0]
    packed = block_visibility(torch.tensor([anchors]), 3, 12, documents_BS=torch.tensor([documents]), **kind)[0]
    for block, anchor in enumerate(anchors):
        same = torch.tensor([document == documents[anchor] for document in documents])
        rows = slice(3 * block, 3 * block + 3)
        assert torch.equal(packed[rows, :12], plain[rows, :12] & same)
        assert torch.equal(packed[rows, 12:], plain[rows, 12:])


@pytest.mark.parametrize(("window", "causal"), [(None, False), (4, True)])
def test_the_mask_is_a_function_of_indices(window: int | None, causal: bool) -> None:
    """A kernel that asks for one pair of a row and a key at a time gets the dense mask."""
    documents, anchors, Q, S = torch.tensor([[0] * 5 + [1] * 6 + [-1] * 2] * 2), torch.tensor([[2, 8], [10, 0]]), 3, 13

    def sees(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        anchor, key = anchors[b, q // Q], k.clamp(max=S - 1)
        pair = documents[b, anchor], documents[b, key]
        context = sees_context(anchor, q % Q, key, window=window, documents=pair)
        own = k - S
        return torch.where(k < S, context, sees_row(q // Q, q % Q, own // Q, own % Q, window=window, causal=causal))

    mask = create_mask(sees, 2, None, 2 * Q, S + 2 * Q, device="cpu")[:, 0]
    dense = block_visibility(anchors, Q, S, window=window, causal=causal, documents_BS=documents)
    assert torch.equal(mask, dense)


def test_rows_of_a_batch_have_masks_of_their_own() -> None:
    both = block_visibility(torch.tensor([[3, 7], [5, 0]]), 2, 9, window=3, causal=True)
    for row, anchors in enumerate([[3, 7], [5, 0]]):
        alone = block_visibility(torch.tensor([anchors]), 2, 9, window=3, causal=True)[0]
        assert torch.equal(both[row], alone)
