"""The bounded buffer: order, watermarks, end, errors of either side, time-outs."""

from __future__ import annotations

import threading
import time

import pytest

from paceline.capture.feature_buffer import FeatureBuffer
from paceline.errors import CapacityError, NumericError


def _filled(buffer: FeatureBuffer[int], count: int, size: int) -> threading.Thread:
    def produce() -> None:
        for item in range(count):
            buffer.put(item, size)
        buffer.end()

    thread = threading.Thread(target=produce, daemon=True)
    thread.start()
    return thread


def test_a_thousand_items_arrive_in_order_and_never_exceed_the_bound() -> None:
    """Memory of a capture does not grow with its length, however slow the disk is."""
    buffer: FeatureBuffer[int] = FeatureBuffer(100, 20, 10.0)
    thread = _filled(buffer, 1000, 9)
    taken = []
    for item in buffer:
        taken.append(item)
        if item % 100 == 0:
            time.sleep(0.002)
    thread.join()
    assert taken == list(range(1000))
    assert 90 <= buffer.peak_bytes < 100 + 9
    assert buffer.num_bytes == 0


def test_a_buffer_without_its_high_mark_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault of the test above: a producer that never waits."""
    monkeypatch.setattr(threading.Condition, "wait", lambda self, timeout=None: True)
    buffer: FeatureBuffer[int] = FeatureBuffer(10**9, 20, 10.0)
    for item in range(1000):
        buffer.put(item, 9)
    assert buffer.peak_bytes == 9000


def test_the_producer_sleeps_from_the_high_mark_to_the_low_one() -> None:
    buffer: FeatureBuffer[int] = FeatureBuffer(30, 10, 10.0)
    thread = _filled(buffer, 6, 10)
    items = iter(buffer)
    deadline = time.monotonic() + 5
    while buffer.num_bytes < 30 and time.monotonic() < deadline:
        time.sleep(0.001)
    assert next(items) == 0
    time.sleep(0.02)
    assert buffer.num_bytes == 20, "one item less is not yet room"
    assert next(items) == 1
    deadline = time.monotonic() + 5
    while buffer.num_bytes < 30 and time.monotonic() < deadline:
        time.sleep(0.001)
    assert buffer.num_bytes == 30
    assert list(items) == [2, 3, 4, 5]
    thread.join()


def test_an_error_reaches_a_consumer_that_waits_and_a_producer_that_waits() -> None:
    error = NumericError("a state is not finite")
    empty: FeatureBuffer[int] = FeatureBuffer(30, 10, 10.0)
    threading.Timer(0.01, empty.fail, [error]).start()
    with pytest.raises(NumericError) as caught:
        list(empty)
    assert caught.value is error
    full: FeatureBuffer[int] = FeatureBuffer(30, 10, 10.0)
    full.put(0, 30)
    threading.Timer(0.01, full.fail, [error]).start()
    with pytest.raises(NumericError):
        full.put(1, 30)
    assert full.num_bytes == 0, "what nobody will read is dropped"


def test_a_side_that_stops_moving_is_an_error_and_not_a_hang() -> None:
    buffer: FeatureBuffer[int] = FeatureBuffer(30, 10, 0.02)
    buffer.put(0, 30)
    with pytest.raises(CapacityError, match="30 bytes of features wait"):
        buffer.put(1, 1)
    empty: FeatureBuffer[int] = FeatureBuffer(30, 10, 0.02)
    with pytest.raises(CapacityError, match="no features were computed"):
        list(empty)


def test_the_end_comes_after_what_was_put_before_it() -> None:
    buffer: FeatureBuffer[int] = FeatureBuffer(30, 10, 1.0)
    buffer.put(7, 1)
    buffer.end()
    assert list(buffer) == [7]
