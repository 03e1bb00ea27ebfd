"""A queue between whoever computes and whoever writes, bounded by bytes between two watermarks.

Once the buffer holds `high_bytes`, the producer waits until it is down to `low_bytes`: it then works for a while
without being woken for every item. The end and an error travel through the buffer too, so neither side waits for the
other in vain.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

from paceline.errors import CapacityError

Item = TypeVar("Item")


class FeatureBuffer(Generic[Item]):
    """One producer, one consumer.

    Args:
        high_bytes: from here on the producer waits. An item is taken whole, so the buffer may exceed it by one item.
        low_bytes: until here the producer waits.
        timeout_s: after so long without a move of the other side, either gives up.
    """

    def __init__(self, high_bytes: int, low_bytes: int, timeout_s: float) -> None:
        assert 0 <= low_bytes < high_bytes and timeout_s > 0
        self._high, self._low, self._timeout_s = high_bytes, low_bytes, timeout_s
        self._items: deque[tuple[Item, int]] = deque()
        self._changed = threading.Condition()
        self._is_draining = self._is_ended = False
        self._error: BaseException | None = None
        self.num_bytes = 0
        self.peak_bytes = 0

    def put(self, item: Item, num_bytes: int) -> None:
        """Hand over an item, waiting for room if there is none.

        Raises:
            CapacityError: nothing was taken for `timeout_s`.
            BaseException: what `fail` was called with, by either side.
        """
        with self._changed:
            while self._error is None and self._is_draining:
                if not self._changed.wait(self._timeout_s):
                    raise CapacityError(
                        f"{self.num_bytes} bytes of features wait to be written and nothing was written for "
                        f"{self._timeout_s:g} s",
                        hint="a disk that answers; the same command once more goes on from there",
                    )
            self._raise_error()
            self._items.append((item, num_bytes))
            self.num_bytes += num_bytes
            self.peak_bytes = max(self.peak_bytes, self.num_bytes)
            self._is_draining = self.num_bytes >= self._high
            self._changed.notify_all()

    def end(self) -> None:
        """Tell the consumer that nothing follows."""
        with self._changed:
            self._is_ended = True
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Drop everything and raise an error on the other side; the first error counts."""
        with self._changed:
            self._error = self._error or error
            self._items.clear()
            self.num_bytes = 0
            self._changed.notify_all()

    def __iter__(self) -> Iterator[Item]:
        """Items in order, until the end.

        Raises:
            CapacityError: nothing came for `timeout_s`.
            BaseException: what `fail` was called with.
        """
        while True:
            with self._changed:
                while not (self._items or self._is_ended or self._error):
                    if not self._changed.wait(self._timeout_s):
                        raise CapacityError(f"no features were computed for {self._timeout_s:g} s")
                self._raise_error()
                if not self._items:
                    return
                item, num_bytes = self._items.popleft()
                self.num_bytes -= num_bytes
                if self.num_bytes <= self._low:
                    self._is_draining = False
                self._changed.notify_all()
            yield item

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error
