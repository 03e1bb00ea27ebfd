"""The short way of docs/training.md, command by command: from nothing to a served drafter, on a CPU."""

from __future__ import annotations

import json
import os
import re
import resource
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.configuration.load import load_settings
from paceline.configuration.run import TrainRun

ROOT = Path(__file__).parents[2]
RECIPE = "examples/train_cpu_smoke.toml"
SOUND = 1.3  # acceptance length on held-out prompts


def documented_commands() -> list[list[str]]:
    """What the page tells its reader to type."""
    page = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    block = re.search(r"## The short way\n.*?```\n(.*?)```", page, re.DOTALL)
    assert block is not None
    return [shlex.split(line) for line in block[1].replace("\\\n", " ").splitlines()]


def run_here(folder: Path, words: list[str]) -> tuple[float, float]:
    """One command as a user would start it, in a folder of its own; seconds that passed, and those of cores."""
    program = {"python": [sys.executable], "paceline": [sys.executable, "-m", "paceline"]}[words[0]]
    inherited = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    environment = {**inherited, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT / "src"), *sys.path]))}
    began, used = time.monotonic(), core_seconds()
    done = subprocess.run([*program, *words[1:]], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{shlex.join(words)} left with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return time.monotonic() - began, core_seconds() - used


def core_seconds() -> float:
    """Of all processes that this one started and that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_the_page_and_the_recipe_name_the_same_commands() -> None:
    """The recipe opens with those up to training."""
    lines = (ROOT / RECIPE).read_text(encoding="utf-8").splitlines()
    comment = "\n".join(line[2:].strip() for line in lines if line.startswith("#")).replace("\\\n", " ")
    typed = [shlex.split(line) for line in comment.splitlines() if line.startswith(("python ", "paceline "))]
    commands = documented_commands()
    assert typed == commands[: len(typed)]
    assert [words[1] for words in commands[len(typed) - 1 :]] == ["train", "parity", "evaluate"]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_short_way_ends_in_a_drafter_that_is_accepted(
    tmp_path: Path, record_property: Callable[[str, object], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """How long it takes is said and not judged, as that is the machine's business: about three minutes on two cores up
    to the drafter. Where other work runs beside it, the seconds of its cores say how much it is.
    """
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    seconds = {" ".join(words[:3]): run_here(tmp_path, words) for words in documented_commands()}
    whole_s = sum(took for took, _ in seconds.values())
    run = load_settings(TrainRun, ROOT / RECIPE, [])
    rows = [json.loads(line) for line in (tmp_path / run.output / "metrics.jsonl").read_text().splitlines()]
    (measured,) = (row for row in rows if row["kind"] == "evaluate")
    ((_, found),) = ((name, value) for name, value in measured.items() if isinstance(value, dict))
    with capsys.disabled():
        print(f"\nsmoke recipe: acceptance length {found['acceptance_length']:.2f}")
        for command, (took_s, used_s) in seconds.items():
            print(f"  {took_s:6.0f} s, {used_s:6.0f} s of cores  {command}")
        print(f"  {whole_s:6.0f} s, {sum(used for _, used in seconds.values()):6.0f} s of cores  all")
    record_property("seconds", round(whole_s, 1))
    record_property("acceptance_length", found["acceptance_length"])
    assert measured["step"] == run.schedule.num_steps and found["num_conversations"] == run.data.hold_out
    assert found["acceptance_length"] > SOUND
