from __future__ import annotations

import multiprocessing
import threading
import time
from pathlib import Path

from benchmarks.vllm.turns import say_failed, say_ready, still_starting, turn, wait_for_all


def test_nobody_goes_before_all_have_started_or_failed(tmp_path: Path) -> None:
    names = ["a", "b", "c"]
    pauses: list[float] = []

    def others_start(seconds: float) -> None:
        pauses.append(seconds)
        (say_ready if len(pauses) < 3 else say_failed)(tmp_path, names[len(pauses) - 1])

    assert still_starting(tmp_path, names) == names
    assert wait_for_all(tmp_path, names, timeout_s=100, pause=others_start) == []
    assert len(pauses) == 3


def test_waiting_ends(tmp_path: Path) -> None:
    times = iter([0.0, 1.0, 11.0])
    found = wait_for_all(tmp_path, ["slow"], timeout_s=10, clock=lambda: next(times), pause=lambda _seconds: None)
    assert found == ["slow"]


def test_one_at_a_time(tmp_path: Path) -> None:
    inside: list[int] = []
    most: list[int] = []

    def measure() -> None:
        with turn(tmp_path / "new"):
            inside.append(1)
            most.append(len(inside))
            time.sleep(0.02)
            inside.pop()

    threads = [threading.Thread(target=measure) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 4


def _die_with_it(folder: str) -> None:
    with turn(Path(folder)):
        multiprocessing.current_process().kill()


def test_who_dies_holds_nobody_up(tmp_path: Path) -> None:
    process = multiprocessing.get_context("fork").Process(target=_die_with_it, args=(str(tmp_path),))
    process.start()
    process.join()
    with turn(tmp_path):
        pass
