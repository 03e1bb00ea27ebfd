from __future__ import annotations

import shlex
from dataclasses import replace
from typing import Any

import pytest
from tests.unit.reporting.traces import RUN, answer

from paceline.configuration.generation import GenerateRun
from paceline.configuration.load import load_settings
from paceline.reporting.provenance import differences, provenance_rows, reproduce


def with_settings(**changes: Any) -> str | None:
    made = answer("a", [([1], 1, 2)])
    return reproduce(replace(made, run={**RUN, "settings": {**RUN["settings"], **changes}}))  # type: ignore[dict-item]


def test_the_command_names_models_prompt_and_what_is_not_the_default() -> None:
    command = with_settings(max_tokens=64, temperature=0.5, top_p=1.0, prompts=["p"], max_num_seqs=8, stop=["a b"])
    assert command is not None
    words = shlex.split(command)
    assert words[:7] == ["paceline", "generate", "m", "--draft-model", "d", "--prompt", "ask a"]
    settings = [words[index + 1] for index, word in enumerate(words) if word == "--set"]
    assert settings == ["temperature=0.5", "max_tokens=64", 'stop=["a b"]']
    run = load_settings(GenerateRun, None, settings, {"model": "m", "draft_model": "d"})
    assert (run.temperature, run.max_tokens, run.stop) == (0.5, 64, ("a b",)), "the command line reads them back"


def test_prompts_cannot_add_words_to_the_command() -> None:
    made = answer("a", [([1], 1, 2)])
    assert made.prompt is not None
    evil = replace(made, prompt=replace(made.prompt, text="'; rm -rf / #\n$(x) `y`", seed=7))
    command = reproduce(evil)
    assert command is not None
    assert shlex.split(command)[6] == "'; rm -rf / #\n$(x) `y`" and "--seed 7" in command


@pytest.mark.parametrize("lacks", ["run", "prompt", "text", "settings", "model"])
def test_without_enough_there_is_no_command(lacks: str) -> None:
    made = answer("a", [([1], 1, 2)])
    assert made.prompt is not None
    run: dict[str, Any] = {**RUN, "settings": {"draft_model": "d"}} if lacks == "model" else {**RUN}
    if lacks == "settings":
        run["settings"] = 3
    without = replace(made, run=None if lacks == "run" else run)
    if lacks in ("prompt", "text"):
        without = replace(made, prompt=None if lacks == "prompt" else replace(made.prompt, text=None))
    assert reproduce(without) is None


def test_rows_are_flat_and_leave_nothing_out() -> None:
    rows = dict(provenance_rows(RUN))
    assert rows["target.weights"] == "aa" and rows["settings.temperature"] == "0.0"
    assert rows["prompt_files[0].sha256"] == "ff" and rows["command"].startswith("paceline generate")
    assert dict(provenance_rows({"x": "a" * 5000}))["x"].endswith("(3000 characters more)")


def test_what_two_runs_do_not_have_in_common() -> None:
    other = {**RUN, "command": "another", "target": {"name": "m", "weights": "bb"}, "requests_at_once": 8}
    other["settings"] = {**RUN["settings"], "num_prompts": 4}  # type: ignore[dict-item]
    assert differences(RUN, other) == [["target.weights", "aa", "bb"], ["requests_at_once", "1", "8"]]
