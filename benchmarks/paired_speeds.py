"""Speeds of several modes on the same prompts, run alternately, and what to say of their ratios.

The unit is the prompt. Modes run there and back again (A-B-B-A), so that a machine that slows down slows all of them;
a prompt's speed pools its rounds, its ratio compares two modes on that prompt alone, and the table tells the median.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from paceline.evaluation import statistics
from paceline.trace.acceptance import AcceptanceSummary
from paceline.trace.step import StepRecord

NUM_RESAMPLES = 10_000


@dataclass(frozen=True)
class TimedRun:
    """One prompt in one mode.

    Attributes:
        token_ids: new tokens, at least 2.
        prefill_s: until the first of them.
        decode_s: from then to the last.
        records: steps, where the mode has any.
    """

    token_ids: tuple[int, ...]
    prefill_s: float
    decode_s: float
    records: tuple[StepRecord, ...] = ()


Mode = Callable[[Sequence[int]], TimedRun]
Runs = list[list[TimedRun]]  # per prompt, per round


def measure(
    modes: Mapping[str, Mode],
    prompts: Sequence[Sequence[int]],
    *,
    num_rounds: int,
    on_prompt: Callable[[int], None] = lambda _index: None,
) -> dict[str, Runs]:
    """Run every mode on every prompt, `num_rounds` times each, in an order that reverses from round to round.

    Args:
        modes: name to what runs a prompt.
        prompts: token ids of each.
        num_rounds: 2 gives A-B-B-A within each prompt; 1 gives A-B, then B-A on the next prompt.
        on_prompt: called with the index of each finished prompt.
    """
    runs: dict[str, Runs] = {name: [[] for _ in prompts] for name in modes}
    for index, prompt in enumerate(prompts):
        for round_index in range(num_rounds):
            names = list(modes)
            for name in names if (index + round_index) % 2 == 0 else reversed(names):
                runs[name][index].append(modes[name](prompt))
        on_prompt(index)
    return runs


def speeds(runs: Runs) -> list[float]:
    """Tokens per second of decoding for each prompt: tokens after the first, over all rounds."""
    return [sum(len(run.token_ids) - 1 for run in rounds) / sum(run.decode_s for run in rounds) for rounds in runs]


def ratios(runs: Runs, base: Runs) -> list[float]:
    """Speed over the base's speed, for each prompt."""
    return [ours / theirs for ours, theirs in zip(speeds(runs), speeds(base), strict=True)]


def speed_row(mode: str, runs: Runs, base: Runs) -> dict[str, object]:
    """A mode's row: median speed, median ratio with its bootstrap interval and spread, prefill, acceptance."""
    shares = ratios(runs, base)
    low, high = bootstrap_median(shares)
    p10, p90 = np.quantile(shares, [0.1, 0.9])
    row: dict[str, object] = {
        "mode": mode,
        "concurrency": 1,
        "tokens_per_second": float(np.median(speeds(runs))),
        "ratio_to_plain": float(np.median(shares)),
        "low": low,
        "high": high,
        "p10": float(p10),
        "p90": float(p90),
        "num_prompts": len(runs),
        "prefill_ms": 1e3 * float(np.median([run.prefill_s for rounds in runs for run in rounds])),
    }
    summary = acceptance(runs)
    return row | ({"acceptance_length": summary.acceptance_length} if summary.num_steps else {})


def acceptance(runs: Runs) -> AcceptanceSummary:
    """Acceptance over all steps of a mode."""
    return AcceptanceSummary.from_steps(record for rounds in runs for run in rounds for record in run.records)


def bootstrap_median(
    values: Sequence[float], *, num_resamples: int = NUM_RESAMPLES, seed: int = 0
) -> tuple[float, float]:
    """95 % percentile bootstrap interval of a median over prompts."""
    found = statistics.bootstrap_median(values, num_resamples=num_resamples, seed=seed)
    return found.low, found.high


def num_same_ids(runs: Runs, reference: Runs) -> int:
    """Prompts whose ids are the reference's in every round."""
    return sum(
        all(run.token_ids == rounds_of_reference[0].token_ids for run in (*rounds, *rounds_of_reference))
        for rounds, rounds_of_reference in zip(runs, reference, strict=True)
    )


def round_noise(runs: Runs) -> float | None:
    """Median over prompts of how far the rounds of a prompt lie apart, as a share of its speed; None for one round."""
    if any(len(rounds) < 2 for rounds in runs):
        return None
    apart = []
    for rounds in runs:
        each = speeds([[run] for run in rounds])
        apart.append((max(each) - min(each)) / float(np.median(each)))
    return float(np.median(apart))
