"""The bar of a training run: drawn on a terminal alone, above it the log, and everything as before afterwards."""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import pytest

from paceline.log import configure_logging, get_logger
from paceline.reporting.training_progress import TrainingDisplay


@dataclass(frozen=True)
class Done:
    step: int
    num_steps: int = 40
    row: Mapping[str, object] | None = None


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("COLUMNS", "140")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    yield
    logger = get_logger()
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)


TRAIN = {"kind": "train", "step": 20, "loss": 3.25, "tokens_per_second": 12345.6}
EVALUATE = {"kind": "evaluate", "step": 20, "chats.npz": {"acceptance_length": 2.51, "per_position": (0.6,)}}


def test_the_bar_shows_step_loss_acceptance_and_speed() -> None:
    terminal = Terminal()
    with TrainingDisplay(stream=terminal) as display:
        display.update(Done(19))
        display.update(Done(20, row=TRAIN))
        display.update(Done(20, row=EVALUATE))
    last = re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", terminal.getvalue()).strip())[-1]
    for part in ("20/40", "loss 3.250", "acceptance 2.51", "12,346 tok/s", "left"):
        assert part in last


def test_a_loss_that_is_no_number_is_said() -> None:
    terminal = Terminal()
    with TrainingDisplay(stream=terminal) as display:
        display.update(Done(20, row={**TRAIN, "loss": None}))
    assert "loss not finite" in terminal.getvalue()


@pytest.mark.parametrize(
    ("stream", "options"),
    [(io.StringIO(), {}), (Terminal(), {"color": False}), (Terminal(), {"verbosity": -1})],
    ids=["pipe", "no color", "quiet"],
)
def test_nothing_is_drawn_where_nobody_watches(stream: io.StringIO, options: dict[str, int]) -> None:
    with TrainingDisplay(stream=stream, **options) as display:
        display.update(Done(1, row=TRAIN))
    assert stream.getvalue() == ""


def test_log_lines_pass_above_the_bar_but_for_those_that_repeat_it() -> None:
    terminal = Terminal()
    configure_logging(stream=terminal)
    (before,) = get_logger().handlers
    with TrainingDisplay(stream=terminal) as display:
        display.update(Done(1))
        assert before not in get_logger().handlers  # else its lines would tear the bar
        get_logger("paceline.training.loop").info("held out: 2.5")
        get_logger("paceline.training.tracking").info("step 20/40 loss 3.25")
        get_logger("paceline.training.tracking").warning("the disk is slow")
    assert get_logger().handlers == [before]
    shown = terminal.getvalue()
    assert "held out: 2.5" in shown
    assert "warning: the disk is slow" in shown
    assert "step 20/40 loss 3.25" not in shown


def test_the_log_is_given_back_after_a_failure() -> None:
    terminal = Terminal()
    configure_logging(stream=terminal)
    before = list(get_logger().handlers)
    with pytest.raises(KeyboardInterrupt), TrainingDisplay(stream=terminal):
        raise KeyboardInterrupt
    assert get_logger().handlers == before


def test_a_resumed_run_does_not_count_what_an_earlier_attempt_did() -> None:
    display = TrainingDisplay(stream=Terminal())
    with display:
        display.update(Done(31))
        assert display._progress is not None
        (task,) = display._progress.tasks
        assert (task.completed, task.total) == (31, 40)
        samples = list(task._progress)
        assert sum(sample.completed for sample in samples) == 1  # speed and time left come from these
