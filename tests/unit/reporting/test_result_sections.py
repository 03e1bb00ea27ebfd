"""Results are shown as they stand in their files, whatever is missing in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.unit.reporting.test_html import page_of

from paceline.reporting.inputs import ResultInput
from paceline.reporting.result_sections import result_section
from paceline.reporting.sections import Section

LATENCY = {"mean": 10.0, "median": 9.0, "std": 1.0, "p99": 20.0, "num_values": 3}
INTERVAL = {"estimate": 1.5, "low": 1.2, "high": 1.9, "confidence": 0.95, "num_units": 8}
PLAIN = {
    "setup": "plain",
    "concurrency": 1,
    "request_rate": None,
    "num_requests": 8,
    "num_failed": 1,
    "requests_per_second": 2.0,
    "output_tokens_per_second": 100.0,
    "ttft_ms": LATENCY,
    "tpot_ms": LATENCY,
    "itl_ms": None,
    "e2el_ms": LATENCY,
    "drafting": None,
    "speed_up": None,
    "decode_speed_up": None,
}
DRAFTED = {
    **PLAIN,
    "setup": "dflash2",
    "num_failed": 0,
    "output_tokens_per_second": 150.0,
    "speed_up": INTERVAL,
    "decode_speed_up": INTERVAL,
    "num_identical": 7,
    "num_compared": 8,
    "drafting": {"num_steps": 40, "acceptance_length": 2.5, "draft_acceptance_rate": 0.25, "per_position": [0.7, 0.4]},
}
BENCH = {
    "format": "paceline-bench-1",
    "command": "paceline bench",
    "machine": {"cores": 2},
    "status": "done",
    "base": "plain",
    "rows": [PLAIN, DRAFTED, {**PLAIN, "concurrency": 4}, {**DRAFTED, "concurrency": 4, "request_rate": 2.5}],
    "comparisons": [{"setup": "dflash2", "base": "plain", "concurrency": 1, "speed_up": INTERVAL, "total_ratio": 1.5}],
    "requests": [{"setup": "plain"}],
}
EVALUATE = {
    "target": "t",
    "drafter": "d",
    "sets": [
        {
            "set": "first",
            "num_prompts": 24,
            "acceptance_length": 2.5,
            "low": 2.0,
            "high": 3.0,
            "per_position": [0.75, 0.5],
            "conditional": [0.75, None],
            "histogram": [1, 1, 2],
            "temperature": 0.0,
        }
    ],
}


def section(values: dict[str, Any], kind: str = "bench") -> Section:
    return result_section(ResultInput(Path("result.json"), kind, values))


def cells(found: Section, title: str) -> list[list[str]]:
    (table,) = [table for table in found.tables if table.title == title]
    return table.rows


def test_a_bench() -> None:
    found = section(BENCH)
    assert found.notes == ["2 requests failed; latencies are of the others."]
    names = ["plain, 1 at once", "dflash2, 1 at once", "plain, 4 at once", "dflash2, 4 at once, 2.5/s"]
    assert [row[0] for row in cells(found, "Throughput")] == names
    assert cells(found, "Throughput")[1][4:] == ["150.0", "-", "1.50 (1.20 to 1.90)", "1.50 (1.20 to 1.90)", "7 of 8"]
    assert cells(found, "Latency, ms")[0][:4] == ["plain, 1 at once", "10.00", "9.00", "20.00"]
    assert [row[0] for row in cells(found, "Drafting")] == [names[1], names[3]]
    assert cells(found, "Paired comparisons") == [
        ["dflash2 / plain, 1 at once", "1.50 (1.20 to 1.90)", "-", "8", "1.500", "-"]
    ]
    (speed, lengths) = found.bars
    assert next((each.label, each.value, each.low) for each in speed.estimates) == (names[1], 1.5, 1.2)
    assert [each.value for each in lengths.estimates] == [2.5, 2.5]
    assert dict(found.lines[0].series)["plain"] == [(1.0, 100.0), (4.0, 100.0)]
    assert ("machine.cores", "2") in found.provenance[0][1]
    assert not any(name.startswith(("rows", "requests")) for name, _ in found.provenance[0][1])
    _, page = page_of([found])
    assert page.faults == []


def test_figures_of_few_values_say_how_few() -> None:
    few = {**DRAFTED, "speed_up": {**INTERVAL, "num_units": 4}, "tokens_per_delta": 1.8}
    found = section({**BENCH, "rows": [PLAIN, few]})
    assert found.notes[-1] == "An interval over 4 prompts says little; take 8 or more."
    assert [row[-2:] for row in cells(found, "Latency, ms")] == [["3", "-"], ["3", "1.80"]]


def test_a_bench_that_did_not_end_says_so() -> None:
    assert section({**BENCH, "status": "failed", "error": "no\x1b room"}).notes[0].endswith("failed: no\\x1b room")


def test_an_evaluation() -> None:
    found = section(EVALUATE, "evaluate")
    assert cells(found, "Sets")[0] == ["first", "24", "-", "-", "2.500 (2.000 to 3.000)", "-", "0.00"]
    assert [[each.value for each in figure.estimates] for figure in found.bars] == [
        [2.5],
        [0.75, 0.5],
        [0.75, None],
        [1.0, 1.0, 2.0],
    ]
    _, page = page_of([found])
    assert page.faults == [] and len(page.all("svg", role="img")) == 4


@pytest.mark.parametrize("kind", ["bench", "evaluate"])
def test_values_of_another_kind_are_dashes(kind: str) -> None:
    rows = "rows" if kind == "bench" else "sets"
    values = dict(BENCH if kind == "bench" else EVALUATE)
    junk: list[Any] = [None, "text", [1, "x"], {"a": 1}, True, 1e400]
    keys = {key for row in values[rows] for key in row}  # type: ignore[attr-defined]
    for thing in junk:
        found = section({**values, rows: [dict.fromkeys(keys, thing)], "status": thing, "base": thing}, kind)
        _, page = page_of([found])
        assert page.faults == []
    section({**values, rows: [{}]}, kind)
