"""Hybrid targets in engines that check themselves, and the contiguous reference that these must equal, bit for bit."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from tests import tiny
from tests.helped_drafts import help_drafts
from tests.tiny_kimi import k3_tiny_config, kimi_target, small_kimi_config

from paceline.checkpoint.contract import LatentAttentionSettings, TargetLayerId
from paceline.engine.engine import Engine, EngineSettings
from paceline.engine.request import RequestResult, SamplingParameters
from paceline.models.loading import LoadedDrafter, LoadedTarget
from paceline.models.stepwise import StepwiseContext

VOCAB_SIZE = 64
MAX_MODEL_LEN = 96
GREEDY = SamplingParameters(max_tokens=20, ignore_eos=True)
SAMPLED = replace(GREEDY, temperature=0.9, top_p=0.95, seed=5)
UNDRAFTED = replace(GREEDY, draft_length="off")
TEXT_LENGTH = 24  # tokens of the reference that are run at once: what most tests ask for, and a block
FAMILIES = ("dflash", "dflash2", "dspark", "dspark-latent", "eagle3")
_LATENT = LatentAttentionSettings(
    q_lora_rank=12, kv_lora_rank=16, qk_nope_head_size=8, qk_rope_head_size=8, v_head_size=12
)


@functools.cache
def small_target() -> LoadedTarget:
    """6 layers of width 32, attention residuals in blocks of 3; row-invariant."""
    return tiny.wrap_target(kimi_target(small_kimi_config(6, 3, max_position_embeddings=256)))


@functools.cache
def k3_target() -> LoadedTarget:
    """The tiny K3 with every feature; row-invariant."""
    return tiny.wrap_target(kimi_target(k3_tiny_config()))


@functools.cache
def drafter_for(target: LoadedTarget, family: str) -> LoadedDrafter:
    """An untrained drafter of a family, "dspark-latent" among them, fed with the mixtures of the target's residual."""
    changes: dict[str, Any] = {"family": family}
    if family == "dspark-latent":
        changes = {"family": "dspark", "latent": _LATENT, "is_neox_style": False}
    layers = tuple(TargetLayerId(layer) for layer in (1, 2, target.contract.num_layers - 2))
    drafter = tiny.tiny_drafter(
        target.contract, block_size=5, target_layer_ids=layers, aux_hidden_stream="attn_res", **changes
    )
    return tiny.wrap_drafter(drafter)


def prompts_of(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    """Random prompts that both targets know the tokens of."""
    return tiny.tiny_prompts(lengths, seed, vocab_size=VOCAB_SIZE)


def stepwise_text(target: LoadedTarget, prompt: Sequence[int], num_tokens: int) -> tuple[int, ...]:
    """Greedy decoding, a token at a time, over contiguous caches."""
    return _stepwise_text(target, tuple(prompt), max(num_tokens, TEXT_LENGTH))[:num_tokens]


@functools.cache
def _stepwise_text(target: LoadedTarget, prompt: tuple[int, ...], num_tokens: int) -> tuple[int, ...]:
    model, contract = target.model, target.contract
    context = StepwiseContext(contract, 1, len(prompt) + num_tokens, dtype=torch.float32, device="cpu")
    rows, tokens = list(prompt), []
    with torch.inference_mode():
        for _ in range(num_tokens):
            ids_1T = torch.tensor([rows])
            hidden_1TD = model(ids_1T, torch.zeros_like(ids_1T), context)
            context.commit_all()
            rows = [int(model.logits(hidden_1TD[:, -1])[0].argmax())]
            tokens += rows
    return tuple(tokens)


def stepwise_state(target: LoadedTarget, text: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """States and histories behind a text, without a dimension of requests."""
    context = StepwiseContext(target.contract, 1, len(text), dtype=torch.float32, device="cpu")
    ids_1T = torch.tensor([list(text)])
    with torch.inference_mode():
        target.model(ids_1T, torch.zeros_like(ids_1T), context)
        context.commit_all()
    assert context.states_LBNKK is not None and context.histories_LBHC is not None
    return context.states_LBNKK[:, 0], context.histories_LBHC[:, 0]


def checked(target: LoadedTarget, drafter: LoadedDrafter | None = None, **settings: Any) -> Engine:
    """An engine with blocks of 8 positions that asserts its invariants, free blocks and places full of NaN."""
    options = {"block_size": 8, "num_blocks": 120, "max_model_len": MAX_MODEL_LEN, "check_invariants": True} | settings
    return Engine(target, drafter, EngineSettings(**options))


def helped(target: LoadedTarget, drafter: LoadedDrafter, prompts: dict[str, Sequence[int]], **settings: Any) -> Engine:
    """The same, with drafts that hold some of the plain text: none to all of a block is kept.

    Args:
        target: what decides.
        drafter: what is helped.
        prompts: of every request, by its name.
        settings: of the engine.
    """
    engine = checked(target, drafter, draft_sample_method="greedy", **settings)
    scripts = {name: (*prompt, *stepwise_text(target, prompt, TEXT_LENGTH)) for name, prompt in prompts.items()}
    return help_drafts(engine, scripts)


def run(engine: Engine, names: Sequence[str]) -> list[RequestResult]:
    """Step until all is done."""
    while engine.has_unfinished():
        engine.step()
    return [engine.result(name) for name in names]


def require_empty(engine: Engine) -> None:
    """Every block came back, none is waited for."""
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_used_snapshots) == (0, 0, 0)
    assert (stats.num_free_blocks, stats.num_used_blocks, stats.num_fenced_blocks) == (stats.num_blocks, 0, 0)
