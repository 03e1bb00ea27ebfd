"""A whole training run: data in, held-out measurements and checkpoints on the way, a drafter folder at the end."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NoReturn

from paceline.checkpoint.weights import disk_full_as_capacity_error, write_text_atomic
from paceline.configuration.run import TrainRun
from paceline.errors import NumericError
from paceline.models.loading import LoadedTarget, resolve_device
from paceline.training.batches import anchor_generators
from paceline.training.data import Batch
from paceline.training.exporting import export_drafter, export_folder
from paceline.training.interrupt import StopRequest
from paceline.training.measuring import calibration_of, measure_held_out
from paceline.training.optimizer import RateSchedule, make_optimizer
from paceline.training.preparing import RunParts, prepare_run
from paceline.training.provenance import run_identity
from paceline.training.ranks import Ranks
from paceline.training.resume import Progress, load_state, save_state
from paceline.training.run_folder import checkpoint_to_start_from, locked, prepare_folder
from paceline.training.step import StepResult, train_step
from paceline.training.strategies import make_strategy
from paceline.training.tracking import Meter, Sinks, open_sinks

_log = logging.getLogger(__name__)

_REPORT_EVERY = 20  # steps between two rows of metrics
_MOST_BAD_STEPS = 3  # non-finite steps in a row before the run stops


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
        step: steps done.
        is_finished: false if it was stopped early; then `checkpoint` resumes it.
        checkpoint: newest saved state.
        drafter: exported folder, if finished.
    """

    step: int
    is_finished: bool
    checkpoint: Path | None
    drafter: Path | None


@dataclass(frozen=True)
class TrainingProgress:
    """What is known after a step.

    Attributes:
        step: steps done.
        num_steps: of the whole run.
        row: a row of metrics that this step wrote, if it did; a step that wrote two is told of twice.
    """

    step: int
    num_steps: int
    row: Mapping[str, object] | None


def train(
    run: TrainRun,
    target: LoadedTarget,
    *,
    resume: bool = False,
    on_progress: Callable[[TrainingProgress], None] | None = None,
    ranks: Ranks | None = None,
) -> Outcome:
    """Run to the end, or to the first request to stop.

    Args:
        run: validated settings.
        target: loaded with plain linears on the run's device.
        resume: continue from the newest checkpoint in the output folder.
        on_progress: is told of every step, on the first rank.
        ranks: the processes that share the run, all of which call this; None is a process alone.
    Raises:
        ConfigError: the output folder holds another run, is in use, or holds nothing to resume; or the batch cannot be
            shared evenly.
        DataError: data that cannot be used.
        CheckpointError: the drafter to go on from cannot be read.
        NumericError: the loss stayed non-finite; the token ids of the last step are on disk, and so is the last
            checkpoint.
        CapacityError: the disk is full.
        OtherRankFailedError: another rank failed first; its error is one of those above.
    """
    ranks = ranks or Ranks.alone(resolve_device(run.device))
    parts = ranks.together(lambda: prepare_run(run, target, ranks))
    with _output_folder(run, ranks, resume=resume) as latest:
        return _Run(run, target, parts, ranks, on_progress).execute(latest)


@contextlib.contextmanager
def _output_folder(run: TrainRun, ranks: Ranks, *, resume: bool) -> Iterator[Path | None]:
    """The checkpoint to start from, while nobody else trains into the folder."""
    with contextlib.ExitStack() as lock:

        def enter() -> Path | None:
            checkpoint_to_start_from(run.output, resume=resume)  # a refused run makes no folder
            lock.enter_context(locked(run.output))
            return checkpoint_to_start_from(run.output, resume=resume)

        yield ranks.first_only(enter)


class _Run:
    """The parts of one run, put together once."""

    def __init__(
        self,
        run: TrainRun,
        target: LoadedTarget,
        parts: RunParts,
        ranks: Ranks,
        on_progress: Callable[[TrainingProgress], None] | None,
    ) -> None:
        self.run, self.target, self.parts, self.ranks, self.on_progress = run, target, parts, ranks, on_progress
        self.drafter, self.features, self.settings = parts.drafter, parts.features, parts.settings
        self.strategy = make_strategy(
            self.drafter,
            self.features,
            self.settings.objective,
            ranks,
            run.distributed.strategy,
            self.settings.flex,
        )
        self.optimizer = make_optimizer(
            self.drafter, weight_decay=run.optimizer.weight_decay, betas=run.optimizer.betas
        )
        self.rates = RateSchedule(
            run.optimizer.learning_rate,
            run.schedule.num_steps,
            run.optimizer.warmup_share,
            run.optimizer.decay_share,
            run.optimizer.final_share,
        )
        start_sha256 = None if parts.start is None else parts.start.weights_sha256
        self.identity = run_identity(run, parts.data.train, target.model, start_sha256)
        if self.settings.mixed_precision and ranks.device.type == "cpu":
            self.identity["products"] = "bfloat16"  # as of a GPU; runs of before computed in float32
        self.checkpoints = run.output / "checkpoints"
        self.sinks: Sinks | None = None
        self._measured: Mapping[str, object] = {}  # the newest row of held-out acceptance

    def execute(self, latest: Path | None) -> Outcome:
        """Train, evaluate, save, export."""
        progress = self._start(latest)
        try:
            outcome = self._train(progress, latest)
        except BaseException:
            with contextlib.suppress(OSError):  # a full disk would hide what went wrong first
                self._close()
            raise
        with disk_full_as_capacity_error(self.run.output):
            self._close()
        return outcome

    def _start(self, latest: Path | None) -> Progress:
        """Restore the newest state, if there is one, and prepare the output folder."""
        run, ranks = self.run, self.ranks
        _log.info(
            "%d conversations, %d supervised tokens, %d batches per epoch, %d trainable parameters",
            len(self.parts.data.train),
            int(self.parts.data.train.taught(run.data.max_length).sum()),
            self.parts.batches.per_epoch,
            sum(p.numel() for p in self.drafter.parameters()),
        )
        progress = Progress(0, 0)
        if latest is not None:
            progress = ranks.together(lambda: load_state(latest, self.drafter, self.optimizer, self.identity))
            _log.info("resumed at step %d from %s", progress.step, latest)

        def prepare() -> None:
            # Only now: a run that is refused must leave the folder of the other one as it was.
            prepare_folder(run, sys.argv)
            self.sinks = open_sinks(run.output, run.tracking, progress.step if latest is not None else None)

        ranks.first_only(prepare)
        return progress

    def _train(self, progress: Progress, checkpoint: Path | None) -> Outcome:
        run, ranks = self.run, self.ranks
        bad_in_a_row = 0
        meter = Meter(progress.step, run.schedule.num_steps, total=ranks.total if ranks.size > 1 else None)
        with StopRequest() as stop, contextlib.closing(self.parts.batches.from_step(progress.step)) as steps:
            for step, batches in steps:
                rate = self.rates.rate(progress.num_updates)  # a skipped step does not advance the schedule
                result = self._step(step, batches, rate)
                is_finite = bool(result.is_finite)
                bad_in_a_row = 0 if is_finite else bad_in_a_row + 1
                progress = Progress(step + 1, progress.num_updates + is_finite)
                meter.add(result, result.counters)
                done = progress.step == run.schedule.num_steps
                # Read once, at the same border on every rank: a request that comes later waits for the next one.
                is_stopped = ranks.any(stop.is_set) and not done
                saves = progress.step % run.checkpoint.every == 0 or done or is_stopped
                rows: list[Mapping[str, object]] = []
                # A row ends wherever a checkpoint does: a resumed run then goes on without a gap.
                if progress.step % _REPORT_EVERY == 0 or saves or not is_finite:
                    rows.append(meter.row(progress.step, rate))
                if bad_in_a_row == _MOST_BAD_STEPS:
                    self._report(progress.step, rows)
                    ranks.first_only(partial(self._give_up, step, batches))
                with meter.paused():
                    if progress.step % run.evaluate.every == 0 or done:
                        rows.append(self._evaluate(progress.step))
                    self._report(progress.step, rows)
                    # Before the checkpoint: a run that is killed between the two exports again, instead of not at all.
                    if run.checkpoint.export_every and progress.step % run.checkpoint.export_every == 0 and not done:
                        self._export(progress.step, is_last=False)
                    if saves:
                        checkpoint = self._save(progress)
                if is_stopped:
                    return Outcome(progress.step, False, checkpoint, None)
        return Outcome(progress.step, True, checkpoint, self._export(progress.step, is_last=True))

    def _step(self, step: int, batches: Sequence[Batch], rate: float) -> StepResult:
        return train_step(
            self.drafter,
            self.features,
            self.optimizer,
            batches,
            anchor_generators(self.run.seed, step),
            rate,
            self.settings,
            self.strategy,
        )

    def _report(self, step: int, rows: Sequence[Mapping[str, object]]) -> None:
        """Write rows of metrics, and tell of the step."""

        def append() -> None:
            for row in rows:
                assert self.sinks is not None, "the first rank opened them at the start"
                self.sinks.append(row)

        if rows:
            self.ranks.first_only(append)
        if self.on_progress is not None and self.ranks.is_first:
            told: Sequence[Mapping[str, object] | None] = rows or [None]
            for row in told:
                self.on_progress(TrainingProgress(step, self.run.schedule.num_steps, row))

    def _close(self) -> None:
        if self.sinks is not None:
            self.sinks.close()

    def _evaluate(self, step: int) -> dict[str, object]:
        with self.strategy.whole():
            self._measured = row = measure_held_out(
                self.run,
                self.drafter,
                self.features,
                self.parts.data.held_out,
                step,
                self.ranks,
                mixed_precision=self.settings.mixed_precision,
            )
        return row

    def _save(self, progress: Progress) -> Path:
        return save_state(
            self.checkpoints,
            self.drafter,
            self.optimizer,
            progress,
            self.identity,
            keep=self.run.checkpoint.keep,
            ranks=self.ranks,
        )

    def _export(self, step: int, *, is_last: bool) -> Path:
        folder = export_folder(self.run.output, step, is_last=is_last)
        is_measured = self._measured.get("step") == step
        if is_last and not is_measured:  # killed between the last checkpoint and the export, then resumed
            self._evaluate(step)
        calibration = calibration_of(self._measured) if is_last or is_measured else None
        return export_drafter(folder, self.run, self.parts, self.target, self.identity, step, self.ranks, calibration)

    def _give_up(self, step: int, batches: Sequence[Batch]) -> NoReturn:
        dump = self.run.output / f"non-finite-step-{step}.json"
        write_text_atomic(dump, json.dumps([batch.token_ids_BS.tolist() for batch in batches]))
        raise NumericError(
            f"loss or gradient was not finite for {_MOST_BAD_STEPS} steps in a row, last at step {step}",
            origin={"token ids": dump, "run": self.run.output},
            hint="a smaller optimizer.learning_rate and another output folder",
        )
