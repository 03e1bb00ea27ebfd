"""Tap ids of drafter configs: two numberings, told apart by the format that they stand in and never by their values.

A tap that is one layer off raises nothing and costs acceptance, so ids must be sorted, distinct, inside the target and
below its last layer, and every second spelling in a file must name the same layers.
"""

from __future__ import annotations

import logging
from itertools import pairwise

from paceline.checkpoint.config_reader import ConfigReader
from paceline.checkpoint.contract import CaptureId, DrafterContract, TargetLayerId, capture_id, target_layer_id
from paceline.checkpoint.dialects.keys import UNSTATED

_log = logging.getLogger(__name__)
_UNSTATED_TAPS = "writing the trained ones to the config"


def read_output_taps(
    value: object, depth: int, reader: ConfigReader, *, key: str = "target_layer_ids", hint: str = _UNSTATED_TAPS
) -> tuple[TargetLayerId, ...]:
    """Taps of a format that numbers layers by their output, -1 for the embedding.

    Args:
        value: the list.
        depth: layers of the target, 0 if the file does not say.
        reader: for the file in messages.
        key: how the file spells it.
        hint: what to try when they are missing.
    Raises:
        CheckpointError: missing, unsorted, doubled, outside the target, or the last layer's output.
    """
    taps = _checked_ids(value, -1, depth - 2, depth, key, reader, hint)
    return tuple(TargetLayerId(tap) for tap in taps)


def read_engine_taps(
    value: object, depth: int, reader: ConfigReader, *, key: str, hint: str = _UNSTATED_TAPS
) -> tuple[TargetLayerId, ...]:
    """Taps of a format that numbers hidden states, 0 for the embedding; otherwise as `read_output_taps`."""
    taps = _checked_ids(value, 0, depth - 1, depth, key, reader, hint)
    return tuple(target_layer_id(CaptureId(tap)) for tap in taps)


def write_engine_taps(contract: DrafterContract) -> list[int]:
    """A contract's taps as indices of hidden states."""
    return [capture_id(layer) for layer in contract.target_layer_ids]


def _checked_ids(
    value: object, lowest: int, highest: int, depth: int, key: str, reader: ConfigReader, hint: str
) -> list[int]:
    if value is None:
        raise reader.error(f"{key} is missing", hint=hint)
    if not isinstance(value, list) or not value or not all(type(tap) is int for tap in value):
        raise reader.error(f"{key} is {value!r}, expected a list of layer numbers")
    if any(first >= second for first, second in pairwise(value)):
        # readers differ: some concatenate in list order, some sort and drop duplicates
        raise reader.error(f"{key} is {value}, expected each once and in ascending order")
    if value[0] < lowest or (depth != UNSTATED and value[-1] > highest):
        is_last = value[-1] == highest + 1
        last = f"; {value[-1]} is the last layer, whose output engines take before or after the final norm"
        upper = f"{highest} for a target of {depth} layers" if depth != UNSTATED else "the last layer but one"
        raise reader.error(
            f"{key} is {value}; legal are {lowest} (the embedding) to {upper}{last if depth and is_last else ''}",
            hint="the target's depth must be that of the target, not the number of taps"
            if depth and value[-1] > highest + 1
            else None,
        )
    return list(value)


def agree_on_taps(
    first: tuple[TargetLayerId, ...],
    first_key: str,
    second: tuple[TargetLayerId, ...],
    second_key: str,
    reader: ConfigReader,
) -> None:
    """Refuse two spellings of the taps that name different layers, each read in its own numbering."""
    if first != second:
        raise reader.error(
            f"{first_key} names the outputs of layers {list(first)} and {second_key} those of {list(second)}",
            hint="keeping the one that the drafter was trained with; a capture id is a layer id plus one",
        )


def log_taps(contract: DrafterContract, dialect: str) -> None:
    """Say in both numberings what will be tapped."""
    layers, captures = list(contract.target_layer_ids), write_engine_taps(contract)
    _log.info(
        "%s: %s layout, taps after layers %s (capture ids %s), stream %s",
        contract.origin,
        dialect,
        layers,
        captures,
        contract.aux_hidden_stream,
    )
