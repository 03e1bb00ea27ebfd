"""Whatever stands in a file, a report is made of it or there is one clear error."""

from __future__ import annotations

import io
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tests.unit.reporting.pages import Page
from tests.unit.reporting.test_drawn_answer import DETAILS
from tests.unit.reporting.test_result_sections import BENCH, EVALUATE
from tests.unit.reporting.test_training_section import evaluation, train
from tests.unit.reporting.traces import answer, two_answers, write

from paceline.cli.report import sections_of
from paceline.errors import PacelineError
from paceline.reporting.html import render_page
from paceline.reporting.inputs import read_input
from paceline.reporting.section_terminal import print_section
from paceline.reporting.sections import Drawing

_THINGS: list[Any] = [
    None,
    True,
    -1,
    0,
    10**30,
    -(10**30),
    1e308,
    -1e308,
    float("nan"),
    float("inf"),
    "",
    "\x1b[2J\x00\ud800</script>",
    "x" * 5000,
    [],
    {},
    [[]],
    [None],
    [1, 2, 3],
    {"1": 2},
    [[[1, -0.5]]],
]


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every place in a JSON value where something else may stand."""
    keys: list[Any] = (
        list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
    )
    return [(value, key) for key in keys] + [place for key in keys for place in places(value[key])]


def damaged(text: str, chance: random.Random) -> str:
    """A file of JSON lines with one value changed, left out, or with a piece of its text lost."""
    lines = [json.loads(line) for line in text.splitlines()]
    container, key = chance.choice(places(lines))
    kind = chance.randrange(8)
    if kind == 0:
        start = chance.randrange(len(text))
        return text[:start] + text[start + chance.randrange(40) :]
    if kind == 1:
        del container[key]
    else:
        container[key] = chance.choice(_THINGS)
    return "".join(json.dumps(line) + "\n" for line in lines)


def made_of(path: Path) -> bool:
    """Whether a report could be made of a file; it is whole then, in both forms."""
    try:
        sections = sections_of([read_input(path)])
    except PacelineError as error:
        assert str(error).strip()
        return False
    drawing = Drawing(most_prompts=2)
    page = Page(render_page(sections, drawing, title="t", command="c"))
    assert page.faults == [] and len(page.all("script")) == 1
    file = io.StringIO()
    for section in sections:
        print_section(Console(file=file, width=100), section, drawing)
    assert "\x1b[2J" not in file.getvalue() and "\x00" not in file.getvalue()
    return True


def trace_text(folder: Path) -> str:
    detailed = answer("c", [([1, 2, 8], 1, 7), ([1, 2, 8], 1, 7)], details=DETAILS, category="code")
    plain = answer("a", [([], 0, 1)] * 2, method="plain")
    return write(folder / "whole.jsonl", [*two_answers(), detailed, replace(plain, prompt=plain.prompt)]).read_text()


@pytest.mark.parametrize("kind", ["trace", "metrics", "bench", "evaluate"])
def test_any_damage_is_an_error_or_a_report(tmp_path: Path, kind: str) -> None:
    rows = [train(step, 1.0 / step) for step in (1, 2, 3)]
    texts = {
        "trace": trace_text(tmp_path),
        "metrics": "".join(json.dumps(row) + "\n" for row in [*rows, evaluation(3, 2.0)]),
        "bench": json.dumps(BENCH) + "\n",
        "evaluate": json.dumps(EVALUATE) + "\n",
    }
    path, chance = tmp_path / "file.jsonl", random.Random(kind)
    path.write_text(texts[kind])
    assert made_of(path)
    outcomes = []
    for _ in range(150):
        path.write_text(damaged(texts[kind], chance), encoding="utf-8", errors="surrogatepass")
        outcomes.append(made_of(path))
    assert any(outcomes) and not all(outcomes)
