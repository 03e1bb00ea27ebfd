"""What the models allow of the engine's settings."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.fakes import ReplayProposer
from tests.hybrid_runs import small_target
from tests.tiny import loaded

from paceline.engine.settings import (
    DEFAULT_MAX_MODEL_LEN,
    EngineSettings,
    SnapshotSizes,
    context_length,
    draft_tokens_per_step,
    recurrent_state_dtype,
    snapshot_sizes,
)
from paceline.errors import ConfigError

COUNTS = (
    "max_num_seqs",
    "max_model_len",
    "num_draft_tokens",
    "prefill_chunk_size",
    "num_snapshots",
    "snapshot_spacing",
)


def unchecked(name: str, value: Any) -> dict[str, Any]:
    """A setting that no type checker has seen."""
    return {name: value}


@pytest.mark.parametrize(
    "name", ["max_num_seqs", "max_model_len", "num_draft_tokens", "num_snapshots", "snapshot_spacing"]
)
@pytest.mark.parametrize("value", [0, -1])
def test_counts_start_at_one(name: str, value: int) -> None:
    with pytest.raises(ConfigError, match=f"{name} is {value}"):
        EngineSettings(**unchecked(name, value))


def test_states_are_kept_in_one_of_two_dtypes_where_there_are_any() -> None:
    target, _ = loaded()
    assert recurrent_state_dtype(target, EngineSettings()) == torch.float32
    with pytest.raises(ConfigError, match=r"recurrent_state_dtype is 'bfloat16'; .* keeps no recurrent state"):
        recurrent_state_dtype(target, EngineSettings(recurrent_state_dtype="bfloat16"))
    assert recurrent_state_dtype(small_target(), EngineSettings(recurrent_state_dtype="bfloat16")) == torch.bfloat16
    with pytest.raises(ConfigError, match="recurrent_state_dtype is 'float16', not one of 'float32', 'bfloat16'"):
        EngineSettings(**unchecked("recurrent_state_dtype", "float16"))


def test_the_method_is_one_of_two() -> None:
    for method in (None, "greedy", "probabilistic"):
        EngineSettings(**unchecked("draft_sample_method", method))
    with pytest.raises(ConfigError, match="'best'"):
        EngineSettings(**unchecked("draft_sample_method", "best"))


def test_the_context_is_the_targets_up_to_the_default() -> None:
    short, _ = loaded()
    long, _ = loaded(target_changes={"max_position_embeddings": 2 * DEFAULT_MAX_MODEL_LEN})
    assert context_length(short, EngineSettings()) == 512
    assert context_length(long, EngineSettings()) == DEFAULT_MAX_MODEL_LEN
    assert context_length(long, EngineSettings(max_model_len=3000)) == 3000
    with pytest.raises(ConfigError, match="max_model_len is 513; the target has positions for 512"):
        context_length(short, EngineSettings(max_model_len=513))


def test_drafts_per_step() -> None:
    _, drafter = loaded()
    assert draft_tokens_per_step(None, None, EngineSettings()) == 0
    assert draft_tokens_per_step(drafter, None, EngineSettings()) == 7
    assert draft_tokens_per_step(drafter, None, EngineSettings(num_draft_tokens=2)) == 2
    assert draft_tokens_per_step(drafter, ReplayProposer(lambda slot: None, 4), EngineSettings()) == 4
    with pytest.raises(ConfigError, match="num_draft_tokens is 8; the drafter was trained to propose 7"):
        draft_tokens_per_step(drafter, None, EngineSettings(num_draft_tokens=8))


def test_a_drafter_that_goes_token_by_token_goes_on_for_as_long_as_asked() -> None:
    _, drafter = loaded(drafter_family="eagle3")
    assert draft_tokens_per_step(drafter, None, EngineSettings()) == 7
    assert draft_tokens_per_step(drafter, None, EngineSettings(num_draft_tokens=20)) == 20


@pytest.mark.parametrize(("name", "value"), [("verify_method", "typical"), ("draft_length", "long")])
def test_unknown_methods_and_modes_are_refused_with_the_known_ones(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name} is '{value}', not one of '(standard|off)'"):
        EngineSettings(**unchecked(name, value))


def test_drafts_that_share_noise_have_to_be_drawn() -> None:
    with pytest.raises(ConfigError, match="share the target's noise"):
        EngineSettings(verify_method="coupled", draft_sample_method="greedy")
    EngineSettings(verify_method="coupled", draft_sample_method="probabilistic")


def test_states_are_kept_where_hits_can_end() -> None:
    assert snapshot_sizes(EngineSettings(max_num_seqs=3), 48) == SnapshotSizes(24, 1056)
    assert snapshot_sizes(EngineSettings(num_snapshots=5, snapshot_spacing=64), 32) == SnapshotSizes(5, 64)
    with pytest.raises(ConfigError, match="snapshot_spacing is 40; blocks have 32 positions") as found:
        snapshot_sizes(EngineSettings(snapshot_spacing=40), 32)
    assert found.value.hint == "snapshot_spacing=64"
