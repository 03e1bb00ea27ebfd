"""Signal 9 at twenty random moments of a run and at two chosen ones, a resume after each: bitwise a run left alone."""

from __future__ import annotations

import random
import signal
from pathlib import Path

import pytest
from tests.tiny_run import random_rows, tiny_settings, write_token_file
from tests.unit.training.killed_runs import Moment, attempt
from tests.unit.training.processes import start
from tests.unit.training.runs import differs, exported, files_below, state, timeless

from paceline.configuration.run import TrainRun
from paceline.training.resume import latest_checkpoint

STEPS = 60
NUM_RANDOM = 20  # moments that nobody chose
DIED = -signal.SIGKILL


def settings(folder: Path) -> TrainRun:
    data = folder / "data.npz"
    if not data.exists():
        write_token_file(data, random_rows(40, 24, vocab_size=400), num_prompt_tokens=6)
    return tiny_settings(
        folder / "run",
        data,
        schedule_num_steps=STEPS,
        checkpoint_every=2,
        checkpoint_export_every=15,
        evaluate_every=25,
        drafter_family="dflash2",
        drafter_selector_rank=4,
    )


def run_attempt(run: TrainRun, moment: Moment | None, *, forgets_position: bool = False) -> int | None:
    process = start(attempt, run, moment, run.output.with_name("calls"), forgets_position)
    process.join()
    return process.exitcode


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[TrainRun, int]:
    """A run that nobody killed, and the number of its function calls."""
    run = settings(tmp_path_factory.mktemp("whole"))
    assert run_attempt(run, None) == 0
    return run, int(run.output.with_name("calls").read_text())


@pytest.mark.timeout(300)
def test_twenty_kills_and_resumes_end_bitwise_equal(whole: tuple[TrainRun, int], tmp_path: Path) -> None:
    left_alone, num_calls = whole
    run = settings(tmp_path)
    draw = random.Random(5)
    moments: list[Moment] = [draw.randrange(1, num_calls // 5) for _ in range(NUM_RANDOM)]
    moments.insert(10, "saving")
    steps = []
    for moment in moments:
        assert run_attempt(run, moment) == DIED, moment
        latest = latest_checkpoint(run.output / "checkpoints")
        steps.append(-1 if latest is None else int(latest.name.removeprefix("step-")))
        if moment == "saving":
            assert (run.output / "checkpoints" / f"step-{steps[-1] + 2:07d}.unfinished").is_dir()
    assert steps == sorted(steps) and len(set(steps)) > 5, "the kills were spread over the run"
    assert run_attempt(run, "exporting") == DIED  # of the drafter on the way, or at the end
    assert [path for path in run.output.rglob("*.tmp-*")], "it died between the folder's first file and its rename"
    assert run_attempt(run, None) == 0
    assert differs(state(run, STEPS), state(left_alone, STEPS)) == []
    assert exported(run) == exported(left_alone)
    assert timeless(run) == timeless(left_alone)
    assert files_below(run.output) == files_below(left_alone.output), "what killed processes left was cleared away"
    commands = (run.output / "command.txt").read_text().splitlines()
    assert 1 < len(commands) <= NUM_RANDOM + 3


def test_a_resume_that_starts_the_data_anew_would_be_seen(whole: tuple[TrainRun, int], tmp_path: Path) -> None:
    """The planted fault of the test above."""
    left_alone, num_calls = whole
    run = settings(tmp_path)
    assert run_attempt(run, num_calls // 2) == DIED
    assert run_attempt(run, None, forgets_position=True) == 0
    assert differs(state(run, STEPS), state(left_alone, STEPS))
