"""Writing drafter folders: all of a folder under a temporary name first, then one rename.

A folder is either the old one or the new one, never a mixture: weights of one run beside the config of another load
without any error and accept little.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import secrets
import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from paceline.checkpoint.calibration import CALIBRATION_FILE, Calibration
from paceline.checkpoint.contract import DrafterContract
from paceline.checkpoint.dialects import (
    Dialect,
    contract_from_config,
    file_names,
    is_drafter_config,
    write_drafter_config,
)
from paceline.checkpoint.dialects.files import CONFIG_FILE, MASK_FILE
from paceline.checkpoint.dialects.tensors import D2T, T2D
from paceline.checkpoint.locate import read_json
from paceline.checkpoint.names import drafter_slots
from paceline.checkpoint.weights import (
    INDEX_FILE,
    SINGLE_FILE,
    Destination,
    disk_full_as_capacity_error,
    replacing,
    save_safetensors,
    sync_to_disk,
    write_index,
    write_text_atomic,
)
from paceline.errors import CheckpointError

FINGERPRINT_FILE = "fingerprint.safetensors"
DEQUANTIZED_MARK = "dequantized_from"  # tensor of bytes in a fingerprint: the scheme that its drafter's weights were in
PROVENANCE_FILE = "provenance.json"
TEMPLATE_KEY = "chat_template_sha256"  # in it: of the template that conversations were rendered with
TOKEN_COUNTS_FILE = "token_counts.safetensors"  # how often each target id is in the training data's answers
TOKEN_COUNTS = "token_counts"  # its one tensor, int64 [target vocabulary]
_OUR_FILES = frozenset({CONFIG_FILE, INDEX_FILE, PROVENANCE_FILE, MASK_FILE, CALIBRATION_FILE, "hf_quant_config.json"})


def write_drafter_folder(
    folder: Path,
    contract: DrafterContract,
    tensors: Mapping[str, Tensor],
    fingerprint: Mapping[str, Tensor] | None,
    provenance: Mapping[str, object],
    *,
    dialect: Dialect | None = None,
    draft_to_target: Tensor | None = None,
    mask_embedding: Tensor | None = None,
    token_counts: Tensor | None = None,
    calibration: Calibration | None = None,
    extra_files: Sequence[Path] = (),
) -> None:
    """Write a drafter folder.

    A drafter folder that is already there is replaced as a whole; files of its that this function does not write, such
    as a model card, are kept.

    Args:
        folder: where it shall be.
        contract: goes into config.json.
        tensors: by canonical name, exactly those that the contract calls for; stored in their own dtype.
        fingerprint: a probe to replay at load, or None.
        provenance: JSON values: data, command, seed, commit and so on.
        dialect: layout of config and names; by default the native one of the family, "zlab".
        draft_to_target: int64 [draft vocabulary], the target id of every draft id; just where the contract has a
            vocabulary of its own. Stored as offsets (`d2t`) and as a mark on every target id (`t2d`).
        mask_embedding: float [D], what replaces the mask token's embedding; just where the contract says so.
        token_counts: int64 [target vocabulary], how often each id is in the answers trained on: an engine may draft
            from the frequent ones.
        calibration: what these weights accepted where they were measured; serving is held against it.
        extra_files: files to copy in under their own names, such as a tokenizer's.
    Raises:
        CheckpointError: the folder exists and is not a drafter's, the tensors do not match the contract or hold NaN or
            infinity, or the contract cannot be written in this dialect.
        CapacityError: the disk is full. Nothing is left behind then, nor after any other exception.
    """
    folder = folder.resolve()  # "." has no name to put a mark beside
    layout: Dialect = "zlab" if dialect is None else dialect
    _refuse_foreign_folder(folder)
    _check_tensors(contract, tensors)
    _check_mask(contract, mask_embedding)
    if token_counts is not None:
        require_token_counts(token_counts, contract.target_vocab_size, str(folder / TOKEN_COUNTS_FILE))
    stored_names = file_names(contract, layout)
    stored = {stored_names[name]: tensor for name, tensor in tensors.items()}
    stored |= _vocabulary_tables(contract, draft_to_target)
    config = _config_text(contract, layout, stored, folder)
    history = json.dumps(dict(provenance), indent=2, allow_nan=False) + "\n"
    mark = secrets.token_hex(4)
    temporary, retired = folder.with_name(f"{folder.name}.tmp-{mark}"), folder.with_name(f"{folder.name}.old-{mark}")
    new_parents = [parent for parent in folder.parents if not parent.exists()]
    with disk_full_as_capacity_error(folder):
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            temporary.mkdir()
            if folder.is_dir():
                _keep_other_files(folder, temporary)
            for file in extra_files:
                shutil.copy2(file, temporary / file.name)
                sync_to_disk(temporary / file.name)
            write_text_atomic(temporary / CONFIG_FILE, config)
            metadata = {"paceline_contract": "drafter", "target_layer_ids": str(list(contract.target_layer_ids))}
            save_safetensors(temporary / SINGLE_FILE, _apart(stored), metadata)
            write_index(temporary)
            if fingerprint is not None:
                save_safetensors(temporary / FINGERPRINT_FILE, _apart(fingerprint), {})
            if token_counts is not None:
                save_safetensors(temporary / TOKEN_COUNTS_FILE, {TOKEN_COUNTS: token_counts.long()}, {})
            if calibration is not None:
                write_text_atomic(temporary / CALIBRATION_FILE, calibration.to_json())
            if mask_embedding is not None:
                _save_mask(temporary / MASK_FILE, mask_embedding, contract.mask_token_id)
            write_text_atomic(temporary / PROVENANCE_FILE, history)
            sync_to_disk(temporary)
            _swap_in(temporary, folder, retired)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            _remove_empty(new_parents)
            raise
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


def require_token_counts(counts: Tensor, vocab_size: int | None, origin: str) -> None:
    """Refuse counts that cannot be those of a target's ids.

    Args:
        counts: as given or stored.
        vocab_size: of the target; None where it is not known.
        origin: the file, for messages.
    Raises:
        CheckpointError: says what is wrong with them.
    """
    hint = "`paceline capture counts FILES... --into DRAFTER` writes the file again"
    length = counts.shape[0] if vocab_size is None and counts.dim() == 1 else vocab_size
    if counts.dtype not in (torch.int32, torch.int64) or tuple(counts.shape) != (length,):
        raise CheckpointError(
            f"the token counts are {counts.dtype} {list(counts.shape)}; expected whole numbers, one for each of the "
            f"target's {vocab_size or ''} ids".replace("  ", " "),
            origin={"counts": origin},
            hint=hint,
        )
    if not len(counts) or int(counts.min()) < 0 or not bool(counts.any()):
        what = "negative" if len(counts) and int(counts.min()) < 0 else "all 0"
        raise CheckpointError(f"the token counts are {what}", origin={"counts": origin}, hint=hint)


def _refuse_foreign_folder(folder: Path) -> None:
    """Only a drafter in one of the layouts that are read here may be replaced."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is a file; a drafter is written as a folder", hint="another output folder")
    if not any(folder.iterdir()):
        return
    if not (folder / CONFIG_FILE).is_file():
        raise CheckpointError(f"{folder} holds files but no drafter; it stays as it is", hint="another output folder")
    if not is_drafter_config(read_json(folder / CONFIG_FILE)):
        raise CheckpointError(f"{folder} holds another kind of model; it stays as it is", hint="another output folder")


def _config_text(contract: DrafterContract, dialect: Dialect, stored: Collection[str], folder: Path) -> str:
    """The config as it will be read; a promise that gets lost on the way would be served otherwise than trained."""
    config = write_drafter_config(contract, dialect)
    again = contract_from_config(config, str(folder / CONFIG_FILE), stored)
    # these two follow from other files
    again = dataclasses.replace(
        again, has_mask_embedding=contract.has_mask_embedding, quantization=contract.quantization
    )
    lost = [
        f"{field.name} {getattr(contract, field.name)!r} would be read as {getattr(again, field.name)!r}"
        for field in dataclasses.fields(contract)
        if field.name != "origin" and getattr(contract, field.name) != getattr(again, field.name)
    ]
    if lost:
        raise CheckpointError(f"the {dialect} layout cannot state this drafter: {'; '.join(lost)}")
    return json.dumps(config, indent=2, allow_nan=False) + "\n"


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


def _check_mask(contract: DrafterContract, mask_embedding: Tensor | None) -> None:
    if contract.has_mask_embedding != (mask_embedding is not None):
        raise CheckpointError(
            f"the contract {'asks for' if contract.has_mask_embedding else 'has no place for'} a mask embedding, and "
            f"{'one' if mask_embedding is not None else 'none'} was given"
        )
    if mask_embedding is None:
        return
    if tuple(mask_embedding.shape) != (contract.hidden_size,) or not bool(torch.isfinite(mask_embedding).all()):
        raise CheckpointError(
            f"the mask embedding is {list(mask_embedding.shape)}, expected [{contract.hidden_size}] and finite numbers"
        )


def _vocabulary_tables(contract: DrafterContract, draft_to_target: Tensor | None) -> dict[str, Tensor]:
    """`d2t` int64 [draft vocabulary]: target id minus draft id; `t2d` bool [target vocabulary]."""
    if contract.has_vocabulary_map != (draft_to_target is not None):
        raise CheckpointError(
            f"the drafter proposes {contract.draft_vocab_size} ids of a target with {contract.target_vocab_size}, and "
            f"{'a' if draft_to_target is not None else 'no'} table of target ids was given"
        )
    if draft_to_target is None:
        return {}
    ids = draft_to_target.cpu()
    is_table = ids.dtype == torch.int64 and tuple(ids.shape) == (contract.draft_vocab_size,)
    is_ascending = is_table and bool((ids.diff() > 0).all())
    if not is_ascending or int(ids[0]) < 0 or int(ids[-1]) >= contract.target_vocab_size:
        raise CheckpointError(
            f"the table of target ids is {ids.dtype} {list(ids.shape)}; expected int64 [{contract.draft_vocab_size}], "
            f"each id below {contract.target_vocab_size} and larger than the one before"
        )
    is_drafted = torch.zeros(contract.target_vocab_size, dtype=torch.bool)
    is_drafted[ids] = True
    return {D2T: ids - torch.arange(len(ids)), T2D: is_drafted}


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of one memory, such as a tied embedding and head, as copies: the file format has no sharing."""
    seen: set[int] = set()
    apart: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        place = tensor.untyped_storage().data_ptr()
        apart[name] = tensor.clone() if place in seen else tensor
        seen.add(place)
    return apart


def _save_mask(path: Path, embedding: Tensor, mask_token_id: int) -> None:
    content = {"embedding": embedding.detach().cpu().clone(), "mask_token_id": mask_token_id}
    with replacing(path) as temporary, temporary.open("wb") as file:
        torch.save(content, file)


def _keep_other_files(old: Path, new: Path) -> None:
    for entry in old.iterdir():
        # weights of any name go: a shard that stayed would contradict the new file
        if entry.name in _OUR_FILES or entry.suffix == ".safetensors":
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


def _remove_empty(folders: Sequence[Path]) -> None:
    """Take away parents that were made for nothing, the innermost first; one that somebody else uses by now stays."""
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.rmdir()
