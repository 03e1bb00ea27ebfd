from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from benchmarks import bench_gpu, gpu_micro, gpu_steps, gpu_text, prefix_cache_gain
from benchmarks.bench_gpu import Clock, Outcome, command, end, exit_code, main, needs, parse, sound_shapes, text_sets

CODE = "import sys; sys.exit({code})"


@pytest.fixture
def _scripted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Parts that end at once with a code of their own."""
    started: list[str] = []
    codes = {"gpu_steps": 0, "gpu_micro": 0, "gpu_text": 0, "prefix_cache_gain": 0}

    def start(module: str, arguments: list[str]) -> subprocess.Popen[bytes]:
        started.append(" ".join([module, *arguments]))
        return subprocess.Popen([sys.executable, "-c", CODE.format(code=codes[module])], start_new_session=True)

    monkeypatch.setattr(bench_gpu, "start", start)
    return started


def gate(folder: Path, **passes: bool) -> None:
    rows = [{"shape": shape.replace("_", "-"), "check": "passes", "passes": value} for shape, value in passes.items()]
    rows.append({"shape": "k3-mini", "kind": "plain", "check": "graph equals eager", "num_same": 4})
    (folder / "gpu-gate.json").write_text(json.dumps({"rows": rows}))


def test_parts_run_in_order_on_what_passed_the_gate(
    _scripted: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gate(tmp_path, smollm2_135m=True, qwen3_8b=False)
    assert main(["--out", str(tmp_path), "--steps-args", "--rounds 1"]) == 0
    assert [line.split()[0] for line in _scripted] == [
        "gpu_steps",
        "gpu_micro",
        "gpu_steps",
        "gpu_text",
        "prefix_cache_gain",
    ]
    assert "--gate-only --shapes smollm2-135m qwen3-8b k3-mini --device cuda" in _scripted[0]
    assert "--skip-gate --shapes smollm2-135m --device cuda" in _scripted[2] and _scripted[2].endswith("--rounds 1")
    assert "gpu-gate.json" in capsys.readouterr().out


def test_what_needs_a_shape_is_left_out_without_it(_scripted: list[str], tmp_path: Path) -> None:
    gate(tmp_path, qwen3_8b=True)
    assert main(["--out", str(tmp_path), "--parts", "gate", "steps", "text"]) == 1
    assert [line.split()[0] for line in _scripted] == ["gpu_steps", "gpu_steps"]
    assert main(["--out", str(tmp_path), "--parts", "gate", "text", "--despite-gate"]) == 0


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
    assert main(["--out", str(tmp_path), "--parts", "micro", "text", "--seconds", "0.6"]) == 1
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
    }
    asked = {part: read(command(part, options, ["qwen3-8b"], 100.0)[1:]) for part, read in readers.items()}
    assert {found.out for found in asked.values()} == {tmp_path}
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


def test_a_gate_that_left_nothing_passed_nothing(tmp_path: Path) -> None:
    assert sound_shapes(parse(["--out", str(tmp_path)])) == []


def test_vllm_is_left_out_where_it_is_not_installed(
    _scripted: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gate(tmp_path, smollm2_135m=True)
    monkeypatch.setattr(bench_gpu.importlib.util, "find_spec", lambda _name: None)
    assert main(["--out", str(tmp_path), "--parts", "gate", "--with-vllm"]) == 0
    assert "not installed" in capsys.readouterr().err
