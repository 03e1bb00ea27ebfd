"""The native bookkeeping of a step against its definitions, to the number: random cases, and those at the edges."""

from __future__ import annotations

from typing import cast

import pytest
import torch
from tests.unit.ops.slot_cases import BLOCK_SIZE, VOCAB_SIZE, assert_same, moved, odd_slots, tables
from torch import Tensor

from paceline.errors import ShapeError
from paceline.ops import dispatch
from paceline.ops.block_rows import block_rows, block_rows_native, block_rows_reference
from paceline.ops.commit_step import commit_step, commit_step_native, commit_step_reference
from paceline.ops.finalise_block import Verdict
from paceline.ops.native import steps as native
from paceline.ops.native.build import library
from paceline.ops.slot_columns import IS_ALIVE, LENGTH, LIMIT, SlotColumns
from paceline.ops.step_rows import WaitingDrafts, step_rows, step_rows_native, step_rows_reference
from paceline.ops.store_drafts import store_drafts, store_drafts_reference
from paceline.ops.table_rows import table_rows_reference
from paceline.ops.verify_block import VerifiedBlock, verify_block, verify_greedily_native, verify_greedily_reference

pytestmark = pytest.mark.skipif(library() is None, reason="no native operations on this machine")

NUM_SLOTS = 40
TRASH = NUM_SLOTS
SEEDS = range(8)


def numbers(low: int, high: int, *shape: int) -> Tensor:
    return torch.randint(low, high, shape)


def slots_of_many() -> Tensor:
    """Every slot once, in any order, one of them counted from the end, and the trash slot again and again."""
    slots = torch.cat((torch.randperm(NUM_SLOTS), torch.full((9,), TRASH)))
    slots[slots == 7] -= NUM_SLOTS + 1
    return slots[torch.randperm(len(slots))]


def scattered(x: Tensor) -> Tensor:
    """The same numbers as a view with other numbers in between."""
    wide = torch.full((*x.shape, 3), 17, dtype=x.dtype)
    wide[..., 1] = x
    return wide[..., 1]


def copies(drafts: WaitingDrafts) -> WaitingDrafts:
    return WaitingDrafts(*moved(drafts, torch.device("cpu")))


@pytest.mark.parametrize("seed", SEEDS)
def test_rows_of_many_requests(seed: int) -> None:
    torch.manual_seed(seed)
    num_drafts, num_candidates = seed % 5, (0, 3)[seed % 2]
    columns, drafts = odd_slots(NUM_SLOTS, 4, num_candidates, seed=seed)
    columns.whole_SX[TRASH, IS_ALIVE] = seed % 2  # nobody's, but as it is
    columns.whole_SX[9, IS_ALIVE] = -1
    drafts.ids_SK[3], drafts.ids_SK[4] = -9, VOCAB_SIZE  # no drafts; the first is kept as it is
    slots, contexts = slots_of_many(), numbers(0, 30, NUM_SLOTS + 9)
    rest = (tables(NUM_SLOTS), num_drafts, VOCAB_SIZE, 20)
    expected = step_rows_reference(columns, drafts, slots, contexts, *rest)
    assert_same(step_rows_native(columns, drafts, slots, contexts, *rest), expected)
    assert_same(step_rows_native(columns, drafts, scattered(slots), scattered(contexts), *rest), expected)
    none = slots[:0]
    assert_same(
        step_rows_native(columns, drafts, none, contexts[:0], *rest),
        step_rows_reference(columns, drafts, none, contexts[:0], *rest),
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_physical_rows_of_many_requests(seed: int) -> None:
    torch.manual_seed(seed)
    table, block_size = tables(NUM_SLOTS)
    slots, starts = slots_of_many(), numbers(0, 60, NUM_SLOTS + 9)
    expected = table_rows_reference(table, slots, starts, 1 + seed, block_size)
    assert_same(native.table_rows(table, slots, starts, 1 + seed, block_size), expected)
    assert_same(native.table_rows(table, scattered(slots), scattered(starts), 1 + seed, block_size), expected)


@pytest.mark.parametrize("seed", SEEDS)
def test_block_rows_of_many_requests(seed: int) -> None:
    torch.manual_seed(seed)
    columns, _ = odd_slots(NUM_SLOTS, 1, 0, seed=seed)
    slots, rest = slots_of_many(), (1 + seed, VOCAB_SIZE + 3, VOCAB_SIZE, 30)
    expected = block_rows_reference(columns, slots, *rest)
    assert_same(block_rows_native(columns, slots, *rest), expected)
    assert_same(block_rows_native(columns, scattered(slots), *rest), expected)
    assert expected.is_beyond_B.any() and not expected.is_beyond_B.all()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("is_scattered", [False, True])
def test_commits_of_many_requests(seed: int, is_scattered: bool) -> None:
    """A slot that stands here several times is read before it is written, and the last one decides."""
    torch.manual_seed(seed)
    num_drafts = seed % 5
    columns, drafts = odd_slots(NUM_SLOTS, 4, 0, seed=seed)
    columns.whole_SX[TRASH, IS_ALIVE] = 1
    slots = slots_of_many()
    if seed == 4:
        slots = slots[numbers(0, len(slots), 60)]
    count = len(slots)
    accepted, fault = numbers(0, num_drafts + 1, count), numbers(0, 9, count).clamp(max=2) * numbers(0, 2, count)
    bonus = numbers(0, VOCAB_SIZE, count).masked_fill(fault > 0, -1)
    starts = numbers(0, 30, count)
    starts[::3] = columns.whole_SX[slots[::3], LIMIT] - accepted[::3] - 1  # the last token of the budget
    starts[::6] -= 1
    given = [slots, starts, numbers(-1, 30, count), numbers(-1, VOCAB_SIZE, count, num_drafts)]
    verdict = Verdict(accepted, bonus, fault, numbers(0, 3, count))
    whole, waiting = columns.whole_SX.clone(), drafts.ids_SK.clone()
    expected = commit_step_reference(columns.whole_SX, drafts.ids_SK, *given, verdict)
    if is_scattered:
        given, verdict = [scattered(part) for part in given], Verdict(*(scattered(part) for part in verdict))
    assert_same(commit_step_native(whole, waiting, *given, verdict), expected)
    assert_same((whole, waiting), (columns.whole_SX, drafts.ids_SK))
    assert 0 < whole[:, IS_ALIVE].sum() < NUM_SLOTS


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("is_scattered", [False, True])
def test_drafts_of_many_requests_are_stored(seed: int, is_scattered: bool) -> None:
    torch.manual_seed(seed)
    num_drafts, num_candidates, has_q = seed % 5, (0, 3, 3)[seed % 3], seed % 3 == 1
    _, drafts = odd_slots(NUM_SLOTS, 4, num_candidates, seed=seed)
    if num_candidates == 0:
        drafts = WaitingDrafts(drafts.ids_SK, None, None)
    slots = slots_of_many()
    count = len(slots)
    ids = numbers(-2, VOCAB_SIZE, count, num_drafts)
    candidates = numbers(-1, VOCAB_SIZE, count, num_drafts, num_candidates) if has_q else None
    log_q = torch.rand(count, num_drafts, num_candidates).log() if has_q else None
    wanted = numbers(-1, 6, count) if seed > 2 else None
    given = (slots, ids, candidates, log_q, wanted)
    expected, waiting = copies(drafts), torch.full((2, count, 3), 7)
    store_drafts_reference(expected, *given, waiting[0, :, 1])
    if is_scattered:
        given = tuple(None if part is None else scattered(part) for part in given)  # type: ignore[assignment]
    native.store_drafts(drafts, *given, waiting[1, :, 1])
    assert_same((drafts, waiting[1]), (expected, waiting[0]))


def test_no_drafts_leave_candidates_alone() -> None:
    """An empty tensor has no address; it is a q all the same."""
    _, drafts = odd_slots(NUM_SLOTS, 4, 3, seed=1)
    slots, expected = torch.tensor([2, 0]), copies(drafts)
    given = (slots, numbers(0, 5, 2, 0), numbers(0, 5, 2, 0, 3), torch.zeros(2, 0, 3), None)
    waiting = torch.full((2, 2, 3), 7)
    store_drafts_reference(expected, *given, waiting[0, :, 1])
    native.store_drafts(drafts, *given, waiting[1, :, 1])
    assert_same((drafts, waiting[1]), (expected, waiting[0]))


def test_drafts_that_have_no_room_are_refused() -> None:
    _, drafts = odd_slots(NUM_SLOTS, 4, 8, seed=1)
    slots, waiting, before = torch.tensor([2, 0]), torch.zeros(2).long(), copies(drafts)
    with pytest.raises(ShapeError, match="candidates of drafts"):
        native.store_drafts(
            drafts, slots, numbers(0, 5, 2, 3), numbers(0, 5, 2, 3, 2), torch.zeros(2, 3, 2), None, waiting
        )
    with pytest.raises(ShapeError, match="drafts"):
        native.store_drafts(drafts, slots, numbers(0, 5, 2, 5), None, None, None, waiting)
    assert_same(drafts, before)


def test_candidates_without_a_place() -> None:
    _, drafts = odd_slots(NUM_SLOTS, 4, 3, seed=1)
    slots, waiting = torch.tensor([2, 0]), torch.zeros(2, 2).long()
    log_q = torch.rand(2, 2, 3).log()
    for kept in (drafts, WaitingDrafts(drafts.ids_SK, drafts.candidate_ids_SKC, None)):
        found, expected = copies(kept), copies(kept)
        given = (slots, numbers(0, 5, 2, 2), numbers(0, 5, 2, 2, 3), log_q, None)
        store_drafts_reference(expected, *given, waiting[0])
        native.store_drafts(found, *given, waiting[1])
        assert_same((found, waiting[1]), (expected, waiting[0]))


def columns_of(verified: VerifiedBlock) -> Tensor:
    return torch.stack(tuple(verified.verdict))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_drafts", "width"), [(0, 1), (0, 33), (1, 16), (3, 15), (3, 100), (15, 1000)])
def test_verdicts_on_many_requests(num_drafts: int, width: int, dtype: torch.dtype) -> None:
    """Rows with ties, NaN anywhere, infinities of both signs and nothing at all; most drafts are the rows' best."""
    torch.manual_seed(width)
    count = 300
    scores = numbers(-3, 3, count, num_drafts + 1, width).to(dtype)
    kind = numbers(0, 30, count, num_drafts + 1)
    for index, value in enumerate((torch.nan, torch.inf, -torch.inf)):
        scores.scatter_(
            2,
            numbers(0, width, count, num_drafts + 1, 1),
            torch.where(kind.unsqueeze(2) == index, value, scores[..., :1].float()).to(dtype),
        )
    scores[kind == 3] = -torch.inf
    scores[kind == 4] = torch.nan
    best = scores.float().nan_to_num(nan=9.0).argmax(-1)[:, :num_drafts]
    drafts = torch.where(torch.rand(count, num_drafts) < 0.9, best, numbers(-1, width, count, num_drafts))
    nothing = torch.zeros(count)
    expected = columns_of(verify_greedily_reference(drafts, scores, *[nothing] * 4))
    assert {0, 1, 2} <= set(expected[2].tolist()) and {0, num_drafts} <= set(expected[0].tolist())
    padded = torch.full((count, num_drafts + 3, width + 5), torch.nan, dtype=dtype)
    padded[:, 1:-1, 2:-3] = scores
    views = (scores, padded[:, 1:-1, 2:-3], scattered(scores), scores.transpose(0, 1).contiguous().transpose(0, 1))
    for view in views:
        assert torch.equal(columns_of(verify_greedily_native(drafts, view, *[nothing] * 4)), expected)
    found = verify_greedily_native(scattered(drafts), scores, *[nothing] * 4)
    assert torch.equal(columns_of(found), expected)


def test_the_first_of_equal_scores_is_the_best_wherever_it_stands() -> None:
    for width in (16, 17, 40, 64, 130):
        for first in range(width):
            for dtype in (torch.float32, torch.bfloat16):
                scores = torch.full((1, 1, width), -1.0, dtype=dtype)
                scores[..., first:] = 0.5
                scores[..., first + 1 :: 3] = 0.25
                assert native.verify_greedily(torch.empty(1, 0, dtype=torch.int64), scores)[1] == first


def test_what_the_library_does_not_read_goes_to_the_definition() -> None:
    scores = torch.zeros(1, 1, 8)
    assert native.can_verify(scores) and native.can_verify(scores.bfloat16())
    assert not native.can_verify(scores.double()) and not native.can_verify(scores.half())
    assert not native.can_verify(scores[..., :0]) and not native.can_verify(scores.clone().requires_grad_())
    assert not native.can_verify(scores.to("meta")) and not native.can_run(scores.to("meta"))
    assert native.can_run(scores, None) and not native.can_run(scores, scattered(scores))


def test_slots_outside_are_refused_before_anything_is_written() -> None:
    columns, drafts = odd_slots(5, 3, 2)
    before = moved((*columns, *drafts), torch.device("cpu"))
    two = torch.zeros(2, dtype=torch.int64)
    ids = two.unsqueeze(1)
    for outside in (6, -7):
        slots = torch.tensor([1, outside])
        with pytest.raises(IndexError, match="beyond slot 5"):
            step_rows_native(columns, drafts, slots, None, None, 1, VOCAB_SIZE, 20)
        with pytest.raises(IndexError, match="beyond slot 5"):
            block_rows_native(columns, slots, 3, 1, VOCAB_SIZE, 20)
        with pytest.raises(IndexError, match="beyond slot 5"):
            native.store_drafts(drafts, slots, ids, None, None, None, two.clone())
        with pytest.raises(IndexError, match="beyond slot 5"):
            native.table_rows(tables(5).table_SJ, slots, two, 1, BLOCK_SIZE)
        with pytest.raises(IndexError, match="beyond slot 5"):
            commit_step_native(columns.whole_SX, drafts.ids_SK, slots, two, two, ids, Verdict(two, two, two, two))
    with pytest.raises(IndexError, match="a position lies below 0"):
        native.table_rows(tables(5).table_SJ, two, two - 1, 1, BLOCK_SIZE)
    with pytest.raises(IndexError, match="more drafts were kept than judged"):
        verdict = Verdict(two + 2, two, two, two)
        commit_step_native(columns.whole_SX, drafts.ids_SK, two + 1, two, two, ids, verdict)
    assert_same((*columns, *drafts), tuple(before))


def test_operations_on_a_cpu_are_native_and_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_chosen", {})
    run_all(odd_slots(5, 3, 2))
    names = ("block_rows", "commit_step", "step_rows", "store_drafts", "verify_greedily")
    assert dispatch.implementations() == {f"{name} on cpu": "native" for name in names}
    columns, drafts = odd_slots(5, 3, 2)
    views = SlotColumns(scattered(columns.whole_SX), scattered(columns.fractions_SX))
    assert_same(run_all((views, drafts)), run_all(odd_slots(5, 3, 2)))
    run_all((views, WaitingDrafts(scattered(drafts.ids_SK), drafts.candidate_ids_SKC, drafts.log_q_SKC)))
    found = dispatch.implementations()
    assert [name for name, version in found.items() if version == "native"] == ["verify_greedily on cpu"]


def run_all(given: tuple[SlotColumns, WaitingDrafts]) -> tuple[object, ...]:
    """Every operation, one behind the other, as a step calls them."""
    columns, drafts = given
    slots = torch.tensor([4, 0, 5])
    rows = step_rows(columns, drafts, slots, num_drafts=2, vocab_size=VOCAB_SIZE, num_positions=20)
    scores = torch.rand(3, 3, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    settings = {"seed_B": rows.sampling.seed_B, "anchor_position_B": rows.starts_B, "step_B": rows.steps_B}
    verified = verify_block(
        rows.draft_ids_BK, scores, temperature_B=rows.sampling.temperature_B, all_greedy=True, **settings
    )
    places = {"starts_B": rows.starts_B, "positions_B": rows.positions_B, "draft_ids_BK": rows.draft_ids_BK}
    committed = commit_step(columns, drafts.ids_SK, rows.slots_B, verdict=verified.verdict, **places)
    block = block_rows(columns, slots, num_rows=3, mask_id=1, vocab_size=VOCAB_SIZE, max_positions=20)
    waiting = torch.zeros_like(slots)
    store_drafts(drafts, slots, block.token_ids_BQ, waiting_B=waiting)
    assert cast(Tensor, columns.whole_SX[slots, LENGTH]).equal(block.lengths_B)
    return (rows, columns_of(verified), committed, block, waiting, columns, drafts)
