"""How much of a prompt runs between two decode steps, so that requests which decode do not wait for long.

Chunks end at multiples of `prefill_chunk_size`, counted from the start of the text, whoever else runs: a request's
arithmetic does not depend on its neighbours. Under `max_itl_ms` they may be shorter, and end at multiples of the block
size; how long they may be follows from what recent chunks and decode steps took. Host only, no torch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from paceline.engine.pass_timer import PassTimer
from paceline.engine.running import RunningRequest

_MEMORY = 0.7  # weight of what was known before a measurement: the last few count


class ChunkPace:
    """Lengths of prompt chunks.

    Args:
        prefill_chunk_size: tokens per chunk at most, and per step while others decode.
        block_size: of the caches.
        max_itl_ms: what a decode step and the chunks before it may take together; None sets no limit.
    """

    def __init__(self, *, prefill_chunk_size: int, block_size: int, max_itl_ms: float | None) -> None:
        self.prefill_chunk_size = prefill_chunk_size
        self._block_size, self._max_itl_ms = block_size, max_itl_ms
        self._token_ms: float | None = None
        self._step_ms = 0.0

    def budget(self, *, is_alone: bool) -> int:
        """Prompt tokens that may run before the next decode step.

        Args:
            is_alone: nobody decodes, so nobody waits.
        """
        if is_alone or self._max_itl_ms is None:
            return self.prefill_chunk_size
        if self._token_ms is None:  # the first chunk under a limit finds out
            return min(self._block_size, self.prefill_chunk_size)
        fitting = int((self._max_itl_ms - self._step_ms) / self._token_ms)
        return max(min(fitting, self.prefill_chunk_size), min(self._block_size, self.prefill_chunk_size))

    def chunk_end(self, start: int, goal: int, budget: int) -> int:
        """Where a chunk that begins at `start` ends. It may be beyond the budget: without a limit all chunks are whole,
        and under one they are a block at least.

        Args:
            start: tokens that were run before.
            goal: tokens of the text.
            budget: tokens that may still run in this step.
        """
        size = self.prefill_chunk_size
        end = min((start // size + 1) * size, goal)
        if end - start <= budget or self._max_itl_ms is None:
            return end
        shorter = (start + budget) // self._block_size * self._block_size
        return shorter if shorter > start else min((start // self._block_size + 1) * self._block_size, end)

    def observe_chunk(self, num_tokens: int, chunk_ms: float) -> None:
        """Take in what a chunk took."""
        token_ms = chunk_ms / num_tokens
        self._token_ms = token_ms if self._token_ms is None else _faded(self._token_ms, token_ms)

    def observe_step(self, step_ms: float) -> None:
        """Take in what a decode step took."""
        self._step_ms = step_ms if self._step_ms == 0 else _faded(self._step_ms, step_ms)


class ChunkTimes:
    """Prompt chunks that were launched, until the device is known to be done with them.

    Args:
        pace: learns how long they took.
    """

    def __init__(self, pace: ChunkPace) -> None:
        self._pace = pace
        self._chunks: deque[tuple[int, Sequence[RunningRequest], int, PassTimer]] = deque()

    def launched(self, number: int, requests: Sequence[RunningRequest], num_tokens: int, timer: PassTimer) -> None:
        """Note a chunk, or several in one pass.

        Args:
            number: of its pass.
            requests: whose; each waited for the whole pass.
            num_tokens: of all together.
            timer: stopped.
        """
        self._chunks.append((number, requests, num_tokens, timer))

    def finished(self, number: int) -> None:
        """Results of pass `number`, or of one behind it, have come, so chunks up to it are done."""
        while self._chunks and self._chunks[0][0] <= number:
            _, requests, num_tokens, timer = self._chunks.popleft()
            chunk_ms = timer.milliseconds()
            self._pace.observe_chunk(num_tokens, chunk_ms)
            for request in requests:
                request.trace.prefill_ms += chunk_ms

    def clear(self) -> None:
        """Forget them: nobody will know when they are done."""
        self._chunks.clear()


def _faded(known: float, new: float) -> float:
    return _MEMORY * known + (1 - _MEMORY) * new
