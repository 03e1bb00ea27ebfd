"""The prompts of the smoke recipe: different ones, always the same, and none held out that is of a kind of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

from examples.make_smoke_prompts import smoke_prompts

from paceline.configuration.load import load_settings
from paceline.configuration.run import TrainRun

ROOT = Path(__file__).parents[3]
TEMPLATES = (
    "Repeat the word",
    "Write this sentence",
    "Count from",
    "List the seven",
    "List the twelve",
    "Write a Python",
)


def kinds(prompts: list[str]) -> Counter[str]:
    return Counter(next(template for template in TEMPLATES if prompt.startswith(template)) for prompt in prompts)


def test_they_are_different_and_always_the_same() -> None:
    prompts = smoke_prompts()
    assert len(set(prompts)) == 72 == len(prompts)
    assert prompts == smoke_prompts()
    assert set(kinds(prompts).values()) == {12}


def test_what_is_held_out_resembles_what_is_learnt() -> None:
    run = load_settings(TrainRun, ROOT / "examples" / "train_cpu_smoke.toml", [])
    prompts = smoke_prompts()
    learnt, held_out = prompts[: -run.data.hold_out], prompts[-run.data.hold_out :]
    assert kinds(held_out).keys() <= kinds(learnt).keys()
    assert min(kinds(learnt).values()) >= 6


def test_the_script_writes_what_capture_reads(tmp_path: Path) -> None:
    output = tmp_path / "new" / "prompts.jsonl"
    subprocess.run([sys.executable, ROOT / "examples" / "make_smoke_prompts.py", output], check=True)
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["prompt"] for row in rows] == smoke_prompts()
    assert len({row["id"] for row in rows}) == 72
