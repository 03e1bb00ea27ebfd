"""Stop requests: one signal or its echo asks, a later one insists, and the handlers of before come back."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from paceline.training.interrupt import StopRequest


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """A clock that stands still until it is moved."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    yield now


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_asks(number: signal.Signals) -> None:
    with StopRequest() as stop:
        assert not stop.is_set
        send(number)
        assert stop.is_set


@pytest.mark.parametrize("echo", [signal.SIGINT, signal.SIGTERM])
def test_signals_in_quick_succession_are_one_request(clock: list[float], echo: signal.Signals) -> None:
    """`timeout` signals its child and then the child's group: the same request, milliseconds apart."""
    with StopRequest() as stop:
        send(signal.SIGTERM)
        clock[0] += 0.005
        send(echo)
        clock[0] += 0.9
        send(echo)
        assert stop.is_set


def test_a_later_signal_insists(clock: list[float]) -> None:
    with StopRequest(), pytest.raises(KeyboardInterrupt):
        send(signal.SIGINT)
        clock[0] += 1.1
        send(signal.SIGINT)


def test_an_echo_does_not_move_the_border(clock: list[float]) -> None:
    """Somebody who leans on Ctrl-C gets through a second after the first."""
    with StopRequest() as stop, pytest.raises(KeyboardInterrupt):
        for _ in range(20):
            send(signal.SIGINT)
            assert stop.is_set
            clock[0] += 0.3


def test_handlers_come_back() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with StopRequest():
        assert signal.getsignal(signal.SIGINT) != before[0]
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    with pytest.raises(RuntimeError), StopRequest():
        raise RuntimeError
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_a_handler_from_outside_python_is_replaced_by_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """`signal.signal` says None for a handler that C code set, and does not take None back."""
    given: list[object] = []
    monkeypatch.setattr(signal, "signal", lambda number, handler: given.append(handler))
    with StopRequest():
        pass
    assert given[2:] == [signal.SIG_DFL, signal.SIG_DFL]


def test_beside_the_main_thread_it_leaves_signals_alone() -> None:
    seen: list[bool] = []

    def work() -> None:
        before = signal.getsignal(signal.SIGINT)
        with StopRequest() as stop:
            seen.append(signal.getsignal(signal.SIGINT) == before and not stop.is_set)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [True]
