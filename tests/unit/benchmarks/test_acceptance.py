from __future__ import annotations

import argparse

import pytest
from benchmarks.acceptance import (
    Walk,
    budgets,
    comparison,
    parse,
    relative_difference,
    serve_set,
    served_conversations,
    served_row,
    simulate_walk,
    simulated_row,
)
from benchmarks.prompt_sets import PromptSet
from tests import tiny

from paceline.engine.engine import Engine, EngineSettings
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
    results = serve_set(engine, prompt_set, 0.0, OPTIONS)
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
