"""A stored drafter as what a run goes on from: of the same shape, or an error that lists every difference."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from paceline.checkpoint.compatibility import complete_contract
from paceline.checkpoint.contract import DrafterContract, TargetContract
from paceline.checkpoint.dialects import read_drafter
from paceline.checkpoint.export import PROVENANCE_FILE
from paceline.checkpoint.locate import read_json
from paceline.checkpoint.names import drafter_destinations
from paceline.checkpoint.weights import load_strict
from paceline.configuration.run import TrainRun
from paceline.errors import ConfigError
from paceline.models.building import empty_drafter
from paceline.models.drafters.table import Drafter
from paceline.models.weight_copy import copy_weight
from paceline.training.provenance import file_hashes

# What may differ: where a drafter lies, which target it was made for, how its files are written and its drafts drawn.
_FREE = ("origin", "target_name", "dtype", "draft_sample_method", "quantization")


def continued_drafter(folder: Path, contract: DrafterContract, target: TargetContract) -> Drafter:
    """A stored drafter as float32 masters on the CPU.

    Its fingerprint is not replayed: going on for another version of its target is what this is for.

    Args:
        folder: of any layout that can be served.
        contract: what the drafter of the run will promise.
        target: of the run.
    Raises:
        CheckpointError: missing, damaged, incomplete or unsupported files.
        ConfigError: the drafter has another shape than the run asks for; every difference is listed.
    """
    files = read_drafter(folder)
    found = complete_contract(files.contract, target)
    differences = [
        f"{field.name} is {getattr(found, field.name)!r} there, {getattr(contract, field.name)!r} in this run"
        for field in dataclasses.fields(DrafterContract)
        if field.name not in _FREE and getattr(found, field.name) != getattr(contract, field.name)
    ]
    if differences:
        raise ConfigError(
            "drafter.start_from is of another shape: " + "; ".join(differences),
            origin={"drafter.start_from": folder},
            hint="settings of [drafter] as that drafter has them, or a run without start_from",
        )
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


def start_of(run: TrainRun, folder: Path, drafter: Drafter) -> Start:
    """Which drafter a run goes on from, for its record.

    Args:
        run: its data must leave alone what that drafter's runs left alone.
        folder: of the drafter.
        drafter: as `continued_drafter` read it.
    Raises:
        ConfigError: the run would learn conversations that a run before it held out. Whatever is measured on them
            afterwards would be better than it is, and nothing else would tell.
    """
    file = folder / PROVENANCE_FILE
    history: Mapping[str, object] = read_json(file) if file.is_file() else {}
    hashes = file_hashes(run.data.files)
    for earlier in _runs(history):
        known, kept = earlier.get("data.files"), earlier.get("data.hold_out")
        if not (isinstance(known, Mapping) and isinstance(kept, int)) or run.data.hold_out >= kept:
            continue
        shared = [name for name, digest in hashes.items() if digest in known.values()]
        if shared:
            raise ConfigError(
                f"drafter.start_from was trained with data.hold_out {kept}; with {run.data.hold_out} this run would "
                f"learn conversations of {', '.join(shared)} that are held out to measure drafters on",
                origin={"drafter.start_from": folder},
                hint=f"data.hold_out={kept}",
            )
    return Start(_digest(drafter), history)


def _runs(history: Mapping[str, object]) -> Iterator[Mapping[str, object]]:
    """A record and those of the runs before it."""
    while history:
        yield history
        before = history.get("start")
        history = before if isinstance(before, Mapping) else {}


def _digest(drafter: Drafter) -> str:
    digest = hashlib.sha256()
    for name, parameter in sorted(drafter.named_parameters()):
        digest.update(name.encode())
        digest.update(parameter.detach().cpu().numpy().tobytes())
    return digest.hexdigest()
