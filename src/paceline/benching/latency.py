"""What times and counts of answers say: latencies, throughput, goodput. Failed requests are counted and left out.

    TTFT   time to first token   from when a request was due to its first delta with output
    E2EL   end-to-end latency    from then to the end of its answer
    TPOT   time per output token (E2EL - TTFT) / (n - 1) of an answer of n tokens; answers of one token have none
    ITL    inter-token latency   gaps between neighbouring deltas, of all answers together

A delta of speculative decoding holds several tokens, and so do chunks of a server that sends them in intervals. ITL is
what a reader sees as pauses; `tokens_per_delta` stands beside it. Percentiles are numpy's, linear between neighbours.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, get_args

import numpy as np

from paceline.benching.records import AnswerRecord, Pass

Metric = Literal["ttft", "tpot", "itl", "e2el"]
GoodputMetric = Literal["ttft", "tpot", "e2el"]
METRICS: tuple[Metric, ...] = get_args(Metric)


def ttft_s(record: AnswerRecord) -> float | None:
    """Time to first token of an answer; None of one that came whole."""
    return record.first_s


def tpot_s(record: AnswerRecord) -> float | None:
    """Time per output token after the first; None of fewer than two tokens or deltas, or where nobody says how many."""
    if record.first_s is None or record.num_tokens is None or record.num_tokens < 2 or record.came_at_once:
        return None
    return (record.total_s - record.first_s) / (record.num_tokens - 1)


def e2el_s(record: AnswerRecord) -> float | None:
    """End-to-end latency."""
    return record.total_s


def itl_s(record: AnswerRecord) -> list[float]:
    """Gaps between neighbouring deltas; one fewer than there are deltas."""
    return [after - before for before, after in zip(record.delta_s, record.delta_s[1:], strict=False)]


def values_of(metric: Metric, records: Iterable[AnswerRecord]) -> list[float]:
    """All values of a metric in seconds, of answers that are whole."""
    whole = [record for record in records if record.is_whole]
    if metric == "itl":
        return [gap for record in whole for gap in itl_s(record)]
    read = {"ttft": ttft_s, "tpot": tpot_s, "e2el": e2el_s}[metric]
    return [value for value in map(read, whole) if value is not None]


def percentile_name(percentile: float) -> str:
    """Key of a percentile: p99, p99.9."""
    return f"p{percentile:g}"


def summary_ms(seconds: Sequence[float], percentiles: Sequence[float]) -> dict[str, float | int] | None:
    """Mean, median, standard deviation, percentiles and number of values, in milliseconds; None without any."""
    if not seconds:
        return None
    array = 1e3 * np.asarray(seconds, dtype=np.float64)
    found: dict[str, float | int] = {
        "mean": float(array.mean()),
        "median": float(np.median(array)),
        "std": float(array.std()),
    }
    found |= {percentile_name(each): float(np.percentile(array, each)) for each in percentiles}
    return found | {"num_values": len(array)}


def tokens_per_delta(records: Iterable[AnswerRecord]) -> float | None:
    """Tokens over deltas, of answers that were streamed and say how many tokens they have."""
    counted = [record for record in records if record.is_whole and record.delta_s and record.num_tokens is not None]
    num_deltas = sum(len(record.delta_s) for record in counted)
    return sum(record.num_tokens or 0 for record in counted) / num_deltas if num_deltas else None


def is_good(record: AnswerRecord, limits_ms: Mapping[GoodputMetric, float]) -> bool:
    """Whether an answer is whole and within every limit. What an answer of one token does not have is within it."""
    if not record.is_whole:
        return False
    read = {"ttft": ttft_s, "tpot": tpot_s, "e2el": e2el_s}
    for metric, limit_ms in limits_ms.items():
        value = read[metric](record)
        if value is None and not (metric == "tpot" and record.num_tokens is not None):
            return False  # nobody can tell
        if value is not None and 1e3 * value > limit_ms:
            return False
    return True


def throughput(passes: Sequence[Pass], limits_ms: Mapping[GoodputMetric, float]) -> dict[str, float | None]:
    """Requests, tokens and good requests per second: all of all passes over all their time.

    Tokens are None where an answer does not say how many it has.
    """
    seconds = sum(each.total_s for each in passes)
    answers = [answer for each in passes for answer in each.answers]
    return {
        "total_s": seconds,
        "requests_per_second": len(answers) / seconds if seconds else None,
        "output_tokens_per_second": _rate([answer.num_tokens for answer in answers], seconds),
        "prompt_tokens_per_second": _rate([answer.num_prompt_tokens for answer in answers], seconds),
        "goodput_requests_per_second": (
            sum(is_good(answer, limits_ms) for answer in answers) / seconds if limits_ms and seconds else None
        ),
    }


def _rate(counts: Sequence[int | None], seconds: float) -> float | None:
    known = [count for count in counts if count is not None]
    return sum(known) / seconds if seconds and known and len(known) == len(counts) else None
