from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks import acceptance, prompt_sets
from benchmarks.acceptance import KEY, budgets, main, parse, requests_of
from benchmarks.acceptance_rows import (
    Walk,
    comparison,
    relative_difference,
    served_conversations,
    served_row,
    simulate_walk,
    simulated_row,
)
from benchmarks.prompt_sets import PromptSet
from benchmarks.render_results import read_results
from benchmarks.serving import serve
from tests import tiny
from tests.fakes import ByteTokenizer

from paceline.engine.engine import Engine, EngineSettings
from paceline.errors import EXIT_DONE, EXIT_INTERRUPTED, ConfigError
from paceline.models import loading
from paceline.trace.acceptance import AcceptanceSummary

PROMPTS = tuple(map(tuple, tiny.tiny_prompts([6, 11, 8])))
OPTIONS = argparse.Namespace(max_tokens=20, seed=0)


def test_budgets_are_the_stored_responses() -> None:
    assert budgets(PromptSet("a", PROMPTS), 20) == [20, 20, 20]
    assert budgets(PromptSet("a", PROMPTS[:2], ((1, 2, 3), (4,))), 20) == [3, 1]


def test_a_walk_over_what_was_served_is_what_was_served() -> None:
    target, drafter = tiny.loaded()
    engine = Engine(target, drafter, EngineSettings(max_num_seqs=2))
    prompt_set = PromptSet("talk", PROMPTS)
    requests = requests_of(prompt_set, 0.0, OPTIONS)
    results = serve(engine, requests.prompts, requests.samplings, "talk")
    conversations = served_conversations(results)
    assert [int(n) for n in conversations.starts] == [0, 26, 57, 85] and conversations.num_supervised == 60
    walk = simulate_walk(conversations, target, drafter, "talk")
    served = AcceptanceSummary.from_steps(record for result in results for record in result.trace.records)
    assert sum(walk.num_steps) == served.num_steps
    assert sum(walk.committed) == pytest.approx(served.num_steps + served.num_accepted)
    row = served_row(prompt_set, results, 0.0)
    assert tuple(row) == ("set", "temperature", "acceptance_length", "low", "high", "num_prompts", "simulated")
    assert row["acceptance_length"] == served.acceptance_length and row["simulated"] is False
    assert tuple(simulated_row(prompt_set, walk)) == tuple(row)

    stored = PromptSet("talk", PROMPTS, (results[0].token_ids, results[1].token_ids, (1,)), conversations)
    other = Walk(tuple(2 * value for value in walk.committed), walk.num_steps)
    found = comparison(stored, results, stored=other, served=walk)
    assert found["over_simulated"] == pytest.approx(-0.5) and found["over_simulated_served_text"] == pytest.approx(0)
    assert found["same_text"] == pytest.approx(2 / 3)


def test_walk_pools_sums_and_bounds_them() -> None:
    interval = Walk((20.0, 2.0, 0.0), (4, 2, 0)).interval()
    assert interval.estimate == pytest.approx(22 / 6) and interval.low == pytest.approx(1) and interval.high == 5
    row = simulated_row(PromptSet("talk", PROMPTS), Walk((20.0, 2.0), (4, 2)))
    assert row["simulated"] is True and row["num_prompts"] == 2 and row["temperature"] == 0.0


def test_served_over_simulated() -> None:
    assert relative_difference(2.94, 3.0) == pytest.approx(-0.02)


def test_options_name_known_sets(capsys: pytest.CaptureFixture[str]) -> None:
    options = parse(["--set", "a=a.npz", "--set", "b=b.npz", "--served-only", "b"])
    assert [file.name for file in options.sets] == ["a", "b"] and options.temperatures == [0.0, 1.0]
    with pytest.raises(SystemExit, match="2"):
        parse(["--set", "a=a.npz", "--served-only", "c"])
    assert "none of the sets" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([], "required: --set"),
        (["--set", "a=a.npz", "--resume"], "need --out"),
        (["--join", "a.json"], "need --out"),
        (["--set", "a=a.npz", "--set", "a=b.npz"], "two sets have the same name"),
        (["--set", "a=a.npz", "--draft-model", "x/d", "--also-draft-model", "y/d"], "two drafters have the same name"),
    ],
)
def test_options_that_contradict(arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse(arguments)
    assert problem in capsys.readouterr().err


class Chat(ByteTokenizer):
    """Bytes of the question."""

    has_chat_template = True

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        return self.encode(messages[-1]["content"])


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Arguments that serve two prompts of a set of questions and two stored conversations with tiny models."""
    target, drafter = tiny.loaded(tokenizer=Chat())
    monkeypatch.setattr(loading, "load_target", lambda *_, **__: target)
    monkeypatch.setattr(loading, "load_drafter", lambda *_, **__: drafter)
    monkeypatch.setattr(prompt_sets, "NUM_HELD_OUT", 2)
    (tmp_path / "ask.jsonl").write_text('{"prompt": "one"}\n{"prompt": "another"}\n')
    tokens = np.array(tiny.tiny_prompts([60])[0], np.uint16)
    np.savez(tmp_path / "talk.npz", tokens=tokens, prompt_len=np.array([8, 12]), response_len=np.array([18, 22]))
    sets = ["--set", f"ask={tmp_path / 'ask.jsonl'}", "--set", f"talk={tmp_path / 'talk.npz'}"]
    return [*sets, "--max-tokens", "12", "--dtype", "float32", "--concurrency", "3", "--threads", "1"]


def rows_of(folder: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = read_results(folder)["acceptance-smollm2"]["rows"]
    return rows


def is_marked_complete(folder: Path) -> bool:
    found: bool = json.loads((folder / "acceptance-smollm2.json").read_text())["complete"]
    return found


def test_a_whole_table(command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "out"
    also = ["--draft-model", "x/first", "--also-draft-model", "x/second"]
    assert main([*command, *also, "--out", str(folder)]) == EXIT_DONE
    rows = rows_of(folder)
    of_one = [("ask", 0.0, False), ("ask", 1.0, False), ("talk", 0.0, False), ("talk", 0.0, True), ("talk", 1.0, False)]
    assert [tuple(row[name] for name in KEY) for row in rows] == [
        (drafter, *row) for drafter in ("first", "second") for row in of_one
    ]
    assert is_marked_complete(folder) and all(row["num_prompts"] == 2 for row in rows)
    assert all(row["low"] <= row["acceptance_length"] <= row["high"] for row in rows)
    assert rows[2]["over_simulated_served_text"] == pytest.approx(0, abs=1e-6)
    assert {"over_simulated", "same_text"} <= set(rows[2]) and "over_simulated" not in rows[4]
    assert "over_simulated" in capsys.readouterr().out.splitlines()[0]


def test_what_a_kill_leaves_is_gone_on_with(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    main([*command, "--out", str(whole)])
    with monkeypatch.context() as patch:

        def killed(*_: Any) -> Any:
            raise KeyboardInterrupt

        patch.setattr(acceptance, "simulate_walk", killed)
        assert main([*command, "--out", str(cut)]) == EXIT_INTERRUPTED
    assert [row["set"] for row in rows_of(cut)] == ["ask", "talk"] and not is_marked_complete(cut)
    assert "interrupted; 2 rows are there" in capsys.readouterr().err
    served: list[str] = []
    requests = acceptance.requests_of
    monkeypatch.setattr(acceptance, "requests_of", lambda one, *rest: served.append(one.name) or requests(one, *rest))
    assert main([*command, "--out", str(cut), "--resume"]) == EXIT_DONE
    assert rows_of(cut) == rows_of(whole) and is_marked_complete(cut)
    assert served == ["talk", "ask", "talk"]  # the walks of "talk" were missing, and all of temperature 1
    with pytest.raises(ConfigError, match="max_tokens is 13 here and 12 there"):
        main([*command, "--max-tokens", "13", "--out", str(cut), "--resume"])


def test_time_that_is_up_leaves_a_marked_part(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "out"
    command[command.index("--concurrency") + 1] = "1"
    for num_looks, has_rows in ((1, False), (3, True)):  # the start, before the drafter is loaded, before each step
        clock = iter([0.0] * num_looks)
        watch = argparse.Namespace(monotonic=lambda clock=clock: next(clock, 100.0))
        monkeypatch.setattr(acceptance, "time", watch)
        assert main([*command, "--seconds", "10", "--out", str(folder)]) == EXIT_DONE
        assert "time is up" in capsys.readouterr().err
        assert folder.exists() == has_rows
    assert [(row["set"], row["temperature"]) for row in rows_of(folder)] == [("ask", 0.0)]
    assert not is_marked_complete(folder)


def test_tables_of_two_drafters_are_joined(command: list[str], tmp_path: Path) -> None:
    for name in ("first", "second"):
        main([*command, "--draft-model", name, "--temperatures", "0", "--out", str(tmp_path / name)])
    files = [str(tmp_path / name / "acceptance-smollm2.json") for name in ("first", "second")]
    assert main(["--join", *files, "--out", str(tmp_path / "both")]) == EXIT_DONE
    assert rows_of(tmp_path / "both") == [*rows_of(tmp_path / "first"), *rows_of(tmp_path / "second")]
    assert is_marked_complete(tmp_path / "both")
