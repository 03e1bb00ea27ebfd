"""Attention over blocks and new rows in one native call, against the formula."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from paceline.ops.attention import attention_reference
from paceline.ops.native.attention import BlockedAttention, seen_spans
from paceline.ops.native.rows import can_run

pytestmark = pytest.mark.skipif(
    not can_run(torch.empty(1, dtype=torch.bfloat16)), reason="no native operations on this machine"
)

BLOCK, MOST_BLOCKS = 16, 8


@dataclass
class Case:
    """Requests with random keys in blocks that lie anywhere, and new rows behind them."""

    lengths: list[int]
    num_rows: int = 1
    num_heads: int = 6
    num_kv_heads: int = 2
    head_size: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        B, T, H = len(self.lengths), self.num_rows, self.head_size
        self.generator = torch.Generator().manual_seed(self.seed)
        num_blocks = 1 + B * MOST_BLOCKS
        self.planes = self.random(2, 2, self.num_kv_heads, num_blocks, BLOCK, H)
        places = 1 + torch.randperm(B * MOST_BLOCKS, generator=self.generator)
        self.table = torch.zeros(B + 2, MOST_BLOCKS, dtype=torch.int32)
        self.slots = torch.arange(B, 0, -1)
        self.table[self.slots] = places.view(B, MOST_BLOCKS).int()
        self.q = self.random(B, T, self.num_heads, H)
        self.k, self.v = self.random(2, B, T, self.num_kv_heads, H)
        positions = torch.tensor(self.lengths).unsqueeze(1) + torch.arange(T)
        self.lows, self.highs = torch.zeros_like(positions).int(), (positions + 1).int()
        self.write_rows = self.rows_of(positions)

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator).bfloat16()

    def rows_of(self, positions_BT: Tensor) -> Tensor:
        blocks = self.table[self.slots].long().gather(1, positions_BT // BLOCK)
        return blocks * BLOCK + positions_BT % BLOCK

    def keys(self, request: int, layer: int) -> tuple[Tensor, Tensor]:
        """Stored and new keys and values of a request, [M, S, H]."""
        length = self.lengths[request]
        rows = self.rows_of(torch.arange(length).expand(len(self.lengths), -1))[request]
        stored = self.planes[layer].flatten(2, 3)[:, :, rows]
        new = torch.stack((self.k[request], self.v[request])).transpose(1, 2)
        keys, values = torch.cat((stored, new), dim=2)
        return keys, values

    def run(self, layer: int = 1, *, writes: bool = False, sink_N: Tensor | None = None) -> Tensor:
        attend = BlockedAttention(
            self.planes,
            self.table,
            self.slots,
            torch.tensor(self.lengths),
            num_rows=self.num_rows,
            end=max(self.lengths) + self.num_rows,
            write_rows_BT=self.write_rows if writes else None,
        )
        return attend(layer, self.q, self.k, self.v, self.lows, self.highs, sink_N=sink_N)

    def exact(self, layer: int = 1, sink_N: Tensor | None = None) -> Tensor:
        mixed = []
        for request in range(len(self.lengths)):
            keys, values = self.keys(request, layer)
            position_S = torch.arange(keys.shape[1])
            seen_TS = (position_S >= self.lows[request, :, None]) & (position_S < self.highs[request, :, None])
            q = self.q[request].transpose(0, 1).unsqueeze(0).float()
            mixed.append(attention_reference(q, keys[None].float(), values[None].float(), seen_TS, sink_N))
        return torch.cat(mixed).transpose(1, 2)

    def check(self, found: Tensor, **options: Tensor | None) -> None:
        assert found.shape == self.q.shape and found.is_contiguous()
        torch.testing.assert_close(found.float(), self.exact(**options), rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("lengths", [[0], [1], [15, 16, 17], [3, 100, 0, 64]])
@pytest.mark.parametrize("num_rows", [1, 2, 8, 13])
def test_rows_see_what_is_stored_and_what_came_before(lengths: list[int], num_rows: int) -> None:
    case = Case(lengths, num_rows)
    case.check(case.run())


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (9, 3), (8, 1), (5, 5)])
@pytest.mark.parametrize("head_size", [2, 16, 80, 96, 128, 576])
def test_any_heads(num_heads: int, num_kv_heads: int, head_size: int) -> None:
    case = Case([20, 5], 3, num_heads, num_kv_heads, head_size)
    case.check(case.run())


def test_rows_of_a_block_may_see_each_other_and_windows_cut_both_sides() -> None:
    case = Case([40, 7], 5)
    positions = torch.tensor(case.lengths).unsqueeze(1) + torch.arange(5)
    for window in (1, 2, 3, 7, 30, 100):
        case.lows = (positions - window + 1).clamp(min=3).int()
        case.highs = torch.minimum(torch.tensor([[45], [12]]), positions + window).int()
        case.check(case.run())


def test_sinks_take_weight_and_give_nothing() -> None:
    case = Case([20, 5], 3)
    sinks = torch.tensor([0.0, 5.0, -5.0, 100.0, -100.0, 1.0])
    case.check(case.run(sink_N=sinks), sink_N=sinks)
    with pytest.raises(AssertionError):
        case.check(case.run(), sink_N=sinks)


def test_new_rows_are_kept_and_nothing_else_is_written() -> None:
    case = Case([14, 30], 4)
    before = case.planes.clone()
    case.run(layer=1, writes=True)
    rows = case.planes.flatten(3, 4)
    for kind, new in enumerate((case.k, case.v)):
        assert torch.equal(rows[1, kind][:, case.write_rows], new.permute(2, 0, 1, 3))
    rows[1, :, :, case.write_rows.flatten()] = before.flatten(3, 4)[1, :, :, case.write_rows.flatten()]
    assert torch.equal(case.planes, before)


def test_nothing_that_a_row_does_not_see_is_read() -> None:
    case = Case([20, 33], 3)
    case.lows += 4
    sound = case.run()
    rows = case.planes.flatten(3, 4)
    seen = torch.zeros(rows.shape[3], dtype=torch.bool)
    for request, length in enumerate(case.lengths):
        seen[case.rows_of(torch.arange(4, length).expand(2, -1))[request]] = True
    rows[:, :, :, ~seen] = torch.nan
    assert torch.equal(case.run(), sound)
    case.k[:, 2], case.v[:, 2] = torch.nan, torch.nan  # a later row's keys
    assert torch.equal(case.run()[:, :2], sound[:, :2])
    case.v[1, 0] = torch.nan  # and one that is seen shows
    assert case.run()[1].isnan().any() and torch.equal(case.run()[0, :2], sound[0, :2])


def test_a_rows_bits_do_not_depend_on_company_or_on_where_its_keys_lie() -> None:
    whole = Case([0, 0], 45, seed=3)
    together = whole.run()
    for start, num_rows in ((0, 1), (0, 8), (17, 1), (30, 8), (44, 1)):  # the same rows over stored keys
        part = Case([start], num_rows, seed=3)
        part.planes, part.table, part.slots = whole.planes.clone(), whole.table, whole.slots[1:]
        part.planes.flatten(3, 4)[1, :, :, whole.write_rows[1]] = torch.stack((whole.k[1], whole.v[1])).transpose(1, 2)
        part.q, part.k, part.v = (x[1:, start : start + num_rows] for x in (whole.q, whole.k, whole.v))
        assert torch.equal(part.run()[0], together[1, start : start + num_rows])


@pytest.mark.parametrize("group", [2, 3, 4, 5, 6, 7, 8, 9, 25])
@pytest.mark.parametrize("head_size", [30, 64, 98])
def test_query_heads_taken_together_have_the_bits_that_each_has_alone(group: int, head_size: int) -> None:
    case = Case([0, 20, 40, 100], 1, 2 * group, 2, head_size)  # 1, 2, 3 and 7 groups of keys
    case.lows += torch.tensor([[0], [3], [17], [0]]).int()
    together = case.run()
    case.check(together)
    queries = case.q
    for head in range(group):
        case.q = queries[:, :, head::group]
        assert torch.equal(case.run(), together[:, :, head::group]), head


@pytest.mark.parametrize("num_rows", [2, 3, 5, 6, 7])
def test_rows_taken_together_see_apart(num_rows: int) -> None:
    case = Case([40, 90], num_rows, 2, 2)
    spans = torch.tensor([[0, 41], [38, 39], [5, 12], [0, 1], [20, 41], [11, 33], [40, 41]])[:num_rows]
    case.lows, case.highs = spans.int().T.unsqueeze(1).repeat(1, 2, 1)
    together = case.run()
    case.check(together)
    for row, (low, high) in enumerate(spans.tolist()):
        case.lows[:], case.highs[:] = low, high
        assert torch.equal(case.run()[:, row], together[:, row]), row


@pytest.mark.parametrize("lengths", [[70], [120, 0, 3], [5, 90, 90, 41, 0]])
@pytest.mark.parametrize("num_rows", [1, 3, 8])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(9, 3), (2, 1)])
def test_threads_share_every_row_and_change_none(
    lengths: list[int], num_rows: int, num_heads: int, num_kv_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(lengths, num_rows, num_heads, num_kv_heads)
    untouched = case.planes.clone()
    alone = case.run(writes=True)
    case.check(alone)
    kept = case.planes.clone()
    for num_threads in (2, 3, 5, 64):
        monkeypatch.setattr(torch, "get_num_threads", lambda number=num_threads: number)
        case.planes.copy_(untouched)
        assert torch.equal(case.run(writes=True), alone), num_threads
        assert torch.equal(case.planes, kept), num_threads


def test_large_scores_do_not_overflow() -> None:
    case = Case([20], 2)
    case.q = (100 * case.q.float()).bfloat16()
    case.check(case.run())


@pytest.mark.parametrize("window", [None, 1, 3, 50])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("has_firsts", [False, True])
def test_what_rows_see(window: int | None, is_causal: bool, has_firsts: bool) -> None:
    starts, num_rows = torch.tensor([[0, 9], [2, 9], [40, 9]])[:, 0], 4
    firsts = torch.tensor([0, 3, 39]) if has_firsts else None
    lows, highs = seen_spans(starts, firsts, num_rows, window, is_causal=is_causal)
    assert lows.is_contiguous() and highs.is_contiguous() and lows.dtype == highs.dtype == torch.int32
    for request, start in enumerate(starts.tolist()):
        for row in range(num_rows):
            at, first = start + row, 0 if firsts is None else int(firsts[request])
            seen = [
                position
                for position in range(first, start + num_rows)
                if (position <= at or not is_causal) and (window is None or abs(position - at) < window)
            ]
            found = range(int(lows[request, row]), int(highs[request, row]))
            assert list(found) == seen, (request, row)
