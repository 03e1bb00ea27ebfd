"""All dialects: golden configs are read as their ecosystems mean them, and no field can be lost or altered unseen."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.checkpoint.dialects.conftest import (
    GOLDEN_NAMES,
    full_contract,
    leaves,
    load_golden,
    stored_name,
    tiny_tensors,
    with_change,
)
from tests.unit.checkpoint.dialects.strategies import contracts

from paceline.checkpoint.compatibility import complete_contract
from paceline.checkpoint.contract import (
    ConfidenceSettings,
    ConvolutionSettings,
    DrafterContract,
    Eagle3Settings,
    LatentAttentionSettings,
    MarkovSettings,
    RopeSettings,
    SelectorSettings,
)
from paceline.checkpoint.dialects import (
    Dialect,
    contract_from_config,
    detect_dialect,
    file_names,
    read_drafter,
    read_drafter_contract,
    write_drafter_config,
)
from paceline.checkpoint.names import drafter_slots
from paceline.errors import CheckpointError

FIVE = (1, 9, 17, 25, 33)  # the same five taps in every dialect's spelling: the worked example of a 36-layer target
EXPECTED: dict[str, tuple[str, dict[str, Any]]] = {
    "zlab-dflash": ("zlab", {"family": "dflash", "block_size": 16, "layout": "fill_in", "num_draft_tokens": 15}),
    "zlab-dflash2": (
        "zlab",
        {
            "family": "dflash2",
            "convolution": ConvolutionSettings(2, 16),
            "selector": SelectorSettings(12, 6),
            "layer_windows": (2048, 2048),
            "layer_causal": (False, False),
            "input_embedding_scale": 4.0,
            "output_multiplier": 0.5,
            "final_logit_softcapping": 30.0,
            "draft_sample_method": "probabilistic",
            "num_draft_tokens": 7,
        },
    ),
    "zlab-dflash2-latent": (
        "zlab",  # Kimi-K3's: latent attention under z-lab's names, and the pairing that all latent drafters have
        {
            "family": "dflash2",
            "target_layer_ids": (19, 37, 66, 78, 90),
            "target_num_layers": 93,
            "latent": LatentAttentionSettings(24, 16, 8, 4, 8),
            "is_neox_style": False,
            "layout": "fill_in",
            "layer_windows": (64, None),
            "layer_causal": (False, False),
            "convolution": ConvolutionSettings(2, 16),
            "selector": SelectorSettings(12, 6),
            "num_draft_tokens": 7,
        },
    ),
    "zlab-dflash-sinks": (
        "zlab",
        {
            "has_attention_sink": True,
            "attention_value_scale": 0.5,
            "layer_windows": (64, 64),
            "layer_causal": (True, True),
            "has_tap_norm": True,
            "aux_hidden_stream": "attn_res",
            "is_neox_style": False,
            "target_hidden_size": 48,
            "draft_vocab_size": 64,
        },
    ),
    "assistant-dflash": (
        "assistant",
        {
            "family": "dflash",
            "layer_windows": (2048, None),
            "layer_causal": (False, False),
            "target_num_layers": 0,
            "vocab_size": 0,
            "num_draft_tokens": 15,
        },
    ),
    "speculators-dflash": (
        "speculators",
        {
            "family": "dflash",
            "layer_windows": (64, None),
            "layer_causal": (True, False),  # never the full layer, whatever other engines make of the flag
            "target_name": "Qwen/Qwen3-8B",
            "target_num_layers": 0,
            "draft_vocab_size": 64,
            "num_draft_tokens": 7,
        },
    ),
    "speculators-dflash2": (
        "speculators",
        {
            "family": "dflash2",
            "layer_causal": (False, False),
            "convolution": ConvolutionSettings(2, 8),
            "selector": SelectorSettings(12, 6),
        },
    ),
    "speculators-dspark": (
        "speculators",
        {
            "family": "dspark",
            "layout": "anchor_sampling",
            "layer_windows": (64, None),
            "layer_causal": (False, False),
            "markov": MarkovSettings(6, "gated"),
            "confidence": ConfidenceSettings(True),
            "num_draft_tokens": 8,
        },
    ),
    "speculators-eagle3": (
        "speculators",
        {
            "family": "eagle3",
            "target_layer_ids": (1, 17, 32),
            "layout": "autoregressive",
            "num_draft_tokens": 3,
            "has_qk_norm": False,
            "eagle3": Eagle3Settings(True, True, True, doubles_every_layer=False),
            "layer_causal": (True, True),
        },
    ),
    "specforge-dflash": (
        "zlab",  # SpecForge's plain DFlash is z-lab's layout
        {"family": "dflash", "layer_windows": (128, None), "layer_causal": (True, False)},
    ),
    "specforge-dspark": (
        "specforge",
        {
            "family": "dspark",
            "layout": "anchor_sampling",
            "markov": MarkovSettings(6, "rnn"),
            "confidence": ConfidenceSettings(False),
            "num_draft_tokens": 7,
        },
    ),
    "specforge-eagle3": (
        "specforge",
        {
            "family": "eagle3",
            "target_layer_ids": (1, 17, 32),
            "has_qk_norm": False,
            # norm_output true means the final norm before the head here, not a recycled normed state
            "eagle3": Eagle3Settings(False, True, False, doubles_every_layer=False),
            "draft_vocab_size": 64,
        },
    ),
    "torchspec-dflash": ("torchspec", {"family": "dflash", "target_num_layers": 36, "num_taps": 5}),
    "deepspec-dspark": (
        "deepspec",
        {
            "family": "dspark",
            "layout": "anchor_sampling",
            "markov": MarkovSettings(6, "vanilla"),
            "confidence": ConfidenceSettings(True),
            "num_draft_tokens": 7,
        },
    ),
    "deepspec-dflash": (
        "deepspec",  # DSpark without heads, not z-lab's DFlash: the anchor's row is sampled
        {"family": "dspark", "layout": "anchor_sampling", "markov": None, "confidence": None, "num_draft_tokens": 7},
    ),
    "deepspec-eagle3": (
        "deepspec",
        {
            "family": "eagle3",
            "has_qk_norm": True,
            "eagle3": Eagle3Settings(False, False, False, doubles_every_layer=True),
        },
    ),
    "kimi-dspark": (
        "kimi",
        {
            "family": "dspark",
            "target_num_layers": 93,
            "target_layer_ids": (2, 23, 47, 71, 89),
            "latent": LatentAttentionSettings(24, 16, 8, 4, 8),
            "is_neox_style": False,
            "layout": "anchor_sampling",
            "num_draft_tokens": 7,  # report B08: block_size 7 is seven proposals
            "rms_norm_eps": 1e-5,
            "rope": RopeSettings(
                theta=50000.0,
                kind="yarn",
                factor=4.0,
                original_max_position_embeddings=1024,
                mscale=1.0,
                mscale_all_dim=1.0,
            ),
        },
    ),
    "kimi-dspark-attn-res": (
        "kimi",
        {
            "target_layer_ids": (7, 31, 47, 63, 87),
            "has_tap_norm": True,
            "aux_hidden_stream": "attn_res",
            "markov": MarkovSettings(6, "vanilla"),
            "confidence": None,
        },
    ),
    "native-dspark": (
        "zlab",
        {
            "layout": "fill_in",
            "draft_top_k": 5,
            "layer_windows": (64, None),
            "layer_causal": (False, False),
            "target_vocab_size": 127,
            "draft_sample_method": "greedy",
            "confidence": ConfidenceSettings(False),
        },
    ),
    "native-eagle3": (
        "zlab",
        {
            "target_layer_ids": (1, 17, 32),
            "eagle3": Eagle3Settings(True, False, True, doubles_every_layer=True),
            "has_tap_norm": True,
            "has_qk_norm": True,
            "layer_windows": (64, None),
            "num_draft_tokens": 5,
        },
    ),
}
_OTHER_TAPS = {"kimi-dspark", "kimi-dspark-attn-res", "specforge-eagle3", "speculators-eagle3", "native-eagle3"} | {
    "zlab-dflash2-latent"
}


@pytest.mark.parametrize("name", GOLDEN_NAMES)
def test_golden_config_and_its_checkpoint(name: str, golden_folder: Callable[..., Path]) -> None:
    dialect, fields = EXPECTED[name]
    files = read_drafter(golden_folder(name))
    contract = files.contract
    assert files.dialect == dialect == detect_dialect(load_golden(name), "c")
    found = {field: getattr(contract, field) for field in fields}
    assert found == fields
    if name not in _OTHER_TAPS:
        assert contract.target_layer_ids == FIVE
    assert contract.origin == str(files.folder / "config.json")
    assert contract == read_drafter_contract(files.folder)
    assert dataclasses.replace(contract, origin="c") == full_contract(name)
    # every slot under its canonical name, in its shape, and nothing else but what is said to be ignored
    slots = {slot.name: slot.shape for slot in drafter_slots(contract)}
    assert set(files.source.names()) == {*slots, *files.ignored}
    stored = tiny_tensors(name)
    for slot, shape in slots.items():
        assert files.source.shape(slot) == shape
        assert files.source.load(slot).equal(stored[stored_name(name, slot)])
    if contract.has_vocabulary_map:
        assert files.draft_to_target is not None
        assert files.draft_to_target.equal(stored["t2d"].nonzero().flatten())
    else:
        assert files.draft_to_target is None


# keys whose loss or change does not change what the drafter is, and why
_NOTES = {
    "auto_map",
    "attention_dropout",
    "initializer_range",
    "use_cache",
    "transformers_version",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "max_window_layers",
    "speculators_version",
    "num_anchors",
    "embed_requires_grad",
}
_VERIFIER = ("speculators_config", "verifier", "architectures")  # notes on the target; its name is kept
# the tensors decide, or any positive number means the same, or there is nothing to tie
_ALTERED_WITHOUT_EFFECT = {"has_own_lm_head", "confidence_head_alpha", "tie_word_embeddings"}
_WINDOW = {"sliding_window", "use_sliding_window"}  # read only where a layer slides by it
# keys whose absence means what the golden config says, in every engine that reads its layout
_ABSENT_MEANS_THE_SAME = {
    *("model_type", "hidden_act", "attention_bias", "rope_scaling", "rope_type", "layer_types", "use_sliding_window"),
    *("beta_fast", "beta_slow", "tie_word_embeddings", "has_own_lm_head", "target_hidden_size", "use_aux_hidden_state"),
    *("mla_use_nope", "mla_use_output_gate", "mla_use_qk_norm", "dspark_bonus_anchor", "num_experts", "mlp_bias"),
    *("pretraining_tp", "default_proposal_method", "norm_before_fc", "norm_output", "fc_norm", "ttt_length"),
    *("sample_from_anchor", "sliding_window_non_causal", "attention_mode", "projector_type"),
}
# keys that say what another key of the same config says too
_SAID_TWICE: dict[str, set[str]] = {
    "deepspec-dspark": {"confidence_head_alpha", "enable_confidence_head"},
    "deepspec-dflash": {"confidence_head_alpha"},
    "kimi-dspark": {"rope_theta", "rope_parameters.rope_theta"},
    "kimi-dspark-attn-res": {"rope_theta", "rope_parameters.rope_theta"},
    "zlab-dflash2-latent": {"rope_theta", "rope_parameters.rope_theta", "draft_vocab_size"},
    "native-eagle3": {"eagle_config.eagle_aux_hidden_state_layer_ids"},
    "specforge-dflash": {"block_size", "dflash_config.block_size"},
    "specforge-dspark": {"block_size", "dflash_config.block_size"},
    "speculators-dflash": {"target_layer_ids"},
    "speculators-dspark": {"enable_confidence_head"},
}


def _outcome(config: dict[str, Any], name: str) -> DrafterContract | None:
    """The contract, or None for a refusal."""
    try:
        return contract_from_config(config, "c", tiny_names(name))
    except CheckpointError as error:
        assert error.message and error.origin
        return None


_names: dict[str, list[str]] = {}


def tiny_names(name: str) -> list[str]:
    if name not in _names:
        _names[name] = list(tiny_tensors(name))
    return _names[name]


def _altered(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value * 2 + 1
    if isinstance(value, list):
        return value[::-1] if len(set(map(str, value))) > 1 else [*value[:-1], "other"]
    return "other" if value is None or isinstance(value, str) else {"other": value}


def _unseen(name: str, change: Callable[[Any], Any] | None) -> set[tuple[str, ...]]:
    """Keys of a golden config that can be changed without a refusal and without another contract."""
    config = load_golden(name)
    trained = contract_from_config(config, "c", tiny_names(name))
    paths = [p for p in leaves(config) if p[0] not in _NOTES and p[-1] not in _NOTES and p != _VERIFIER]
    return {path for path in paths if _outcome(with_change(config, path, change), name) == trained}


@pytest.mark.parametrize("name", GOLDEN_NAMES)
def test_no_field_can_be_altered_unseen(name: str) -> None:
    config = load_golden(name)
    layer = config.get("transformer_layer_config", config)
    slides = "sliding_attention" in layer.get("layer_types", [])
    allowed = _ALTERED_WITHOUT_EFFECT | (set() if slides else _WINDOW)
    assert {path for path in _unseen(name, _altered) if path[-1] not in allowed} == set()


@pytest.mark.parametrize("name", GOLDEN_NAMES)
def test_no_field_can_be_lost_unseen(name: str) -> None:
    layer = load_golden(name).get("transformer_layer_config", load_golden(name))
    slides = "sliding_attention" in layer.get("layer_types", [])
    allowed = _ABSENT_MEANS_THE_SAME | (set() if slides else _WINDOW)
    twice = _SAID_TWICE.get(name, set())
    assert {p for p in _unseen(name, None) if p[-1] not in allowed and ".".join(p) not in twice} == set()


@pytest.mark.parametrize("name", GOLDEN_NAMES)
@pytest.mark.parametrize("key", ["brand_new", "_brand_new"])
def test_unknown_keys_are_refused_everywhere(name: str, key: str) -> None:
    config = load_golden(name)
    objects = [()] + [path[:-1] for path in leaves(config) if len(path) > 1]
    for place in dict.fromkeys(objects):
        if place and place[0] in ("auto_map",):
            continue
        changed = json.loads(json.dumps(config))
        inner = changed
        for part in place:
            inner = inner[part]
        if place == ("speculators_config",):
            inner["proposal_methods"][0][key] = 1
            with pytest.raises(CheckpointError, match=key):
                contract_from_config(changed, "c")
            del inner["proposal_methods"][0][key]
        inner[key] = 1
        with pytest.raises(CheckpointError, match=key):
            contract_from_config(changed, "c")


@given(contract=contracts(), dialect=st.sampled_from(get_args(Dialect)))
def test_written_contract_reads_back_the_same_or_is_refused(contract: DrafterContract, dialect: Dialect) -> None:
    try:
        config = write_drafter_config(contract, dialect)
    except CheckpointError as error:
        assert dialect != "zlab", "the native form states everything"
        assert (
            "cannot state" in error.message
            or "can state only one" in error.message
            or "latent" in error.message
            or ("layouts are for" in error.message or "follows neither" in error.message)
        ), error.message
        return
    names = file_names(contract, dialect)
    assert list(names) == [slot.name for slot in drafter_slots(contract)]
    text = json.dumps(config, allow_nan=False)
    assert contract_from_config(json.loads(text), "c", names.values()) == contract


# what can be written where; reading is wider, since copies of the target's tables are tolerated but never written
_WRITABLE: dict[str, set[str]] = {
    "assistant-dflash": {"zlab", "assistant", "speculators"},
    "deepspec-dflash": {"zlab", "deepspec"},
    "deepspec-dspark": {"zlab", "deepspec"},
    "deepspec-eagle3": {"zlab", "deepspec"},
    "kimi-dspark": {"zlab", "kimi"},
    "kimi-dspark-attn-res": {"zlab", "kimi"},
    "native-dspark": {"zlab"},
    "native-eagle3": {"zlab"},
    "specforge-dflash": {"zlab", "speculators", "specforge"},
    "specforge-dspark": {"zlab", "speculators", "specforge", "deepspec"},
    "specforge-eagle3": {"zlab", "speculators", "specforge"},
    "speculators-dflash": {"zlab", "speculators"},
    "speculators-dflash2": {"zlab", "speculators"},
    "speculators-dspark": {"zlab", "speculators"},
    "speculators-eagle3": {"zlab", "speculators"},
    "torchspec-dflash": {"zlab", "torchspec"},
    "zlab-dflash": {"zlab", "assistant", "speculators", "specforge", "torchspec"},
    "zlab-dflash-sinks": {"zlab"},
    "zlab-dflash2": {"zlab"},
    "zlab-dflash2-latent": {"zlab"},
}


@pytest.mark.parametrize("name", GOLDEN_NAMES)
@pytest.mark.parametrize("dialect", get_args(Dialect))
def test_golden_contracts_in_every_dialect(name: str, dialect: Dialect, make_target: Callable[..., Any]) -> None:
    target = make_target(num_layers=36, vocab_size=128)
    contract = complete_contract(full_contract(name), target)
    if dialect in _WRITABLE[name]:
        config = write_drafter_config(contract, dialect)
        assert contract_from_config(config, "c", file_names(contract, dialect).values()) == contract
    else:
        for write in (write_drafter_config, file_names):
            with pytest.raises(CheckpointError, match=r"cannot state|latent attention|layouts are for") as caught:
                write(contract, dialect)
            assert caught.value.origin == {"drafter": "c"}


def test_what_was_never_said_is_not_written() -> None:
    with pytest.raises(CheckpointError, match="target_num_layers, vocab_size") as caught:
        write_drafter_config(full_contract("assistant-dflash"))
    assert "naming the target" in str(caught.value)


def test_unknown_dialect() -> None:
    with pytest.raises(CheckpointError, match="there is no dialect 'other'"):
        write_drafter_config(full_contract("zlab-dflash"), cast(Dialect, "other"))


@pytest.mark.parametrize("name", GOLDEN_NAMES)
def test_a_value_of_another_kind_is_never_an_error_of_ours(name: str) -> None:
    """A hand-edited config is refused by key, or read; it does not end in a traceback."""
    config = load_golden(name)
    for path in leaves(config):
        for value in (1.5, "x", [None], [["x"], 2], {"x": [1]}):
            with contextlib.suppress(CheckpointError):
                contract_from_config(with_change(config, path, lambda _, other=value: other), "c")
