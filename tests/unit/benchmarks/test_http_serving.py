"""Closed loops over HTTP against a tiny server, and the ratios of made-up ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks import http_serving
from benchmarks.http_serving import Answer, Loop, ask_all, main, named_url, parse, read_prompts, rows_of
from tests.served import running

from paceline.errors import DataError


def test_names_and_addresses() -> None:
    assert named_url("ours=http://127.0.0.1:8000/v1/") == ("ours", "http://127.0.0.1:8000")
    for arguments in ([], ["--server", "http://here"], ["--server", "a=http://x", "--server", "a=http://y"]):
        with pytest.raises(SystemExit):
            parse(arguments)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_loop_asks_each_prompt_once(is_streamed: bool) -> None:
    prompts = [[9, 10, 11 + index] for index in range(5)]
    with running() as server:
        loop = ask_all(server.url, prompts, 6, 2, is_streamed)
        counted = [line for line in server.client.get("/metrics").text.splitlines() if "request_success" in line]
    assert [answer.num_tokens for answer in loop.answers] == [6] * 5
    assert all((answer.first_s is not None) is is_streamed for answer in loop.answers)
    assert all(0 < (answer.first_s or 1e-9) <= answer.total_s <= loop.total_s for answer in loop.answers)
    assert any('finished_reason="length"' in line and line.endswith(" 5.0") for line in counted)


def test_a_server_that_refuses_is_no_result() -> None:
    with running() as server, pytest.raises(DataError, match=r"status 400.*max_tokens"):
        ask_all(server.url, [[9]], 0, 1, False)


def test_ratios_compare_a_prompt_with_itself() -> None:
    slow = Loop([Answer(10, 4.0), Answer(10, 2.0), Answer(10, 2.0)], 8.0)
    fast = Loop([Answer(10, 2.0), Answer(10, 1.0), Answer(10, 0.5)], 3.5)
    first, second = rows_of({"slow": [slow, slow], "fast": [fast, fast]}, 1, is_streamed=False)
    assert (first["ratio"], first["total_ratio"], first["ttft_ms_p50"]) == (1.0, 1.0, None)
    assert second["ratio"] == 2.0 and second["total_ratio"] == pytest.approx(8.0 / 3.5)
    assert second["tokens_per_second"] == pytest.approx(60 / 7)


def test_the_result_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_serving, "read_prompts", lambda _options: [[9, 10], [11]])
    with running() as server:
        arguments = ["--server", f"ours={server.url}", "--num-prompts", "2", "--max-tokens", "3", "--rounds", "1"]
        assert main([*arguments, "--concurrency", "1", "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "http-serving.json").read_text())
    assert [(row["server"], row["streamed"], row["num_prompts"]) for row in found["rows"]] == [
        ("ours", False, 3),
        ("ours", True, 3),
    ]


def test_prompts_are_those_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"id": "a", "prompt": "Why?"}\n{"id": "b", "prompt": "How?"}\n')
    options = parse(["--server", "a=http://x", "--prompts", str(tmp_path / "prompts.jsonl"), "--num-prompts", "1"])
    (prompt,) = read_prompts(options)
    assert len(prompt) > 5
