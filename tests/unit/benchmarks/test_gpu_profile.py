from __future__ import annotations

from types import SimpleNamespace

import pytest
from benchmarks.gpu_profile import main, summarise


def event(key: str, us: float, count: int) -> SimpleNamespace:
    return SimpleNamespace(key=key, self_device_time_total=us, self_cpu_time_total=2 * us, count=count)


def test_times_are_per_step_and_the_costliest_comes_first() -> None:
    events = [event("small", 10.0, 10), event("host only", 0.0, 3), event("large" * 40, 400.0, 4)]
    rows = summarise(events, 2, is_gpu=True)
    assert [(row["us"], row["calls"], row["us_per_call"]) for row in rows] == [(200.0, 2.0, 100.0), (5.0, 5.0, 1.0)]
    assert len(str(rows[0]["kernel"])) == 90
    assert summarise(events, 2, is_gpu=False)[1]["us"] == 10.0


def test_the_script_names_what_a_step_runs(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--device", "cpu", "--shape", "tiny-smollm2", "--batch", "2", "--num-steps", "3", "--linear-mode", "plain"]
    assert main([*sizes, "--num-rows", "5"]) == 0
    text = capsys.readouterr().out
    assert "aten::" in text and "all kernels" in text


def test_a_sampled_step_with_fewer_drafts_can_be_looked_at(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--device", "cpu", "--shape", "tiny-smollm2", "--num-steps", "3", "--linear-mode", "plain"]
    assert main([*sizes, "--kind", "dflash", "--temperature", "1", "--num-drafts", "3", "--num-rows", "999"]) == 0
    assert "aten::log1p" in capsys.readouterr().out, "noise"
    with pytest.raises(SystemExit):
        main([*sizes, "--num-drafts", "3"])
    assert "for a kind that drafts" in capsys.readouterr().err
