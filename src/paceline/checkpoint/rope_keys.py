"""Rotary settings in Hugging Face configs: the nested `rope_parameters` and the older `rope_theta` + `rope_scaling`.

Engines disagree on which spelling they read, so both are written, and where a file has both they must agree: a base
that falls back to 10000 costs acceptance and raises nothing. No rotary value is ever guessed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, cast, get_args

from paceline.checkpoint.contract import RopeKind, RopeSettings
from paceline.errors import CheckpointError

ROPE_CONFIG_KEYS = frozenset({"rope_parameters", "rope_theta", "rope_scaling"})

_FIELDS_OF_KIND: Mapping[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
    "yarn": frozenset(
        {
            "factor",
            "original_max_position_embeddings",
            "beta_fast",
            "beta_slow",
            "attention_factor",
            "mscale",
            "mscale_all_dim",
            "truncate",
        }
    ),
}
_REQUIRED_OF_KIND: Mapping[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "llama3": _FIELDS_OF_KIND["llama3"],
    "yarn": frozenset({"factor", "original_max_position_embeddings"}),
}


def read_rope(config: Mapping[str, Any], origin: str) -> RopeSettings:
    """Read the rotary settings of a Hugging Face style config.

    Args:
        config: the top level of a config.json.
        origin: the file, for messages.
    Returns:
        The settings; both spellings agree if both are present.
    Raises:
        CheckpointError: no theta, an unsupported kind, an unknown or missing key, or two spellings that disagree.
    """
    nested, legacy = config.get("rope_parameters"), config.get("rope_scaling")
    for key, value in (("rope_parameters", nested), ("rope_scaling", legacy)):
        if value is not None and not isinstance(value, Mapping):
            raise CheckpointError(f"{key} is {value!r}, expected an object", origin={"config": origin})
    values: dict[str, Any] = dict(nested or {})
    kind = values.pop("rope_type", None)
    if legacy is not None:
        older = dict(legacy)
        older_kind = older.pop("rope_type", None)
        oldest_kind = older.pop("type", older_kind)
        _agree("rope_scaling.rope_type", older_kind, "rope_scaling.type", oldest_kind, origin)
        older_kind = older_kind if older_kind is not None else oldest_kind
        if nested is not None:
            _agree("rope_parameters.rope_type", kind, "rope_scaling.rope_type", older_kind, origin)
            for key in sorted(values.keys() & older.keys()):
                _agree(f"rope_parameters.{key}", values[key], f"rope_scaling.{key}", older[key], origin)
            missing = sorted(older.keys() - values.keys())
            if missing:
                raise CheckpointError(
                    f"rope_scaling has {', '.join(missing)} and rope_parameters has not", origin={"config": origin}
                )
        values = {**older, **values}
        kind = kind if kind is not None else older_kind
    theta, flat_theta = values.pop("rope_theta", None), config.get("rope_theta")
    _agree("rope_parameters.rope_theta", theta, "rope_theta", flat_theta, origin)
    theta = theta if theta is not None else flat_theta
    if theta is None:
        raise CheckpointError(
            "the config names no rope_theta, and engines fall back to different values (10000, 50000, 1000000)",
            origin={"config": origin},
            hint="writing the trained base into rope_parameters.rope_theta",
        )
    return _settings(theta, "default" if kind is None else kind, values, origin)


def write_rope(rope: RopeSettings) -> dict[str, Any]:
    """Spell rotary settings out in both forms.

    Args:
        rope: the settings.
    Returns:
        `rope_parameters`, `rope_theta` and `rope_scaling` for the top level of a config.json.
    """
    fields = {key: getattr(rope, key) for key in sorted(_FIELDS_OF_KIND[rope.kind])}
    fields = {key: value for key, value in fields.items() if value is not None}
    scaling = None if rope.kind == "default" else {"rope_type": rope.kind, **fields}
    return {
        "rope_parameters": {"rope_type": rope.kind, "rope_theta": rope.theta, **fields},
        "rope_theta": rope.theta,
        "rope_scaling": scaling,
    }


def _agree(first_name: str, first: object, second_name: str, second: object, origin: str) -> None:
    if first is not None and second is not None and first != second:
        raise CheckpointError(
            f"{first_name} is {first!r} and {second_name} is {second!r}",
            origin={"config": origin},
            hint="keeping the value that the model was trained with in both places",
        )


def _settings(theta: object, kind: object, values: Mapping[str, Any], origin: str) -> RopeSettings:
    where = {"config": origin}
    if kind not in get_args(RopeKind):
        raise CheckpointError(
            f"rope type {kind!r} is not supported; supported are {', '.join(get_args(RopeKind))}", origin=where
        )
    rope_kind = cast(RopeKind, kind)
    values = {key: value for key, value in values.items() if value is not None}
    if values.get("partial_rotary_factor", 1.0) == 1.0:
        values.pop("partial_rotary_factor", None)
    if values.pop("finetuned", True) not in (True, False):  # a note of YaRN's authors, of no effect
        raise CheckpointError("rope key finetuned is neither true nor false", origin=where)
    if rope_kind == "default":
        # saved beside the default kind by some writers; nothing scales, so nothing reads it
        values.pop("original_max_position_embeddings", None)
    unknown = sorted(values.keys() - _FIELDS_OF_KIND[rope_kind])
    if unknown:
        raise CheckpointError(
            f"rope key {', '.join(f'{key}={values[key]!r}' for key in unknown)} is not known for rope type {kind!r}; "
            f"known are {', '.join(sorted(_FIELDS_OF_KIND[rope_kind])) or 'none'}",
            origin=where,
        )
    missing = sorted(_REQUIRED_OF_KIND[rope_kind] - values.keys())
    if missing:
        raise CheckpointError(f"rope type {kind!r} needs {', '.join(missing)}", origin=where)
    checked: dict[str, Any] = {key: _CHECKS.get(key, _positive)(key, value, origin) for key, value in values.items()}
    settings = RopeSettings(theta=_positive("rope_theta", theta, origin), kind=rope_kind, **checked)
    if rope_kind == "llama3" and settings.high_freq_factor <= settings.low_freq_factor:
        raise CheckpointError(
            f"high_freq_factor {settings.high_freq_factor} is not above low_freq_factor {settings.low_freq_factor}",
            origin=where,
        )
    return settings


def _positive(key: str, value: object, origin: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise CheckpointError(f"rope key {key} is {value!r}, expected a positive number", origin={"config": origin})
    return float(value)


def _whole(key: str, value: object, origin: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise CheckpointError(f"rope key {key} is {value!r}, expected a positive integer", origin={"config": origin})
    return value


def _number(key: str, value: object, origin: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise CheckpointError(f"rope key {key} is {value!r}, expected a number >= 0", origin={"config": origin})
    return float(value)


def _flag(key: str, value: object, origin: str) -> bool:
    if not isinstance(value, bool):
        raise CheckpointError(f"rope key {key} is {value!r}, expected true or false", origin={"config": origin})
    return value


_CHECKS: Mapping[str, Callable[[str, object, str], float | bool]] = {
    "original_max_position_embeddings": _whole,
    "mscale": _number,
    "mscale_all_dim": _number,
    "truncate": _flag,
}
