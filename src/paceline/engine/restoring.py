"""What the host knows of a request, written to its slot on the device: at admission, and after an interruption."""

from __future__ import annotations

from paceline.engine.running import RunningRequest
from paceline.engine.slots import SlotState


def enter_slot(state: SlotState, request: RunningRequest) -> None:
    """Give a slot to a request: its settings, and the histories of its rules up to what it delivered.

    Args:
        state: of the slots.
        request: in a slot.
    """
    assert request.slot is not None, "only admitted requests have a state on the device"
    state.admit(
        request.slot,
        request.sampling,
        request.seed,
        limits=request.limits,
        prompt_ids=request.prompt_ids,
        end=len(request.prompt_ids) + request.output.max_tokens - 1,
        # A stop token within the first few is no end, and only the host counts them.
        stop_ids=() if request.sampling.min_tokens > 0 else request.output.stop_ids,
    )
    if request.is_resumed:
        state.tokens.restore(request.slot, request.prompt_ids, request.output.token_ids)


def restore_slot(state: SlotState, request: RunningRequest) -> None:
    """Set a slot back to what its request delivered; its waiting drafts are gone, which costs speed alone."""
    assert request.slot is not None, "only admitted requests have a state on the device"
    token_ids = request.output.token_ids
    request.num_drawn = request.num_waiting = 0
    request.epoch += 1
    state.tokens.restore(request.slot, request.prompt_ids, token_ids)
    if request.is_decoding:
        num_steps = len(request.trace.records)
        state.restore(request.slot, length=request.num_cached, anchor=token_ids[-1], step=num_steps)
