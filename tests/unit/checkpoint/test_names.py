"""Every parameter row is filled by exactly one tensor, under the names that Hugging Face models use."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from paceline.checkpoint.contract import DrafterContract, TargetContract
from paceline.checkpoint.names import (
    Slot,
    dense_target_destinations,
    dense_target_ignored,
    dense_target_slots,
    drafter_destinations,
    drafter_slots,
)


def spans(slots: list[Slot]) -> dict[str, list[tuple[int, int]]]:
    found: dict[str, list[tuple[int, int]]] = {}
    for slot in slots:
        found.setdefault(slot.parameter, []).append(slot.destination.rows or (0, slot.shape[0]))
    return found


@pytest.mark.parametrize("attention_bias", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_names_and_shapes_are_those_of_transformers(
    make_target: Callable[..., TargetContract], family: str, tied: bool, attention_bias: bool
) -> None:
    import transformers

    contract = make_target(
        has_qk_norm=family == "qwen3",
        mlp_bias=family == "llama" and attention_bias,
        attention_bias=attention_bias,
        tie_word_embeddings=tied,
        num_layers=2,
    )
    sizes = {
        "hidden_size": contract.hidden_size,
        "intermediate_size": contract.intermediate_size,
        "num_hidden_layers": contract.num_layers,
        "num_attention_heads": contract.num_heads,
        "num_key_value_heads": contract.num_kv_heads,
        "head_dim": contract.head_size,
        "vocab_size": contract.vocab_size,
        "attention_bias": attention_bias,
        "tie_word_embeddings": tied,
    }
    with torch.device("meta"):
        if family == "llama":
            config = transformers.LlamaConfig(mlp_bias=attention_bias, **sizes)
            model: torch.nn.Module = transformers.LlamaForCausalLM(config)
        else:
            model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes))
    expected = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    expected.pop("lm_head.weight", None) if tied else None
    assert {slot.name: slot.shape for slot in dense_target_slots(contract)} == expected


@pytest.mark.parametrize("bias", [False, True])
def test_target_rows_are_covered_once(make_target: Callable[..., TargetContract], bias: bool) -> None:
    contract = make_target(attention_bias=bias, mlp_bias=bias, has_qk_norm=True)
    found = spans(dense_target_slots(contract))
    assert found["layers.1.self_attn.qkv_proj.weight"] == [(0, 32), (32, 48), (48, 64)]
    assert found["layers.0.mlp.gate_up_proj.weight"] == [(0, 48), (48, 96)]
    for ranges in found.values():
        assert [first for first, _ in ranges] == [0, *(last for _, last in ranges[:-1])]
    assert ("layers.0.self_attn.qkv_proj.bias" in found) is bias
    assert ("layers.0.mlp.gate_up_proj.bias" in found) is bias


def test_fused_order_is_q_then_k_then_v_and_gate_then_up(make_target: Callable[..., TargetContract]) -> None:
    places = dense_target_destinations(make_target())
    prefix = "model.layers.3.self_attn"
    assert [places[f"{prefix}.{part}_proj.weight"].rows for part in "qkv"] == [(0, 32), (32, 48), (48, 64)]
    assert {places[f"{prefix}.{part}_proj.weight"].parameter for part in "qkv"} == {
        "layers.3.self_attn.qkv_proj.weight"
    }
    assert places["model.layers.3.mlp.gate_proj.weight"].rows == (0, 48)
    assert places["model.layers.3.mlp.up_proj.weight"].rows == (48, 96)
    assert places["model.norm.weight"].rows is None


def test_only_a_tied_target_ignores_an_output_head(make_target: Callable[..., TargetContract]) -> None:
    tied, untied = make_target(), make_target(tie_word_embeddings=False)
    assert "lm_head.weight" in dense_target_ignored(tied)
    assert "lm_head.weight" not in dense_target_destinations(tied)
    assert "lm_head.weight" not in dense_target_ignored(untied)
    assert dense_target_destinations(untied)["lm_head.weight"].parameter == "lm_head.weight"
    assert "model.layers.3.self_attn.rotary_emb.inv_freq" in dense_target_ignored(untied)


def test_drafter_names_are_those_of_the_z_lab_layout(make_drafter: Callable[..., DrafterContract]) -> None:
    plain = set(drafter_destinations(make_drafter(has_tap_norm=False, num_layers=1)))
    layer = "layers.0"
    assert plain == {
        "fc.weight",
        "hidden_norm.weight",
        "norm.weight",
        f"{layer}.input_layernorm.weight",
        f"{layer}.post_attention_layernorm.weight",
        *(f"{layer}.self_attn.{part}_proj.weight" for part in "qkvo"),
        f"{layer}.self_attn.q_norm.weight",
        f"{layer}.self_attn.k_norm.weight",
        *(f"{layer}.mlp.{part}_proj.weight" for part in ("gate", "up", "down")),
    }


def test_tap_norms_are_required_when_the_contract_has_them(make_drafter: Callable[..., DrafterContract]) -> None:
    with_norm = set(drafter_destinations(make_drafter()))
    without = set(drafter_destinations(make_drafter(has_tap_norm=False)))
    assert with_norm - without == {"fc_norm.0.weight", "fc_norm.1.weight"}


def test_fc_takes_all_taps_of_the_targets_width(make_drafter: Callable[..., DrafterContract]) -> None:
    shapes = {slot.name: slot.shape for slot in drafter_slots(make_drafter(target_hidden_size=24))}
    assert shapes["fc.weight"] == (32, 2 * 24)
    assert shapes["fc_norm.1.weight"] == (24,)
    assert shapes["hidden_norm.weight"] == (32,)


def test_drafter_attention_bias_covers_the_output_projection(make_drafter: Callable[..., DrafterContract]) -> None:
    names = set(drafter_destinations(make_drafter(attention_bias=True)))
    assert {f"layers.1.self_attn.{part}_proj.bias" for part in "qkvo"} <= names
