"""Metrics of a run as one JSON object per line; a resumed run first drops what lies past its checkpoint."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path

import torch

from paceline.checkpoint.weights import disk_full_as_capacity_error, write_text_atomic
from paceline.training.step import StepResult

_log = logging.getLogger(__name__)


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
        line = (json.dumps(row, allow_nan=False) + "\n").encode()
        with disk_full_as_capacity_error(self._path), self._path.open("ab", buffering=0) as file:
            whole = file.tell()
            try:
                if file.write(line) != len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except BaseException:
                with contextlib.suppress(OSError):  # a device cannot be cut back
                    file.truncate(whole)
                raise


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
    """Sums between two rows of metrics, and the time left."""

    def __init__(self, first_step: int, num_steps: int) -> None:
        self._num_steps, self._first_step, self._began = num_steps, first_step, time.perf_counter()
        self._reset()

    def add(self, result: StepResult) -> None:
        """Take in one step."""
        self._results.append(result)

    def row(self, step: int, rate: float) -> dict[str, object]:
        """One row over the steps since the last, which is also logged."""
        now = time.perf_counter()
        results, seconds = self._results, now - self._since
        correct = torch.stack([r.correct_Q for r in results]).sum(0).tolist()
        counted = torch.stack([r.counted_Q for r in results]).sum(0).tolist()
        finite = [r for r in results if bool(r.is_finite)]  # the mean of a NaN is no number, and NaN is no JSON
        loss = float(torch.stack([r.loss for r in finite]).mean()) if finite else None
        norm = float(torch.stack([r.gradient_norm for r in finite]).mean()) if finite else None
        tokens_per_second = sum(r.num_tokens for r in results) / seconds
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
        row = {
            "kind": "train",
            "step": step,
            "loss": loss,
            "gradient_norm": norm,
            "rate": rate,
            "num_steps": len(results),
            "seconds": seconds,
            "tokens_per_second": tokens_per_second,
            "num_rows": sum(counted),
            "num_bad_steps": len(results) - len(finite),
            "accuracy_by_row": accuracy,
        }
        self._reset()
        return row

    def _reset(self) -> None:
        self._results: list[StepResult] = []
        self._since = time.perf_counter()
