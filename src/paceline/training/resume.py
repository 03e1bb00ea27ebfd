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
from torch import nn

from paceline.checkpoint.weights import (
    disk_full_as_capacity_error,
    open_safetensors_file,
    save_safetensors,
    sync_to_disk,
    write_text_atomic,
)
from paceline.errors import CheckpointError, ConfigError

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


def save_state(
    checkpoints: Path,
    drafter: nn.Module,
    optimizer: torch.optim.Optimizer,
    progress: Progress,
    identity: Mapping[str, object],
    *,
    keep: int,
) -> Path:
    """Write the state after a step, then remove all but the newest `keep` checkpoints.

    Args:
        checkpoints: folder of checkpoints.
        drafter: float32 masters.
        optimizer: AdamW over exactly the drafter's parameters.
        progress: how far the run is.
        identity: settings and hashes that a resumed run must share.
        keep: checkpoints left on disk, this one included.
    Raises:
        CapacityError: the disk is full; earlier checkpoints are untouched and nothing half-written remains.
    """
    folder = step_folder(checkpoints, progress.step)
    unfinished = folder.with_name(folder.name + ".unfinished")
    tensors = {}
    for name, parameter in drafter.named_parameters():
        tensors[f"master.{name}"] = parameter.detach().cpu()
        for moment in _MOMENTS:
            value = optimizer.state[parameter].get(moment) if parameter in optimizer.state else None
            tensors[f"{moment}.{name}"] = torch.zeros_like(parameter, device="cpu") if value is None else value.cpu()
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
    """Restore everything from a checkpoint of the same run.

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
            parameter.copy_(source.load(f"master.{name}"))
            state = {moment: source.load(f"{moment}.{name}").to(parameter.device) for moment in _MOMENTS}
            count = torch.tensor(float(progress.num_updates))
            is_fused = bool(optimizer.defaults.get("fused"))
            optimizer.state[parameter] = {"step": count.to(parameter.device) if is_fused else count, **state}
    return progress


def _require_same_run(saved: Mapping[str, object], asked: Mapping[str, object], folder: Path) -> None:
    different = [key for key in sorted({*saved, *asked}) if saved.get(key) != asked.get(key)]
    if different:
        texts = [f"{key} was {saved.get(key)!r}, is {asked.get(key)!r}" for key in different]
        raise ConfigError(
            f"this is not the run that was saved: {'; '.join(texts)}",
            origin={"checkpoint": folder},
            hint="the same settings and data to resume, or another output folder for another run",
        )
