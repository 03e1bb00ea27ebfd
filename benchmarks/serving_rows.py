"""From closed loops to rows: throughput in all, speed per request, waiting times, and ratios with their intervals.

Modes and rounds answer the same prompts, so a ratio compares a prompt with itself; its rounds are pooled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from benchmarks.paired_speeds import bootstrap_median
from benchmarks.peers.closed_loop import TimedAnswer

from paceline.trace.acceptance import AcceptanceSummary
from paceline.trace.step import StepRecord


@dataclass(frozen=True)
class Loop:
    """One closed loop of one mode.

    Attributes:
        answers: one per prompt.
        records: all steps, where the mode has any.
    """

    answers: Sequence[TimedAnswer]
    records: Sequence[StepRecord] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens of all requests."""
        return sum(len(answer.token_ids) for answer in self.answers)

    @property
    def total_s(self) -> float:
        """From the first request's arrival to the last token."""
        return max(answer.last_s for answer in self.answers) - min(answer.added_s for answer in self.answers)

    @property
    def decode_s(self) -> float:
        """Time in which some request was between its first token and its last: the prompt passes that nobody's
        decoding waited behind are left out."""
        covered, end = 0.0, -np.inf
        for first, last in sorted((answer.first_s, answer.last_s) for answer in self.answers):
            covered += max(0.0, last - max(first, end))
            end = max(end, last)
        return covered


def tokens_per_second(loops: Sequence[Loop]) -> float:
    """All tokens over all time, prompt passes included."""
    return sum(loop.num_tokens for loop in loops) / sum(loop.total_s for loop in loops)


def decode_tokens_per_second(loops: Sequence[Loop]) -> float:
    """Tokens after each request's first, over the time of decoding."""
    num_tokens = sum(loop.num_tokens - len(loop.answers) for loop in loops)
    return num_tokens / sum(loop.decode_s for loop in loops)


def prompt_speeds(loops: Sequence[Loop]) -> list[float]:
    """Tokens per second that each prompt's reader sees after the first token, over all rounds."""
    return [
        sum(len(answer.token_ids) - 1 for answer in rounds) / sum(answer.last_s - answer.first_s for answer in rounds)
        for rounds in zip(*(loop.answers for loop in loops), strict=True)
    ]


def ratio(loops: Sequence[Loop], base: Sequence[Loop]) -> tuple[float, float, float]:
    """Median over prompts of speed over the base's speed, and its 95 % bootstrap interval."""
    shares = [ours / theirs for ours, theirs in zip(prompt_speeds(loops), prompt_speeds(base), strict=True)]
    return float(np.median(shares)), *bootstrap_median(shares)


def serving_row(
    mode: str, concurrency: int, loops: Sequence[Loop], plain: Sequence[Loop], peer: Sequence[Loop] | None
) -> dict[str, object]:
    """What a mode did at one concurrency, beside plain decoding and, if it ran, the peer."""
    answers = [answer for loop in loops for answer in loop.answers]
    tpot_ms = [1e3 * (one.last_s - one.first_s) / (len(one.token_ids) - 1) for one in answers]
    ttft_ms = [1e3 * (one.first_s - one.added_s) for one in answers]
    row: dict[str, object] = {
        "mode": mode,
        "concurrency": concurrency,
        "tokens_per_second": tokens_per_second(loops),
        "decode_tokens_per_second": decode_tokens_per_second(loops),
        "prompt_tokens_per_second": float(np.median(prompt_speeds(loops))),
        "tpot_ms_p50": float(np.quantile(tpot_ms, 0.5)),
        "tpot_ms_p99": float(np.quantile(tpot_ms, 0.99)),
        "ttft_ms_p50": float(np.quantile(ttft_ms, 0.5)),
        "ttft_ms_p99": float(np.quantile(ttft_ms, 0.99)),
    }
    row |= dict(zip(("ratio_to_plain", "low", "high"), ratio(loops, plain), strict=True))
    row["total_ratio_to_plain"] = tokens_per_second(loops) / tokens_per_second(plain)
    if peer is not None:
        row |= dict(zip(("ratio_to_vllm", "vllm_low", "vllm_high"), ratio(loops, peer), strict=True))
        row["total_ratio_to_vllm"] = tokens_per_second(loops) / tokens_per_second(peer)
    row["num_prompts"] = len(loops[0].answers)
    summary = AcceptanceSummary.from_steps(record for loop in loops for record in loop.records)
    return row | ({"acceptance_length": summary.acceptance_length} if summary.num_steps else {})


def round_noise(loops: Sequence[Loop]) -> float | None:
    """How far the rounds' throughputs lie apart, as a share of the slowest; None for a single round."""
    each = [tokens_per_second([loop]) for loop in loops]
    return max(each) / min(each) - 1 if len(each) > 1 else None
