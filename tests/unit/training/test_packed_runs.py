"""Whole runs over packed rows: they learn, and a resumed one ends in the same weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.tiny_run import random_rows, tiny_settings, write_token_file
from tests.unit.training.runs import Act, Crash, crash_at, differs, metrics, nothing, state, timeless

from paceline.configuration.run import TrainRun
from paceline.errors import DataError
from paceline.models.loading import LoadedTarget
from paceline.training.loop import train

FAMILIES: dict[str, dict[str, Any]] = {
    "dflash2": {"drafter_family": "dflash2", "drafter_selector_rank": 8, "drafter_selector_top_k": 4},
    "eagle3": {"drafter_family": "eagle3", "drafter_mask_token_id": None},
}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Texts of 8 to 20 tokens: three or four fill a row of 48."""
    rows = [row[: 8 + 3 * (index % 5)] for index, row in enumerate(random_rows(40, 20, vocab_size=400))]
    return write_token_file(tmp_path / "data.npz", rows, num_prompt_tokens=4)


def settings(folder: Path, data: Path, **changes: Any) -> TrainRun:
    return tiny_settings(folder, data, data_packed=True, data_max_length=48, schedule_num_anchors=40, **changes)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_packed_run_learns_and_its_resume_is_exact(
    family: str, target: LoadedTarget, data: Path, tmp_path: Path, at_step: Callable[[Act], None]
) -> None:
    whole, broken = (settings(tmp_path / name, data, **FAMILIES[family]) for name in ("whole", "broken"))
    outcome = train(whole, target)
    assert outcome.is_finished
    rows = [row for row in metrics(whole) if row["kind"] == "train"]
    assert rows[-1]["loss"] < rows[0]["loss"]
    at_step(crash_at(14))
    with pytest.raises(Crash):
        train(broken, target)
    at_step(nothing)
    train(broken, target, resume=True)
    assert not differs(state(whole, 20), state(broken, 20))
    assert timeless(whole) == timeless(broken)


def test_packing_teaches_more_per_row(target: LoadedTarget, data: Path, tmp_path: Path) -> None:
    packed = settings(tmp_path / "packed", data)
    plain = tiny_settings(tmp_path / "plain", data, schedule_num_anchors=40)
    for run in (packed, plain):
        train(run, target)
    counts = [sum(row["num_rows"] for row in metrics(run) if row["kind"] == "train") for run in (packed, plain)]
    assert counts[0] > 1.5 * counts[1]


def test_data_that_does_not_fill_a_batch_is_refused(target: LoadedTarget, data: Path, tmp_path: Path) -> None:
    run = settings(tmp_path / "run", data, schedule_batch_size=20)
    with pytest.raises(DataError, match=r"36 conversations fill \d+ rows of 48 tokens, schedule\.batch_size is 20"):
        train(run, target)
    assert not (tmp_path / "run").exists()
