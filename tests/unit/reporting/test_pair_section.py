from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.unit.reporting.traces import RUN, answer

from paceline.evaluation.trace_pairs import compare_traces
from paceline.reporting.pair_section import draw_pair, pair_section
from paceline.reporting.sections import Section

A = [answer("a", [([1, 2, 3], 3, 4)]), answer("b", [([1, 2, 9], 2, 3)])]
B = [answer("a", [([1, 9, 9], 1, 2), ([3, 9], 1, 4)]), answer("b", [([1, 2, 9], 2, 3)])]


def section(**changes: Any) -> Section:
    run = {**RUN, **changes}
    return pair_section(("A", "B"), compare_traces(A, [replace(each, run=run) for each in B]))


def tiles(found: Section) -> dict[str, str]:
    return {tile.label: tile.value for tile in found.tiles}


def test_figures_and_what_the_runs_do_not_share() -> None:
    found = section(drafter={"origin": "other", "family": "dspark"})
    values = tiles(found)
    assert values["acceptance length A"].startswith("3.500 (") and values["acceptance length B"].startswith("2.333 (")
    assert (values["longer with B"], values["same text"], values["steps that differ"]) == ("0 of 1", "2 of 2", "1")
    assert [table.rows for table in found.tables if table.title == "What differs besides"] == [
        [["drafter.origin", "d", "other"], ["drafter.family", "dflash", "dspark"]]
    ]
    assert found.tables[0].rows == [
        ["a", "4.00", "2.00", "-2.00", "1 of 1", "same"],
        ["b", "3.00", "3.00", "+0.00", "0 of 1", "same"],
    ]


def test_speeds_are_compared_at_the_same_pace_alone() -> None:
    assert "speed B / A" in tiles(section())
    found = section(requests_at_once=8)
    assert "speed B / A" not in tiles(found)
    assert "Times of A and B do not compare" in found.notes[1]


def test_columns_say_how_each_came_to_a_token() -> None:
    drawn = draw_pair(compare_traces(A, B).pairs[0], most_steps=9)
    lanes = [(column.text, column.before.fate, column.after.fate, column.after.begins) for column in drawn.columns]
    assert lanes == [
        ("The", "bonus", "bonus", True),
        (" cat", "accepted", "accepted", True),
        (" sat", "accepted", "bonus", False),
        (" 12", "accepted", "accepted", True),
        ("{", "bonus", "bonus", False),
    ]
    ((place, before, after),) = drawn.rows
    assert (place, before.num_kept, after.num_kept, drawn.left_out) == (1, 3, 1, None)


def test_what_is_too_long_is_drawn_in_part() -> None:
    long = [answer("a", [([1, 2], 2, 3)] * 50)]
    other = [answer("a", [([1, 9], 1, 2), ([3, 9], 1, 1), ([2, 9], 1, 3)] * 25)]
    drawn = draw_pair(compare_traces(long, other).pairs[0], most_steps=5)
    assert len(drawn.columns) == 16 and drawn.said.endswith("; 16 of 151 common tokens are drawn")
    assert drawn.left_out is not None and drawn.left_out.startswith(f"{len(drawn.rows)} of ")
