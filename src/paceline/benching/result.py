"""The result of a bench, `paceline-bench-1`: one JSON object, with a row per set-up and load, and all requests.

`docs/benchmarking.md` has the format key by key. A reader refuses a `format` that it does not know; keys may be added.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from paceline.benching.comparing import Comparison, compare
from paceline.benching.latency import (
    METRICS,
    GoodputMetric,
    itl_s,
    summary_ms,
    throughput,
    tokens_per_delta,
    tpot_s,
    values_of,
)
from paceline.benching.records import AnswerRecord, Load, Pass
from paceline.trace.acceptance import DraftTotals

FORMAT = "paceline-bench-1"
Status = Literal["done", "interrupted", "failed"]


@dataclass(frozen=True)
class Figures:
    """How figures are made of passes.

    Attributes:
        setups: names, the base of all ratios first.
        percentiles: of latencies, besides mean and median.
        goodput_ms: limits that a good request keeps; none counts no goodput.
        expects_identity: greedy: whether answers are the base's is told.
    """

    setups: Sequence[str]
    percentiles: Sequence[float] = (99.0,)
    goodput_ms: Mapping[GoodputMetric, float] = field(default_factory=dict)
    expects_identity: bool = True


@dataclass(frozen=True)
class Row:
    """One set-up at one load.

    Attributes:
        setup: which.
        load: at what.
        passes: that are whole.
        drafting: of all answers; None where nothing drafted, or nobody tells.
        drafting_source: "answers", which tell of themselves, or "counters" of the server, where others may add.
        beside_base: how it compares with the base; None for the base itself.
    """

    setup: str
    load: Load
    passes: Sequence[Pass]
    drafting: DraftTotals | None
    drafting_source: Literal["answers", "counters"] | None
    beside_base: Comparison | None

    def to_dict(self, figures: Figures) -> dict[str, object]:
        """As plain JSON values."""
        records = [record for each in self.passes for record in each.records]
        failed = [record.error for record in records if record.error is not None]
        found: dict[str, object] = {
            "setup": self.setup,
            "concurrency": self.load.concurrency,
            "request_rate": self.load.request_rate,
            "burstiness": self.load.burstiness if self.load.request_rate is not None else None,
            "num_rounds": len(self.passes),
            "num_requests": len(records),
            "num_failed": len(failed),
            "errors": dict(Counter(failed).most_common(10)),
            "finish_reasons": dict(Counter(str(each.finish_reason) for each in records if each.is_whole)),
            "num_output_tokens": _sum([record.num_tokens for record in records if record.is_whole]),
            **throughput(self.passes, figures.goodput_ms),
        }
        for metric in METRICS:
            found[f"{metric}_ms"] = summary_ms(values_of(metric, records), figures.percentiles)
        found["tokens_per_delta"] = tokens_per_delta(records)
        beside = self.beside_base
        found["base"] = None if beside is None else beside.base
        for name in ("speed_up", "decode_speed_up", "total_ratio", "num_identical", "num_compared"):
            found[name] = None if beside is None else beside.to_dict()[name]
        found["drafting"] = None if self.drafting is None else self.drafting.to_dict()
        found["drafting_source"] = self.drafting_source
        return _plain(found)


def rows_of(passes: Sequence[Pass], figures: Figures) -> list[Row]:
    """A row for each set-up and load of which at least one pass is whole and has an answer."""
    return [
        _row(of_setup, of_base, figures)
        for load in dict.fromkeys(each.load for each in passes)
        for of_base in [_whole(passes, figures.setups[0], load)]
        for of_setup in [_whole(passes, name, load) for name in figures.setups]
        if any(each.answers for each in of_setup)
    ]


def comparisons_of(passes: Sequence[Pass], figures: Figures) -> list[Comparison]:
    """Every set-up beside every one before it, at every load."""
    found = [
        compare(_whole(passes, name, load), _whole(passes, base, load), expects_identity=figures.expects_identity)
        for load in dict.fromkeys(each.load for each in passes)
        for base, name in itertools.combinations(figures.setups, 2)
    ]
    return [each for each in found if each is not None]


def result_of(
    passes: Sequence[Pass], figures: Figures, about: Mapping[str, object], *, status: Status, error: str | None
) -> dict[str, object]:
    """The whole result.

    Args:
        passes: all that were begun.
        figures: how figures are made.
        about: what was run: `kind`, `date`, `command`, `versions`, `machine`, `settings`, `setups`, `prompts`,
            `metadata`.
        status: how the measurement ended.
        error: why it failed.
    """
    return {
        "format": FORMAT,
        **about,
        "status": status,
        "error": error,
        "base": figures.setups[0],
        "rows": [row.to_dict(figures) for row in rows_of(passes, figures)],
        "comparisons": [_comparison(each) for each in comparisons_of(passes, figures)],
        "requests": [_request(each, record) for each in passes for record in each.records],
    }


def _row(of_setup: Sequence[Pass], of_base: Sequence[Pass], figures: Figures) -> Row:
    answers = [answer for each in of_setup for answer in each.answers]
    told = [answer.drafting for answer in answers if answer.drafting is not None]
    counted = [each.drafting for each in of_setup if each.drafting is not None]
    drafting: DraftTotals | None = None
    source: Literal["answers", "counters"] | None = None
    if told and sum(each.num_steps for each in told):
        drafting, source = sum(told, DraftTotals()), "answers"
    elif counted and len(counted) == len(of_setup) and sum(each.num_steps for each in counted):
        drafting, source = sum(counted, DraftTotals()), "counters"
    name = of_setup[0].setup
    beside = None
    if name != figures.setups[0]:
        beside = compare(of_setup, of_base, expects_identity=figures.expects_identity)
    return Row(name, of_setup[0].load, of_setup, drafting, source, beside)


def _whole(passes: Sequence[Pass], name: str, load: Load) -> list[Pass]:
    return [each for each in passes if each.is_whole and each.setup == name and each.load == load]


def _comparison(found: Comparison) -> dict[str, object]:
    values = found.to_dict()
    load = values.pop("load")
    assert isinstance(load, dict)
    return _plain({"setup": found.setup, "base": found.base, **load, **values})


def _request(of_pass: Pass, record: AnswerRecord) -> dict[str, object]:
    """One request as it is written; its times in milliseconds, from when it was due."""
    per_token = tpot_s(record)
    return _plain(
        {
            "setup": of_pass.setup,
            "concurrency": of_pass.load.concurrency,
            "request_rate": of_pass.load.request_rate,
            "round": of_pass.round_index,
            "counts": of_pass.is_whole,
            "index": record.index,
            "prompt_id": record.prompt_id,
            "due_ms": _ms(record.due_s),
            "sent_ms": _ms(record.sent_s),
            "ttft_ms": None if record.first_s is None else _ms(record.first_s),
            "tpot_ms": None if per_token is None else _ms(per_token),
            "e2el_ms": _ms(record.total_s),
            "itl_ms": [_ms(gap) for gap in itl_s(record)],
            "delta_tokens": None if record.delta_tokens is None else list(record.delta_tokens),
            "num_deltas": len(record.delta_s),
            "num_prompt_tokens": record.num_prompt_tokens,
            "num_output_tokens": record.num_tokens,
            "finish_reason": record.finish_reason,
            "output_sha256": record.output_sha256,
            "drafting": None if record.drafting is None else record.drafting.to_dict(),
            "error": record.error,
        }
    )


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 4)


def _sum(counts: Sequence[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


def _plain(values: Mapping[str, object]) -> dict[str, object]:
    """NaN and infinity, which JSON does not have, as None."""
    return {key: _json_value(value) for key, value in values.items()}


def _json_value(value: object) -> object:
    if isinstance(value, Mapping):
        return _plain(value)
    if isinstance(value, list | tuple):
        return [_json_value(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
