"""The prompt pass: chunk by chunk through the target, context keys for every chunk, then the first token and block.

A request that stepped back is resumed the same way: its text up to the anchor is run, as far as it is not cached, but
nothing is judged, since every token is known. Its first block is drafted with its own step counter, so it is the block
that it would have had.

Where attention goes by tables, several short prompts run in one pass, padded to the longest (`prefill_prompts`): rows
behind a prompt's end are like refused drafts, unreadable and written again before they count.

B requests, C rows of a chunk, V vocabulary, W mask words.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paceline.engine.attends import AttentionChoice
from paceline.engine.draft_stopper import DraftPlan, DraftStopper
from paceline.engine.proposal import Proposer, Rows
from paceline.engine.slots import SamplingFlags, SlotState
from paceline.engine.step import StepOutput, draft_next, run_rows
from paceline.engine.target_cache import TargetCache
from paceline.engine.transfers import to_device
from paceline.engine.verifier import JudgedBlock, block_logprobs, judge
from paceline.models.drafters.proposal import Proposal
from paceline.models.targets.target import Target
from paceline.ops.acceptance import VerifyMethod

_NUM_COLUMNS = 4  # of `prompt_numbers`, before the tokens

# Drafts first blocks, given rows whose context is written: how many drafts then wait for each request, int64 [B].
DraftFirst: TypeAlias = Callable[[Rows, DraftPlan, DraftStopper | None, SamplingFlags], Tensor]


@dataclass(frozen=True)
class PrefillChunk:
    """A part of one prompt.

    Attributes:
        slot: the request's.
        token_ids: of this chunk.
        start: position of the first.
        next_id: the token after this chunk; None where the prompt ends, so that the chunk's last row gives the first
            new token.
        flags: the request's sampling settings.
        plan: the first block, drafted behind the last chunk; None drafts nothing.
        stopper: as for a decode step.
        verify_method: of the engine; without drafts all of them draw alike.
        grammar_mask_BLW: int32 [1, 1, W], what the first token may be; None without a grammar.
        resumed_step: on the last chunk of a resumed request its step counter; `next_id` is then its anchor.
        context_start: positions below hold no draft context.
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
    resumed_step: int | None = None
    context_start: int = 0


def prefill_chunk(
    target: Target,
    proposer: Proposer | None,
    cache: TargetCache,
    state: SlotState,
    choice: AttentionChoice,
    chunk: PrefillChunk,
    draft: DraftFirst | None = None,
) -> StepOutput | None:
    """Run one chunk.

    Running it twice does no harm, but for histories that rules read: restore them before. A hybrid target's states move
    on in place, so there the whole text is begun anew, from nothing or from where its state is kept.

    Args:
        target: the model that decides.
        proposer: receives the taps of every row; None without a drafter, or when this request cannot be drafted for.
        cache: the target's.
        state: committed to on the last chunk: n becomes the text's length, and the new or known token the anchor.
        choice: form of attention.
        chunk: which rows.
        draft: drafts the first block; None does it here.

    Returns:
        After the last chunk the first new token, as a step without drafts, or a step without even that where a request
        is resumed; None before the last chunk.
    """
    numbers = torch.tensor([chunk.slot, chunk.start, chunk.context_start, *chunk.token_ids])
    numbers = to_device(numbers, state.device).unsqueeze(0)
    slots_B, starts_B, context_starts_B = numbers[:, 0], numbers[:, 1], numbers[:, 2]
    token_ids_BC = numbers[:, 3:]
    lacks_context = chunk.context_start > 0
    rows = Rows(
        [chunk.slot],
        slots_B,
        [chunk.start],
        starts_B,
        len(chunk.token_ids),
        [chunk.context_start] if lacks_context else None,
        context_starts_B if lacks_context else None,
    )
    hidden_BCD = run_rows(target, proposer, cache, choice, rows, token_ids_BC, all_count=True)
    length = chunk.start + len(chunk.token_ids)
    ends_B = torch.full_like(starts_B, length)
    no_drafts = Proposal(slots_B.new_empty(1, 0))
    judged: JudgedBlock | None = None
    if chunk.next_id is None:
        judged = judge(
            target.logits(hidden_BCD[:, -1:]),
            no_drafts,
            state,
            slots_B,
            ends_B - 1,
            chunk.flags,
            method=chunk.verify_method,
            grammar_mask_BLW=chunk.grammar_mask_BLW,
        )
        next_ids_B = judged.verified.bonus_ids_B
        state.lengths[slots_B] = length
        state.anchors[slots_B] = next_ids_B
        tokens_B1 = next_ids_B.unsqueeze(1)
        state.retire(slots_B, ends_B, tokens_B1, judged.verified.fault_B)
        state.tokens.extend(slots_B, tokens_B1, chunk.flags)
    else:  # what the target would say here is of no interest: the text goes on as it does
        next_ids_B = torch.full_like(starts_B, chunk.next_id)
        if chunk.resumed_step is not None:
            state.restore(chunk.slot, length=length, anchor=chunk.next_id, step=chunk.resumed_step)
    if proposer is not None:
        proposer.settle(rows, token_ids_BC, ends_B, next_ids_B)
    if judged is None and chunk.resumed_step is None:
        return None
    num_waiting_B = torch.zeros_like(starts_B)
    if proposer is not None and chunk.plan is not None and chunk.plan.most > 0:
        draft = draft or _drafting(proposer, state)
        num_waiting_B = draft(rows, chunk.plan, chunk.stopper, chunk.flags)
    if judged is None:
        return StepOutput.resumed(num_waiting_B)
    return _first_tokens(judged, num_waiting_B, chunk.flags)


def prefill_prompts(
    target: Target,
    proposer: Proposer | None,
    cache: TargetCache,
    state: SlotState,
    choice: AttentionChoice,
    chunks: Sequence[PrefillChunk],
    flags: SamplingFlags,
) -> StepOutput:
    """Run the last chunks of several new prompts in one pass; drafting is left to the caller.

    Args:
        target: a dense model: nothing takes in rows that do not count.
        proposer: as for `prefill_chunk`.
        cache: the target's.
        state: committed to.
        choice: form of attention, the one that goes by tables.
        chunks: each ends its prompt, whose first token is wanted; none has a grammar. Plans of their own do not count.
        flags: of all their requests.

    Returns:
        The first tokens, as a step without drafts.
    """
    numbers = prompt_numbers(chunks, len(chunks), max(len(chunk.token_ids) for chunk in chunks), state.trash_slot)
    return run_prompts(
        target,
        proposer,
        cache,
        state,
        choice,
        to_device(torch.from_numpy(numbers), state.device),
        flags,
        lacks_context=any(chunk.context_start > 0 for chunk in chunks),
        method=chunks[0].verify_method,
        slots=[chunk.slot for chunk in chunks],
    )


def prompt_numbers(
    chunks: Sequence[PrefillChunk], num_requests: int, num_rows: int, trash_slot: int
) -> npt.NDArray[np.int64]:
    """What `run_prompts` reads: a row per request, with slot, start, start of its context, length and tokens.

    Args:
        chunks: at most `num_requests`.
        num_requests: rows behind the chunks are padding: one token of the trash slot.
        num_rows: tokens of the longest chunk, or more.
        trash_slot: of the state.
    """
    numbers = np.zeros((num_requests, _NUM_COLUMNS + num_rows), dtype=np.int64)
    numbers[:, :_NUM_COLUMNS] = trash_slot, 0, 0, 1
    for row, chunk in zip(numbers, chunks, strict=False):
        assert chunk.next_id is None and chunk.grammar_mask_BLW is None, "new prompts that need nothing of the host"
        count = len(chunk.token_ids)
        row[:_NUM_COLUMNS] = chunk.slot, chunk.start, chunk.context_start, count
        row[_NUM_COLUMNS : _NUM_COLUMNS + count] = chunk.token_ids
    return numbers


def prompt_rows(chunks: Sequence[PrefillChunk], device: torch.device) -> Rows:
    """The requests of a pass, as drafting wants them."""
    context_starts = [chunk.context_start for chunk in chunks]
    lacks_context = any(context_starts)
    slots, starts = [chunk.slot for chunk in chunks], [chunk.start for chunk in chunks]
    numbers = to_device(torch.tensor([slots, starts, context_starts]), device)
    return Rows(
        slots,
        numbers[0],
        starts,
        numbers[1],
        max(len(chunk.token_ids) for chunk in chunks),
        context_starts if lacks_context else None,
        numbers[2] if lacks_context else None,
    )


def run_prompts(
    target: Target,
    proposer: Proposer | None,
    cache: TargetCache,
    state: SlotState,
    choice: AttentionChoice,
    numbers_BX: Tensor,
    flags: SamplingFlags,
    *,
    lacks_context: bool,
    method: VerifyMethod,
    slots: Sequence[int] = (),
) -> StepOutput:
    """Run new prompts to their ends, from numbers on the device alone.

    Args:
        target: a dense model.
        proposer: as for `prefill_chunk`.
        cache: the target's.
        state: committed to.
        choice: form of attention, the one that goes by tables.
        numbers_BX: from `prompt_numbers`.
        flags: of all requests.
        lacks_context: draft context begins later than the text for one of them.
        method: how drafts will be judged; without drafts all methods draw alike.
        slots: of the requests, for proposers that look at them on the host.

    Returns:
        The first tokens, as a step without drafts.
    """
    assert choice.is_paged, "rows behind a prompt's end go where tables say"
    num_requests, num_rows = numbers_BX.shape[0], numbers_BX.shape[1] - _NUM_COLUMNS
    columns = numbers_BX[:, :_NUM_COLUMNS].T.contiguous()
    slots_B, starts_B, context_starts_B, counts_B = columns.unbind(0)
    token_ids_BC = numbers_BX[:, _NUM_COLUMNS:].contiguous()
    nowhere = [0] * num_requests  # where they stand is read from the device
    rows = Rows(
        slots or [state.trash_slot] * num_requests,
        slots_B,
        nowhere,
        starts_B,
        num_rows,
        nowhere if lacks_context else None,
        context_starts_B if lacks_context else None,
    )
    hidden_BCD = run_rows(target, proposer, cache, choice, rows, token_ids_BC, all_count=True)
    ends_B = starts_B + counts_B
    last_B11 = (counts_B - 1).view(-1, 1, 1)
    last_B1D = hidden_BCD.gather(1, last_B11.expand(-1, 1, hidden_BCD.shape[2]))
    no_drafts = Proposal(slots_B.new_empty(num_requests, 0))
    judged = judge(target.logits(last_B1D), no_drafts, state, slots_B, ends_B - 1, flags, method=method)
    next_ids_B = judged.verified.bonus_ids_B
    state.lengths[slots_B] = ends_B
    state.anchors[slots_B] = next_ids_B
    state.retire(slots_B, ends_B, next_ids_B.unsqueeze(1), judged.verified.fault_B)
    state.tokens.extend(slots_B, next_ids_B.unsqueeze(1), flags)
    if proposer is not None:
        proposer.settle(rows, token_ids_BC, ends_B, next_ids_B)
    return _first_tokens(judged, torch.zeros_like(starts_B), flags)


def _drafting(proposer: Proposer, state: SlotState) -> DraftFirst:
    return lambda rows, plan, stopper, flags: draft_next(proposer, state, rows, plan.on(state.device), stopper, flags)


def _first_tokens(judged: JudgedBlock, num_waiting_B: Tensor, flags: SamplingFlags) -> StepOutput:
    """A step without drafts, for requests whose first tokens were judged."""
    verified = judged.verified
    tokens_B1 = verified.bonus_ids_B.unsqueeze(1)
    return StepOutput.of(
        accepted_B=verified.accepted_B,
        tokens_BT=tokens_B1,
        fault_B=verified.fault_B,
        draft_ids_BK=tokens_B1[:, :0],
        num_zero_q_B=verified.num_zero_q_B,
        num_waiting_B=num_waiting_B,
        positions_B=torch.ones_like(num_waiting_B),
        logprobs=block_logprobs(judged.logits, tokens_B1, flags),
    )
