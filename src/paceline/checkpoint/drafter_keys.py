"""The keys of a z-lab drafter config: which are read, which are inert, and what the others betray.

Strictness lives here: a key that is not in these tables is refused, since it might say how the drafter was trained.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.checkpoint.rope_keys import ROPE_CONFIG_KEYS
from paceline.checkpoint.target_config import INERT_KEYS, ConfigReader

ARCHITECTURE = "DFlashDraftModel"

# families and layouts that are recognised so that the refusal can name them (specification table of architectures)
_OTHER_ARCHITECTURES: Mapping[str, str] = {
    "DFlash2DraftModel": "DFlash2",
    "DFlash2BeamDraftModel": "DFlash2 for Beam targets",
    "LiLiCorrDraftModel": "LiLiCorr",
    "DFlashLagunaForCausalLM": "Laguna DFlash",
    "MuseGlimmerAssistantModel": "the Hugging Face DFlash assistant",
    "Qwen3XPressModel": "XPress",
    "Qwen3DSparkModel": "DSpark",
    "Qwen3OmniDSparkModel": "DSpark",
    "Gemma4DSparkModel": "DSpark",
    "MuseSparkDSparkModel": "DSpark",
    "K3DSparkModel": "DSpark with latent attention (K3)",
    "DSparkDraftModel": "DSpark",
    "DFlashSpeculator": "the speculators layout",
    "DSparkSpeculator": "the speculators layout",
    "XPressSpeculator": "the speculators layout",
    "Eagle3Speculator": "EAGLE-3 in the speculators layout",
    "PEagleSpeculator": "P-EAGLE in the speculators layout",
    "LlamaForCausalLMEagle3": "EAGLE-3",
    "Eagle3LlamaForCausalLM": "EAGLE-3",
    "Eagle3Qwen3ForCausalLM": "EAGLE-3",
    "Qwen3Eagle3Model": "EAGLE-3",
    "PeagleLlamaForCausalLM": "P-EAGLE",
    "PeagleQwen3ForCausalLM": "P-EAGLE",
    "PEagleDraftModel": "P-EAGLE",
}
# keys that belong to another family: with the DFlash architecture string they contradict it
_KEYS_OF_OTHERS: Mapping[str, str] = {
    "conv_kernel_size": "DFlash2",
    "conv_group_size": "DFlash2",
    "selector_rank": "DFlash2",
    "selector_top_k": "DFlash2",
    "markov_rank": "DSpark",
    "markov_head_type": "DSpark",
    "enable_confidence_head": "DSpark",
    "confidence_head_with_markov": "DSpark",
    "dspark_target_layer_ids": "DSpark",
    "dspark_noise_token_id": "DSpark",
    "dspark_block_size": "DSpark",
    "dspark_markov_rank": "DSpark",
    "dspark_bonus_anchor": "DSpark",
    "projector_type": "Domino or DSpark of SpecForge",
    "shift_label": "Domino of SpecForge",
    "eagle_config": "EAGLE-3",
    "eagle_aux_hidden_state_layer_ids": "EAGLE-3",
    "norm_before_residual": "EAGLE-3",
    "norm_before_fc": "EAGLE-3",
    "aux_hidden_state_layer_ids": "the speculators layout",
    "sliding_window_non_causal": "the speculators layout",
    "transformer_layer_config": "the speculators layout",
    "target_num_hidden_layers": "TorchSpec's flat layout",
    "attention_mode": "DSpark of SpecForge, or latent attention",
}
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
_NESTED_ONLY = (
    "causal",
    "use_swa",
    "swa_window_size",
    "attention_sink_bias",
    "attention_value_scale",
    "draft_sample_method",
    "target_vocab_size",
    "target_name",
)
_TOP_ONLY = ROPE_CONFIG_KEYS | {
    "architectures",
    "model_type",
    "dflash_config",
    "num_hidden_layers",
    "num_target_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "draft_vocab_size",
    "rms_norm_eps",
    "attention_bias",
    "is_neox_style",
    "max_position_embeddings",
    "layer_types",
    "sliding_window",
    "use_sliding_window",
    "is_causal",
    "dtype",
    "torch_dtype",
}
# top-level keys that would change the drafter, and the values at which they do not
_NEUTRAL_TOP: Mapping[str, tuple[object, ...]] = {
    "hidden_act": ("silu", "swish"),
    "tie_word_embeddings": (False, True),  # a DFlash folder holds neither embedding nor head: nothing to tie
    "has_own_lm_head": (False,),
    "logit_scale": (1, 1.0),
    "add_swa_attention_sink_bias": (False,),
    "quantization_config": (None,),
    "is_encoder_decoder": (False,),
    "pretraining_tp": (1,),
}
_NEUTRAL_NESTED: Mapping[str, tuple[object, ...]] = {
    "attention_sink_bias": (False, None),
    "attention_value_scale": (1, 1.0, None),
    "use_aux_hidden_state": (True, None),
}
# Qwen3 writers copy these from the target's config; ids of the target's text have no part in a draft block
_INERT_TOP = INERT_KEYS | {"bos_token_id", "eos_token_id"}


def refuse_other_kinds(config: Mapping[str, Any], reader: ConfigReader) -> None:
    supported = f"supported is {ARCHITECTURE} in the z-lab layout"
    if "speculators_model_type" in config:
        kind = config["speculators_model_type"]
        raise reader.error(f"the drafter is a {kind!r} in the speculators layout, which is not supported; {supported}")
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or len(architectures) != 1:
        raise reader.error(f"architectures is {architectures!r}; {supported}")
    found = architectures[0]
    if found in _OTHER_ARCHITECTURES:
        family = _OTHER_ARCHITECTURES[found]
        raise reader.error(f"the drafter is of the family {family} ({found}), which is not supported; {supported}")
    if found != ARCHITECTURE and "dflash_config" not in config:
        raise reader.error(
            f"the folder is a model of its own ({found}), not a drafter",
            hint="this folder as the target, and a folder whose config has dflash_config as the drafter",
        )
    if found != ARCHITECTURE:
        raise reader.error(f"the drafter's architecture {found!r} is not supported; {supported}")
    model_type = config.get("model_type")
    if model_type not in (None, "qwen3"):
        raise reader.error(f"the drafter's model_type is {model_type!r}; supported is 'qwen3'")


def refuse_unknown(config: Mapping[str, Any], nested: Mapping[str, Any], reader: ConfigReader) -> None:
    for place, keys in (("", config), ("dflash_config.", nested)):
        for key in keys:
            if key in _KEYS_OF_OTHERS:
                family = _KEYS_OF_OTHERS[key]
                raise reader.error(f"the architecture is {ARCHITECTURE}, and the key {place}{key} belongs to {family}")
    unknown = [key for key in config if key not in _TOP_ONLY | _INERT_TOP | _NEUTRAL_TOP.keys() | set(_EITHER_PLACE)]
    unknown = [key for key in unknown if not key.startswith("_")]
    unknown += [f"dflash_config.{key}" for key in nested if key not in {*_EITHER_PLACE, *_NESTED_ONLY}]
    if unknown:
        raise reader.error(
            f"unknown config key {', '.join(sorted(unknown)[:8])}: it might say how the drafter was trained",
            hint="a newer paceline, or removing the key if it is known to have no effect",
        )
    for place, keys, neutral in (("", config, _NEUTRAL_TOP), ("dflash_config.", nested, _NEUTRAL_NESTED)):
        for key, allowed in neutral.items():
            if key in keys and keys[key] not in allowed:
                shown = " or ".join(repr(value) for value in allowed)
                raise reader.error(f"{place}{key} is {keys[key]!r}; supported is {shown}")


def merge_places(config: Mapping[str, Any], nested: Mapping[str, Any], reader: ConfigReader) -> dict[str, Any]:
    """The fields that may stand in either place, checked to agree where they stand in both."""
    merged: dict[str, Any] = {}
    for key in _EITHER_PLACE:
        inner, outer = nested.get(key), config.get(key)
        if inner is not None and outer is not None and inner != outer:
            raise reader.error(
                f"dflash_config.{key} is {inner!r} and the top-level {key} is {outer!r}",
                hint="keeping the value that the drafter was trained with",
            )
        merged[key] = inner if inner is not None else outer
    if merged["use_aux_hidden_state"] not in (None, True):
        raise reader.error(f"use_aux_hidden_state is {merged['use_aux_hidden_state']!r}; supported is true")
    return merged
