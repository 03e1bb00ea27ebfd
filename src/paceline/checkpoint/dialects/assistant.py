"""The Hugging Face DFlash assistant, `MuseGlimmerAssistantModel`, loaded by transformers for assisted generation.

Flat fields; tap ids name the layer whose *output* is tapped. Rows of a block always see each other in both directions,
sliding layers too. The layout has no words for the target's depth or vocabulary; our own files add them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from paceline.checkpoint.config_reader import ConfigReader
from paceline.checkpoint.contract import DrafterContract
from paceline.checkpoint.dialects.fields import (
    BLOCK_PARTS,
    OWN_KEY,
    PLAIN_ATTENTION,
    PLAIN_SCORES,
    read_decoder,
    read_dtype,
    read_mask_token_id,
    read_own,
    read_own_tables,
    read_sample_method,
    read_vocabulary,
    require,
    write_decoder,
    write_own,
)
from paceline.checkpoint.dialects.keys import (
    DECODER_KEYS,
    INERT_OF_DRAFTERS,
    NEUTRAL_OF_DRAFTERS,
    UNSTATED,
    Place,
    check_keys,
)
from paceline.checkpoint.dialects.layer_attention import (
    effective_window,
    layer_attention_keys,
    resolve_layer_attention,
)
from paceline.checkpoint.dialects.taps import read_output_taps
from paceline.errors import CheckpointError

_ARCHITECTURE, _MODEL_TYPE = "MuseGlimmerAssistantModel", "muse_glimmer_assistant"
_READ = DECODER_KEYS | {"block_size", "mask_token_id", "target_layer_ids", OWN_KEY}


def read(config: Mapping[str, Any], origin: str, names: Collection[str]) -> DrafterContract:
    """Read a Hugging Face DFlash assistant config.

    Args:
        config: the whole object.
        origin: the file, for messages.
        names: canonical tensor names; empty if the file was not looked at.
    Raises:
        CheckpointError: a key is unknown or a needed field is missing; the class's own defaults are those of one public
            checkpoint and are never taken.
    Source: `MuseGlimmerAssistantConfig` of transformers 5.24.
    """
    top = ConfigReader(config, origin)
    check_keys(
        Place("", config),
        top,
        kind=f"DFlash of transformers ({_ARCHITECTURE})",
        read=_READ,
        neutral={**NEUTRAL_OF_DRAFTERS, "is_causal": (False, None), "is_neox_style": (True, None)},
        inert=INERT_OF_DRAFTERS,
    )
    own = ConfigReader(read_own(config, top), origin)
    decoder = read_decoder(config, origin)
    if decoder["attention_bias"]:
        raise top.error("attention_bias is True; this layout's attention has none")
    if not config.get("layer_types"):
        raise top.error("layer_types is missing; transformers would take every layer for a sliding one")
    try:
        windows, causal = resolve_layer_attention(
            decoder["num_layers"],
            layer_types=config["layer_types"],
            sliding_window=effective_window(config),
            dflash_config={},
            is_causal=False,
        )
    except CheckpointError as error:
        raise top.error(error.message, hint=error.hint) from error
    depth = own.whole("target_num_layers", default=UNSTATED, minimum=UNSTATED)
    vocab_size = top.whole("vocab_size", default=UNSTATED, minimum=UNSTATED)
    return DrafterContract(
        family="dflash",
        origin=origin,
        target_name=own.text("target_name", default=""),
        target_num_layers=depth,
        target_hidden_size=decoder["hidden_size"],
        target_layer_ids=read_output_taps(config.get("target_layer_ids"), depth, top),
        aux_hidden_stream="prefix",
        has_tap_norm=False,
        block_size=top.whole("block_size", minimum=2),
        layout="fill_in",
        mask_token_id=read_mask_token_id(top, vocab_size),
        is_neox_style=True,
        layer_windows=windows,
        layer_causal=causal,
        draft_sample_method=read_sample_method(own, "greedy"),
        dtype=read_dtype(top, config),
        **PLAIN_SCORES,
        **decoder,
        **read_vocabulary(
            top,
            vocab_size,
            own.whole("target_vocab_size", default=vocab_size, minimum=UNSTATED),
            full_because="the Hugging Face assistant",
        ),
        **read_own_tables(config, names, top),
    )


def write(contract: DrafterContract) -> dict[str, Any]:
    """Write a DFlash contract for transformers.

    Raises:
        CheckpointError: the drafter needs a field that transformers does not have.
    """
    require(
        contract,
        "Hugging Face assistant",
        family="dflash",
        layout="fill_in",
        **BLOCK_PARTS,
        **PLAIN_SCORES,
        **PLAIN_ATTENTION,
        aux_hidden_stream="prefix",
        has_tap_norm=False,
        is_neox_style=True,
        attention_bias=False,
        has_own_embedding=False,
        has_own_head=False,
        has_mask_embedding=False,
        layer_causal=(False,) * contract.num_layers,
        target_hidden_size=contract.hidden_size,
        draft_vocab_size=contract.target_vocab_size,
    )
    layer_types, window, _ = layer_attention_keys(contract)
    return {
        "architectures": [_ARCHITECTURE],
        "model_type": _MODEL_TYPE,
        **write_decoder(contract),
        "layer_types": layer_types,
        # the class wants a number even where no layer slides
        "sliding_window": window if window is not None else contract.max_position_embeddings,
        "is_causal": False,  # for engines that would take sliding layers for causal ones
        "vocab_size": contract.vocab_size,
        "target_layer_ids": list(contract.target_layer_ids),
        "mask_token_id": contract.mask_token_id,
        "block_size": contract.block_size,
        # the class's own defaults are ids of one public vocabulary, and warned of where they lie outside of this one
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        **write_own(contract),
    }
