"""Two drafters on the same prompts: the table follows from counts per prompt, measured here or read from files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks import acceptance_pairs, prompt_sets
from benchmarks.acceptance_pairs import Counts, joined, main, make_rows, parse
from tests import tiny
from tests.fakes import ByteTokenizer

from paceline.engine.engine import Engine
from paceline.engine.request import RequestResult
from paceline.engine.sampling import SamplingParameters
from paceline.errors import EXIT_DONE, ConfigError, DataError
from paceline.evaluation.statistics import bootstrap_ratio
from paceline.models import loading

COUNTS: Counts = {
    "a": {"new": [[40, 10], [18, 6]], "old": [[40, 16], [18, 4]]},
    "b": {"new": [[9, 3]], "old": [[9, 9]], "third": [[9, 1]]},
}


def test_rows_are_ratios_of_sums_and_pool_all_sets() -> None:
    first, second, whole = make_rows(COUNTS, "new", "old")
    assert first["acceptance_length"] == 58 / 16 and first["over_length"] == 58 / 20
    assert first["ratio"] == pytest.approx(20 / 16) and (first["longer"], first["shorter"]) == (1, 1)
    assert (second["ratio"], second["low"], second["high"]) == pytest.approx((3, 3, 3))  # one prompt has no spread
    assert whole["set"] == "all" and whole["num_prompts"] == 3
    assert whole["ratio"] == pytest.approx(29 / 19) != pytest.approx((20 / 16 + 3) / 2)  # no mean of ratios
    assert make_rows({"a": COUNTS["a"]}, "new", "old") == [first]


def test_sets_that_only_one_of_them_served_are_left_out() -> None:
    counts = {**COUNTS, "c": {"new": [[5, 2]]}}
    assert [row["set"] for row in make_rows(counts, "new", "old")] == ["a", "b", "all"]
    with pytest.raises(DataError, match="no set has counts of both new and other; there are new, old, third"):
        make_rows(counts, "new", "other")
    with pytest.raises(DataError, match="a has 2 prompts of new and 1 of old"):
        make_rows({"a": {"new": [[5, 2], [5, 2]], "old": [[5, 2]]}}, "new", "old")


def test_files_are_joined_unless_they_say_the_same_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parts: list[Counts] = [{name: {one: found[one]} for name, found in COUNTS.items()} for one in ("new", "old")]
    assert joined(parts) == {name: {one: found[one] for one in ("new", "old")} for name, found in COUNTS.items()}
    with pytest.raises(ConfigError, match="two of the files have counts of new on a"):
        joined([parts[0], parts[0]])
    head = {"name": "acceptance-pairs", "command": "c", "commit": "x", "date": "d", "machine": "m", "rows": []}
    files = [tmp_path / f"{index}.json" for index in range(2)]
    for file, counts, commit in zip(files, parts, ("x", "y"), strict=True):
        file.write_text(json.dumps({**head, "commit": commit, "counts": counts}))
    command = ["--draft-model", "some/new", "--over", "some/old", "--join", *map(str, files)]
    assert main([*command, "--out", str(tmp_path)]) == EXIT_DONE
    assert "1.526" in capsys.readouterr().out
    written = json.loads((tmp_path / "acceptance-pairs.json").read_text())
    assert written["commit"] == "x; y" and written["command"] == "c" and len(written["rows"]) == 3
    files[1].write_text(json.dumps({**head, "counts": parts[1], "settings": {"temperature": 1.0}}))
    with pytest.raises(ConfigError, match="of temperatures 0, 1"):
        main(command)
    (tmp_path / "none.json").write_text(json.dumps(head))
    with pytest.raises(DataError, match="has no counts of prompts"):
        main([*command[:5], str(tmp_path / "none.json")])


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--over", "x/old"], "either --set or --join"),
        (["--over", "x/old", "--set", "a=a.npz", "--join", "b.json"], "either --set or --join"),
        (["--over", "x/d", "--draft-model", "y/d", "--set", "a=a.npz"], "--draft-model and --over are both d"),
    ],
)
def test_options_that_contradict(arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse(arguments)
    assert problem in capsys.readouterr().err


@pytest.mark.parametrize("temperature", [None, 0.7])
def test_answers_are_of_the_temperature_that_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, temperature: float | None
) -> None:
    target, drafter = tiny.loaded(tokenizer=ByteTokenizer())
    monkeypatch.setattr(loading, "load_target", lambda *_, **__: target)
    monkeypatch.setattr(loading, "load_drafter", lambda *_, **__: drafter)
    served: list[SamplingParameters] = []

    def serve(engine: Engine, prompts: Any, samplings: list[SamplingParameters], label: str) -> list[RequestResult]:
        served.extend(samplings)
        return engine.generate([list(prompt) for prompt in prompts], samplings)

    monkeypatch.setattr(acceptance_pairs, "serve", serve)
    monkeypatch.setattr(prompt_sets, "NUM_HELD_OUT", 2)
    tokens = np.array(tiny.tiny_prompts([20])[0], np.uint16)
    np.savez(tmp_path / "talk.npz", tokens=tokens, prompt_len=np.array([4, 5]), response_len=np.array([6, 5]))
    command = ["--draft-model", "x/new", "--over", "x/old", "--set", f"talk={tmp_path / 'talk.npz'}", "--threads", "1"]
    command += ["--dtype", "float32", "--max-tokens", "6", "--seed", "3", "--out", str(tmp_path)]
    assert main([*command, *([] if temperature is None else ["--temperature", str(temperature)])]) == EXIT_DONE
    assert [(one.temperature, one.seed) for one in served] == [(temperature or 0.0, 3), (temperature or 0.0, 4)] * 2
    assert json.loads((tmp_path / "acceptance-pairs.json").read_text())["settings"]["temperature"] == (temperature or 0)


def test_both_drafters_are_served_the_same_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target, drafter = tiny.loaded(tokenizer=ByteTokenizer())
    monkeypatch.setattr(loading, "load_target", lambda *_, **__: target)
    monkeypatch.setattr(loading, "load_drafter", lambda *_, **__: drafter)
    monkeypatch.setattr(prompt_sets, "NUM_HELD_OUT", 2)
    tokens = np.array(tiny.tiny_prompts([60])[0], np.uint16)
    np.savez(tmp_path / "talk.npz", tokens=tokens, prompt_len=np.array([8, 12]), response_len=np.array([18, 22]))
    command = ["--draft-model", "x/new", "--over", "x/old", "--set", f"talk={tmp_path / 'talk.npz'}", "--threads", "1"]
    assert main([*command, "--dtype", "float32", "--out", str(tmp_path)]) == EXIT_DONE
    found: dict[str, Any] = json.loads((tmp_path / "acceptance-pairs.json").read_text())
    counts = found["counts"]["talk"]
    assert counts["new"] == counts["old"] and len(counts["new"]) == 2  # it is one drafter under two names
    (row,) = found["rows"]
    assert (row["ratio"], row["low"], row["high"], row["longer"], row["shorter"]) == (1, 1, 1, 0, 0)
    interval = bootstrap_ratio(*zip(*counts["new"], strict=True))
    assert row["acceptance_length"] == pytest.approx(interval.estimate, rel=1e-4)
    assert "talk" in capsys.readouterr().out
