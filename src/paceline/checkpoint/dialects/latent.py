"""Latent attention as configs state it: its five sizes, its switches, and how its positional channels are paired.

One latent row stands for all heads, so `num_key_value_heads` and `head_dim` mean nothing beside these fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.checkpoint.config_reader import ConfigReader
from paceline.checkpoint.contract import LatentAttentionSettings
from paceline.checkpoint.dialects.fields import read_stack
from paceline.checkpoint.dialects.keys import Place, contradiction

LATENT_KEYS = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
# latent attention with one of these switched on computes something else
LATENT_SWITCHES = ("mla_use_nope", "mla_use_output_gate", "mla_use_qk_norm")
# SpecForge's spellings of the pairing, nested and at the top level
PAIRINGS = ("mla_rope_interleaved", "rope_interleave")


def read_latent_decoder(config: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """The decoder of a latent drafter, its attention included, as contract fields.

    Raises:
        CheckpointError: a size is missing or malformed, or the attention has biases.
    """
    top = ConfigReader(config, origin)
    if top.flag("attention_bias", default=False):
        raise top.error("attention_bias is True; latent attention has none")
    latent = LatentAttentionSettings(
        q_lora_rank=top.whole("q_lora_rank"),
        kv_lora_rank=top.whole("kv_lora_rank"),
        qk_nope_head_size=top.whole("qk_nope_head_dim"),
        qk_rope_head_size=top.whole("qk_rope_head_dim"),
        v_head_size=top.whole("v_head_dim"),
    )
    if latent.qk_rope_head_size % 2:
        raise top.error(f"qk_rope_head_dim is {latent.qk_rope_head_size}; rotary positions need an even one")
    return {
        **read_stack(config, origin),
        # without meaning here, and kept as they are
        "num_kv_heads": top.whole("num_key_value_heads", default=1),
        "head_size": top.whole("head_dim", default=latent.qk_rope_head_size),
        "attention_bias": False,
        "latent": latent,
    }


def read_pairing(places: tuple[Place, ...], reader: ConfigReader) -> bool:
    """Whether positional channels are paired as split halves; absent means interleaved, as in every public drafter.

    Raises:
        CheckpointError: it is said twice, differently.
    """
    said: list[tuple[str, bool]] = []
    for place in places:
        own = ConfigReader(place.values, reader.origin)
        spellings = [("is_neox_style", False), *((key, True) for key in PAIRINGS)]
        said += [
            (place.path(key), own.flag(key) != is_inverse)
            for key, is_inverse in spellings
            if place.values.get(key) is not None
        ]
    for path, is_neox_style in said[1:]:
        if is_neox_style != said[0][1]:
            raise contradiction(said[0][0], _named(said[0][1]), path, _named(is_neox_style), reader)
    return said[0][1] if said else False


def write_latent(latent: LatentAttentionSettings) -> dict[str, Any]:
    """The five sizes."""
    return {
        "q_lora_rank": latent.q_lora_rank,
        "kv_lora_rank": latent.kv_lora_rank,
        "qk_nope_head_dim": latent.qk_nope_head_size,
        "qk_rope_head_dim": latent.qk_rope_head_size,
        "v_head_dim": latent.v_head_size,
    }


def _named(is_neox_style: bool) -> str:
    return "split halves" if is_neox_style else "interleaved pairs"
