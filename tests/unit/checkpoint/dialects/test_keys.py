"""Which keys a drafter config may have: known ones only, and other families are named when they are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from paceline.checkpoint.contract import DrafterContract
from paceline.checkpoint.dialects import contract_from_config, write_drafter_config
from paceline.checkpoint.dialects.keys import Place, check_keys, lift, nested
from paceline.checkpoint.target_config import ConfigReader
from paceline.errors import CheckpointError

Make = Callable[..., DrafterContract]


def refusal(config: dict[str, Any]) -> str:
    with pytest.raises(CheckpointError) as caught:
        contract_from_config(config, "c")
    return str(caught.value)


@pytest.mark.parametrize("architectures", [None, [], "DFlashDraftModel", ["DFlashDraftModel", "Other"]])
def test_architectures_must_be_one(make_drafter: Make, architectures: object) -> None:
    assert "architectures is" in refusal(write_drafter_config(make_drafter()) | {"architectures": architectures})


def test_unknown_architecture_and_model_type(make_drafter: Make) -> None:
    config = write_drafter_config(make_drafter())
    assert "'FooDraftModel' is not supported" in refusal(config | {"architectures": ["FooDraftModel"]})
    assert "model_type is 'llama'" in refusal(config | {"model_type": "llama"})


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
    [("hidden_act", "gelu"), ("logit_scale", 0.5), ("mlp_bias", True), ("use_aux_hidden_state", False)],
)
def test_options_that_are_not_served_are_refused(make_drafter: Make, key: str, value: object) -> None:
    config = write_drafter_config(make_drafter())
    config["dflash_config"].pop(key, None)
    assert f"{key} is {value!r}" in refusal(config | {key: value})


def test_true_is_not_one() -> None:
    """A neutral value of another type is another value: `1` is no `true`, and `false` no `0`."""
    reader = ConfigReader({}, "c")
    place = Place("", {"a": True, "b": 0})
    check_keys(place, reader, kind="x", read=(), neutral={"a": (True,), "b": (0,)})
    for neutral in ({"a": (1,), "b": (0,)}, {"a": (True,), "b": (False,)}):
        with pytest.raises(CheckpointError, match="supported is"):
            check_keys(place, reader, kind="x", read=(), neutral=neutral)


def test_lift_takes_any_place_and_spelling_and_refuses_contradictions() -> None:
    reader = ConfigReader({}, "c")
    spellings = {"mask_token_id": ("mask_token_id", "dspark_noise_token_id"), "block_size": ("block_size",)}
    inner = Place("dflash_config", {"mask_token_id": 5, "block_size": None})
    top = Place("", {"dspark_noise_token_id": 5})
    assert lift(spellings, (inner, top), reader) == {"mask_token_id": 5, "block_size": None}
    with pytest.raises(CheckpointError) as caught:
        lift(spellings, (inner, Place("", {"dspark_noise_token_id": 6})), reader)
    assert "dflash_config.mask_token_id is 5 and the top-level dspark_noise_token_id is 6" in caught.value.message
    with pytest.raises(CheckpointError, match="True and"):
        lift({"a": ("a",)}, (Place("x", {"a": True}), Place("", {"a": 1})), reader)


def test_a_nested_object_must_be_one() -> None:
    reader = ConfigReader({}, "c")
    assert nested({}, "x", reader).values == nested({"x": None}, "x", reader).values == {}
    with pytest.raises(CheckpointError, match=r"x is \[1\], expected an object"):
        nested({"x": [1]}, "x", reader)


@pytest.mark.parametrize(
    "key", ["auto_map", "transformers_version", "use_cache", "attention_dropout", "bos_token_id", "_name_or_path"]
)
def test_inert_keys_change_nothing(make_drafter: Make, key: str) -> None:
    contract = make_drafter()
    assert contract_from_config(write_drafter_config(contract) | {key: 0}, contract.origin) == contract
