"""The prompt pass: chunk by chunk through the target, context keys for every chunk, then the first token and block.

B = 1 request, C rows of a chunk, V vocabulary, W mask words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.engine.attends import AttentionChoice
from paceline.engine.cache import KeyValueCache
from paceline.engine.draft_stopper import DraftPlan, DraftStopper
from paceline.engine.proposal import Proposer, Rows
from paceline.engine.slots import SamplingFlags, SlotState
from paceline.engine.step import HostStep, StepOutput, draft_next, run_rows
from paceline.engine.verifier import judge
from paceline.models.drafters.proposal import Proposal
from paceline.models.targets.dense import DenseTarget
from paceline.ops.acceptance import VerifyMethod


@dataclass(frozen=True)
class PrefillChunk:
    """A part of one prompt.

    Attributes:
        slot: the request's.
        token_ids: of this chunk.
        start: position of the first.
        next_id: the prompt token after this chunk; None where the prompt ends, so that the chunk's last row gives the
            first new token.
        flags: the request's sampling settings.
        plan: the first block, drafted behind the last chunk; None drafts nothing.
        stopper: as for a decode step.
        verify_method: of the engine; without drafts all of them draw alike.
        grammar_mask_BLW: int32 [1, 1, W], what the first token may be; None without a grammar.
    """

    slot: int
    token_ids: Sequence[int]
    start: int
    next_id: int | None
    flags: SamplingFlags
    plan: DraftPlan | None = None
    stopper: DraftStopper | None = None
    verify_method: VerifyMethod = "standard"
    grammar_mask_BLW: Tensor | None = None


def prefill_chunk(
    target: DenseTarget,
    proposer: Proposer | None,
    cache: KeyValueCache,
    state: SlotState,
    choice: AttentionChoice,
    chunk: PrefillChunk,
) -> HostStep | None:
    """Run one chunk; running it twice does no harm, but for histories that rules read: restore them before.

    Args:
        target: the model that decides.
        proposer: receives the taps of every row; None without a drafter, or when this request cannot be drafted for.
        cache: the target's.
        state: committed to on the last chunk: n becomes the prompt's length and the new token the anchor.
        choice: form of attention.
        chunk: which rows.

    Returns:
        The first new token after the last chunk, as a step without drafts; None before the last chunk.
    """
    plan = None if chunk.plan is None else chunk.plan.on(state.device)
    slots_B = torch.tensor([chunk.slot], device=state.device)
    starts_B = torch.tensor([chunk.start], device=state.device)
    rows = Rows([chunk.slot], slots_B, [chunk.start], starts_B, len(chunk.token_ids))
    token_ids_BC = torch.tensor([chunk.token_ids], device=state.device)
    hidden_BCD = run_rows(target, proposer, cache, choice, rows, token_ids_BC)
    length = chunk.start + len(chunk.token_ids)
    ends_B = torch.full_like(starts_B, length)
    if chunk.next_id is not None:
        if proposer is not None:
            # What the target would say here is of no interest: the prompt goes on as it does.
            proposer.settle(rows, token_ids_BC, ends_B, torch.full_like(starts_B, chunk.next_id))
        return None
    no_drafts = Proposal(slots_B.new_empty(1, 0))
    logits_B1V = target.logits(hidden_BCD[:, -1:])
    judged = judge(
        logits_B1V,
        no_drafts,
        state,
        slots_B,
        ends_B - 1,
        chunk.flags,
        method=chunk.verify_method,
        grammar_mask_BLW=chunk.grammar_mask_BLW,
    )
    first_ids_B = judged.verified.bonus_ids_B
    state.lengths[slots_B] = length
    state.anchors[slots_B] = first_ids_B
    state.tokens.extend(slots_B, judged.tokens_BL, chunk.flags)
    if proposer is not None:
        proposer.settle(rows, token_ids_BC, ends_B, first_ids_B)
    num_waiting_B = torch.zeros_like(starts_B)
    if proposer is not None and plan is not None and plan.most > 0:
        num_waiting_B = draft_next(proposer, state, rows, plan, chunk.stopper, chunk.flags)
    (first,) = StepOutput.of(judged, no_drafts.ids_BK, num_waiting_B).to_host()
    return first
