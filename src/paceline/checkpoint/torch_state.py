"""Weights in a file of `torch.save`, as TorchSpec's extracts are: a flat mapping from names to tensors, nothing else.

A pickle can run code, so it is read with torch's restricted unpickler, which knows tensors and plain containers. A file
that needs more than that is refused, and so is one whose mapping holds anything but tensors: a training state has a
model somewhere inside, and which of its weights would be served is not for this code to guess.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from paceline.checkpoint.weights import INDEX_FILE, SINGLE_FILE, TensorSource, open_safetensors
from paceline.errors import CheckpointError

_SUFFIXES = (".bin", ".pt", ".pth")
_OTHER_FILES = ("mask_embedding.pt", "training_args.bin")  # of `torch.save` too, and no weights
_MAX_LISTED = 8


def find_torch_state(folder: Path) -> Path | None:
    """The file of `torch.save` that holds a folder's weights; None where safetensors do, or nothing does.

    Raises:
        CheckpointError: there are several such files, and no safetensors.
    """
    if not folder.is_dir() or any((folder / name).is_file() for name in (SINGLE_FILE, INDEX_FILE)):
        return None
    found = sorted(entry for entry in folder.iterdir() if entry.suffix in _SUFFIXES and entry.name not in _OTHER_FILES)
    if len(found) > 1:
        raise CheckpointError(
            f"{folder} has no safetensors and {len(found)} files of torch.save: "
            f"{', '.join(file.name for file in found[:_MAX_LISTED])}; weights are one file",
            hint="leaving the one with the drafter's weights in the folder",
        )
    return found[0] if found else None


def open_weights(folder: Path) -> TensorSource:
    """Open a drafter's weights: safetensors, or where there are none the one file of `torch.save`.

    Raises:
        CheckpointError: as `open_safetensors`, `find_torch_state` and `open_torch_state`.
    """
    state = find_torch_state(folder)
    return open_safetensors(folder) if state is None else open_torch_state(state)


def open_torch_state(path: Path) -> TensorSource:
    """Open a flat state dict.

    Args:
        path: of `torch.save({name: tensor, ...})`.
    Returns:
        A source; tensors are mapped from the file where its format allows.
    Raises:
        CheckpointError: the file is damaged, holds code or other objects than tensors, or names that are not text.
    """
    content = _load(path)
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{path} holds {_kind(content)}, expected a mapping from names to tensors")
    others = [f"{name} ({_kind(value)})" for name, value in content.items() if not isinstance(value, Tensor)]
    if others:
        more = f" and {len(others) - _MAX_LISTED} more" if len(others) > _MAX_LISTED else ""
        raise CheckpointError(
            f"{path} holds other things than tensors: {', '.join(others[:_MAX_LISTED])}{more}",
            hint="the extracted weights of the drafter alone, names and tensors, instead of a training state",
        )
    if not content:
        raise CheckpointError(f"{path} holds no tensors")
    strange = [name for name, tensor in content.items() if not isinstance(name, str) or tensor.layout != torch.strided]
    if strange:
        raise CheckpointError(f"{path} holds names that are not text, or sparse tensors: {strange[:_MAX_LISTED]}")
    return _StateSource(str(path), {name: tensor.detach() for name, tensor in content.items()})


class _StateSource:
    """Tensors of a mapping, in its order."""

    def __init__(self, origin: str, tensors: Mapping[str, Tensor]) -> None:
        self.origin = origin
        self._tensors = dict(tensors)

    def names(self) -> list[str]:
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensor(name).shape)

    def load(self, name: str) -> Tensor:
        return self._tensor(name)

    def _tensor(self, name: str) -> Tensor:
        if name not in self._tensors:
            raise CheckpointError(f"{self.origin} has no tensor {name}")
        return self._tensors[name]


def _load(path: Path) -> object:
    try:
        # only the zip format of torch 1.6 and later can be mapped
        return torch.load(path, map_location="cpu", weights_only=True, mmap=_is_zip(path))
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} cannot be read as tensors alone: {_first_line(error)}",
            hint="a safetensors file, or a state dict of plain tensors: whatever else a pickle holds is never run here",
        ) from error
    except (RuntimeError, EOFError, OSError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"{path} is truncated or no file of torch.save ({path.stat().st_size} bytes): {_first_line(error)}",
            hint="a fresh copy of the file",
        ) from error


def _is_zip(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(2) == b"PK"


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _kind(value: object) -> str:
    return f"an object of type {type(value).__name__}"
