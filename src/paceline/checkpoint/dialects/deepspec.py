"""DeepSpec's layouts, and the native form of dense DSpark: drafter fields flat beside a copy of the target's config.

DeepSpec writes `Qwen3DSparkModel` for DSpark and for its "DFlash", which is DSpark without heads: every row of a block
is sampled, the anchor's own too. `Qwen3Eagle3Model` is EAGLE-3 in which every layer reads [embedding, hidden]. Tap ids
name the layer whose *output* is tapped, `num_target_layers` is the target's depth. The native form adds a
`dflash_config` for what DeepSpec has no words for; engines that read the flat keys load both.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from paceline.checkpoint.config_reader import ConfigReader
from paceline.checkpoint.contract import DrafterContract, Eagle3Settings
from paceline.checkpoint.dialects.fields import (
    BLOCK_PARTS,
    NO_MASK,
    OWN_KEY,
    PLAIN_ATTENTION,
    PLAIN_SCORES,
    read_confidence,
    read_decoder,
    read_dtype,
    read_markov,
    read_mask_token_id,
    read_num_steps,
    read_own,
    read_own_tables,
    read_sample_method,
    read_scores,
    read_stream,
    read_use_aux,
    read_vocabulary,
    require,
    require_stated,
    write_decoder,
    write_dspark_heads,
    write_own,
)
from paceline.checkpoint.dialects.keys import (
    DECODER_KEYS,
    INERT_OF_DRAFTERS,
    NEUTRAL_OF_DRAFTERS,
    Place,
    check_keys,
    lift,
    nested,
    same_names,
)
from paceline.checkpoint.dialects.layer_attention import FULL, layer_attention_keys, require_full_attention
from paceline.checkpoint.dialects.taps import read_output_taps
from paceline.checkpoint.dialects.zlab import (
    ATTENTION_FIELDS,
    MASK_NAMES,
    OWN_FIELDS,
    STATED,
    read_attention,
    write_flat,
    write_nested,
)
from paceline.errors import CheckpointError

DSPARK, EAGLE3 = "Qwen3DSparkModel", "Qwen3Eagle3Model"

# of DSpark in any flat layout, in the spellings of DeepSpec, vLLM and DeepSeek
DSPARK_SPELLINGS: Mapping[str, tuple[str, ...]] = {
    "target_layer_ids": ("target_layer_ids", "dspark_target_layer_ids"),
    "mask_token_id": (MASK_NAMES[0], "dspark_noise_token_id", *MASK_NAMES[1:]),
    "block_size": ("block_size", "dspark_block_size"),
    "markov_rank": ("markov_rank", "dspark_markov_rank"),
    "dspark_draft_topk": ("dspark_draft_topk", "draft_top_k"),
    **same_names(
        "markov_head_type",
        "enable_confidence_head",
        "confidence_head_alpha",
        "confidence_head_with_markov",
        "sample_from_anchor",
        "dspark_bonus_anchor",
        "fc_norm",
        "aux_hidden_stream",
        "target_hidden_size",
        "input_embedding_scale",
        "output_multiplier",
        "final_logit_softcapping",
        "use_aux_hidden_state",
    ),
}
# of the trainer; nothing of them is left in a trained drafter
TRAINING_KEYS = frozenset({"num_anchors", "ttt_length", "step_loss_decay", "embed_requires_grad"})
_FLAT = DECODER_KEYS | {
    "num_target_layers",
    "draft_vocab_size",
    "has_own_lm_head",
    "is_neox_style",
    "is_causal",
    OWN_KEY,
}
# in the flat form they could only be the target's; DeepSpec's drafters are never causal and have no sinks
_NATIVE_ATTENTION: Mapping[str, tuple[object, ...]] = {
    "is_causal": (False, None),
    "add_swa_attention_sink_bias": (False, None),
}
_DSPARK_NAMES = frozenset(name for names in DSPARK_SPELLINGS.values() for name in names)


def read_dspark(config: Mapping[str, Any], origin: str, names: Collection[str]) -> DrafterContract:
    """Read dense DSpark: DeepSpec's flat config, or the native form with a `dflash_config` beside it.

    Args:
        config: the whole object.
        origin: the file, for messages.
        names: canonical tensor names; empty if the file was not looked at.
    Raises:
        CheckpointError: a key is unknown, a needed field is missing, or two contradict.
    Source: DeepSpec's and vLLM's readers of `Qwen3DSparkModel`.
    """
    top, inner = ConfigReader(config, origin), nested(config, "dflash_config", ConfigReader(config, origin))
    is_native = config.get(inner.name) is not None
    check_keys(
        Place("", config),
        top,
        kind=f"DSpark ({DSPARK})",
        read=_FLAT | _DSPARK_NAMES | {"dflash_config", *_NATIVE_ATTENTION},
        neutral={**NEUTRAL_OF_DRAFTERS, **({} if is_native else _NATIVE_ATTENTION)},
        inert=INERT_OF_DRAFTERS | TRAINING_KEYS,
    )
    check_keys(inner, top, kind=f"DSpark ({DSPARK})", read=_DSPARK_NAMES | {*ATTENTION_FIELDS, *OWN_FIELDS})
    flat = lift(DSPARK_SPELLINGS, (inner, Place("", config)), top)
    decoder = read_decoder(config, origin)
    attention = read_attention(_without_target_layers(config, top, is_native), inner, decoder["num_layers"], origin)
    return DrafterContract(
        **decoder,
        **attention,
        **read_dspark_body(config, flat, inner, names, origin, hidden_size=decoder["hidden_size"]),
        target_num_layers=top.whole("num_target_layers"),
        target_layer_ids=read_output_taps(flat["target_layer_ids"], top.whole("num_target_layers"), top),
        is_neox_style=top.flag("is_neox_style", default=True),
    )


def read_dspark_body(
    config: Mapping[str, Any],
    flat: Mapping[str, Any],
    inner: Place,
    names: Collection[str],
    origin: str,
    *,
    hidden_size: int,
    rank_default: int | None = None,
) -> dict[str, Any]:
    """What DSpark adds to its decoder, dense or latent: contract fields apart from decoder, depth and taps."""
    top, either = ConfigReader(config, origin), ConfigReader(flat, origin)
    own = ConfigReader(read_own(config, top, inner), origin)
    read_use_aux(flat["use_aux_hidden_state"], top)
    from_anchor = either.flag("sample_from_anchor", default=True)
    bonus = flat["dspark_bonus_anchor"]
    if bonus is not None and (not isinstance(bonus, bool) or bonus == from_anchor):
        raise top.error(f"dspark_bonus_anchor is {bonus!r}, expected the opposite of sample_from_anchor, {from_anchor}")
    markov = read_markov(either, rank_default=rank_default)
    vocab_size = top.whole("vocab_size")
    return {
        "family": "dspark",
        "origin": origin,
        "target_name": own.text("target_name", default=""),
        "target_hidden_size": either.whole("target_hidden_size", default=hidden_size),
        "aux_hidden_stream": read_stream(either),
        "has_tap_norm": either.flag("fc_norm", default=False),
        "block_size": either.whole("block_size", minimum=1 if from_anchor else 2),
        "layout": "anchor_sampling" if from_anchor else "fill_in",
        "mask_token_id": read_mask_token_id(either, vocab_size),
        "markov": markov,
        "confidence": read_confidence(flat, either, markov, enabled_default=False),
        "draft_top_k": None if flat["dspark_draft_topk"] is None else either.whole("dspark_draft_topk"),
        "draft_sample_method": read_sample_method(own, "probabilistic"),
        "dtype": read_dtype(top, config),
        **read_vocabulary(top, vocab_size, own.whole("target_vocab_size", default=vocab_size)),
        **read_scores(flat, either),
        **read_own_tables(config, names, top),
    }


def write_dspark(contract: DrafterContract) -> dict[str, Any]:
    """Write dense DSpark in its native form: flat keys for DeepSpec's and vLLM's readers, the rest in `dflash_config`.

    Raises:
        CheckpointError: the contract has parts of another family, or windows that the layout cannot state.
    """
    require(contract, "native DSpark", **BLOCK_PARTS, convolution=None, selector=None, has_mask_embedding=False)
    require_stated(contract, "native DSpark", *STATED)
    layer_types, window, causal = layer_attention_keys(contract)
    return {
        "architectures": [DSPARK],
        "model_type": "qwen3",
        **write_decoder(contract),
        **write_flat(contract),
        "layer_types": layer_types,
        "sliding_window": window,
        "use_sliding_window": window is not None,
        "is_causal": causal,
        **write_dspark_keys(contract),
        "dflash_config": {**write_nested(contract, causal), "dspark_draft_topk": contract.draft_top_k},
    }


def write_dspark_keys(contract: DrafterContract) -> dict[str, Any]:
    """Flat keys of DSpark in any layout."""
    return {
        "target_layer_ids": list(contract.target_layer_ids),
        "mask_token_id": contract.mask_token_id,
        "block_size": contract.block_size,
        "sample_from_anchor": contract.layout == "anchor_sampling",
        **write_dspark_heads(contract),
    }


def write(contract: DrafterContract) -> dict[str, Any]:
    """Write what DeepSpec itself reads: DSpark, or EAGLE-3 with doubled layers.

    Raises:
        CheckpointError: the drafter needs a field that DeepSpec does not have.
    """
    require_stated(contract, "DeepSpec", *STATED)
    common: dict[str, Any] = {
        **PLAIN_SCORES,
        **PLAIN_ATTENTION,
        "aux_hidden_stream": "prefix",
        "has_tap_norm": False,
        "is_neox_style": True,
        "has_qk_norm": True,
        "has_mask_embedding": False,
        "layer_windows": (None,) * contract.num_layers,
        "draft_vocab_size": contract.target_vocab_size,
        "vocab_size": contract.target_vocab_size,
        "target_hidden_size": contract.hidden_size,
    }
    full = {"model_type": "qwen3", **write_decoder(contract), **write_flat(contract), **write_own(contract)}
    full |= {
        "layer_types": ["full_attention"] * contract.num_layers,
        "sliding_window": None,
        "use_sliding_window": False,
    }
    if contract.family == "eagle3":
        require(
            contract,
            "DeepSpec",
            **common,
            eagle3=Eagle3Settings(False, False, False, doubles_every_layer=True),
            layer_causal=(True,) * contract.num_layers,
        )
        return {"architectures": [EAGLE3], **full, "target_layer_ids": list(contract.target_layer_ids)}
    require(
        contract,
        "DeepSpec",
        **common,
        family="dspark",
        latent=None,
        layout="anchor_sampling",
        draft_top_k=None,
        layer_causal=(False,) * contract.num_layers,
    )
    return {"architectures": [DSPARK], **full, **write_dspark_keys(contract)}


def read_eagle3(config: Mapping[str, Any], origin: str, names: Collection[str]) -> DrafterContract:
    """Read DeepSpec's EAGLE-3, whose every layer reads [embedding, hidden]; arguments as for `read_dspark`."""
    top = ConfigReader(config, origin)
    check_keys(
        Place("", config),
        top,
        kind=f"EAGLE-3 of DeepSpec ({EAGLE3})",
        read=_FLAT | {"target_layer_ids", "target_hidden_size", "ttt_length"},
        neutral={**NEUTRAL_OF_DRAFTERS, "is_causal": (None, True)},
        inert=INERT_OF_DRAFTERS | TRAINING_KEYS,
    )
    try:
        require_full_attention(config.get("layer_types"), "DeepSpec")
    except CheckpointError as error:
        raise top.error(error.message) from error
    own = ConfigReader(read_own(config, top), origin)
    steps = read_num_steps(config, top, own)
    decoder = read_decoder(config, origin)
    depth, vocab_size, num_layers = top.whole("num_target_layers"), top.whole("vocab_size"), decoder["num_layers"]
    return DrafterContract(
        family="eagle3",
        origin=origin,
        target_name=own.text("target_name", default=""),
        target_num_layers=depth,
        target_hidden_size=top.whole("target_hidden_size", default=decoder["hidden_size"]),
        target_layer_ids=read_output_taps(config.get("target_layer_ids"), depth, top),
        aux_hidden_stream="prefix",
        has_tap_norm=False,
        block_size=steps + 1,
        layout="autoregressive",
        mask_token_id=own.whole("mask_token_id", default=NO_MASK, minimum=NO_MASK),
        is_neox_style=top.flag("is_neox_style", default=True),
        layer_windows=(None,) * num_layers,
        layer_causal=(True,) * num_layers,
        input_embedding_scale=1.0,
        output_multiplier=1.0,
        final_logit_softcapping=None,
        draft_sample_method=read_sample_method(own, "greedy"),
        dtype=read_dtype(top, config),
        eagle3=Eagle3Settings(False, False, False, doubles_every_layer=True),
        **decoder,
        **read_vocabulary(top, vocab_size, vocab_size, full_because="DeepSpec's EAGLE-3"),
        **read_own_tables(config, names, top),
    )


def _without_target_layers(config: Mapping[str, Any], top: ConfigReader, is_native: bool) -> dict[str, Any]:
    """The config without attention keys that are the target's.

    DeepSpec copies them along, a layer type for every layer of the target too; its drafters attend to everything, both
    ways. In the native form the keys are the drafter's own, apart from a list that says nothing.
    """
    types = config.get("layer_types")
    if not is_native:
        try:
            require_full_attention(types, "DeepSpec")
        except CheckpointError as error:
            raise top.error(error.message) from error
        return {key: value for key, value in config.items() if key not in ("layer_types", "sliding_window")}
    says_nothing = isinstance(types, list) and len(types) > 0 and all(kind == FULL for kind in types)
    return {key: value for key, value in config.items() if not (key == "layer_types" and says_nothing)}
