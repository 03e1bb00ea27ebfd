"""What share of its drafts was kept where a drafter was measured: a file in its folder that serving is held against.

`calibration.json` is written by training, from the walk over held-out text, and by `paceline evaluate --calibrate`,
from served requests. Only greedy drafting of greedy text is in it: a sampled request keeps fewer drafts, without any
fault.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from paceline.checkpoint.locate import read_json
from paceline.checkpoint.weights import write_text_atomic
from paceline.errors import CheckpointError, DataError, shown

CALIBRATION_FILE = "calibration.json"
LEAST_BLOCKS = 200  # fewer say too little: half of the share would be within their noise
CalibrationMethod = Literal["walk", "served"]

_FORMAT = 1
_SAMPLING = "greedy"
_KEYS = ("format", "sampling", "method", "num_blocks", "per_position", "texts", "recorded_with")
_HINT = "`paceline evaluate MODEL --draft-model DRAFTER --prompts FILE --calibrate` writes the file again"


@dataclass(frozen=True)
class Calibration:
    """Acceptance of greedy drafts on greedy text, as it was when it was recorded.

    Attributes:
        method: "walk" for training's walk over held-out text, "served" for requests that the engine ran.
        num_blocks: blocks that were judged.
        per_position: share of the blocks with a draft at each position that kept it, unconditional; the first entry
            belongs to the draft behind the anchor.
        texts: names of the files whose text or prompts it was measured on.
        recorded_with: versions, dtype, device and whatever else the writer knows of itself.

    Raises:
        DataError: it is too little to be held against, or no acceptance at all.
    """

    method: CalibrationMethod
    num_blocks: int
    per_position: tuple[float, ...]
    texts: tuple[str, ...] = ()
    recorded_with: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.num_blocks < LEAST_BLOCKS:
            raise DataError(
                f"acceptance was measured over {self.num_blocks} blocks; at least {LEAST_BLOCKS} are needed to "
                "calibrate a drafter",
                hint="more prompts, or longer answers",
            )
        if not self.per_position or not all(math.isfinite(share) and 0 <= share <= 1 for share in self.per_position):
            raise DataError(f"acceptance per position is {shown(self.per_position)}; expected shares between 0 and 1")

    @property
    def first_position(self) -> float:
        """Share of blocks that kept their first draft."""
        return self.per_position[0]

    def to_json(self) -> str:
        """The content of `calibration.json`."""
        content = {
            "format": _FORMAT,
            "sampling": _SAMPLING,
            "method": self.method,
            "num_blocks": self.num_blocks,
            "per_position": list(self.per_position),
            "texts": list(self.texts),
            "recorded_with": dict(self.recorded_with),
        }
        return json.dumps(content, indent=2, allow_nan=False) + "\n"


def read_calibration(folder: Path) -> Calibration | None:
    """The calibration in a drafter's folder; None where it has none.

    Raises:
        CheckpointError: the file is damaged, of another format, or says what no calibration can say.
    """
    path = folder / CALIBRATION_FILE
    if not path.is_file():
        return None
    content = read_json(path)
    problem = _problem(content)
    if problem is None:
        try:
            return Calibration(
                method=content["method"],
                num_blocks=content["num_blocks"],
                per_position=tuple(map(float, content["per_position"])),
                texts=tuple(content["texts"]),
                recorded_with=dict(content["recorded_with"]),
            )
        except DataError as error:
            problem = error.message
    raise CheckpointError(problem, origin={"calibration": path}, hint=_HINT)


def write_calibration(folder: Path, calibration: Calibration) -> None:
    """Put a calibration into a drafter's folder, in place of the one that is there.

    Raises:
        CapacityError: the disk is full.
    """
    write_text_atomic(folder / CALIBRATION_FILE, calibration.to_json())


def _problem(content: Mapping[str, object]) -> str | None:
    """What keeps a file from being read, if anything does."""
    unknown = sorted(set(content).difference(_KEYS))
    missing = [key for key in _KEYS if key not in content]
    if unknown or missing:
        parts = [f"{name} {', '.join(keys)}" for name, keys in (("unknown", unknown), ("missing", missing)) if keys]
        return f"the keys of the calibration are not those of format {_FORMAT}: {'; '.join(parts)}"
    if content["format"] != _FORMAT or content["sampling"] != _SAMPLING:
        return (
            f"the calibration is of format {shown(content['format'])} and sampling {shown(content['sampling'])}; "
            f"{_FORMAT} and {_SAMPLING!r} are known"
        )
    wanted = {
        "method": (content["method"] in get_args(CalibrationMethod), "'walk' or 'served'"),
        "num_blocks": (type(content["num_blocks"]) is int, "a whole number"),
        "per_position": (_is_list_of(content["per_position"], (int, float)), "a list of numbers"),
        "texts": (_is_list_of(content["texts"], (str,)), "a list of names"),
        "recorded_with": (_is_record(content["recorded_with"]), "an object of texts"),
    }
    for key, (is_right, kind) in wanted.items():
        if not is_right:
            return f"{key} of the calibration is {shown(content[key])}; expected {kind}"
    return None


def _is_list_of(value: object, kinds: tuple[type, ...]) -> bool:
    return isinstance(value, list) and all(isinstance(entry, kinds) and type(entry) is not bool for entry in value)


def _is_record(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(entry, str) for entry in value.values())
