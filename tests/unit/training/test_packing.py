"""Which conversations share a row: full rows, nothing twice, nothing split, in an order that a resumed run can find."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import DataError
from paceline.training.data import Conversations
from paceline.training.packing import PackedOrder, pack_lengths

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=60)


def conversations(*lengths: int) -> Conversations:
    """Conversation i holds the ids 100 i, 100 i + 1, ...; all but its first token is supervised."""
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    tokens = np.concatenate([100 * i + np.arange(length) for i, length in enumerate(lengths)]).astype(np.int32)
    supervised = np.ones(len(tokens), bool)
    supervised[starts[:-1]] = False
    return Conversations(tokens, supervised, starts)


# --- filling rows ---


def test_a_length_goes_where_it_leaves_the_least_room() -> None:
    assert pack_lengths(np.array([6, 5, 4, 3, 2]), 10) == [[0, 2], [1, 3, 4]]
    assert pack_lengths(np.array([7, 6, 4, 3]), 10) == [[0, 3], [1, 2]]
    assert pack_lengths(np.array([10, 10, 1]), 10) == [[0], [1], [2]]


@given(lengths=LENGTHS, capacity=st.integers(40, 60))
def test_rows_hold_everything_once_and_never_too_much(lengths: list[int], capacity: int) -> None:
    longest_first = -np.sort(-np.array(lengths))
    rows = pack_lengths(longest_first, capacity)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    sums = [int(longest_first[row].sum()) for row in rows]
    assert max(sums) <= capacity
    assert sum(sum_ <= capacity // 2 for sum_ in sums) <= 1, "two rows that are half empty would be one"


def test_texts_of_ordinary_lengths_leave_little_padding() -> None:
    lengths = np.random.default_rng(0).integers(20, 500, 5000)
    order = PackedOrder(lengths, 1024, 4, 0)
    assert lengths.sum() / (order.num_rows * 1024) > 0.99


# --- the order ---


@given(lengths=LENGTHS, batch_size=st.integers(1, 3), seed=st.integers(0, 5), indices=st.lists(st.integers(0, 30)))
def test_the_order_is_a_pure_function_of_seed_and_index(
    lengths: list[int], batch_size: int, seed: int, indices: list[int]
) -> None:
    lengths = [*lengths, *[40] * batch_size]  # enough to fill a batch
    in_order, jumping = (PackedOrder(np.array(lengths), 40, batch_size, seed) for _ in range(2))
    expected = [in_order(index) for index in range(31)]
    for index in indices:
        assert jumping(index) == expected[index]
        assert PackedOrder(np.array(lengths), 40, batch_size, seed)(index) == expected[index]


@given(lengths=LENGTHS, batch_size=st.integers(1, 4), epoch=st.integers(0, 3))
def test_an_epoch_holds_each_conversation_at_most_once(lengths: list[int], batch_size: int, epoch: int) -> None:
    lengths = [*lengths, 50, 40, 40, 40]  # one is longer than a row
    order = PackedOrder(np.array(lengths), 40, batch_size, 3)
    count = order.batches_per_epoch
    batches = [order(epoch * count + offset) for offset in range(count)]
    assert all(len(rows) == batch_size for rows in batches)
    seen = [index for rows in batches for row in rows for index in row]
    assert len(seen) == len(set(seen))
    if order.num_rows % batch_size == 0:
        assert sorted(seen) == list(range(len(lengths)))
    for rows in batches:
        for row in rows:
            assert sum(min(lengths[index], 40) for index in row) <= 40
            assert row == tuple(sorted(row, key=lambda index: -min(lengths[index], 40)))
            assert len(row) == 1 or max(lengths[index] for index in row) < 40


def test_epochs_and_seeds_differ_and_neighbours_change() -> None:
    lengths = np.random.default_rng(1).integers(5, 12, 200)
    order, other = PackedOrder(lengths, 32, 4, 1), PackedOrder(lengths, 32, 4, 2)
    count = order.batches_per_epoch
    epochs = [[order(epoch * count + offset) for offset in range(count)] for epoch in range(2)]
    assert epochs[0] != epochs[1] and epochs[0] != [other(offset) for offset in range(count)]
    rows = [{frozenset(row) for batch in epoch for row in batch} for epoch in epochs]
    assert len(rows[0] & rows[1]) < len(rows[0]) / 4


def test_too_few_rows_for_a_batch_are_refused() -> None:
    with pytest.raises(DataError, match=r"4 conversations fill 2 rows of 20 tokens, schedule\.batch_size is 3"):
        PackedOrder(np.full(4, 10), 20, 3, 0)


# --- batches ---


def test_a_packed_row_says_where_each_conversation_lies() -> None:
    batch = conversations(3, 4, 9, 2).packed_batch([(1, 0), (2,), (3,)], 8)
    assert batch.token_ids_BS.tolist() == [
        [100, 101, 102, 103, 0, 1, 2, 0],
        [200, 201, 202, 203, 204, 205, 206, 207],  # cut on the right
        [300, 301, 0, 0, 0, 0, 0, 0],
    ]
    assert batch.positions_BS.tolist() == [
        [0, 1, 2, 3, 0, 1, 2, 0],
        [0, 1, 2, 3, 4, 5, 6, 7],
        [0, 1, 0, 0, 0, 0, 0, 0],
    ]
    assert batch.documents_BS.tolist() == [[0, 0, 0, 0, 1, 1, 1, -1], [0] * 8, [0, 0, -1, -1, -1, -1, -1, -1]]
    assert batch.supervised_BS.int().tolist() == [
        [0, 1, 1, 1, 0, 1, 1, 0],
        [0, 1, 1, 1, 1, 1, 1, 1],
        [0, 1, 0, 0, 0, 0, 0, 0],
    ]
    assert batch.lengths_B.tolist() == [7, 8, 2] and batch.rows == ((1, 0), (2,), (3,))
    assert batch.packing is not None and batch.documents_BS.dtype == torch.int32
    assert batch.to(torch.device("cpu")).rows == batch.rows


def test_a_row_of_one_conversation_is_its_own_document() -> None:
    batch = conversations(3, 70).batch([1, 0], 68)
    assert batch.packing is None and batch.rows == ((1,), (0,))
    assert torch.equal(batch.positions_BS, torch.arange(68).expand(2, -1))
    assert batch.documents_BS.tolist() == [[0] * 68, [0] * 3 + [-1] * 65]
    assert batch.documents_BS.dtype == torch.int32
