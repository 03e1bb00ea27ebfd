"""Kimi targets of the tests: configs as files have them, random models, and whole checkpoint folders.

`k3_tiny_config()` is the smallest config with every feature of Kimi-K3; `small_kimi_config(...)` has any depth at a
width that suits tests over many cuts. `kimi_target(config)` makes a model, `write_kimi(folder, config, ...)` a folder.
Projections of the mixtures are never zero: every mixture would be the mean, and no wiring error would show.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from paceline.checkpoint.contract import TargetContract
from paceline.checkpoint.kimi_config import read_kimi_contract
from paceline.checkpoint.kimi_names import kimi_slots
from paceline.models.layers import LinearMode, set_linear_mode
from paceline.models.targets.kimi import KimiTarget
from paceline.models.targets.kimi_multimodal import KimiMultimodalTarget

AnyKimi = KimiTarget | KimiMultimodalTarget
RateStorage = Literal["flat", "padded", "four"]
MEDIA_ID = 500

VARIANTS: dict[str, dict[str, Any]] = {
    "k3": {},
    "no-query-rank": {"q_lora_rank": None},
    "low-rank-gate": {"linear_attn_config": {"use_full_rank_gate": False}},
    "unbounded": {"linear_attn_config": {"gate_lower_bound": None}},
    "plain-residual": {"attn_res_block_size": None},
    "block-1": {"attn_res_block_size": 1},
    "block-3": {"attn_res_block_size": 3},
    "block-8": {"attn_res_block_size": 8},
    "full-width-experts": {"routed_expert_hidden_size": None, "latent_moe_use_norm": False},
    "two-groups": {"num_expert_group": 2, "topk_group": 1},
    "softmax-router": {"moe_router_activation_func": "softmax"},
    "no-shared-experts": {"num_shared_experts": 0},
    "dense": {"num_experts": None},
    "silu": {"hidden_act": "silu"},
    "no-output-gate": {"mla_use_output_gate": False},
    "logit-scale": {"logit_scale": 0.5},
}


def k3_tiny_config(**changes: Any) -> dict[str, Any]:
    """8 layers of width 128: KDA but for 3 and 7, blocks of 4, 4 experts; `changes` replace keys, also nested ones."""
    config: dict[str, Any] = {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "dtype": "float32",
        "vocab_size": 512,
        "hidden_size": 128,
        "num_hidden_layers": 8,
        "intermediate_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "hidden_act": "situ",
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "pad_token_id": 0,
        "eos_token_id": 2,
        "q_lora_rank": 48,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "num_experts": 4,
        "num_experts_per_token": 2,
        "num_shared_experts": 1,
        "moe_intermediate_size": 64,
        "routed_expert_hidden_size": 64,
        "latent_moe_use_norm": True,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "use_grouped_topk": True,
        "num_expert_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "topk_method": "noaux_tc",
        "attn_res_block_size": 4,
        "num_nextn_predict_layers": 0,
        "linear_attn_config": {
            "kda_layers": [1, 2, 3, 5, 6, 7],
            "full_attn_layers": [4, 8],
            "num_heads": 4,
            "head_dim": 32,
            "short_conv_kernel_size": 4,
            "use_full_rank_gate": True,
            "gate_lower_bound": -5.0,
        },
    }
    return _changed(config, changes)


def small_kimi_config(num_layers: int, block_size: int | None, **changes: Any) -> dict[str, Any]:
    """Any number of layers of width 32, every fourth with latent attention; else as `k3_tiny_config`."""
    full = [number for number in range(1, num_layers + 1) if number % 4 == 0]
    delta = [number for number in range(1, num_layers + 1) if number % 4]
    sizes = {
        "num_hidden_layers": num_layers,
        "attn_res_block_size": block_size,
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
        "moe_intermediate_size": 16,
        "routed_expert_hidden_size": 16,
        "linear_attn_config": {"kda_layers": delta, "full_attn_layers": full, "num_heads": 2, "head_dim": 8},
    }
    return _changed(k3_tiny_config(**sizes), changes)


def multimodal_config(text: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """A text config inside the wrapper's, with a tower of 2 layers over patches of 2 by 2 pixels."""
    config: dict[str, Any] = {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "model_type": "kimi_k3",
        "dtype": "float32",
        "text_config": text or k3_tiny_config(),
        "media_placeholder_token_id": MEDIA_ID,
        "image_placeholder": "<|kimi_image_placeholder|>",
        "ignore_index": -100,
        "tie_word_embeddings": False,
        "vision_config": {
            "model_type": "kimi_k3_vision",
            "patch_size": 2,
            "merge_kernel_size": [2, 2],
            "vt_hidden_size": 24,
            "vt_num_hidden_layers": 2,
            "vt_num_attention_heads": 2,
            "qkv_hidden_size": 32,
            "vt_intermediate_size": 40,
            "norm_type": "rmsnorm",
            "mlp_type": "mlp2",
            "attn_bias": False,
            "linear_bias": False,
            "patch_embed_proj_bias": False,
            "activation_func": "gelu_pytorch_tanh",
            "pos_emb_type": "divided_fixed",
            "pos_emb_interpolation_mode": "bilinear",
            "init_pos_emb_height": 6,
            "init_pos_emb_width": 8,
            "init_pos_emb_time": 4,
            "merge_type": "sd2_tpool",
            "mm_projector_type": "patchmergerv2",
            "projector_ln_eps": 1e-5,
            "text_hidden_size": 128,
        },
    }
    return _changed(config, changes)


def kimi_contract(config: dict[str, Any], folder: Path = Path("tests/tiny-kimi")) -> TargetContract:
    """The contract of a config that lies in no folder."""
    return read_kimi_contract(config, folder, "tiny-kimi")


def kimi_target(
    config: dict[str, Any] | None = None,
    seed: int = 0,
    *,
    dtype: torch.dtype = torch.float32,
    mode: LinearMode = "plain",
) -> KimiTarget:
    """A random text model whose streams neither vanish nor explode, and whose gates are neither open nor shut."""
    target = KimiTarget(kimi_contract(config or k3_tiny_config()))
    fill_kimi(target, seed)
    target.to(dtype).requires_grad_(False).eval()
    set_linear_mode(target, mode)
    return target


def multimodal_target(config: dict[str, Any] | None = None, seed: int = 0) -> KimiMultimodalTarget:
    """A random model with a vision tower; the text model is that of `kimi_target` with the same seed."""
    target = KimiMultimodalTarget(kimi_contract(config or multimodal_config()))
    fill_kimi(target.vision_tower, seed + 1)
    fill_kimi(target.mm_projector, seed + 2)
    fill_kimi(target.language_model, seed)
    return target.requires_grad_(False).eval()


def fill_kimi(model: nn.Module, seed: int) -> None:
    """All weights from one seed."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            kind = name.rpartition(".")[2]
            if kind in ("A_log", "dt_bias"):
                parameter.copy_(0.5 * noise)
            elif kind == "correction_bias":
                parameter.copy_(0.2 * noise)
            elif "norm" in name:
                parameter.copy_(1.0 + 0.2 * noise)
            elif kind == "proj":  # of a mixture's scores
                parameter.copy_(noise * 2.0 * parameter.shape[-1] ** -0.5)
            elif "embed_tokens" in name or name.endswith("grid"):
                parameter.copy_(noise)
            else:
                parameter.copy_(noise * 1.2 * parameter[0].numel() ** -0.5)


def kimi_tensors(model: AnyKimi, *, rates: RateStorage = "flat", flat_convolution: bool = False) -> dict[str, Tensor]:
    """A model's weights under the names and in the shapes of published files."""
    state, tensors = dict(model.named_parameters()), {}
    for slot in kimi_slots(model.contract):
        whole = state[slot.parameter]
        first = slot.first_row or 0
        part = whole if slot.first_row is None else whole[first : first + slot.shape[0]]
        if slot.name.endswith("_conv1d.weight") and not flat_convolution:
            part = part.unsqueeze(1)
        if slot.name.endswith(".A_log"):
            part = _stored_rates(part, model, rates)
        tensors[slot.name] = part.detach().clone().contiguous()
    return tensors


def write_kimi(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    """A checkpoint folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _stored_rates(rates_N: Tensor, model: AnyKimi, storage: RateStorage) -> Tensor:
    if storage == "flat":
        return rates_N
    if storage == "four":
        return rates_N.view(1, 1, -1, 1)
    kimi = model.contract.kimi
    assert kimi is not None and kimi.delta is not None
    padded = torch.zeros(kimi.delta.head_size)
    padded[: len(rates_N)] = rates_N
    return padded


def _changed(config: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """The config with keys replaced; of nested objects, only the keys that are named."""
    merged = dict(config)
    for key, value in changes.items():
        is_nested = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = {**merged[key], **value} if is_nested else value
    return merged
