"""Strict key tables: every key of a drafter's config is read, known to be without effect, or refused by name.

A key that nobody reads might say how the drafter was trained, and a drafter served otherwise accepts less without any
error. Where a field may stand in several places or spellings, all that are there must agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from paceline.checkpoint.config_reader import INERT_KEYS, NEUTRAL_VALUES, ConfigReader
from paceline.checkpoint.rope_keys import ROPE_CONFIG_KEYS
from paceline.errors import CheckpointError

# What a config does not say (a target's depth in several layouts) is 0 in the contract, and taken from the real target.
UNSTATED = 0

# the decoder's own fields, the same in every layout that has them
DECODER_KEYS = ROPE_CONFIG_KEYS | {
    "architectures",
    "model_type",
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "rms_norm_eps",
    "max_position_embeddings",
    "attention_bias",
    "layer_types",
    "sliding_window",
    "use_sliding_window",
    "dtype",
    "torch_dtype",
    "tie_word_embeddings",
    "quantization_config",
}
# Qwen3 writers copy the target's token ids; ids of text have no part in a draft block. The underscored ones are notes
# that transformers leaves behind.
INERT_OF_DRAFTERS = INERT_KEYS | {
    "bos_token_id",
    "eos_token_id",
    "_name_or_path",
    "_commit_hash",
    "_attn_implementation",
    "_attn_implementation_autoset",
    "attn_implementation",
    "name_or_path",
}
NEUTRAL_OF_DRAFTERS: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {key: values for key, values in NEUTRAL_VALUES.items() if key not in DECODER_KEYS | {"final_logit_softcapping"}}
    | {"mlp_bias": (False, None)}
)
# keys of families and layouts, so that a refusal can say what they are a sign of
_KEYS_OF: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "DFlash2": ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"),
        "DSpark": (
            "markov_rank",
            "markov_head_type",
            "enable_confidence_head",
            "confidence_head_with_markov",
            "confidence_head_alpha",
            "dspark_target_layer_ids",
            "dspark_noise_token_id",
            "dspark_block_size",
            "dspark_markov_rank",
            "dspark_bonus_anchor",
            "dspark_draft_topk",
        ),
        "DSpark of DeepSeek-V4": ("n_mtp_layers",),
        "DSpark for Gemma 4": ("attention_k_eq_v", "global_head_dim", "num_global_key_value_heads"),
        "DSpark or Domino of SpecForge": ("projector_type",),
        "Domino of SpecForge": ("shift_label", "pure_draft_prefix_len"),
        "EAGLE-3": (
            "eagle_config",
            "eagle_aux_hidden_state_layer_ids",
            "norm_before_residual",
            "norm_before_fc",
            "norm_output",
            "num_aux_hidden_states",
            "num_aux_layers",
            "ttt_length",
        ),
        "P-EAGLE or PARD": ("pard_token", "ptd_token_id"),
        "the speculators layout": (
            "aux_hidden_state_layer_ids",
            "sliding_window_non_causal",
            "transformer_layer_config",
            "speculators_config",
            "speculators_version",
            "speculators_model_type",
        ),
        "TorchSpec's flat layout or K3": ("target_num_hidden_layers",),
        "DSpark of SpecForge, or latent attention": ("attention_mode",),
        "latent attention": ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
        "XPress": ("xpress_rank", "xpress_mlp_hidden", "xpress_num_passes", "num_jacobi_passes", "xpress_mlp_ratio"),
        "LiLiCorr": ("lilicorr_enabled", "lilicorr_hidden_size", "lilicorr_candidate_topk"),
    }
)
SIGNS: Mapping[str, str] = MappingProxyType({key: family for family, keys in _KEYS_OF.items() for key in keys})


@dataclass(frozen=True)
class Place:
    """One object of a config that may hold a drafter's fields."""

    name: str  # "" for the top level, else the key of the nested object
    values: Mapping[str, Any]

    def path(self, key: str) -> str:
        """The key as a message shows it."""
        return f"{self.name}.{key}" if self.name else f"the top-level {key}"

    def short(self, key: str) -> str:
        """The key with its place, bare at the top level."""
        return f"{self.name}.{key}" if self.name else key


def nested(config: Mapping[str, Any], key: str, reader: ConfigReader) -> Place:
    """A nested object as a place; an absent one is empty.

    Raises:
        CheckpointError: the key holds something else.
    """
    value = config.get(key)
    if value is None:
        return Place(key, {})
    if not isinstance(value, Mapping):
        raise reader.error(f"{key} is {value!r}, expected an object")
    return Place(key, value)


def check_keys(
    place: Place,
    reader: ConfigReader,
    *,
    kind: str,
    read: Iterable[str],
    neutral: Mapping[str, tuple[object, ...]] | None = None,
    inert: Iterable[str] = (),
) -> None:
    """Refuse what is neither read nor known to have no effect.

    Args:
        place: the object.
        reader: for the file in messages.
        kind: what the architecture says that the drafter is.
        read: keys that the dialect reads.
        neutral: keys that would change the drafter, and the values at which they do not.
        inert: keys without effect.
    Raises:
        CheckpointError: names key, value and, where known, the family that it is a sign of.
    """
    neutral = neutral or {}
    known = {*read, *inert, *neutral}
    unknown = sorted(key for key in place.values if key not in known)
    for key in unknown:
        if key in SIGNS:
            raise reader.error(f"the architecture is {kind}, and the key {place.short(key)} belongs to {SIGNS[key]}")
    if unknown:
        raise reader.error(
            f"unknown config key {', '.join(place.short(key) for key in unknown[:8])}: "
            "it might say how the drafter was trained",
            hint="a newer paceline, or removing the key if it is known to have no effect",
        )
    for key, allowed in neutral.items():
        if key in place.values and not _is_one_of(place.values[key], allowed):
            shown = " or ".join(repr(value) for value in allowed)
            raise reader.error(f"{place.short(key)} is {place.values[key]!r}; supported is {shown}")


def lift(spellings: Mapping[str, Sequence[str]], places: Sequence[Place], reader: ConfigReader) -> dict[str, Any]:
    """Bring fields that may stand in several places, under several names, into one flat object.

    Args:
        spellings: field to the names that it may have; all are looked up in every place.
        places: most specific first.
        reader: for the file in messages.
    Returns:
        Field to value; a field that is nowhere, or null, is None.
    Raises:
        CheckpointError: two places say different things.
    """
    lifted: dict[str, Any] = {}
    for field, names in spellings.items():
        found = [
            (place.path(name), place.values[name])
            for place in places
            for name in names
            if place.values.get(name) is not None
        ]
        for path, value in found[1:]:
            if not is_same(found[0][1], value):
                raise contradiction(found[0][0], found[0][1], path, value, reader)
        lifted[field] = found[0][1] if found else None
    return lifted


def contradiction(first: str, a: object, second: str, b: object, reader: ConfigReader) -> CheckpointError:
    """A refusal for two fields that say different things about the same."""
    return reader.error(
        f"{first} is {a!r} and {second} is {b!r}", hint="keeping the value that the drafter was trained with"
    )


def same_names(*fields: str) -> dict[str, tuple[str, ...]]:
    """Spellings for fields that have one name."""
    return {field: (field,) for field in fields}


def is_same(a: object, b: object) -> bool:
    """Whether two values of a config say the same; true is not 1."""
    return a == b and isinstance(a, bool) == isinstance(b, bool)


def _is_one_of(value: object, allowed: tuple[object, ...]) -> bool:
    return any(is_same(value, one) for one in allowed)
