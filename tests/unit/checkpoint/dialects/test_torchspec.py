"""TorchSpec's flat DFlash: `num_target_layers` counts taps, everything is full attention."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.checkpoint.dialects.conftest import full_contract, load_golden

from paceline.checkpoint.dialects import contract_from_config, file_names, write_drafter_config
from paceline.errors import CheckpointError


def config(**changes: Any) -> dict[str, Any]:
    merged = load_golden("torchspec-dflash") | changes
    return {key: value for key, value in merged.items() if value != "absent"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_target_layers": 36}, "num_target_layers is 36 and target_layer_ids has 5"),
        ({"target_num_hidden_layers": "absent"}, "target_num_hidden_layers is missing"),
        ({"target_num_hidden_layers": 34}, "33 is the last layer"),
        ({"block_size": "absent"}, "block_size is missing"),
        ({"rope_theta": "absent"}, "names no rope_theta"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"is_neox_style": False}, "is_neox_style is False"),
        ({"is_causal": True}, "is_causal is True"),
        ({"layer_types": ["sliding_attention"] * 2}, "of the TorchSpec layout have 'full_attention' only"),
        ({"draft_vocab_size": 64}, "DFlash of TorchSpec has the full vocabulary"),
        ({"dflash_config": {}}, "unknown config key dflash_config"),
        ({"use_aux_hidden_state": False}, "use_aux_hidden_state is False"),
    ],
)
def test_refusals(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        contract_from_config(config(**changes), "c")


def test_the_same_string_with_another_model_type_is_z_labs() -> None:
    """One architecture string, two layouts, in which one key means two things: the model type decides."""
    with pytest.raises(CheckpointError, match="target_num_hidden_layers belongs to TorchSpec"):
        contract_from_config(config(model_type="qwen3"), "c")


def test_names() -> None:
    names = file_names(full_contract("torchspec-dflash"), "torchspec")
    assert (names["fc.weight"], names["hidden_norm.weight"], names["norm.weight"]) == (
        "context_proj.weight",
        "context_norm.weight",
        "final_norm.weight",
    )
    assert write_drafter_config(full_contract("torchspec-dflash"), "torchspec")["num_target_layers"] == 5
