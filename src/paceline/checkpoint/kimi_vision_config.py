"""The `vision_config` of Kimi-K3: a tower of patch transformers and the projector to the text model's width.

Source: config.json of Kimi-K3. Its norms have no eps of their own; the published implementation's is the resolution of
bfloat16, in which it runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.checkpoint.config_reader import ConfigReader, refuse_unread
from paceline.checkpoint.kimi_contract import VisionSettings

_NORM_EPS = 2.0**-7
_READ = frozenset(
    {"model_type", "patch_size", "merge_kernel_size", "vt_hidden_size", "vt_num_hidden_layers"}
    | {"vt_num_attention_heads", "vt_intermediate_size", "qkv_hidden_size", "projector_ln_eps"}
    | {"init_pos_emb_height", "init_pos_emb_width", "init_pos_emb_time"}
    | {"attn_bias", "linear_bias", "patch_embed_proj_bias", "mm_hidden_size"}
    | {"text_hidden_size"}  # always the text model's own
)
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "norm_type": ("rmsnorm", None),
    "mlp_type": ("mlp2", None),
    "activation_func": ("gelu_pytorch_tanh", None),
    "pos_emb_type": ("divided_fixed", None),
    "pos_emb_interpolation_mode": ("bilinear", None),
    "merge_type": ("sd2_tpool", None),
    "mm_projector_type": ("patchmergerv2", None),
    "projector_hidden_act": ("gelu", None),
    "video_attn_type": ("spatial_temporal", None),
}


def read_vision(config: Mapping[str, Any], top: ConfigReader) -> VisionSettings:
    """Read the `vision_config` of a multimodal config, and the id of its placeholder.

    Raises:
        CheckpointError: a key is unknown, missing or malformed, or asks for what is not supported.
    """
    vision = config.get("vision_config")
    if not isinstance(vision, Mapping):
        raise top.error(f"vision_config is {vision!r}, expected an object")
    reader = ConfigReader(vision, f"{top.origin} (vision_config)")
    refuse_unread(vision, reader, read=_READ, neutral=_NEUTRAL)
    merge = vision.get("merge_kernel_size")
    if not isinstance(merge, list) or len(merge) != 2 or not all(type(size) is int and size > 0 for size in merge):
        raise reader.error(f"merge_kernel_size is {merge!r}, expected two positive integers")
    num_heads, projection_size = reader.whole("vt_num_attention_heads"), reader.whole("qkv_hidden_size")
    if projection_size % (4 * num_heads):
        raise reader.error(
            f"qkv_hidden_size is {projection_size}; {num_heads} heads must have sizes that are multiples of 4: "
            "half of the channels turn by row and half by column, in pairs"
        )
    hidden_size = reader.whole("vt_hidden_size")
    if hidden_size % 2 or reader.whole("mm_hidden_size", default=hidden_size) != hidden_size:
        raise reader.error(f"mm_hidden_size is {vision.get('mm_hidden_size')!r} and vt_hidden_size {hidden_size}")
    return VisionSettings(
        patch_size=reader.whole("patch_size"),
        merge_size=(merge[0], merge[1]),
        hidden_size=hidden_size,
        num_layers=reader.whole("vt_num_hidden_layers"),
        num_heads=num_heads,
        projection_size=projection_size,
        intermediate_size=reader.whole("vt_intermediate_size"),
        grid=(
            reader.whole("init_pos_emb_height"),
            reader.whole("init_pos_emb_width"),
            reader.whole("init_pos_emb_time"),
        ),
        has_attention_bias=reader.flag("attn_bias", default=False),
        has_linear_bias=reader.flag("linear_bias", default=False),
        has_patch_bias=reader.flag("patch_embed_proj_bias", default=False),
        norm_eps=_NORM_EPS,
        projector_eps=reader.positive("projector_ln_eps", default=1e-5),
        media_token_id=top.whole("media_placeholder_token_id", minimum=0),
    )
