"""The largest score of each row and its lowest id, in one pass over scores of a whole vocabulary.

A program walks along a run of a row and keeps the largest score of every group of lanes; groups meet once, at the end.
Many rows are a run each, and a lone one is cut into as many as fill a GPU. Nothing is rounded, so the cut leaves no
trace. A NaN is passed over, or told.

R rows, V vocabulary, S runs of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.ops.dispatch import choose, kernel, tl, triton

_TURN = 2048  # ids of a turn
_GROUP = 8  # ids of a turn that lie together: of 16 bits, what a thread loads at once
_WARPS = 4
_STAGES = 4  # turns on their way
_FILLING = 132 * 16  # programs that an H200 holds at once


def largest_ids_reference(scores_RV: Tensor) -> Tensor:
    """The definition; on a CPU max is four times as fast as argmax."""
    return scores_RV.max(dim=-1).indices


@kernel
def _larger_or_nan(left: tl.tensor, right: tl.tensor) -> tl.tensor:
    return tl.maximum(left, right, propagate_nan=tl.PropagateNan.ALL)


@kernel
def _largest_of_groups(scores: tl.tensor, TELLS_NAN: tl.constexpr) -> tl.tensor:
    """Along axis 1, which one thread holds. A NaN is passed on where it has to be told, else passed over."""
    if TELLS_NAN:
        return tl.reduce(scores, 1, _larger_or_nan)
    return tl.max(scores, axis=1)


@kernel
def _largest_of_runs_kernel(
    scores_ptr: tl.tensor,
    best_ptr: tl.tensor,
    id_ptr: tl.tensor,
    vocab_size: tl.tensor,
    num_turns: tl.tensor,
    TELLS_NAN: tl.constexpr,
    TURN: tl.constexpr,
    GROUP: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    row, run = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first = run * (num_turns * TURN)
    group = tl.arange(0, TURN // GROUP)
    lane = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    scores_ptr += row * vocab_size
    # Per id there is one comparison: which turn a group's largest score is of is asked once for the group, and which
    # id of that turn once for the run.
    best = tl.full([TURN // GROUP], float("-inf"), dtype=tl.float32)
    best_turn = tl.zeros([TURN // GROUP], dtype=tl.int32)
    is_nan = tl.zeros([TURN // GROUP], dtype=tl.int32)
    num_whole = tl.minimum(num_turns, tl.maximum(vocab_size - first, 0) // TURN)
    for turn in tl.range(0, num_whole, num_stages=STAGES):
        scores = tl.load(scores_ptr + first + turn * TURN + lane).to(tl.float32)
        found = _largest_of_groups(scores, TELLS_NAN)
        is_larger = found > best  # never of a NaN, and of equal ones the first stays
        best = tl.where(is_larger, found, best)
        best_turn = tl.where(is_larger, turn, best_turn)
        if TELLS_NAN:
            is_nan |= (found != found).to(tl.int32)
    if num_whole < num_turns:
        ids = first + num_whole * TURN + lane
        scores = tl.load(scores_ptr + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
        found = _largest_of_groups(scores, TELLS_NAN)
        is_larger = found > best
        best = tl.where(is_larger, found, best)
        best_turn = tl.where(is_larger, num_whole, best_turn)
        if TELLS_NAN:
            is_nan |= (found != found).to(tl.int32)
    largest = tl.max(best, axis=0)
    ids = first + best_turn[:, None] * TURN + lane
    is_best = (best == largest)[:, None] & (ids < vocab_size)
    scores = tl.load(scores_ptr + ids, mask=is_best, other=float("-inf")).to(tl.float32)
    id = tl.min(tl.min(tl.where(is_best & (scores == largest), ids, 0x7FFF_FFFF), axis=1), axis=0)
    out = row * tl.num_programs(1) + run
    tl.store(id_ptr + out, tl.minimum(id, vocab_size - 1).to(tl.int64))
    if TELLS_NAN:
        largest = tl.where(tl.max(is_nan, axis=0) > 0, float("nan"), largest)
    tl.store(best_ptr + out, largest)


@kernel
def _join_runs_kernel(
    best_ptr: tl.tensor,
    id_ptr: tl.tensor,
    joined_ptr: tl.tensor,
    num_runs: tl.tensor,
    RUNS: tl.constexpr,
) -> None:
    row, run = tl.program_id(0).to(tl.int64), tl.arange(0, RUNS)
    is_run = run < num_runs
    best = tl.load(best_ptr + row * num_runs + run, mask=is_run, other=float("-inf"))
    ids = tl.load(id_ptr + row * num_runs + run, mask=is_run, other=0)
    is_best = is_run & (best == tl.max(best, axis=0))
    tl.store(joined_ptr + row, tl.min(tl.where(is_best, ids, 0x7FFF_FFFF_FFFF_FFFF), axis=0))


def largest_of_runs(scores_RV: Tensor, *, tells_nan: bool = True) -> tuple[Tensor, Tensor]:
    """Launch one program per row and run.

    Args:
        scores_RV: on a GPU.
        tells_nan: whether a run that holds a NaN has NaN for its largest score.
    Returns:
        float32 [R, S], the largest score of each run, and int64 [R, S], its lowest id: that of a run of -inf is one of
        its own, and that of a run whose NaN is told says nothing.
    """
    num_rows, vocab_size = scores_RV.shape
    num_turns, num_runs = runs_of(num_rows, vocab_size)
    best_RS = torch.empty((num_rows, num_runs), dtype=torch.float32, device=scores_RV.device)
    ids_RS = torch.empty((num_rows, num_runs), dtype=torch.int64, device=scores_RV.device)
    with torch.cuda.device_of(scores_RV):
        _largest_of_runs_kernel[num_rows, num_runs](
            scores_RV.contiguous(),
            best_RS,
            ids_RS,
            vocab_size,
            num_turns,
            TELLS_NAN=tells_nan,
            TURN=_TURN,
            GROUP=_GROUP,
            STAGES=_STAGES,
            num_warps=_WARPS,
        )
    return best_RS, ids_RS


def runs_of(num_rows: int, vocab_size: int) -> tuple[int, int]:
    """How many turns a run has, and how many runs a row."""
    all_turns = max(1, triton.cdiv(vocab_size, _TURN))
    num_turns = triton.cdiv(all_turns, max(1, min(all_turns, _FILLING // num_rows)))
    return num_turns, triton.cdiv(all_turns, num_turns)


def largest_ids_triton(scores_RV: Tensor) -> Tensor:
    """Launch the runs, and one program per row that joins them where there are several."""
    best_RS, ids_RS = largest_of_runs(scores_RV, tells_nan=False)
    num_rows, num_runs = ids_RS.shape
    if num_runs == 1:
        return ids_RS.squeeze(1)
    ids_R = torch.empty(num_rows, dtype=torch.int64, device=scores_RV.device)
    with torch.cuda.device_of(scores_RV):
        _join_runs_kernel[num_rows,](
            best_RS, ids_RS, ids_R, num_runs, RUNS=triton.next_power_of_2(num_runs), num_warps=1
        )
    return ids_R


def largest_ids(scores: Tensor) -> Tensor:
    """The id of the largest score, of equal ones the lowest.

    Args:
        scores: [..., V], any float dtype, V at least 1.
    Returns:
        int64 [...]; for rows with a NaN, and for those that are all -inf, one of the row's ids.
    """
    scores_RV = scores.reshape(-1, scores.shape[-1])
    if scores_RV.shape[0] == 0:
        return torch.empty(scores.shape[:-1], dtype=torch.int64, device=scores.device)
    run = choose("largest_ids", scores, largest_ids_reference, largest_ids_triton)
    return run(scores_RV).view(scores.shape[:-1])
