"""SpecForge's DSpark: a Qwen3-like top level, everything of the method inside `dflash_config`, heads included.

Its rows are sampled from the anchor's own on, as its training labels say; its bundled generate loop reads them as if
they were not, which is not followed. Tap ids name the layer whose *output* is tapped. Its plain DFlash has z-lab's
layout (`zlab.py`), its EAGLE-3 shares architecture strings with our own form (`eagle3.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from paceline.checkpoint.config_reader import ConfigReader
from paceline.checkpoint.contract import DrafterContract
from paceline.checkpoint.dialects import eagle3, zlab
from paceline.checkpoint.dialects.deepspec import DSPARK_SPELLINGS, TRAINING_KEYS, read_dspark_body
from paceline.checkpoint.dialects.fields import (
    BLOCK_PARTS,
    OWN_KEY,
    PLAIN_ATTENTION,
    PLAIN_SCORES,
    read_decoder,
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
)
from paceline.checkpoint.dialects.layer_attention import SLIDING, effective_window, resolve_layer_attention
from paceline.checkpoint.dialects.taps import read_output_taps
from paceline.errors import CheckpointError

DSPARK = "DSparkDraftModel"
_PROJECTOR = "dspark"
_METHOD_KEYS = frozenset(name for names in DSPARK_SPELLINGS.values() for name in names) | {
    "projector_type",
    "attention_mode",
}
_TOP = DECODER_KEYS | {"dflash_config", "num_target_layers", "draft_vocab_size", "has_own_lm_head", OWN_KEY}


def read_dspark(config: Mapping[str, Any], origin: str, names: Collection[str]) -> DrafterContract:
    """Read SpecForge's DSpark.

    Args:
        config: the whole object.
        origin: the file, for messages.
        names: canonical tensor names; empty if the file was not looked at.
    Raises:
        CheckpointError: a key is unknown, a needed field is missing, or two contradict.
    Source: config files of SpecForge 0.2.
    """
    top = ConfigReader(config, origin)
    inner = nested(config, "dflash_config", top)
    kind = f"DSpark of SpecForge ({DSPARK})"
    check_keys(
        Place("", config),
        top,
        kind=kind,
        read=_TOP | _METHOD_KEYS,
        neutral={**NEUTRAL_OF_DRAFTERS, "is_neox_style": (True, None)},
        inert=INERT_OF_DRAFTERS | TRAINING_KEYS,
    )
    check_keys(inner, top, kind=kind, read=_METHOD_KEYS, inert=TRAINING_KEYS)
    spellings = {**DSPARK_SPELLINGS, "projector_type": ("projector_type",), "attention_mode": ("attention_mode",)}
    flat = lift(spellings, (inner, Place("", config)), top)
    if flat["projector_type"] not in (None, _PROJECTOR):
        raise top.error(
            f"dflash_config.projector_type is {flat['projector_type']!r}, which is not supported; supported is 'dspark'"
        )
    if flat["sample_from_anchor"] is False:
        raise top.error("sample_from_anchor is False; SpecForge trains DSpark with labels from the anchor's own row on")
    decoder = read_decoder(config, origin)
    _check_attention_mode(flat["attention_mode"], decoder["num_heads"], decoder["num_kv_heads"], top)
    try:
        windows, causal = resolve_layer_attention(
            decoder["num_layers"],
            layer_types=config.get("layer_types"),
            sliding_window=effective_window(config),
            dflash_config={},
            is_causal=None,
        )
    except CheckpointError as error:
        raise top.error(error.message, hint=error.hint) from error
    depth = top.whole("num_target_layers")
    return DrafterContract(
        **decoder,
        **read_dspark_body(config, flat, Place("", {}), names, origin, hidden_size=decoder["hidden_size"]),
        target_num_layers=depth,
        target_layer_ids=read_output_taps(flat["target_layer_ids"], depth, top),
        is_neox_style=True,
        layer_windows=windows,
        layer_causal=causal,
    )


def write(contract: DrafterContract) -> dict[str, Any]:
    """Write what SpecForge itself reads: DFlash in z-lab's layout, DSpark, or EAGLE-3.

    Raises:
        CheckpointError: the drafter needs a field that SpecForge does not have.
    """
    if contract.family == "eagle3":
        return eagle3.write_specforge(contract)
    if contract.family == "dspark":
        return _write_dspark(contract)
    zlab.require_specforge(contract)
    return zlab.write(contract)


def _write_dspark(contract: DrafterContract) -> dict[str, Any]:
    sliding = tuple(window is not None for window in contract.layer_windows)
    require_stated(contract, "SpecForge", *zlab.STATED)
    require(
        contract,
        "SpecForge",
        **BLOCK_PARTS,
        **PLAIN_SCORES,
        **PLAIN_ATTENTION,
        layout="anchor_sampling",
        convolution=None,
        selector=None,
        draft_top_k=None,
        aux_hidden_stream="prefix",
        has_tap_norm=False,
        is_neox_style=True,
        has_own_embedding=False,
        has_own_head=False,
        has_mask_embedding=False,
        layer_causal=sliding,
        draft_vocab_size=contract.target_vocab_size,
        vocab_size=contract.target_vocab_size,
    )
    windows = sorted({window for window in contract.layer_windows if window is not None})
    if len(windows) > 1:
        raise CheckpointError(f"the layers have the windows {windows}; this layout can state only one")
    return {
        "architectures": [DSPARK],
        "model_type": "qwen3",
        **write_decoder(contract),
        "layer_types": [SLIDING if slides else "full_attention" for slides in sliding],
        "sliding_window": windows[0] if windows else None,
        "use_sliding_window": bool(windows),
        "vocab_size": contract.vocab_size,
        "num_target_layers": contract.target_num_layers,
        "block_size": contract.block_size,
        "dflash_config": {
            "projector_type": _PROJECTOR,
            "attention_mode": "mha" if contract.num_heads == contract.num_kv_heads else "gqa",
            "target_layer_ids": list(contract.target_layer_ids),
            "mask_token_id": contract.mask_token_id,
            "block_size": contract.block_size,
            "target_hidden_size": contract.target_hidden_size,
            **write_dspark_heads(contract),
        },
        **write_own(contract),
    }


def _check_attention_mode(mode: object, num_heads: int, num_kv_heads: int, top: ConfigReader) -> None:
    if mode not in (None, "gqa", "mha"):
        raise top.error(f"dflash_config.attention_mode is {mode!r}; supported are 'gqa' and 'mha'")
    if (mode == "mha") != (num_heads == num_kv_heads):
        raise top.error(
            f"dflash_config.attention_mode is {mode!r} (absent means 'gqa') and the drafter has {num_heads} query and "
            f"{num_kv_heads} key heads; 'mha' means as many, 'gqa' fewer key heads"
        )
