"""What `paceline bench` says: a line of progress, tables at the end, the result as JSON and as a file."""

from __future__ import annotations

import datetime
import json
import os
import re
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from paceline.cli import options
from paceline.errors import ConfigError, DataError, PacelineError
from paceline.trace.acceptance import DraftTotals

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from paceline.benching.measuring import Plan, Watcher
    from paceline.benching.records import AnswerRecord, Pass
    from paceline.benching.result import Figures, Status
    from paceline.cli.bench_setups import OpenSetUps
    from paceline.configuration.bench import BenchRun
    from paceline.evaluation.prompts import Prompt

_HIDDEN = "(set)"
_FEW_PROMPTS = 8  # below, no interval of a median between values of the sample covers 95 % with room to spare
_WIDTH = 120  # of tables where no terminal says how wide it is


class Report:
    """Tells one measurement.

    Args:
        run: settings.
        path: the prompt file.
        prompts: of it.
        session: how this invocation talks.
        as_json: the result goes to stdout as one object, in place of tables.

    Attributes:
        has_broken_promise: whether answers differ that had to be the same.
    """

    def __init__(
        self, run: BenchRun, path: Path, prompts: Sequence[Prompt], session: options.Session, *, as_json: bool
    ) -> None:
        self._run, self._path, self._prompts, self._session = run, path, prompts, session
        self._as_json = as_json
        self._began = datetime.datetime.now(tz=datetime.UTC)
        self._progress: _Progress | None = None
        self.has_broken_promise = False

    @property
    def _folder(self) -> Path | None:
        if self._run.result_dir is None and not self._run.save_result:
            return None
        return self._run.result_dir or Path()

    def check_folder(self) -> None:
        """Refuse a folder that the result could not be written to, before minutes are spent on it.

        Raises:
            ConfigError: it is none, or nothing can be written there.
        """
        folder = self._folder
        if folder is None:
            return
        there = folder if folder.exists() else next(each for each in folder.absolute().parents if each.exists())
        if not there.is_dir():
            raise ConfigError(f"{there} is no folder", origin={"result_dir": folder})
        if not os.access(there, os.W_OK | os.X_OK):
            raise ConfigError(f"nothing can be written into {there}", origin={"result_dir": folder})

    def watcher(self, plan: Plan, num_setups: int) -> Watcher:
        """Who follows the measurement and says how far it is."""
        from paceline.benching.measuring import Watcher

        if self._session.verbosity < 0:
            return Watcher()
        self._progress = _Progress(plan.num_requests(num_setups))
        return Watcher(self._progress.on_answer, self._progress.on_pass)

    def finish(self, passes: Sequence[Pass], way: OpenSetUps, ended: BaseException | None) -> None:
        """Tell what was measured, and write it.

        Args:
            passes: all that were begun.
            way: what the set-ups are.
            ended: what cut it short.

        Raises:
            PacelineError: the file cannot be written. Everything else was told by then.
        """
        from paceline.benching.result import Figures, result_of
        from paceline.cli.bench_setups import expects_identity
        from paceline.log import get_logger

        if self._progress is not None:
            self._progress.close()
        figures = Figures(
            setups=self._run.setup_names,
            percentiles=self._run.metric_percentiles,
            goodput_ms=self._run.goodput,
            expects_identity=expects_identity(self._run),
        )
        status: Status = "done"
        if ended is not None:
            status = "interrupted" if isinstance(ended, KeyboardInterrupt) else "failed"
        error = getattr(ended, "message", None)
        result = result_of(passes, figures, self._about(way), status=status, error=error)
        rows = result["rows"]
        assert isinstance(rows, list)
        self.has_broken_promise = way.promises_identity and any(
            row["num_identical"] is not None and row["num_identical"] < row["num_compared"] for row in rows
        )
        written, unwritten = self._try_to_write(result)  # first: nobody may be reading what is printed
        if self._as_json:
            options.print_json(result)
        else:
            self._print(rows, result["comparisons"], figures)
        log = get_logger(__name__)
        for warning in _warnings(rows, figures):
            log.warning("%s", warning)
        if ended is not None:
            num_whole = sum(each.is_whole for each in passes)
            kept = f"the figures are those of {num_whole} whole passes" if num_whole else "no pass is whole: no figures"
            typer.echo(f"{status}: {kept}", err=True)
        if written is not None:
            log.info("wrote %s", written)
        if unwritten is not None and (ended is not None or self.has_broken_promise):
            log.error("%s", unwritten.message)  # what comes of the run is the graver one
        elif unwritten is not None:
            raise unwritten

    def _about(self, way: OpenSetUps) -> dict[str, object]:
        """What was run, by whom and where."""
        from paceline.cli.facts import machine_facts, package_versions
        from paceline.evaluation.prompts import file_sha256

        run = self._run
        return {
            "kind": "servers" if run.base_urls else "engines",
            "date": self._began.isoformat(timespec="seconds"),
            "command": shlex.join(["paceline", *without_secrets(sys.argv[1:])]),
            "versions": package_versions(),
            "machine": machine_facts(),
            "settings": run.model_dump(mode="json", exclude={"api_key"}),
            "setups": way.facts,
            "prompts": {
                "file": self._path.name,
                "sha256": file_sha256(self._path),
                "num_prompts": len(self._prompts),
                "num_requests": run.num_prompts or len(self._prompts),
            },
            "metadata": dict(run.metadata),
        }

    def _try_to_write(self, result: Mapping[str, object]) -> tuple[Path | None, PacelineError | None]:
        """The file, or why there is none: figures that took minutes are still to be told."""
        try:
            return self._write(result), None
        except PacelineError as error:
            return None, error
        except OSError as error:
            what = f"the result cannot be written into {self._folder}: {error.strerror or error}"
            return None, DataError(what, hint="--result-dir FOLDER; --json prints the result as well")

    def _write(self, result: Mapping[str, object]) -> Path | None:
        """The file, in full or not at all; None where none was asked for."""
        if self._folder is None:
            return None
        from paceline.checkpoint.weights import write_text_atomic

        self._folder.mkdir(parents=True, exist_ok=True)
        stem = f"bench-{_slug(self._run)}-{self._began.strftime('%Y%m%d-%H%M%S')}"
        path = self._folder / f"{stem}.json"
        number = 2
        while path.exists():
            path = self._folder / f"{stem}-{number}.json"
            number += 1
        write_text_atomic(path, json.dumps(result, ensure_ascii=False, indent=1, allow_nan=False) + "\n")
        return path

    def _print(self, rows: Sequence[Mapping[str, object]], comparisons: object, figures: Figures) -> None:
        if not rows:
            return
        console = options.stderr_console(color=self._session.color)
        if not console.is_terminal:
            console.width = _WIDTH
        assert isinstance(comparisons, list)
        tables = (
            _throughput_table(rows, figures),
            _comparison_table(comparisons, rows),
            _latency_table(rows, self._run.percentile_metrics, figures.percentiles),
            _position_table(rows),
        )
        for table in tables:
            if table is not None:
                console.print(table)


def without_secrets(arguments: Sequence[str]) -> list[str]:
    """A command line whose keys are hidden, however they were given."""
    shown: list[str] = []
    for argument in arguments:
        is_value = bool(shown) and shown[-1] == "--api-key"
        hidden = re.sub(r"^(--api-key=|api_key\s*=|--set=api_key\s*=).*", rf"\1{_HIDDEN}", argument, flags=re.DOTALL)
        shown.append(_HIDDEN if is_value else hidden)
    return shown


def _slug(run: BenchRun) -> str:
    name = "servers" if run.base_urls else run.model.rstrip("/").rsplit("/", 1)[-1]
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or "model"


class _Progress:
    """One line on stderr: redrawn on a terminal, elsewhere a line per pass alone."""

    def __init__(self, num_requests: int) -> None:
        self._num_requests, self._num_done, self._num_tokens, self._num_failed = num_requests, 0, 0, 0
        self._start_s = time.perf_counter()
        self._is_terminal = sys.stderr.isatty()

    def on_answer(self, record: AnswerRecord) -> None:
        """Draw the line anew."""
        self._num_done += 1
        self._num_tokens += record.num_tokens or 0
        self._num_failed += not record.is_whole
        if not self._is_terminal:
            return
        seconds = max(time.perf_counter() - self._start_s, 1e-9)
        left_s = seconds / self._num_done * (self._num_requests - self._num_done)
        failed = f", {self._num_failed} failed" if self._num_failed else ""
        sys.stderr.write(
            f"\r\x1b[K{self._num_done} of {self._num_requests} requests, "
            f"{self._num_tokens / seconds:.0f} tokens/s{failed}, {left_s:.0f} s left"
        )
        sys.stderr.flush()

    def on_pass(self, done: Pass) -> None:
        """Say what a pass came to."""
        answers = done.answers
        counts = [answer.num_tokens for answer in answers if answer.num_tokens is not None]
        speed = f", {sum(counts) / done.total_s:.1f} tokens/s" if counts and done.total_s else ""
        drafting = sum((answer.drafting for answer in answers if answer.drafting is not None), DraftTotals())
        accepted = f", acceptance length {drafting.acceptance_length:.2f}" if drafting.num_steps else ""
        failed = f", {len(done.records) - len(answers)} failed" if len(answers) < len(done.records) else ""
        self.close()
        typer.echo(
            f"{done.setup}, {done.load.describe()}, round {done.round_index + 1}: "
            f"{len(answers)} answers{speed}{accepted}{failed}",
            err=True,
        )

    def close(self) -> None:
        """Take the line away."""
        if self._is_terminal:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


def _warnings(rows: Sequence[Mapping[str, object]], figures: Figures) -> list[str]:
    """What a reader of the tables should know."""
    found = []
    for row in rows:
        where = (
            f"{row['setup']}, {_load(row)} at once" if row["request_rate"] is None else f"{row['setup']}, {_load(row)}"
        )
        if row["num_failed"]:
            errors = row["errors"]
            assert isinstance(errors, Mapping)
            first = next(iter(errors))
            found.append(f"{where}: {row['num_failed']} of {row['num_requests']} requests failed; most often: {first}")
        if row["num_output_tokens"] is None:
            found.append(
                f"{where}: answers do not say how many tokens they have (usage), so there is no TPOT, no tokens per "
                "second and no speed-up"
            )
        speed_up = row["speed_up"]
        if isinstance(speed_up, Mapping) and speed_up["num_units"] < _FEW_PROMPTS:
            units = speed_up["num_units"]
            found.append(f"{where}: an interval over {units} prompts says little; take {_FEW_PROMPTS} or more")
        if row["num_identical"] is not None and row["num_identical"] != row["num_compared"]:
            found.append(f"{where}: {row['num_identical']} of {row['num_compared']} answers are those of {row['base']}")
    return found


def _throughput_table(rows: Sequence[Mapping[str, object]], figures: Figures) -> Table:
    has_goodput, has_failed = bool(figures.goodput_ms), any(row["num_failed"] for row in rows)
    columns = ["requests", *(["failed"] if has_failed else []), "tokens/s", "requests/s"]
    columns += [*(["good requests/s"] if has_goodput else []), "acceptance length"]
    table = _table("Throughput", rows, columns)
    for row in rows:
        cells = [str(row["num_requests"]), *([str(row["num_failed"])] if has_failed else [])]
        cells += [_number(row["output_tokens_per_second"], 1), _number(row["requests_per_second"], 2)]
        cells += [_number(row["goodput_requests_per_second"], 2)] if has_goodput else []
        table.add_row(_name(row["setup"]), _load(row), *cells, _acceptance_length(row))
    return table


def _comparison_table(
    comparisons: Sequence[Mapping[str, object]], rows: Sequence[Mapping[str, object]]
) -> Table | None:
    """How much faster, with intervals over prompts, and the acceptance length beside it."""
    if not comparisons:
        return None
    columns = ["beside", "speed-up (95 %)", "decoding alone (95 %)", "acceptance length", "identical"]
    table = _table("Times as fast, of a prompt", comparisons, columns)
    keys = ("setup", "concurrency", "request_rate")
    lengths = {tuple(row[key] for key in keys): _acceptance_length(row) for row in rows}
    for each in comparisons:
        identical = "-" if each["num_identical"] is None else f"{each['num_identical']} of {each['num_compared']}"
        length = lengths.get(tuple(each[key] for key in keys), "-")
        intervals = (_interval(each["speed_up"]), _interval(each["decode_speed_up"]))
        table.add_row(_name(each["setup"]), _load(each), _name(each["base"]), *intervals, length, identical)
    return table


def _latency_table(rows: Sequence[Mapping[str, object]], metrics: Sequence[str], percentiles: Sequence[float]) -> Table:
    from paceline.benching.latency import percentile_name

    names = [percentile_name(each) for each in percentiles]
    heads = ["mean", "median", *(name.upper() for name in names)]
    table = _table("Latency", rows, ["ms", *heads, "values", "tokens per delta"])
    for row in rows:
        for metric in metrics:
            summary = row[f"{metric}_ms"]
            if not isinstance(summary, Mapping):
                continue
            cells = [_number(summary[key], 2) for key in ("mean", "median", *names)]
            held = _number(row["tokens_per_delta"], 2) if metric == "itl" else ""
            table.add_row(_name(row["setup"]), _load(row), metric.upper(), *cells, str(summary["num_values"]), held)
    return table


def _position_table(rows: Sequence[Mapping[str, object]]) -> Table | None:
    drafted = [(row, row["drafting"]) for row in rows if isinstance(row["drafting"], Mapping)]
    shares = [(row, drafting["per_position"]) for row, drafting in drafted]
    depth = max((len(each) for _, each in shares), default=0)
    if depth == 0:
        return None
    table = _table("Acceptance by position", rows, list(map(str, range(depth))))
    for row, each in shares:
        cells = [_number(share, 2) for share in each]
        table.add_row(_name(row["setup"]), _load(row), *cells, *[""] * (depth - len(cells)))
    return table


def _table(title: str, rows: Sequence[Mapping[str, object]], columns: Sequence[str]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE)
    table.add_column("set-up", no_wrap=True)
    table.add_column("load" if any(row["request_rate"] for row in rows) else "at once", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap="(95 %)" in column)
    return table


def _load(row: Mapping[str, object]) -> str:
    """A number of requests at once, or more words where they arrive at a rate."""
    concurrency, rate = row["concurrency"], row["request_rate"]
    if rate is None:
        return str(concurrency)
    from paceline.benching.records import Load

    assert isinstance(rate, float) and (concurrency is None or isinstance(concurrency, int))
    return Load(concurrency, rate).describe()


def _name(setup: object) -> Text:
    """A set-up's name as it is: a bracket in it is no markup."""
    from rich.text import Text

    return Text(str(setup))


def _acceptance_length(row: Mapping[str, object]) -> str:
    drafting = row["drafting"]
    return _number(drafting["acceptance_length"], 2) if isinstance(drafting, Mapping) else "-"


def _interval(found: object) -> str:
    if not isinstance(found, Mapping):
        return "-"
    return f"{found['estimate']:.2f} ({found['low']:.2f}-{found['high']:.2f})"


def _number(value: object, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
