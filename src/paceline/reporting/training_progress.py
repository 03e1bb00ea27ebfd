"""A line at the bottom of the terminal while a drafter is trained: how far, how good, how fast, how long still.

It is drawn where somebody watches, on a terminal with colours. Everywhere else the log's plain lines say the same, one
per row of metrics, and this file adds nothing; `--quiet` silences both.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from types import TracebackType
from typing import Protocol, Self, TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from paceline.log import OWN_HANDLER, get_logger

_ROW_LOGGER = "paceline.training.tracking"  # logs every row of metrics, which the bar shows already


class StepDone(Protocol):
    """What is handed out after every step."""

    @property
    def step(self) -> int:
        """Steps done."""
        ...

    @property
    def num_steps(self) -> int:
        """Steps of the whole run."""
        ...

    @property
    def row(self) -> Mapping[str, object] | None:
        """A row of metrics, if this step wrote one."""
        ...


class TrainingDisplay:
    """A context manager whose `update` is called after every step.

    Args:
        color: False for NO_COLOR and `--no-color`; then nothing is drawn.
        verbosity: number of `-v` minus number of `-q`; below 0 nothing is drawn.
        stream: where to draw instead of stderr.
    """

    def __init__(self, *, color: bool = True, verbosity: int = 0, stream: TextIO | None = None) -> None:
        target = stream if stream is not None else sys.stderr
        self.is_drawn = color and verbosity >= 0 and target.isatty()
        self._console = Console(file=target, highlight=False)
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._replaced: list[tuple[logging.Handler, logging.Handler]] = []
        self._loss = self._acceptance = self._speed = "-"

    def __enter__(self) -> Self:
        if self.is_drawn:
            self._progress = Progress(
                TextColumn("training"),
                BarColumn(bar_width=None),
                MofNCompleteColumn(),
                TextColumn("loss {task.fields[loss]}"),
                TextColumn("acceptance {task.fields[acceptance]}"),
                TextColumn("{task.fields[speed]} tok/s"),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
                console=self._console,
            )
            self._lead_log_through_console()
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
        logger = get_logger()
        for original, ours in self._replaced:
            logger.removeHandler(ours)
            logger.addHandler(original)
        self._replaced = []

    def update(self, done: StepDone) -> None:
        """Move the bar on, and take over the numbers of a row.

        Args:
            done: of the step that just ended; the first one tells where a resumed run began.
        """
        if self._progress is None:
            return
        if done.row is not None:
            self._read(done.row)
        loss, acceptance, speed = self._loss, self._acceptance, self._speed
        if self._task is None:
            self._task = self._progress.add_task(
                "", total=done.num_steps, completed=done.step - 1, loss=loss, acceptance=acceptance, speed=speed
            )
        self._progress.update(self._task, completed=done.step, loss=loss, acceptance=acceptance, speed=speed)

    def _read(self, row: Mapping[str, object]) -> None:
        if row.get("kind") == "evaluate":
            lengths = [value.get("acceptance_length") for value in row.values() if isinstance(value, Mapping)]
            shown = [f"{length:.2f}" for length in lengths if isinstance(length, (int, float))]
            self._acceptance = " ".join(shown) or "-"
            return
        loss, speed = row.get("loss"), row.get("tokens_per_second")
        self._loss = f"{loss:.3f}" if isinstance(loss, (int, float)) else "not finite"
        self._speed = f"{speed:,.0f}" if isinstance(speed, (int, float)) else "-"

    def _lead_log_through_console(self) -> None:
        """A line written past the console would tear the bar."""
        logger = get_logger()
        for original in [handler for handler in logger.handlers if handler.get_name() == OWN_HANDLER]:
            ours = _AboveBar(self._console, original.formatter)
            logger.removeHandler(original)
            logger.addHandler(ours)
            self._replaced.append((original, ours))


class _AboveBar(logging.Handler):
    def __init__(self, console: Console, formatter: logging.Formatter | None) -> None:
        super().__init__()
        self._console = console
        self.setFormatter(formatter)

    def emit(self, record: logging.LogRecord) -> None:
        if record.name == _ROW_LOGGER and record.levelno == logging.INFO:
            return
        try:
            self._console.print(Text(self.format(record)), soft_wrap=True)
        except Exception:  # a log line must never end the program; logging reports it in its own way
            self.handleError(record)
