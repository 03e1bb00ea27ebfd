"""What the models allow of the engine's settings."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.fakes import ReplayProposer
from tests.hybrid_runs import small_target
from tests.tiny import loaded

import paceline.engine.settings as settings_module
from paceline.engine.settings import (
    DEFAULT_MAX_MODEL_LEN,
    EngineSettings,
    SnapshotSizes,
    context_length,
    draft_tokens_per_step,
    prompt_kernel,
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


def test_kernels_of_prompts_are_for_recurrent_targets_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    dense, hybrid = loaded()[0], small_target()
    for target in (dense, hybrid):
        for kernel in ("auto", "recurrent"):
            assert prompt_kernel(target, EngineSettings(prompt_kernel=kernel)) == kernel
    with pytest.raises(ConfigError, match=r"prompt_kernel is 'chunks'; .* keeps no recurrent state"):
        prompt_kernel(dense, EngineSettings(prompt_kernel="chunks"))
    with pytest.raises(ConfigError, match="prompt_kernel is 'fla'; the target is on cpu, and kernels are for a GPU"):
        prompt_kernel(hybrid, EngineSettings(prompt_kernel="fla"))
    with pytest.raises(ConfigError, match="prompt_kernel is 'fast', not one of 'auto', 'recurrent', 'chunks', 'fla'"):
        EngineSettings(**unchecked("prompt_kernel", "fast"))
    weight = SimpleNamespace(device=torch.device("cuda"), dtype=torch.bfloat16)
    there: Any = SimpleNamespace(contract=hybrid.contract, model=SimpleNamespace(norm=SimpleNamespace(weight=weight)))
    assert prompt_kernel(there, EngineSettings(prompt_kernel="chunks")) == "chunks"
    monkeypatch.setattr(settings_module, "find_chunk_kda", lambda: None)
    with pytest.raises(ConfigError, match="prompt_kernel is 'fla'; fla-core is not installed"):
        prompt_kernel(there, EngineSettings(prompt_kernel="fla"))
    monkeypatch.setattr(settings_module, "find_chunk_kda", lambda: print)
    assert prompt_kernel(there, EngineSettings(prompt_kernel="fla")) == "fla"
    weight.dtype = torch.float32
    with pytest.raises(ConfigError, match="the target is in float32"):
        prompt_kernel(there, EngineSettings(prompt_kernel="fla"))
    monkeypatch.setattr(settings_module, "can_chunk_bound", lambda bound: bound is None)
    with pytest.raises(ConfigError, match=r"gates are bounded by -5\.0"):
        prompt_kernel(there, EngineSettings(prompt_kernel="chunks"))


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
