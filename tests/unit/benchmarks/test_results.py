from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.render_results import KEYS, read_results
from benchmarks.results import (
    command_text,
    describe_commit,
    describe_machine,
    make_result,
    scrub_argument,
    text_table,
    write_result,
)


@pytest.mark.parametrize(
    ("argument", "shown"),
    [
        ("--num-prompts", "--num-prompts"),
        ("gsm8k=/data/sets/gsm8k.jsonl", "gsm8k=gsm8k.jsonl"),
        ("--out=/home/somebody/results", "--out=results"),
        ("/models/target.gguf", "target.gguf"),
        ("~/sets/a.jsonl", "a.jsonl"),
        ("a=~somebody/a.jsonl", "a=a.jsonl"),
        ("prompts/first.jsonl", "prompts/first.jsonl"),
        ("a=../data/a.jsonl", "a=a.jsonl"),
        ("--seed=3", "--seed=3"),
    ],
)
def test_only_absolute_paths_are_cut(argument: str, shown: str) -> None:
    assert scrub_argument(argument) == shown


def test_command_can_be_typed() -> None:
    assert (
        command_text("lossless", ["--set", "a b=/x/y z.jsonl"]) == "python -m benchmarks.lossless --set 'a b=y z.jsonl'"
    )


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True, capture_output=True)

    git("init", "-q")
    (tmp_path / "code.py").write_text("1\n")
    git("add", ".")
    git("commit", "-q", "-m", "first")
    return tmp_path


def test_commit_of_a_clean_checkout(checkout: Path) -> None:
    commit = describe_commit(checkout)
    assert len(commit) == 12 and int(commit, 16) >= 0


@pytest.mark.parametrize("changed", ["code.py", "new.py"])
def test_any_changed_code_is_marked(checkout: Path, changed: str) -> None:
    (checkout / changed).write_text("2\n")
    assert describe_commit(checkout).endswith("-dirty")


def test_results_written_before_are_no_change(checkout: Path) -> None:
    (checkout / "docs" / "results").mkdir(parents=True)
    (checkout / "docs" / "results" / "cpu-main.json").write_text("{}")
    (checkout / "README.md").write_text("a table")
    assert not describe_commit(checkout).endswith("-dirty")


def test_no_checkout(tmp_path: Path) -> None:
    assert describe_commit(tmp_path) == "unknown"
    (tmp_path / "benchmarks").mkdir()
    placeholder = tmp_path / "benchmarks" / "commit.txt"
    placeholder.write_text("$Format:%H$\n")
    assert describe_commit(tmp_path) == "unknown"
    placeholder.write_text("0123456789abcdef\n")  # as `git archive` leaves it
    assert describe_commit(tmp_path) == "0123456789ab"


def test_machine_names_the_first_processor_and_its_best_instructions(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text(
        "processor\t: 0\nmodel name\t: Fast CPU\nflags\t\t: fpu avx2 avx512f amx_bf16\n\n"
        "processor\t: 1\nmodel name\t: Other CPU\nflags\t\t: fpu\n"
    )
    text = describe_machine("2 threads", cpu_info=info)
    assert text.startswith("Fast CPU, ") and text.endswith(" cores, amx_bf16, 2 threads")


def test_machine_without_processor_facts(tmp_path: Path) -> None:
    import platform

    text = describe_machine(cpu_info=tmp_path / "none")
    assert text.startswith(platform.machine()) and platform.node() not in text.split(", ")


def test_a_written_result_is_one_that_pages_are_made_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/benchmarks/cpu_main.py", "--out", "/somewhere/results"])
    rows = [{"mode": "plain", "share": 1 / 3, "low": math.nan, "gaps": [2 / 3, None], "ok": True, "count": 123456789}]
    result = make_result("cpu-main", rows, machine="2 cores", arguments=sys.argv[1:])
    path = write_result(tmp_path / "results", result)
    found = json.loads(path.read_text())
    assert tuple(found) == (*KEYS[:-1], "lossless", "rows")  # older files do not say whether a method is lossless
    assert found["lossless"] is True
    found = read_results(tmp_path / "results")["cpu-main"]
    assert found["rows"] == [
        {"mode": "plain", "share": 0.33333, "low": None, "gaps": [0.66667, None], "ok": True, "count": 123456789}
    ]
    assert found["command"] == "python -m benchmarks.cpu_main --out results"
    assert "somewhere" not in path.read_text()
    assert {"python", "torch", "transformers", "paceline"} <= set(found["versions"])


def test_table_aligns_and_chooses() -> None:
    rows = [{"a": 1.23456, "b": True}, {"a": None, "c": [0.5, None]}]
    assert text_table(rows) == "    a    b       c\n1.235  yes       -\n    -    -  0.5, -"
    assert text_table(rows, ["b"]) == "  b\nyes\n  -"
