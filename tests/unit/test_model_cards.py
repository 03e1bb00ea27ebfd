"""The drafters' cards say what the archived results say, and the results hold what is claimed of the drafters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FAMILIES = ("dflash", "dflash2", "dspark", "eagle3")
NAMES = {
    "held-out self-chat 0": "selfchat-0",
    "held-out self-chat 2": "selfchat-2",
    "`prompts/first.jsonl`": "own",
    "mt-bench, first turns": "mt-bench",
}
SETS = {"selfchat-0", "selfchat-2", "own", "gsm8k", "humaneval", "math500", "mbpp", "mt-bench"}
Cells = dict[tuple[str, float], tuple[int, str]]  # set and temperature: prompts, length with its interval


def folder(family: str) -> Path:
    return ROOT / "drafters" / f"smollm2-135m-instruct-{family}"


def measured() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((ROOT / "docs/results/acceptance-smollm2.json").read_text("utf-8"))["rows"]
    return rows


def archived(family: str) -> Cells:
    rows = [row for row in measured() if row["drafter"] == folder(family).name and not row["simulated"]]
    return {
        (row["set"], row["temperature"]): (
            row["num_prompts"],
            f"{row['acceptance_length']:.2f} [{row['low']:.2f}, {row['high']:.2f}]",
        )
        for row in rows
    }


def stated(card: str) -> Cells:
    """The table of the section on acceptance."""
    section = card[card.index("## Acceptance") : card.index("## Limits")]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines()]
    cells = [line for line in lines if len(line) == 4 and line[1].isdigit()]
    return {
        (NAMES.get(name, name), temperature): (int(number), cell)
        for name, number, *both in cells
        for temperature, cell in zip((0.0, 1.0), both, strict=True)
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_a_card_states_what_was_archived(family: str) -> None:
    card = (folder(family) / "README.md").read_text(encoding="utf-8")
    found = stated(card)
    assert found == archived(family)
    assert set(found) == {(name, temperature) for name in SETS for temperature in (0.0, 1.0)}
    some = found["gsm8k", 1.0][1]
    assert stated(card.replace(some, some.replace(".", ".9", 1))) != found, "another figure would be seen"


@pytest.mark.parametrize("family", FAMILIES)
def test_serving_accepts_what_the_simulation_says_of_the_same_text(family: str) -> None:
    rows = [row for row in measured() if row["drafter"] == folder(family).name and "over_simulated" in row]
    assert {row["set"] for row in rows} == {"selfchat-0", "selfchat-2"}
    assert all(abs(row["over_simulated_served_text"]) < 0.03 for row in rows)


def test_the_default_drafter_is_small_and_accepts_what_is_claimed() -> None:
    assert (folder("dflash2") / "model.safetensors").stat().st_size <= 30 * 10**6
    lengths = {
        row["set"]: row["acceptance_length"]
        for row in measured()
        if row["drafter"] == folder("dflash2").name and row["temperature"] == 0 and not row["simulated"]
    }
    assert min(lengths["selfchat-0"], lengths["selfchat-2"]) >= 3.3
