"""What the two kernels that reach a verdict share (`finalise_block`, `finalise_rows`): the parameters that say what is
judged, a row's candidates, and the draw at the row that stopped.

B requests, K drafts, L = K + 1 rows, C candidates, V vocabulary.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.ops import noise
from paceline.ops.acceptance import CandidateRows, GivenCandidates, residual_weights
from paceline.ops.dispatch import kernel, tl, triton
from paceline.ops.target_distribution import GREEDY_BELOW
from paceline.ops.vocab_statistics import lowest_id


class VerdictLaunch(NamedTuple):
    """The common part of a launch.

    Attributes:
        operands: drafts, logits, candidates and their ln q, temperatures, seeds, positions, steps; and the verdict.
        verdict: int64 [4, B], which the kernel writes: accepted drafts, bonus id, fault, drafts without q.
        constants: of the block's shape and of what is given.
    """

    operands: tuple[Tensor, ...]
    verdict: Tensor
    constants: dict[str, Any]


def verdict_launch(
    draft_ids_BK: Tensor,
    processed_BLV: Tensor,
    candidates: CandidateRows | GivenCandidates,
    temperature_B: Tensor,
    seed_B: Tensor,
    anchor_position_B: Tensor,
    step_B: Tensor,
    statistic_BLS: Tensor,
    *,
    all_greedy: bool,
) -> VerdictLaunch:
    """Prepare a launch; arguments as for `finalise_block_triton`.

    Args:
        draft_ids_BK: int64, -1 ends a block.
        processed_BLV: float logits.
        candidates: the drafter's support at each position.
        temperature_B: float.
        seed_B: int64.
        anchor_position_B: int64.
        step_B: int64.
        statistic_BLS: float32; takes the place of ln q where that is not given, and is not read as such.
        all_greedy: every request is greedy.
    """
    ids_BKC, log_q_BKC = candidates
    verdict = torch.empty(4, processed_BLV.shape[0], dtype=torch.int64, device=processed_BLV.device)
    operands = (
        draft_ids_BK.contiguous(),
        processed_BLV.contiguous(),
        ids_BKC.contiguous(),
        statistic_BLS if log_q_BKC is None else log_q_BKC.contiguous(),
        temperature_B.contiguous(),
        seed_B.contiguous(),
        anchor_position_B.contiguous(),
        step_B.contiguous(),
        verdict,
    )
    constants = {
        "NUM_ROWS": processed_BLV.shape[1],
        "GREEDY_BELOW": GREEDY_BELOW,
        "HAS_LOG_Q": log_q_BKC is not None,
        "ALL_GREEDY": all_greedy,
        "ACCEPT": noise.ACCEPT,
        "CANDIDATES": triton.next_power_of_2(max(1, ids_BKC.shape[2])),
    }
    return VerdictLaunch(operands, verdict, constants)


@kernel
def load_candidates(
    candidate_ptr: tl.tensor, log_q_ptr: tl.tensor, at: tl.tensor, is_lane: tl.tensor, HAS_LOG_Q: tl.constexpr
) -> tl.tensor:
    """Ids of candidates and their ln q, 0 where q is not given; what q never draws is none, as padding is: -1."""
    ids = tl.load(candidate_ptr + at, mask=is_lane, other=-1)
    if HAS_LOG_Q:
        log_q = tl.load(log_q_ptr + at, mask=is_lane, other=float("-inf")).to(tl.float32)
        ids = tl.where(log_q == float("-inf"), -1, ids)
        log_q = tl.where(ids < 0, float("-inf"), log_q)
    else:
        log_q = tl.where(ids < 0, float("-inf"), 0.0)
    return ids, log_q


@kernel
def residual_of_stop(log_p: tl.tensor, log_q: tl.tensor, log_mass: tl.tensor, noisy: tl.tensor) -> tl.tensor:
    """What p - q leaves of the stop row's candidates, on the scale of its logits; and whether anything is left at all.

    Args:
        log_p: of the candidates.
        log_q: theirs, without the share that was accepted.
        log_mass: normaliser of the row.
        noisy: the best noisy logit of all other ids, of which q leaves everything.
    """
    residual = residual_weights(log_p, log_q) + log_mass
    return residual, (tl.max(residual, axis=0) > float("-inf")) | (noisy > float("-inf"))


@kernel
def noisiest_id(ids: tl.tensor, noisy: tl.tensor, other_noisy: tl.tensor, other_id: tl.tensor) -> tl.tensor:
    """The id that is drawn: the best of the candidates and of all others, the lowest where they tie.

    Args:
        ids: of the candidates.
        noisy: their weights and noise.
        other_noisy: the best of all other ids.
        other_id: whose that is.
    """
    best = tl.maximum(other_noisy, tl.max(noisy, axis=0))
    drawn_id = lowest_id((ids >= 0) & (noisy == best), ids, 0)
    return tl.minimum(drawn_id, tl.where(other_noisy == best, other_id, 0x7FFF_FFFF_FFFF_FFFF))
