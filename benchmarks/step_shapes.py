"""The shapes whose steps are timed: a random target and a random DFlash drafter of each, by name."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from benchmarks.random_dense import DENSE_SHAPES, dflash_contract, random_drafter, random_target, wrap_target
from benchmarks.random_kimi import kimi_config, random_kimi
from benchmarks.random_weights import Weights, fill

if TYPE_CHECKING:
    import torch

    from paceline.models.layers import LinearMode
    from paceline.models.loading import LoadedDrafter, LoadedTarget

PLAIN, DFLASH = "plain", "dflash"
KINDS = (PLAIN, DFLASH)
MAIN_SHAPES = ("smollm2-135m", "qwen3-8b", "k3-mini")
_KIMI_HEAD_SIZE = 64  # of a drafter: heads of the target's own size are no power of two


def kimi_shapes() -> dict[str, dict[str, Any]]:
    """Configs by name: `k3-mini`, 47 million parameters with every feature of Kimi-K3, and one for trials."""
    mini = {
        "vocab_size": 8192,
        "intermediate_size": 1024,
        "q_lora_rank": 160,
        "kv_lora_rank": 128,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "v_head_dim": 64,
        "num_experts": 8,
        "moe_intermediate_size": 160,
        "routed_expert_hidden_size": 160,
    }
    delta = {"head_dim": 64}
    config = kimi_config(32, 8, 320, **mini)
    config["linear_attn_config"] |= delta
    return {"k3-mini": config, "tiny-k3": kimi_config(6, 4, 64, vocab_size=512)}


SHAPES = (*DENSE_SHAPES, *kimi_shapes())


def make_target(
    shape: str,
    device: torch.device,
    *,
    dtype: torch.dtype,
    linear_mode: LinearMode | Literal["auto"] = "auto",
    weights: Weights = "normal",
) -> LoadedTarget:
    """A random target of a shape, as the engine takes it; `weights` is for the dense ones."""
    if shape in DENSE_SHAPES:
        return random_target(DENSE_SHAPES[shape], device, dtype=dtype, linear_mode=linear_mode, weights=weights)
    model = random_kimi(kimi_shapes()[shape], dtype, device)
    return wrap_target(model, linear_mode)


def make_drafter(target: LoadedTarget, weights: Weights = "normal") -> LoadedDrafter:
    """A random DFlash drafter of 5 layers and 15 drafts; `weights` is for dense targets."""
    if target.contract.kimi is None:
        return random_drafter(target, weights=weights)
    from paceline.models.building import empty_drafter
    from paceline.models.loading import LoadedDrafter

    contract = replace(dflash_contract(target.contract), head_size=_KIMI_HEAD_SIZE)
    weight = target.model.norm.weight
    model = empty_drafter(contract, weight.dtype, weight.device)
    fill(model, seed=1)
    model.prepare_for_serving(target.linear_mode)
    return LoadedDrafter(model, contract, contract.num_draft_tokens, target.model)
