"""What a fingerprint says of the drafter that it was recorded with: its contract, as JSON in a tensor of bytes.

The numbers of a fingerprint find what is computed otherwise; the description finds what they cannot see, such as an
epsilon, a window beyond the probe or a soft-cap that hardly bends. A field that is served with another value than the
recorded one is a fault by itself, whatever the numbers say, except for those in `MAY_DIFFER`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoint.compatibility import is_padding
from paceline.checkpoint.contract import (
    ConfidenceSettings,
    ConvolutionSettings,
    DrafterContract,
    Eagle3Settings,
    LatentAttentionSettings,
    MarkovSettings,
    RopeSettings,
    SelectorSettings,
)
from paceline.checkpoint.export import DEQUANTIZED_MARK
from paceline.models.positions import position_table

FORMAT = 2
_NESTED: Mapping[str, type[Any]] = {
    "rope": RopeSettings,
    "convolution": ConvolutionSettings,
    "selector": SelectorSettings,
    "markov": MarkovSettings,
    "confidence": ConfidenceSettings,
    "latent": LatentAttentionSettings,
    "eagle3": Eagle3Settings,
}
_LEFT_OUT = ("origin",)
# every field that may be served with another value than it was recorded with, and why that is no fault
MAY_DIFFER: Mapping[str, str] = {
    "origin": "where the folder lies",
    "target_name": "what the target was called, by whoever called it; sizes and taps say whether it is the one",
    "dtype": "how the file stores numbers; a drafter computes in its target's dtype",
    "quantization": "how the file stores weights; the numbers, by a wider tolerance, say whether they are the same",
    "draft_sample_method": "a default that every run may replace; the same weights serve both methods",
    "has_own_embedding": "a copy of the target's table may be dropped or put in; the embedded rows are compared",
    "has_own_head": "the same of the output head; the logits are compared",
}
# 0 where a layout does not say them; the target's own size is then filled in, which padding may have made another
_FILLED_IN = ("target_vocab_size", "vocab_size", "draft_vocab_size")


def described(contract: DrafterContract) -> Tensor:
    """The description of a drafter, uint8."""
    fields = {name: value for name, value in dataclasses.asdict(contract).items() if name not in _LEFT_OUT}
    text = json.dumps({"format": FORMAT, "contract": fields}, allow_nan=False, separators=(",", ":"))
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def read_description(stored: Tensor) -> tuple[int, dict[str, Any]]:
    """Format and contract fields.

    Raises:
        ValueError: says what is wrong with it.
    """
    if stored.dtype != torch.uint8 or stored.dim() != 1:
        raise ValueError(f"description is {stored.dtype} of shape {list(stored.shape)}, expected bytes")
    try:
        found = json.loads(bytes(stored.tolist()))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"description is no JSON: {error}") from error
    if not isinstance(found, dict) or not isinstance(found.get("format"), int):
        raise ValueError("description names no format")
    fields = found.get("contract")
    if not isinstance(fields, dict) or not isinstance(fields.get("family"), str):
        raise ValueError("description names no drafter family")
    return found["format"], fields


def recorded_values(fields: Mapping[str, Any], contract: DrafterContract) -> dict[str, Any]:
    """Fields of the recorded contract that differ from the given one, as a contract holds them.

    Args:
        fields: from `read_description`; names that this version does not know are passed over.
        contract: as read from the drafter's config.
    """
    values: dict[str, Any] = {}
    for field in dataclasses.fields(contract):
        if field.name not in fields or field.name in _LEFT_OUT:
            continue
        value = fields[field.name]
        if field.name in _NESTED and isinstance(value, dict):
            try:
                value = _NESTED[field.name](**value)
            except TypeError:  # of another version
                continue
        elif isinstance(value, list):
            value = tuple(value)
        if value != getattr(contract, field.name):
            values[field.name] = value
    return values


@dataclass(frozen=True)
class FieldDifference:
    """A field of the contract that is not served as it was recorded.

    Attributes:
        name: with a dot where it is a field of a part, such as "rope.theta".
        recorded: value in the fingerprint.
        served: value in the contract.
    """

    name: str
    recorded: object
    served: object


def differing_fields(
    fields: Mapping[str, Any], contract: DrafterContract, target_vocab_size: int
) -> tuple[FieldDifference, ...]:
    """Everything in which the served contract is not the recorded one, apart from `MAY_DIFFER` and spelling.

    Args:
        fields: from `read_description`; fields that only one version knows are passed over.
        contract: as served, complete.
        target_vocab_size: of the target at hand, which stands in where a layout does not state a vocabulary.
    """
    recorded_fields, served_fields = dict(fields), json.loads(json.dumps(dataclasses.asdict(contract)))
    differences: list[FieldDifference] = []
    for name, served in served_fields.items():
        if name in MAY_DIFFER or name not in recorded_fields:
            continue
        recorded = recorded_fields[name]
        if recorded == served or _is_filled_in(name, fields, served, target_vocab_size):
            continue
        if name == "rope" and _turns_alike(recorded, contract):
            continue
        if isinstance(recorded, dict) and isinstance(served, dict):
            differences += [
                FieldDifference(f"{name}.{inner}", recorded[inner], value)
                for inner, value in served.items()
                if inner in recorded and recorded[inner] != value
            ]
        else:
            differences.append(FieldDifference(name, recorded, served))
    return tuple(differences)


def _is_filled_in(name: str, fields: Mapping[str, Any], served: object, target_vocab_size: int) -> bool:
    """Whether a size is the target's own, as `complete_contract` has it, and padding apart the recorded one."""
    recorded = fields[name]
    if name not in _FILLED_IN or served != target_vocab_size or not isinstance(recorded, int):
        return False
    is_whole = name != "draft_vocab_size" or recorded == fields.get("target_vocab_size")
    return recorded == 0 or (is_whole and is_padding(recorded, target_vocab_size))


def _turns_alike(recorded: object, contract: DrafterContract) -> bool:
    """Whether two RoPE settings are spellings of one rotation, such as a derived factor that is also written out."""
    if not isinstance(recorded, dict):
        return False
    try:
        tables = [position_table(rope, contract.rotary_size, 2) for rope in (RopeSettings(**recorded), contract.rope)]
    except (TypeError, ValueError):  # of another version
        return False
    return bool(torch.equal(*tables))


def is_rounded(contract: DrafterContract, stored: Mapping[str, Tensor]) -> bool:
    """Whether the drafter's weights were quantised since the recording: its file says so, or a conversion has noted it.

    Args:
        contract: as read.
        stored: the fingerprint.
    """
    return contract.quantization is not None or DEQUANTIZED_MARK in stored
