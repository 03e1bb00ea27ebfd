"""A whole training run: data in, held-out measurements and checkpoints on the way, a drafter folder at the end."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from paceline.checkpoint.export import split_fused, write_drafter_folder
from paceline.checkpoint.names import drafter_destinations
from paceline.checkpoint.weights import disk_full_as_capacity_error, write_text_atomic
from paceline.configuration.load import to_toml
from paceline.configuration.run import TrainRun
from paceline.errors import ConfigError, NumericError
from paceline.models.building import empty_drafter
from paceline.models.fingerprint import PROBE_TOKENS, record_fingerprint
from paceline.models.loading import LoadedTarget, resolve_device
from paceline.training.contract import drafter_contract
from paceline.training.data import Batch, BatchOrder, Conversations, join, read_conversations, split_held_out
from paceline.training.features import TargetFeatures
from paceline.training.interrupt import StopRequest
from paceline.training.objective import Objective
from paceline.training.optimizer import RateSchedule, make_optimizer
from paceline.training.provenance import file_hashes, run_identity, versions
from paceline.training.resume import Progress, latest_checkpoint, load_state, save_state
from paceline.training.simulate import simulate
from paceline.training.starting import starting_drafter
from paceline.training.step import StepResult, StepSettings, train_step
from paceline.training.tracking import Meter, MetricsFile

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
class TrainingData:
    """Conversations to train on, and those held out, by file."""

    train: Conversations
    held_out: Mapping[str, Conversations]


def read_data(run: TrainRun, target: LoadedTarget) -> TrainingData:
    """Read and split every file of a run.

    Raises:
        DataError: names the file and what is wrong with it.
    """
    train, held_out = [], {}
    for path in run.data.files:
        encoder = target.tokenizer if target.tokenizer.has_chat_template else None
        conversations = read_conversations(path, vocab_size=target.contract.vocab_size, encoder=encoder)
        learned, kept = split_held_out(conversations, run.data.hold_out)
        train.append(learned)
        is_taken = path.name in held_out  # two folders may hold files of one name
        held_out[str(path) if is_taken else path.name] = kept
    return TrainingData(join(train), held_out)


def train(run: TrainRun, target: LoadedTarget, *, resume: bool = False) -> Outcome:
    """Run to the end, or to the first request to stop.

    Args:
        run: validated settings.
        target: loaded with plain linears on the run's device.
        resume: continue from the newest checkpoint in the output folder.
    Raises:
        ConfigError: the output folder holds another run, or nothing to resume.
        DataError: data that cannot be used.
        NumericError: the loss stayed non-finite; the token ids of the last step are on disk, and so is the last
            checkpoint.
        CapacityError: the disk is full.
    """
    data = read_data(run, target)
    return _Run(run, target, data).execute(resume=resume)


class _Run:
    """The parts of one run, put together once."""

    def __init__(self, run: TrainRun, target: LoadedTarget, data: TrainingData) -> None:
        self.run, self.target, self.data = run, target, data
        self.device = resolve_device(run.device)
        is_gpu = self.device.type == "cuda"
        weights = run.objective.loss_weights
        self.settings = StepSettings(
            objective=Objective(
                kl=weights.get("kl", 0.0),
                ce=weights.get("ce", 0.0),
                gamma=run.objective.gamma,
                chunk_rows=run.objective.chunk_rows,
                compiled=is_gpu,
                selector=run.objective.selector_weight,
                l1=weights.get("l1", 0.0),
                confidence=run.objective.confidence_weight,
            ),
            num_anchors=run.schedule.num_anchors,
            clip_norm=run.optimizer.clip_norm,
            mixed_precision=is_gpu,
        )
        self.contract = drafter_contract(run, target.contract)
        self.drafter = starting_drafter(run, self.contract, target, data.train, self.device)
        self.features = TargetFeatures(target.model, self.contract.target_layer_ids, self.contract.aux_hidden_stream)
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
        lengths = np.minimum(np.diff(data.train.starts), run.data.max_length)
        self.order = BatchOrder(lengths, run.schedule.batch_size, run.seed)
        self.checkpoints = run.output / "checkpoints"

    def execute(self, *, resume: bool) -> Outcome:
        """Train, evaluate, save, export."""
        run = self.run
        progress = self._start(resume)
        metrics = MetricsFile(run.output / "metrics.jsonl", resume_step=progress.step if resume else None)
        checkpoint = latest_checkpoint(self.checkpoints)
        bad_in_a_row = 0
        meter = Meter(progress.step, run.schedule.num_steps)
        with StopRequest() as stop, ThreadPoolExecutor(1) as loader:
            for step, batches in self._batches(progress.step, loader):
                rate = self.rates.rate(progress.num_updates)  # a skipped step does not advance the schedule
                result = self._step(step, batches, rate)
                is_finite = bool(result.is_finite)
                bad_in_a_row = 0 if is_finite else bad_in_a_row + 1
                progress = Progress(step + 1, progress.num_updates + is_finite)
                meter.add(result)
                done = progress.step == run.schedule.num_steps
                is_stopped = stop.is_set and not done  # read once: a request that comes later waits for the next border
                saves = progress.step % run.checkpoint.every == 0 or done or is_stopped
                # A row ends wherever a checkpoint does: a resumed run then goes on without a gap.
                if progress.step % _REPORT_EVERY == 0 or saves or not is_finite:
                    metrics.append(meter.row(progress.step, rate))
                if bad_in_a_row == _MOST_BAD_STEPS:
                    raise self._gave_up(step, batches)
                if progress.step % run.evaluate.every == 0 or done:
                    metrics.append(self._evaluate(progress.step))
                if saves:
                    checkpoint = self._save(progress)
                if is_stopped:
                    return Outcome(progress.step, False, checkpoint, None)
        return Outcome(progress.step, True, checkpoint, self._export(progress.step))

    def _start(self, resume: bool) -> Progress:
        """Prepare the output folder and, if asked, restore the newest state."""
        latest = latest_checkpoint(self.checkpoints)
        if resume and latest is None:
            raise ConfigError(f"nothing to resume: no checkpoint in {self.checkpoints}", hint="start without --resume")
        if not resume and latest is not None:
            raise ConfigError(
                f"{self.run.output} already holds a run, saved at {latest.name}",
                hint="--resume to continue it, or another output folder",
            )
        _log.info(
            "%d conversations, %d supervised tokens, %d batches per epoch, %d trainable parameters",
            len(self.data.train),
            self.data.train.num_supervised,
            self.order.batches_per_epoch,
            sum(p.numel() for p in self.drafter.parameters()),
        )
        progress = Progress(0, 0)
        if latest is not None:
            progress = load_state(latest, self.drafter, self.optimizer, self._identity())
            _log.info("resumed at step %d from %s", progress.step, latest)
        # Only now: a run that is refused must leave the folder of the other one as it was.
        with disk_full_as_capacity_error(self.run.output):
            self.run.output.mkdir(parents=True, exist_ok=True)
        write_text_atomic(self.run.output / "config.toml", to_toml(self.run))
        return progress

    def _batches(self, first_step: int, loader: ThreadPoolExecutor) -> Iterator[tuple[int, list[Batch]]]:
        """Batches of every step from `first_step` on, the next one being read while this one trains."""
        parts = self.run.schedule.accumulation

        def read(step: int) -> list[Batch]:
            indices = [self.order(step * parts + part) for part in range(parts)]
            return [self.data.train.batch(rows, self.run.data.max_length) for rows in indices]

        upcoming = loader.submit(read, first_step)
        for step in range(first_step, self.run.schedule.num_steps):
            batches = upcoming.result()
            upcoming = loader.submit(read, step + 1)
            yield step, batches

    def _step(self, step: int, batches: list[Batch], rate: float) -> StepResult:
        def generator(part: int) -> torch.Generator:
            mixed = np.random.SeedSequence([self.run.seed, step, part]).generate_state(1, np.uint64)[0]
            return torch.Generator().manual_seed(int(mixed) & (2**63 - 1))

        return train_step(self.drafter, self.features, self.optimizer, batches, generator, rate, self.settings)

    def _evaluate(self, step: int) -> dict[str, object]:
        """Simulated acceptance on held-out conversations, file by file."""
        wanted = self.run.evaluate.num_conversations
        if wanted:
            wanted = max(1, wanted // len(self.data.held_out))
        row: dict[str, object] = {"kind": "evaluate", "step": step}
        for name, conversations in self.data.held_out.items():
            chosen = conversations.select(range(min(wanted, len(conversations))))
            if len(chosen) == 0:
                continue
            found = simulate(
                self.drafter,
                self.features,
                chosen,
                batch_size=self.run.evaluate.batch_size,
                max_length=self.run.data.max_length,
                mixed_precision=self.settings.mixed_precision,
            )
            row[name] = {
                "acceptance_length": found.acceptance_length,
                "all_anchor_length": found.all_anchor_length,
                "per_position": found.per_position,
                "num_conversations": len(chosen),
            }
            _log.info(
                "step %d held out %s: acceptance length %.3f (all anchors %.3f)",
                step,
                name,
                found.acceptance_length,
                found.all_anchor_length,
            )
        return row

    def _save(self, progress: Progress) -> Path:
        keep = self.run.checkpoint.keep
        return save_state(self.checkpoints, self.drafter, self.optimizer, progress, self._identity(), keep=keep)

    def _export(self, step: int) -> Path:
        """Write the drafter folder, in bf16, with the fingerprint of the target that it was trained on."""
        exported = empty_drafter(self.contract, torch.bfloat16, self.device)
        exported.load_state_dict(self.drafter.state_dict())
        exported.vocabulary.set_tables(self.drafter.vocabulary.target_ids_V, None)
        probe_source = next((c for c in self.data.held_out.values() if len(c)), self.data.train)
        probe = [int(token) for token in probe_source.tokens[:PROBE_TOKENS]]  # across borders, if texts are short
        folder = self.run.output / "drafter"
        write_drafter_folder(
            folder,
            self.contract,
            split_fused(exported.checkpoint_parameters(), drafter_destinations(self.contract)),
            record_fingerprint(self.target.model, exported, probe),
            {"step": step, **self._identity(), "data.files": file_hashes(self.run.data.files), "versions": versions()},
            draft_to_target=exported.vocabulary.target_ids_V,
        )
        return folder

    def _identity(self) -> dict[str, object]:
        return run_identity(self.run, self.data.train, self.target.model)

    def _gave_up(self, step: int, batches: list[Batch]) -> NumericError:
        dump = self.run.output / f"non-finite-step-{step}.json"
        write_text_atomic(dump, json.dumps([batch.token_ids_BS.tolist() for batch in batches]))
        return NumericError(
            f"loss or gradient was not finite for {_MOST_BAD_STEPS} steps in a row, last at step {step}",
            origin={"token ids": dump, "run": self.run.output},
            hint="a smaller optimizer.learning_rate and another output folder",
        )
