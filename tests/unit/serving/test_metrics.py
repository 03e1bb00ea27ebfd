"""Times of requests against a clock that a test turns, and scrapes that a Prometheus parser reads back."""

from __future__ import annotations

import pytest
from prometheus_client import REGISTRY
from prometheus_client.parser import text_string_to_metric_families
from tests.unit.serving.engine_counts import engine_stats

from paceline.engine.counters import EngineStats
from paceline.engine.request import FinishReason, RequestDelta
from paceline.serving.metrics import RequestTimer, ServerMetrics


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Scrape:
    """Values by name without the prefix, and by the labels beyond those that all have."""

    def __init__(self, metrics: ServerMetrics, stats: EngineStats | None = None, *, model_name: str = "m") -> None:
        body, self.content_type = metrics.exposition(stats)
        self.text = body.decode("utf-8")
        self.families = list(text_string_to_metric_families(self.text))
        self._values: dict[tuple[str, str], float] = {}
        for family in self.families:
            for sample in family.samples:
                labels = dict(sample.labels)
                assert (labels.pop("model_name"), labels.pop("engine")) == (model_name, "0")
                self._values[sample.name.removeprefix("paceline:"), "".join(labels.values())] = sample.value

    def __call__(self, name: str, label: str = "") -> float:
        return self._values[name, label]


def delta(num_tokens: int, finish_reason: FinishReason | None = None) -> RequestDelta:
    return RequestDelta("r", tuple(range(num_tokens)), "", finish_reason)


def take(timer: RequestTimer, clock: Clock, *deltas: tuple[float, int]) -> None:
    """Let time pass, then so many tokens arrive, again and again."""
    for seconds, num_tokens in deltas:
        clock.now_s += seconds
        timer.take(delta(num_tokens))


def test_times_of_a_request_are_measured_from_delta_to_delta() -> None:
    clock = Clock()
    metrics = ServerMetrics("m", 3, now=clock)
    timer = metrics.follow(12)
    # A delta without tokens is no token; four tokens after 0.4 s are four observations of 0.1 s.
    take(timer, clock, (0.25, 0), (0.25, 1), (0.4, 4), (0.0625, 0), (0.0625, 1))
    clock.now_s += 0.5
    timer.end("stop")
    scrape = Scrape(metrics)
    assert (scrape("time_to_first_token_seconds_count"), scrape("time_to_first_token_seconds_sum")) == (1, 0.5)
    assert scrape("time_to_first_token_seconds_bucket", "0.2") == 0
    assert scrape("time_to_first_token_seconds_bucket", "0.5") == 1, "a bucket holds its upper end"
    assert scrape("inter_token_latency_seconds_count") == 5
    assert scrape("inter_token_latency_seconds_sum") == pytest.approx(0.525)
    assert scrape("inter_token_latency_seconds_bucket", "0.075") == 0
    assert scrape("inter_token_latency_seconds_bucket", "0.2") == 5
    assert scrape("request_time_per_output_token_seconds_count") == 1
    assert scrape("request_time_per_output_token_seconds_sum") == pytest.approx(0.525 / 5)
    assert scrape("e2e_request_latency_seconds_sum") == pytest.approx(1.525)
    assert scrape("request_prompt_tokens_sum") == 12
    assert scrape("request_generation_tokens_sum") == 6
    assert scrape("request_generation_tokens_bucket", "5.0") == 0
    assert scrape("request_generation_tokens_bucket", "10.0") == 1


def test_tokens_that_came_with_the_first_have_no_time_between_them() -> None:
    clock = Clock()
    metrics = ServerMetrics("m", 3, now=clock)
    timer = metrics.follow(1)
    take(timer, clock, (0.5, 3), (1.0, 2))
    timer.end("length")
    scrape = Scrape(metrics)
    assert scrape("time_to_first_token_seconds_count") == 1
    assert (scrape("inter_token_latency_seconds_count"), scrape("inter_token_latency_seconds_sum")) == (2, 1.0)
    assert scrape("request_generation_tokens_sum") == 5


def test_a_request_ends_once() -> None:
    clock = Clock()
    metrics = ServerMetrics("m", 3, now=clock)
    timer = metrics.follow(7)
    take(timer, clock, (1.0, 1))
    timer.end("tool_calls")
    before = Scrape(metrics).text
    timer.end("abort")
    take(timer, clock, (1.0, 2))
    assert Scrape(metrics).text == before


def test_only_whole_answers_count_as_a_request_s_latency() -> None:
    clock = Clock()
    metrics = ServerMetrics("m", 3, now=clock)
    for reason in ("stop", "length", "tool_calls", "abort", "abort", "error"):
        timer = metrics.follow(7)
        take(timer, clock, (0.001, 1), (0.001, 1))
        timer.end(reason)
    scrape = Scrape(metrics)
    counts = {reason: scrape("request_success_total", reason) for reason in ("stop", "length", "tool_calls")}
    assert set(counts.values()) == {1}
    assert (scrape("request_success_total", "abort"), scrape("request_success_total", "error")) == (2, 1)
    for name in ("e2e_request_latency_seconds", "request_prompt_tokens", "request_generation_tokens"):
        assert scrape(f"{name}_count") == sum(counts.values())
    assert scrape("request_time_per_output_token_seconds_count") == 3
    assert scrape("time_to_first_token_seconds_count") == 6, "what was seen of the others counts"


def test_an_answer_of_one_token_has_no_time_per_token() -> None:
    clock = Clock()
    metrics = ServerMetrics("m", 3, now=clock)
    timer = metrics.follow(7)
    take(timer, clock, (1.0, 1))
    timer.end("length")
    assert Scrape(metrics)("request_time_per_output_token_seconds_count") == 0


def test_buckets_only_grow_and_end_in_the_count() -> None:
    clock = Clock()
    metrics = ServerMetrics("m", 3, now=clock)
    for seconds in (0.0, 0.0003, 0.04, 2.0, 1e6):
        timer = metrics.follow(3)
        take(timer, clock, (seconds, 1), (seconds, 2))
        timer.end("stop")
    scrape = Scrape(metrics, engine_stats(drafted_per_position=(3, 2, 1), accepted_per_position=(2, 0, 0)))
    histograms = [family for family in scrape.families if family.type == "histogram"]
    assert len(histograms) == 7
    for family in histograms:
        buckets = [sample for sample in family.samples if sample.name.endswith("_bucket")]
        ends = [float(sample.labels["le"]) for sample in buckets]
        assert ends == sorted(set(ends)) and ends[-1] == float("inf")
        values = [sample.value for sample in buckets]
        assert values == sorted(values)
        assert values[-1] == next(sample.value for sample in family.samples if sample.name.endswith("_count"))


def test_the_engine_s_counters_are_in_the_same_scrape() -> None:
    stats = engine_stats(num_output_tokens=9, drafted_per_position=(2, 2), accepted_per_position=(1, 0), num_accepted=1)
    metrics = ServerMetrics("m", 2)
    scrape = Scrape(metrics, stats)
    assert (scrape("engine_running"), scrape("generation_tokens_total")) == (1, 9)
    assert scrape("accepted_tokens_per_step_sum") == scrape("spec_decode_num_accepted_tokens_total") == 1
    gone = Scrape(metrics)
    assert gone("engine_running") == 0
    assert "paceline:generation_tokens" not in gone.text


def test_names_are_the_ones_that_dashboards_ask_for() -> None:
    scrape = Scrape(ServerMetrics("m", 2), engine_stats(drafted_per_position=(0, 0), accepted_per_position=(0, 0)))
    assert scrape.content_type.startswith("text/plain; version=0.0.4")
    assert "_total_total" not in scrape.text
    assert "_created" not in scrape.text
    for family in scrape.families:
        if family.type == "counter":
            assert {sample.name for sample in family.samples} == {f"{family.name}_total"}
        assert f"# HELP {family.name}" in scrape.text
        assert family.documentation.endswith(".")
    assert 'paceline:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 0.0' in (
        scrape.text.splitlines()
    )


@pytest.mark.parametrize("name", ['quote " backslash \\ and\nnew line', "ünïcode/名前", "half \udcff pair"])
def test_any_name_of_a_model_can_be_scraped(name: str) -> None:
    metrics = ServerMetrics(name, 1)
    seen = name.encode("utf-8", "backslashreplace").decode("utf-8")
    scrape = Scrape(metrics, engine_stats(num_output_tokens=4), model_name=seen)
    assert scrape("generation_tokens_total") == 4


def test_two_servers_count_apart_and_nothing_is_global() -> None:
    before = len(list(REGISTRY.collect()))
    first, second = ServerMetrics("a", 1), ServerMetrics("b", 1)
    first.follow(1).end("stop")
    assert Scrape(second, model_name="b")("request_success_total", "stop") == 0
    assert len(list(REGISTRY.collect())) == before
