"""The invariants of `invariants.py`, asked about the requests of a running loop; in debug mode alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from paceline.engine.invariants import CheckedRequest, InvariantChecks
from paceline.engine.running import RunningRequest
from paceline.engine.state_checks import StateChecks


class LoopChecks:
    """Shows requests to `InvariantChecks`.

    Args:
        checks: raises where something does not hold.
        states: the same for recurrent states; None where the target has none.
    """

    def __init__(self, checks: InvariantChecks, states: StateChecks | None = None) -> None:
        self._checks, self._states = checks, states

    def on_admission(self, request: RunningRequest, slot: int) -> None:
        """A request's blocks were set, in a slot that it has or is about to get."""
        self._checks.on_admission(_checked(request, slot))

    def before_pass(self, number: int, running: Iterable[RunningRequest], rows: Mapping[str, tuple[int, int]]) -> None:
        """A pass is about to be launched.

        Args:
            number: counts launches.
            running: every request in a slot.
            rows: by request id, those of passes that were launched and not read, and those of this pass.
        """
        running = list(running)
        held = [_checked(request, request.slot, *rows.get(request.request_id, (0, 0))) for request in running]
        self._checks.before_step(number, held)
        if self._states is not None:
            self._states.before_pass(running)

    def after_pass(self, number: int, running: Iterable[RunningRequest]) -> None:
        """A pass was taken in."""
        running = list(running)
        self._checks.after_step(number, [_checked(request, request.slot) for request in running])
        if self._states is not None:
            self._states.after_pass(running)

    def on_publish(self, request: RunningRequest, index: int) -> None:
        """A block of a request is about to be published."""
        self._checks.on_publish(_checked(request, request.slot or 0), index)

    def on_free(self, blocks: Sequence[int], *, fence: int) -> None:
        """Blocks are about to be freed."""
        self._checks.on_free(blocks, fence=fence)

    def on_clear(self, blocks: Sequence[int]) -> None:
        """Blocks were zeroed."""
        self._checks.on_clear(blocks)


def _checked(request: RunningRequest, slot: int | None, num_unread: int = 0, num_rows: int = 0) -> CheckedRequest:
    assert slot is not None, "only admitted requests hold blocks"
    is_decoding = request.is_decoding and request.is_resumed
    if not is_decoding and num_unread > 0:
        num_unread -= 1  # the first token comes from the prompt's last row, whose keys count already
    return CheckedRequest(
        request_id=request.request_id,
        slot=slot,
        blocks=request.held.blocks,
        num_final=request.num_cached if is_decoding else request.num_prefilled,
        is_decoding=is_decoding,
        num_unread=num_unread,
        num_rows=num_rows,
        is_chunk=request.num_prefilled < request.prefill_goal,
    )
