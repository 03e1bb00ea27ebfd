from __future__ import annotations

import io
import logging
from collections.abc import Iterator

import pytest

from paceline.log import configure_logging, get_logger, level_for


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    logger = get_logger()
    handlers, level = list(logger.handlers), logger.level
    yield
    logger.handlers[:] = handlers
    logger.setLevel(level)


def test_plain_lines_without_a_terminal() -> None:
    stream = io.StringIO()
    configure_logging(stream=stream)
    get_logger("paceline.somewhere").info("one %d", 1)
    get_logger("outside").warning("two")
    get_logger().debug("not shown")
    assert stream.getvalue() == "one 1\nwarning: two\n"


def test_colour_on_a_terminal_only_when_wanted() -> None:
    coloured, plain = _Terminal(), _Terminal()
    configure_logging(stream=coloured)
    get_logger().warning("careful [not markup]")
    configure_logging(stream=plain, color=False)
    get_logger().warning("careful [not markup]")
    assert "careful [not markup]" in coloured.getvalue()
    assert plain.getvalue() == "warning: careful [not markup]\n"


def test_setting_up_again_replaces_the_first() -> None:
    first, second = io.StringIO(), io.StringIO()
    configure_logging(stream=first)
    configure_logging(stream=second, rank=3)
    get_logger().info("hello")
    assert (first.getvalue(), second.getvalue()) == ("", "[rank 3] hello\n")


@pytest.mark.parametrize(
    ("verbosity", "default", "level"),
    [
        (0, None, logging.INFO),
        (0, "error", logging.ERROR),
        (1, "error", logging.DEBUG),
        (-1, None, logging.WARNING),
        (-2, "debug", logging.ERROR),
    ],
)
def test_levels(verbosity: int, default: str | None, level: int) -> None:
    assert level_for(verbosity, default) == level
