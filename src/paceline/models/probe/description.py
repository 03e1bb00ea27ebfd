"""What a fingerprint says of the drafter that it was recorded with: its contract, as JSON in a tensor of bytes.

The numbers of a fingerprint decide; the description only offers the search one more reading to try, and keeps a
fingerprint of one family from standing in for another.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

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
    except ValueError as error:
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
