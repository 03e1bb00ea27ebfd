"""The way of one request's deltas from the engine's thread to the coroutine that reads them."""

from __future__ import annotations

import asyncio
import threading
from collections import deque

from paceline.engine.request import RequestDelta


class DeltaStream:
    """A mailbox with one writer, the engine's thread, and one reader in an event loop.

    A reader that is slow holds nobody up: once `most_waiting` deltas wait, further ones are joined to the last, so that
    nothing is lost and no more than so many wait.

    Args:
        loop: of the reader.
        most_waiting: at least 1.

    Attributes:
        is_abandoned: the reader has gone; what is put is not read any more.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, most_waiting: int) -> None:
        self.is_abandoned = False
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
                    return self._waiting.popleft()
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
