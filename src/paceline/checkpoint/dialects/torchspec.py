"""TorchSpec's flat DFlash: `model_type` "dflash", every field at the top level, tensors under names of its own.

Tap ids name the layer whose *output* is tapped. `num_target_layers` counts the taps here; the target's depth is
`target_num_hidden_layers`.
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
    read_use_aux,
    read_vocabulary,
    require,
    require_stated,
    write_decoder,
    write_own,
)
from paceline.checkpoint.dialects.keys import DECODER_KEYS, INERT_OF_DRAFTERS, NEUTRAL_OF_DRAFTERS, Place, check_keys
from paceline.checkpoint.dialects.layer_attention import require_full_attention
from paceline.checkpoint.dialects.taps import read_output_taps
from paceline.errors import CheckpointError

_ARCHITECTURE, _MODEL_TYPE = "DFlashDraftModel", "dflash"
_READ = DECODER_KEYS | {
    "num_target_layers",
    "target_num_hidden_layers",
    "target_hidden_size",
    "target_layer_ids",
    "mask_token_id",
    "block_size",
    "draft_vocab_size",
    "use_aux_hidden_state",
    OWN_KEY,
}


def read(config: Mapping[str, Any], origin: str, names: Collection[str]) -> DrafterContract:
    """Read a TorchSpec DFlash config.

    Args:
        config: the whole object.
        origin: the file, for messages.
        names: canonical tensor names; empty if the file was not looked at.
    Raises:
        CheckpointError: a key is unknown, a needed field is missing, or two contradict.
    Source: config files of TorchSpec's DFlash extracts.
    """
    top = ConfigReader(config, origin)
    check_keys(
        Place("", config),
        top,
        kind="DFlash of TorchSpec",
        read=_READ,
        neutral={**NEUTRAL_OF_DRAFTERS, "is_neox_style": (True, None), "is_causal": (False, None)},
        inert=INERT_OF_DRAFTERS,
    )
    own = ConfigReader(read_own(config, top), origin)
    read_use_aux(config.get("use_aux_hidden_state"), top)
    try:
        require_full_attention(config.get("layer_types"), "TorchSpec")
    except CheckpointError as error:
        raise top.error(error.message) from error
    decoder = read_decoder(config, origin)
    if decoder["attention_bias"]:
        raise top.error("attention_bias is True; TorchSpec's drafters have none")
    depth, vocab_size = top.whole("target_num_hidden_layers"), top.whole("vocab_size")
    taps = read_output_taps(config.get("target_layer_ids"), depth, top)
    check_tap_count(top, len(taps))
    return DrafterContract(
        family="dflash",
        origin=origin,
        target_name=own.text("target_name", default=""),
        target_num_layers=depth,
        target_hidden_size=top.whole("target_hidden_size", default=decoder["hidden_size"]),
        target_layer_ids=taps,
        aux_hidden_stream="prefix",
        has_tap_norm=False,
        block_size=top.whole("block_size", minimum=2),
        layout="fill_in",
        mask_token_id=read_mask_token_id(top, vocab_size),
        is_neox_style=True,
        layer_windows=(None,) * decoder["num_layers"],
        layer_causal=(False,) * decoder["num_layers"],
        draft_sample_method=read_sample_method(own, "greedy"),
        dtype=read_dtype(top, config),
        **PLAIN_SCORES,
        **decoder,
        **read_vocabulary(
            top,
            vocab_size,
            own.whole("target_vocab_size", default=vocab_size),
            full_because="DFlash of TorchSpec",
        ),
        **read_own_tables(config, names, top),
    )


def check_tap_count(top: ConfigReader, num_taps: int) -> None:
    """Refuse a `num_target_layers` that is not the number of taps, as it is in TorchSpec's and K3's configs.

    Raises:
        CheckpointError: it is missing or another number.
    """
    stated = top.whole("num_target_layers")
    if stated != num_taps:
        raise top.error(
            f"num_target_layers is {stated} and target_layer_ids has {num_taps}; here it is the number of taps",
            hint="the target's depth belongs into target_num_hidden_layers",
        )


def write(contract: DrafterContract) -> dict[str, Any]:
    """Write a DFlash contract for TorchSpec.

    Raises:
        CheckpointError: the drafter needs a field that TorchSpec does not have.
    """
    require_stated(contract, "TorchSpec", "target_num_layers", "vocab_size", "target_vocab_size", "draft_vocab_size")
    require(
        contract,
        "TorchSpec",
        family="dflash",
        layout="fill_in",
        **BLOCK_PARTS,
        **PLAIN_SCORES,
        **PLAIN_ATTENTION,
        aux_hidden_stream="prefix",
        has_tap_norm=False,
        is_neox_style=True,
        attention_bias=False,
        has_mask_embedding=False,
        has_own_head=False,
        layer_windows=(None,) * contract.num_layers,
        layer_causal=(False,) * contract.num_layers,
        draft_vocab_size=contract.target_vocab_size,
    )
    return {
        "architectures": [_ARCHITECTURE],
        "model_type": _MODEL_TYPE,
        **write_decoder(contract),
        "layer_types": ["full_attention"] * contract.num_layers,
        "vocab_size": contract.vocab_size,
        "draft_vocab_size": contract.draft_vocab_size,
        "num_target_layers": contract.num_taps,
        "target_num_hidden_layers": contract.target_num_layers,
        "target_hidden_size": contract.target_hidden_size,
        "target_layer_ids": list(contract.target_layer_ids),
        "mask_token_id": contract.mask_token_id,
        "block_size": contract.block_size,
        "use_aux_hidden_state": True,
        **write_own(contract),
    }
