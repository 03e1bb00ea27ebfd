"""The bookkeeping of a step on a CPU, one call of the native library each where torch needs a dozen small operations.

Each gives what the operation of its name elsewhere in `ops` gives, to the number. Arrays of all slots are contiguous,
see `can_run`; what belongs to the requests may be any view.

B requests, T = K + 1 rows, K drafts, C candidates, Q block rows, S slots, J blocks of a slot, V vocabulary.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from paceline.errors import ShapeError
from paceline.ops.dispatch import needs_gradient
from paceline.ops.native.build import library, loaded_library
from paceline.ops.slot_columns import NUM_FRACTIONS

NUM_COUNTS: Final = 5  # of a report, as the C file writes it
_ARRAY_TYPES: Final = (torch.int64, torch.float32, torch.int32)
_SCORE_TYPES: Final = (torch.bfloat16, torch.float32)


def can_run(*of_all_slots: Tensor | None) -> bool:
    """Whether operations on these arrays can be native: contiguous, of their types, on a CPU that has the library."""
    fits = [
        array is None or (array.is_contiguous() and array.is_cpu and array.dtype in _ARRAY_TYPES)
        for array in of_all_slots
    ]
    return all(fits) and library() is not None


def can_verify(scores_BLV: Tensor) -> bool:
    """Whether `verify_greedily` takes these scores."""
    is_here = scores_BLV.is_cpu and scores_BLV.dtype in _SCORE_TYPES and scores_BLV.shape[-1] > 0
    return is_here and library() is not None and not needs_gradient(scores_BLV)


def step_rows(
    columns: tuple[Tensor, Tensor],
    drafts: tuple[Tensor, Tensor | None, Tensor | None],
    slots_B: Tensor,
    context_starts_B: Tensor | None,
    table_SJ: Tensor | None,
    block_size: int,
    num_drafts: int,
    vocab_size: int,
    num_positions: int,
) -> tuple[tuple[Tensor, Tensor], Tensor, tuple[Tensor, Tensor | None, Tensor | None]]:
    """The rows of a step.

    Returns:
        Numbers: int64 [8, B], which are slots, starts, positions, anchors, steps, top_k, seeds and, where they are
            given, context starts; and float32 [NUM_FRACTIONS, B].
        Rows: int64 [3, B, T], which are tokens, positions and, with a table, cells.
        Drafts: int64 [B, K]; int64 and float32 [B, K, C], candidates and their ln q, None where none are given.
    """
    whole_SX, fractions_SX = columns
    ids_SK, candidate_ids_SKC, log_q_SKC = drafts
    num_requests, num_kept = slots_B.shape[0], ids_SK.shape[1]
    whole_8B = torch.empty(8, num_requests, dtype=torch.int64)
    fractions_3B = torch.empty(NUM_FRACTIONS, num_requests)
    rows_3BT = torch.empty(3, num_requests, num_drafts + 1, dtype=torch.int64)
    draft_ids_BK = torch.empty(num_requests, num_drafts, dtype=torch.int64)
    candidate_ids_BKC = log_q_BKC = None
    num_candidates = 0
    if candidate_ids_SKC is not None and log_q_SKC is not None:
        num_candidates = candidate_ids_SKC.shape[2]
        candidate_ids_BKC = torch.empty(num_requests, num_drafts, num_candidates, dtype=torch.int64)
        log_q_BKC = torch.empty(num_requests, num_drafts, num_candidates)
    slots_B = slots_B.contiguous()
    context_starts_B = None if context_starts_B is None else context_starts_B.contiguous()
    rows = rows_3BT.data_ptr()
    of_kind = rows_3BT.stride(0) * rows_3BT.element_size()
    is_outside = loaded_library().paceline_step_rows(
        _whole(slots_B),
        _whole(context_starts_B),
        _whole(whole_SX),
        _fraction(fractions_SX),
        _whole(ids_SK),
        _whole(candidate_ids_SKC),
        _fraction(log_q_SKC),
        None if table_SJ is None else _blocks(table_SJ),
        whole_8B.data_ptr(),
        fractions_3B.data_ptr(),
        rows,
        rows + of_kind,
        rows + 2 * of_kind,
        draft_ids_BK.data_ptr(),
        _whole(candidate_ids_BKC),
        _fraction(log_q_BKC),
        num_requests,
        whole_SX.shape[0],
        num_kept,
        num_drafts,
        num_candidates,
        0 if table_SJ is None else table_SJ.shape[1],
        block_size,
        vocab_size,
        num_positions,
    )
    _check(is_outside, slots_B, whole_SX)
    return (whole_8B, fractions_3B), rows_3BT, (draft_ids_BK, candidate_ids_BKC, log_q_BKC)


def table_rows(table_SJ: Tensor, slots_B: Tensor, starts_B: Tensor, num_rows: int, block_size: int) -> Tensor:
    """Physical rows of the rows of a pass, int64 [B, T]."""
    num_requests = slots_B.shape[0]
    cells_BT = torch.empty(num_requests, num_rows, dtype=torch.int64)
    slots_B, starts_B = slots_B.contiguous(), starts_B.contiguous()
    is_outside = loaded_library().paceline_table_rows(
        _blocks(table_SJ),
        _whole(slots_B),
        _whole(starts_B),
        cells_BT.data_ptr(),
        num_requests,
        *table_SJ.shape,
        block_size,
        num_rows,
    )
    _check(is_outside, slots_B, table_SJ)
    return cells_BT


def block_rows(
    columns: tuple[Tensor, Tensor], slots_B: Tensor, num_rows: int, mask_id: int, vocab_size: int, max_positions: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The rows of draft blocks.

    Returns:
        int64 [4, B]: lengths, anchors, steps and seeds.
        float32 [B], temperatures.
        int64 [2, B, Q]: tokens and positions.
        bool [B], whether the block reaches past the table.
    """
    whole_SX, fractions_SX = columns
    num_requests = slots_B.shape[0]
    whole_4B = torch.empty(4, num_requests, dtype=torch.int64)
    temperature_B = torch.empty(num_requests)
    rows_2BQ = torch.empty(2, num_requests, num_rows, dtype=torch.int64)
    is_beyond_B = torch.empty(num_requests, dtype=torch.bool)
    slots_B = slots_B.contiguous()
    rows = rows_2BQ.data_ptr()
    is_outside = loaded_library().paceline_block_rows(
        _whole(slots_B),
        _whole(whole_SX),
        _fraction(fractions_SX),
        whole_4B.data_ptr(),
        temperature_B.data_ptr(),
        rows,
        rows + rows_2BQ.stride(0) * rows_2BQ.element_size(),
        is_beyond_B.data_ptr(),
        num_requests,
        whole_SX.shape[0],
        num_rows,
        mask_id,
        vocab_size,
        max_positions,
    )
    _check(is_outside, slots_B, whole_SX)
    return whole_4B, temperature_B, rows_2BQ, is_beyond_B


def verify_greedily(draft_ids_BK: Tensor, scores_BLV: Tensor) -> Tensor:
    """The verdict on drafts by scores that `can_verify`: accepted, bonus ids, faults and zeros, int64 [4, B].

    A request's scores are read up to the row that stops.
    """
    num_requests, num_drafts = draft_ids_BK.shape
    if scores_BLV.stride(2) != 1:
        scores_BLV = scores_BLV.contiguous()
    draft_ids_BK = draft_ids_BK.contiguous()
    verdict_4B = torch.empty(4, num_requests, dtype=torch.int64)
    size = scores_BLV.element_size()
    loaded_library().paceline_verify_greedily(
        _whole(draft_ids_BK),
        scores_BLV.data_ptr(),
        scores_BLV.stride(0) * size,
        scores_BLV.stride(1) * size,
        scores_BLV.dtype == torch.bfloat16,
        verdict_4B.data_ptr(),
        num_requests,
        num_drafts,
        scores_BLV.shape[2],
        torch.get_num_threads(),
    )
    return verdict_4B


def commit_step(
    whole_SX: Tensor,
    waiting_ids_SK: Tensor,
    slots_B: Tensor,
    starts_B: Tensor,
    positions_B: Tensor,
    draft_ids_BK: Tensor,
    verdict: tuple[Tensor, Tensor, Tensor, Tensor],
) -> tuple[Tensor, Tensor]:
    """Take a verdict in, in place; returns ends, int64 [B], and the report, int64 [B, NUM_COUNTS + T + K]."""
    num_requests, num_drafts = draft_ids_BK.shape
    ends_3B = torch.empty(3, num_requests, dtype=torch.int64)
    report_BX = torch.empty(num_requests, NUM_COUNTS + 2 * num_drafts + 1, dtype=torch.int64)
    given = [part.contiguous() for part in (slots_B, starts_B, positions_B, draft_ids_BK, *verdict)]
    is_outside = loaded_library().paceline_commit_step(
        _whole(whole_SX),
        _whole(waiting_ids_SK),
        *[_whole(part) for part in given],
        ends_3B.data_ptr(),
        report_BX.data_ptr(),
        num_requests,
        whole_SX.shape[0],
        waiting_ids_SK.shape[1],
        num_drafts,
    )
    _check(is_outside, slots_B, whole_SX)
    return ends_3B[0], report_BX


def store_drafts(
    drafts: tuple[Tensor, Tensor | None, Tensor | None],
    slots_B: Tensor,
    ids_BK: Tensor,
    candidate_ids_BKC: Tensor | None,
    log_q_BKC: Tensor | None,
    wanted_B: Tensor | None,
    waiting_B: Tensor,
) -> None:
    """Keep a block of drafts and count it, in place.

    Raises:
        ShapeError: the slots have no room for as many drafts, or for as many candidates.
        IndexError: a slot that there is not.
    """
    ids_SK, candidate_ids_SKC, log_q_SKC = drafts
    if candidate_ids_SKC is None or log_q_SKC is None:
        candidate_ids_SKC = log_q_SKC = None
    num_requests, num_drafts = ids_BK.shape
    if num_drafts > ids_SK.shape[1]:
        raise ShapeError("drafts", expected=f"[B, at most {ids_SK.shape[1]}]", found=ids_BK.shape)
    assert waiting_B.dtype == torch.int64, "counts are whole numbers"
    slots_B, ids_BK = slots_B.contiguous(), ids_BK.contiguous()
    wanted_B = None if wanted_B is None else wanted_B.contiguous()
    has_q = candidate_ids_BKC is not None and log_q_BKC is not None
    if candidate_ids_BKC is None or log_q_BKC is None or candidate_ids_SKC is None:
        candidate_ids_BKC = log_q_BKC = None
    else:
        room = (num_requests, num_drafts, candidate_ids_SKC.shape[2])
        for part in (candidate_ids_BKC, log_q_BKC):
            if part.shape != room:
                raise ShapeError("candidates of drafts", expected=room, found=part.shape)
        candidate_ids_BKC, log_q_BKC = candidate_ids_BKC.contiguous(), log_q_BKC.contiguous()
    is_outside = loaded_library().paceline_store_drafts(
        _whole(slots_B),
        _whole(ids_BK),
        _whole(candidate_ids_BKC),
        _fraction(log_q_BKC),
        has_q,
        _whole(wanted_B),
        _whole(ids_SK),
        _whole(candidate_ids_SKC),
        _fraction(log_q_SKC),
        waiting_B.data_ptr(),
        waiting_B.stride(0),
        num_requests,
        ids_SK.shape[0],
        ids_SK.shape[1],
        num_drafts,
        0 if candidate_ids_SKC is None else candidate_ids_SKC.shape[2],
    )
    _check(is_outside, slots_B, ids_SK)


def _whole(array: Tensor | None) -> int | None:
    if array is None:
        return None
    assert array.dtype is torch.int64 and array.is_contiguous(), "the library reads numbers of this type, side by side"
    return array.data_ptr()


def _fraction(array: Tensor | None) -> int | None:
    if array is None:
        return None
    assert array.dtype is torch.float32 and array.is_contiguous(), "as above"
    return array.data_ptr()


def _blocks(table_SJ: Tensor) -> int:
    assert table_SJ.dtype is torch.int32 and table_SJ.is_contiguous(), "as above"
    return table_SJ.data_ptr()


def _check(is_outside: int, slots_B: Tensor, of_all_slots: Tensor) -> None:
    if is_outside:  # as torch would say it
        last = of_all_slots.shape[0] - 1
        others = "a position lies below 0, or more drafts were kept than judged"
        raise IndexError(f"slots {slots_B.tolist()} reach beyond slot {last}, {others}")
