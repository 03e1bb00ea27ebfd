"""Metrics of a run: one JSON object per line always, an event file for tensorboard on demand.

A row holds sums and counts beside the few rates that people look at, so that rows can be pooled: a mean of means is not
the mean. A resumed run first drops what lies past its checkpoint, from every file.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from paceline.checkpoint.weights import sync_to_disk, write_text_atomic
from paceline.configuration.run import TrackingSettings
from paceline.training.appending import append_whole
from paceline.training.event_file import EventFile, require_tensorboard
from paceline.training.step import StepResult

_log = logging.getLogger(__name__)


class Sink(Protocol):
    """Where rows go."""

    def append(self, row: Mapping[str, object]) -> None:
        """Write one row.

        Raises:
            CapacityError: the disk is full.
        """
        ...

    def close(self) -> None:
        """Have what was written on the disk itself."""
        ...


class MetricsFile:
    """Appends rows to `metrics.jsonl`, flushed one by one.

    Args:
        path: the file; its folder exists.
        resume_step: keep only rows up to this step of an earlier attempt; None starts afresh.
    """

    def __init__(self, path: Path, *, resume_step: int | None = None) -> None:
        self._path = path
        kept = _rows_up_to(path, resume_step) if resume_step is not None else []
        write_text_atomic(path, "".join(line + "\n" for line in kept))

    def append(self, row: Mapping[str, object]) -> None:
        """Write one row; it is on its way to disk when this returns.

        Raises:
            CapacityError: the disk is full.
        """
        append_whole(self._path, (json.dumps(row, allow_nan=False) + "\n").encode())

    def close(self) -> None:
        """Have the rows on the disk itself."""
        sync_to_disk(self._path)


class Sinks:
    """Every place that the rows of a run go to; the file of all rows comes first.

    Args:
        sinks: each gets every row.
    """

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = tuple(sinks)

    def append(self, row: Mapping[str, object]) -> None:
        """Write one row to all of them.

        Raises:
            CapacityError: the disk is full.
        """
        for sink in self._sinks:
            sink.append(row)

    def close(self) -> None:
        """Have all rows on the disk itself, so that a power cut after the run takes none."""
        for sink in self._sinks:
            sink.close()


def open_sinks(output: Path, settings: TrackingSettings, resume_step: int | None) -> Sinks:
    """Open what the settings ask for, cut back to the step that a run goes on from.

    Args:
        output: folder of the run; it exists.
        settings: table `tracking`.
        resume_step: step of the checkpoint; None starts afresh.
    Raises:
        MissingExtraError: tensorboard is asked for and not installed; nothing was touched.
        CapacityError: the disk is full.
    """
    if settings.tensorboard:
        require_tensorboard()
    sinks: list[Sink] = [MetricsFile(output / "metrics.jsonl", resume_step=resume_step)]
    if settings.tensorboard:
        sinks.append(EventFile(output / "tensorboard", resume_step=resume_step))
    return Sinks(sinks)


def _rows_up_to(path: Path, step: int) -> list[str]:
    if not path.is_file():
        return []
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            break  # a line cut short by the end of the earlier attempt
        if row["step"] <= step:
            kept.append(line)
    return kept


class Meter:
    """Sums between two rows of metrics, and the time left.

    Args:
        first_step: steps done before this attempt.
        num_steps: of the whole run.
        total: sums a float64 tensor over the ranks; None where there is one. Every rank then has to ask for its rows.
    """

    def __init__(self, first_step: int, num_steps: int, *, total: Callable[[Tensor], Tensor] | None = None) -> None:
        self._num_steps, self._first_step, self._began = num_steps, first_step, time.perf_counter()
        self._total = total
        self._reset()

    def add(self, result: StepResult, counters: Mapping[str, Tensor] | None = None) -> None:
        """Take in one step.

        Args:
            result: loss and gradient norm of all ranks, counts of this one.
            counters: further sums of this rank by name, scalars, the same names in every step.
        """
        self._results.append(result)
        self._counters.append(dict(counters or {}))

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """While evaluating or saving, which is no step's time: the next row would look slow for it."""
        began = time.perf_counter()
        yield
        self._since += time.perf_counter() - began

    def row(self, step: int, rate: float) -> dict[str, object]:
        """One row over the steps since the last, which is also logged."""
        now = time.perf_counter()
        results, seconds = self._results, now - self._since
        correct, counted, num_tokens, counters = self._pooled()
        finite = [r for r in results if bool(r.is_finite)]  # the mean of a NaN is no number, and NaN is no JSON
        loss = float(torch.stack([r.loss for r in finite]).mean()) if finite else None
        norm = float(torch.stack([r.gradient_norm for r in finite]).mean()) if finite else None
        tokens_per_second = num_tokens / seconds
        left = (now - self._began) / (step - self._first_step) * (self._num_steps - step)
        accuracy = [c / n if n else None for c, n in zip(correct[1:], counted[1:], strict=True)]
        first = f"{accuracy[0]:.3f}" if accuracy and accuracy[0] is not None else "-"
        _log.info(
            "step %d/%d loss %s first-row accuracy %s rate %.2e %.0f tok/s, %.0f s left",
            step,
            self._num_steps,
            "not finite" if loss is None else f"{loss:.4f}",
            first,
            rate,
            tokens_per_second,
            left,
        )
        row: dict[str, object] = {
            "kind": "train",
            "step": step,
            "loss": loss,
            "gradient_norm": norm,
            "rate": rate,
            "num_steps": len(results),
            "num_bad_steps": len(results) - len(finite),
            "seconds": seconds,
            "tokens_per_second": tokens_per_second,
            "num_tokens": num_tokens,
            "num_rows": sum(counted),
            "correct_by_row": correct[1:],
            "counted_by_row": counted[1:],
            "accuracy_by_row": accuracy,
            **counters,
        }
        self._reset()
        return row

    def _pooled(self) -> tuple[list[int], list[int], int, dict[str, float]]:
        """Correct and counted rows, tokens and further counters, over all steps since the last row and all ranks.

        One tensor for all, so that ranks meet once per row and the device is read once.
        """
        results = self._results
        correct_Q = torch.stack([r.correct_Q for r in results]).sum(0).double()
        counted_Q = torch.stack([r.counted_Q for r in results]).sum(0).double()
        names = list(self._counters[0])
        tokens = correct_Q.new_tensor([sum(r.num_tokens for r in results)])
        further = [
            torch.stack([counters[name].double() for counters in self._counters]).sum().to(correct_Q.device).view(1)
            for name in names
        ]
        sums = torch.cat((correct_Q, counted_Q, tokens, *further))
        if self._total is not None:
            sums = self._total(sums)
        values = sums.tolist()
        Q = len(correct_Q)
        correct, counted = [int(v) for v in values[:Q]], [int(v) for v in values[Q : 2 * Q]]
        return correct, counted, int(values[2 * Q]), dict(zip(names, values[2 * Q + 1 :], strict=True))

    def _reset(self) -> None:
        self._results: list[StepResult] = []
        self._counters: list[dict[str, Tensor]] = []
        self._since = time.perf_counter()
