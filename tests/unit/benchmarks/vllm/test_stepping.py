from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from benchmarks.random_dense import DENSE_SHAPES, dflash_contract
from benchmarks.vllm import stepping
from benchmarks.vllm.stepping import CONFIGS, cache_bytes, drafter_config, main, parse
from benchmarks.vllm.turns import say_ready, still_starting

from paceline.checkpoint.target_config import read_target_contract


@dataclass
class Counter:
    name: str
    value: int


class FakeLLM:
    made: dict[str, Any] = {}  # noqa: RUF012  (the last one's arguments)

    def __init__(self, **arguments: Any) -> None:
        FakeLLM.made = arguments

    def generate(self, prompts: Any, sampling: Any, use_tqdm: bool) -> Any:
        output = type("Output", (), {"token_ids": [1] * sampling["max_tokens"]})()
        return [type("Request", (), {"outputs": [output]})() for _ in prompts]

    def collective_rpc(self, function: Any, args: tuple[object, ...]) -> list[object]:
        return [(function.__name__, *args)]

    def get_metrics(self) -> list[Counter]:
        return [Counter("vllm:spec_decode_num_accepted_tokens", 3), Counter("vllm:other", 1)]


@pytest.fixture
def fake_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("vllm")
    module.LLM, module.__version__ = FakeLLM, "0.0"  # type: ignore[attr-defined]
    module.SamplingParams = lambda **settings: settings  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", module)


@pytest.mark.parametrize("shape", list(CONFIGS))
def test_both_sides_have_the_same_shapes(shape: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[shape]))
    theirs, ours = read_target_contract(tmp_path, shape), DENSE_SHAPES[shape]
    for name in ("name", "origin", "dtype"):
        object.__setattr__(theirs, name, getattr(ours, name))
    assert theirs == ours
    drafter, expected = drafter_config(CONFIGS[shape]), dflash_contract(ours)
    assert tuple(drafter["dflash_config"]["target_layer_ids"]) == expected.target_layer_ids
    assert (drafter["num_hidden_layers"], drafter["block_size"]) == (expected.num_layers, expected.block_size)


def test_one_configuration_measures_in_turn_and_writes_as_it_goes(fake_vllm: None, tmp_path: Path) -> None:
    say_ready(tmp_path, "smollm2-135m.plain")
    arguments = ["--out", str(tmp_path), "--shapes", "smollm2-135m", "--batches", "1", "2", "--new-tokens", "5"]
    arguments += ["--weights", "normal", "dummy"]
    assert main([*arguments, "--only", "smollm2-135m.dflash"]) == 0
    assert not still_starting(tmp_path, ["smollm2-135m.dflash"])
    lines = [json.loads(line) for line in (tmp_path / stepping.RESULT).read_text().splitlines()]
    assert [(line["weights"], line.get("batch")) for line in lines] == [
        (weights, batch) for weights in ("normal", "dummy") for batch in (1, 2, None)
    ]
    assert all(line["peer"] == "vllm 0.0" and line["shape"] == "smollm2-135m" for line in lines)
    assert len(lines[0]["rounds_ms"]) == 3 and lines[0]["ms"] > 0
    assert lines[2]["counters"] == {"vllm:spec_decode_num_accepted_tokens": 3}
    assert FakeLLM.made["speculative_config"]["num_speculative_tokens"] == 15
    assert (Path(FakeLLM.made["model"]) / "config.json").is_file()


def test_caches_hold_the_largest_batch() -> None:
    options = parse(["--out", "x"])
    plain, drafted = (cache_bytes(CONFIGS["qwen3-8b"], options, is_drafted=is_drafted) for is_drafted in (False, True))
    assert plain > 128 * 320 * 147_456 and drafted > 128 * 320 * (147_456 + 20_480)
    assert plain + drafted + 4 * 8.19e9 < 100e9, "both 8B models fit on one device beside the small ones"


def test_a_process_that_dies_is_told_and_waited_for_by_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--out", str(tmp_path), "--shapes", "smollm2-135m", "--kinds", "plain"]
    monkeypatch.setattr(sys, "argv", ["stepping", *arguments])
    monkeypatch.setattr(stepping, "_PAUSE_S", 0.05)
    (tmp_path / "smollm2-135m.plain.ready").touch()
    if "vllm" in sys.modules:
        pytest.skip("vLLM is installed here")
    assert main(arguments) == 1
    text = capsys.readouterr().out
    assert "smollm2-135m.plain FAILED" in text and "measured nothing" in text
    assert (tmp_path / "smollm2-135m.plain.failed").exists(), "nobody waits for it"


@pytest.mark.parametrize("seconds", ["0.3", "60"])
def test_nothing_outlives_the_time_or_a_request_to_end(
    seconds: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def start(name: str, options: Any) -> subprocess.Popen[bytes]:
        (options.out / f"{name}.log").touch()
        code = "import time; time.sleep(60)"
        started.append(subprocess.Popen([sys.executable, "-c", code], start_new_session=True))
        return started[-1]

    monkeypatch.setattr(stepping, "_start", start)
    monkeypatch.setattr(stepping, "_PAUSE_S", 0.05)
    before = signal.getsignal(signal.SIGTERM)
    try:
        began_s = time.monotonic()
        if seconds == "60":
            threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()
            with pytest.raises(SystemExit, match="143"):
                main(["--out", str(tmp_path), "--seconds", seconds])
        else:
            assert main(["--out", str(tmp_path), "--seconds", seconds]) == 1
    finally:
        signal.signal(signal.SIGTERM, before)
    assert len(started) == 4 and all(process.poll() is not None for process in started)
    assert time.monotonic() - began_s < 10
