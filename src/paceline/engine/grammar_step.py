"""Grammars around a step: masks for its rows before it, from what was drafted. B requests, T rows, W mask words."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.engine.running import RunningRequest
from paceline.engine.slots import SlotState
from paceline.ops.sample_tokens import NO_TOKEN

_EVERYTHING = -1  # a mask word with all bits set


def grammar_masks(requests: Sequence[RunningRequest], state: SlotState, num_rows: int) -> Tensor | None:
    """Say what each row of a step may emit, and drop drafts that lie behind one which no grammar would let pass.

    The first draft that a grammar refuses stays: verification has to refuse it, since dropping a draft for what it is
    would bias what is drawn in its place. Only requests with a grammar have their drafts read; without any, the host
    reads nothing.

    Args:
        requests: of the step, in its order, all in slots.
        state: holds the waiting drafts.
        num_rows: T.
    Returns:
        int32 [B, T, W] on the state's device; None if no request has a grammar.
    """
    structured = [(index, request) for index, request in enumerate(requests) if request.grammar is not None]
    if not structured:
        return None
    slots = [request.slot for _, request in structured if request.slot is not None]
    drafts: list[list[int]] = state.draft_ids[slots, : num_rows - 1].tolist()
    masks_of: dict[int, Tensor] = {}
    for (index, request), slot, draft_ids in zip(structured, slots, drafts, strict=True):
        assert request.grammar is not None, "only requests with a grammar are among them"
        num_drafts = draft_ids.index(NO_TOKEN) if NO_TOKEN in draft_ids else len(draft_ids)
        block = request.grammar.masks(draft_ids[:num_drafts], num_rows)
        request.grammar_error = block.error
        masks_of[index] = torch.as_tensor(block.mask_LW)
        if block.num_kept_drafts < num_drafts:
            state.draft_ids[slot, block.num_kept_drafts :] = NO_TOKEN
    (first, *_) = masks_of.values()
    mask_BTW = torch.full((len(requests), *first.shape), _EVERYTHING, dtype=torch.int32)
    for index, mask_TW in masks_of.items():
        mask_BTW[index] = mask_TW
    return mask_BTW.to(state.device)
