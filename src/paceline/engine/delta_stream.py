"""The way of one request's deltas from the engine's thread to the coroutine that reads them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque

from paceline.engine.request import RequestDelta


class DeltaStream:
    """A mailbox with one writer, the engine's thread, and one reader in an event loop.

    A reader that is slow holds nobody up: once `most_waiting` deltas wait, further ones are joined to the last, so that
    nothing is lost and no more than so many wait.

    Waking a reader costs the engine: on a CPU whose cores all compute, whoever wakes takes one of them away in the
    middle of a step. A reader that needs no token at once says how often it looks.

    Args:
        loop: of the reader.
        most_waiting: at least 1.
        interval_s: least time between two looks, at which all that came is one delta; the first and the last delta, and
            an error, wake the reader at once. 0 wakes it for each; infinity is for who wants the whole.

    Attributes:
        is_abandoned: the reader has gone; what is put is not read any more.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, most_waiting: int, interval_s: float = 0.0) -> None:
        self.is_abandoned = False
        self._interval_s, self._next_look_s = interval_s, 0.0
        self._loop, self._most_waiting = loop, most_waiting
        self._waiting: deque[RequestDelta] = deque()
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._has_news = asyncio.Event()

    def put(self, delta: RequestDelta) -> bool:
        """Deliver; from any thread.

        Returns:
            Whether somebody may still read it. False where the reader's loop is closed.
        """
        with self._lock:
            if len(self._waiting) >= self._most_waiting:
                delta = joined(self._waiting.pop(), delta)
            self._waiting.append(delta)
        if self._interval_s > 0 and delta.finish_reason is None:
            now_s = time.monotonic()
            if now_s < self._next_look_s:
                return not self.is_abandoned
            self._next_look_s = now_s + self._interval_s
        return self._wake()

    def fail(self, error: BaseException) -> bool:
        """Let the reader raise this behind the deltas that wait; from any thread, returns as `put` does."""
        with self._lock:
            self._error = error
        return self._wake()

    async def get(self) -> RequestDelta:
        """The next delta.

        Raises:
            BaseException: what `fail` was given, once no delta waits.
        """
        while True:
            with self._lock:
                if self._waiting:
                    delta = self._waiting.popleft()
                    while self._interval_s > 0 and self._waiting:
                        delta = joined(delta, self._waiting.popleft())
                    return delta
                if self._error is not None:
                    raise self._error
            # Set only by callbacks of this loop, and none runs between the look above and the wait below.
            self._has_news.clear()
            await self._has_news.wait()

    def _wake(self) -> bool:
        try:
            self._loop.call_soon_threadsafe(self._has_news.set)
        except RuntimeError:  # the loop is closed
            return False
        return not self.is_abandoned


def joined(first: RequestDelta, second: RequestDelta) -> RequestDelta:
    """Two deltas of a request as one; its step is the later one, and the request's trace has both."""
    logprobs = None
    if first.logprobs is not None or second.logprobs is not None:
        logprobs = (first.logprobs or ()) + (second.logprobs or ())
    return RequestDelta(
        request_id=second.request_id,
        token_ids=first.token_ids + second.token_ids,
        text=first.text + second.text,
        finish_reason=second.finish_reason,
        step=second.step if second.step is not None else first.step,
        logprobs=logprobs,
    )
