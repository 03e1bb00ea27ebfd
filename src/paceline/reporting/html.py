"""One self-contained page: sections, charts as inline SVG, answers token by token. No network, and no script is needed.

Texts and names come from models and from strangers' files, so everything goes through autoescape; characters that HTML
cannot hold are replaced. The page stays under a megabyte: answers are drawn as long as there is room, and what is left
out is said.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import re
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from paceline import __version__
from paceline.errors import CapacityError, ConfigError
from paceline.reporting.charts import Chart, bar_chart, line_chart
from paceline.reporting.drawn_answer import DrawnAnswer, Wanted, draw_answer, first_refusal_is
from paceline.reporting.pair_section import DrawnPair, draw_pair
from paceline.reporting.sections import Drawing, Section
from paceline.trace.answer import TracedAnswer

if TYPE_CHECKING:
    from jinja2 import Environment

    from paceline.evaluation.trace_pairs import AnswerPair

MOST_BYTES = 1_000_000
_SPARE_BYTES = 10_000  # for what is said of answers that are left out
_FEWEST_STEPS = 25
_LEAST_PER_STEP = 400  # bytes of a drawn step
_MARK = '<meta name="generator" content="paceline report">'
_NO_CHARACTER = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


@dataclass(frozen=True)
class DrawnSection:
    """A section with its charts on their planes, and the answers that there was room for as HTML."""

    section: Section
    charts: list[Chart]
    answers: list[str] = field(default_factory=list)
    pairs: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


def render_page(sections: Sequence[Section], drawing: Drawing, *, title: str, command: str) -> str:
    """Make the page.

    Args:
        sections: what it says.
        drawing: which answers are drawn.
        title: of the page.
        command: that made it.
    """
    without = _page(
        [_draw(section, replace(drawing, most_prompts=0), _Room(0)) for section in sections], title, command
    )
    room = _Room(MOST_BYTES - _SPARE_BYTES - _size(without))
    html = _page([_draw(section, drawing, room) for section in sections], title, command)
    return _NO_CHARACTER.sub("\ufffd", html)


def _page(sections: Sequence[DrawnSection], title: str, command: str) -> str:
    template = _environment().get_template("page.html")
    return template.render(title=title, command=command, version=__version__, sections=sections, mark=_MARK)


def check_output(path: Path, *, force: bool) -> None:
    """Refuse a page that could not be written, or that would bury something else, before anything is counted.

    Args:
        path: the page.
        force: replace whatever file is there.

    Raises:
        ConfigError: there is no such folder, it is a folder, or a file that is no report.
    """
    origin = {"--html": path}
    if path.is_dir():
        raise ConfigError("the page's path is a folder", origin=origin)
    if not path.resolve().parent.is_dir():
        raise ConfigError("the folder of the page does not exist", origin=origin)
    if not os.access(path.resolve().parent, os.W_OK | os.X_OK):
        raise ConfigError("nothing can be written into the folder of the page", origin=origin)
    if path.exists() and not force:
        with path.open("rb") as file:
            head = file.read(2000)
        if head and _MARK.encode() not in head:
            raise ConfigError(
                "this file exists and is no report, so it is not replaced",
                origin=origin,
                hint="another name, or --force",
            )


def write_page(path: Path, html: str) -> None:
    """Write the page in full or not at all.

    Raises:
        CapacityError: the disk is full; what was there before still is.
    """
    temporary = path.with_name(f".{path.name}.tmp-{secrets.token_hex(4)}")
    try:
        with temporary.open("w", encoding="utf-8", newline="\n") as file:
            file.write(html)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise CapacityError(f"the disk is full: {path} could not be written", hint="freeing space") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


class _Room:
    """Bytes that are left for answers."""

    def __init__(self, num_bytes: int) -> None:
        self.num_left = num_bytes

    def takes(self, html: str) -> bool:
        """Whether there is room, which is taken then."""
        size = _size(html)
        if size > self.num_left:
            return False
        self.num_left -= size
        return True


def _size(html: str) -> int:
    return len(html.encode("utf-8", errors="replace"))


def _draw(section: Section, drawing: Drawing, room: _Room) -> DrawnSection:
    bars = [
        bar_chart(
            each.title,
            each.estimates,
            says=each.says,
            x_label=each.x_label,
            y_label=each.y_label,
            top=each.top,
            base=each.base,
        )
        for each in section.bars
    ]
    lines = [
        line_chart(
            each.title,
            each.series,
            says=each.says,
            x_label=each.x_label,
            y_label=each.y_label,
            levels=each.levels,
            uprights=each.uprights,
            with_dots=each.with_dots,
            from_zero=each.from_zero,
        )
        for each in section.lines
    ]
    drawn = DrawnSection(section, [chart for chart in (*bars, *lines) if chart is not None])
    wanted = None if drawing.first_refusal is None else first_refusal_is(drawing.first_refusal)
    chosen = drawing.chosen(section.answers)
    for answer in chosen:
        html = _fitting(room, drawing.most_steps, functools.partial(_answer, answer, wanted=wanted))
        if html is None:
            break
        drawn.answers.append(html)
    if section.answers and len(drawn.answers) < len(section.answers):
        drawn.left_out.append(
            f"{len(drawn.answers)} of {len(section.answers)} answers are drawn; figures are of all. "
            "--prompt ID and --max-prompts N choose others, as far as the page stays under a megabyte."
        )
    of_before = {id(pair.before): pair for pair in section.pairs}
    for answer in drawing.chosen([pair.before for pair in section.pairs]):
        pair = of_before[id(answer)]
        html = _fitting(room, drawing.most_steps, functools.partial(_pair, pair))
        if html is None:
            break
        drawn.pairs.append(html)
    if section.pairs and len(drawn.pairs) < len(section.pairs):
        drawn.left_out.append(f"{len(drawn.pairs)} of {len(section.pairs)} pairs are drawn; figures are of all.")
    return drawn


def _fitting(room: _Room, most_steps: int, render: Callable[[int], str]) -> str | None:
    """What there is room for, with fewer steps if need be; None where there is none for a few."""
    most = min(most_steps, max(_FEWEST_STEPS, room.num_left // _LEAST_PER_STEP))
    while most >= min(_FEWEST_STEPS, most_steps):
        html = render(most)
        if room.takes(html):
            return html
        most //= 2
    return None


def _answer(answer: TracedAnswer, most_steps: int, *, wanted: Wanted | None) -> str:
    drawn: DrawnAnswer = draw_answer(answer, most_steps=most_steps, wanted=wanted)
    return _environment().get_template("answer.html").render(answer=drawn)


def _pair(pair: AnswerPair, most_steps: int) -> str:
    drawn: DrawnPair = draw_pair(pair, most_steps=most_steps)
    return _environment().get_template("pair.html").render(pair=drawn)


@functools.cache
def _environment() -> Environment:
    from jinja2 import Environment, FunctionLoader, StrictUndefined

    return Environment(
        loader=FunctionLoader(read_template),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def read_template(name: str) -> str | None:
    """The text of a template, wherever the package lies; None of one that is not there."""
    file = resources.files("paceline.reporting").joinpath("templates", name)
    return file.read_text(encoding="utf-8") if file.is_file() else None
