from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.unit.reporting.test_html import page_of

from paceline.reporting.inputs import TrainingInput
from paceline.reporting.training_section import training_section


def train(step: int, loss: float | None, **more: Any) -> dict[str, Any]:
    rows = {"accuracy_by_row": [0.5, 0.25, None], "seconds": 2.0, "num_tokens": 300, "num_bad_steps": 0}
    return {"kind": "train", "step": step, "loss": loss, **rows, **more}


def evaluation(step: int, length: float) -> dict[str, Any]:
    return {"kind": "evaluate", "step": step, "held out": {"acceptance_length": length, "per_position": [0.6, 0.3]}}


RUN = TrainingInput(
    Path("runs/one"),
    [train(20, 4.0), train(40, None, num_bad_steps=20), train(60, 2.0)],
    [evaluation(40, 2.5), evaluation(60, 2.25)],
    {"command.txt": "paceline train a\npaceline train a --resume\n", "config.toml": "seed = 1\n", "versions.json": "{"},
    has_torn_end=True,
)


def test_curves_and_figures() -> None:
    found = training_section(RUN)
    assert found.title == "one"
    assert found.notes[0].startswith("The last line is not whole") and found.notes[1].startswith("20 steps had a loss")
    tiles = {tile.label: (tile.value, tile.means) for tile in found.tiles}
    assert tiles["loss"] == ("2.0000", "last row; first 4.0000")
    assert tiles["tokens per second"][0] == "150"
    means = "simulated, last evaluation; best 2.500 at step 40"
    assert tiles["acceptance length, held out"] == ("2.250", means)
    curves = {line.title: dict(line.series) for line in found.lines}
    assert curves["Loss"]["loss"] == [(20.0, 4.0), (60.0, 2.0)], "what is no number leaves a gap"
    assert curves["Accuracy by draft"] == {
        "draft 0": [(20.0, 0.5), (40.0, 0.5), (60.0, 0.5)],
        "draft 1": [(20.0, 0.25), (40.0, 0.25), (60.0, 0.25)],
        "draft 2": [],
    }
    assert curves["Simulated acceptance length"] == {"held out": [(40.0, 2.5), (60.0, 2.25)]}
    assert found.tables[0].rows == [
        ["40", "held out", "2.500", "0.600 0.300"],
        ["60", "held out", "2.250", "0.600 0.300"],
    ]
    assert [title for title, _ in found.provenance] == ["command", "config.toml"], (
        "versions that are no JSON are left out"
    )
    _, page = page_of([found])
    assert page.faults == [] and len(page.all("svg", role="img")) >= 3


def test_a_run_that_has_only_begun() -> None:
    found = training_section(TrainingInput(Path("r"), [{"kind": "train", "step": 1}], []))
    assert found.lines == [] and found.tables == []
    _, page = page_of([found])
    assert page.faults == []
