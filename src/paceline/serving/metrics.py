"""`GET /metrics`: what the engine counts, read at the scrape, and how long callers waited, measured as deltas go by.

Nothing is global: two servers in one process count apart. A server's metrics belong to the event loop that serves it.

How times are measured, from the arrival of a request on:

    time to first token    until the first delta with a token
    inter-token latency    between deltas: n tokens that come after g seconds are n observations of g / n
    time per output token  from the first to the last token, by the tokens after the first
    end to end             until the answer was complete

What is observed per request describes whole answers, those that ended by stop, length or tool_calls: requests that were
refused would make a server look fast, and those whose client left say nothing of it.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from paceline.engine.counters import EngineStats
from paceline.engine.request import RequestDelta
from paceline.serving.engine_families import PREFIX, engine_families, histogram_family

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"  # of the text format that every Prometheus reads
WHOLE_ENDS = frozenset({"stop", "length", "tool_calls"})
_ENDS = ("stop", "length", "tool_calls", "abort", "error")

_SHORT_SECONDS = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
_LONG_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1800)
_TOKENS = (*(digit * 10**power for power in range(6) for digit in (1, 2, 5)), 10**6)


class _Histogram:
    """Counts per bucket. Prometheus's own class looks through all buckets, once for each of equal observations."""

    def __init__(self, name: str, says: str, bounds: Sequence[float]) -> None:
        self._name, self._says, self._bounds = name, says, bounds
        self._counts, self._total = [0] * (len(bounds) + 1), 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value, or several equal ones; a bucket holds its upper end."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._total += value * times

    def family(self, labels: Mapping[str, str]) -> HistogramMetricFamily:
        """What it holds now."""
        return histogram_family(self._name, self._says, self._bounds, self._counts, self._total, labels)


class _RequestCounts:
    """What requests of one server add to."""

    def __init__(self) -> None:
        self.ends = dict.fromkeys(_ENDS, 0)
        self.first_token = _Histogram(
            "time_to_first_token_seconds", "Seconds from a request's arrival to its first token.", _LONG_SECONDS
        )
        self.between_tokens = _Histogram(
            "inter_token_latency_seconds",
            "Seconds between tokens; of tokens that came together, each has its share.",
            _SHORT_SECONDS,
        )
        self.per_token = _Histogram(
            "request_time_per_output_token_seconds",
            "Mean seconds per token after the first, of answers that are whole.",
            _SHORT_SECONDS,
        )
        self.whole = _Histogram(
            "e2e_request_latency_seconds",
            "Seconds from a request's arrival to its end, of answers that are whole.",
            _LONG_SECONDS,
        )
        self.prompt_tokens = _Histogram(
            "request_prompt_tokens", "Tokens of a request's prompt, of answers that are whole.", _TOKENS
        )
        self.output_tokens = _Histogram(
            "request_generation_tokens", "Tokens that a request was given, of answers that are whole.", _TOKENS
        )

    def families(self, labels: Mapping[str, str]) -> Iterable[Metric]:
        """All of them now."""
        ends = CounterMetricFamily(
            f"{PREFIX}request_success", "Requests that ended, by reason.", labels=[*labels, "finished_reason"]
        )
        for reason, count in self.ends.items():
            ends.add_metric([*labels.values(), reason], count)
        yield ends
        for histogram in (
            self.first_token,
            self.between_tokens,
            self.per_token,
            self.whole,
            self.prompt_tokens,
            self.output_tokens,
        ):
            yield histogram.family(labels)


class RequestTimer:
    """Follows one request; made by `ServerMetrics.follow`."""

    def __init__(self, counts: _RequestCounts, num_prompt_tokens: int, now: Callable[[], float]) -> None:
        self._counts, self._num_prompt_tokens, self._now = counts, num_prompt_tokens, now
        self._arrived_s = now()
        self._first_s = self._last_s = self._arrived_s
        self._num_tokens, self._has_ended = 0, False

    def take(self, delta: RequestDelta) -> None:
        """Count a delta, at the moment when it comes out of the engine; those without tokens say nothing."""
        num_tokens = len(delta.token_ids)
        if num_tokens == 0 or self._has_ended:
            return
        now_s = self._now()
        if self._num_tokens == 0:
            # Several at once came with the first because nobody read meanwhile: no time between them is known.
            self._counts.first_token.observe(now_s - self._arrived_s)
            self._first_s = now_s
        else:
            self._counts.between_tokens.observe((now_s - self._last_s) / num_tokens, num_tokens)
        self._last_s = now_s
        self._num_tokens += num_tokens

    def end(self, reason: str) -> None:
        """Count the request once; later calls change nothing.

        Args:
            reason: "stop", "length", "tool_calls", "abort" or "error".
        """
        if self._has_ended:
            return
        self._has_ended = True
        counts = self._counts
        counts.ends[reason] = counts.ends.get(reason, 0) + 1
        if reason not in WHOLE_ENDS:
            return
        counts.whole.observe(self._now() - self._arrived_s)
        counts.prompt_tokens.observe(self._num_prompt_tokens)
        counts.output_tokens.observe(self._num_tokens)
        if self._num_tokens > 1:
            counts.per_token.observe((self._last_s - self._first_s) / (self._num_tokens - 1))


class ServerMetrics:
    """Everything that one server tells Prometheus.

    Args:
        model_name: label of every sample.
        num_draft_tokens: K of the engine, 0 without a drafter.
        now: seconds that only grow.
    """

    def __init__(self, model_name: str, num_draft_tokens: int, *, now: Callable[[], float] = time.monotonic) -> None:
        # A name from the command line may hold bytes that are no UTF-8, which would break every scrape.
        name = model_name.encode("utf-8", "backslashreplace").decode("utf-8")
        self._labels = {"model_name": name, "engine": "0"}
        self._num_draft_tokens, self._now = num_draft_tokens, now
        self._counts = _RequestCounts()

    def follow(self, num_prompt_tokens: int) -> RequestTimer:
        """Begin to time a request that arrives now.

        Args:
            num_prompt_tokens: tokens of its prompt.
        """
        return RequestTimer(self._counts, num_prompt_tokens, self._now)

    def exposition(self, stats: EngineStats | None) -> tuple[bytes, str]:
        """The answer to a scrape.

        Args:
            stats: of the engine; None while none runs, and then nothing is said of one.

        Returns:
            Text and its content type.
        """
        families = [
            *engine_families(stats, self._labels, num_draft_tokens=self._num_draft_tokens),
            *self._counts.families(self._labels),
        ]
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Families(families))
        return generate_latest(registry), CONTENT_TYPE


class _Families(Collector):
    """Families that are there already, for a registry of one scrape."""

    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families
