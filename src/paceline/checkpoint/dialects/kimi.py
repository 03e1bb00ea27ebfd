"""K3's DSpark with latent attention, `K3DSparkModel`; also TorchSpec's sibling of it, and our own form of both.

Fields are flat, `aux_hidden_stream` and our own additions may stand in a `dflash_config`. Tap ids name the layer whose
*output* is tapped. `num_target_layers` counts the taps; the target's depth is `target_num_hidden_layers`. Positions
turn interleaved pairs. One latent row stands for all heads, so `num_key_value_heads` and `head_dim` mean nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from paceline.checkpoint.config_reader import ConfigReader
from paceline.checkpoint.contract import DrafterContract, LatentAttentionSettings
from paceline.checkpoint.dialects.deepspec import DSPARK_SPELLINGS, read_dspark_body, write_dspark_keys
from paceline.checkpoint.dialects.fields import (
    OWN_KEY,
    PLAIN_ATTENTION,
    read_stack,
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
from paceline.checkpoint.dialects.layer_attention import require_full_attention
from paceline.checkpoint.dialects.taps import read_output_taps
from paceline.checkpoint.dialects.torchspec import check_tap_count
from paceline.checkpoint.dialects.zlab import OWN_FIELDS, STATED
from paceline.errors import CheckpointError

_ARCHITECTURE, _MODEL_TYPE = "K3DSparkModel", "k3_dspark"
_LATENT_KEYS = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_NAMES = frozenset(name for names in DSPARK_SPELLINGS.values() for name in names)
_READ = (
    DECODER_KEYS
    | _NAMES
    | {*_LATENT_KEYS, "num_target_layers", "target_num_hidden_layers", "draft_vocab_size", "has_own_lm_head"}
    | {"is_neox_style", "dflash_config", OWN_KEY}
)
_OFF = (False, None)
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    **NEUTRAL_OF_DRAFTERS,
    "mla_use_nope": _OFF,
    "mla_use_output_gate": _OFF,
    "mla_use_qk_norm": _OFF,
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
    if top.flag("attention_bias", default=False):
        raise top.error("attention_bias is True; latent attention has none")
    if flat["sample_from_anchor"] is False or flat["dspark_bonus_anchor"]:
        raise top.error(
            f"sample_from_anchor is {flat['sample_from_anchor']!r} and dspark_bonus_anchor is "
            f"{flat['dspark_bonus_anchor']!r}; K3 drafters sample the anchor's own row"
        )
    latent = LatentAttentionSettings(
        q_lora_rank=top.whole("q_lora_rank"),
        kv_lora_rank=top.whole("kv_lora_rank"),
        qk_nope_head_size=top.whole("qk_nope_head_dim"),
        qk_rope_head_size=top.whole("qk_rope_head_dim"),
        v_head_size=top.whole("v_head_dim"),
    )
    if latent.qk_rope_head_size % 2:
        raise top.error(f"qk_rope_head_dim is {latent.qk_rope_head_size}; rotary positions need an even one")
    stack = read_stack(config, origin)
    depth = top.whole("target_num_hidden_layers")
    taps = read_output_taps(flat["target_layer_ids"], depth, top)
    check_tap_count(top, len(taps))
    body = read_dspark_body(config, flat, inner, names, origin, hidden_size=stack["hidden_size"])
    if body["draft_vocab_size"] != body["vocab_size"]:
        raise top.error(
            f"draft_vocab_size is {body['draft_vocab_size']} and vocab_size {body['vocab_size']}; "
            "K3 drafters have the full vocabulary"
        )
    return DrafterContract(
        **stack,
        **body,
        target_num_layers=depth,
        target_layer_ids=taps,
        # without meaning here, and kept as they are
        num_kv_heads=top.whole("num_key_value_heads", default=1),
        head_size=top.whole("head_dim", default=latent.qk_rope_head_size),
        attention_bias=False,
        is_neox_style=top.flag("is_neox_style", default=False),
        layer_windows=(None,) * stack["num_layers"],
        layer_causal=(False,) * stack["num_layers"],
        latent=latent,
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
        "q_lora_rank": latent.q_lora_rank,
        "kv_lora_rank": latent.kv_lora_rank,
        "qk_nope_head_dim": latent.qk_nope_head_size,
        "qk_rope_head_dim": latent.qk_rope_head_size,
        "v_head_dim": latent.v_head_size,
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
