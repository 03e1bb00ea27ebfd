from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from tests.unit.reporting.traces import answer, two_answers, write

from paceline.errors import DataError
from paceline.reporting.inputs import ResultInput, TraceInput, TrainingInput, read_input

TRAIN = {"kind": "train", "step": 20, "loss": 2.5}
EVALUATE = {"kind": "evaluate", "step": 20, "set": {"acceptance_length": 2.0}}
BENCH = {"format": "paceline-bench-1", "rows": [], "comparisons": [], "requests": []}


def test_a_trace_is_split_into_drafted_and_plain_answers(tmp_path: Path) -> None:
    plain = answer("a", [([], 0, 1)], method="plain")
    found = read_input(write(tmp_path / "anything.txt", [*two_answers(), plain]))
    assert isinstance(found, TraceInput)
    assert [each.name for each in found.drafted] == ["a", "b"]
    assert [each.name for each in found.plain] == ["a"]
    assert len(found.runs) == 1


def test_a_run_is_its_folder_or_its_metrics(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(f"{json.dumps(TRAIN)}\n{json.dumps(EVALUATE)}\n")
    (tmp_path / "versions.json").write_text('{"torch": "2"}')
    for path in (tmp_path, tmp_path / "metrics.jsonl"):
        found = read_input(path)
        assert isinstance(found, TrainingInput)
        assert (len(found.steps), len(found.evaluations), found.has_torn_end) == (1, 1, False)
        assert found.files == {"versions.json": '{"torch": "2"}'}


def test_a_run_that_still_writes_is_read_up_to_there(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(f'{json.dumps(TRAIN)}\n{{"kind": "tr')
    found = read_input(tmp_path)
    assert isinstance(found, TrainingInput) and found.has_torn_end and len(found.steps) == 1


@pytest.mark.parametrize(("values", "kind"), [({"sets": [], "drafter": "d"}, "evaluate"), (BENCH, "bench")])
@pytest.mark.parametrize("indent", [None, 2])
def test_results_are_told_by_their_keys(tmp_path: Path, values: object, kind: str, indent: int | None) -> None:
    (tmp_path / "result").write_text(json.dumps(values, indent=indent))
    found = read_input(tmp_path / "result")
    assert isinstance(found, ResultInput) and found.kind == kind


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "this file is empty"),
        ("\n\n", "this file is empty"),
        ("hello", "nothing that a report can be made of"),
        ("[1, 2]", "nothing that a report can be made of"),
        ('{"a": 1}', "no result of `evaluate` or `bench`"),
        ('{"format": "other-2"}', 'has the format "other-2"; this version reads'),
        ('{"format": "paceline-bench-1", "rows": 3}', "rows should be a list of objects"),
        ('{"sets": [1], "drafter": "d"}', "sets should be a list of objects"),
        ('{"sets": [', "is not whole JSON"),
        ("[" * 100_000, "nothing that a report can be made of"),
        ("{" * 100_000, "is not whole JSON"),
        ('{"set": "s", "id": "a", "accepted": [], "proposed": []}\n', "a line per answer, which has no figures"),
        ('{"schema": 9}\n', "has trace schema 9"),
        ('{"schema": 2, "kind": "run", "run": {}}\n', "holds no answer"),
        ('{"kind": "train", "step": 1}\nbroken\n{}\n', "metrics.jsonl?:2 is not JSON|:2 is not JSON"),
        ('{"kind": "train", "step": 1}\n{"step": 2}\n', ":2 is no row of metrics"),
        ('{"kind": "train", "step": NaN}\n', ":1 is no row of metrics"),
    ],
)
def test_whatever_else_it_is_there_is_one_clear_error(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "file").write_text(content)
    with pytest.raises(DataError, match=message):
        read_input(tmp_path / "file")


def test_paths_that_lead_nowhere(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        read_input(tmp_path / "nothing")
    with pytest.raises(DataError, match=r"holds no metrics\.jsonl"):
        read_input(tmp_path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="cannot be read"):
        read_input(tmp_path / "binary")
    os.mkfifo(tmp_path / "pipe")
    for endless in (tmp_path / "pipe", Path("/dev/null")):  # /dev/zero would fill the memory
        with pytest.raises(DataError, match="no ordinary file"):
            read_input(endless)


def test_a_trace_cut_in_the_middle_of_a_line_is_refused_by_line(tmp_path: Path) -> None:
    path = write(tmp_path / "trace.jsonl", two_answers())
    path.write_text(path.read_text()[:-40])
    with pytest.raises(DataError, match=r"trace\.jsonl:3 is not JSON"):
        read_input(path)
