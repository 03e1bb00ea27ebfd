"""What judged blocks tell about the chances of drafts (`draft_chances.py`): the sums that a Newton step needs.

    sums     over judged drafts: w f^2, w f, w, (y - c) f, y - c and 1; w = c (1 - c), y = 1 where it was kept

with f the features and c the chances. A block's judged drafts are those that were kept and the first that was refused.
Sums are float64.

B requests, K drafts, S slots and one trash row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from paceline.ops.dispatch import choose, kernel, tl, triton
from paceline.ops.draft_chances import Coefficients, KnownFeatures, chances, count_drafts

NUM_SUMS = 6
_REQUESTS_AT_ONCE = 128


class NewtonSums(NamedTuple):
    """Sums over judged drafts, by position; all float64 [K].

    Attributes:
        A_K: of w f^2.
        B_K: of w f.
        C_K: of w.
        slope_gradient_K: of (y - c) f.
        intercept_gradient_K: of y - c.
        num_K: drafts.
    """

    A_K: Tensor
    B_K: Tensor
    C_K: Tensor
    slope_gradient_K: Tensor
    intercept_gradient_K: Tensor
    num_K: Tensor


def newton_sums(
    features_BK: Tensor, num_judged_B: Tensor, num_accepted_B: Tensor, slope: Tensor, intercept_K: Tensor
) -> NewtonSums:
    """What one step of B requests adds: each block tells of its kept drafts and of the first refused one.

    Args:
        features_BK: of the drafts that were judged.
        num_judged_B: int64; 0 leaves a request out.
        num_accepted_B: int64.
        slope: float64 scalar.
        intercept_K: float64.
    """
    position_K = torch.arange(features_BK.shape[1], device=features_BK.device)
    accepted_B1 = num_accepted_B.unsqueeze(1)
    is_seen_BK = (position_K <= accepted_B1) & (position_K < num_judged_B.unsqueeze(1))
    # Selected, not multiplied: a row that was never drafted may hold anything.
    f_BK = torch.where(is_seen_BK, features_BK.double(), 0.0)
    c_BK = chances(f_BK, slope, intercept_K)
    weight_BK = torch.where(is_seen_BK, c_BK * (1 - c_BK), 0.0)
    missed_BK = torch.where(is_seen_BK, (position_K < accepted_B1).double() - c_BK, 0.0)
    parts = (weight_BK * f_BK**2, weight_BK * f_BK, weight_BK, missed_BK * f_BK, missed_BK, is_seen_BK.double())
    return NewtonSums(*(part.sum(dim=0) for part in parts))


def observe_drafts_reference(
    sums_6K: Tensor,
    known: KnownFeatures,
    coefficients: Coefficients,
    slots_B: Tensor,
    draft_ids_BK: Tensor,
    accepted_B: Tensor,
    teaches_B: Tensor | None,
) -> None:
    """The definition."""
    num_drafts = draft_ids_BK.shape[1]
    counts_B = known.is_known_S[slots_B]
    if teaches_B is not None:
        counts_B = counts_B & teaches_B
    judged_B = count_drafts(draft_ids_BK) * counts_B
    sums = newton_sums(known.features_SK[slots_B, :num_drafts], judged_B, accepted_B, *coefficients)
    sums_6K[:, :num_drafts] += torch.stack(tuple(sums))


@kernel
def _observe_drafts_kernel(
    slots_ptr: tl.tensor,
    draft_ptr: tl.tensor,
    accepted_ptr: tl.tensor,
    teaches_ptr: tl.tensor,
    slope_ptr: tl.tensor,
    intercept_ptr: tl.tensor,
    features_ptr: tl.tensor,
    is_known_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    num_requests: tl.tensor,
    num_kept: tl.tensor,
    NUM_DRAFTS: tl.constexpr,
    HAS_TEACHES: tl.constexpr,
    REQUESTS: tl.constexpr,
    DRAFTS: tl.constexpr,
) -> None:
    k = tl.arange(0, DRAFTS)
    is_draft = k < NUM_DRAFTS
    slope, intercept = tl.load(slope_ptr), tl.load(intercept_ptr + k, mask=is_draft, other=0.0)
    curved = tl.zeros((DRAFTS,), tl.float64)
    crossed, weighed, turned, missed, seen = curved, curved, curved, curved, curved
    for first in range(0, num_requests, REQUESTS):
        request = first + tl.arange(0, REQUESTS)
        is_request = request < num_requests
        slot = tl.load(slots_ptr + request, mask=is_request, other=0)
        counts = tl.load(is_known_ptr + slot, mask=is_request, other=0) != 0
        if HAS_TEACHES:
            counts &= tl.load(teaches_ptr + request, mask=is_request, other=0) != 0
        accepted = tl.load(accepted_ptr + request, mask=is_request, other=0)
        is_cell = is_request[:, None] & is_draft[None, :]
        draft = tl.load(draft_ptr + request[:, None] * NUM_DRAFTS + k[None, :], mask=is_cell, other=-1)
        judged = tl.min(tl.where(draft == -1, k[None, :], NUM_DRAFTS), axis=1)
        is_seen = (k[None, :] <= accepted[:, None]) & (k[None, :] < judged[:, None]) & counts[:, None] & is_cell
        odds = tl.load(features_ptr + slot[:, None] * num_kept + k[None, :], mask=is_seen, other=0.0).to(tl.float64)
        chance = 1.0 / (1.0 + tl.exp(-(slope * odds + intercept[None, :])))
        weight = tl.where(is_seen, chance * (1.0 - chance), 0.0)
        is_kept = (k[None, :] < accepted[:, None]).to(tl.float64)
        miss = tl.where(is_seen, is_kept - chance, 0.0)
        curved += tl.sum(weight * odds * odds, axis=0)
        crossed += tl.sum(weight * odds, axis=0)
        weighed += tl.sum(weight, axis=0)
        turned += tl.sum(miss * odds, axis=0)
        missed += tl.sum(miss, axis=0)
        seen += tl.sum(is_seen.to(tl.float64), axis=0)
    at = sums_ptr + k
    tl.store(at, tl.load(at, mask=is_draft, other=0.0) + curved, mask=is_draft)
    at += num_kept
    tl.store(at, tl.load(at, mask=is_draft, other=0.0) + crossed, mask=is_draft)
    at += num_kept
    tl.store(at, tl.load(at, mask=is_draft, other=0.0) + weighed, mask=is_draft)
    at += num_kept
    tl.store(at, tl.load(at, mask=is_draft, other=0.0) + turned, mask=is_draft)
    at += num_kept
    tl.store(at, tl.load(at, mask=is_draft, other=0.0) + missed, mask=is_draft)
    at += num_kept
    tl.store(at, tl.load(at, mask=is_draft, other=0.0) + seen, mask=is_draft)


def observe_drafts_triton(
    sums_6K: Tensor,
    known: KnownFeatures,
    coefficients: Coefficients,
    slots_B: Tensor,
    draft_ids_BK: Tensor,
    accepted_B: Tensor,
    teaches_B: Tensor | None,
) -> None:
    """Launch one program: the sums of a step are added up in one order, whoever takes part."""
    num_requests, num_drafts = draft_ids_BK.shape
    requests = min(_REQUESTS_AT_ONCE, triton.next_power_of_2(num_requests))
    with torch.cuda.device_of(draft_ids_BK):
        _observe_drafts_kernel[(1,)](
            slots_B.contiguous(),
            draft_ids_BK.contiguous(),
            accepted_B.contiguous(),
            slots_B if teaches_B is None else teaches_B.contiguous().view(torch.uint8),
            *coefficients,
            known.features_SK,
            known.is_known_S.view(torch.int8),
            sums_6K,
            num_requests,
            known.features_SK.shape[1],
            NUM_DRAFTS=num_drafts,
            HAS_TEACHES=teaches_B is not None,
            REQUESTS=requests,
            DRAFTS=triton.next_power_of_2(num_drafts),
            num_warps=1 if requests <= 8 else 4,
        )


def observe_drafts(
    sums_6K: Tensor,
    known: KnownFeatures,
    coefficients: Coefficients,
    slots_B: Tensor,
    draft_ids_BK: Tensor,
    accepted_B: Tensor,
    *,
    teaches_B: Tensor | None = None,
) -> None:
    """Add what a step's judged blocks say to the sums; has to come before the next blocks' features replace theirs.

    Args:
        sums_6K: float64 [6, K], the parts of `NewtonSums`, changed in place; its rows are as wide as the features'.
        known: of all slots.
        coefficients: of the chances.
        slots_B: int64.
        draft_ids_BK: int64, what was judged, at least one column; -1 where there was none.
        accepted_B: int64, drafts that were kept.
        teaches_B: bool, whose blocks count; None for all of which features are known.
    """
    assert sums_6K.shape[1] == known.features_SK.shape[1], "sums and features have the same columns"
    run = choose("observe_drafts", slots_B, observe_drafts_reference, observe_drafts_triton)
    run(sums_6K, known, coefficients, slots_B, draft_ids_BK, accepted_B, teaches_B)
