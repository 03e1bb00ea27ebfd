"""What `paceline report` is given: trace files, folders of training runs, results of `evaluate` and of `bench`.

What a file is stands in it, not in its name. Nothing is guessed of a file that is none of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.errors import DataError
from paceline.trace.answer import RunFacts, TracedAnswer
from paceline.trace.reader import read_answers

METRICS_FILE = "metrics.jsonl"
BENCH_FORMAT = "paceline-bench-1"
_HINT = "a trace file, the folder of a training run, or a result of `evaluate --json` or `bench`"
_LARGEST = 1e18
_ROW_KINDS = ("train", "evaluate")


@dataclass(frozen=True)
class TraceInput:
    """A trace file.

    Attributes:
        path: the file.
        drafted: answers with drafts.
        plain: answers without any.
        runs: what the file says of the runs behind them.
    """

    path: Path
    drafted: list[TracedAnswer]
    plain: list[TracedAnswer]
    runs: list[RunFacts]


@dataclass(frozen=True)
class TrainingInput:
    """The folder of a training run.

    Attributes:
        path: the folder.
        steps: rows of kind "train", in order.
        evaluations: rows of kind "evaluate".
        files: texts of `config.toml`, `command.txt` and `versions.json`, as far as they are there.
        has_torn_end: the last line is not whole, as of a run that still goes on or was killed.
    """

    path: Path
    steps: list[Mapping[str, Any]]
    evaluations: list[Mapping[str, Any]]
    files: Mapping[str, str] = field(default_factory=dict)
    has_torn_end: bool = False


@dataclass(frozen=True)
class ResultInput:
    """A result of `evaluate` or of `bench`: one JSON object.

    Attributes:
        path: the file.
        kind: "evaluate" or "bench".
        values: as they stand there; tables that pages read are checked for their kind.
    """

    path: Path
    kind: str
    values: Mapping[str, Any]


ReportInput = TraceInput | TrainingInput | ResultInput


def read_input(path: Path) -> ReportInput:
    """Find out what a path holds, and read it.

    Raises:
        DataError: it cannot be read, is empty, damaged or something else.
    """
    if path.is_dir():
        return _training(path, path / METRICS_FILE)
    if path.exists() and not path.is_file():
        raise DataError("this is no ordinary file; it is read more than once", origin={"file": path}, hint=_HINT)
    first = _first_line(path)
    try:
        head = json.loads(first)
    except (ValueError, RecursionError):
        head = None
    if isinstance(head, dict) and "schema" in head:
        return _trace(path)
    if isinstance(head, dict) and head.get("kind") in _ROW_KINDS and "step" in head:
        return _training(path.parent, path)
    if isinstance(head, dict) and {"set", "id", "accepted"} <= set(head):
        raise DataError(
            "this is a result of `evaluate` with a line per answer, which has no figures",
            origin={"file": path},
            hint="--trace-file of the same run for every step, or --output RESULT.json for its figures",
        )
    return _result(path, first)


def _first_line(path: Path) -> str:
    try:
        with path.open(encoding="utf-8") as lines:
            for line in lines:
                if line.strip():
                    return line
    except FileNotFoundError:
        raise DataError("this file does not exist", origin={"file": path}, hint=_HINT) from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"this file cannot be read: {error}", origin={"file": path}, hint=_HINT) from error
    raise DataError("this file is empty", origin={"file": path}, hint=_HINT)


def _trace(path: Path) -> TraceInput:
    drafted: list[TracedAnswer] = []
    plain: list[TracedAnswer] = []
    runs: dict[int, RunFacts] = {}
    for answer in read_answers(path):
        (plain if answer.is_plain else drafted).append(answer)
        if answer.run is not None:
            runs[id(answer.run)] = answer.run
    if not drafted and not plain:
        raise DataError("this trace file holds no answer: its run ended before the first one", origin={"file": path})
    return TraceInput(path, drafted, plain, list(runs.values()))


def _training(folder: Path, metrics: Path) -> TrainingInput:
    if not metrics.is_file():
        raise DataError(f"this folder holds no {METRICS_FILE}, so it is none of a run", origin={"folder": folder})
    steps: list[Mapping[str, Any]] = []
    evaluations: list[Mapping[str, Any]] = []
    rows = list(_rows(metrics))
    has_torn_end = bool(rows) and rows[-1] is None
    for row in rows:
        if row is not None:
            (steps if row["kind"] == "train" else evaluations).append(row)
    if not steps and not evaluations:
        raise DataError("this run has written no metrics yet", origin={"file": metrics})
    files = {}
    for name in ("config.toml", "command.txt", "versions.json"):
        if (folder / name).is_file():
            files[name] = (folder / name).read_text(encoding="utf-8", errors="replace")
    return TrainingInput(folder, steps, evaluations, files, has_torn_end)


def _rows(path: Path) -> Iterator[Mapping[str, Any] | None]:
    """The rows of a file of metrics; None for a last line that is not whole."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"this file cannot be read: {error}", origin={"file": path}) from error
    lines = text.splitlines()
    for number, line in enumerate(lines, start=1):
        place = f"{path}:{number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            if number == len(lines) and not text.endswith("\n"):
                yield None
                return
            raise DataError(f"{place} is not JSON: {error}", hint="remove this line") from error
        if not isinstance(row, dict) or row.get("kind") not in _ROW_KINDS or not is_number(row.get("step")):
            raise DataError(f"{place} is no row of metrics: it has no kind 'train' or 'evaluate' and step")
        yield row


def _result(path: Path, first: str) -> ResultInput:
    if not first.lstrip().startswith("{"):
        raise DataError("this file is nothing that a report can be made of", origin={"file": path}, hint=_HINT)
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"this file is not whole JSON: {error}", origin={"file": path}, hint=_HINT) from error
    if not isinstance(values, dict):
        raise DataError("this file is nothing that a report can be made of", origin={"file": path}, hint=_HINT)
    if "format" in values:
        if values["format"] != BENCH_FORMAT:
            raise DataError(
                f"this file has the format {json.dumps(values['format'])[:80]}; this version reads {BENCH_FORMAT!r}",
                origin={"file": path},
            )
        _check_tables(path, values, ("rows", "comparisons", "requests"))
        return ResultInput(path, "bench", values)
    if "sets" in values and "drafter" in values:
        _check_tables(path, values, ("sets",))
        return ResultInput(path, "evaluate", values)
    raise DataError(
        "this JSON object is no result of `evaluate` or `bench`",
        origin={"file": path, "keys": _few(values)},
        hint=_HINT,
    )


def _check_tables(path: Path, values: Mapping[str, Any], names: tuple[str, ...]) -> None:
    for name in names:
        table = values.get(name)
        if not isinstance(table, list) or not all(isinstance(row, dict) for row in table):
            raise DataError(f"{name} should be a list of objects; this file is damaged", origin={"file": path})


def _few(values: Mapping[str, Any]) -> str:
    names = ", ".join(list(values)[:6])
    return names[:120] or "none"


def is_number(value: object) -> bool:
    """Whether a JSON value is a number that can be added up and drawn."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST


def number(value: object) -> float | None:
    """A number that can be added up and drawn, or None for anything else."""
    return float(value) if isinstance(value, int | float) and is_number(value) else None
