"""The prompt pass: chunk by chunk through the target, context keys for every chunk, then the first token and block.

B = 1 request, C rows of a chunk, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline.engine.attends import AttentionChoice
from paceline.engine.cache import KeyValueCache
from paceline.engine.proposal import Proposer, Rows
from paceline.engine.slots import SamplingFlags, SlotState
from paceline.engine.step import run_rows
from paceline.engine.verifier import judge
from paceline.models.drafters.proposal import Proposal
from paceline.models.targets.dense import DenseTarget


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
        proposes: draft a first block; meaningful on the last chunk.
    """

    slot: int
    token_ids: Sequence[int]
    start: int
    next_id: int | None
    flags: SamplingFlags
    proposes: bool


def prefill_chunk(
    target: DenseTarget,
    proposer: Proposer | None,
    cache: KeyValueCache,
    state: SlotState,
    choice: AttentionChoice,
    chunk: PrefillChunk,
) -> int | None:
    """Run one chunk; running it twice does no harm.

    Args:
        target: the model that decides.
        proposer: receives the taps of every row; None without a drafter, or when this request cannot be drafted for.
        cache: the target's.
        state: committed to on the last chunk: n becomes the prompt's length and the new token the anchor.
        choice: form of attention.
        chunk: which rows.

    Returns:
        The first new token after the last chunk, -1 if its logits held NaN or infinity; None before the last chunk.
    """
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
    verified = judge(logits_B1V, no_drafts, state, slots_B, ends_B - 1, chunk.flags)
    state.lengths[slots_B] = length
    state.anchors[slots_B] = verified.bonus_ids_B
    if proposer is not None:
        proposer.settle(rows, token_ids_BC, ends_B, verified.bonus_ids_B)
    if proposer is not None and chunk.proposes:
        state.store_proposal(slots_B, proposer.propose(rows, state, all_greedy=chunk.flags.all_greedy))
    return int(verified.bonus_ids_B)
