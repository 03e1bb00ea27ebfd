"""What Prometheus is told of an engine: every number is one that the engine counted itself, read at the scrape.

The names that dashboards know from other servers come first, with the same suffixes and labels:

    acceptance length   1 + rate(spec_decode_num_accepted_tokens_total) / rate(spec_decode_num_drafts_total)
    acceptance rate     rate(spec_decode_num_accepted_tokens_total) / rate(spec_decode_num_draft_tokens_total)
    position i          rate(spec_decode_num_accepted_tokens_per_pos_total{position="i"})
                        / rate(spec_decode_num_drafts_total)
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from paceline.engine.alarm import RuleState
from paceline.engine.counters import EngineStats

PREFIX = "paceline:"


class _Number(NamedTuple):
    """One number of an engine; Prometheus's own library puts `_total` behind the names of counters."""

    name: str
    says: str
    value: Callable[[EngineStats], float]


_COUNTERS = (
    _Number(
        "spec_decode_num_drafts",
        "Draft blocks that were judged, counted once per request taking part in a step.",
        lambda stats: stats.drafted_per_position[0] if stats.drafted_per_position else 0,
    ),
    _Number("spec_decode_num_draft_tokens", "Draft tokens that were judged.", lambda stats: stats.num_draft_tokens),
    _Number(
        "spec_decode_num_accepted_tokens",
        "Draft tokens that were kept and delivered, the target's own bonus tokens not among them.",
        lambda stats: stats.num_accepted,
    ),
    _Number(
        "prompt_tokens",
        "Prompt tokens that were run, those found in the prefix cache not among them.",
        lambda stats: stats.num_prefill_tokens,
    ),
    _Number("generation_tokens", "Tokens that were delivered.", lambda stats: stats.num_output_tokens),
    _Number(
        "num_preemptions", "How often a request stepped back for lack of blocks.", lambda stats: stats.num_preemptions
    ),
    _Number(
        "prefix_cache_queries",
        "Tokens of admitted requests that were looked for in the prefix cache.",
        lambda stats: stats.num_queried_tokens,
    ),
    _Number(
        "prefix_cache_hits",
        "Tokens of admitted requests that were found in the prefix cache.",
        lambda stats: stats.num_hit_tokens,
    ),
    _Number(
        "prefix_cache_evictions", "Cached blocks that were given up for others.", lambda stats: stats.num_evictions
    ),
    _Number("decode_steps", "Decode steps of the whole batch.", lambda stats: stats.num_steps),
    _Number(
        "decode_step_seconds",
        "Wall time of all decode steps in seconds.",
        lambda stats: stats.mean_step_ms * stats.num_steps / 1000,
    ),
    _Number(
        "impossible_drafts",
        "Drafts that their own distribution gave probability 0; anything but 0 is a bug of the engine.",
        lambda stats: stats.num_impossible_drafts,
    ),
    _Number(
        "spoiled_blocks",
        "Blocks that were run again without drafts because a draft overflowed.",
        lambda stats: stats.num_spoiled_blocks,
    ),
    _Number(
        "held_back_draft_tokens",
        "Drafts that were drawn but not judged, because too little was expected of them.",
        lambda stats: stats.num_held_back,
    ),
    _Number(
        "drafting_switched_off",
        "How often the adaptive draft length stopped drafting because it did not pay.",
        lambda stats: stats.num_switched_off,
    ),
    _Number(
        "undrafted_requests",
        "Requests that went on without drafts because the drafter has fewer positions than they needed.",
        lambda stats: stats.num_undrafted,
    ),
    _Number(
        "queue_refusals",
        "Requests that were refused because too many waited.",
        lambda stats: stats.num_queue_refusals,
    ),
    _Number(
        "deadlines_passed", "Requests that ended because their time was up.", lambda stats: stats.num_deadlines_passed
    ),
    _Number(
        "numeric_errors",
        "Requests that ended because the target's logits held NaN or infinity.",
        lambda stats: stats.num_numeric_errors,
    ),
    _Number("dead_ends", "Requests that ended because their rules left no token.", lambda stats: stats.num_dead_ends),
)

_GAUGES = (
    _Number("num_requests_running", "Requests that are in slots now.", lambda stats: stats.num_running),
    _Number("num_requests_waiting", "Requests that wait for a slot now.", lambda stats: stats.num_waiting),
    _Number(
        "kv_cache_usage_perc",
        "Share of the cache's blocks that requests hold now, from 0 to 1.",
        lambda stats: stats.num_used_blocks / max(1, stats.num_blocks),
    ),
    _Number("draft_tokens_per_block", "Drafts that the next block gets.", lambda stats: stats.num_drafts),
)


def engine_families(stats: EngineStats | None, labels: Mapping[str, str], *, num_draft_tokens: int) -> Iterator[Metric]:
    """All families of one engine.

    Args:
        stats: its counters; None while none runs, and then only that is said.
        labels: put on every sample.
        num_draft_tokens: K; positions 0 to K - 1 are always there, whether or not they were drafted.
    """
    running = GaugeMetricFamily(f"{PREFIX}engine_running", "1 while an engine runs, else 0.", labels=list(labels))
    running.add_metric(list(labels.values()), int(stats is not None))
    yield running
    if stats is None:
        return
    for number in _COUNTERS:
        counter = CounterMetricFamily(PREFIX + number.name, number.says, labels=list(labels))
        counter.add_metric(list(labels.values()), number.value(stats))
        yield counter
    for number in _GAUGES:
        gauge = GaugeMetricFamily(PREFIX + number.name, number.says, labels=list(labels))
        gauge.add_metric(list(labels.values()), number.value(stats))
        yield gauge
    drafted = _padded(stats.drafted_per_position, num_draft_tokens)
    accepted = _padded(stats.accepted_per_position, num_draft_tokens)
    yield _per_position(
        "spec_decode_num_accepted_tokens_per_pos",
        "Draft tokens that were kept and delivered, by their position in the block.",
        accepted,
        labels,
    )
    yield _per_position(
        "spec_decode_num_draft_tokens_per_pos",
        "Draft tokens that were judged, by their position in the block.",
        drafted,
        labels,
    )
    yield _accepted_per_step(drafted, accepted, labels)
    yield from _alarm({"length": stats.alarm.length, "first_position": stats.alarm.first_position}, labels)


def _padded(counts: Sequence[int], length: int) -> list[int]:
    return [*counts, *[0] * (length - len(counts))]


def _per_position(name: str, says: str, counts: Sequence[int], labels: Mapping[str, str]) -> CounterMetricFamily:
    family = CounterMetricFamily(PREFIX + name, says, labels=[*labels, "position"])
    for position, count in enumerate(counts):
        family.add_metric([*labels.values(), str(position)], count)
    return family


def _accepted_per_step(
    drafted: Sequence[int], accepted: Sequence[int], labels: Mapping[str, str]
) -> HistogramMetricFamily:
    """The histogram that the per-position counts imply: a block kept at most j drafts unless position j was kept.

    Read from the deltas of requests it would miss steps, as those of a slow reader are joined.
    """
    num_blocks = drafted[0] if drafted else 0
    buckets = [(str(float(kept)), float(num_blocks - count)) for kept, count in enumerate([*accepted, 0])]
    family = HistogramMetricFamily(
        f"{PREFIX}accepted_tokens_per_step",
        "Draft tokens that one block kept and delivered; blocks without drafts don't count.",
        labels=list(labels),
    )
    family.add_metric(list(labels.values()), [*buckets, ("+Inf", float(num_blocks))], float(sum(accepted)))
    return family


def _alarm(rules: Mapping[str, RuleState], labels: Mapping[str, str]) -> Iterator[Metric]:
    names, values = [*labels, "rule"], list(labels.values())
    raised = GaugeMetricFamily(
        f"{PREFIX}drafting_alarm_raised", "1 while drafting earns less than this rule asks for, else 0.", labels=names
    )
    mean = GaugeMetricFamily(
        f"{PREFIX}drafting_alarm_value",
        "What the rule looks at, over the last 200 blocks that it counts; absent before there were as many.",
        labels=names,
    )
    limit = GaugeMetricFamily(
        f"{PREFIX}drafting_alarm_limit",
        "What the value must not fall below; absent where nothing is known.",
        labels=names,
    )
    episodes = CounterMetricFamily(f"{PREFIX}drafting_alarm_episodes", "How often the rule has tripped.", labels=names)
    for rule, state in rules.items():
        raised.add_metric([*values, rule], int(state.is_raised))
        episodes.add_metric([*values, rule], state.num_episodes)
        for family, value in ((mean, state.value), (limit, state.limit)):
            if value is not None:
                family.add_metric([*values, rule], value)
    yield from (raised, episodes)
    yield from (family for family in (mean, limit) if family.samples)


def histogram_family(
    name: str, says: str, bounds: Sequence[float], counts: Iterable[int], total: float, labels: Mapping[str, str]
) -> HistogramMetricFamily:
    """A histogram of counts that were kept elsewhere.

    Args:
        name: without the prefix.
        says: what it is, in a sentence.
        bounds: upper ends of its buckets, ascending; one without an end follows.
        counts: observations in each, the endless one included.
        total: sum of all observations.
        labels: put on every sample.
    """
    ends = [*(str(float(bound)) for bound in bounds), "+Inf"]
    buckets = list(zip(ends, (float(count) for count in itertools.accumulate(counts)), strict=True))
    family = HistogramMetricFamily(PREFIX + name, says, labels=list(labels))
    family.add_metric(list(labels.values()), buckets, total)
    return family
