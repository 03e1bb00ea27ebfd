"""The only reader of the process environment. Everything else gets its values as arguments.

| variable | meaning | default |
| --- | --- | --- |
| `PACELINE_LOG_LEVEL` | debug, info, warning or error: what the log on stderr shows | info |
| `PACELINE_AUX_HIDDEN_STREAM` | prefix or attn_res: overrides the drafter's stream, for A/B runs | the drafter's |
| `PACELINE_DEBUG` | on (1) shows tracebacks, like `--debug`, and makes engines check their invariants | off (0) |
| `PACELINE_NUM_THREADS` | CPU threads of tensor operations, like `--threads` | torch's choice |
| `PACELINE_DEPENDENT_LAUNCH` | on (1), off (0), or a rule: kernels of a GPU begin before the one ahead has ended | on |
| `PACELINE_API_KEY` | clients of `paceline serve` need it, and `bench` sends it; others can read `--api-key` | none |
| `NO_COLOR` | anything but empty turns colours off (a convention that many programs share) | unset |

The rules of dependent launch, which are there to be compared, are at-once, after-wait, mixed and late.

Other libraries read their own (`HF_HOME`, `HF_HUB_OFFLINE`, `OMP_NUM_THREADS`, ...); `paceline doctor` shows those too.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, cast

from paceline.errors import ConfigError

MOST_THREADS = 4096  # as many as some systems have; asked for many more, torch ends the process

LOG_LEVELS = ("debug", "info", "warning", "error")
STREAMS = ("prefix", "attn_res")
LAUNCHES = ("off", "on", "at-once", "after-wait", "mixed", "late")

OWN_VARIABLES = (
    "PACELINE_LOG_LEVEL",
    "PACELINE_AUX_HIDDEN_STREAM",
    "PACELINE_DEBUG",
    "PACELINE_NUM_THREADS",
    "PACELINE_DEPENDENT_LAUNCH",
    "PACELINE_API_KEY",
    "NO_COLOR",
)
FOREIGN_VARIABLES = (
    "HF_HOME",
    "HF_HUB_CACHE",
    "HF_HUB_OFFLINE",
    "HF_ENDPOINT",
    "HF_TOKEN",
    "TRANSFORMERS_OFFLINE",
    "XDG_CACHE_HOME",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "CUDA_VISIBLE_DEVICES",
    "TRITON_INTERPRET",
    "TRITON_CACHE_DIR",
)
_SECRET_VARIABLES = frozenset({"HF_TOKEN", "PACELINE_API_KEY"})


@dataclass(frozen=True)
class Environment:
    """What the process environment asks of paceline; None means that a variable is unset or empty."""

    log_level: str | None = None
    aux_hidden_stream: Literal["prefix", "attn_res"] | None = None
    debug: bool = False
    num_threads: int | None = None
    dependent_launch: str = "on"
    api_key: str | None = None
    no_color: bool = False


def read_environment(variables: Mapping[str, str] | None = None) -> Environment:
    """Read and check our variables.

    Args:
        variables: what to read instead of the process environment, for tests.

    Raises:
        ConfigError: a value is not among those that the table allows, or a PACELINE_ name is unknown.
    """
    found = os.environ if variables is None else variables
    unknown = sorted(name for name in found if name.startswith("PACELINE_") and name not in OWN_VARIABLES)
    if unknown:
        raise ConfigError(
            f"no such environment variable is read: {', '.join(unknown)}",
            origin={name: "environment" for name in unknown},
            hint=f"one of {', '.join(OWN_VARIABLES)}",
        )
    return Environment(
        log_level=_one_of(found, "PACELINE_LOG_LEVEL", LOG_LEVELS),
        aux_hidden_stream=cast(
            'Literal["prefix", "attn_res"] | None', _one_of(found, "PACELINE_AUX_HIDDEN_STREAM", STREAMS)
        ),
        debug=_is_on(found, "PACELINE_DEBUG"),
        num_threads=_threads(found, "PACELINE_NUM_THREADS"),
        dependent_launch=_launch(found, "PACELINE_DEPENDENT_LAUNCH"),
        api_key=found.get("PACELINE_API_KEY") or None,
        no_color=bool(found.get("NO_COLOR")),
    )


def all_variables() -> dict[str, str]:
    """Everything in the environment, for a program that this process starts."""
    return dict(os.environ)


def describe_environment(variables: Mapping[str, str] | None = None) -> dict[str, str | None]:
    """Every variable that paceline or a library below it reads, with its value; secrets only as `(set)`."""
    found = os.environ if variables is None else variables
    described: dict[str, str | None] = {}
    for name in (*OWN_VARIABLES, *FOREIGN_VARIABLES):
        value = found.get(name)
        described[name] = "(set)" if value and name in _SECRET_VARIABLES else value
    return described


def _one_of(found: Mapping[str, str], name: str, allowed: tuple[str, ...]) -> str | None:
    value = found.get(name, "").strip().lower()
    if not value:
        return None
    if value not in allowed:
        raise ConfigError(
            f"{name} is {found[name]!r}", origin={name: "environment"}, hint=f"one of {', '.join(allowed)}"
        )
    return value


def _is_on(found: Mapping[str, str], name: str) -> bool:
    return _one_of(found, name, ("off", "on", "0", "1")) in ("on", "1")


def _launch(found: Mapping[str, str], name: str) -> str:
    value = _one_of(found, name, (*LAUNCHES, "0", "1"))
    return {None: "on", "1": "on", "0": "off"}.get(value, value or "on")


def _threads(found: Mapping[str, str], name: str) -> int | None:
    value = found.get(name, "").strip()
    if not value:
        return None
    if not value.isdecimal() or not 1 <= int(value) <= MOST_THREADS:
        hint = f"a whole number from 1 to {MOST_THREADS}"
        raise ConfigError(f"{name} is {value!r}", origin={name: "environment"}, hint=hint)
    return int(value)
