"""Which keys a drafter config may have: known ones only, and other families are named when they are refused."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
from tests.unit.checkpoint.dialects.conftest import GOLDEN_NAMES, load_golden, tiny_tensors

from paceline.checkpoint.config_reader import ConfigReader
from paceline.checkpoint.contract import DrafterContract
from paceline.checkpoint.dialects import (
    assistant,
    contract_from_config,
    deepspec,
    eagle3,
    fields,
    kimi,
    specforge,
    speculators,
    torchspec,
    write_drafter_config,
    zlab,
)
from paceline.checkpoint.dialects.keys import Place, check_keys, lift, nested
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


# Wrong values to add, of the right type, so that a key that is checked for its type alone is still seen as unread. A
# flag is tried both ways, since one of them may be right.
_FLAGS = {
    *("attention_bias", "use_sliding_window", "tie_word_embeddings", "is_neox_style", "is_causal", "has_own_lm_head"),
    *("add_swa_attention_sink_bias", "sample_from_anchor", "fc_norm", "use_aux_hidden_state", "causal", "use_swa"),
    *("attention_sink_bias", "enable_confidence_head", "confidence_head_with_markov", "dspark_bonus_anchor"),
    *("norm_before_residual", "norm_before_fc", "norm_output", "doubles_every_layer", "sliding_window_non_causal"),
    *("mlp_bias", "rope_interleaved", "is_decoder", "is_encoder_decoder", "add_cross_attention"),
    *("tie_encoder_decoder", "torchscript", "mla_use_nope", "mla_use_output_gate", "mla_use_qk_norm"),
}
_WRONG: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(_FLAGS, (True, False)),
    **dict.fromkeys(("rope_parameters", "rope_scaling", "pruned_heads"), ({"other": 1},)),
    **dict.fromkeys(("dflash_config", "eagle_config", "paceline"), ({"other": 1},)),
    **dict.fromkeys(("quantization_config", "compression_config"), ({"quant_method": "fp8"},)),
    **dict.fromkeys(("target_layer_ids", "dspark_target_layer_ids"), ([0, 11],)),
    "layer_types": (["sliding_attention"], ["sliding_attention", "sliding_attention"]),
    **dict.fromkeys(("dtype", "torch_dtype"), ("float16",)),
    **dict.fromkeys(("model_type", "hidden_act", "target_name"), ("other",)),
    "draft_sample_method": ("greedy", "probabilistic"),
    "aux_hidden_stream": ("prefix", "attn_res"),
    "markov_head_type": ("rnn", "gated"),
    "attention_mode": ("mha",),
    "projector_type": ("domino",),
}
_PATHS = {"": (), "verifier": ("speculators_config", "verifier")}
# Keys that may be added with a wrong value and change nothing: (key, golden configs, reason). `inert` of a key table is
# not tried at all; its own comments say why.
_SPECULATORS = [name for name in GOLDEN_NAMES if name.startswith("speculators")]
_HEADLESS = ["deepspec-dflash", "kimi-dspark-attn-res"]
_FULL = ["deepspec-dflash", "deepspec-dspark", "deepspec-eagle3", "kimi-dspark", "kimi-dspark-attn-res"]
_FULL += ["specforge-dspark", "specforge-eagle3", "torchspec-dflash", "zlab-dflash"]
_ADDED_WITHOUT_EFFECT: tuple[tuple[str, Iterable[str], str], ...] = (
    ("quantization_config", GOLDEN_NAMES, "opening the weights reads it, and compares it with them"),
    ("is_decoder", GOLDEN_NAMES, "of the base class; what rows see is said by other keys"),
    ("transformer_layer_config.is_decoder", _SPECULATORS, "the same"),
    ("model_type", _SPECULATORS, "the class's word for itself; speculators_model_type says which it is"),
    ("sliding_window", [*_FULL, "zlab-dflash-sinks"], "no layer slides by it; configs carry the number all the same"),
    ("transformer_layer_config.sliding_window", ["speculators-eagle3"], "the same"),
    ("use_sliding_window", ["kimi-dspark", "kimi-dspark-attn-res", "specforge-eagle3", "torchspec-dflash"], "the same"),
    ("tie_word_embeddings", ["assistant-dflash"], "the file has neither end, and the target's are as they are"),
    ("transformer_layer_config.tie_word_embeddings", ["speculators-dflash2"], "the same"),
    ("has_own_lm_head", [*_FULL[:3], "specforge-eagle3"], "true is right, and a stored head is used if it is false"),
    ("confidence_head_alpha", ["kimi-dspark", "native-dspark"], "any positive weight of a loss says the same"),
    ("dflash_config.confidence_head_alpha", ["kimi-dspark", "native-dspark"], "the same"),
    ("confidence_head_with_markov", _HEADLESS, "there is no confidence head that could read it"),
    ("dflash_config.confidence_head_with_markov", _HEADLESS, "the same"),
    ("markov_head_type", ["deepspec-dflash"], "rank 0: there is no head that could have a kind"),
    ("dflash_config.markov_head_type", ["deepspec-dflash"], "the same"),
    (
        "dflash_config.causal",
        ["zlab-dflash2", "zlab-dflash2-latent"],
        "is_causal outranks it, case R11 of test_layer_attention.py",
    ),
    (
        "dflash_config.use_swa",
        ["native-dspark", "specforge-dflash", "zlab-dflash2", "zlab-dflash2-latent"],
        "layer_types slide, case R8",
    ),
)


def _tables(config: dict[str, Any], names: list[str], monkeypatch: pytest.MonkeyPatch) -> dict[str, set[str]]:
    """Every object that a layout may have, and the keys that its table takes and does not call inert."""
    found: dict[str, set[str]] = {}

    def noted(place: Place, reader: ConfigReader, *, read: Iterable[str], **rest: Any) -> None:
        neutral: Mapping[str, object] = rest.get("neutral") or {}
        found.setdefault(place.name, set()).update(read, neutral)
        check_keys(place, reader, read=read, **rest)

    with monkeypatch.context() as patched:
        for module in (assistant, deepspec, eagle3, fields, kimi, specforge, speculators, torchspec, zlab):
            patched.setattr(module, "check_keys", noted)
        contract_from_config(config, "c", names)
    return found


@pytest.mark.parametrize("name", GOLDEN_NAMES)
def test_no_key_can_be_added_unseen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each key that a table takes and the config has not: refused, or another contract, or listed with a reason."""
    config, names = load_golden(name), list(tiny_tensors(name))
    trained = contract_from_config(config, "c", names)
    unseen = set()
    for place, keys in _tables(config, names, monkeypatch).items():
        if "[" in place:  # an entry of a list, which has all of its keys
            continue
        for key in keys:
            path = (*_PATHS.get(place, (place,)), key)
            if not any(_is_seen(config, path, value, names, trained) for value in _WRONG.get(key, (11,))):
                unseen.add(".".join(path))
    allowed = {key for key, goldens, _ in _ADDED_WITHOUT_EFFECT if name in goldens}
    assert unseen == allowed


def _is_seen(
    config: dict[str, Any], path: tuple[str, ...], value: object, names: list[str], trained: DrafterContract
) -> bool:
    changed = copy.deepcopy(config)
    inner = changed
    for part in path[:-1]:
        inner[part] = inner.get(part) or {}
        inner = inner[part]
    if inner.get(path[-1]) is not None:
        return True  # there already: altering it is tried in test_table.py
    inner[path[-1]] = value
    try:
        return contract_from_config(changed, "c", names) != trained
    except CheckpointError:
        return True
