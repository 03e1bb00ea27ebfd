"""Complete training state on disk: float32 masters, moments, step. Saved whole or not at all; resumed bit for bit.

Data order, anchors and learning rate are functions of the seed and the step, so there is no other state.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from paceline.checkpoint.weights import (
    TensorSource,
    disk_full_as_capacity_error,
    open_safetensors_file,
    save_safetensors,
    sync_to_disk,
    write_text_atomic,
)
from paceline.errors import CheckpointError, ConfigError
from paceline.training.ranks import Ranks
from paceline.training.strategies import full_tensor, like_parameter

_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Progress:
    """How far a run is.

    Attributes:
        step: optimizer steps behind it, skipped ones included.
        num_updates: steps that changed the weights.
    """

    step: int
    num_updates: int


def step_folder(checkpoints: Path, step: int) -> Path:
    """Where the state after a step lies."""
    return checkpoints / f"step-{step:07d}"


def latest_checkpoint(checkpoints: Path) -> Path | None:
    """The furthest complete checkpoint; unfinished ones carry another name and don't count."""
    complete = sorted(path for path in checkpoints.glob("step-*[0-9]") if (path / "state.json").is_file())
    return complete[-1] if complete else None


def remove_unfinished(checkpoints: Path) -> None:
    """Take away what a process left behind that was killed while it saved."""
    for folder in checkpoints.glob("step-*.unfinished"):
        shutil.rmtree(folder, ignore_errors=True)


def save_state(
    checkpoints: Path,
    drafter: nn.Module,
    optimizer: torch.optim.Optimizer,
    progress: Progress,
    identity: Mapping[str, object],
    *,
    keep: int,
    ranks: Ranks | None = None,
) -> Path:
    """Write the state after a step, then remove all but the newest `keep` checkpoints.

    What is written is whole tensors, whatever the ranks share it as, so another number of ranks can resume it.

    Args:
        checkpoints: folder of checkpoints.
        drafter: float32 masters.
        optimizer: AdamW over exactly the drafter's parameters.
        progress: how far the run is.
        identity: settings and hashes that a resumed run must share.
        keep: checkpoints left on disk, this one included.
        ranks: all of them must call; the first one writes. None is a process alone.
    Raises:
        CapacityError: the disk is full; earlier checkpoints are untouched and nothing half-written remains.
    """
    ranks = ranks or Ranks.alone(torch.device("cpu"))
    tensors = _whole_state(drafter, optimizer, keeps=ranks.is_first)
    return ranks.first_only(lambda: _write(checkpoints, tensors, progress, identity, keep))


def _whole_state(drafter: nn.Module, optimizer: torch.optim.Optimizer, *, keeps: bool) -> dict[str, Tensor]:
    """Masters and moments on the CPU; ranks that keep nothing only help to put shards together."""
    tensors = {}
    for name, parameter in drafter.named_parameters():
        state = optimizer.state.get(parameter, {})
        values = {"master": parameter, **{moment: state.get(moment) for moment in _MOMENTS}}
        for kind, value in values.items():
            whole = full_tensor(torch.zeros_like(parameter) if value is None else value)
            if keeps:
                tensors[f"{kind}.{name}"] = whole.cpu()
    return tensors


def _write(
    checkpoints: Path,
    tensors: Mapping[str, Tensor],
    progress: Progress,
    identity: Mapping[str, object],
    keep: int,
) -> Path:
    folder = step_folder(checkpoints, progress.step)
    unfinished = folder.with_name(folder.name + ".unfinished")
    try:
        with disk_full_as_capacity_error(folder):
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(parents=True)
            save_safetensors(unfinished / "state.safetensors", tensors, {})
            state = {"step": progress.step, "num_updates": progress.num_updates, "identity": identity}
            write_text_atomic(unfinished / "state.json", json.dumps(state, indent=1, default=str) + "\n")
            shutil.rmtree(folder, ignore_errors=True)
            unfinished.rename(folder)
            sync_to_disk(checkpoints)  # before an older one goes
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    for old in sorted(checkpoints.glob("step-*[0-9]"))[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
    return folder


def load_state(
    folder: Path, drafter: nn.Module, optimizer: torch.optim.Optimizer, identity: Mapping[str, object]
) -> Progress:
    """Restore everything from a checkpoint of the same run, on every rank what is its own.

    Raises:
        CheckpointError: missing or damaged state, or another network.
        ConfigError: the settings or the data are not those of the saved run.
    """
    try:
        saved = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        progress = Progress(int(saved["step"]), int(saved["num_updates"]))
        saved_identity = dict(saved["identity"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"cannot read the state in {folder}: {error!r}",
            hint="removing that folder, to resume from the one before it",
        ) from error
    _require_same_run(saved_identity, json.loads(json.dumps(identity, default=str)), folder)
    source = open_safetensors_file(folder / "state.safetensors")
    parameters = dict(drafter.named_parameters())
    wanted = {f"{kind}.{name}" for name in parameters for kind in ("master", *_MOMENTS)}
    if set(source.names()) != wanted:
        odd = sorted(set(source.names()) ^ wanted)[:4]
        raise CheckpointError(
            f"the saved state is of another network; first differences: {odd}", origin={"state": folder}
        )
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(_loaded(source, f"master.{name}", parameter))
            state = {moment: _loaded(source, f"{moment}.{name}", parameter) for moment in _MOMENTS}
            count = torch.tensor(float(progress.num_updates))
            is_fused = bool(optimizer.defaults.get("fused"))
            optimizer.state[parameter] = {"step": count.to(parameter.device) if is_fused else count, **state}
    return progress


def _loaded(source: TensorSource, name: str, parameter: Tensor) -> Tensor:
    """One tensor of the state, sharded as the parameter is; copying alone would spread a smaller one over it."""
    tensor = source.load(name)
    if tensor.shape != parameter.shape or tensor.dtype != torch.float32 or not bool(torch.isfinite(tensor).all()):
        raise CheckpointError(
            f"{name} is {tensor.dtype} {list(tensor.shape)}; expected finite numbers in torch.float32 "
            f"{list(parameter.shape)}",
            origin={"state": source.origin},
            hint="removing that folder, to resume from the one before it",
        )
    return like_parameter(tensor, parameter)


def _require_same_run(saved: Mapping[str, object], asked: Mapping[str, object], folder: Path) -> None:
    different = [key for key in sorted({*saved, *asked}) if saved.get(key) != asked.get(key)]
    if different:
        texts = [f"{key} was {saved.get(key)!r}, is {asked.get(key)!r}" for key in different]
        raise ConfigError(
            f"this is not the run that was saved: {'; '.join(texts)}",
            origin={"checkpoint": folder},
            hint="the same settings and data to resume, or another output folder for another run",
        )
