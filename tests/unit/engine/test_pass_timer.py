"""How long a pass took where it ran."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline.engine.pass_timer import PassTimer


def test_a_pass_on_a_cpu_is_done_when_it_is_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter([1.0, 1.25, 9.0])
    monkeypatch.setattr("paceline.engine.pass_timer.time.perf_counter", lambda: next(moments))
    timer = PassTimer(torch.device("cpu"))
    timer.stop()
    assert timer.milliseconds() == 250.0


def test_a_pass_on_a_gpu_takes_what_the_device_took(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queueing takes a moment whatever the pass does, so the host's clock would say too little."""
    noted: list[str] = []

    class Event:
        def __init__(self, **_: Any) -> None:
            noted.append("made")

        def record(self) -> None:
            noted.append("recorded")

        def synchronize(self) -> None:
            noted.append("waited")

        def elapsed_time(self, other: Any) -> float:
            assert other is not self
            return 42.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    timer = PassTimer(torch.device("cuda"))
    timer.stop()
    assert noted == ["made", "made", "recorded", "recorded"]
    assert timer.milliseconds() == 42.0 and noted[-1] == "waited"
