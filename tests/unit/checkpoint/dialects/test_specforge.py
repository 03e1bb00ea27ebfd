"""SpecForge's DSpark: nested keys, attention modes, no overrides of causality."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from tests.unit.checkpoint.dialects.conftest import full_contract, load_golden

from paceline.checkpoint.dialects import contract_from_config, file_names, write_drafter_config
from paceline.errors import CheckpointError


def config(nested: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    merged = load_golden("specforge-dspark") | changes
    inner = merged["dflash_config"] | (nested or {})
    merged["dflash_config"] = {key: value for key, value in inner.items() if value != "absent"}
    return {key: value for key, value in merged.items() if value != "absent"}


@pytest.mark.parametrize(
    ("changes", "nested", "message"),
    [
        ({}, {"projector_type": "other"}, "projector_type is 'other'"),
        ({}, {"projector_type": "domino"}, "Domino"),
        ({}, {"attention_mode": "mha"}, "4 query and 2 key heads"),
        ({"num_key_value_heads": 4}, {}, "4 query and 4 key heads"),
        ({}, {"attention_mode": "mla"}, "attention_mode is 'mla'"),
        ({}, {"sample_from_anchor": False}, "sample_from_anchor is False"),
        ({}, {"causal": True}, "unknown config key dflash_config.causal"),
        ({"is_causal": False}, {}, "unknown config key is_causal"),
        ({}, {"markov_rank": "absent"}, "markov_rank is missing"),
        ({}, {"confidence_head_with_markov": "absent"}, "confidence_head_with_markov is missing"),
        ({"markov_rank": 5}, {}, "dflash_config.markov_rank is 6 and the top-level markov_rank is 5"),
        ({}, {"shift_label": True}, "Domino of SpecForge"),
        ({"layer_types": ["sliding_attention"] * 2}, {}, "are sliding and sliding_window is None"),
    ],
)
def test_refusals(changes: dict[str, Any], nested: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        contract_from_config(config(nested, **changes), "c")


def test_keys_are_lifted_from_either_place() -> None:
    flat = config({"markov_rank": "absent", "markov_head_type": "absent"}, markov_rank=6, markov_head_type="rnn")
    assert contract_from_config(flat, "c") == contract_from_config(config(), "c")


def test_sliding_layers_are_causal() -> None:
    sliding = config(layer_types=["sliding_attention", "full_attention"], sliding_window=64, use_sliding_window=True)
    contract = contract_from_config(sliding, "c")
    assert (contract.layer_windows, contract.layer_causal) == ((64, None), (True, False))
    assert contract_from_config(write_drafter_config(contract, "specforge"), "c") == contract
    with pytest.raises(CheckpointError, match="cannot state layer_causal"):
        write_drafter_config(dataclasses.replace(contract, layer_causal=(False, False)), "specforge")


def test_modes_are_written_by_the_heads() -> None:
    contract = contract_from_config(config(), "c")
    assert write_drafter_config(contract, "specforge")["dflash_config"]["attention_mode"] == "gqa"
    equal = dataclasses.replace(contract, num_kv_heads=4)
    assert write_drafter_config(equal, "specforge")["dflash_config"]["attention_mode"] == "mha"
    assert contract_from_config(write_drafter_config(equal, "specforge"), "c") == equal


def test_eagle3_is_written_with_its_middle_layer() -> None:
    contract = full_contract("specforge-eagle3")
    names = file_names(contract, "specforge")
    assert names["layers.0.self_attn.q_proj.weight"] == "midlayer.self_attn.q_proj.weight"
    config = write_drafter_config(contract, "specforge")
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 17, 32]
    assert "eagle_aux_hidden_state_layer_ids" not in config and config["norm_output"] is True
    two = dataclasses.replace(contract, num_layers=2, layer_windows=(None, None), layer_causal=(True, True))
    with pytest.raises(CheckpointError, match="cannot state num_layers 2"):
        write_drafter_config(two, "specforge")
    with pytest.raises(CheckpointError, match="cannot state num_taps 2"):
        write_drafter_config(dataclasses.replace(contract, target_layer_ids=(1, 2)), "specforge")
