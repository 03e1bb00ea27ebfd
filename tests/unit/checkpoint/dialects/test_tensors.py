"""Names of tensors in every layout: whole components, never substrings."""

from __future__ import annotations

import pytest
from tests.unit.checkpoint.dialects.conftest import full_contract

from paceline.checkpoint.dialects.tensors import canonical_name, canonical_names, file_name, fused_parts, has_module
from paceline.errors import CheckpointError


@pytest.mark.parametrize(
    ("stored", "canonical"),
    [
        ("midlayer.self_attn.q_proj.weight", "layers.0.self_attn.q_proj.weight"),
        ("midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight"),
        ("context_proj.weight", "fc.weight"),
        ("context_proj.weight_scale", "fc.weight_scale"),
        ("context_norm.weight", "hidden_norm.weight"),
        ("final_norm.weight", "norm.weight"),
        ("encoder.fc.weight", "fc.weight"),
        ("encoder.output_norm_enc.weight", "hidden_norm.weight"),
        ("logit_head.markov_head.markov_w1.weight", "markov_head.markov_w1.weight"),
        ("logit_head.confidence_head.proj.bias", "confidence_head.proj.bias"),
        # nothing but whole first components
        ("midlayers.0.weight", "midlayers.0.weight"),
        ("layers.0.midlayer.weight", "layers.0.midlayer.weight"),
        ("encoder.fc2.weight", "encoder.fc2.weight"),
        ("my_context_proj.weight", "my_context_proj.weight"),
        ("lilicorr.layers.0.mlp.up_proj.weight", "lilicorr.layers.0.mlp.up_proj.weight"),
        ("markov_head.gate_proj.weight", "markov_head.gate_proj.weight"),
        ("candidate_selector.predecessor_codebook", "candidate_selector.predecessor_codebook"),
    ],
)
def test_canonical_names(stored: str, canonical: str) -> None:
    assert canonical_name(stored) == canonical


@pytest.mark.parametrize("renaming", ["torchspec", "kimi", "assistant", "midlayer", "zlab"])
def test_names_come_back(renaming: str) -> None:
    for name in ("fc.weight", "hidden_norm.weight", "norm.weight", "layers.0.hidden_norm.weight", "layers.1.mlp.x"):
        assert canonical_name(file_name(name, renaming)) == name
    assert file_name("layers.1.mlp.up_proj.weight", renaming) == "layers.1.mlp.up_proj.weight"


def test_two_tensors_for_one_are_refused() -> None:
    with pytest.raises(CheckpointError, match=r"fc\.weight and context_proj\.weight both stand for fc\.weight"):
        canonical_names(["fc.weight", "context_proj.weight"], "file")


def test_modules_are_whole_components() -> None:
    names = ["lm_head.weight", "fc_norm.0.weight", "mask_hidden"]
    assert has_module(names, "lm_head") and has_module(names, "fc_norm", "0") and has_module(names, "mask_hidden")
    assert not has_module(names, "lm") and not has_module(names, "fc") and not has_module(names, "mask")


def test_fused_parts_follow_the_contract_and_the_file() -> None:
    contract = full_contract("zlab-dflash")  # 4 query and 2 key heads of 16
    names = [
        "layers.1.self_attn.qkv_proj.weight",
        "layers.0.mlp.gate_up_proj.weight_packed",
        "markov_head.gate_proj.weight",
    ]
    assert fused_parts(contract, names) == {
        "layers.1.self_attn.qkv_proj.weight": [
            ("layers.1.self_attn.q_proj.weight", 64),
            ("layers.1.self_attn.k_proj.weight", 32),
            ("layers.1.self_attn.v_proj.weight", 32),
        ],
        "layers.0.mlp.gate_up_proj.weight": [
            ("layers.0.mlp.gate_proj.weight", 48),
            ("layers.0.mlp.up_proj.weight", 48),
        ],
    }
    # a bias that this drafter does not have, or a layer beyond its last, stays as it is and is refused as unused
    assert fused_parts(contract, ["layers.1.self_attn.qkv_proj.bias", "layers.7.self_attn.qkv_proj.weight"]) == {}


def test_fused_parts_of_a_renamed_layer_keep_its_spelling() -> None:
    contract = full_contract("specforge-eagle3")
    parts = fused_parts(contract, ["midlayer.self_attn.qkv_proj.weight"])
    assert parts["midlayer.self_attn.qkv_proj.weight"][0] == ("midlayer.self_attn.q_proj.weight", 64)
