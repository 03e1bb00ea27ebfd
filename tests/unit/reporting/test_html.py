"""The page: whole, self-contained, small, and safe whatever the texts are."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from tests.unit.reporting.pages import Page
from tests.unit.reporting.test_drawn_answer import DETAILS
from tests.unit.reporting.traces import RUN, TOKENS, answer, two_answers

from paceline.errors import CapacityError, ConfigError
from paceline.evaluation.trace_figures import trace_figures
from paceline.evaluation.trace_pairs import compare_traces
from paceline.reporting import html
from paceline.reporting.html import MOST_BYTES, check_output, read_template, render_page, write_page
from paceline.reporting.inputs import TraceInput, TrainingInput
from paceline.reporting.pair_section import pair_section
from paceline.reporting.sections import Drawing, Section
from paceline.reporting.trace_section import trace_section
from paceline.reporting.training_section import training_section
from paceline.trace.answer import TracedAnswer

EVIL = '<script>alert("x")</script><img src=http://evil/ onerror=alert(1)>\'"&{{ 7*7 }}'


def section_of(answers: Sequence[TracedAnswer], name: str = "t.jsonl") -> Section:
    return trace_section(TraceInput(Path(name), list(answers), [], [RUN]), trace_figures(answers))


def page_of(sections: Sequence[Section], drawing: Drawing | None = None, *, title: str = "title") -> tuple[str, Page]:
    text = render_page(sections, drawing or Drawing(most_prompts=24), title=title, command="paceline report t.jsonl")
    return text, Page(text)


def pair() -> Section:
    a = [answer("a", [([1, 2, 3], 3, 4), ([5, 9, 9], 1, 6)]), answer("b", [([1, 2, 9], 2, 3)])]
    b = [answer("b", [([1, 9, 9], 1, 2), ([3, 9, 9], 1, 4)]), answer("a", [([1, 9, 9], 1, 2), ([3, 9], 1, 4)])]
    return pair_section(("A.jsonl", "B.jsonl"), compare_traces(a, b))


def test_a_page_is_whole_html_without_any_address() -> None:
    given = TrainingInput(
        Path("run"),
        [{"kind": "train", "step": s, "loss": 1 / s, "accuracy_by_row": [0.1, 0.2]} for s in (1, 2)],
        [{"kind": "evaluate", "step": 2, "set": {"acceptance_length": 2.0, "per_position": [0.6]}}],
        {"config.toml": "a = 1\n", "versions.json": '{"torch": "2"}', "command.txt": "paceline train\n"},
    )
    text, page = page_of([pair(), section_of(two_answers()), training_section(given)])
    assert text.startswith("<!doctype html>") and page.faults == []
    for tag, attributes in page.elements:
        for name in ("src", "href", "action", "data", "srcset", "poster"):
            assert (attributes.get(name) or "#").startswith("#"), (tag, attributes)
    assert not re.search(r"https?://|@import|url\(", text)
    assert "link" not in {tag for tag, _ in page.elements}
    assert [part["id"] for part in page.all("section")] == ["part-1", "part-2", "part-3"]
    assert len(page.all("svg", role="img")) >= 8
    assert "prefers-color-scheme: dark" in text
    (policy,) = page.all("meta", **{"http-equiv": "Content-Security-Policy"})
    assert (policy["content"] or "").startswith("default-src 'none'")


def test_templates_come_from_the_package_wherever_it_lies() -> None:
    names = ("page.html", "section.html", "chart.html", "answer.html", "pair.html", "style.css", "script.js")
    assert all(read_template(name) for name in names)
    assert read_template("none.html") is None
    folder = Path(html.__file__).parent / "templates"
    assert sorted(file.name for file in folder.iterdir()) == sorted(names), "each of them is asked for"


def test_a_refused_cell_strikes_the_draft_and_not_what_came_in_its_place() -> None:
    text, page = page_of([section_of(two_answers())])
    assert '<td class="refused"><s> cat</s><b>→ Anna</b></td>' in text
    assert " Anna" not in page.text_of("s")


def test_marks_do_not_depend_on_colour() -> None:
    text, page = page_of([section_of(two_answers())])
    style = text[text.index("<style>") : text.index("</style>")]
    for fate, sign in (("accepted", "border-bottom"), ("refused", "line-through"), ("bonus", "outline")):
        assert re.search(rf"\.{fate} {{[^}}]*{sign}", style)
        assert page.all("span", class_=fate)


@pytest.mark.parametrize(
    "place", ["token", "prompt", "category", "question", "method", "file", "run", "reason", "title"]
)
def test_text_from_elsewhere_is_text(place: str) -> None:
    tokens = {**TOKENS, 1: EVIL.encode()} if place == "token" else TOKENS
    made = answer("a", [([1, 2, 8], 1, 7)], details=DETAILS, tokens=tokens)
    assert made.prompt is not None
    changes = {"prompt": {"id": EVIL}, "category": {"category": EVIL}, "question": {"text": EVIL}}.get(place, {})
    run = {**RUN, "command": EVIL} if place == "run" else RUN
    made = replace(made, prompt=replace(made.prompt, **changes), run=run)
    made.trace.method = EVIL if place == "method" else "dflash/greedy"
    made.trace.finish_reason = EVIL if place == "reason" else "stop"
    given = TraceInput(Path(EVIL.replace("/", "∕") if place == "file" else "t"), [made], [], [run])
    text, page = page_of(
        [trace_section(given, trace_figures([made, answer("b", [([1], 1, 2)], category="c")]))],
        title=EVIL if place == "title" else "t",
    )
    assert page.faults == [] and len(page.all("script")) == 1 and page.all("img") == []
    assert not any(name.startswith("on") for _, attributes in page.elements for name in attributes)
    assert "alert(" in text, "it is shown"
    assert "49" not in page.text_of("dd"), "and no template"


def test_the_test_above_finds_a_page_that_does_not_escape(monkeypatch: pytest.MonkeyPatch) -> None:
    from jinja2 import Environment, FunctionLoader

    careless = Environment(loader=FunctionLoader(read_template), autoescape=False, trim_blocks=True)
    monkeypatch.setattr(html, "_environment", lambda: careless)
    made = answer("a", [([1, 2, 8], 1, 7)], tokens={**TOKENS, 1: EVIL.encode()})
    _, page = page_of([section_of([made])])
    assert len(page.all("script")) > 1


def test_characters_that_html_cannot_hold_are_replaced() -> None:
    made = answer("a", [([1], 1, 2)])
    run = {**RUN, "command": "a\x00b\ud800c\x1b"}
    text, _ = page_of([trace_section(TraceInput(Path("t"), [made], [], [run]), trace_figures([made]))])
    text.encode("utf-8")
    assert "a\ufffdb\ufffdc\ufffd" in text and not re.search("[\x00-\x08\x0e-\x1f]", text)


def long_answer(name: str, num_steps: int) -> TracedAnswer:
    return answer(name, [([1, 2, 8, 3, 4, 6, 11], index % 7, 7) for index in range(num_steps)], details=None)


def test_two_hundred_prompts_are_less_than_a_megabyte_and_what_is_left_out_is_said() -> None:
    detailed = [
        replace(each, trace=replace(each.trace, records=[replace(r, details=DETAILS) for r in each.trace.records]))
        for each in (long_answer(f"prompt-{number}", 40) for number in range(200))
    ]
    text, page = page_of([section_of(detailed)], Drawing(most_prompts=200))
    assert len(text.encode()) < MOST_BYTES
    drawn = len(page.all("article"))
    assert 5 < drawn < 200
    assert f"{drawn} of 200 answers are drawn; figures are of all." in text
    assert "<dt>answers</dt><dd>200</dd>" in text, "counted are all of them"


def test_an_answer_that_is_too_long_is_drawn_in_part() -> None:
    text, page = page_of([section_of([long_answer("long", 3_000)])], Drawing(most_prompts=1, most_steps=100_000))
    assert len(text.encode()) < MOST_BYTES and len(page.all("article")) == 1
    assert re.search(r"the first \d+ of 3000 steps are drawn", text)
    assert "<dt>steps</dt><dd>3000</dd>" in text


def test_filters_choose_what_is_drawn() -> None:
    _, page = page_of([section_of(two_answers())], Drawing(prompts=("b",), most_prompts=9))
    assert len(page.all("article")) == 1
    _, page = page_of([section_of(two_answers())], Drawing(most_prompts=9, first_refusal=0))
    assert {row["data-refusal"] for row in page.all("tr") if "data-refusal" in row} == {"0"}
    assert "no step of this answer passes the filter" in page.text_of("p")


def test_columns_of_a_pair_are_aligned_token_by_token() -> None:
    _, page = page_of([pair()])
    columns = [each for each in page.all("span", class_="column") if "title" in each]
    assert columns[1]["title"] == "token 1: A accepted a draft in step 0, B accepted a draft in step 0"
    assert columns[2]["title"] == "token 2: A accepted a draft in step 0, B took the target's own in step 0"
    assert "the texts part behind 4 tokens" in page.text_of("p")


def test_a_page_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "report.html"
    write_page(path, "first é")
    assert path.read_text(encoding="utf-8") == "first é" and os.listdir(tmp_path) == ["report.html"]

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CapacityError, match="the disk is full"):
        write_page(path, "second")
    assert path.read_text(encoding="utf-8") == "first é" and os.listdir(tmp_path) == ["report.html"]


def test_a_file_that_is_no_report_is_not_replaced(tmp_path: Path) -> None:
    other, ours = tmp_path / "notes.html", tmp_path / "report.html"
    other.write_text("<p>mine</p>")
    ours.write_text(page_of([section_of(two_answers())])[0])
    (tmp_path / "empty.html").touch()
    with pytest.raises(ConfigError, match="this file exists and is no report"):
        check_output(other, force=False)
    check_output(other, force=True)
    for path in (ours, tmp_path / "empty.html", tmp_path / "new.html"):
        check_output(path, force=False)
    with pytest.raises(ConfigError, match="is a folder"):
        check_output(tmp_path, force=True)
    with pytest.raises(ConfigError, match="folder of the page does not exist"):
        check_output(tmp_path / "no" / "report.html", force=True)
