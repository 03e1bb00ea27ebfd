"""Writing drafter folders: all of a folder under a temporary name first, then one rename.

A folder is either the old one or the new one, never a mixture: weights of one run beside the config of another load
without any error and accept little.
"""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from paceline.checkpoint.contract import DrafterContract
from paceline.checkpoint.dialects import write_drafter_config
from paceline.checkpoint.drafter_keys import ARCHITECTURE
from paceline.checkpoint.locate import read_json
from paceline.checkpoint.names import drafter_slots
from paceline.checkpoint.weights import (
    SINGLE_FILE,
    Destination,
    disk_full_as_capacity_error,
    save_safetensors,
    sync_to_disk,
    write_text_atomic,
)
from paceline.errors import CheckpointError

CONFIG_FILE = "config.json"
FINGERPRINT_FILE = "fingerprint.safetensors"
PROVENANCE_FILE = "provenance.json"
_OUR_FILES = frozenset({CONFIG_FILE, SINGLE_FILE, FINGERPRINT_FILE, PROVENANCE_FILE})


def write_drafter_folder(
    folder: Path,
    contract: DrafterContract,
    tensors: Mapping[str, Tensor],
    fingerprint: Mapping[str, Tensor] | None,
    provenance: Mapping[str, object],
) -> None:
    """Write a drafter folder in the z-lab layout.

    A drafter folder that is already there is replaced as a whole; files of its that this function does not write, such
    as a model card, are kept.

    Args:
        folder: where it shall be.
        contract: goes into config.json.
        tensors: by checkpoint name, exactly those that the contract calls for; stored in their own dtype.
        fingerprint: a probe to replay at load, or None.
        provenance: JSON values: data, command, seed, commit and so on.
    Raises:
        CheckpointError: the folder exists and is not a drafter's, the tensors do not match the contract or hold NaN or
            infinity, or the contract cannot be written in this dialect.
        CapacityError: the disk is full. Nothing is left behind then, nor after any other exception.
    """
    folder = folder.resolve()  # "." has no name to put a mark beside
    _refuse_foreign_folder(folder)
    _check_tensors(contract, tensors)
    config = json.dumps(write_drafter_config(contract), indent=2, allow_nan=False) + "\n"
    history = json.dumps(dict(provenance), indent=2, allow_nan=False) + "\n"
    mark = secrets.token_hex(4)
    temporary, retired = folder.with_name(f"{folder.name}.tmp-{mark}"), folder.with_name(f"{folder.name}.old-{mark}")
    with disk_full_as_capacity_error(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            temporary.mkdir()
            if folder.is_dir():
                _keep_other_files(folder, temporary)
            write_text_atomic(temporary / CONFIG_FILE, config)
            metadata = {"paceline_contract": "drafter", "target_layer_ids": str(list(contract.target_layer_ids))}
            save_safetensors(temporary / SINGLE_FILE, tensors, metadata)
            if fingerprint is not None:
                save_safetensors(temporary / FINGERPRINT_FILE, fingerprint, {})
            write_text_atomic(temporary / PROVENANCE_FILE, history)
            sync_to_disk(temporary)
            _swap_in(temporary, folder, retired)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        sync_to_disk(folder.parent)


def split_fused(parameters: Mapping[str, Tensor], destinations: Mapping[str, Destination]) -> dict[str, Tensor]:
    """Cut fused parameters into checkpoint tensors: the inverse of `weights.load_strict`.

    Args:
        parameters: module parameter name to tensor.
        destinations: checkpoint name to place, as for loading.
    Returns:
        Checkpoint name to a detached tensor; row ranges are views of their parameter.
    Raises:
        CheckpointError: a place names a parameter that does not exist.
    """
    missing = sorted({place.parameter for place in destinations.values()}.difference(parameters))
    if missing:
        raise CheckpointError(f"the module has no parameters {', '.join(missing[:8])} ({len(missing)} in all)")
    return {
        name: parameters[place.parameter].detach()[slice(*(place.rows or (None, None)))]
        for name, place in destinations.items()
    }


def _refuse_foreign_folder(folder: Path) -> None:
    if not folder.exists():
        return
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is a file; a drafter is written as a folder", hint="another output folder")
    if not any(folder.iterdir()):
        return
    config = folder / CONFIG_FILE
    if not config.is_file():
        raise CheckpointError(f"{folder} holds files but no drafter; it stays as it is", hint="another output folder")
    if read_json(config).get("architectures") != [ARCHITECTURE]:
        raise CheckpointError(f"{folder} holds another kind of model; it stays as it is", hint="another output folder")


def _check_tensors(contract: DrafterContract, tensors: Mapping[str, Tensor]) -> None:
    expected = {slot.name: slot.shape for slot in drafter_slots(contract)}
    problems = [f"{name} is missing" for name in expected if name not in tensors]
    problems += [f"{name} has no place" for name in tensors if name not in expected]
    for name, tensor in tensors.items():
        if name in expected and tuple(tensor.shape) != expected[name]:
            problems.append(f"{name} is {list(tensor.shape)}, expected {list(expected[name])}")
        if not bool(torch.isfinite(tensor).all()):
            problems.append(f"{name} holds NaN or infinity")
    if problems:
        more = f" and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise CheckpointError(f"the tensors do not match the drafter's contract: {'; '.join(problems[:8])}{more}")


def _keep_other_files(old: Path, new: Path) -> None:
    for entry in old.iterdir():
        if entry.name in _OUR_FILES:
            continue
        if entry.is_dir():
            shutil.copytree(entry, new / entry.name, symlinks=True)
        else:
            shutil.copy2(entry, new / entry.name, follow_symlinks=False)


def _swap_in(temporary: Path, folder: Path, retired: Path) -> None:
    """Put the finished folder in place; an old one is moved aside, and back if the second rename fails."""
    if not folder.exists():
        temporary.rename(folder)
        return
    try:
        folder.rename(retired)
        temporary.rename(folder)
    except BaseException:
        if retired.exists() and not folder.exists():
            retired.rename(folder)
        raise
    shutil.rmtree(retired, ignore_errors=True)
