"""How likely waiting drafts are kept, and holding back those that are not worth a row.

    f[k]     log-odds of row k's most likely id under q, or of what a confidence head says, within +-40
    c[k]     sigmoid(slope * f[k] + intercept[k])
    held     all drafts from the first k on where c[0] * ... * c[k] < threshold[k]

Nothing here looks at which id was drawn, so the output stays the target's own. Coefficients are float64, and learned
from judged blocks (`observe_drafts.py`).

B requests, K drafts, C candidates, S slots and one trash row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from paceline.ops.dispatch import choose, kernel, tl, triton
from paceline.ops.sample_tokens import NO_TOKEN

FEATURE_LIMIT = 40.0
_NOTHING, _FROM_Q, _FROM_HEAD = 0, 1, 2


class KnownFeatures(NamedTuple):
    """What is known of waiting drafts, changed in place.

    Attributes:
        features_SK: float32.
        is_known_S: bool, whether a slot's features are those of its drafts; never of the trash slot, the last.
    """

    features_SK: Tensor
    is_known_S: Tensor


class Coefficients(NamedTuple):
    """Of the chances.

    Attributes:
        slope: float64 scalar.
        intercept_K: float64.
    """

    slope: Tensor
    intercept_K: Tensor


def largest_log_odds(log_q_BKC: Tensor) -> Tensor:
    """Log-odds of each row's most likely candidate, float32 [B, K] within +-40.

    Args:
        log_q_BKC: float, log-probabilities up to a constant; every other id has probability 0.
    """
    best = log_q_BKC.max(dim=-1, keepdim=True)
    others_BK = log_q_BKC.scatter(-1, best.indices, -torch.inf).logsumexp(dim=-1)
    odds_BK = (best.values.squeeze(-1) - others_BK).float()
    return odds_BK.nan_to_num(nan=-FEATURE_LIMIT).clamp(-FEATURE_LIMIT, FEATURE_LIMIT)


def draft_features(log_q_BKC: Tensor | None, confidence_BK: Tensor | None) -> Tensor | None:
    """What a proposal tells of each row's chances, float32 [B, K] as log-odds within +-40.

    Args:
        log_q_BKC: as drawn from.
        confidence_BK: of a head, which comes first.

    Returns:
        None for one-hot drafts without such a head.
    """
    if confidence_BK is not None:
        odds_BK = torch.logit(confidence_BK.float())
        return odds_BK.nan_to_num(nan=-FEATURE_LIMIT).clamp(-FEATURE_LIMIT, FEATURE_LIMIT)
    return None if log_q_BKC is None else largest_log_odds(log_q_BKC)


def chances(features_BK: Tensor, slope: Tensor, intercept_K: Tensor) -> Tensor:
    """Chance that each draft is kept if those before it are, float64 [B, K]; fewer drafts than K are the first ones."""
    return torch.sigmoid(slope * features_BK.double() + intercept_K[: features_BK.shape[1]])


def usable_prefix(confidence_BK: Tensor, threshold: float | Tensor) -> Tensor:
    """Count the drafts worth verifying: those before the first whose survival is below its threshold.

    The survival of draft i is the product of the confidences up to and including i: the chance that all of them are
    kept. Confidence i must not depend on draft i or later.

    Args:
        confidence_BK: float, estimates that draft i is kept if those before it are.
        threshold: one for all drafts, or float [K], one each; 0 keeps everything.
    Returns:
        int64 [B] in [0, K].
    """
    is_worth_it_BK = confidence_BK.cumprod(dim=-1) >= threshold
    return is_worth_it_BK.long().cumprod(dim=-1).sum(dim=-1)


def count_drafts(draft_ids_BK: Tensor) -> Tensor:
    """Drafts before the first missing one, int64 [B]."""
    return (draft_ids_BK != NO_TOKEN).long().cumprod(dim=1).sum(dim=1)


def hold_back_drafts_reference(
    known: KnownFeatures,
    coefficients: Coefficients | None,
    slots_B: Tensor,
    ids_BK: Tensor,
    log_q_BKC: Tensor | None,
    confidence_BK: Tensor | None,
    thresholds_K: Tensor | None,
    is_adaptive_B: Tensor | None,
) -> Tensor:
    """The definition."""
    features_BK = draft_features(log_q_BKC, confidence_BK)
    known.is_known_S.index_fill_(0, slots_B, features_BK is not None)
    known.is_known_S[-1:].fill_(False)
    if features_BK is None:
        return ids_BK
    num_drafts = features_BK.shape[1]
    known.features_SK[slots_B, :num_drafts] = features_BK
    if thresholds_K is None or coefficients is None:
        return ids_BK
    usable_B = usable_prefix(chances(features_BK, *coefficients), thresholds_K[:num_drafts])
    if is_adaptive_B is not None:
        usable_B = torch.where(is_adaptive_B, usable_B, num_drafts)
    position_K = torch.arange(num_drafts, device=ids_BK.device)
    return ids_BK.masked_fill(position_K >= usable_B.unsqueeze(1), NO_TOKEN)


@kernel
def _row_features(
    log_q_ptr: tl.tensor,
    confidence_ptr: tl.tensor,
    first: tl.tensor,
    k: tl.tensor,
    NUM_DRAFTS: tl.constexpr,
    NUM_CANDIDATES: tl.constexpr,
    IS_HEAD: tl.constexpr,
    LIMIT: tl.constexpr,
    CANDIDATES: tl.constexpr,
) -> tl.tensor:
    """In a kernel: `draft_features` of the rows from `first` on; what lies behind the last draft means nothing."""
    is_draft = k < NUM_DRAFTS
    if IS_HEAD:
        sure = tl.load(confidence_ptr + first + k, mask=is_draft, other=0.5).to(tl.float32)
        is_number = sure == sure
        # The logarithm of 0 is the bound itself.
        odds = tl.where(
            sure <= 0.0,
            -LIMIT,
            tl.where(sure >= 1.0, LIMIT, tl.log(tl.maximum(sure, 1e-30) / tl.maximum(1.0 - sure, 1e-30))),
        )
    else:
        lane = tl.arange(0, CANDIDATES)
        is_lane = is_draft[:, None] & (lane[None, :] < NUM_CANDIDATES)
        at = (first + k[:, None]) * NUM_CANDIDATES + lane[None, :]
        log_q = tl.load(log_q_ptr + at, mask=is_lane, other=float("-inf")).to(tl.float32)
        is_number = tl.max((log_q != log_q).to(tl.int32), axis=1) == 0
        log_q = tl.where(log_q == log_q, log_q, float("-inf"))
        best = tl.max(log_q, axis=1)
        best_lane = tl.min(tl.where(log_q == best[:, None], lane[None, :], CANDIDATES), axis=1)
        others = tl.where(lane[None, :] == best_lane[:, None], float("-inf"), log_q)
        second = tl.max(others, axis=1)
        shift = tl.where(second > float("-inf"), second, 0.0)
        mass = tl.sum(tl.exp(others - shift[:, None]), axis=1)
        rest = shift + tl.log(tl.where(mass > 0, mass, 1.0))
        odds = tl.where(mass > 0, tl.where(best > float("-inf"), best, 0.0) - rest, LIMIT)
        odds = tl.where(best > float("-inf"), odds, -LIMIT)
    return tl.where(is_number, tl.minimum(tl.maximum(odds, -LIMIT), LIMIT), -LIMIT)


@kernel
def _hold_back_drafts_kernel(
    slots_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    log_q_ptr: tl.tensor,
    confidence_ptr: tl.tensor,
    thresholds_ptr: tl.tensor,
    is_adaptive_ptr: tl.tensor,
    slope_ptr: tl.tensor,
    intercept_ptr: tl.tensor,
    features_ptr: tl.tensor,
    is_known_ptr: tl.tensor,
    kept_ptr: tl.tensor,
    trash_slot: tl.tensor,
    num_kept: tl.tensor,
    NUM_DRAFTS: tl.constexpr,
    NUM_CANDIDATES: tl.constexpr,
    SOURCE: tl.constexpr,
    FROM_HEAD: tl.constexpr,
    HOLDS_BACK: tl.constexpr,
    HAS_ADAPTIVE: tl.constexpr,
    LIMIT: tl.constexpr,
    DRAFTS: tl.constexpr,
    CANDIDATES: tl.constexpr,
) -> None:
    request = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + request)
    tl.store(is_known_ptr + slot, ((slot != trash_slot) & (SOURCE > 0)).to(tl.int8))
    if SOURCE > 0:
        k = tl.arange(0, DRAFTS)
        is_draft = k < NUM_DRAFTS
        first = request * NUM_DRAFTS
        odds = _row_features(
            log_q_ptr, confidence_ptr, first, k, NUM_DRAFTS, NUM_CANDIDATES, SOURCE == FROM_HEAD, LIMIT, CANDIDATES
        )
        tl.store(features_ptr + slot * num_kept + k, odds, mask=is_draft)
        if HOLDS_BACK:
            intercept = tl.load(intercept_ptr + k, mask=is_draft, other=0.0)
            chance = 1.0 / (1.0 + tl.exp(-(tl.load(slope_ptr) * odds.to(tl.float64) + intercept)))
            threshold = tl.load(thresholds_ptr + k, mask=is_draft, other=0.0)
            survival = tl.sum(tl.where(k == 0, chance, 0.0), axis=0)
            usable = (survival >= tl.sum(tl.where(k == 0, threshold, 0.0), axis=0)).to(tl.int32)
            is_open = usable
            for position in tl.static_range(1, NUM_DRAFTS):
                survival *= tl.sum(tl.where(k == position, chance, 0.0), axis=0)
                is_open &= (survival >= tl.sum(tl.where(k == position, threshold, 0.0), axis=0)).to(tl.int32)
                usable += is_open
            if HAS_ADAPTIVE:
                usable = tl.where(tl.load(is_adaptive_ptr + request) != 0, usable, NUM_DRAFTS)
            ids = tl.load(ids_ptr + first + k, mask=is_draft, other=-1)
            tl.store(kept_ptr + first + k, tl.where(k < usable, ids, -1), mask=is_draft)


def hold_back_drafts_triton(
    known: KnownFeatures,
    coefficients: Coefficients | None,
    slots_B: Tensor,
    ids_BK: Tensor,
    log_q_BKC: Tensor | None,
    confidence_BK: Tensor | None,
    thresholds_K: Tensor | None,
    is_adaptive_B: Tensor | None,
) -> Tensor:
    """Launch one program per request."""
    num_requests, num_drafts = ids_BK.shape
    source = _FROM_HEAD if confidence_BK is not None else _NOTHING if log_q_BKC is None else _FROM_Q
    num_candidates = log_q_BKC.shape[2] if log_q_BKC is not None and source == _FROM_Q else 1
    holds_back = source != _NOTHING and thresholds_K is not None and coefficients is not None
    ids_BK = ids_BK.contiguous()
    kept_BK = torch.empty_like(ids_BK) if holds_back else ids_BK
    nothing = known.features_SK
    slope, intercept_K = (nothing, nothing) if coefficients is None else coefficients
    with torch.cuda.device_of(ids_BK):
        _hold_back_drafts_kernel[(num_requests,)](
            slots_B.contiguous(),
            ids_BK,
            nothing if log_q_BKC is None else log_q_BKC.contiguous(),
            nothing if confidence_BK is None else confidence_BK.contiguous(),
            nothing if thresholds_K is None else thresholds_K.contiguous(),
            ids_BK if is_adaptive_B is None else is_adaptive_B.contiguous().view(torch.uint8),
            slope,
            intercept_K,
            known.features_SK,
            known.is_known_S.view(torch.int8),
            kept_BK,
            known.is_known_S.shape[0] - 1,
            known.features_SK.shape[1],
            NUM_DRAFTS=num_drafts,
            NUM_CANDIDATES=num_candidates,
            SOURCE=source,
            FROM_HEAD=_FROM_HEAD,
            HOLDS_BACK=holds_back,
            HAS_ADAPTIVE=is_adaptive_B is not None,
            LIMIT=FEATURE_LIMIT,
            DRAFTS=triton.next_power_of_2(num_drafts),
            CANDIDATES=triton.next_power_of_2(num_candidates),
            num_warps=1,
        )
    return kept_BK


def hold_back_drafts(
    known: KnownFeatures,
    coefficients: Coefficients | None,
    slots_B: Tensor,
    ids_BK: Tensor,
    *,
    log_q_BKC: Tensor | None = None,
    confidence_BK: Tensor | None = None,
    thresholds_K: Tensor | None = None,
    is_adaptive_B: Tensor | None = None,
) -> Tensor:
    """Keep a block's features for later, and give its drafts without those that are not worth a row.

    Args:
        known: of all slots, changed in place.
        coefficients: of the chances; None holds nothing back.
        slots_B: int64; only the trash slot may stand here twice.
        ids_BK: int64, at least one column.
        log_q_BKC: float32 [B, K, C]; None for one-hot drafts.
        confidence_BK: float32, of a head; comes before q. Without both nothing is known, and nothing held back.
        thresholds_K: float64, survival that each draft needs; at least K entries. None holds nothing back.
        is_adaptive_B: bool, whose drafts may be held back; None for all.

    Returns:
        int64 [B, K], -1 where a draft is held back; `ids_BK` itself where none can be.
    """
    run = choose("hold_back_drafts", slots_B, hold_back_drafts_reference, hold_back_drafts_triton)
    return run(known, coefficients, slots_B, ids_BK, log_q_BKC, confidence_BK, thresholds_K, is_adaptive_B)
