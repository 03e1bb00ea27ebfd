"""Which keys a drafter config may have: known ones only, and other families are named when they are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from paceline.checkpoint.contract import DrafterContract
from paceline.checkpoint.dialects import contract_from_config, write_drafter_config
from paceline.errors import CheckpointError

Make = Callable[..., DrafterContract]


def refusal(config: dict[str, Any]) -> str:
    with pytest.raises(CheckpointError) as caught:
        contract_from_config(config, "c")
    return str(caught.value)


@pytest.mark.parametrize(
    ("architecture", "family"),
    [
        ("DFlash2DraftModel", "DFlash2"),
        ("Qwen3DSparkModel", "DSpark"),
        ("DSparkDraftModel", "DSpark"),
        ("K3DSparkModel", "DSpark"),
        ("LlamaForCausalLMEagle3", "EAGLE-3"),
        ("PEagleDraftModel", "P-EAGLE"),
        ("LiLiCorrDraftModel", "LiLiCorr"),
        ("Qwen3XPressModel", "XPress"),
        ("DFlashLagunaForCausalLM", "Laguna"),
    ],
)
def test_other_families_are_refused_by_name(make_drafter: Make, architecture: str, family: str) -> None:
    message = refusal(write_drafter_config(make_drafter()) | {"architectures": [architecture]})
    assert family in message and architecture in message and "DFlashDraftModel" in message


def test_speculators_layout_is_refused_by_name(make_drafter: Make) -> None:
    message = refusal(write_drafter_config(make_drafter()) | {"speculators_model_type": "dflash"})
    assert "speculators layout" in message


@pytest.mark.parametrize("architectures", [None, [], "DFlashDraftModel", ["DFlashDraftModel", "Other"]])
def test_architectures_must_be_one(make_drafter: Make, architectures: object) -> None:
    assert "architectures is" in refusal(write_drafter_config(make_drafter()) | {"architectures": architectures})


def test_unknown_architecture_and_model_type(make_drafter: Make) -> None:
    config = write_drafter_config(make_drafter())
    assert "'FooDraftModel' is not supported" in refusal(config | {"architectures": ["FooDraftModel"]})
    assert "model_type is 'dflash'" in refusal(config | {"model_type": "dflash"})


@pytest.mark.parametrize(
    ("key", "family"),
    [
        ("selector_rank", "DFlash2"),
        ("conv_kernel_size", "DFlash2"),
        ("markov_rank", "DSpark"),
        ("dspark_target_layer_ids", "DSpark"),
        ("eagle_config", "EAGLE-3"),
        ("projector_type", "Domino"),
        ("sliding_window_non_causal", "speculators"),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_keys_of_other_families_contradict_the_architecture(
    make_drafter: Make, key: str, family: str, nested: bool
) -> None:
    config = write_drafter_config(make_drafter())
    (config["dflash_config"] if nested else config)[key] = 1
    message = refusal(config)
    assert family in message and key in message


@pytest.mark.parametrize("nested", [False, True])
def test_unknown_key_is_refused_in_either_place(make_drafter: Make, nested: bool) -> None:
    config = write_drafter_config(make_drafter())
    (config["dflash_config"] if nested else config)["brand_new"] = None
    message = refusal(config)
    assert ("dflash_config.brand_new" if nested else "unknown config key brand_new") in message


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_act", "gelu"),
        ("has_own_lm_head", True),
        ("logit_scale", 0.5),
        ("quantization_config", {"quant_method": "fp8"}),
        ("use_aux_hidden_state", False),
    ],
)
def test_options_that_are_not_served_are_refused(make_drafter: Make, key: str, value: object) -> None:
    config = write_drafter_config(make_drafter())
    config["dflash_config"].pop(key, None)
    assert f"{key} is {value!r}" in refusal(config | {key: value})


@pytest.mark.parametrize(("key", "value"), [("attention_sink_bias", True), ("attention_value_scale", 0.5)])
def test_nested_options_that_are_not_served_are_refused(make_drafter: Make, key: str, value: object) -> None:
    config = write_drafter_config(make_drafter())
    config["dflash_config"][key] = value
    assert f"dflash_config.{key} is {value!r}" in refusal(config)


@pytest.mark.parametrize(
    "key", ["auto_map", "transformers_version", "use_cache", "attention_dropout", "bos_token_id", "_name_or_path"]
)
def test_inert_keys_change_nothing(make_drafter: Make, key: str) -> None:
    contract = make_drafter()
    assert contract_from_config(write_drafter_config(contract) | {key: 0}, contract.origin) == contract
