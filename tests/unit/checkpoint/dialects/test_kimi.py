"""K3's DSpark: latent attention, taps counted by `num_target_layers`, streams, and what it must not have."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from tests.unit.checkpoint.dialects.conftest import load_golden
from tests.unit.checkpoint.dialects.strategies import contracts

from paceline.checkpoint.contract import DrafterContract
from paceline.checkpoint.dialects import contract_from_config, file_names, write_drafter_config
from paceline.errors import CheckpointError


def config(**changes: Any) -> dict[str, Any]:
    merged = load_golden("kimi-dspark") | changes
    return {key: value for key, value in merged.items() if value != "absent"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"num_target_layers": 93},
            "num_target_layers is 93 and target_layer_ids has 5; here it is the number of taps",
        ),
        ({"target_num_hidden_layers": "absent"}, "target_num_hidden_layers is missing"),
        ({"target_layer_ids": [2, 23, 47, 71, 92]}, "92 is the last layer"),
        ({"target_layer_ids": [2, 47, 23, 71, 89]}, "ascending order"),
        ({"mla_use_nope": True}, "mla_use_nope is True"),
        ({"mla_use_output_gate": True}, "mla_use_output_gate is True"),
        ({"mla_use_qk_norm": True}, "mla_use_qk_norm is True"),
        ({"dspark_bonus_anchor": True}, "dspark_bonus_anchor is True; K3 drafters sample"),
        ({"sample_from_anchor": False}, "sample_from_anchor is False"),
        ({"q_lora_rank": None}, "q_lora_rank is missing"),
        ({"qk_rope_head_dim": 3}, "rotary positions need an even one"),
        ({"num_experts": 8}, "num_experts is 8"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"draft_vocab_size": 64}, "draft_vocab_size is 64 and vocab_size 128"),
        ({"aux_hidden_stream": "suffix"}, "legal are prefix and attn_res"),
        ({"layer_types": ["sliding_attention"] * 2}, "of the K3 layout have 'full_attention' only"),
        ({"model_type": "qwen3"}, "supported is 'k3_dspark'"),
        ({"rope_theta": 10000.0}, r"rope_parameters\.rope_theta is 50000.0 and rope_theta is 10000.0"),
        ({"rope_theta": "absent", "rope_parameters": {"rope_type": "default"}}, "names no rope_theta"),
        ({"linear_attn_config": {}}, "unknown config key linear_attn_config"),
    ],
)
def test_refusals(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        contract_from_config(config(**changes), "c")


def test_stream_may_stand_in_either_place_and_must_agree() -> None:
    flat = contract_from_config(config(aux_hidden_stream="attn_res"), "c")
    nested = contract_from_config(config(dflash_config={"aux_hidden_stream": "attn_res"}), "c")
    assert flat == nested and flat.aux_hidden_stream == "attn_res"
    assert contract_from_config(config(), "c").aux_hidden_stream == "prefix"
    with pytest.raises(CheckpointError, match=r"dflash_config\.aux_hidden_stream is 'attn_res' and the top-level"):
        contract_from_config(config(aux_hidden_stream="prefix", dflash_config={"aux_hidden_stream": "attn_res"}), "c")


def test_yarn_reaches_the_contract() -> None:
    rope = contract_from_config(config(), "c").rope
    assert (rope.kind, rope.theta, rope.factor, rope.mscale, rope.mscale_all_dim) == ("yarn", 50000.0, 4.0, 1.0, 1.0)


def test_file_names_are_those_of_the_published_checkpoint() -> None:
    """12 tensors per layer, the context path under TorchSpec's names, both heads: 68 with the copy of the embedding."""
    contract = contract_from_config(config(num_hidden_layers=5, confidence_head_with_markov=True), "c")
    names = list(file_names(contract, "kimi").values())
    assert file_names(contract, "zlab") == file_names(contract, "kimi")
    assert len(names) == 12 * 5 + 3 + 2 + 2  # and the copy of the embedding, which is the target's
    assert {"context_proj.weight", "context_norm.weight", "final_norm.weight"} <= set(names)
    assert "layers.4.self_attn.kv_a_proj_with_mqa.weight" in names


@given(contract=contracts("k3"))
def test_written_contract_reads_back_the_same(contract: DrafterContract) -> None:
    names = file_names(contract).values()
    assert contract_from_config(write_drafter_config(contract), "c", names) == contract
