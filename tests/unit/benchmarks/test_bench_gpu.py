from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from benchmarks import bench_gpu, gpu_micro, gpu_steps, gpu_text, prefix_cache_gain
from benchmarks.bench_gpu import Clock, Outcome, command, end, exit_code, main, needs, parse, text_sets
from benchmarks.vllm import stepping

from paceline.errors import EXIT_CHECK_SAYS_NO

CODE = "import sys; sys.exit({code})"


Verdicts = dict[str, bool]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Parts that end at once; the gate leaves the verdicts of `VERDICTS`."""
    commands: list[str] = []

    def start(module: str, arguments: list[str]) -> subprocess.Popen[bytes]:
        commands.append(" ".join([module, *arguments]))
        code = EXIT_CHECK_SAYS_NO if "--gate-only" in arguments and leave_verdicts(tmp_path) else 0
        return subprocess.Popen([sys.executable, "-c", CODE.format(code=code)], start_new_session=True)

    monkeypatch.setattr(bench_gpu, "start", start)
    monkeypatch.setattr(sys.modules[__name__], "VERDICTS", {})
    return commands


VERDICTS: Verdicts = {}


def leave_verdicts(folder: Path) -> bool:
    """As `gpu_steps` does; True if a shape failed."""
    rows: list[dict[str, object]] = [
        {"shape": shape, "kind": None, "check": "passes", "passes": passes} for shape, passes in VERDICTS.items()
    ]
    rows.append({"shape": "k3-mini", "kind": "plain", "check": "graph equals eager", "num_same": 4})
    (folder / "gpu-gate.json").write_text(json.dumps({"rows": rows}))
    return False in VERDICTS.values()


def test_parts_run_in_order_on_what_passed_the_gate(
    started: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    VERDICTS.update({"smollm2-135m": True, "qwen3-8b": False, "k3-mini": True})
    assert main(["--out", str(tmp_path), "--steps-args", "--rounds 1"]) == 3
    assert [line.split()[0] for line in started] == [
        "gpu_steps",
        "gpu_micro",
        "gpu_steps",
        "gpu_text",
        "prefix_cache_gain",
    ]
    assert "--gate-only --shapes smollm2-135m qwen3-8b k3-mini --device cuda" in started[0]
    assert "--skip-gate --shapes smollm2-135m k3-mini --device cuda" in started[2]
    assert started[2].endswith("--rounds 1")
    assert "gpu-gate.json" in capsys.readouterr().out


def test_what_needs_a_shape_is_left_out_without_it(started: list[str], tmp_path: Path) -> None:
    VERDICTS.update({"smollm2-135m": False, "qwen3-8b": True})
    assert main(["--out", str(tmp_path), "--parts", "gate", "steps", "text"]) == 3
    assert [line.split()[0] for line in started] == ["gpu_steps", "gpu_steps"]
    started.clear()
    assert main(["--out", str(tmp_path), "--parts", "gate", "text", "--despite-gate"]) == 3
    assert [line.split()[0] for line in started] == ["gpu_steps", "gpu_text"]


def test_what_the_gate_was_told_to_leave_out_is_measured_and_named(
    started: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    VERDICTS.update({"smollm2-135m": True})
    arguments = ["--parts", "gate", "steps", "--gate-args", "--shapes smollm2-135m"]
    assert main(["--out", str(tmp_path), *arguments]) == 0
    assert "--shapes smollm2-135m qwen3-8b k3-mini --device" in started[1]
    assert "not checked: qwen3-8b, k3-mini" in capsys.readouterr().err


def test_an_older_verdict_is_none(tmp_path: Path, started: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    VERDICTS.update({"smollm2-135m": True})
    leave_verdicts(tmp_path)
    monkeypatch.setattr(sys.modules[__name__], "CODE", "import sys; sys.exit(1)")
    monkeypatch.setattr(sys.modules[__name__], "leave_verdicts", lambda _folder: False)  # the gate crashes
    assert main(["--out", str(tmp_path), "--parts", "gate", "steps", "--shapes", "smollm2-135m"]) == 1
    assert len(started) == 1


def test_vllm_comes_last_and_its_times_join_our_rows(
    started: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    alike = {"shape": "qwen3-8b", "kind": "plain", "weights": "normal"}
    rows = [{**alike, "batch": batch, "ours_ms": 4.0, "peer_ms": None} for batch in (1, 8)]
    (tmp_path / "gpu-steps.json").write_text(json.dumps({"name": "gpu-steps", "machine": "m", "rows": rows}))
    (tmp_path / "vllm").mkdir()
    line = json.dumps({"peer": "vllm 0", **alike, "batch": 8, "ms": 6.0})
    (tmp_path / "vllm" / "vllm-steps.jsonl").write_text(f'{line}\n{{"shape": "qw')
    monkeypatch.setattr(bench_gpu.importlib.util, "find_spec", lambda _name: object())
    assert main(["--out", str(tmp_path), "--parts", "micro", "--with-vllm", "--shapes", "qwen3-8b", "k3-mini"]) == 0
    assert started[1].startswith("vllm.stepping") and started[1].endswith("--shapes qwen3-8b")
    found = json.loads((tmp_path / "gpu-steps.json").read_text())["rows"]
    assert [(row["peer_ms"], row["peer_over_ours"]) for row in found] == [(None, None), (6.0, 1.5)]
    assert "1 rows have its times" in capsys.readouterr().out


def test_no_part_outlives_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sleeper = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"
    monkeypatch.setattr(bench_gpu, "_GRACE_S", 0.5)
    monkeypatch.setattr(bench_gpu, "_SMALLEST_S", 0.1)
    monkeypatch.setattr(
        bench_gpu,
        "start",
        lambda *_arguments: subprocess.Popen(
            [sys.executable, "-c", sleeper], start_new_session=True, stderr=subprocess.DEVNULL
        ),
    )
    began_s = time.monotonic()
    assert main(["--out", str(tmp_path), "--parts", "micro", "text", "--micro-seconds", "0.6", "--seconds", "0.8"]) == 1
    assert time.monotonic() - began_s < 20


def test_a_process_that_has_ended_is_left_alone() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""], start_new_session=True)
    process.wait()
    end(process)
    assert process.returncode == 0


def test_every_part_is_told_what_it_understands(tmp_path: Path) -> None:
    (tmp_path / "gsm8k.jsonl").touch()
    (tmp_path / "b.npz").touch()
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "vllm-steps.jsonl").touch()
    options = parse(["--out", str(tmp_path), "--data", str(tmp_path)])
    readers = {
        "gate": gpu_steps.parse,
        "micro": gpu_micro.parse,
        "steps": gpu_steps.parse,
        "text": gpu_text.parse,
        "prefix": prefix_cache_gain.parse,
        "vllm": stepping.parse,
    }
    asked = {part: read(command(part, options, ["qwen3-8b"], 100.0)[1:]) for part, read in readers.items()}
    assert {found.out for part, found in asked.items() if part != "vllm"} == {tmp_path}
    assert asked["vllm"].out == tmp_path / "vllm" and asked["vllm"].shapes == ["qwen3-8b"]
    assert asked["gate"].gate_only and asked["steps"].skip_gate and asked["steps"].peer.exists()
    assert [file.name for file in asked["text"].sets] == ["gsm8k", "selfchat"] and asked["text"].seconds == 90
    assert asked["prefix"].device == "cuda" and text_sets(None) == []


def test_outcomes() -> None:
    done, failed, late = Outcome("steps", 0, 1.0), Outcome("text", 2, 1.0), Outcome("micro", None, 1.0)
    assert [exit_code(each) for each in ([done], [done, failed], [late], [Outcome("gate", 3, 1.0), failed])] == [
        0,
        1,
        1,
        3,
    ]
    assert needs("micro", []) is None and needs("prefix", ["qwen3-8b"]) == []
    assert Clock(100.0).left_s > 99


def test_vllm_is_left_out_where_it_is_not_installed(
    started: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_gpu.importlib.util, "find_spec", lambda _name: None)
    assert main(["--out", str(tmp_path), "--parts", "micro", "--with-vllm"]) == 1
    assert "not installed" in capsys.readouterr().out and len(started) == 1
