"""Field types that several settings share, and the closed, frozen model that all of them start from.

Numbers and flags are strict: a quoted "4" in a file is a mistake of its writer, not a four. Paths are given as text.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, Strict, StringConstraints

from paceline.configuration.environment import MOST_THREADS

DtypeName = Literal["auto", "float32", "bfloat16", "float16"]
DraftSampleMethod = Literal["greedy", "probabilistic"]
LinearMode = Literal["auto", "plain", "packed", "native", "quantized", "int8", "row_invariant", "fused"]

Flag = Annotated[bool, Strict()]
Integer = Annotated[int, Strict()]
Count = Annotated[int, Strict(), Field(ge=1)]
Threads = Annotated[int, Strict(), Field(ge=1, le=MOST_THREADS)]
CountOrZero = Annotated[int, Strict(), Field(ge=0)]
Number = Annotated[float, Strict(), Field(allow_inf_nan=False)]
PositiveNumber = Annotated[float, Strict(), Field(gt=0, allow_inf_nan=False)]
NumberOrZero = Annotated[float, Strict(), Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Strict(), Field(ge=0, le=1, allow_inf_nan=False)]
Seed = Annotated[int, Strict(), Field(ge=0, lt=2**63)]
Name = Annotated[str, Strict(), StringConstraints(min_length=1, strip_whitespace=True)]

StopText = Annotated[str, Strict(), StringConstraints(min_length=1)]
"""Unlike a name, a stop string keeps its white space: a blank line is a common one."""


def _known_device(device: str) -> str:
    kind, _, index = device.partition(":")
    if kind in ("auto", "cpu") and not index and ":" not in device:
        return device
    if kind == "cuda" and (":" not in device or index.isdecimal()):
        return device
    raise ValueError(f"{device!r} is no device; use auto, cpu, cuda or cuda:N")


def _not_empty(value: object) -> object:
    if isinstance(value, str) and not value.strip():
        raise ValueError("is empty; a path is needed, and . is the working folder")
    return value


def _at_home(path: Path) -> Path:
    """A leading ~ as the home folder: no shell does that to KEY=~/path, nor inside a file."""
    try:
        return path.expanduser()
    except RuntimeError as error:  # somebody else's home
        raise ValueError(f"{str(path)!r} names a home folder that does not exist") from error


def _none_word(value: object) -> object:
    return None if value == UNSET_WORD else value


def _number_or_word(value: object) -> object:
    if value in ("auto", "full") or (type(value) is int and value >= 1):
        return value
    raise ValueError(f"{value!r} is no number of ids; use a whole number from 1 on, auto or full")


UNSET_WORD = "none"
OrNone = BeforeValidator(_none_word)
"""For fields that may be unset although their default is a value: TOML has no null, so the word `none` says it."""

PathName = Annotated[Path, BeforeValidator(_not_empty), AfterValidator(_at_home)]
DeviceName = Annotated[str, Strict(), AfterValidator(_known_device)]
DraftVocabSize = Annotated[int | Literal["auto", "full"], BeforeValidator(_number_or_word)]


class Settings(BaseModel):
    """Base of every group of settings: frozen once read, and closed to keys that it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)
