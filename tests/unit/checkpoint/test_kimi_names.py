"""Names and shapes of Kimi checkpoints: the published inventory, and one parameter row for every tensor row."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path

import pytest
from tests.tiny_kimi import VARIANTS, k3_tiny_config, kimi_contract, kimi_target, multimodal_config, multimodal_target
from tests.unit.checkpoint.test_kimi_config import LINEAR_48B

from paceline.checkpoint.kimi_names import boundary_names, kimi_slots, mtp_names
from paceline.checkpoint.target_config import read_target_contract


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_row_of_every_parameter_is_filled_once(variant: str) -> None:
    config = k3_tiny_config(**VARIANTS[variant])
    _check_rows(kimi_target(config))


def test_every_row_of_the_multimodal_model_is_filled_once() -> None:
    _check_rows(multimodal_target(multimodal_config(vision_config={"attn_bias": True, "linear_bias": True})))


def _check_rows(model: object) -> None:
    parameters, filled = dict(model.named_parameters()), Counter[str]()  # type: ignore[attr-defined]
    slots = kimi_slots(model.contract)  # type: ignore[attr-defined]
    for slot in slots:
        filled[slot.parameter] += slot.shape[0]
        assert parameters[slot.parameter].shape[1:] == slot.shape[1:], slot
    assert filled == {name: parameter.shape[0] for name, parameter in parameters.items()}
    assert len({slot.name for slot in slots}) == len(slots)


def test_sizes_of_the_published_model(tmp_path: Path) -> None:
    """Parameter counts of Kimi-Linear-48B-A3B, by part."""
    (tmp_path / "config.json").write_text(json.dumps(LINEAR_48B))
    slots = kimi_slots(read_target_contract(tmp_path, "k"))

    def count(*parts: str) -> int:
        return sum(math.prod(slot.shape) for slot in slots if all(part in slot.name for part in parts))

    assert count("layers.0.self_attn") == 39_514_272
    assert count("layers.3.self_attn") == 29_114_880
    assert count("layers.0.mlp") == 63_700_992
    assert count("layers.1.block_sparse_moe.experts.7.") == 7_077_888
    assert abs(count("") - 49.12e9) < 0.005e9


def test_sizes_of_the_tiny_model() -> None:
    slots = kimi_slots(kimi_contract(k3_tiny_config()))
    counts = [math.prod(slot.shape) for slot in slots]
    assert sum(counts) == 1_574_588 - 6 * 28  # its count has decay rates as wide as a head
    scores = [slot for slot in slots if "_res_" in slot.name and "layers.0." in slot.name]
    assert sum(math.prod(slot.shape) for slot in scores) == 512


def test_names_of_both_prefixes() -> None:
    text, wrapped = kimi_contract(k3_tiny_config()), kimi_contract(multimodal_config())
    names = {slot.name for slot in kimi_slots(text)}
    assert {"model.embed_tokens.weight", "lm_head.weight", "model.output_attn_res_proj.weight"} <= names
    assert "model.layers.1.block_sparse_moe.experts.3.w2.weight" in names
    others = {slot.name for slot in kimi_slots(wrapped)}
    assert {f"language_model.{name}" for name in names} < others
    assert {
        "mm_projector.proj.0.weight",
        "mm_projector.proj.2.weight",
        "mm_projector.post_norm.weight",
        "vision_tower.patch_embed.proj.weight",
        "vision_tower.patch_embed.pos_emb.weight",
        "vision_tower.encoder.blocks.1.wqkv.weight",
        "vision_tower.encoder.blocks.1.wo.weight",
        "vision_tower.encoder.blocks.1.mlp.fc0.weight",
        "vision_tower.encoder.blocks.1.mlp.fc1.weight",
        "vision_tower.encoder.blocks.0.norm0.weight",
        "vision_tower.encoder.blocks.0.norm1.weight",
        "vision_tower.encoder.final_layernorm.weight",
    } < others
    assert boundary_names(text, 3)[0] == "model.layers.3.self_attention_res_norm.weight"
    assert boundary_names(wrapped, 3)[1] == "language_model.model.layers.3.self_attention_res_proj.weight"


def test_layers_of_multi_token_prediction_are_known_by_number() -> None:
    contract = kimi_contract(k3_tiny_config(num_nextn_predict_layers=1))
    names = ["model.layers.7.mlp.x", "model.layers.8.eh_proj.weight", "language_model.layers.8.enorm.weight"]
    names += ["model.layers.9.enorm.weight", "layers.8.x.weight", "model.layers.80.x", "vision_tower.blocks.8.w"]
    assert mtp_names(contract, names) == {names[1], names[2], names[4]}
    assert mtp_names(kimi_contract(k3_tiny_config()), names) == set()
