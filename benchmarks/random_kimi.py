"""Random Kimi-K3 targets of any depth and width: no published one is small enough to be measured everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from paceline.models.targets.kimi import KimiTarget


def kimi_config(num_layers: int, block_size: int, width: int, **changes: Any) -> dict[str, Any]:
    """A config with every feature of Kimi-K3.

    Args:
        num_layers: every fourth has latent attention, the others a recurrent state.
        block_size: layers per block of the attention residuals.
        width: of the residual stream; all other widths follow from it. A multiple of 32.
        changes: keys to replace.
    """
    numbers = range(1, num_layers + 1)
    config = {
        "model_type": "kimi_linear",
        "dtype": "float32",
        "vocab_size": 256,
        "hidden_size": width,
        "num_hidden_layers": num_layers,
        "intermediate_size": 2 * width,
        "num_attention_heads": 4,
        "hidden_act": "situ",
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "q_lora_rank": width // 2,
        "kv_lora_rank": width // 2,
        "qk_nope_head_dim": width // 4,
        "qk_rope_head_dim": width // 8,
        "v_head_dim": width // 4,
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "num_experts": 4,
        "num_experts_per_token": 2,
        "num_shared_experts": 1,
        "moe_intermediate_size": width // 2,
        "routed_expert_hidden_size": width // 2,
        "latent_moe_use_norm": True,
        "first_k_dense_replace": 1,
        "attn_res_block_size": block_size,
        "linear_attn_config": {
            "kda_layers": [number for number in numbers if number % 4],
            "full_attn_layers": [number for number in numbers if number % 4 == 0],
            "num_heads": 4,
            "head_dim": width // 4,
            "short_conv_kernel_size": 4,
            "use_full_rank_gate": True,
            "gate_lower_bound": -5.0,
        },
    }
    return {**config, **changes}


def random_kimi(config: dict[str, Any], dtype: torch.dtype, device: torch.device, *, seed: int = 0) -> KimiTarget:
    """A target whose streams neither vanish nor explode and whose mixtures are none of them a mean."""
    import torch

    from paceline.checkpoint.kimi_config import read_kimi_contract
    from paceline.models.building import empty_target
    from paceline.models.targets.kimi import KimiTarget

    target = empty_target(read_kimi_contract(config, Path("random"), "random"), dtype, device)
    assert isinstance(target, KimiTarget)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in target.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:
                parameter.copy_(0.5 * noise if name.endswith(("A_log", "bias")) else 1.0 + 0.2 * noise)
            else:
                # mixtures whose projection is zero are means, and hide every mistake
                scale = 2.0 if name.endswith(".proj") else 1.2
                parameter.copy_(noise if "embed" in name else noise * scale * parameter.shape[-1] ** -0.5)
    return target


def published_tensors(target: KimiTarget) -> dict[str, Tensor]:
    """A target's weights under the names and in the shapes of published files."""
    from paceline.checkpoint.kimi_names import kimi_slots

    state, tensors = dict(target.named_parameters()), {}
    for slot in kimi_slots(target.contract):
        whole, first = state[slot.parameter].detach(), slot.first_row or 0
        part = whole if slot.first_row is None else whole[first : first + slot.shape[0]]
        tensors[slot.name] = (part.unsqueeze(1) if slot.name.endswith("_conv1d.weight") else part).contiguous()
    return tensors
