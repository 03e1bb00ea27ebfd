"""A stored drafter as what a run goes on from: of the same shape, or an error that lists every difference."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from paceline.checkpoint.compatibility import complete_contract
from paceline.checkpoint.contract import DrafterContract, TargetContract
from paceline.checkpoint.dialects import read_drafter
from paceline.checkpoint.dialects.files import CONFIG_FILE, DrafterFiles
from paceline.checkpoint.export import PROVENANCE_FILE
from paceline.checkpoint.locate import read_json
from paceline.checkpoint.names import drafter_destinations
from paceline.checkpoint.training_record import data_of_run, recorded_runs
from paceline.checkpoint.weights import load_strict
from paceline.configuration.run import TrainRun
from paceline.errors import CheckpointError, ConfigError
from paceline.models.building import empty_drafter
from paceline.models.drafters.table import Drafter
from paceline.models.weight_copy import copy_weight
from paceline.training.provenance import file_hashes

_log = logging.getLogger(__name__)

_RUN_DRAFTER = "drafter"  # where a run exports it, in its output
# What may differ: where a drafter lies, which target it was made for, how its files are written and its drafts drawn.
_FREE = ("origin", "target_name", "dtype", "draft_sample_method", "quantization")


def open_start(folder: Path, contract: DrafterContract, target: TargetContract) -> DrafterFiles:
    """Open the folder of a drafter to go on from; no weight is read.

    Args:
        folder: of any layout that can be served.
        contract: what the drafter of the run will promise.
        target: of the run.
    Raises:
        CheckpointError: missing, damaged, incomplete or unsupported files.
        ConfigError: the drafter has another shape than the run asks for; every difference is listed.
    """
    if not (folder / CONFIG_FILE).is_file() and (folder / _RUN_DRAFTER).is_dir():
        raise CheckpointError(
            "drafter.start_from is the folder of a run, which holds its drafter in a folder of its own",
            origin={"drafter.start_from": folder},
            hint=f"drafter.start_from={folder / _RUN_DRAFTER}",
        )
    files = read_drafter(folder)
    found = complete_contract(files.contract, target)
    differences = [
        f"{field.name} is {getattr(found, field.name)!r} there, {getattr(contract, field.name)!r} in this run"
        for field in dataclasses.fields(DrafterContract)
        if field.name not in _FREE and getattr(found, field.name) != getattr(contract, field.name)
    ]
    if differences:
        hint = "settings of [drafter] as that drafter has them, or a run without start_from"
        if found.has_own_embedding or found.has_mask_embedding:
            hint = "a drafter without input rows of its own, which training does not keep"
        raise ConfigError(
            "drafter.start_from is of another shape: " + "; ".join(differences),
            origin={"drafter.start_from": folder},
            hint=hint,
        )
    return files


def continued_drafter(folder: Path, contract: DrafterContract, target: TargetContract) -> Drafter:
    """A stored drafter as float32 masters on the CPU.

    Its fingerprint is not replayed: going on for another version of its target is what this is for. Arguments and
    errors are those of `open_start`.
    """
    files = open_start(folder, contract, target)
    drafter = empty_drafter(contract, torch.float32, torch.device("cpu"))
    destinations = drafter_destinations(contract)
    parameters = drafter.checkpoint_parameters()
    load_strict(parameters, files.source, destinations, ignored=files.ignored, copy=copy_weight)
    drafter.vocabulary.set_tables(files.draft_to_target, None)
    return drafter.requires_grad_(True)


@dataclass(frozen=True)
class Start:
    """What a run went on from.

    Attributes:
        weights_sha256: of all masters, wherever they lay.
        history: `provenance.json` of the folder; empty where there is none.
    """

    weights_sha256: str
    history: Mapping[str, object]


def read_history(run: TrainRun, folder: Path) -> Mapping[str, object]:
    """The record of the runs that a drafter comes from, where this run holds out what they did.

    Whole files are compared: one that was written anew, or has grown since, is another.

    Args:
        run: its data must be held out as that drafter's runs held it out.
        folder: of the drafter.
    Raises:
        CheckpointError: the record beside the drafter is none.
        ConfigError: the run would learn conversations that a run before it held out, or measure on those that it had
            learnt. Either looks better than it is, and nothing else would tell.
    """
    file = folder / PROVENANCE_FILE
    history: Mapping[str, object] = _finite(file) if file.is_file() else {}
    hashes = file_hashes(run.data.files)
    is_recorded = False
    for earlier in recorded_runs(history):
        data = data_of_run(earlier)
        if data is None:
            continue
        is_recorded = True
        known, kept = data
        shared = [name for name, digest in hashes.items() if digest in known.values()]
        if shared and run.data.hold_out != kept:
            what = "learn conversations of {} that were" if run.data.hold_out < kept else "measure on those of {} not"
            raise ConfigError(
                f"drafter.start_from was trained with data.hold_out {kept}; with {run.data.hold_out} this run would "
                f"{what.format(', '.join(shared))} held out then",
                origin={"drafter.start_from": folder},
                hint=f"data.hold_out={kept}",
            )
    if not is_recorded:
        _log.warning(
            "%s does not say what it was trained on: what this run measures on may have been learnt before", folder
        )
    return history


def start_of(run: TrainRun, folder: Path, drafter: Drafter) -> Start:
    """Which drafter a run goes on from, for its record; errors are those of `read_history`.

    Args:
        run: settings.
        folder: of the drafter.
        drafter: as `continued_drafter` read it.
    """
    return Start(_digest(drafter), read_history(run, folder))


def require_apart(output: Path, start: Path) -> None:
    """Refuse a run that would write into the drafter that it goes on from.

    Raises:
        ConfigError: the output is that folder, or lies in it.
    """
    if output.resolve().is_relative_to(start.resolve()):
        raise ConfigError(
            f"output {output} lies in drafter.start_from {start}",
            hint="a folder of its own; the drafter that a run goes on from stays as it is",
        )


def _finite(file: Path) -> dict[str, object]:
    """A record that can be written again.

    Raises:
        CheckpointError: it is no JSON object, or holds NaN or infinity, which the export could not write.
    """
    found: dict[str, object] = read_json(file)
    try:
        json.dumps(found, allow_nan=False)
    except ValueError as error:
        raise CheckpointError(f"{file} holds a number that JSON does not have: {error}") from error
    return found


def _digest(drafter: Drafter) -> str:
    digest = hashlib.sha256()
    for name, parameter in sorted(drafter.named_parameters()):
        digest.update(name.encode())
        digest.update(parameter.detach().cpu().numpy().tobytes())
    return digest.hexdigest()
