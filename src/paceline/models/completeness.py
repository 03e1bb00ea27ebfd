"""Whether the files of a model are all there: every tensor that its contract asks for, in its shape.

Headers are read and no weights are, so that an incomplete download is told at once. Loading asks the same questions
again, and more: what is stored where, and whether it is finite.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from paceline.checkpoint.contract import DrafterContract, TargetContract
from paceline.checkpoint.dialects import is_drafter_folder, read_drafter
from paceline.checkpoint.kimi_names import kimi_slots, mtp_names
from paceline.checkpoint.names import Slot, dense_target_ignored, dense_target_slots, drafter_slots
from paceline.checkpoint.target_config import read_target_contract
from paceline.checkpoint.tokenizer import open_tokenizer
from paceline.checkpoint.weights import TensorSource
from paceline.errors import CheckpointError
from paceline.models.target_weights import open_dense, open_kimi_folder

_MAX_LISTED = 8


def read_complete(path: Path, name: str) -> TargetContract | DrafterContract:
    """Read what a model promises, and whether its files hold it.

    Args:
        path: a folder of a target or drafter in any layout, or a `.gguf` file.
        name: as the user gave it.
    Returns:
        The contract.
    Raises:
        CheckpointError: a file is missing, damaged or unknown; a tensor is missing, unused or misshapen; or a target
            has no tokenizer.
    """
    if is_drafter_folder(path):
        files = read_drafter(path)
        _require_tensors(files.source, drafter_slots(files.contract), files.ignored)
        return files.contract
    contract = read_target_contract(path, name)
    if contract.kimi is None:
        source = open_dense(path)
        _require_tensors(source, dense_target_slots(contract), dense_target_ignored(contract))
    else:
        source = open_kimi_folder(contract, path)
        _require_tensors(source, kimi_slots(contract), mtp_names(contract, source.names()))
    open_tokenizer(path)
    return contract


def _require_tensors(source: TensorSource, slots: Sequence[Slot], ignored: Collection[str]) -> None:
    stored, wanted = set(source.names()), {slot.name: slot.shape for slot in slots}
    misshapen = [
        f"{name} is {list(source.shape(name))}, expected {list(shape)}"
        for name, shape in wanted.items()
        if name in stored and not _fits(source.shape(name), shape)
    ]
    kinds = {
        "missing": [name for name in wanted if name not in stored],
        "unused": sorted(stored.difference(wanted).difference(ignored)),
        "misshapen": misshapen,
    }
    problems = [f"{len(names)} {kind} tensors: {_listed(names)}" for kind, names in kinds.items() if names]
    if problems:
        raise CheckpointError(
            f"the weights are not those of their config: {'; '.join(problems)}", origin={"file": source.origin}
        )


def _fits(shape: tuple[int, ...], expected: tuple[int, ...]) -> bool:
    """Whether a shape is the expected one; 0 stands for what the layout leaves to the target."""
    return len(shape) == len(expected) and all(want in (0, size) for size, want in zip(shape, expected, strict=True))


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_MAX_LISTED]) + (
        f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    )
