from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks import gpu_steps
from benchmarks.gpu_steps import batches_and_modes, main, parse, run_round
from benchmarks.growing_result import read_growing
from benchmarks.render_results import read_results, results_page
from tests import tiny

from paceline.engine.engine import Engine, EngineSettings

SMALL = [
    *("--device", "cpu", "--linear-mode", "plain", "--prompt-tokens", "8", "--new-tokens", "6", "--rounds", "2"),
    *("--warm-up", "1", "--timed", "2", "--max-model-len", "96"),
]


@pytest.fixture(autouse=True)
def _modules_stay_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each release would walk all that the session has loaded, and so would whatever runs later."""
    monkeypatch.setattr(gc, "unfreeze", lambda: None)


def test_rows_have_the_keys_that_readers_expect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    peer = tmp_path / "peer.jsonl"
    lines = [
        {"peer": "vllm 0", "shape": "tiny-smollm2", "kind": "dflash", "batch": 2, "weights": "normal", "ms": 4.5},
        {"shape": "tiny-smollm2", "kind": "dflash", "counters": {}},
    ]
    peer.write_text("".join(json.dumps(line) + "\n" for line in lines))
    out = tmp_path / "out"
    arguments = ["--shapes", "tiny-smollm2", "--batches", "1", "2", "--peer", str(peer), "--out", str(out)]
    assert main([*SMALL, *arguments]) == 0
    result = read_growing(out / "gpu-steps.json")
    assert result["complete"]
    assert {(row["batch"], row["kind"]) for row in result["rows"]} == {
        (1, "plain"),
        (1, "dflash"),
        (2, "plain"),
        (2, "dflash"),
    }
    for row in result["rows"]:
        assert {"shape", "batch", "kind", "ours_ms", "peer", "peer_ms", "floor_ms"} <= row.keys()
        assert row["step_ms"] > 0 and row["ours_ms"] > 0 and row["floor_ratio"] > 1 and row["replayed"] == 0
        assert row["peer_ms"] == (4.5 if (row["batch"], row["kind"]) == (2, "dflash") else None)
        assert ("acceptance_length" in row) and (row["acceptance_length"] is None) == (row["kind"] == "plain")
    gate = read_growing(out / "gpu-gate.json")
    assert [(row["kind"], row["check"]) for row in gate["rows"]] == [
        (None, "passes"),
        ("dflash", "follows float32"),
        ("plain", "follows float32"),
    ]
    assert gate["rows"][0]["passes"] is True
    assert "floor_ratio" in capsys.readouterr().out
    assert "gpu-steps" in results_page(read_results(out))


def test_a_case_that_fails_costs_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = gpu_steps.time_steps

    def fails_once(engine: Any, *, batch: int, **sizes: int) -> Any:
        if batch == 1:
            raise RuntimeError("planted")
        return measured(engine, batch=batch, **sizes)

    monkeypatch.setattr(gpu_steps, "time_steps", fails_once)
    arguments = ["--shapes", "tiny-qwen3", "--kinds", "plain", "--batches", "1", "2", "--skip-gate", "--skip-wall"]
    assert main([*SMALL, *arguments, "--out", str(tmp_path)]) == 0
    result = read_growing(tmp_path / "gpu-steps.json")
    assert [row["batch"] for row in result["rows"]] == [2] and not result["complete"]
    assert "batch 1, default FAILED" in capsys.readouterr().err


def test_a_shape_whose_recorded_steps_differ_is_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"num_same": 3, "num_prompts": 4, "num_steps": 50, "num_replayed": 49, "first_difference": 7}
    monkeypatch.setattr(gpu_steps, "records_steps", lambda _device: True)
    monkeypatch.setattr(gpu_steps, "compare_modes", lambda *_arguments, **_options: found)
    arguments = ["--shapes", "tiny-smollm2", "--kinds", "plain", "--batches", "1", "--out", str(tmp_path)]
    assert main([*SMALL, *arguments]) == 3
    assert not (tmp_path / "gpu-steps.json").exists()
    found["num_same"] = 4
    assert main([*SMALL, *arguments]) == 0
    monkeypatch.setattr(gpu_steps, "compare_with_float32", lambda *_arguments: {"follows": False})
    assert main([*SMALL, *arguments]) == 3
    monkeypatch.undo()
    monkeypatch.setattr(gpu_steps, "records_steps", lambda _device: True)
    monkeypatch.setattr(gpu_steps, "compare_modes", lambda *_arguments, **_options: found)
    found["num_replayed"] = 0  # nothing was played back, so nothing was compared
    assert main([*SMALL, *arguments]) == 3


def test_a_round_counts_steps_and_times_those_in_which_all_decode() -> None:
    target, drafter = tiny.loaded()
    settings = EngineSettings(max_num_seqs=2, max_model_len=128, prefix_cache=False)
    found = run_round(Engine(target, None, settings), tiny.tiny_prompts([9, 9]), 12)
    assert found.num_steps == 12 and found.num_tokens == 24 and found.acceptance is None
    assert len(found.decode_s) == 9, "of 11 steps, but for the one behind the prompts and the one in which requests end"
    assert sum(found.decode_s) < found.total_s
    drafted = run_round(Engine(target, drafter, settings), tiny.tiny_prompts([9, 9]), 12)
    assert drafted.num_tokens == 24 and drafted.num_steps <= 12
    assert drafted.acceptance is not None and drafted.acceptance >= 1


def test_slow_cases_take_fewer_steps_and_eager_ones_no_rounds(tmp_path: Path) -> None:
    arguments = [
        "--shapes",
        "tiny-smollm2",
        "--kinds",
        "plain",
        "--batches",
        "1",
        "--skip-gate",
        "--out",
        str(tmp_path),
    ]
    many = ["--rounds", "9", "--warm-up", "20", "--timed", "80", "--max-model-len", "256", "--case-seconds", "0.01"]
    assert main([*SMALL, *many, *arguments, "--modes", "eager", "default"]) == 0
    rows = {row["mode"]: row for row in read_growing(tmp_path / "gpu-steps.json")["rows"]}
    assert rows["eager"]["num_timed"] == 20 and "ours_ms" not in rows["eager"]
    assert rows["default"]["num_rounds"] == 1


def test_every_shape_has_its_cases() -> None:
    options = parse([])
    assert batches_and_modes("qwen3-8b", options) == ((1, 8, 32, 128), ("default",))
    assert batches_and_modes("k3-mini", options) == ((1, 32), ("graph", "eager"))
    assert batches_and_modes("k3-mini", parse(["--batches", "8", "--modes", "eager"])) == ([8], ["eager"])


def test_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse([]).shapes == ["smollm2-135m", "qwen3-8b", "k3-mini"]
    with pytest.raises(SystemExit):
        parse(["--max-model-len", "300"])
    assert "at least 320" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.parametrize("shape", ["tiny-smollm2", "tiny-qwen3", "tiny-k3"])
def test_recorded_steps_pass_the_gate_and_are_played_back(shape: str, tmp_path: Path) -> None:
    arguments = ["--shapes", shape, "--batches", "2", "--modes", "graph", "--rounds", "1", "--new-tokens", "32"]
    sizes = ["--prompt-tokens", "16", "--warm-up", "10", "--timed", "40", "--max-model-len", "256"]
    assert main([*arguments, *sizes, "--out", str(tmp_path)]) == 0
    rows = read_growing(tmp_path / "gpu-steps.json")["rows"]
    assert len(rows) == 2 and all(row["replayed"] > 0.9 for row in rows)


def test_each_kind_of_weights_is_measured_with_models_of_that_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    largest: list[tuple[str, float]] = []
    make_target, make_drafter = gpu_steps.make_target, gpu_steps.make_drafter

    def watched_target(*arguments: Any, **options: Any) -> Any:
        target = make_target(*arguments, **options)
        largest.append(("target", float(target.model.embed_tokens.weight.detach().abs().max())))
        return target

    def watched_drafter(*arguments: Any) -> Any:
        drafter = make_drafter(*arguments)
        largest.append(("drafter", max(float(each.detach().abs().max()) for each in drafter.model.parameters())))
        return drafter

    monkeypatch.setattr(gpu_steps, "make_target", watched_target)
    monkeypatch.setattr(gpu_steps, "make_drafter", watched_drafter)
    arguments = ["--shapes", "tiny-smollm2", "tiny-k3", "--batches", "1", "--weights", "dummy", "normal"]
    assert main([*SMALL, *arguments, "--skip-gate", "--skip-wall", "--out", str(tmp_path)]) == 0
    result = read_growing(tmp_path / "gpu-steps.json")
    assert result["complete"]
    found = [(row["shape"], row["kind"], row["weights"]) for row in result["rows"]]
    assert found == [
        *[("tiny-smollm2", kind, weights) for kind in ("plain", "dflash") for weights in ("normal", "dummy")],
        *[("tiny-k3", kind, "normal") for kind in ("plain", "dflash")],
    ]
    assert [(what, size <= 1e-3) for what, size in largest[:4]] == [
        *[("target", True), ("drafter", True)],
        *[("target", False), ("drafter", False)],
    ]
