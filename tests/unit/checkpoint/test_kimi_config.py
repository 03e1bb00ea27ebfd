"""Configs of Kimi targets: both model types, both spellings, layers that count from 1, refusals that name the key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.tiny_kimi import MEDIA_ID, k3_tiny_config, multimodal_config

from paceline.checkpoint.contract import TargetContract
from paceline.checkpoint.kimi_config import read_quantization
from paceline.checkpoint.kimi_contract import KimiSettings
from paceline.checkpoint.target_config import read_target_contract
from paceline.errors import CheckpointError

# config.json of Kimi-Linear-48B-A3B-Instruct
LINEAR_48B: dict[str, Any] = {
    "architectures": ["KimiLinearForCausalLM"],
    "auto_map": {"AutoConfig": "configuration_kimi.KimiLinearConfig"},
    "bos_token_id": 163584,
    "dtype": "bfloat16",
    "eos_token_id": 163586,
    "first_k_dense_replace": 1,
    "head_dim": 72,
    "hidden_act": "silu",
    "hidden_size": 2304,
    "initializer_range": 0.02,
    "intermediate_size": 9216,
    "kv_lora_rank": 512,
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        "head_dim": 128,
        "kda_layers": [1, 2, 3, 5, 6, 7, 9, 10, 11, 13, 14, 15, 17, 18, 19, 21, 22, 23, 25, 26],
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
    "mla_use_nope": True,
    "model_max_length": 1048576,
    "model_type": "kimi_linear",
    "moe_intermediate_size": 1024,
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_attention_heads": 32,
    "num_expert_group": 1,
    "num_experts": 256,
    "num_experts_per_token": 8,
    "num_hidden_layers": 27,
    "num_key_value_heads": 32,
    "num_nextn_predict_layers": 0,
    "num_shared_experts": 1,
    "pad_token_id": 163839,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "routed_scaling_factor": 2.446,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "transformers_version": "4.55.0",
    "use_cache": True,
    "use_grouped_topk": True,
    "v_head_dim": 128,
    "vocab_size": 163840,
}


def read(config: dict[str, Any], folder: Path) -> TargetContract:
    (folder / "config.json").write_text(json.dumps(config))
    return read_target_contract(folder, "mine")


def kimi_of(contract: TargetContract) -> KimiSettings:
    assert contract.kimi is not None
    return contract.kimi


def test_the_published_config_of_kimi_linear(tmp_path: Path) -> None:
    contract = read(LINEAR_48B, tmp_path)
    kimi = kimi_of(contract)
    assert (contract.architecture, contract.name) == ("KimiLinearForCausalLM", "mine")
    assert contract.max_position_embeddings == 1048576 and contract.stop_token_ids == (163586,)
    assert kimi.delta is not None and len(kimi.delta.layers) == 20
    assert not kimi.has_delta(3) and kimi.has_delta(24) and kimi.has_delta(25) and not kimi.has_delta(26)
    assert kimi.delta.gate_lower_bound is None and not kimi.delta.has_full_rank_gate
    assert kimi.latent.q_lora_rank is None and kimi.latent.latent_size == 576 and kimi.latent.query_size == 192
    assert kimi.latent.norm_eps == 1e-5 and not kimi.latent.has_output_gate
    assert kimi.experts is not None and kimi.experts.latent_size is None and kimi.experts.scaling_factor == 2.446
    assert not kimi.experts.has_experts(0) and kimi.experts.has_experts(1)
    assert kimi.residual_block_size is None and contract.aux_hidden_streams == {"prefix"}


def test_every_key_of_kimi_k3(tmp_path: Path) -> None:
    kimi = kimi_of(read(k3_tiny_config(num_nextn_predict_layers=1, logit_scale=0.5), tmp_path))
    assert kimi.delta is not None and kimi.delta.layers == (0, 1, 2, 4, 5, 6)
    assert kimi.delta.gate_lower_bound == -5.0 and kimi.delta.has_full_rank_gate
    assert kimi.latent.q_lora_rank == 48 and kimi.latent.has_output_gate
    assert (kimi.activation, kimi.situ_beta, kimi.situ_linear_beta) == ("situ", 4.0, 25.0)
    assert kimi.experts is not None and kimi.experts.latent_size == 64 and kimi.experts.has_latent_norm
    assert (kimi.residual_block_size, kimi.logit_scale, kimi.num_mtp_layers) == (4, 0.5, 1)


def test_defaults_of_the_activation(tmp_path: Path) -> None:
    kimi = kimi_of(read(k3_tiny_config(activation_situ_beta=0, activation_situ_linear_beta=None), tmp_path))
    assert (kimi.situ_beta, kimi.situ_linear_beta) == (1.0, None)


def test_the_multimodal_config(tmp_path: Path) -> None:
    contract = read(multimodal_config(eos_token_id=7), tmp_path)
    vision = kimi_of(contract).vision
    assert contract.architecture == "KimiK3ForConditionalGeneration" and contract.stop_token_ids == (7,)
    assert vision is not None and vision.media_token_id == MEDIA_ID and vision.grid == (6, 8, 4)
    assert vision.norm_eps == 2**-7 and vision.projector_eps == 1e-5
    assert read(multimodal_config(), tmp_path).stop_token_ids == (2,), "the text config's where the wrapper has none"
    inner = k3_tiny_config()
    del inner["architectures"]
    assert read(multimodal_config(inner), tmp_path).num_layers == 8


def test_transformers_spellings(tmp_path: Path) -> None:
    config = k3_tiny_config()
    for key, alias in {
        "num_experts": "num_local_experts",
        "num_experts_per_token": "num_experts_per_tok",
        "num_shared_experts": "n_shared_experts",
        "num_expert_group": "n_group",
        "moe_renormalize": "norm_topk_prob",
        "max_position_embeddings": "model_max_length",
    }.items():
        config[alias] = config.pop(key)
    assert read(config, tmp_path) == read(k3_tiny_config(), tmp_path)
    with pytest.raises(CheckpointError, match="num_experts is 4 and num_local_experts is 8: two names of one setting"):
        read(k3_tiny_config(num_local_experts=8), tmp_path)


def test_what_transformers_writes_besides_must_agree(tmp_path: Path) -> None:
    kinds = ["full_attention" if layer in (3, 7) else "linear_attention" for layer in range(8)]
    mlps = ["dense"] + ["sparse"] * 7
    stated = {"layer_types": kinds, "mlp_layer_types": mlps, "linear_head_dim": 32, "linear_num_heads": 4}
    assert read(k3_tiny_config(**stated), tmp_path) == read(k3_tiny_config(), tmp_path)
    # its fallback, which no published file follows
    wrong = ["full_attention" if layer and layer % 4 == 0 else "linear_attention" for layer in range(8)]
    with pytest.raises(CheckpointError, match="layer_types is"):
        read(k3_tiny_config(layer_types=wrong), tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"linear_attn_config": {"kda_layers": [1, 2, 3, 4, 5, 6, 7]}}, "are not each of the layers 1 to 8 once"),
        ({"linear_attn_config": {"kda_layers": [0, 1, 2, 4, 5, 6]}}, "are not each of the layers 1 to 8 once"),
        ({"linear_attn_config": {"full_attn_layers": [4]}}, "are not each of the layers 1 to 8 once"),
        ({"linear_attn_config": {"full_attn_layers": None}}, "full_attn_layers is None"),
        ({"linear_attn_config": {"kda_layers": [True, 2, 3, 5, 6, 7]}}, "kda_layers is"),
        ({"linear_attn_config": {"gate_lower_bound": -6.0}}, "gate_lower_bound is -6.0"),
        ({"linear_attn_config": {"gate_lower_bound": 0.0}}, "gate_lower_bound is 0.0"),
        ({"linear_attn_config": {"new_gate": 1}}, r"linear_attn_config has \['new_gate'\]"),
        ({"mla_use_nope": False}, "mla_use_nope is not true"),
        ({"mla_use_nope": None}, "mla_use_nope is not true"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"num_key_value_heads": 2}, "num_key_value_heads is 2"),
        ({"routed_expert_hidden_size": None}, "latent_moe_use_norm is true, and routed_expert_hidden_size is not set"),
        ({"num_expert_group": 3}, "num_expert_group is 3"),
        ({"topk_group": 2}, "num_expert_group is 1 and topk_group 2"),
        ({"num_experts_per_token": 5}, "num_experts_per_token is 5, of 4"),
        ({"num_expert_group": 4, "topk_group": 1}, "num_experts_per_token is 2, of 1"),
        ({"moe_router_activation_func": "tanh"}, "moe_router_activation_func is 'tanh'"),
        ({"topk_method": "greedy"}, "topk_method is 'greedy'"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is True"),
        ({"attn_res_block_size": 0}, "attn_res_block_size is 0"),
        ({"attention_sink": True}, "unknown config key attention_sink=True"),
        ({"paceline": {"eps": 1}}, "paceline is"),
        ({"kv_lora_rank": None}, "kv_lora_rank is missing"),
    ],
)
def test_what_would_change_the_network_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        read(k3_tiny_config(**changes), tmp_path)
    assert "config.json" in caught.value.origin["config"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vision_config": {"norm_type": "layernorm"}}, "norm_type is 'layernorm'"),
        ({"vision_config": {"pos_emb_interpolation_mode": "bicubic"}}, "pos_emb_interpolation_mode is 'bicubic'"),
        ({"vision_config": {"merge_kernel_size": 2}}, "merge_kernel_size is 2"),
        ({"vision_config": {"qkv_hidden_size": 36}}, "multiples of 4"),
        ({"vision_config": {"window": 3}}, "unknown config key window=3"),
        ({"vision_config": None}, "vision_config is None"),
        ({"text_config": {"model_type": "llama"}}, "text_config.model_type is 'llama'"),
        ({"text_config": {"hidden_act": "gelu"}}, "hidden_act is 'gelu'"),
        ({"media_placeholder_token_id": None}, "media_placeholder_token_id is missing"),
        ({"audio_config": {}}, "unknown config key audio_config"),
    ],
)
def test_multimodal_configs_are_read_as_strictly(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        read(multimodal_config(**changes), tmp_path)


def test_where_a_quantization_config_may_stand() -> None:
    quantization = {"quant_method": "compressed-tensors"}
    assert read_quantization(k3_tiny_config(), "c") is None
    assert read_quantization(k3_tiny_config(quantization_config=quantization), "c") == quantization
    inner = k3_tiny_config(quantization_config=quantization)
    assert read_quantization(multimodal_config(inner), "c") == quantization
    assert read_quantization(multimodal_config(inner, quantization_config=quantization), "c") == quantization
    with pytest.raises(CheckpointError, match="disagree"):
        read_quantization(multimodal_config(inner, quantization_config={"quant_method": "fp8"}), "c")
