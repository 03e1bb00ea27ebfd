"""Logger set-up for commands: one handler on stderr, coloured on a terminal, plain lines everywhere else.

The library only ever calls `get_logger(__name__)`; handlers are the business of whoever runs it. Only the standard
library is imported at the top, so that every layer may use this file.
"""

from __future__ import annotations

import logging
import sys
from typing import TextIO

ROOT_NAME = "paceline"
OWN_HANDLER = "paceline-stderr"


def get_logger(name: str = ROOT_NAME) -> logging.Logger:
    """The logger of a module; names outside the package are put below `paceline`."""
    inside = name == ROOT_NAME or name.startswith(f"{ROOT_NAME}.")
    return logging.getLogger(name if inside else f"{ROOT_NAME}.{name}")


def level_for(verbosity: int, default: str | None = None) -> int:
    """The level that `-v` (+1 each) and `-q` (-1 each) ask for; at 0 the default, which is info.

    Args:
        verbosity: number of `-v` minus number of `-q`.
        default: name of the level without flags, such as the value of `PACELINE_LOG_LEVEL`.
    """
    if verbosity > 0:
        return logging.DEBUG
    if verbosity < 0:
        return logging.WARNING if verbosity == -1 else logging.ERROR
    return logging.getLevelNamesMapping()[(default or "info").upper()]


def configure_logging(
    *,
    verbosity: int = 0,
    default_level: str | None = None,
    color: bool = True,
    rank: int | None = None,
    stream: TextIO | None = None,
) -> logging.Logger:
    """Send the package's log to stderr; calling it again replaces the earlier set-up.

    Args:
        verbosity: number of `-v` minus number of `-q`.
        default_level: level name without flags.
        color: False for NO_COLOR and `--no-color`.
        rank: index of this process in a distributed run, put before each line.
        stream: where to write instead of stderr.
    """
    logger = get_logger()
    for handler in [handler for handler in logger.handlers if handler.get_name() == OWN_HANDLER]:
        logger.removeHandler(handler)
    target = stream if stream is not None else sys.stderr
    handler = _rich_handler(target) if color and target.isatty() else _plain_handler(target)
    handler.set_name(OWN_HANDLER)
    prefix = f"[rank {rank}] " if rank is not None else ""
    handler.setFormatter(_LevelFormatter(prefix))
    logger.addHandler(handler)
    logger.setLevel(level_for(verbosity, default_level))
    return logger


class _LevelFormatter(logging.Formatter):
    """`message` for information, `warning: message` for what needs attention."""

    def __init__(self, prefix: str) -> None:
        super().__init__()
        self._prefix = prefix

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        mark = "" if record.levelno == logging.INFO else f"{record.levelname.lower()}: "
        return f"{self._prefix}{mark}{text}"


def _plain_handler(stream: TextIO) -> logging.Handler:
    return logging.StreamHandler(stream)


def _rich_handler(stream: TextIO) -> logging.Handler:
    from rich.console import Console
    from rich.text import Text

    console = Console(file=stream, highlight=False)
    styles = {logging.DEBUG: "dim", logging.WARNING: "yellow", logging.ERROR: "red", logging.CRITICAL: "bold red"}

    class _ConsoleHandler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            try:
                console.print(Text(self.format(record), style=styles.get(record.levelno, "")), soft_wrap=True)
            except Exception:  # a log line must never end the program; logging reports it in its own way
                self.handleError(record)

    return _ConsoleHandler()
