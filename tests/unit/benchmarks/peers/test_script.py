from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmarks.peers import script
from benchmarks.peers.script import exit_code, finish, make_peer_parser, our_results, parse, with_other_peers
from benchmarks.prompt_sets import NamedFile
from tests import tiny

ROW = {"peer": "second", "as_expected": True}


def result(command: str, rows: list[dict[str, Any]], commit: str = "abc") -> dict[str, Any]:
    return {"name": "parity-peers", "command": command, "commit": commit, "machine": "m", "rows": rows}


def test_rows_of_other_peers_stay(tmp_path: Path) -> None:
    old = result(
        "python -m benchmarks.peers.first -a && python -m benchmarks.peers.second --old",
        [{"peer": "first"}, {"peer": "second", "drafter": "old"}],
    )
    (tmp_path / "parity-peers.json").write_text(json.dumps(old))
    found = with_other_peers("second", result("python -m benchmarks.peers.second --new", [ROW]), tmp_path)
    assert found["rows"] == [{"peer": "first"}, ROW]
    assert found["command"] == "python -m benchmarks.peers.first -a && python -m benchmarks.peers.second --new"


def test_rows_of_another_commit_go(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new = result("python -m benchmarks.peers.second", [ROW])
    assert with_other_peers("second", new, tmp_path) == new
    (tmp_path / "parity-peers.json").write_text(json.dumps(result("python -m x", [{"peer": "first"}], "other")))
    assert with_other_peers("second", new, tmp_path) == new
    assert "rows of another commit" in capsys.readouterr().err


def test_the_verdict_is_the_exit_code() -> None:
    assert exit_code([ROW, {**ROW, "as_expected": None}]) == 0
    assert exit_code([ROW, {**ROW, "as_expected": False}]) == 3


def test_written_result_names_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/benchmarks/peers/dflash_reference.py"])
    options = argparse.Namespace(out=tmp_path, threads=1, max_tokens=8)
    assert finish("second", iter([ROW]), options, ["--threads", "1"]) == 0
    written = json.loads((tmp_path / f"{script.NAME}.json").read_text())
    assert written["command"] == "python -m benchmarks.peers.dflash_reference --threads 1" and written["rows"] == [ROW]


def test_shipped_prompts_unless_others_are_named() -> None:
    parser = make_peer_parser("what it does")
    assert [file.name for file in parse(parser, []).sets] == ["first"]
    assert parse(parser, ["--set", "a=b.jsonl"]).sets == [NamedFile("a", Path("b.jsonl"))]


def test_plain_results_come_in_order() -> None:
    target, _ = tiny.loaded(linear_mode="plain")
    prompts = tiny.tiny_prompts([4, 6])
    found = our_results(target, None, prompts, 5)
    assert [list(one.prompt_ids) for one in found] == prompts
    assert all(not step.proposed_ids for one in found for step in one.trace.records)
