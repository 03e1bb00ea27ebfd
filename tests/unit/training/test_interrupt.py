"""Stop requests: one signal or its echo asks, a later one insists, and the handlers of before come back."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.unit.training.processes import start

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


def hang_after_a_request(errors: Path, leaves: bool, watchdog_s: float) -> None:
    """A process that was asked to stop and does not, or does and then works on."""
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT), sys.stderr.fileno())
    with StopRequest(watchdog_s=watchdog_s):
        os.kill(os.getpid(), signal.SIGTERM)
        if not leaves:
            time.sleep(60)
    time.sleep(2 * watchdog_s)


def test_a_watchdog_ends_who_does_not_answer(tmp_path: Path) -> None:
    """A rank that waits for one that is gone never comes to its step border."""
    process = start(hang_after_a_request, tmp_path / "errors", False, 0.3)
    process.join(20)
    assert process.exitcode == 1
    assert "in hang_after_a_request" in (tmp_path / "errors").read_text(), "it says where"


def test_the_watchdog_lets_go_of_who_answers(tmp_path: Path) -> None:
    process = start(hang_after_a_request, tmp_path / "errors", True, 2.0)
    process.join(20)
    assert process.exitcode == 0
