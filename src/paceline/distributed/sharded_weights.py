"""Reading one rank's part of a checkpoint: of other stages, other ranks' experts, heads and ids, not a byte is read.

Quantised tensors that are cut inside are read whole, as their scales may span the cut; experts, which are what is
quantised in published files, are not.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from paceline.checkpoint.contract import TargetContract
from paceline.checkpoint.kimi_names import boundary_names, kimi_slots, kimi_text_slots, mtp_names
from paceline.checkpoint.names import Slot, dense_target_ignored, dense_target_slots
from paceline.checkpoint.weights import Destination, TensorSource, load_part, load_strict
from paceline.distributed.mesh import TensorGroup
from paceline.distributed.sharding import sharded_stage, vocabulary_shard
from paceline.errors import CheckpointError
from paceline.models.building import materialise
from paceline.models.target_weights import open_dense, open_kimi_folder
from paceline.models.targets.dense_stage import DenseStage
from paceline.models.targets.kimi_stage import KimiStage
from paceline.models.weight_copy import copy_weight

# Ends of parameter names. What is not among them is on every rank as it is.
_BY_ROWS = (
    ".self_attn.qkv_proj.weight",
    ".self_attn.qkv_proj.bias",
    ".self_attn.convolution.weight",
    ".self_attn.f_proj.b.weight",
    ".self_attn.b_proj.weight",
    ".self_attn.decay.A_log",
    ".self_attn.decay.dt_bias",
    ".self_attn.g_proj.weight",
    ".self_attn.g_proj.b.weight",
    ".self_attn.q_proj.weight",
    ".self_attn.q_b_proj.weight",
    ".self_attn.kv_b_proj.weight",
    ".gate_up_proj.weight",
    ".gate_up_proj.bias",
)
_BY_COLUMNS = (".self_attn.o_proj.weight", ".down_proj.weight")
_EXPERTS = (".experts.gate_up", ".experts.down")
_VOCABULARY = ("embed_tokens.weight", "lm_head.weight")
_SAMPLES_PER_FILE, _SAMPLE_BYTES = 64, 4096


@dataclass(frozen=True)
class Part:
    """What a rank takes of one tensor of a file.

    Attributes:
        destination: in the rank's parameters.
        whole: shape that the file must have.
        rows: half-open, of the file's tensor.
        columns: half-open; None is all.
    """

    destination: Destination
    whole: tuple[int, ...]
    rows: tuple[int, int]
    columns: tuple[int, int] | None = None

    def shape(self) -> tuple[int, ...]:
        """Of what is taken."""
        inner = self.whole[1:] if self.columns is None else (self.columns[1] - self.columns[0], *self.whole[2:])
        return (self.rows[1] - self.rows[0], *inner)


def part_of(slot: Slot, contract: TargetContract, tensor: TensorGroup) -> Part | None:
    """What a rank takes of a tensor; None where another rank has all of it.

    Args:
        slot: of the text model.
        contract: of the whole target.
        tensor: the ranks.
    """
    height, first, index, size = slot.shape[0], slot.first_row, tensor.index, tensor.size
    if size == 1:
        return Part(slot.destination, slot.shape, (0, height))
    if slot.parameter in _VOCABULARY:
        (ids,) = vocabulary_shard(contract, tensor).ranges
        return Part(slot.destination, slot.shape, (ids.first_id, ids.end_id))
    if slot.parameter.endswith(_EXPERTS):
        return _expert_part(slot, contract, tensor)
    if slot.parameter.endswith(_BY_ROWS):
        share = height // size
        rows = None if first is None else (first // size, first // size + share)
        return Part(Destination(slot.parameter, rows), slot.shape, (index * share, (index + 1) * share))
    if slot.parameter.endswith(_BY_COLUMNS):
        share = slot.shape[1] // size
        return Part(slot.destination, slot.shape, (0, height), (index * share, (index + 1) * share))
    return Part(slot.destination, slot.shape, (0, height))


def _expert_part(slot: Slot, contract: TargetContract, tensor: TensorGroup) -> Part | None:
    assert contract.kimi is not None and contract.kimi.experts is not None and slot.first_row is not None
    settings = contract.kimi.experts
    outer = settings.latent_size or contract.hidden_size
    per_expert = outer if slot.parameter.endswith(".down") else 2 * settings.intermediate_size
    num_own_rows = settings.num_experts // tensor.size * per_expert
    first = slot.first_row - tensor.index * num_own_rows
    if not 0 <= first < num_own_rows:
        return None
    return Part(Destination(slot.parameter, (first, first + slot.shape[0])), slot.shape, (0, slot.shape[0]))


class PartialSource:
    """A checkpoint as one rank sees it.

    Args:
        source: whole tensors by published name.
        parts: what is taken of each.
    """

    def __init__(self, source: TensorSource, parts: Mapping[str, Part]) -> None:
        self._source, self._parts = source, parts

    @property
    def origin(self) -> str:
        """Of the whole."""
        return self._source.origin

    def names(self) -> list[str]:
        """All of them, those of other ranks included."""
        return self._source.names()

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the part."""
        return self._parts[name].shape()

    def load(self, name: str) -> Tensor:
        """The part."""
        part = self._parts[name]
        return load_part(self._source, name, part.rows, part.columns)


def load_sharded_stage(
    contract: TargetContract,
    path: Path,
    start: int,
    end: int,
    tensor: TensorGroup,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> KimiStage | DenseStage:
    """Build and fill a rank's part of one stage; a multimodal target's tower belongs to no stage.

    As with `load_stage`, score vectors of the layer behind the stage are copied if the files have them.

    Args:
        contract: of the whole target.
        path: its folder, or a `.gguf` file.
        start: first layer.
        end: behind the last layer.
        tensor: the ranks of the stage.
        dtype: of the weights.
        device: of the weights.
    Raises:
        CheckpointError: as for `fill_target`, over the tensors of this rank.
        ConfigError: there are no such layers, or they cannot be shared out.
    """
    with torch.device("meta"):
        stage = sharded_stage(contract, start, end, tensor)
    materialise(stage, dtype, device)
    if isinstance(stage, DenseStage):
        stage.settle(device)
    source, parameters = _open(contract, path), dict(stage.named_parameters())
    slots = [slot for slot in _slots(contract, parameters) if slot.parameter in parameters]
    found = ((slot.name, part_of(slot, contract, tensor)) for slot in slots)
    parts = {name: part for name, part in found if part is not None}
    _check_whole_shapes(source, parts)
    load_strict(
        parameters,
        PartialSource(source, parts),
        {name: part.destination for name, part in parts.items()},
        ignored=_names(contract, source) - set(parts),
        copy=copy_weight,
    )
    if isinstance(stage, KimiStage):
        names = boundary_names(contract, end)
        if stage.boundary is not None and set(names) <= set(source.names()):
            stage.boundary.set(*(source.load(name) for name in names))
    return stage.eval()


def _open(contract: TargetContract, path: Path) -> TensorSource:
    if contract.kimi is not None:
        return open_kimi_folder(contract, path)
    return open_dense(path)


def _slots(contract: TargetContract, parameters: Mapping[str, Tensor]) -> list[Slot]:
    """The tensors of the text model, and where a rank with these parameters has them."""
    if contract.kimi is not None:
        return kimi_text_slots(contract)
    slots, head = dense_target_slots(contract), "lm_head.weight"
    if not contract.tie_word_embeddings or head not in parameters:
        return slots
    # A tied head without the embeddings beside it is a copy of them.
    return [replace(slot, parameter=head) if slot.parameter == "embed_tokens.weight" else slot for slot in slots]


def _names(contract: TargetContract, source: TensorSource) -> set[str]:
    """All that the files may hold, whoever reads it."""
    if contract.kimi is not None:
        return {slot.name for slot in kimi_slots(contract)} | mtp_names(contract, source.names())
    return {slot.name for slot in dense_target_slots(contract)} | dense_target_ignored(contract)


def _check_whole_shapes(source: TensorSource, parts: Mapping[str, Part]) -> None:
    """Cut to the right part, a tensor of any larger shape would fit."""
    present = set(source.names())
    wrong = [
        f"{name} is {list(source.shape(name))}, expected {list(part.whole)}"
        for name, part in parts.items()
        if name in present and source.shape(name) != part.whole
    ]
    if wrong:
        more = f" and {len(wrong) - 8} more" if len(wrong) > 8 else ""
        raise CheckpointError(
            f"the weights do not fit the model: {len(wrong)} misshapen tensors: {', '.join(wrong[:8])}{more}",
            origin={"file": source.origin},
        )


def load_table(contract: TargetContract, path: Path, parameter: str, *, like: Tensor) -> Tensor:
    """The whole of the embedding table or the output head, for a drafter that borrows it.

    Args:
        contract: of the target.
        path: its folder, or a `.gguf` file.
        parameter: "embed_tokens.weight" or "lm_head.weight", which of a tied target are one.
        like: gives dtype and device.
    """
    table = like.new_empty(contract.vocab_size, contract.hidden_size)
    (slot,) = (slot for slot in _slots(contract, {parameter: table}) if slot.parameter == parameter)
    source = _open(contract, path)
    others = set(source.names()) - {slot.name}
    load_strict({parameter: table}, source, {slot.name: Destination(parameter)}, ignored=others, copy=copy_weight)
    return table


def folder_digest(path: Path, suffixes: Sequence[str] = (".safetensors", "config.json", ".index.json")) -> str:
    """A name for a model's folder or file that two trainings of one shape do not share; reads little of large files.

    Of every file: its name and size, the whole of it up to 256 KiB, and of a larger one 64 samples of 4 KiB, the
    header of names and shapes among them.
    """
    digest = hashlib.blake2b(digest_size=8)
    for file in sorted(path.iterdir()) if path.is_dir() else [path]:
        if file != path and not file.name.endswith(tuple(suffixes)):
            continue
        size = file.stat().st_size
        digest.update(f"{file.name} {size};".encode())
        with file.open("rb") as stream:
            if size <= _SAMPLES_PER_FILE * _SAMPLE_BYTES:
                digest.update(stream.read())
                continue
            for sample in range(_SAMPLES_PER_FILE):
                stream.seek(sample * (size - _SAMPLE_BYTES) // (_SAMPLES_PER_FILE - 1))
                digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()
