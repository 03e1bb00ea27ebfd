"""An engine with a drafter serves nothing until its canary has passed, where that was asked for."""

from __future__ import annotations

import asyncio
import logging

import pytest
from tests.tiny import loaded, tiny_prompts
from tests.unit.engine.test_canary import commit_one_too_many, hit_without_context

import paceline.engine.canary as canary_module
from paceline.engine.async_engine import AsyncEngine
from paceline.engine.canary_report import CanaryReport
from paceline.engine.engine import Engine, EngineSettings
from paceline.engine.request import SamplingParameters
from paceline.engine.start_checks import require_sound
from paceline.errors import CompatibilityError, ConfigError

CHECKED = EngineSettings(max_num_seqs=2, canary="start")
SAMPLING = SamplingParameters(max_tokens=4)


def test_a_sound_pair_is_served_and_the_log_says_what_was_compared(caplog: pytest.LogCaptureFixture) -> None:
    target, drafter = loaded()
    with caplog.at_level(logging.INFO, logger="paceline"):
        engine = Engine(target, drafter, CHECKED)
    assert len(engine.generate(tiny_prompts([5]), SAMPLING)) == 1
    assert len([record for record in caplog.records if "the canary passed" in record.message]) == 1


@pytest.mark.parametrize("plant", [commit_one_too_many, hit_without_context])
def test_a_faulty_pair_is_refused_with_the_fault_and_both_names(plant, monkeypatch: pytest.MonkeyPatch) -> None:
    target, drafter = loaded("qwen3")
    plant(monkeypatch)
    with pytest.raises(CompatibilityError, match="the canary found a fault") as refused:
        Engine(target, drafter, CHECKED)
    assert "tests/tiny-qwen3" in str(refused.value) and "tests/tiny-drafter" in str(refused.value)
    assert any(words in str(refused.value) for words in ("served blocks", "plain", "stands at"))
    Engine(target, drafter, EngineSettings(max_num_seqs=2))


def test_the_engine_of_a_loop_refuses_by_default_and_another_only_if_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    target, drafter = loaded("qwen3")
    commit_one_too_many(monkeypatch)

    async def start(**options: object) -> None:
        async with AsyncEngine(lambda: Engine(target, drafter, EngineSettings(max_num_seqs=2)), **options):
            pass

    with pytest.raises(CompatibilityError, match="the canary found a fault"):
        asyncio.run(start())
    asyncio.run(start(canary="off"))


def test_plain_decoding_has_nothing_to_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(canary_module, "canary_steps", lambda *args: pytest.fail("nothing drafts"))
    target, _ = loaded()
    Engine(target, None, CHECKED)

    async def start() -> None:
        async with AsyncEngine(lambda: Engine(target)):
            pass

    asyncio.run(start())


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"refusals": ("token 3 is 5; plain decoding gave 6",)}, "token 3 is 5"),
        ({"num_equal": 8}, "8 of 10 served blocks"),
        ({"draft_distance": 0.02}, "0.020 apart"),
        ({"num_hit_tokens": 0}, "found nothing of itself in the prefix cache"),
        ({"num_hit_tokens": 64, "num_compared_warm": 10, "num_equal_warm": 8}, "behind a prefix hit of 64"),
        ({"num_hit_tokens": 64, "draft_distance_warm": 0.5}, "does not bring its context back"),
        ({"logprob_error": 0.1, "plain_logprob_error": 0.04}, "rows or positions of a block are wrong"),
    ],
)
def test_each_fault_refuses(changes: dict[str, object], part: str) -> None:
    sound = {"num_steps": 9, "num_drafts": 63, "refusals": (), "num_near_ties": 1, "num_compared": 10, "num_equal": 10}
    require_sound(CanaryReport(**sound))
    with pytest.raises(CompatibilityError) as refused:
        require_sound(CanaryReport(**sound | changes))
    assert part in str(refused.value)


def test_rounding_of_16_bits_is_no_fault() -> None:
    sound = {"num_steps": 9, "num_drafts": 63, "refusals": (), "num_near_ties": 1, "num_compared": 10, "num_equal": 9}
    rounded = CanaryReport(**sound, draft_distance=0.03, logprob_error=0.05, plain_logprob_error=0.04, has_16_bits=True)
    assert rounded.has_passed and not CanaryReport(**sound, draft_distance=0.03).has_passed


def test_another_word_is_refused() -> None:
    with pytest.raises(ConfigError, match="'start', 'off'"):
        EngineSettings(canary="always")
