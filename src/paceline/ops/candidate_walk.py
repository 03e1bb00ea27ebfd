"""The walk through a block's candidates: one token per position, each scored after the token really chosen before it.

    score[k, c] = unary[k, c] + sum over j of predecessor[previous, j] * projected[k, j] * successor[candidate[k, c], j]
    choice[k]   = argmax over c of score[k, c]                           greedy
                  argmax over c of score[k, c] / T + gumbel[k, c]        sampled: a draw from softmax(score[k] / T)

The walk is ancestral: it never looks for the best path as a whole, so softmax(score[k] / T) is exactly the distribution
that position k was drawn from, given the tokens before it. Ties go to the lowest token id.
Source: DFlash2, spec 4.8. B requests, K draft tokens, C candidates, R rank of the codebooks, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.errors import ShapeError
from paceline.ops.dispatch import choose, kernel, tl, triton
from paceline.ops.native import choices as native

_NO_ID = torch.iinfo(torch.int64).max
_LARGEST_TILE = 4096  # products held at once: candidates * ranks


def candidate_walk_reference(
    unary_BKC: Tensor,
    candidate_ids_BKC: Tensor,
    projected_BKR: Tensor,
    predecessor_VR: Tensor,
    successor_VR: Tensor,
    anchor_ids_B: Tensor,
    temperature_B: Tensor,
    gumbel_BKC: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The definition, position by position, in float32."""
    is_sampled_B1 = (temperature_B > 0).unsqueeze(1)
    divisor_B1 = torch.where(is_sampled_B1, temperature_B.unsqueeze(1), 1.0)
    successors_BKCR = successor_VR[candidate_ids_BKC].float()
    previous_B = anchor_ids_B
    ids, scores = [], []
    for k in range(unary_BKC.shape[1]):
        edge_BR = predecessor_VR[previous_B].float() * projected_BKR[:, k].float()
        score_BC = unary_BKC[:, k].float() + (successors_BKCR[:, k] * edge_BR.unsqueeze(1)).sum(-1)
        weight_BC = score_BC
        if gumbel_BKC is not None:
            weight_BC = score_BC / divisor_B1 + gumbel_BKC[:, k].masked_fill(~is_sampled_B1, 0.0)
        weight_BC = weight_BC.masked_fill(weight_BC.isnan(), -torch.inf)  # an id is never picked from a NaN
        is_best_BC = weight_BC == weight_BC.amax(-1, keepdim=True)
        previous_B = candidate_ids_BKC[:, k].masked_fill(~is_best_BC, _NO_ID).amin(-1)
        ids.append(previous_B)
        scores.append(score_BC)
    return torch.stack(ids, dim=1), torch.stack(scores, dim=1)


@kernel
def _candidate_walk_kernel(
    unary_ptr: tl.tensor,
    candidate_ptr: tl.tensor,
    projected_ptr: tl.tensor,
    predecessor_ptr: tl.tensor,
    successor_ptr: tl.tensor,
    anchor_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    gumbel_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    scores_ptr: tl.tensor,
    num_candidates: tl.tensor,
    NUM_DRAFTS: tl.constexpr,
    RANK: tl.constexpr,
    HAS_NOISE: tl.constexpr,
    CANDIDATES: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    request = tl.program_id(0).to(tl.int64)
    candidate = tl.arange(0, CANDIDATES)
    rank = tl.arange(0, CHUNK)
    is_candidate = candidate < num_candidates
    temperature = tl.load(temperature_ptr + request).to(tl.float32)
    previous = tl.load(anchor_ptr + request)
    for k in range(NUM_DRAFTS):
        row = request * NUM_DRAFTS + k
        at = row * num_candidates + candidate
        ids = tl.load(candidate_ptr + at, mask=is_candidate, other=0)
        score = tl.load(unary_ptr + at, mask=is_candidate, other=0.0).to(tl.float32)
        for first in range(0, RANK, CHUNK):
            here = first + rank
            is_rank = here < RANK
            successor_at = successor_ptr + ids[:, None] * RANK + here[None, :]
            is_cell = is_candidate[:, None] & is_rank[None, :]
            successor = tl.load(successor_at, mask=is_cell, other=0.0).to(tl.float32)
            projected = tl.load(projected_ptr + row * RANK + here, mask=is_rank, other=0.0).to(tl.float32)
            predecessor = tl.load(predecessor_ptr + previous * RANK + here, mask=is_rank, other=0.0).to(tl.float32)
            score += tl.sum(successor * (predecessor * projected)[None, :], axis=1)
        tl.store(scores_ptr + at, score, mask=is_candidate)
        weight = score
        if HAS_NOISE:
            noise = tl.load(gumbel_ptr + at, mask=is_candidate, other=0.0)
            divisor = tl.where(temperature > 0, temperature, 1.0)
            weight = tl.where(temperature > 0, tl.div_rn(score, divisor) + noise, score)
        weight = tl.where(is_candidate & (weight == weight), weight, float("-inf"))
        is_best = is_candidate & (weight == tl.max(weight, axis=0))
        previous = tl.min(tl.where(is_best, ids, 0x7FFF_FFFF_FFFF_FFFF), axis=0)
        tl.store(ids_ptr + row, previous)


def candidate_walk_triton(
    unary_BKC: Tensor,
    candidate_ids_BKC: Tensor,
    projected_BKR: Tensor,
    predecessor_VR: Tensor,
    successor_VR: Tensor,
    anchor_ids_B: Tensor,
    temperature_B: Tensor,
    gumbel_BKC: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Launch one program per request; a position's scores stay in registers from the product to the choice."""
    num_requests, num_drafts, num_candidates = unary_BKC.shape
    rank = predecessor_VR.shape[1]
    ids_BK = torch.empty((num_requests, num_drafts), dtype=torch.int64, device=unary_BKC.device)
    scores_BKC = torch.empty(unary_BKC.shape, dtype=torch.float32, device=unary_BKC.device)
    padded = triton.next_power_of_2(num_candidates)
    chunk = max(1, min(triton.next_power_of_2(rank), _LARGEST_TILE // padded))
    with torch.cuda.device_of(unary_BKC):
        _candidate_walk_kernel[(num_requests,)](
            unary_BKC.contiguous(),
            candidate_ids_BKC.contiguous(),
            projected_BKR.contiguous(),
            predecessor_VR.contiguous(),
            successor_VR.contiguous(),
            anchor_ids_B.contiguous(),
            temperature_B.contiguous(),
            scores_BKC if gumbel_BKC is None else gumbel_BKC.contiguous(),
            ids_BK,
            scores_BKC,
            num_candidates,
            NUM_DRAFTS=num_drafts,
            RANK=rank,
            HAS_NOISE=gumbel_BKC is not None,
            CANDIDATES=padded,
            CHUNK=chunk,
        )
    return ids_BK, scores_BKC


def candidate_walk(
    unary_BKC: Tensor,
    candidate_ids_BKC: Tensor,
    projected_BKR: Tensor,
    predecessor_VR: Tensor,
    successor_VR: Tensor,
    anchor_ids_B: Tensor,
    *,
    temperature_B: Tensor | None = None,
    gumbel_BKC: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose one candidate per position, each after the one before it.

    Args:
        unary_BKC: the candidates' own scores, any float dtype.
        candidate_ids_BKC: int64 token ids, unique within a position, in any order.
        projected_BKR: the positions' projected hidden rows.
        predecessor_VR: one row per token that may come before.
        successor_VR: one row per token that may follow.
        anchor_ids_B: int64, the token before position 0.
        temperature_B: float32; requests at 0 or below are greedy. None makes all greedy.
        gumbel_BKC: float32 noise keyed by token id. None makes all greedy.
    Returns:
        ids_BK: int64 chosen token ids.
        scores_BKC: float32 rows that the choices were made from, before temperature: softmax(scores / T) is the exact
            distribution of a sampled position.
    Raises:
        ShapeError: the tensors do not fit each other.
    """
    shape, rank = unary_BKC.shape, predecessor_VR.shape[-1]
    if candidate_ids_BKC.shape != shape:
        raise ShapeError("candidate_ids", expected=shape, found=candidate_ids_BKC.shape)
    if projected_BKR.shape != (*shape[:2], rank):
        raise ShapeError("projected", expected=[*shape[:2], rank], found=projected_BKR.shape)
    if successor_VR.shape != predecessor_VR.shape:
        raise ShapeError("successor", expected=predecessor_VR.shape, found=successor_VR.shape)
    if gumbel_BKC is not None and gumbel_BKC.shape != shape:
        raise ShapeError("gumbel", expected=shape, found=gumbel_BKC.shape)
    is_greedy = temperature_B is None or gumbel_BKC is None
    if is_greedy and native.can_walk(unary_BKC, projected_BKR, predecessor_VR, successor_VR):
        return native.walk(unary_BKC, candidate_ids_BKC, projected_BKR, predecessor_VR, successor_VR, anchor_ids_B)
    if temperature_B is None or gumbel_BKC is None:
        gumbel_BKC, temperature_B = None, torch.zeros(shape[0], device=unary_BKC.device)
    run = choose("candidate_walk", unary_BKC, candidate_walk_reference, candidate_walk_triton)
    return run(
        unary_BKC,
        candidate_ids_BKC,
        projected_BKR,
        predecessor_VR,
        successor_VR,
        anchor_ids_B,
        temperature_B,
        gumbel_BKC,
    )
