"""Golden text of a report without colours, and what holds of any."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from tests.unit.reporting.traces import RUN, answer, two_answers

from paceline.evaluation.trace_figures import trace_figures
from paceline.evaluation.trace_pairs import compare_traces
from paceline.reporting.inputs import TraceInput
from paceline.reporting.pair_section import pair_section
from paceline.reporting.section_terminal import print_section
from paceline.reporting.sections import Drawing, Section
from paceline.reporting.trace_section import trace_section

GOLDEN = Path(__file__).with_name("report.txt")


def render(section: Section, drawing: Drawing | None = None, *, colour: bool = False, encoding: str = "utf-8") -> str:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding)
    console = Console(file=file, width=100, force_terminal=colour, color_system="standard" if colour else None)
    print_section(console, section, drawing or Drawing())
    file.flush()
    return raw.getvalue().decode(encoding)


def section() -> Section:
    plain = [answer("a", [([], 0, 1)] * 3, method="plain", step_ms=6.0)]
    answers = two_answers()
    return trace_section(TraceInput(Path("t.jsonl"), answers, plain, [RUN]), trace_figures(answers, plain))


def test_the_whole_text_without_colours() -> None:
    """After a wanted change: `python -m tests.unit.reporting.test_section_terminal` writes it anew."""
    assert render(section()) == GOLDEN.read_text(encoding="utf-8")


def test_colours_add_nothing() -> None:
    coloured = render(section(), colour=True)
    assert "\x1b[" in coloured
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured).split() == render(section()).split()


def test_an_output_of_few_characters_gets_escapes() -> None:
    given = section()
    text = render(replace(given, notes=["é – 你"]), encoding="ascii")
    assert "! \\xe9 \\u2013 \\u4f60\n" in text and "##########" in text


def test_what_is_drawn_is_chosen_and_what_is_left_out_is_said() -> None:
    text = render(section(), Drawing(most_prompts=1))
    assert "1 of 2 answers are drawn; figures are of all." in text
    only = render(section(), Drawing(prompts=("b",), most_prompts=9))
    assert "\nb  4 tokens, 1 steps, acceptance length 3.00" in only and "\na  " not in only
    filtered = render(section(), Drawing(most_prompts=1, first_refusal=1))
    rows = [line for line in filtered.splitlines() if line.endswith(")") and re.match(r"\d  ", line)]
    assert len(rows) == 1 and rows[0].startswith("1   12 ")


def test_a_pair_shows_both_texts_and_the_steps_that_differ() -> None:
    a = [answer("a", [([1, 2, 3], 3, 4)]), answer("b", [([1, 2, 9], 2, 3)])]
    b = [answer("a", [([1, 9, 9], 1, 2), ([3, 9], 1, 4)]), answer("b", [([1, 2, 9], 2, 3)])]
    text = render(pair_section(("A.jsonl", "B.jsonl"), compare_traces(a, b)))
    assert "token 1\n  A kept 3  [ cat] [ sat] [ 12] ({)\n  B kept 1  [ cat] ~<script>" in text
    assert "ratio B / A" in text and "same text            2 of 2" in text


if __name__ == "__main__":
    GOLDEN.write_text(render(section()), encoding="utf-8")
