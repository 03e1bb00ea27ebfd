"""A calibration in a drafter's folder: written by an export, read strictly, carried along by a conversion."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.unit.checkpoint.test_export import names_in, tensors_for, write

from paceline.checkpoint.calibration import CALIBRATION_FILE, Calibration, read_calibration, write_calibration
from paceline.checkpoint.contract import DrafterContract
from paceline.checkpoint.conversion import convert_drafter
from paceline.checkpoint.export import write_drafter_folder
from paceline.errors import CheckpointError, DataError

Make = Callable[..., DrafterContract]
FOUND = Calibration(
    method="walk",
    num_blocks=400,
    per_position=(0.75, 0.5, 0.0),
    texts=("a.npz", "b.npz"),
    recorded_with={"paceline": "1"},
)


def test_an_export_holds_it_and_a_conversion_keeps_it(tmp_path: Path, make_drafter: Make) -> None:
    contract = make_drafter()
    write_drafter_folder(tmp_path / "d", contract, tensors_for(contract), None, {}, calibration=FOUND)
    assert read_calibration(tmp_path / "d") == FOUND and FOUND.first_position == 0.75
    converted = convert_drafter(tmp_path / "d", tmp_path / "c", "zlab")
    assert CALIBRATION_FILE not in converted.left_behind
    assert read_calibration(tmp_path / "c") == FOUND


def test_other_weights_in_the_same_folder_do_not_inherit_it(tmp_path: Path, make_drafter: Make) -> None:
    contract = make_drafter()
    write_drafter_folder(tmp_path / "d", contract, tensors_for(contract), None, {}, calibration=FOUND)
    write(tmp_path / "d", contract)
    assert CALIBRATION_FILE not in names_in(tmp_path / "d") and read_calibration(tmp_path / "d") is None


def test_written_afterwards(tmp_path: Path) -> None:
    write_calibration(tmp_path, FOUND)
    write_calibration(tmp_path, FOUND)
    assert read_calibration(tmp_path) == FOUND and names_in(tmp_path) == [CALIBRATION_FILE]


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"first_position": 0.5}, "unknown first_position"),
        ({"texts": None}, "texts"),
        ({"format": 2}, "format 2"),
        ({"sampling": "sampled"}, "'sampled'"),
        ({"method": "guessed"}, "'guessed'"),
        ({"num_blocks": 400.0}, "a whole number"),
        ({"num_blocks": True}, "a whole number"),
        ({"num_blocks": 199}, "199 blocks"),
        ({"per_position": []}, "between 0 and 1"),
        ({"per_position": [0.5, "0.2"]}, "a list of numbers"),
        ({"per_position": [0.5, True]}, "a list of numbers"),
        ({"per_position": [1.5]}, "between 0 and 1"),
        ({"recorded_with": {"torch": 2}}, "an object of texts"),
    ],
)
def test_what_no_calibration_says_is_refused(tmp_path: Path, change: dict[str, Any], part: str) -> None:
    content = json.loads(FOUND.to_json()) | change
    (tmp_path / CALIBRATION_FILE).write_text(json.dumps(content))
    with pytest.raises(CheckpointError) as refused:
        read_calibration(tmp_path)
    assert part in str(refused.value)
    assert CALIBRATION_FILE in str(refused.value)


def test_a_key_that_is_missing_is_named(tmp_path: Path) -> None:
    content = json.loads(FOUND.to_json())
    del content["sampling"]
    (tmp_path / CALIBRATION_FILE).write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="missing sampling"):
        read_calibration(tmp_path)


def test_too_little_cannot_be_recorded_either() -> None:
    with pytest.raises(DataError, match="12 blocks; at least 200"):
        Calibration(method="served", num_blocks=12, per_position=(0.5,))
