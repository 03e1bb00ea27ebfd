"""From target logits and waiting drafts to the tokens that count: one path for prompts, plain and speculative steps.

B requests, K drafts, L = K + 1 rows, V vocabulary.
"""

from __future__ import annotations

from torch import Tensor

from paceline.engine.slots import SamplingFlags, SamplingRows, SlotState
from paceline.models.drafters.proposal import Proposal
from paceline.ops.target_distribution import process_logits
from paceline.ops.verify_block import VerifiedBlock, verify_block


def judge(
    logits_BLV: Tensor,
    proposal: Proposal,
    state: SlotState,
    slots_B: Tensor,
    anchor_position_B: Tensor,
    flags: SamplingFlags,
) -> VerifiedBlock:
    """Accept drafts and choose the token after them, under each request's own sampling settings.

    Args:
        logits_BLV: raw, any float dtype; row i scores position anchor + i + 1.
        proposal: K drafts per request (K may be 0) and what they were drawn from.
        state: settings, seeds and step counters.
        slots_B: int64, the requests' slots.
        anchor_position_B: int64, position of row 0; draws are keyed by the position before the token.
        flags: what the host knows of the batch.
    """
    settings = state.sampling_rows(slots_B)
    return verify_block(
        proposal.ids_BK,
        logits_BLV if flags.all_greedy else _processed(logits_BLV, settings, flags),
        temperature_B=settings.temperature_B,
        seed_B=settings.seed_B,
        anchor_position_B=anchor_position_B,
        step_B=state.steps[slots_B],
        candidate_ids_BKC=proposal.candidate_ids_BKC,
        log_q_BKC=proposal.log_q_BKC,
        all_greedy=flags.all_greedy,
    )


def _processed(logits_BLV: Tensor, settings: SamplingRows, flags: SamplingFlags) -> Tensor:
    """Apply temperature and truncation to every row; all rows of a request share its settings."""
    num_rows = logits_BLV.shape[1]
    processed_RV = process_logits(
        logits_BLV.flatten(0, 1),
        temperature_R=settings.temperature_B.repeat_interleave(num_rows),
        top_k_R=settings.top_k_B.repeat_interleave(num_rows),
        top_p_R=settings.top_p_B.repeat_interleave(num_rows),
        min_p_R=settings.min_p_B.repeat_interleave(num_rows),
        max_top_k=flags.max_top_k,
        any_top_p=flags.any_top_p,
        any_min_p=flags.any_min_p,
    )
    return processed_RV.view(logits_BLV.shape)
