"""What is said of an engine is what it counted: values, identities, names and labels."""

from __future__ import annotations

from dataclasses import fields

import pytest
from prometheus_client.core import Metric
from tests.unit.serving.engine_counts import engine_stats

from paceline.engine.alarm import AlarmState, RuleState
from paceline.engine.counters import Counters, EngineStats
from paceline.serving.engine_families import engine_families
from paceline.trace.step import StepRecord

LABELS = {"model_name": "m", "engine": "0"}


def samples_of(stats: EngineStats | None, *, num_draft_tokens: int = 3) -> dict[tuple[str, str], float]:
    """By name and the one label beyond those that all have."""
    found = {}
    for family in engine_families(stats, LABELS, num_draft_tokens=num_draft_tokens):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert (labels.pop("model_name"), labels.pop("engine")) == ("m", "0")
            assert len(labels) <= 1
            key = (sample.name.removeprefix("paceline:"), "".join(labels.values()))
            assert key not in found
            found[key] = sample.value
    return found


def test_every_number_is_the_one_that_the_engine_counted() -> None:
    stats = engine_stats(
        num_draft_tokens=11,
        num_accepted=6,
        drafted_per_position=(5, 4, 2),
        accepted_per_position=(4, 2, 0),
        num_prefill_tokens=101,
        num_output_tokens=102,
        num_preemptions=103,
        num_queried_tokens=104,
        num_hit_tokens=105,
        num_evictions=106,
        num_steps=8,
        mean_step_ms=250.0,
        num_impossible_drafts=107,
        num_spoiled_blocks=108,
        num_held_back=109,
        num_switched_off=110,
        num_undrafted=111,
        num_queue_refusals=112,
        num_deadlines_passed=113,
        num_numeric_errors=114,
        num_dead_ends=115,
        num_running=116,
        num_waiting=117,
        num_blocks=8,
        num_used_blocks=6,
        num_drafts=2,
        alarm=AlarmState(length=RuleState(True, 1.1, 1.2, 4, 1e9), first_position=RuleState()),
    )
    assert samples_of(stats) == {
        ("engine_running", ""): 1,
        ("spec_decode_num_drafts_total", ""): 5,
        ("spec_decode_num_draft_tokens_total", ""): 11,
        ("spec_decode_num_accepted_tokens_total", ""): 6,
        ("spec_decode_num_accepted_tokens_per_pos_total", "0"): 4,
        ("spec_decode_num_accepted_tokens_per_pos_total", "1"): 2,
        ("spec_decode_num_accepted_tokens_per_pos_total", "2"): 0,
        ("spec_decode_num_draft_tokens_per_pos_total", "0"): 5,
        ("spec_decode_num_draft_tokens_per_pos_total", "1"): 4,
        ("spec_decode_num_draft_tokens_per_pos_total", "2"): 2,
        ("accepted_tokens_per_step_bucket", "0.0"): 1,
        ("accepted_tokens_per_step_bucket", "1.0"): 3,
        ("accepted_tokens_per_step_bucket", "2.0"): 5,
        ("accepted_tokens_per_step_bucket", "3.0"): 5,
        ("accepted_tokens_per_step_bucket", "+Inf"): 5,
        ("accepted_tokens_per_step_count", ""): 5,
        ("accepted_tokens_per_step_sum", ""): 6,
        ("prompt_tokens_total", ""): 101,
        ("generation_tokens_total", ""): 102,
        ("num_preemptions_total", ""): 103,
        ("prefix_cache_queries_total", ""): 104,
        ("prefix_cache_hits_total", ""): 105,
        ("prefix_cache_evictions_total", ""): 106,
        ("decode_steps_total", ""): 8,
        ("decode_step_seconds_total", ""): 2,
        ("impossible_drafts_total", ""): 107,
        ("spoiled_blocks_total", ""): 108,
        ("held_back_draft_tokens_total", ""): 109,
        ("drafting_switched_off_total", ""): 110,
        ("undrafted_requests_total", ""): 111,
        ("queue_refusals_total", ""): 112,
        ("deadlines_passed_total", ""): 113,
        ("numeric_errors_total", ""): 114,
        ("dead_ends_total", ""): 115,
        ("num_requests_running", ""): 116,
        ("num_requests_waiting", ""): 117,
        ("kv_cache_usage_perc", ""): 0.75,
        ("draft_tokens_per_block", ""): 2,
        ("drafting_alarm_raised", "length"): 1,
        ("drafting_alarm_raised", "first_position"): 0,
        ("drafting_alarm_value", "length"): 1.1,
        ("drafting_alarm_limit", "length"): 1.2,
        ("drafting_alarm_episodes_total", "length"): 4,
        ("drafting_alarm_episodes_total", "first_position"): 0,
    }


def step(num_drafts: int, num_accepted: int) -> StepRecord:
    drafts = tuple(range(num_drafts))
    emitted = (*drafts[:num_accepted], 99)
    return StepRecord("r", 0, 4, 1, drafts, num_accepted, num_accepted, emitted, 99, 1.0)


def test_the_histogram_of_blocks_is_that_of_their_steps() -> None:
    steps = [(4, 4), (4, 0), (2, 2), (0, 0), (3, 1), (4, 2), (1, 0)]
    counters = Counters(4)
    for num_drafts, num_accepted in steps:
        counters.count_step(step(num_drafts, num_accepted))
    drafted, accepted = counters.drafted_per_position, counters.accepted_per_position
    found = samples_of(
        engine_stats(
            drafted_per_position=tuple(drafted),
            accepted_per_position=tuple(accepted),
            num_draft_tokens=sum(drafted),
            num_accepted=sum(accepted),
        ),
        num_draft_tokens=4,
    )
    kept = [num_accepted for num_drafts, num_accepted in steps if num_drafts > 0]
    for most in range(5):
        assert found["accepted_tokens_per_step_bucket", f"{most}.0"] == sum(count <= most for count in kept)
    assert found["accepted_tokens_per_step_bucket", "+Inf"] == len(kept) == found["spec_decode_num_drafts_total", ""]
    assert found["accepted_tokens_per_step_sum", ""] == sum(kept) == found["spec_decode_num_accepted_tokens_total", ""]
    for name, whole in (("accepted", "num_accepted_tokens"), ("draft", "num_draft_tokens")):
        of_positions = {
            position: value for (key, position), value in found.items() if key.endswith(f"{name}_tokens_per_pos_total")
        }
        assert list(of_positions) == ["0", "1", "2", "3"]
        assert sum(of_positions.values()) == found[f"spec_decode_{whole}_total", ""]


def test_an_engine_without_drafter_or_blocks_divides_by_nothing() -> None:
    found = samples_of(engine_stats(), num_draft_tokens=0)
    assert found["spec_decode_num_drafts_total", ""] == found["kv_cache_usage_perc", ""] == 0
    assert not any(name.endswith("per_pos_total") for name, _ in found)
    assert found["accepted_tokens_per_step_bucket", "0.0"] == 0


def test_positions_that_were_never_drafted_are_there_and_0() -> None:
    found = samples_of(engine_stats(drafted_per_position=(2,), accepted_per_position=(1,)), num_draft_tokens=3)
    for kind, first in (("accepted", 1), ("draft", 2)):
        name = f"spec_decode_num_{kind}_tokens_per_pos_total"
        assert [found[name, str(position)] for position in range(3)] == [first, 0, 0]
    assert found["accepted_tokens_per_step_bucket", "3.0"] == 2


def test_without_an_engine_nothing_is_said_of_one() -> None:
    assert samples_of(None) == {("engine_running", ""): 0}


@pytest.mark.parametrize("stats", [None, engine_stats(drafted_per_position=(1, 0), accepted_per_position=(0, 0))])
def test_every_family_is_explained_in_a_sentence(stats: EngineStats | None) -> None:
    families: list[Metric] = list(engine_families(stats, LABELS, num_draft_tokens=2))
    assert len({family.name for family in families}) == len(families)
    for family in families:
        text = family.documentation
        assert text.endswith(".") and text[:1].isalnum() and text[:1] == text[:1].upper(), text
        assert not family.name.endswith("_total"), "the library adds it"


def test_what_a_scrape_leaves_out_is_listed_here() -> None:
    """A counter that the engine gains is either scraped or named below."""
    read: set[str] = set()

    class Watched:
        def __getattr__(self, name: str) -> object:
            read.add(name)
            return getattr(engine_stats(), name)

    list(engine_families(Watched(), LABELS, num_draft_tokens=1))  # type: ignore[arg-type]
    left_out = {
        # request_success counts ends, by reason
        *("num_finished", "num_aborted"),
        # what blocks and recordings do inside
        *("num_free_blocks", "num_cached_blocks", "num_fenced_blocks", "num_resumed_tokens", "num_free_slots"),
        *("num_cached_snapshots", "num_used_snapshots", "num_snapshot_evictions"),
        *("num_consolidations", "num_fragmented", "num_request_steps", "num_probes"),
        *("num_recordings", "num_replayed_steps", "num_unrecorded_steps"),
        *("num_replayed_prompts", "num_unrecorded_prompts", "num_failed_recordings"),
        # what does not change while it runs
        *("num_listed_ids", "listed_share", "linear_mode", "attention", "implementations", "method"),
        *("target_weight_bytes", "drafter_weight_bytes", "target_cache_bytes", "recurrent_state_bytes"),
        *("snapshot_bytes", "drafter_cache_bytes", "token_rules_bytes"),
    }
    assert read.isdisjoint(left_out)
    assert read | left_out == {entry.name for entry in fields(EngineStats)}
