"""The result format: its keys are a promise to readers, its rows are made of whole passes alone."""

from __future__ import annotations

import json
from typing import Any

from tests.unit.benching.made import ONE, answer, failed, passed

from paceline.benching.records import Load, Pass
from paceline.benching.result import FORMAT, Figures, result_of, rows_of
from paceline.trace.acceptance import DraftTotals

FIGURES = Figures(["plain", "drafted"], percentiles=(50.0, 99.0), goodput_ms={"ttft": 400.0})
DRAFTING = DraftTotals(5, 35, 10, (5, 5), (5, 5))


def both(**changes: Any) -> list[Pass]:
    return [
        passed("plain", answer(0, total_s=2.0, first_s=0.5, delta_s=(0.5, 2.0)), failed(1), total_s=2.5),
        passed("drafted", answer(0, total_s=1.0, drafting=DRAFTING, **changes), answer(1), total_s=2.0),
    ]


def test_the_keys_of_a_result() -> None:
    found = result_of(both(), FIGURES, {"kind": "engines", "metadata": {"a": "b"}}, status="done", error=None)
    json.dumps(found, allow_nan=False)
    assert (found["format"], found["status"], found["base"], found["error"]) == (FORMAT, "done", "plain", None)
    assert FORMAT == "paceline-bench-1" and found["metadata"] == {"a": "b"}
    plain, drafted = found["rows"]  # type: ignore[misc]
    assert (
        set(plain)
        == set(drafted)
        == {
            *(
                "setup",
                "concurrency",
                "request_rate",
                "burstiness",
                "num_rounds",
                "num_requests",
                "num_failed",
                "errors",
            ),
            *("finish_reasons", "num_output_tokens", "total_s", "requests_per_second", "output_tokens_per_second"),
            *("prompt_tokens_per_second", "goodput_requests_per_second", "ttft_ms", "tpot_ms", "itl_ms", "e2el_ms"),
            *(
                "tokens_per_delta",
                "base",
                "speed_up",
                "decode_speed_up",
                "total_ratio",
                "num_identical",
                "num_compared",
            ),
            *("drafting", "drafting_source"),
        }
    )
    assert (plain["num_requests"], plain["num_failed"], plain["errors"]) == (2, 1, {"status 500": 1})
    assert plain["itl_ms"]["mean"] == 1500.0 and plain["speed_up"] is None and plain["base"] is None
    assert set(plain["ttft_ms"]) == {"mean", "median", "std", "p50", "p99", "num_values"}
    assert plain["goodput_requests_per_second"] == 0.0
    assert drafted["speed_up"]["estimate"] == 2.0 and drafted["speed_up"]["num_units"] == 1
    assert drafted["ttft_ms"] is None and drafted["prompt_tokens_per_second"] is None
    assert drafted["drafting"]["acceptance_length"] == 3.0 and drafted["drafting_source"] == "answers"
    (request, broken, *_) = found["requests"]  # type: ignore[misc]
    assert (request["ttft_ms"], request["e2el_ms"], request["itl_ms"]) == (500.0, 2000.0, [1500.0])
    assert request["counts"] is True and broken["error"] == "status 500"
    (comparison,) = found["comparisons"]  # type: ignore[misc]
    assert (comparison["setup"], comparison["base"], comparison["concurrency"]) == ("drafted", "plain", 1)


def test_passes_that_are_not_whole_are_kept_and_do_not_count() -> None:
    cut = Pass("drafted", ONE, 0, [answer(0)])
    found = result_of([both()[0], cut], FIGURES, {}, status="interrupted", error=None)
    assert [row["setup"] for row in found["rows"]] == ["plain"]  # type: ignore[attr-defined]
    assert [each["counts"] for each in found["requests"]] == [True, True, False]  # type: ignore[attr-defined]
    assert found["comparisons"] == []


def test_a_set_up_of_which_nothing_came_has_no_row() -> None:
    assert [row.setup for row in rows_of([passed("plain", failed(0)), *both()[1:]], FIGURES)] == ["drafted"]


def test_loads_have_rows_of_their_own() -> None:
    four = Load(4)
    passes = [*both(), passed("plain", answer(), load=four), passed("drafted", answer(), load=four)]
    assert [(row.setup, row.load) for row in rows_of(passes, FIGURES)] == [
        ("plain", ONE),
        ("drafted", ONE),
        ("plain", four),
        ("drafted", four),
    ]


def test_counters_stand_in_where_answers_tell_nothing() -> None:
    passes = [both()[0], passed("drafted", answer(), drafting=DraftTotals(4, 8, 2, (2,), None))]
    row = rows_of(passes, FIGURES)[1].to_dict(FIGURES)
    assert row["drafting_source"] == "counters" and row["drafting"]["per_position"] == [0.5]  # type: ignore[index]
    silent = rows_of([both()[0], passed("drafted", answer(), drafting=DraftTotals())], FIGURES)[1]
    assert silent.drafting is None and silent.drafting_source is None


def test_two_drafters_are_compared_with_each_other_too() -> None:
    figures = Figures(["plain", "one", "two"])
    passes = [passed(name, answer(total_s=time_s)) for name, time_s in (("plain", 4.0), ("one", 2.0), ("two", 1.0))]
    found = result_of(passes, figures, {}, status="done", error=None)["comparisons"]
    ratios = {(each["setup"], each["base"]): each["speed_up"]["estimate"] for each in found}  # type: ignore[attr-defined]
    assert ratios == {("one", "plain"): 2.0, ("two", "plain"): 4.0, ("two", "one"): 2.0}
