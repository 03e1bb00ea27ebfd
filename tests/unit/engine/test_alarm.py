"""A drafter that earns too little is said once per episode and shown in the stats; good ones are left in peace."""

from __future__ import annotations

import logging
import random
from dataclasses import replace

import pytest
from tests.tiny import loaded, tiny_prompts

import paceline.engine.alarm as alarm_module
from paceline.checkpoint.calibration import Calibration
from paceline.engine.alarm import WINDOW, AcceptanceAlarm, AlarmState
from paceline.engine.engine import Engine
from paceline.engine.request import SamplingParameters

Block = tuple[int, int]
LOW: list[Block] = [(7, int(index % 10 == 0)) for index in range(WINDOW)]  # a length of 1.1
NONE: list[Block] = [(7, 0)] * WINDOW
GOOD: list[Block] = [(7, 2)] * WINDOW


def fed(alarm: AcceptanceAlarm, blocks: list[Block], *, is_plain_greedy: bool = False) -> AlarmState:
    for num_judged, num_accepted in blocks:
        alarm.observe(num_judged, num_accepted, is_plain_greedy=is_plain_greedy)
    return alarm.state


def said(caplog: pytest.LogCaptureFixture, blocks: list[Block], calibrated: float | None = None) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="paceline"):
        fed(AcceptanceAlarm(calibrated), blocks, is_plain_greedy=True)
    return [record.levelname for record in caplog.records]


def test_what_is_said(caplog: pytest.LogCaptureFixture) -> None:
    assert said(caplog, 5 * GOOD) == []
    assert said(caplog, NONE[:-1]) == []
    assert said(caplog, 3 * LOW) == said(caplog, 3 * NONE) == said(caplog, LOW + NONE + LOW) == ["ERROR"]
    assert said(caplog, GOOD + NONE) == ["ERROR"]
    assert said(caplog, NONE + GOOD + NONE) == ["ERROR", "INFO", "ERROR"]


def test_a_window_slides_so_that_200_low_blocks_are_always_seen() -> None:
    """Windows that follow each other would see 100 good blocks beside 100 bad ones twice, and say nothing."""
    few = [(7, 1)] * 30 + [(7, 0)] * WINDOW
    assert fed(AcceptanceAlarm(), few).length.is_raised


def test_a_length_near_the_limit_is_one_episode() -> None:
    alarm = AcceptanceAlarm()
    fed(alarm, NONE)
    near = [(7, int(index % 100 < 21)) for index in range(10 * WINDOW)]  # 1.21: above the limit, not clearly
    assert fed(alarm, near).length.num_episodes == 1 and alarm.state.length.is_raised
    assert not fed(alarm, [(7, 1)] * WINDOW).is_raised


def test_half_of_the_calibrated_share_is_the_limit() -> None:
    """Long runs behind the first draft keep the length up; the first position alone tells."""
    few_but_long = [(7, 5 * int(index % 10 < 3)) for index in range(WINDOW)]  # 30 % keep a first draft, length 2.5
    state = fed(AcceptanceAlarm(0.7, now=lambda: 1234.5), few_but_long, is_plain_greedy=True)
    assert state.first_position.is_raised and state.is_raised and not state.length.is_raised
    assert (state.first_position.value, state.first_position.limit) == (pytest.approx(0.3), pytest.approx(0.35))
    assert (state.first_position.num_episodes, state.first_position.last_raised_s) == (1, 1234.5)
    assert (state.length.value, state.length.last_raised_s) == (pytest.approx(2.5), None)
    assert not fed(AcceptanceAlarm(0.5), few_but_long, is_plain_greedy=True).is_raised


def test_only_greedy_blocks_are_held_against_the_calibration() -> None:
    sampled = [(7, 5 * int(index % 10 < 3)) for index in range(3 * WINDOW)]
    state = fed(AcceptanceAlarm(0.7), sampled)
    assert not state.is_raised and state.first_position.value is None
    assert state.length.value == pytest.approx(2.5)


def test_without_a_calibration_the_second_rule_never_trips(caplog: pytest.LogCaptureFixture) -> None:
    few_but_long = [(7, 5 * int(index % 10 < 1)) for index in range(5 * WINDOW)]
    assert said(caplog, few_but_long) == []
    state = fed(AcceptanceAlarm(), few_but_long, is_plain_greedy=True)
    assert state.first_position.limit is None and state.first_position.value == pytest.approx(0.1)


def test_it_fires_again_after_a_recovery() -> None:
    seconds = iter(range(100, 200))
    alarm = AcceptanceAlarm(0.8, now=lambda: float(next(seconds)))
    for episode in range(1, 4):
        state = fed(alarm, NONE, is_plain_greedy=True)
        assert state.length.is_raised and state.first_position.is_raised
        assert state.length.num_episodes == state.first_position.num_episodes == episode
        assert not fed(alarm, GOOD, is_plain_greedy=True).is_raised
    assert alarm.state.first_position.last_raised_s == 105.0


def test_steps_without_drafts_do_not_count(caplog: pytest.LogCaptureFixture) -> None:
    blocks = [(7, 1)] * 100 + [(0, 0)] * 10 * WINDOW + [(7, 1)] * 100
    random.Random(0).shuffle(blocks)
    assert said(caplog, blocks) == []


def calibrated_engine() -> Engine:
    target, drafter = loaded()
    calibration = Calibration(method="served", num_blocks=1000, per_position=(0.7, 0.4))
    return Engine(target, replace(drafter, calibration=calibration))


def test_an_engine_shows_it_in_its_stats(caplog: pytest.LogCaptureFixture) -> None:
    """The tiny drafter is random: next to nothing is kept."""
    engine = calibrated_engine()
    assert engine.stats().alarm.first_position.limit == pytest.approx(0.35)
    with caplog.at_level(logging.ERROR, logger="paceline"):
        engine.generate(tiny_prompts([4] * 3), SamplingParameters(max_tokens=150, ignore_eos=True))
    alarm = engine.stats().alarm
    assert alarm.length.is_raised and alarm.first_position.is_raised
    assert len([record for record in caplog.records if "acceptance" in record.message]) == 1
    assert len([record for record in caplog.records if "first draft" in record.message]) == 1


@pytest.mark.parametrize("asked", [{"temperature": 1.0, "seed": 1}, {"presence_penalty": 0.5}])
def test_an_engine_leaves_sampled_and_ruled_requests_out(asked: dict[str, float]) -> None:
    engine = calibrated_engine()
    engine.generate(tiny_prompts([4] * 3), SamplingParameters(max_tokens=150, ignore_eos=True, **asked))
    assert engine.stats().alarm.length.is_raised and engine.stats().alarm.first_position.value is None


def test_a_watch_that_never_clears_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alarm_module, "_RECOVERY", 1e9)
    with pytest.raises(AssertionError):
        test_it_fires_again_after_a_recovery()


def test_a_watch_that_counts_every_request_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original = AcceptanceAlarm.observe
    monkeypatch.setattr(
        AcceptanceAlarm, "observe", lambda self, *counts, is_plain_greedy: original(self, *counts, is_plain_greedy=True)
    )
    with pytest.raises(AssertionError):
        test_only_greedy_blocks_are_held_against_the_calibration()
