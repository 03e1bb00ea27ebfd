"""From target logits and waiting drafts to the tokens that count: one path for prompts, plain and speculative steps.

    rules, row by row -> temperature and truncation -> accepted drafts and one token more -> their log-probabilities

B requests, K drafts, L = K + 1 rows, V vocabulary, W mask words.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol, TypeGuard

import torch
from torch import Tensor

from paceline.engine.log_probabilities import BlockLogprobs, row_logprobs
from paceline.engine.sampling_flags import SamplingFlags
from paceline.engine.slots import SamplingRows, SlotState
from paceline.models.drafters.proposal import Proposal
from paceline.ops.acceptance import VerifyMethod, at_row, count_leading, reads_q
from paceline.ops.finalise_block import SOUND, fault_of_rows
from paceline.ops.step_rows import StepRows
from paceline.ops.target_distribution import TargetLogits, target_logits
from paceline.ops.verify_block import VerifiedBlock, verify_block


class JudgedBlock(NamedTuple):
    """What a step decided.

    Attributes:
        verified: accepted drafts and the token after them.
        logits: of the rows, before and after what the requests asked for.
    """

    verified: VerifiedBlock
    logits: TargetLogits


def judge(
    logits_BLV: Tensor,
    proposal: Proposal,
    state: SlotState,
    slots_B: Tensor,
    anchor_position_B: Tensor,
    flags: SamplingFlags,
    *,
    method: VerifyMethod = "standard",
    grammar_mask_BLW: Tensor | None = None,
    rows: StepRows | None = None,
) -> JudgedBlock:
    """Accept drafts and choose the token after them, under each request's own rules and sampling settings.

    Args:
        logits_BLV: raw, any float dtype; row i scores position anchor + i + 1.
        proposal: K drafts per request (K may be 0) and what they were drawn from.
        state: settings, seeds, step counters and rules; histories end with the anchor.
        slots_B: int64, the requests' slots.
        anchor_position_B: int64, position of row 0; draws are keyed by the position before the token.
        flags: what the host knows of the batch.
        method: how drafts are judged.
        grammar_mask_BLW: int32, what each row may emit; None where no request has a grammar.
        rows: settings and step counters of these slots, where they were looked up already.
    """
    settings = state.sampling_rows(slots_B) if rows is None else rows.sampling
    is_temperature_left = not flags.truncates and flags.num_processed_logprobs is None
    logits = target_logits(
        logits_BLV,
        proposal.ids_BK,
        anchor_position_B,
        state.tokens.rules_of(slots_B, flags, grammar_mask_BLW),
        temperature_B=settings.temperature_B,
        top_k_B=settings.top_k_B,
        top_p_B=settings.top_p_B,
        min_p_B=settings.min_p_B,
        all_greedy=flags.all_greedy,
        max_top_k=flags.max_top_k,
        any_top_p=flags.any_top_p,
        any_min_p=flags.any_min_p,
        is_temperature_left=is_temperature_left,
    )
    verified = verify_block(
        proposal.ids_BK,
        logits.processed_BLV,
        temperature_B=settings.temperature_B,
        seed_B=settings.seed_B,
        anchor_position_B=anchor_position_B,
        step_B=state.steps[slots_B] if rows is None else rows.steps_B,
        candidate_ids_BKC=proposal.candidate_ids_BKC,
        log_q_BKC=proposal.log_q_BKC,
        method=method,
        all_greedy=flags.all_greedy,
        is_tempered=not is_temperature_left,
    )
    return JudgedBlock(verified, logits)


class ChoosesOverRanks(Protocol):
    """An output head of which other processes hold the other ids: it can say what a row chooses without all scores."""

    def choose(
        self,
        hidden_RD: Tensor,
        sampling: SamplingRows,
        position_R: Tensor,
        *,
        all_greedy: bool,
        max_top_k: int,
        any_top_p: bool,
        any_min_p: bool,
    ) -> tuple[Tensor, Tensor]:
        """Each row's own token and its score, the same in every process; -1 where the row is unsound."""
        ...


def chooses_over_ranks(head: object) -> TypeGuard[ChoosesOverRanks]:
    """Whether an output head is one; in every step, where `isinstance` of a protocol takes as long as an operation."""
    return hasattr(type(head), "choose")


def needs_choices_alone(flags: SamplingFlags, method: VerifyMethod, grammar_mask_BLW: Tensor | None) -> bool:
    """Whether a block is judged by the rows' own tokens, and nobody asks for more of the logits."""
    wants_logprobs = flags.num_raw_logprobs is not None or flags.num_processed_logprobs is not None
    if flags.any_rules or grammar_mask_BLW is not None or wants_logprobs:
        return False
    return flags.all_greedy or not reads_q(method)


def judge_choices(
    head: ChoosesOverRanks, hidden_BLD: Tensor, draft_ids_BK: Tensor, rows: StepRows, flags: SamplingFlags
) -> VerifiedBlock:
    """`judge` where `needs_choices_alone` and the vocabulary is split: accept drafts that are the rows' own tokens.

    Args:
        head: gives the rows' own tokens.
        hidden_BLD: behind the final norm.
        draft_ids_BK: int64, -1 where there is none.
        rows: of the step.
        flags: what the host knows of the batch.
    """
    num_rows = hidden_BLD.shape[1]
    position_BL = rows.starts_B.unsqueeze(1) + torch.arange(num_rows, device=hidden_BLD.device)
    ids_R, best_R = head.choose(
        hidden_BLD.flatten(0, 1),
        SamplingRows(*(setting_B.repeat_interleave(num_rows) for setting_B in rows.sampling)),
        position_BL.flatten(),
        all_greedy=flags.all_greedy,
        max_top_k=flags.max_top_k,
        any_top_p=flags.any_top_p,
        any_min_p=flags.any_min_p,
    )
    own_ids_BL, fault_BL = ids_R.view_as(position_BL), fault_of_rows(best_R).view_as(position_BL)
    is_kept_BK = draft_ids_BK.eq(own_ids_BL[:, :-1]) & (fault_BL[:, :-1] == SOUND)
    accepted_B = count_leading(is_kept_BK)
    fault_B = at_row(fault_BL, accepted_B)
    return VerifiedBlock(accepted_B, at_row(own_ids_BL, accepted_B), fault_B, torch.zeros_like(accepted_B))


def block_logprobs(logits: TargetLogits, tokens_BL: Tensor, flags: SamplingFlags) -> BlockLogprobs | None:
    """Log-probabilities of the tokens that were emitted; None if no request wants any.

    Args:
        logits: of the rows.
        tokens_BL: int64, kept drafts, the target's own token, then -1.
        flags: say what is wanted.
    """
    if flags.num_raw_logprobs is None and flags.num_processed_logprobs is None:
        return None
    raw = processed = None
    if flags.num_raw_logprobs is not None:
        raw = row_logprobs(logits.raw_BLV, tokens_BL, flags.num_raw_logprobs)
    if flags.num_processed_logprobs is not None:
        processed = row_logprobs(logits.processed_BLV, tokens_BL, flags.num_processed_logprobs)
    return BlockLogprobs(raw, processed)
