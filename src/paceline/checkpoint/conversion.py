"""From one drafter layout to another: the same numbers and promises under other names.

Nothing is made up on the way. A promise that the other layout cannot state is a refusal, and so is a copy of the
target's embedding or output head that the layout must hold while no target was named to take it from.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from paceline import __version__
from paceline.checkpoint.calibration import CALIBRATION_FILE, read_calibration
from paceline.checkpoint.compatibility import check_fit, complete_contract
from paceline.checkpoint.contract import DrafterContract, TargetContract
from paceline.checkpoint.dialects import Dialect, DrafterFiles, read_drafter
from paceline.checkpoint.dialects.files import CONFIG_FILE, MASK_FILE
from paceline.checkpoint.dialects.keys import UNSTATED
from paceline.checkpoint.export import (
    DEQUANTIZED_MARK,
    FINGERPRINT_FILE,
    PROVENANCE_FILE,
    TOKEN_COUNTS_FILE,
    write_drafter_folder,
)
from paceline.checkpoint.gguf import open_gguf
from paceline.checkpoint.locate import read_json
from paceline.checkpoint.names import drafter_slots
from paceline.checkpoint.quantized import ALWAYS_PLAIN
from paceline.checkpoint.target_config import read_target_contract
from paceline.checkpoint.torch_state import find_torch_state
from paceline.checkpoint.weights import (
    FLOAT_DTYPES,
    INDEX_FILE,
    TensorSource,
    open_safetensors,
    open_safetensors_file,
)
from paceline.errors import CheckpointError

WRITABLE_DIALECTS: tuple[Dialect, ...] = ("zlab", "assistant", "speculators")
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_EMBEDDING, _HEAD = "embed_tokens.weight", "lm_head.weight"
_REWRITTEN = frozenset({CONFIG_FILE, FINGERPRINT_FILE, MASK_FILE, PROVENANCE_FILE, INDEX_FILE, CALIBRATION_FILE})


@dataclass(frozen=True)
class Conversion:
    """What a conversion did.

    Attributes:
        from_dialect: the layout that was read.
        to_dialect: the layout that was written.
        family: the drafter's.
        num_tensors: float tensors written.
        dequantized_from: what the weights were stored in before, or None; they are now in `dtype`.
        dtype: the contract's.
        dropped: copies of the target's tensors that were left out since they equal it.
        added: copies of the target's tensors that the layout needs.
        left_behind: files of the old folder that have no place in this conversion.
    """

    from_dialect: str
    to_dialect: str
    family: str
    num_tensors: int
    dequantized_from: str | None
    dtype: str
    dropped: tuple[str, ...]
    added: tuple[str, ...]
    left_behind: tuple[str, ...]


def convert_drafter(
    folder: Path, output: Path, dialect: Dialect, *, target: Path | None = None, target_name: str = ""
) -> Conversion:
    """Read a drafter in any layout, strictly, and write it in another.

    Tensors keep dtype and bits, except that quantised ones are written in the contract's dtype; the fingerprint, else
    copied as it is, then gains a mark, since the new config no longer says that its weights were rounded after it was
    recorded. Provenance gains an entry for the conversion.

    Args:
        folder: the drafter.
        output: the new folder; it must not exist, or be empty.
        dialect: the layout to write.
        target: folder or `.gguf` file of its target. With it, what the old layout does not say of the target is filled
            in, and copies of the target's embedding and head are left out where they equal it and the layout does
            without, and put in where the layout has to have them.
        target_name: what the target is called in messages.
    Returns:
        What was done.
    Raises:
        CheckpointError: the drafter is damaged, incomplete or not supported, the output is taken, or the layout cannot
            state what this drafter is.
        CompatibilityError: the drafter does not fit that target.
        CapacityError: the disk is full. Nothing is left behind then, nor after any other exception.
    """
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise CheckpointError(
            f"{output} {'is a file' if output.is_file() else 'is not empty'}; it stays as it is",
            hint="another output folder",
        )
    files = read_drafter(folder)
    tensors = _load_all(files)
    tables = None if target is None else _TargetTables(target, target_name, files.contract)
    contract = dataclasses.replace(files.contract, quantization=None)
    contract = contract if tables is None else complete_contract(contract, tables.contract)
    _require_stated(contract, dialect)
    contract, tensors, dropped, added = _fit_copies(contract, tensors, dialect, tables, files.draft_to_target)
    fingerprint, history, counts = folder / FINGERPRINT_FILE, folder / PROVENANCE_FILE, folder / TOKEN_COUNTS_FILE
    marked = _marked(fingerprint, files.contract.quantization)
    provenance = read_json(history) if history.is_file() else {}
    step = {"from": files.dialect, "to": dialect, "dequantized_from": files.contract.quantization}
    earlier = provenance.get("conversions")
    earlier = earlier if isinstance(earlier, list) else []
    write_drafter_folder(
        output,
        contract,
        tensors,
        marked,
        {**provenance, "conversions": [*earlier, {**step, "paceline": __version__}]},
        dialect=dialect,
        draft_to_target=files.draft_to_target,
        mask_embedding=files.mask_embedding,
        extra_files=[
            *([fingerprint] if fingerprint.is_file() and marked is None else []),
            *([counts] if counts.is_file() else []),
        ],
        calibration=read_calibration(folder),
    )
    state = find_torch_state(folder)
    read = _REWRITTEN | ({state.name} if state is not None else set())
    others = sorted(entry.name for entry in folder.iterdir())
    return Conversion(
        from_dialect=files.dialect,
        to_dialect=dialect,
        family=contract.family,
        num_tensors=len(tensors),
        dequantized_from=files.contract.quantization,
        dtype=contract.dtype,
        dropped=dropped,
        added=added,
        left_behind=tuple(name for name in others if name not in read and not name.endswith(".safetensors")),
    )


def _marked(path: Path, scheme: str | None) -> dict[str, Tensor] | None:
    """The fingerprint with the scheme that the weights were stored in, or None where the file can stay as it is."""
    if scheme is None or not path.is_file():
        return None
    source = open_safetensors_file(path)
    mark = torch.frombuffer(bytearray(scheme.encode()), dtype=torch.uint8)
    return {**{name: source.load(name) for name in source.names()}, DEQUANTIZED_MARK: mark}


class _TargetTables:
    """Embedding and output head of a target, read when they are asked for."""

    def __init__(self, path: Path, name: str, drafter: DrafterContract) -> None:
        self.contract: TargetContract = read_target_contract(path, name)
        check_fit(drafter, self.contract)
        self._source: TensorSource = open_gguf(path) if path.suffix == ".gguf" else open_safetensors(path)

    def load(self, name: str) -> Tensor:
        is_embedding = name == _EMBEDDING or self.contract.tie_word_embeddings
        return self._source.load("model.embed_tokens.weight" if is_embedding else "lm_head.weight")


def _require_stated(contract: DrafterContract, dialect: Dialect) -> None:
    """Some layouts are silent on the target's depth or vocabulary, and others need them."""
    needed = {"target_vocab_size", "vocab_size", "draft_vocab_size"} if dialect != "assistant" else set()
    if dialect == "zlab" and contract.family != "eagle3":
        needed.add("target_num_layers")
    missing = sorted(field for field in needed if getattr(contract, field) == UNSTATED)
    if missing:
        raise CheckpointError(
            f"the drafter's config does not say {', '.join(missing)}, and the {dialect} layout needs it",
            origin={"drafter": contract.origin},
            hint="--target, the model that it rides on",
        )


def _load_all(files: DrafterFiles) -> dict[str, Tensor]:
    """Every tensor of the contract; one that is missing or that nothing reads is a refusal, as when serving."""
    contract = files.contract
    names = [slot.name for slot in drafter_slots(contract)]
    present = set(files.source.names())
    problems = [f"{name} is missing" for name in names if name not in present]
    problems += [f"{name} is not used" for name in sorted(present.difference(names, files.ignored))]
    if problems:
        more = f" and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise CheckpointError(
            f"the weights are not those of the config: {'; '.join(problems[:8])}{more}",
            origin={"weights": files.source.origin, "config": contract.origin},
        )
    tensors = {}
    for name in names:
        tensor = files.source.load(name)
        if tensor.dtype not in FLOAT_DTYPES:
            raise CheckpointError(f"tensor {name} is stored as {tensor.dtype}", origin={"weights": files.source.origin})
        # the source gives dequantised matrices in float32, whatever the drafter computes in
        is_dequantized = contract.quantization is not None and _may_be_quantized(name, tensor)
        tensors[name] = tensor.to(_DTYPES[contract.dtype]) if is_dequantized else tensor
    return tensors


def _may_be_quantized(name: str, tensor: Tensor) -> bool:
    return (
        tensor.dim() == 2
        and tensor.dtype == torch.float32
        and not any(part in ALWAYS_PLAIN for part in name.split("."))
    )


def _fit_copies(
    contract: DrafterContract,
    tensors: dict[str, Tensor],
    dialect: Dialect,
    target: _TargetTables | None,
    draft_to_target: Tensor | None,
) -> tuple[DrafterContract, dict[str, Tensor], tuple[str, ...], tuple[str, ...]]:
    """Leave out or put in the target's embedding and head, as the layout wants it."""
    is_needed = dialect == "speculators" and contract.family == "eagle3"
    kept = dict(tensors)
    dropped: list[str] = []
    added: list[str] = []
    for name in (_EMBEDDING, _HEAD):
        if name in kept:
            if not is_needed and target is not None and _is_same(kept[name], target.load(name)):
                del kept[name]
                dropped.append(name)
        elif is_needed:
            if target is None:
                raise CheckpointError(
                    f"the {dialect} layout of {contract.family} drafters holds {name}, and this drafter borrows it",
                    origin={"drafter": contract.origin},
                    hint="--target, the model that it rides on",
                )
            table = target.load(name)
            kept[name] = table if name == _EMBEDDING or draft_to_target is None else table[draft_to_target]
            added.append(name)
    contract = dataclasses.replace(contract, has_own_embedding=_EMBEDDING in kept, has_own_head=_HEAD in kept)
    return contract, kept, tuple(dropped), tuple(added)


def _is_same(tensor: Tensor, other: Tensor) -> bool:
    return tensor.dtype == other.dtype and tensor.shape == other.shape and torch.equal(tensor, other)
