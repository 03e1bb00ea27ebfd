from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy
import pytest
from tests.unit.cli.fakes import FakeEngine, fake_models
from tests.unit.cli.test_main import run

from paceline.cli import running
from paceline.trace.reader import read_answers


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    made = FakeEngine()
    monkeypatch.setattr(running, "make_engine", lambda settings, models, **sizes: made.sized(**sizes))
    monkeypatch.setattr(running, "load_models", lambda settings, environment: fake_models())
    return made


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    file = tmp_path / "first.jsonl"
    file.write_text('{"id": "a", "prompt": "x"}\n{"id": "b", "turns": ["y", "z"]}\n{"id": "c", "prompt": "w"}\n')
    return ["evaluate", "m", "--draft-model", "d", "--prompts", str(file)]


def test_a_table_on_stdout_and_progress_on_stderr(
    engine: FakeEngine, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == 0
    captured = capsys.readouterr()
    row = captured.out.splitlines()[1].split()
    assert row == ["first", "3", "68", "16", "4.000", "4.000-4.000", "0.750"]
    assert "first: 4 of 4" in captured.err
    assert "acceptance length 4.00" in captured.err


def test_json_and_result_files(
    engine: FakeEngine, arguments: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    whole, rows = tmp_path / "result.json", tmp_path / "result.jsonl"
    assert run([*arguments, "--json", "--output", str(whole), "--num-prompts", "2"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == json.loads(whole.read_text())
    figures = found["sets"][0]
    assert (figures["num_prompts"], figures["num_answers"], figures["simulated"]) == (2, 3, False)
    assert figures["per_position"] == [1.0, 1.0, 1.0, 0.0]
    assert len(figures["sha256"]) == 64
    assert run([*arguments, "--output", str(rows), "-q"]) == 0
    lines = [json.loads(line) for line in rows.read_text().splitlines()]
    assert [(line["id"], line["turn"]) for line in lines] == [("a", 0), ("b", 0), ("b", 1), ("c", 0)]
    assert lines[0]["accepted"] == [3, 3, 3, 3]
    for record in (found, *lines):
        assert record["verify_method"] == "standard" and record["lossless"] is True


def test_every_answer_draws_with_its_own_seed(engine: FakeEngine, arguments: list[str]) -> None:
    assert run([*arguments, "--temperature", "1", "--seed", "10"]) == 0
    assert sorted(seed for seed in engine.seeds if seed is not None) == [10, 11, 12, 13]


def test_a_later_turn_sees_the_earlier_answer(engine: FakeEngine, arguments: list[str], tmp_path: Path) -> None:
    assert run(arguments) == 0
    prompts = ["".join(map(chr, result.prompt_ids)) for result in engine.results.values()]
    assert f"y{engine.answer}z" in prompts


@pytest.mark.parametrize(
    ("extra", "code", "part"),
    [
        (["--prompts", "none.jsonl"], 1, "does not exist"),
        (["--output", "result.csv"], 2, ".json or .jsonl"),
        (["--output", "no/such/folder/result.json"], 2, "does not exist"),
        (["--num-prompts", "0"], 2, "num-prompts"),
    ],
)
def test_mistakes(
    engine: FakeEngine,
    arguments: list[str],
    capsys: pytest.CaptureFixture[str],
    extra: list[str],
    code: int,
    part: str,
) -> None:
    assert run([*arguments, *extra]) == code
    captured = capsys.readouterr()
    assert (captured.out, part in captured.err) == ("", True)
    assert engine.num_steps == 0


def test_a_result_file_that_cannot_be_written_is_refused_at_once(
    engine: FakeEngine,
    arguments: list[str],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tmp_path / "folder.json"
    folder.mkdir()
    assert run([*arguments, "--output", str(folder)]) == 2
    assert "the result file is a folder" in capsys.readouterr().err
    # Tests may run as root, who may write everywhere.
    monkeypatch.setattr("os.access", lambda path, mode, **others: not mode & os.W_OK)
    assert run([*arguments, "--output", str(tmp_path / "result.json")]) == 2
    assert "nothing can be written into" in capsys.readouterr().err
    assert engine.num_steps == 0


def test_the_context_holds_the_longest_conversation(engine: FakeEngine, arguments: list[str], tmp_path: Path) -> None:
    file = tmp_path / "long.jsonl"
    file.write_text(json.dumps({"turns": ["x" * 1500, "y" * 400]}) + "\n")
    assert run([*arguments, "--prompts", str(file), "--max-tokens", "60"]) == 0
    assert engine.sizes["num_prompt_tokens"] == 1500 + 400 + 60  # the answer to the first turn is asked with the second


def test_a_prompt_too_long_is_refused_before_any_set(
    engine: FakeEngine, arguments: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "long.jsonl"
    file.write_text(json.dumps({"id": "endless", "prompt": "x" * 3000}) + "\n")
    assert run([*arguments, "--prompts", str(file)]) == 2
    assert "RequestError: prompt 'endless': the prompt has 3000 tokens" in capsys.readouterr().err
    assert engine.num_steps == 0


def test_a_drafter_and_prompts_are_needed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["evaluate", "m"]) == 2
    error = capsys.readouterr().err
    assert "draft_model" in error
    assert "prompts: must be set" in error


def test_dry_run(engine: FakeEngine, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*arguments, "--dry-run", "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["num_prompts"] == {"first": 3}
    assert engine.num_steps == 0


@pytest.fixture
def drafter_folder(arguments: list[str], tmp_path: Path) -> Path:
    folder = tmp_path / "drafter"
    folder.mkdir()
    arguments[3] = str(folder)
    return folder


def test_calibrate_writes_what_greedy_requests_accept(
    engine: FakeEngine, arguments: list[str], drafter_folder: Path, tmp_path: Path
) -> None:
    from paceline.checkpoint.calibration import read_calibration

    many = tmp_path / "many.jsonl"
    many.write_text("".join(f'{{"id": "{index}", "prompt": "x"}}\n' for index in range(60)))
    arguments[-1] = str(many)
    assert run([*arguments, "--calibrate"]) == 0
    found = read_calibration(drafter_folder)
    assert found is not None
    assert (found.method, found.num_blocks, found.texts) == ("served", 240, ("many.jsonl",))
    assert found.per_position == (1.0, 1.0, 1.0, 0.0)
    assert found.recorded_with["device"] == "cpu"


def test_too_few_blocks_calibrate_nothing(
    engine: FakeEngine, arguments: list[str], drafter_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*arguments, "--calibrate"]) == 1
    assert "16 blocks; at least 200" in capsys.readouterr().err
    assert list(drafter_folder.iterdir()) == []


@pytest.mark.parametrize(
    ("extra", "part"),
    [
        (["--temperature", "0.5", "--presence-penalty", "1"], "temperature, presence_penalty are set"),
        (["--draft-length", "adaptive"], "draft_length is set"),
        (["--draft-model", "owner/name"], "owner/name is none on this machine"),
    ],
)
def test_only_plain_greedy_serving_calibrates_a_folder_of_ones_own(
    engine: FakeEngine,
    arguments: list[str],
    drafter_folder: Path,
    capsys: pytest.CaptureFixture[str],
    extra: list[str],
    part: str,
) -> None:
    assert run([*arguments, "--calibrate", *extra]) == 2
    assert part in capsys.readouterr().err
    assert engine.num_steps == 0 and list(drafter_folder.iterdir()) == []


def test_nothing_that_the_drafter_has_learnt_is_asked(
    engine: FakeEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A token file's held-out end is as long as the drafter's record says; of other files its name is a warning."""
    data, chats, drafter = tmp_path / "data.npz", tmp_path / "chats.jsonl", tmp_path / "drafter"
    sizes = {"prompt_len": numpy.full(2000, 2), "response_len": numpy.full(2000, 1)}
    numpy.savez(data, tokens=numpy.tile(numpy.arange(3, dtype=numpy.uint16), 2000), **sizes)
    chats.write_text('{"prompt": "x"}\n')
    drafter.mkdir()
    (drafter / "config.json").write_text("{}")
    command = ["evaluate", "m", "--draft-model", str(drafter), "--prompts", str(data), "--prompts", str(chats)]

    def asked() -> int:
        assert run([*command, "--dry-run", "--json"]) == 0
        found: int = json.loads(capsys.readouterr().out)["num_prompts"]["data"]
        return found

    assert asked() == 1024
    known = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in (data, chats)}
    (drafter / "provenance.json").write_text(json.dumps({"data.files": known, "data.hold_out": 300}))
    assert asked() == 300
    assert run([*command, "--dry-run"]) == 0
    assert f"{drafter} was trained on {chats}: what is measured on it may have been learnt" in capsys.readouterr().err


def test_every_answer_goes_into_the_trace_with_its_set_turn_and_seed(
    engine: FakeEngine, arguments: list[str], tmp_path: Path
) -> None:
    file = tmp_path / "trace.jsonl"
    assert run([*arguments, "--temperature", "1", "--seed", "10", "--trace-file", str(file), "-q"]) == 0
    answers = list(read_answers(file))
    prompts = [each.prompt for each in answers if each.prompt is not None]
    assert [(prompt.set, prompt.id, prompt.turn, prompt.seed) for prompt in prompts] == [
        ("first", "a", 0, 10),
        ("first", "b", 0, 11),
        ("first", "b", 1, 12),
        ("first", "c", 0, 13),
    ]
    asked = {asked.seed: asked for asked in engine.asked}
    assert sorted(asked) == [10, 11, 12, 13], "and these are the seeds that were drawn with"
    assert [prompt.text for prompt in prompts] == ["x", None, None, "w"], "of several turns none is the question"
    run_of = answers[0].run
    assert run_of is not None and run_of["requests_at_once"] == 8
    assert run_of["prompt_files"][0]["sha256"] == hashlib.sha256((tmp_path / "first.jsonl").read_bytes()).hexdigest()  # type: ignore[index]
