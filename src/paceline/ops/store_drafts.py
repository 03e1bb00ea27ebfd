"""Keeping a block of drafts for the next step: as many as are wanted, with what they were drawn from.

    kept[k]    draft k where k < wanted, else -1; positions beyond the block hold -1
    q          stored beside them where slots have room for it; one-hot drafts are their only candidate, with ln q = 0
    waiting    drafts before the first missing one

B requests, K drafts, C candidates, S slots.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.ops.dispatch import choose, kernel, tl, triton
from paceline.ops.native import steps as native
from paceline.ops.sample_tokens import NO_TOKEN
from paceline.ops.step_rows import WaitingDrafts


def store_drafts_reference(
    drafts: WaitingDrafts,
    slots_B: Tensor,
    ids_BK: Tensor,
    candidate_ids_BKC: Tensor | None,
    log_q_BKC: Tensor | None,
    wanted_B: Tensor | None,
    waiting_B: Tensor,
) -> None:
    """The definition."""
    num_drafts = ids_BK.shape[1]
    if wanted_B is not None:
        position_K = torch.arange(num_drafts, device=ids_BK.device)
        ids_BK = ids_BK.masked_fill(position_K >= wanted_B.unsqueeze(1), NO_TOKEN)
    drafts.ids_SK[slots_B, :num_drafts] = ids_BK
    drafts.ids_SK[slots_B, num_drafts:] = NO_TOKEN
    waiting_B.copy_((ids_BK != NO_TOKEN).long().cumprod(dim=1).sum(dim=1))
    if drafts.candidate_ids_SKC is None or drafts.log_q_SKC is None:
        return
    if candidate_ids_BKC is not None and log_q_BKC is not None:
        drafts.candidate_ids_SKC[slots_B, :num_drafts] = candidate_ids_BKC
        drafts.log_q_SKC[slots_B, :num_drafts] = log_q_BKC
    else:  # one-hot drafts beside sampled ones
        drafts.candidate_ids_SKC[slots_B] = NO_TOKEN
        drafts.candidate_ids_SKC[slots_B, :num_drafts, 0] = ids_BK
        drafts.log_q_SKC[slots_B] = -torch.inf
        drafts.log_q_SKC[slots_B, :num_drafts, 0] = 0.0


@kernel
def _store_drafts_kernel(
    slots_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    candidate_ptr: tl.tensor,
    log_q_ptr: tl.tensor,
    wanted_ptr: tl.tensor,
    kept_ids_ptr: tl.tensor,
    kept_candidate_ptr: tl.tensor,
    kept_log_q_ptr: tl.tensor,
    waiting_ptr: tl.tensor,
    waiting_stride: tl.tensor,
    num_kept: tl.tensor,
    NUM_DRAFTS: tl.constexpr,
    NUM_CANDIDATES: tl.constexpr,
    HAS_WANTED: tl.constexpr,
    HAS_Q: tl.constexpr,
    KEPT: tl.constexpr,
    CELLS: tl.constexpr,
) -> None:
    request = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + request)
    wanted = NUM_DRAFTS
    if HAS_WANTED:
        wanted = tl.load(wanted_ptr + request)
    k = tl.arange(0, KEPT)
    ids = tl.load(ids_ptr + request * NUM_DRAFTS + k, mask=(k < NUM_DRAFTS) & (k < wanted), other=-1)
    tl.store(kept_ids_ptr + slot * num_kept + k, ids, mask=k < num_kept)
    first_missing = tl.min(tl.where((ids == -1) | (k >= NUM_DRAFTS), k, NUM_DRAFTS), axis=0)
    tl.store(waiting_ptr + request * waiting_stride, first_missing.to(tl.int64))
    if NUM_CANDIDATES > 0:
        lane = tl.arange(0, CELLS)
        kept_at = slot * num_kept * NUM_CANDIDATES + lane
        if HAS_Q:
            is_lane = lane < NUM_DRAFTS * NUM_CANDIDATES
            at = request * NUM_DRAFTS * NUM_CANDIDATES + lane
            candidates = tl.load(candidate_ptr + at, mask=is_lane, other=-1)
            log_q = tl.load(log_q_ptr + at, mask=is_lane, other=0.0).to(tl.float32)
        else:
            is_lane = lane < num_kept * NUM_CANDIDATES
            of_k = lane // NUM_CANDIDATES
            is_first = (lane % NUM_CANDIDATES == 0) & (of_k < NUM_DRAFTS)
            at = request * NUM_DRAFTS + of_k
            candidates = tl.load(ids_ptr + at, mask=is_first & (of_k < wanted), other=-1)
            log_q = tl.where(is_first, 0.0, float("-inf"))
        tl.store(kept_candidate_ptr + kept_at, candidates, mask=is_lane)
        tl.store(kept_log_q_ptr + kept_at, log_q, mask=is_lane)


def store_drafts_triton(
    drafts: WaitingDrafts,
    slots_B: Tensor,
    ids_BK: Tensor,
    candidate_ids_BKC: Tensor | None,
    log_q_BKC: Tensor | None,
    wanted_B: Tensor | None,
    waiting_B: Tensor,
) -> None:
    """Launch one program per request."""
    num_requests, num_drafts = ids_BK.shape
    num_kept = drafts.ids_SK.shape[1]
    ids_BK = ids_BK.contiguous()
    has_q = candidate_ids_BKC is not None and log_q_BKC is not None
    kept_candidates, kept_log_q, num_candidates = ids_BK, ids_BK, 0
    if drafts.candidate_ids_SKC is not None and drafts.log_q_SKC is not None:
        kept_candidates, kept_log_q = drafts.candidate_ids_SKC, drafts.log_q_SKC
        num_candidates = kept_candidates.shape[2]
    with torch.cuda.device_of(ids_BK):
        _store_drafts_kernel[(num_requests,)](
            slots_B.contiguous(),
            ids_BK,
            ids_BK if candidate_ids_BKC is None else candidate_ids_BKC.contiguous(),
            ids_BK if log_q_BKC is None else log_q_BKC.contiguous(),
            ids_BK if wanted_B is None else wanted_B.contiguous(),
            drafts.ids_SK,
            kept_candidates,
            kept_log_q,
            waiting_B,
            waiting_B.stride(0),
            num_kept,
            NUM_DRAFTS=num_drafts,
            NUM_CANDIDATES=num_candidates,
            HAS_WANTED=wanted_B is not None,
            HAS_Q=has_q,
            KEPT=triton.next_power_of_2(num_kept),
            CELLS=triton.next_power_of_2(max(1, num_kept * num_candidates)),
            num_warps=1,
        )


def store_drafts(
    drafts: WaitingDrafts,
    slots_B: Tensor,
    ids_BK: Tensor,
    *,
    waiting_B: Tensor,
    candidate_ids_BKC: Tensor | None = None,
    log_q_BKC: Tensor | None = None,
    wanted_B: Tensor | None = None,
) -> None:
    """Store a block and count it; no tensor is read on the host.

    Args:
        drafts: of all slots, changed in place; without candidates nothing of q is stored.
        slots_B: int64; only the trash slot may stand here twice.
        ids_BK: int64, -1 for a missing draft; at most as many as slots have room for.
        waiting_B: int64, any stride; set to the drafts that wait.
        candidate_ids_BKC: int64; None for one-hot drafts.
        log_q_BKC: float32; None for one-hot drafts.
        wanted_B: int64, drafts to keep of each block; None keeps all.
    """
    assert ids_BK.shape[1] <= drafts.ids_SK.shape[1], "a block is no longer than the place for it"
    on_cpu = native.store_drafts if native.can_run(*drafts) else None
    run = choose("store_drafts", slots_B, store_drafts_reference, store_drafts_triton, on_cpu)
    run(drafts, slots_B, ids_BK, candidate_ids_BKC, log_q_BKC, wanted_B, waiting_B)
