from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from tests.unit.cli.fakes import ANSWER, FakeEngine, fake_models
from tests.unit.cli.test_main import run

from paceline.cli import running
from paceline.reporting.provenance import reproduce
from paceline.trace.answer import hash_ids
from paceline.trace.reader import read_answers, read_traces

PLAIN = ["generate", "m", "--prompt", "hi"]
WITH_DRAFTER = [*PLAIN, "--draft-model", "d"]


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> dict[bool, FakeEngine]:
    """Engines by whether they have a drafter, in place of the real ones."""
    made = {True: FakeEngine(), False: FakeEngine(has_drafter=False)}

    def make(run_settings: Any, models: Any, *, with_drafter: bool = True, **sizes: int) -> FakeEngine:
        return made[with_drafter and models.drafter is not None]

    monkeypatch.setattr(running, "make_engine", make)
    monkeypatch.setattr(
        running, "load_models", lambda settings, environment: fake_models(has_drafter=settings.draft_model is not None)
    )
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    return made


def test_text_on_stdout_and_figures_on_stderr(
    engines: dict[bool, FakeEngine], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(WITH_DRAFTER) == 0
    captured = capsys.readouterr()
    assert captured.out == ANSWER
    assert "17 tokens, acceptance length 4.00 over 4 steps" in captured.err


def test_plain_generation_has_no_acceptance(
    engines: dict[bool, FakeEngine], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(PLAIN) == 0
    captured = capsys.readouterr()
    assert captured.out == ANSWER
    assert "acceptance" not in captured.err


def test_a_newline_ends_the_text(engines: dict[bool, FakeEngine], capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*PLAIN, "--max-tokens", "5"]) == 0
    assert capsys.readouterr().out == "hello\n"


def test_compare_says_yes(engines: dict[bool, FakeEngine], capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*WITH_DRAFTER, "--compare"]) == 0
    captured = capsys.readouterr()
    assert captured.out == ANSWER
    assert "identical: yes (17 tokens)" in captured.err
    assert "speculative 4000.0 tokens/s, plain 1000.0 tokens/s, ratio 4.00" in captured.err


def test_compare_says_no(engines: dict[bool, FakeEngine], capsys: pytest.CaptureFixture[str]) -> None:
    engines[False].answer = ANSWER.replace("wide", "wild")
    assert run([*WITH_DRAFTER, "--compare"]) == 3
    assert f"identical: no, from token 8 on (token {ord('d')} instead of token {ord('l')})" in capsys.readouterr().err


def test_sampled_ids_may_differ(engines: dict[bool, FakeEngine], capsys: pytest.CaptureFixture[str]) -> None:
    engines[False].answer = ANSWER.replace("wide", "wild")
    assert run([*WITH_DRAFTER, "--compare", "--temperature", "0.5", "--seed", "1"]) == 0
    assert "identical: not expected at temperature 0.5" in capsys.readouterr().err


def test_every_prompt_draws_with_a_seed_of_its_own(
    engines: dict[bool, FakeEngine], capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = ["generate", "m", "--prompt", "a", "--prompt", "b", "--temperature", "1", "--json"]
    assert run([*prompts, "--seed", "5"]) == 0
    assert engines[False].seeds == [5, 6]
    assert [row["seed"] for row in json.loads(capsys.readouterr().out)["results"]] == [5, 6]
    assert run(prompts) == 0  # unseeded: drawn once, and reported, so that it can be asked for again
    drawn = [row["seed"] for row in json.loads(capsys.readouterr().out)["results"]]
    assert drawn == engines[False].seeds[2:] and drawn[1] == drawn[0] + 1


def test_settings_that_change_nothing_are_named(
    engines: dict[bool, FakeEngine], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*PLAIN, "--top-p", "0.9", "--seed", "1"]) == 0
    assert "temperature is 0: top_p, seed changes nothing" in capsys.readouterr().err


def test_a_prompt_too_long_costs_no_other_answer(
    engines: dict[bool, FakeEngine], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*PLAIN, "--prompt", "x" * 3000]) == 2
    assert capsys.readouterr().out == ""


def test_json_is_one_object(engines: dict[bool, FakeEngine], capsys: pytest.CaptureFixture[str]) -> None:
    engines[False].answer = ANSWER.replace("wide", "wild")
    assert run([*WITH_DRAFTER, "--compare", "--json", "-p", "second"]) == 3
    found = json.loads(capsys.readouterr().out)
    assert found["identical"] is False
    assert [row["id"] for row in found["results"]] == ["prompt-0", "prompt-1"]
    row = found["results"][0]
    assert row["text"] == ANSWER
    assert row["token_ids"] == [ord(letter) for letter in ANSWER]
    assert row["speculative_decoding"]["acceptance_length"] == 4.0
    assert row["plain"]["first_divergence"] == 8
    assert found["settings"]["max_tokens"] == 128


def test_ctrl_c_shows_what_came(engines: dict[bool, FakeEngine], capsys: pytest.CaptureFixture[str]) -> None:
    engines[True].interrupt_after = 3
    assert run(WITH_DRAFTER) == 130
    captured = capsys.readouterr()
    assert captured.out == "hello wid\n"
    assert "interrupted" in captured.err
    assert not engines[True].has_unfinished()


def test_ctrl_c_shows_the_text_that_had_not_been_given_out(
    engines: dict[bool, FakeEngine], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ends of answers wait for the rest of a character or of a stop text."""
    engine = engines[True]
    engine.interrupt_after = 3
    abort = engine.abort

    def abort_with_rest(name: str) -> None:
        engine.running[name].text += "e"
        abort(name)

    monkeypatch.setattr(engine, "abort", abort_with_rest)
    assert run(WITH_DRAFTER) == 130
    assert capsys.readouterr().out == "hello wide\n"


def test_ctrl_c_with_json_still_gives_an_object(
    engines: dict[bool, FakeEngine], capsys: pytest.CaptureFixture[str]
) -> None:
    engines[True].interrupt_after = 3
    assert run([*WITH_DRAFTER, "--json"]) == 130
    assert json.loads(capsys.readouterr().out)["results"][0]["finish_reason"] == "abort"


def test_bad_logits_are_a_failure(engines: dict[bool, FakeEngine], capsys: pytest.CaptureFixture[str]) -> None:
    engines[True].last_reason = "error"
    assert run(WITH_DRAFTER) == 1
    error = capsys.readouterr().err
    assert "NumericError: prompt 'prompt-0'" in error
    assert "a NaN or an infinity" in error


def test_an_answer_that_fails_costs_no_earlier_one(
    engines: dict[bool, FakeEngine], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engines[True]
    step = engine.step

    def step_that_fails_later() -> list[Any]:
        engine.last_reason = "error" if engine.results else "stop"
        return step()

    monkeypatch.setattr(engine, "step", step_that_fails_later)
    assert run([*WITH_DRAFTER, "--prompt", "second", "--prompt", "third", "--json"]) == 1
    captured = capsys.readouterr()
    rows = json.loads(captured.out)["results"]
    assert [(row["finish_reason"], row["error"]) for row in rows] == [("stop", None), ("error", engine.error)]
    assert "NumericError: prompt 'prompt-1'" in captured.err


def test_a_trace_that_nobody_sees_is_named(engines: dict[bool, FakeEngine], capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*WITH_DRAFTER, "--trace", "--json"]) == 0
    assert "the trace is not shown beside --json" in capsys.readouterr().err


def test_rules_that_leave_nothing_are_the_callers_mistake(
    engines: dict[bool, FakeEngine], capsys: pytest.CaptureFixture[str]
) -> None:
    engines[True].last_reason, engines[True].error, engines[True].has_dead_end = "error", "no token is allowed", True
    assert run(WITH_DRAFTER) == 2
    assert "RequestError: prompt 'prompt-0', after 17 tokens: no token is allowed" in capsys.readouterr().err


def test_drafts_judged_by_equality_are_compared_when_sampling(
    engines: dict[bool, FakeEngine], capsys: pytest.CaptureFixture[str]
) -> None:
    engines[True].verify_method = "match"
    flags = [*WITH_DRAFTER, "--compare", "--temperature", "1", "--seed", "1", "--verify-method", "match"]
    assert run(flags) == 0
    assert "identical: yes" in capsys.readouterr().err
    engines[False].answer = ANSWER.replace("wide", "wild")
    assert run(flags) == 3


def test_samples_have_seeds_of_their_own(engines: dict[bool, FakeEngine], capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*PLAIN, "-p", "b", "--n", "2", "--temperature", "1", "--seed", "5", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["results"]
    assert [(row["id"], row["sample_index"], row["seed"]) for row in rows] == [
        ("prompt-0", 0, 5),
        ("prompt-0", 1, 6),
        ("prompt-1", 0, 7),
        ("prompt-1", 1, 8),
    ]


def test_log_probabilities_are_in_the_object(
    engines: dict[bool, FakeEngine], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*PLAIN, "--logprobs", "1", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["results"]
    assert len(row["logprobs"]) == len(row["token_ids"])
    assert row["logprobs"][0] == {
        "token_id": ord("h"),
        "token": "h",
        "logprob": -0.5,
        "mode": "raw",
        "top": [{"token_id": ord("h"), "token": "h", "logprob": -0.5}],
    }
    assert row["lossless"] is True and row["verify_method"] == "standard"


def test_log_probabilities_that_nobody_sees_are_named(
    engines: dict[bool, FakeEngine], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*PLAIN, "--logprobs", "1"]) == 0
    assert "logprobs are shown with --json alone" in capsys.readouterr().err


def test_every_sampling_flag_reaches_the_engine(engines: dict[bool, FakeEngine], tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "integer"}')
    flags = {
        "--min-tokens": "3",
        "--repetition-penalty": "1.2",
        "--frequency-penalty": "0.5",
        "--presence-penalty": "-0.5",
        "--logit-bias": "42=-5",
        "--allowed-token-id": "7",
        "--bad-word": "no",
        "--json-schema": f"@{schema}",
        "--structure-begins-after": "</think>",
        "--logprobs": "2",
        "--logprobs-mode": "processed",
        "--stop": "end",
    }
    arguments = [part for flag in flags.items() for part in flag]
    assert run([*PLAIN, *arguments, "--include-stop-str-in-output"]) == 0
    (asked,) = engines[False].asked
    assert (asked.min_tokens, asked.repetition_penalty) == (3, 1.2)
    assert (asked.frequency_penalty, asked.presence_penalty) == (0.5, -0.5)
    assert asked.bias_pairs == ((42, -5.0),)
    assert (asked.allowed_token_ids, asked.bad_words, asked.stop) == ((7,), ("no",), ("end",))
    assert (asked.logprobs, asked.logprobs_mode, asked.include_stop_str_in_output) == (2, "processed", True)
    structure = asked.structured_output
    assert (structure.kind, structure.begins_after) == ("json_schema", "</think>")
    assert json.loads(structure.value) == {"type": "integer"}


@pytest.mark.parametrize(
    ("flags", "kind", "value"),
    [
        (["--json-schema", '{"type": "null"}'], "json_schema", '{"type": "null"}'),
        (["--json-object"], "json_object", ""),
        (["--regex", "a+"], "regex", "a+"),
        (["--choice", "yes", "--choice", "no"], "choice", ("yes", "no")),
        (["--grammar", 'start: "a"'], "grammar", 'start: "a"'),
    ],
)
def test_structures(engines: dict[bool, FakeEngine], flags: list[str], kind: str, value: object) -> None:
    assert run([*PLAIN, *flags]) == 0
    structure = engines[False].asked[-1].structured_output
    assert (structure.kind, structure.value, structure.begins_after) == (kind, value, None)


def test_the_trace_goes_to_stderr(engines: dict[bool, FakeEngine], capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*WITH_DRAFTER, "--trace", "--no-color"]) == 0
    captured = capsys.readouterr()
    assert captured.out == ANSWER
    assert len(captured.err.splitlines()) > 2
    assert "\x1b" not in captured.err


def test_step_records_go_to_a_file(engines: dict[bool, FakeEngine], tmp_path: Path) -> None:
    file = tmp_path / "traces.jsonl"
    assert run([*WITH_DRAFTER, "--trace-file", str(file)]) == 0
    assert run([*WITH_DRAFTER, "--trace-file", str(file)]) == 0
    traces = list(read_traces(file))
    assert [len(trace.records) for trace in traces] == [4, 4]  # a second run is appended


def test_prompts_from_a_file_and_from_stdin(
    engines: dict[bool, FakeEngine],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"id": "a", "prompt": "x"}\n{"id": "b", "prompt": "yz"}\n')
    assert run(["generate", "m", "--prompt-file", str(file), "--json"]) == 0
    assert [row["num_prompt_tokens"] for row in json.loads(capsys.readouterr().out)["results"]] == [1, 2]
    for flags in ([], ["--prompt", "-"]):
        monkeypatch.setattr("sys.stdin", io.StringIO("piped\n"))
        assert run(["generate", "m", "--json", *flags]) == 0
        assert json.loads(capsys.readouterr().out)["results"][0]["num_prompt_tokens"] == 5


def test_byte_order_marks_are_no_text(engines: dict[bool, FakeEngine], tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_bytes(b'\xef\xbb\xbf{"type": "null"}')
    assert run([*PLAIN, "--json-schema", f"@{schema}"]) == 0
    assert engines[False].asked[-1].structured_output.value == '{"type": "null"}'


def test_a_byte_order_mark_before_a_piped_prompt_is_no_text(
    engines: dict[bool, FakeEngine], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("\ufeffpiped\n"))
    assert run(["generate", "m", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["results"][0]["num_prompt_tokens"] == len("piped")


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
@pytest.mark.parametrize("as_json", [False, True])
def test_an_answer_that_stdout_cannot_spell_is_escaped(
    engines: dict[bool, FakeEngine], monkeypatch: pytest.MonkeyPatch, encoding: str, as_json: bool
) -> None:
    engines[False].answer = "日本 \N{GRINNING FACE} é\n"
    stdout = io.TextIOWrapper(io.BytesIO(), encoding=encoding, write_through=True)
    monkeypatch.setattr("sys.stdout", stdout)
    assert run([*PLAIN, *(["--json"] if as_json else [])]) == 0
    written = stdout.buffer.getvalue().decode(encoding)  # type: ignore[attr-defined]
    if as_json:
        assert json.loads(written)["results"][0]["text"] == engines[False].answer
    else:
        assert written.startswith(r"\u65e5\u672c \U0001f600 ")


@pytest.mark.parametrize(
    ("arguments", "code", "part"),
    [
        (["generate", "m"], 2, "the prompt from stdin is empty"),
        (["generate", "--prompt", "x"], 2, "model: must be set"),
        (["generate", "m", "--prompt", " "], 2, "the prompt from --prompt is empty"),
        (["generate", "m", "-p", "-", "-p", "-"], 2, "stdin can be read once"),
        ([*PLAIN, "--temperature", "-1"], 2, "temperature"),
        ([*PLAIN, "--temperature", "nan"], 2, "temperature"),
        ([*PLAIN, "--top-p", "1.5"], 2, "top_p"),
        ([*PLAIN, "--max-tokens", "0"], 2, "max_tokens"),
        ([*PLAIN, "--seed", "-1"], 2, "seed"),
        ([*PLAIN, "--spec-tokens", "3"], 2, "no draft_model"),
        ([*PLAIN, "--compare"], 2, "no draft_model"),
        ([*PLAIN, "--logit-bias", "x=1"], 2, "not of the form ID=BIAS"),
        ([*PLAIN, "--logit-bias", "3"], 2, "not of the form ID=BIAS"),
        ([*PLAIN, "--logit-bias", "3=1", "--logit-bias", "3=2"], 2, "names token 3 twice"),
        ([*PLAIN, "--logit-bias", "3=101"], 2, "in [-100, 100]"),
        ([*PLAIN, "--logit-bias", "3=nan"], 2, "logit_bias"),
        ([*PLAIN, "--json-schema", "@none.json"], 2, "the file of json_schema cannot be read"),
        ([*PLAIN, "--json-schema", "{"], 2, "not JSON"),
        ([*PLAIN, "--regex", "a", "--choice", "b"], 2, "give one"),
        ([*PLAIN, "--min-tokens", "200"], 2, "more than max_tokens"),
        ([*WITH_DRAFTER, "--verify-method", "typical"], 2, "verify_method"),
        ([*WITH_DRAFTER, "--draft-length", "long"], 2, "draft_length"),
        ([*WITH_DRAFTER, "--draft-vocab-size", "most"], 2, "use a whole number from 1 on, auto or full"),
        ([*WITH_DRAFTER, "--draft-vocab-size", "0"], 2, "0 is no number of ids"),
        ([*PLAIN, "--draft-vocab-size", "512"], 2, "draft_vocab_size is 512 but there is no draft_model"),
        ([*PLAIN, "--device", "tpu"], 2, "'tpu' is no device"),
        ([*PLAIN, "--set", "max_token=3"], 2, "try: max_tokens"),
        ([*PLAIN, "--config", "none.toml"], 2, "does not exist"),
        (["generate", "m", "--prompt-file", "none.jsonl"], 1, "does not exist"),
    ],
)
def test_mistakes(
    engines: dict[bool, FakeEngine],
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    part: str,
) -> None:
    assert run(arguments) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert part in captured.err
    assert "Traceback" not in captured.err


def test_a_prompt_of_several_turns_is_sent_to_evaluate(
    engines: dict[bool, FakeEngine], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"turns": ["x", "y"]}\n')
    assert run(["generate", "m", "--prompt-file", str(file)]) == 2
    assert "paceline evaluate" in capsys.readouterr().err


def test_settings_from_a_file_and_a_dry_run(
    engines: dict[bool, FakeEngine], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "g.toml"
    file.write_text('model = "from-file"\nmax_tokens = 7\nstop = ["\\n\\n"]\n')
    flags = ["--config", str(file), "--set", "temperature=0.5", "--seed", "4", "--dry-run", "--json"]
    assert run(["generate", "--prompt", "x", *flags]) == 0
    found = json.loads(capsys.readouterr().out)
    settings = found["settings"]
    assert (settings["model"], settings["max_tokens"], settings["temperature"], settings["seed"]) == (
        "from-file",
        7,
        0.5,
        4,
    )
    assert settings["stop"] == ["\n\n"]
    assert found["num_prompts"] == 1
    assert engines[False].num_steps == 0


def test_a_trace_says_what_was_asked_and_what_it_comes_from(engines: dict[bool, FakeEngine], tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    sampled = ["--temperature", "1", "--seed", "7", "-n", "2"]
    assert run([*WITH_DRAFTER, "--prompt", "ho", *sampled, "--trace-file", str(file), "--compare"]) == 0
    answers = list(read_answers(file))
    assert [(each.name, each.is_plain) for each in answers] == [
        (name, is_plain)
        for name in ("prompt-0", "prompt-0, sample 1", "prompt-1", "prompt-1, sample 1")
        for is_plain in (False, True)
    ]
    prompts = [each.prompt for each in answers if each.prompt is not None]
    assert [prompt.seed for prompt in prompts] == [7, 7, 8, 8, 9, 9, 10, 10]
    assert [prompt.text for prompt in prompts][::4] == ["hi", "ho"]
    assert prompts[0].sha256 == hash_ids([ord("h"), ord("i")])
    first = answers[0]
    assert first.decode(first.trace.token_ids) == ANSWER, "it needs no tokenizer"
    assert first.run is not None and first.run["requests_at_once"] == 1
    settings = first.run["settings"]
    assert isinstance(settings, dict) and settings["temperature"] == 1.0
    command = reproduce(first)
    assert command is not None and command.startswith("paceline generate m --draft-model d --prompt hi --seed 7 --set ")


def test_details_need_a_file(engines: dict[bool, FakeEngine], capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*WITH_DRAFTER, "--trace-details"]) == 2
    assert "there is no trace_file" in capsys.readouterr().err
