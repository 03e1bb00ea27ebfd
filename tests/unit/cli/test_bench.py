"""`paceline bench` as a user runs it: tiny engines, tiny servers, faults half-way, Ctrl-C."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from tests.scripted_server import DONE, Reply, chunk, scripted, whole_stream
from tests.served import running
from tests.tiny import tiny_target, wrap_target
from tests.tiny_run import write_drafter, write_target_folder
from tests.unit.cli.test_main import SOURCE, run

from paceline.benching import engine_setup


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("benched")
    target = tiny_target("qwen3", vocab_size=64)
    write_target_folder(folder / "m", target)
    return str(folder / "m"), str(write_drafter(folder / "m-ours", wrap_target(target)))


@pytest.fixture
def prompts(tmp_path: Path) -> list[str]:
    file = tmp_path / "prompts.txt"
    file.write_text("w5 w6 w7\nw8 w9\nw10 w11 w12\n")
    return ["--dataset-path", str(file)]


TINY = ["--raw", "--ignore-eos", "--max-tokens", "10", "--threads", "1", "--linear-mode", "row_invariant"]


def result_of(capsys: pytest.CaptureFixture[str], arguments: list[str], code: int = 0) -> Any:
    assert run(["bench", *arguments, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_a_drafter_beside_plain_decoding(
    capsys: pytest.CaptureFixture[str], pair: tuple[str, str], prompts: list[str], tmp_path: Path
) -> None:
    target, drafter = pair
    folder = tmp_path / "new" / "results"
    flags = [
        "--draft-model",
        drafter,
        "--concurrency",
        "1,2",
        "--draft-length",
        "fixed",
        "--metric-percentiles",
        "50,99",
    ]
    flags += ["--metadata", "note=first try", "--result-dir", str(folder), "--goodput", "e2el:60000"]
    found = result_of(capsys, [target, *flags, *prompts, *TINY])
    assert (found["format"], found["kind"], found["status"]) == ("paceline-bench-1", "engines", "done")
    assert [(row["setup"], row["concurrency"]) for row in found["rows"]] == [
        ("plain", 1),
        ("ours", 1),
        ("plain", 2),
        ("ours", 2),
    ]
    for row in found["rows"]:
        assert (row["num_requests"], row["num_failed"], row["num_output_tokens"]) == (6, 0, 60)
        assert row["ttft_ms"]["num_values"] == row["tpot_ms"]["num_values"] == 6
        assert row["ttft_ms"]["p50"] == row["ttft_ms"]["median"] <= row["ttft_ms"]["p99"]
        assert row["goodput_requests_per_second"] == row["requests_per_second"]
    plain, drafted = found["rows"][:2]
    assert plain["drafting"] is None and plain["tokens_per_delta"] == 1.0 and plain["num_identical"] is None
    assert (drafted["num_identical"], drafted["num_compared"], drafted["base"]) == (3, 3, "plain")
    assert drafted["drafting"]["num_steps"] > 0 and len(drafted["drafting"]["per_position"]) == 7
    assert drafted["speed_up"]["low"] <= drafted["speed_up"]["estimate"] <= drafted["speed_up"]["high"]
    assert drafted["speed_up"]["num_units"] == 3
    assert len(found["requests"]) == 24 and found["prompts"]["num_prompts"] == 3
    assert found["setups"][1]["drafter"]["num_draft_tokens"] == 7 and found["setups"][0]["drafter"] is None
    totals = [setup["totals"] for setup in found["setups"]]
    assert totals[0]["num_steps"] > totals[1]["num_steps"] > 0 == totals[0]["drafter_cache_bytes"]
    assert totals[0]["num_hit_tokens"] == totals[1]["num_hit_tokens"] == 0  # no prefix cache
    assert found["metadata"] == {"note": "first try"} and found["versions"]["torch"] and found["machine"]["cores"]
    (file,) = folder.iterdir()
    assert file.name.startswith("bench-m-") and json.loads(file.read_text()) == found


def test_the_documented_schema_fits(
    capsys: pytest.CaptureFixture[str], pair: tuple[str, str], prompts: list[str]
) -> None:
    """What `docs/benchmarking.md` promises of keys and their types."""
    number, text = {"type": ["number", "null"]}, {"type": ["string", "null"]}
    count = {"type": ["integer", "null"]}
    row = {
        "required": ["setup", "concurrency", "speed_up", "drafting", "ttft_ms"],
        "properties": {
            "setup": {"type": "string"},
            **{key: count for key in ("concurrency", "num_requests", "num_failed", "num_identical", "num_compared")},
            **{key: number for key in ("request_rate", "output_tokens_per_second", "total_ratio", "tokens_per_delta")},
            **{key: {"type": ["object", "null"]} for key in ("speed_up", "drafting", "itl_ms", "errors")},
            "base": text,
        },
    }
    schema = {
        "required": ["format", "kind", "date", "command", "versions", "machine", "settings", "setups", "prompts"],
        "properties": {"format": {"const": "paceline-bench-1"}, "rows": {"type": "array", "items": row}},
    }
    found = result_of(capsys, [pair[0], *prompts, *TINY, "--rounds", "1", "--num-warmups", "0"])
    jsonschema.validate(found, schema)
    assert [each["setup"] for each in found["rows"]] == ["plain"] and found["comparisons"] == []


def test_tables_and_progress_are_on_stderr(
    capsys: pytest.CaptureFixture[str], pair: tuple[str, str], prompts: list[str]
) -> None:
    target, drafter = pair
    flags = ["--draft-model", drafter, "--draft-model", drafter, "--rounds", "1", "--num-warmups", "1"]
    assert run(["bench", target, *flags, *prompts, *TINY, "--num-prompts", "5"]) == 0
    captured = capsys.readouterr()
    assert captured.out == ""
    for said in ("plain, 1 at once, round 1: 5 answers", "Throughput", "Latency", "TPOT", "Acceptance by position"):
        assert said in captured.err
    assert "3 of 3" in captured.err  # two prompts were asked twice, and stay one unit each
    pairs = [line.split()[:5] for line in captured.err.split("Times as fast")[1].splitlines() if " 3 of 3" in line]
    assert [line[0] for line in pairs] == ["ours", "ours", "ours"] and pairs[2][3] == "ours"  # ours (2) beside ours


def test_a_dry_run_loads_nothing(capsys: pytest.CaptureFixture[str], prompts: list[str]) -> None:
    found = result_of(capsys, ["no-model", "--draft-model", "d", *prompts, "--concurrency", "1,4", "--dry-run"])
    assert found["settings"]["concurrency"] == [1, 4] and found["setups"] == ["plain", "d"]
    assert found["num_requests"] == 2 * 2 * (3 + 2 * 3)
    shown = result_of(capsys, ["--base-url", "http://x:1", "--api-key", "secret", "--dry-run"])
    assert shown["settings"]["api_key"] == "(set)" and "secret" not in json.dumps(shown)


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ([], 2, "model must be set"),
        (["m", "--base-url", "nowhere"], 2, "no address"),
        (["--base-url", "http://a", "--goodput", "ttft:200", "tpot:50"], 2, "ttft:200,tpot:50"),
        (["m", "--dataset-path", "none.jsonl"], 1, "does not exist"),
        (["m", "--result-dir", "/dev/null/x"], 2, "is no folder"),
        (["m", "--concurrency", "0"], 2, "concurrency"),
        (["m", "--set", "rounds=0"], 2, "rounds"),
    ],
)
def test_mistakes(capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, said: str) -> None:
    assert run(["bench", *arguments]) == code
    captured = capsys.readouterr()
    assert captured.out == "" and said in captured.err and "Traceback" not in captured.err


def test_a_prompt_that_does_not_fit_costs_no_measurement(
    capsys: pytest.CaptureFixture[str], pair: tuple[str, str], prompts: list[str]
) -> None:
    assert run(["bench", pair[0], *prompts, *TINY, "--max-model-len", "3"]) == 2
    assert "prompt 'prompts-1'" in capsys.readouterr().err


def test_an_engine_that_changes_the_text_is_exit_code_3(
    capsys: pytest.CaptureFixture[str], pair: tuple[str, str], prompts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, drafter = pair
    made = engine_setup._record

    def broken(question: Any, sent_s: float, result: Any, deltas: Any) -> Any:
        record = made(question, sent_s, result, deltas)
        if record.drafting.num_steps and question.index == 1:
            record.output_sha256 = "another"
        return record

    monkeypatch.setattr(engine_setup, "_record", broken)
    arguments = [target, "--draft-model", drafter, *prompts, *TINY, "--draft-length", "fixed", "--rounds", "1"]
    found = result_of(capsys, arguments, code=3)
    assert [row["num_identical"] for row in found["rows"]] == [None, 2]
    # Where drafts need not give the same text, nothing is promised.
    result_of(capsys, [*arguments, "--temperature", "1", "--verify-method", "standard"])


def test_a_folder_that_goes_away_half_way_costs_the_file_alone(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    pair: tuple[str, str],
    prompts: list[str],
    tmp_path: Path,
) -> None:
    folder, record = tmp_path / "out", engine_setup._record

    def in_the_way(*arguments: Any) -> Any:
        folder.touch()
        return record(*arguments)

    monkeypatch.setattr(engine_setup, "_record", in_the_way)
    assert run(["bench", pair[0], *prompts, *TINY, "--result-dir", str(folder), "--json"]) == 1
    captured = capsys.readouterr()
    assert f"the result cannot be written into {folder}" in captured.err
    assert json.loads(captured.out)["status"] == "done"


def test_an_engine_that_dies_half_way_keeps_what_was_measured(
    capsys: pytest.CaptureFixture[str], pair: tuple[str, str], prompts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    step = engine_setup.TimedEngine.step
    num_answers = 0

    def dying(self: Any) -> Any:
        nonlocal num_answers
        if num_answers == 4:  # in the second round; the third failure in a row ends the engine
            raise ZeroDivisionError("planted")
        deltas = step(self)
        num_answers += sum(delta.finish_reason is not None for delta in deltas)
        return deltas

    monkeypatch.setattr(engine_setup.TimedEngine, "step", dying)
    arguments = [pair[0], *prompts, *TINY, "--num-warmups", "0", "--rounds", "9", "--json"]
    assert run(["bench", *arguments]) == 1
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert found["status"] == "failed" and found["error"] == "the engine is dead: ZeroDivisionError: planted"
    assert [(row["num_rounds"], row["num_requests"], row["num_failed"]) for row in found["rows"]] == [(1, 3, 0)]
    assert [each["counts"] for each in found["requests"]][:4] == [True, True, True, False]
    assert "failed: the figures are those of 1 whole passes" in captured.err
    assert "EngineDeadError: the engine is dead" in captured.err


def test_servers(capsys: pytest.CaptureFixture[str], prompts: list[str], tmp_path: Path) -> None:
    with running(metrics_level="summary") as drafting, running() as other:
        urls = ["--base-url", f"told={drafting.url}", "--base-url", f"{other.url}/v1"]
        flags = [
            "--max-tokens",
            "6",
            "--ignore-eos",
            "--max-concurrency",
            "2",
            "--save-result",
            "--result-dir",
            str(tmp_path),
        ]
        found = result_of(capsys, [*urls, *flags, *prompts])
        open_loop = ["--request-rate", "200", "--burstiness", "0.5", "--rounds", "1", "--seed", "3"]
        arrived = result_of(capsys, [*urls, "--max-tokens", "6", *prompts, *open_loop])
    told, counted = found["rows"]
    assert found["kind"] == "servers" and [told["setup"], counted["setup"]] == [
        "told",
        other.url.removeprefix("http://"),
    ]
    assert (told["num_output_tokens"], counted["num_output_tokens"]) == (36, 36)
    assert (told["drafting_source"], counted["drafting_source"]) == ("answers", "counters")
    assert counted["drafting"]["num_steps"] > 0 and counted["drafting"]["acceptance_length"] >= 1
    assert (counted["num_identical"], counted["num_compared"]) == (3, 3) and counted["speed_up"]["num_units"] == 3
    assert found["setups"][0]["model"] == "tiny/qwen3" and len(list(tmp_path.glob("bench-servers-*.json"))) == 1
    assert [row["request_rate"] for row in arrived["rows"]] == [200.0, 200.0]
    due: dict[str, list[float]] = {}
    for each in sorted(arrived["requests"], key=lambda each: each["index"]):
        due.setdefault(each["setup"], []).append(each["due_ms"])
    assert due["told"] == due[counted["setup"]] and due["told"][-1] == pytest.approx(15)  # 3 requests, 200 a second
    assert arrived["rows"][0]["burstiness"] == 0.5


def test_a_server_that_fails_half_way_is_counted_and_told(
    capsys: pytest.CaptureFixture[str], prompts: list[str]
) -> None:
    """500 for one request, an end in mid-stream for another; the rest is measured."""
    faults = {4: Reply(status=500, body={"error": {"message": "out of luck"}}), 5: Reply([chunk("a")], is_cut=True)}
    with (
        scripted(lambda number: faults.get(number, Reply(whole_stream()))) as broken,
        scripted(lambda _: Reply(whole_stream())) as sound,
    ):
        urls = ["--base-url", f"sound={sound.url}", "--base-url", f"broken={broken.url}"]
        assert run(["bench", *urls, *prompts, "--json"]) == 0
        captured = capsys.readouterr()
    found = json.loads(captured.out)
    row = found["rows"][1]
    assert (row["setup"], row["num_requests"], row["num_failed"]) == ("broken", 6, 2)
    assert set(row["errors"].values()) == {1} and "status 500: out of luck" in row["errors"]
    assert (row["num_compared"], row["num_output_tokens"]) == (3, 8)
    assert "broken, 1 at once: 2 of 6 requests failed; most often: status 500: out of luck" in captured.err


def test_a_server_that_dies_half_way_keeps_what_was_measured(
    capsys: pytest.CaptureFixture[str], prompts: list[str]
) -> None:
    with scripted(lambda number: Reply(whole_stream()) if number < 6 else Reply(status=503, body={})) as server:
        assert run(["bench", "--base-url", server.url, *prompts, "--json"]) == 1
        captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert found["status"] == "failed" and "all 3 requests of a pass failed" in found["error"]
    assert found["rows"][0]["num_failed"] == 3 and found["rows"][0]["num_requests"] == 6
    assert captured.err.count("ServerError") == 1


def test_a_server_without_usage(capsys: pytest.CaptureFixture[str], prompts: list[str]) -> None:
    with scripted(lambda _: Reply([chunk("a"), chunk("b", finish_reason="stop"), DONE])) as server:
        assert run(["bench", "--base-url", server.url, *prompts, "--json"]) == 0
        captured = capsys.readouterr()
        assert run(["bench", "--base-url", server.url, *prompts, "-q"]) == 0  # a table of what there is
    (row,) = json.loads(captured.out)["rows"]
    assert (
        row["num_output_tokens"] is row["tpot_ms"] is row["output_tokens_per_second"] is row["tokens_per_delta"] is None
    )
    assert row["ttft_ms"]["num_values"] == row["e2el_ms"]["num_values"] == row["itl_ms"]["num_values"] == 6
    assert "do not say how many tokens" in captured.err


@pytest.mark.parametrize(
    ("model", "said"), [("wrong", "no model 'wrong'; it has tiny"), ("tiny", "all 3 requests of a pass failed")]
)
def test_servers_that_are_no_use(capsys: pytest.CaptureFixture[str], prompts: list[str], model: str, said: str) -> None:
    with scripted(lambda _: Reply(status=400, body={"error": "no"})) as server:
        assert run(["bench", "--base-url", server.url, "--model", model, *prompts]) == 1
    captured = capsys.readouterr()
    assert said in captured.err and captured.out == ""
    assert run(["bench", "--base-url", server.url, *prompts]) == 1  # it is gone by now
    assert "cannot be reached" in capsys.readouterr().err


def test_without_the_client_the_hint_names_the_extra(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, prompts: list[str]
) -> None:
    monkeypatch.setitem(sys.modules, "httpx2", None)
    assert run(["bench", "--base-url", "http://x:1", *prompts]) == 1
    said = capsys.readouterr().err
    assert "MissingExtraError" in said and 'pip install "paceline[bench]"' in said


@pytest.mark.parametrize("kind", ["engines", "servers"])
def test_ctrl_c_keeps_what_was_measured(kind: str, prompts: list[str], tmp_path: Path, pair: tuple[str, str]) -> None:
    flags = [*prompts, "--rounds", "1000", "--num-warmups", "0", "--result-dir", str(tmp_path / "out"), "--json"]
    with contextlib.ExitStack() as stack:
        if kind == "servers":
            arguments = ["--base-url", stack.enter_context(running()).url, *flags]
        else:
            arguments = [pair[0], "--draft-model", pair[1], "--canary", "off", *TINY, *flags]
        program = subprocess.Popen(
            [sys.executable, "-m", "paceline", "bench", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": SOURCE},
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        assert program.stderr is not None
        while "round 2:" not in (line := program.stderr.readline()):
            assert line
        program.send_signal(signal.SIGINT)
        out, err = program.communicate(timeout=60)
    assert program.returncode == 130, err
    found = json.loads(out)
    assert (found["status"], found["kind"]) == ("interrupted", kind) and found["rows"][0]["num_rounds"] >= 1
    assert "interrupted: the figures are those of" in err and "Traceback" not in err
    (file,) = (tmp_path / "out").iterdir()
    assert json.loads(file.read_text()) == found


def test_what_servers_are_sent_and_what_a_result_does_not_hold(
    capsys: pytest.CaptureFixture[str], prompts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with scripted(lambda _: Reply(whole_stream())) as server:
        flags = ["--base-url", server.url, *prompts, "--rounds", "1", "--num-warmups", "0"]
        given = ["--api-key", "secret-1", "--temperature", "0.5", "--top-k", "5", "--seed", "7", "--ignore-eos"]
        found = result_of(capsys, [*flags, *given, "--extra-body", '{"draft_length": "off"}', "--system", "be brief"])
        assert server.headers["Authorization"] == "Bearer secret-1"
        monkeypatch.setenv("PACELINE_API_KEY", "secret-2")
        result_of(capsys, [*flags, "--raw"])
        assert server.headers["Authorization"] == "Bearer secret-2"
    assert "secret" not in json.dumps(found) and "api_key" not in found["settings"]
    assert found["rows"][0]["num_identical"] is None  # sampled
    bodies = [body for _, body in server.asked]
    sampled, greedy = bodies[:3], bodies[3:]
    wanted = {"temperature": 0.5, "top_k": 5, "ignore_eos": True, "max_tokens": 128, "draft_length": "off"}
    assert all({key: body[key] for key in wanted} == wanted for body in sampled)
    assert [body["seed"] for body in sampled] == [7, 8, 9] and sampled[0]["messages"][0]["role"] == "system"
    for body in greedy:  # what the API does not know is not sent unless it is asked for
        assert set(body) == {"model", "prompt", "stream", "stream_options", "max_tokens", "temperature"}
