"""The z-lab layout of DFlash and DFlash2: a Qwen3-like top level plus a nested `dflash_config`. Our own form of both.

A field that may stand in both places is taken from either and refused if they differ. Tap ids name the layer whose
*output* is tapped. Our own additions (`draft_sample_method`, `target_name`, `target_vocab_size`) live in
`dflash_config`. SpecForge writes plain DFlash in this layout too. `attention_mode` "mla" makes latent attention of a
DFlash2 drafter's layers, as in Kimi-K3's public one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from paceline.checkpoint.config_reader import ConfigReader
from paceline.checkpoint.contract import ConvolutionSettings, DrafterContract, SelectorSettings, TargetLayerId
from paceline.checkpoint.dialects.defaults import default_target_layer_ids
from paceline.checkpoint.dialects.fields import (
    BLOCK_PARTS,
    PLAIN_ATTENTION,
    read_decoder,
    read_dtype,
    read_mask_token_id,
    read_own_tables,
    read_sample_method,
    read_scores,
    read_stream,
    read_use_aux,
    read_vocabulary,
    require,
    require_stated,
    write_decoder,
)
from paceline.checkpoint.dialects.keys import (
    DECODER_KEYS,
    INERT_OF_DRAFTERS,
    NEUTRAL_OF_DRAFTERS,
    Place,
    check_keys,
    contradiction,
    lift,
    nested,
    same_names,
)
from paceline.checkpoint.dialects.latent import (
    LATENT_KEYS,
    LATENT_SWITCHES,
    PAIRINGS,
    read_latent_decoder,
    read_pairing,
    write_latent,
)
from paceline.checkpoint.dialects.layer_attention import (
    effective_window,
    layer_attention_keys,
    resolve_layer_attention,
)
from paceline.checkpoint.dialects.taps import read_output_taps
from paceline.errors import CheckpointError

ARCHITECTURES: Mapping[str, str] = {"dflash": "DFlashDraftModel", "dflash2": "DFlash2DraftModel"}

DFLASH2_FIELDS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
_MODE, _LATENT_MODE = "attention_mode", "mla"
_ATTENTION_MODES = (None, "gqa", "mha", _LATENT_MODE)
# fields that may stand nested or at the top level
_EITHER_PLACE = (
    "target_layer_ids",
    "mask_token_id",
    "block_size",
    "sample_from_anchor",
    "fc_norm",
    "aux_hidden_stream",
    "target_hidden_size",
    "input_embedding_scale",
    "output_multiplier",
    "final_logit_softcapping",
    "use_aux_hidden_state",
)
# engines also look for the mask id under PARD's names
MASK_NAMES = ("mask_token_id", "pard_token", "ptd_token_id")
ATTENTION_FIELDS = ("causal", "use_swa", "swa_window_size", "attention_sink_bias", "attention_value_scale")
OWN_FIELDS = ("draft_sample_method", "target_vocab_size", "target_name")
# sizes of the target that layouts with a depth always state
STATED = ("target_num_layers", "vocab_size", "target_vocab_size", "draft_vocab_size")
_TOP_ONLY = DECODER_KEYS | {
    "dflash_config",
    "num_target_layers",
    "draft_vocab_size",
    "is_neox_style",
    "is_causal",
    "has_own_lm_head",
    "add_swa_attention_sink_bias",
}


def read(config: Mapping[str, Any], origin: str, names: Collection[str], *, family: str) -> DrafterContract:
    """Read a z-lab config.

    Args:
        config: the whole object.
        origin: the file, for messages.
        names: canonical tensor names; empty if the file was not looked at.
        family: "dflash" or "dflash2", as the architecture string says.
    Raises:
        CheckpointError: a key is unknown, a needed field is missing, or two contradict.
    Source: z-lab config files, as read by their own code and vLLM.
    """
    top = ConfigReader(config, origin)
    inner = nested(config, "dflash_config", top)
    either_place = (*_EITHER_PLACE, *((*DFLASH2_FIELDS, _MODE) if family == "dflash2" else ()))
    kind = ARCHITECTURES[family]
    is_latent = family == "dflash2" and _LATENT_MODE in (config.get(_MODE), inner.values.get(_MODE))
    switches = dict.fromkeys(LATENT_SWITCHES, (False, None)) if is_latent else {}
    check_keys(
        Place("", config),
        top,
        kind=kind,
        read={*_TOP_ONLY, *either_place, *MASK_NAMES, *((*LATENT_KEYS, *PAIRINGS) if is_latent else ())},
        neutral={**NEUTRAL_OF_DRAFTERS, **switches},
        inert=INERT_OF_DRAFTERS,
    )
    check_keys(
        inner,
        top,
        kind=kind,
        read={*either_place, *ATTENTION_FIELDS, *OWN_FIELDS, *MASK_NAMES, *(PAIRINGS if is_latent else ())},
        neutral=switches,
    )
    flat = lift({**same_names(*either_place), "mask_token_id": MASK_NAMES}, (inner, Place("", config)), top)
    either, own = ConfigReader(flat, origin), ConfigReader(inner.values, origin)
    read_use_aux(flat["use_aux_hidden_state"], top)
    if flat.get(_MODE) not in _ATTENTION_MODES:
        raise top.error(f"{_MODE} is {flat[_MODE]!r}; legal are 'gqa', 'mha' and 'mla'")
    decoder = read_latent_decoder(config, origin) if is_latent else read_decoder(config, origin)
    if flat.get(_MODE) == "mha" and decoder["num_kv_heads"] != decoder["num_heads"]:
        raise top.error(f"{_MODE} is 'mha', with {decoder['num_heads']} query and {decoder['num_kv_heads']} key heads")
    attention = read_attention(config, inner, decoder["num_layers"], origin)
    if is_latent and (attention["has_attention_sink"] or attention["attention_value_scale"] != 1.0):
        raise top.error("the drafter has latent attention, and neither sinks nor a value scale are known of it")
    depth, vocab_size = top.whole("num_target_layers"), top.whole("vocab_size")
    from_anchor = either.flag("sample_from_anchor", default=False)
    return DrafterContract(
        family="dflash2" if family == "dflash2" else "dflash",
        origin=origin,
        target_name=own.text("target_name", default=""),
        target_num_layers=depth,
        target_hidden_size=either.whole("target_hidden_size", default=decoder["hidden_size"]),
        target_layer_ids=_taps(flat["target_layer_ids"], depth, decoder["num_layers"], top),
        aux_hidden_stream=read_stream(either),
        has_tap_norm=either.flag("fc_norm", default=False),
        block_size=either.whole("block_size", minimum=1 if from_anchor else 2),
        layout="anchor_sampling" if from_anchor else "fill_in",
        mask_token_id=read_mask_token_id(either, vocab_size),
        is_neox_style=read_pairing((inner, Place("", config)), top)
        if is_latent
        else top.flag("is_neox_style", default=True),
        draft_sample_method=read_sample_method(own, "probabilistic" if family == "dflash2" else "greedy"),
        dtype=read_dtype(top, config),
        **decoder,
        **read_vocabulary(
            top,
            vocab_size,
            own.whole("target_vocab_size", default=vocab_size),
            full_because="a DFlash2 selector" if family == "dflash2" else None,
        ),
        **attention,
        **read_scores(flat, either),
        **(read_dflash2(either, decoder["hidden_size"], vocab_size) if family == "dflash2" else {}),
        **read_own_tables(config, names, top),
    )


def read_attention(config: Mapping[str, Any], inner: Place, num_layers: int, origin: str) -> dict[str, Any]:
    """Windows, causality, sinks and value scale of a top level and its nested part."""
    top, own = ConfigReader(config, origin), ConfigReader(inner.values, origin)
    try:
        windows, causal = resolve_layer_attention(
            num_layers,
            layer_types=config.get("layer_types"),
            sliding_window=effective_window(config),
            dflash_config=inner.values,
            is_causal=config.get("is_causal"),
        )
    except CheckpointError as error:
        raise top.error(error.message, hint=error.hint) from error
    sink = inner.values.get("attention_sink_bias")
    older = top.flag("add_swa_attention_sink_bias", default=False)
    if sink is not None and "add_swa_attention_sink_bias" in config and sink != older:
        raise contradiction(inner.path("attention_sink_bias"), sink, "add_swa_attention_sink_bias", older, top)
    return {
        "layer_windows": windows,
        "layer_causal": causal,
        "has_attention_sink": own.flag(
            "attention_sink_bias", default=top.flag("add_swa_attention_sink_bias", default=False)
        ),
        "attention_value_scale": own.positive("attention_value_scale", default=1.0),
    }


def write(contract: DrafterContract) -> dict[str, Any]:
    """Write a DFlash or DFlash2 contract; every optional field is explicit, since readers differ in their defaults.

    Raises:
        CheckpointError: the contract has parts of another family, or windows that the layout cannot state.
    """
    parts = {**BLOCK_PARTS, "markov": None, "confidence": None, "draft_top_k": None}
    if contract.family == "dflash2" and contract.latent is not None:
        parts |= {"latent": contract.latent, **PLAIN_ATTENTION, "attention_bias": False}
    require(contract, "z-lab", **parts)
    require_stated(contract, "z-lab", *STATED)
    layer_types, window, causal = layer_attention_keys(contract)
    return {
        "architectures": [ARCHITECTURES[contract.family]],
        "model_type": "qwen3",
        **write_decoder(contract),
        **({} if contract.latent is None else write_latent(contract.latent)),
        **write_flat(contract),
        "layer_types": layer_types,
        "sliding_window": window,
        "use_sliding_window": window is not None,
        "is_causal": causal,
        "block_size": contract.block_size,
        "dflash_config": {
            "target_layer_ids": list(contract.target_layer_ids),
            "mask_token_id": contract.mask_token_id,
            "block_size": contract.block_size,
            "sample_from_anchor": contract.layout == "anchor_sampling",
            **write_dflash2(contract),
            **({} if contract.latent is None else {_MODE: _LATENT_MODE}),
            **write_nested(contract, causal),
        },
    }


def write_flat(contract: DrafterContract) -> dict[str, Any]:
    """Top-level fields beside the decoder's that every native form has."""
    return {
        "is_neox_style": contract.is_neox_style,
        "vocab_size": contract.vocab_size,
        "draft_vocab_size": contract.draft_vocab_size,
        "has_own_lm_head": contract.has_own_head,
        "num_target_layers": contract.target_num_layers,
        "target_hidden_size": contract.target_hidden_size,
    }


def write_nested(contract: DrafterContract, causal: bool | None) -> dict[str, Any]:
    """Nested fields that every native form of a block drafter has."""
    return {
        "causal": causal,
        "use_swa": False,
        "attention_sink_bias": contract.has_attention_sink,
        "attention_value_scale": contract.attention_value_scale,
        "fc_norm": contract.has_tap_norm,
        "aux_hidden_stream": contract.aux_hidden_stream,
        "use_aux_hidden_state": True,
        "input_embedding_scale": contract.input_embedding_scale,
        "output_multiplier": contract.output_multiplier,
        "final_logit_softcapping": contract.final_logit_softcapping,
        "draft_sample_method": contract.draft_sample_method,
        "target_name": contract.target_name,
        "target_hidden_size": contract.target_hidden_size,
        "target_vocab_size": contract.target_vocab_size,
    }


def require_specforge(contract: DrafterContract) -> None:
    """What SpecForge's own reader of plain DFlash knows; the form is otherwise that of `write`.

    Raises:
        CheckpointError: the drafter needs a field that SpecForge ignores.
    """
    sliding = tuple(window is not None for window in contract.layer_windows)
    require(
        contract,
        "SpecForge",
        family="dflash",
        layout="fill_in",
        is_neox_style=True,
        has_tap_norm=False,
        aux_hidden_stream="prefix",
        layer_causal=sliding,
        has_own_embedding=False,
        has_own_head=False,
        has_mask_embedding=False,
        draft_vocab_size=contract.target_vocab_size,
        vocab_size=contract.target_vocab_size,
        input_embedding_scale=1.0,
        output_multiplier=1.0,
        final_logit_softcapping=None,
        has_attention_sink=False,
        attention_value_scale=1.0,
    )


def _taps(value: object, depth: int, num_layers: int, reader: ConfigReader) -> tuple[TargetLayerId, ...]:
    hint = ""
    if value is None:
        try:
            default = f"z-lab's default for this depth is {list(default_target_layer_ids(depth, num_layers))}"
        except CheckpointError:
            default = "z-lab's default rule does not fit this depth"
        hint = f"writing the trained ones to dflash_config; {default}"
    return read_output_taps(value, depth, reader, hint=hint)


def read_dflash2(reader: ConfigReader, hidden_size: int, vocab_size: int) -> dict[str, Any]:
    """Convolution and selector of DFlash2.

    Raises:
        CheckpointError: a size is missing or does not fit width, block or vocabulary.
    """
    num_taps, group_size = reader.whole("conv_kernel_size"), reader.whole("conv_group_size")
    rank, top_k = reader.whole("selector_rank"), reader.whole("selector_top_k")
    block_size = reader.whole("block_size")
    if num_taps > block_size:
        raise reader.error(f"conv_kernel_size is {num_taps}, more than the {block_size} rows of a block")
    if hidden_size % group_size:
        raise reader.error(f"conv_group_size {group_size} does not divide hidden_size {hidden_size}")
    if vocab_size and top_k > vocab_size:
        raise reader.error(f"selector_top_k is {top_k}, the vocabulary has {vocab_size} ids")
    return {"convolution": ConvolutionSettings(num_taps, group_size), "selector": SelectorSettings(rank, top_k)}


def write_dflash2(contract: DrafterContract) -> dict[str, Any]:
    """Fields of convolution and selector; none for plain DFlash.

    Raises:
        CheckpointError: the family and its parts disagree.
    """
    convolution, selector = contract.convolution, contract.selector
    if (contract.family == "dflash2") != (convolution is not None) or (convolution is None) != (selector is None):
        raise CheckpointError(
            f"a {contract.family} contract has convolution {convolution} and selector {selector}; "
            "DFlash2 has both, DFlash neither",
            origin={"drafter": contract.origin},
        )
    if convolution is None or selector is None:
        return {}
    return {
        "conv_kernel_size": convolution.num_taps,
        "conv_group_size": convolution.group_size,
        "selector_rank": selector.rank,
        "selector_top_k": selector.top_k,
    }
