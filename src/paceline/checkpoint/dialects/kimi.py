"""K3's DSpark with latent attention, `K3DSparkModel`; also TorchSpec's sibling of it, and our own form of both.

Fields are flat, `aux_hidden_stream` and our own additions may stand in a `dflash_config`. Tap ids name the layer whose
*output* is tapped. `num_target_layers` counts the taps; the target's depth is `target_num_hidden_layers`. Positions
turn interleaved pairs. One latent row stands for all heads, so `num_key_value_heads` and `head_dim` mean nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from paceline.checkpoint.config_reader import ConfigReader
from paceline.checkpoint.contract import DrafterContract
from paceline.checkpoint.dialects.deepspec import DSPARK_SPELLINGS, read_dspark_body, write_dspark_keys
from paceline.checkpoint.dialects.fields import (
    OWN_KEY,
    PLAIN_ATTENTION,
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
    lift,
    nested,
)
from paceline.checkpoint.dialects.latent import LATENT_KEYS, LATENT_SWITCHES, read_latent_decoder, write_latent
from paceline.checkpoint.dialects.layer_attention import require_full_attention
from paceline.checkpoint.dialects.taps import read_output_taps
from paceline.checkpoint.dialects.torchspec import check_tap_count
from paceline.checkpoint.dialects.zlab import OWN_FIELDS, STATED
from paceline.errors import CheckpointError

_ARCHITECTURE, _MODEL_TYPE = "K3DSparkModel", "k3_dspark"
_NAMES = frozenset(name for names in DSPARK_SPELLINGS.values() for name in names)
_READ = (
    DECODER_KEYS
    | _NAMES
    | {*LATENT_KEYS, "num_target_layers", "target_num_hidden_layers", "draft_vocab_size", "has_own_lm_head"}
    | {"is_neox_style", "dflash_config", OWN_KEY}
)
_OFF = (False, None)
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    **NEUTRAL_OF_DRAFTERS,
    **dict.fromkeys(LATENT_SWITCHES, _OFF),
    "is_causal": _OFF,
    # the drafter is dense; these come with the target's config class
    "num_experts": (0, None),
    "num_experts_per_token": (0, None),
    "num_shared_experts": (0, None),
    "moe_intermediate_size": (0, None),
    "first_k_dense_replace": (0, None),
    "moe_layer_freq": (0, 1, None),
}


def read(config: Mapping[str, Any], origin: str, names: Collection[str]) -> DrafterContract:
    """Read a K3 DSpark config.

    Args:
        config: the whole object.
        origin: the file, for messages.
        names: canonical tensor names; empty if the file was not looked at.
    Raises:
        CheckpointError: a key is unknown, a needed field is missing, or two contradict.
    Source: config files of public Kimi-K3 DSpark drafters.
    """
    top = ConfigReader(config, origin)
    inner = nested(config, "dflash_config", top)
    kind = f"DSpark with latent attention ({_ARCHITECTURE})"
    check_keys(Place("", config), top, kind=kind, read=_READ, neutral=_NEUTRAL, inert=INERT_OF_DRAFTERS)
    check_keys(inner, top, kind=kind, read=_NAMES | {*OWN_FIELDS})
    flat = lift(DSPARK_SPELLINGS, (inner, Place("", config)), top)
    try:
        require_full_attention(config.get("layer_types"), "K3")
    except CheckpointError as error:
        raise top.error(error.message) from error
    if flat["sample_from_anchor"] is False or flat["dspark_bonus_anchor"]:
        raise top.error(
            f"sample_from_anchor is {flat['sample_from_anchor']!r} and dspark_bonus_anchor is "
            f"{flat['dspark_bonus_anchor']!r}; K3 drafters sample the anchor's own row"
        )
    decoder = read_latent_decoder(config, origin)
    depth = top.whole("target_num_hidden_layers")
    taps = read_output_taps(flat["target_layer_ids"], depth, top)
    check_tap_count(top, len(taps))
    body = read_dspark_body(config, flat, inner, names, origin, hidden_size=decoder["hidden_size"])
    if body["draft_vocab_size"] != body["vocab_size"]:
        raise top.error(
            f"draft_vocab_size is {body['draft_vocab_size']} and vocab_size {body['vocab_size']}; "
            "K3 drafters have the full vocabulary"
        )
    return DrafterContract(
        **decoder,
        **body,
        target_num_layers=depth,
        target_layer_ids=taps,
        is_neox_style=top.flag("is_neox_style", default=False),
        layer_windows=(None,) * decoder["num_layers"],
        layer_causal=(False,) * decoder["num_layers"],
    )


def write(contract: DrafterContract) -> dict[str, Any]:
    """Write latent DSpark, natively and for K3's readers alike.

    Raises:
        CheckpointError: the contract has no latent attention, or something that the layout has no words for.
    """
    latent = contract.latent
    if latent is None:
        raise CheckpointError(
            f"the K3 layout is for latent attention; the {contract.family} drafter has none",
            origin={"drafter": contract.origin},
            hint="the drafter's native layout",
        )
    require_stated(contract, "K3", *STATED)
    require(
        contract,
        "K3",
        family="dspark",
        layout="anchor_sampling",
        convolution=None,
        selector=None,
        eagle3=None,
        **PLAIN_ATTENTION,
        has_qk_norm=True,
        attention_bias=False,
        has_mask_embedding=False,
        layer_windows=(None,) * contract.num_layers,
        layer_causal=(False,) * contract.num_layers,
        draft_vocab_size=contract.vocab_size,
        target_vocab_size=contract.vocab_size,
    )
    return {
        "architectures": [_ARCHITECTURE],
        "model_type": _MODEL_TYPE,
        **write_decoder(contract),
        **write_latent(latent),
        "is_neox_style": contract.is_neox_style,
        "vocab_size": contract.vocab_size,
        "draft_vocab_size": contract.draft_vocab_size,
        "has_own_lm_head": contract.has_own_head,
        "num_target_layers": contract.num_taps,
        "target_num_hidden_layers": contract.target_num_layers,
        "target_hidden_size": contract.target_hidden_size,
        "fc_norm": contract.has_tap_norm,
        "aux_hidden_stream": contract.aux_hidden_stream,
        "dspark_bonus_anchor": False,
        **write_dspark_keys(contract),
        "dflash_config": {
            "aux_hidden_stream": contract.aux_hidden_stream,
            "use_aux_hidden_state": True,
            "input_embedding_scale": contract.input_embedding_scale,
            "output_multiplier": contract.output_multiplier,
            "final_logit_softcapping": contract.final_logit_softcapping,
            "dspark_draft_topk": contract.draft_top_k,
            "draft_sample_method": contract.draft_sample_method,
            "target_name": contract.target_name,
            "target_vocab_size": contract.target_vocab_size,
        },
    }
