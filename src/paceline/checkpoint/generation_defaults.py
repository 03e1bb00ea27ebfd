"""Sampling that a target's makers recommend: `generation_config.json` of its folder."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from paceline.checkpoint.locate import read_json
from paceline.errors import CheckpointError, shown

FILE = "generation_config.json"


@dataclass(frozen=True)
class SamplingDefaults:
    """What is sampled with where a request says nothing; the fields are those of `SamplingParameters`.

    The values here are those of the OpenAI API.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


_RANGES = {
    "temperature": (0.0, sys.float_info.max),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (1e-6, 1e6),
}


def read_sampling_defaults(path: Path) -> SamplingDefaults:
    """Read what a target's folder recommends, for the fields that it names.

    `do_sample` is not looked at: it is false where a file leaves it out, also in files that recommend a temperature.

    Args:
        path: of the target; a file, such as a `.gguf` one, recommends nothing.
    Raises:
        CheckpointError: the file is damaged, or a value cannot be sampled with.
    """
    file = path / FILE
    if not path.is_dir() or not file.is_file():
        return SamplingDefaults()
    values = {name: value for name, value in read_json(file).items() if value is not None}
    found: dict[str, float | int] = {}
    for name, (low, high) in _RANGES.items():
        if name in values:
            value = values[name]
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not low <= value <= high or (name == "top_p" and value == 0):
                raise CheckpointError(
                    f"{name} is {shown(value)}, which nothing can be sampled with", origin={"file": file}
                )
            found[name] = float(value)
    top_k = values.get("top_k", 0)
    if not isinstance(top_k, int) or isinstance(top_k, bool) or not -1 <= top_k < 2**63:
        raise CheckpointError(f"top_k is {shown(top_k)}; it has to be a whole number", origin={"file": file})
    return SamplingDefaults(**found, top_k=max(0, top_k))
