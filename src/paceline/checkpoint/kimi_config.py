"""Config files of Kimi-Linear and Kimi-K3, text alone and multimodal, read into a `TargetContract`.

Kimi-K3's text model is a `kimi_linear` config with more keys; the multimodal file holds one as `text_config` beside a
`vision_config`. Layers of `linear_attn_config` count from 1, all others from 0. As for dense targets, a key that is
neither read nor known to be inert is refused.

Source: config.json of Kimi-Linear-48B-A3B and Kimi-K3, and the config class of transformers 5.24, which adds spellings.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from paceline.checkpoint.config_reader import (
    NEUTRAL_VALUES,
    ConfigReader,
    read_first_id,
    read_stop_token_ids,
    read_stored_dtype,
    refuse_unread,
)
from paceline.checkpoint.contract import RopeSettings, TargetContract
from paceline.checkpoint.kimi_contract import (
    Activation,
    DeltaAttentionSettings,
    ExpertSettings,
    KimiSettings,
    NopeLatentSettings,
    RouterScores,
)
from paceline.checkpoint.kimi_vision_config import read_vision
from paceline.checkpoint.rope_keys import ROPE_CONFIG_KEYS

TEXT_ARCHITECTURE, MULTIMODAL_ARCHITECTURE = "KimiLinearForCausalLM", "KimiK3ForConditionalGeneration"
TEXT_MODEL_TYPE, MULTIMODAL_MODEL_TYPE = "kimi_linear", "kimi_k3"
OWN_KEY = "paceline"  # our own additions

_LOWEST_GATE_BOUND = -5.0  # below it engines' kernels lose the state in their arithmetic
_DEFAULT_THETA = 10_000.0
# published files' spelling of a key to transformers'
_ALIASES: Mapping[str, str] = {
    "model_max_length": "max_position_embeddings",
    "num_expert_group": "n_group",
    "num_experts": "num_local_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
    "moe_renormalize": "norm_topk_prob",
}
_READ = (
    frozenset(_ALIASES)
    | frozenset(_ALIASES.values())
    | {"architectures", "model_type", "num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size"}
    | {"num_attention_heads", "num_key_value_heads", "rms_norm_eps", "eos_token_id", "bos_token_id"}
    | {"dtype", "torch_dtype", "logit_scale", "quantization_config", OWN_KEY}
    | {"hidden_act", "activation_situ_beta", "activation_situ_linear_beta"}
    | {"q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"}
    | {"mla_use_nope", "mla_use_output_gate", "linear_attn_config", "attn_res_block_size", "num_nextn_predict_layers"}
    | {"moe_intermediate_size", "routed_expert_hidden_size", "latent_moe_use_norm", "moe_router_activation_func"}
    | {"use_grouped_topk", "topk_group", "routed_scaling_factor", "first_k_dense_replace", "moe_layer_freq"}
    | {"layer_types", "mlp_layer_types", "linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim"}
)
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    **{key: allowed for key, allowed in NEUTRAL_VALUES.items() if key not in _READ},
    "tie_word_embeddings": (False, None),
    "attention_bias": (False, None),
    "topk_method": ("noaux_tc", None),
}
# without effect here: nothing turns by position, a head's size follows from its parts, losses are training's
_INERT = ROPE_CONFIG_KEYS | {"head_dim", "qk_head_dim", "output_router_logits", "router_aux_loss_coef"}
_DELTA_KEYS = frozenset(
    {"kda_layers", "full_attn_layers", "num_heads", "head_dim", "short_conv_kernel_size"}
    | {"use_full_rank_gate", "gate_lower_bound"}
)
_MULTIMODAL_READ = frozenset(
    {"architectures", "model_type", "text_config", "vision_config", "media_placeholder_token_id"}
    | {"dtype", "torch_dtype", "eos_token_id", "bos_token_id", "quantization_config"}
)
# of whoever prepares prompts and trains
_MULTIMODAL_INERT = frozenset({"image_placeholder", "ignore_index"})


def read_kimi_contract(config: Mapping[str, Any], folder: Path, name: str) -> TargetContract:
    """Read a Kimi target.

    Args:
        config: the whole config.json, of either model type.
        folder: the model's.
        name: as the user gave it.
    Raises:
        CheckpointError: a key is unknown, missing or malformed, or two contradict each other.
    """
    file = str(folder / "config.json")
    if config["model_type"] == TEXT_MODEL_TYPE:
        return _text_contract(config, ConfigReader(config, file), TEXT_ARCHITECTURE, name, config, folder)
    top = ConfigReader(config, file)
    neutral = {key: allowed for key, allowed in _NEUTRAL.items() if key not in _MULTIMODAL_READ}
    refuse_unread(config, top, read=_MULTIMODAL_READ | _MULTIMODAL_INERT, neutral=neutral)
    text = config.get("text_config")
    if not isinstance(text, Mapping) or text.get("model_type") != TEXT_MODEL_TYPE:
        found = text.get("model_type") if isinstance(text, Mapping) else text
        raise top.error(f"text_config.model_type is {found!r}, expected {TEXT_MODEL_TYPE!r}")
    reader = ConfigReader(text, f"{file} (text_config)")
    # the wrapper's ids and dtype win: whoever renders prompts reads those
    merged = {**text, **{key: config[key] for key in _MULTIMODAL_READ if config.get(key) is not None}}
    contract = _text_contract(text, reader, MULTIMODAL_ARCHITECTURE, name, merged, folder)
    assert contract.kimi is not None
    return dataclasses.replace(contract, kimi=dataclasses.replace(contract.kimi, vision=read_vision(config, top)))


def read_quantization(config: Mapping[str, Any], origin: str) -> Mapping[str, Any] | None:
    """What a Kimi config says of stored weights: at its top level, in its `text_config`, or twice the same.

    Raises:
        CheckpointError: the two places disagree.
    """
    text = config.get("text_config")
    found = [
        place["quantization_config"]
        for place in (config, text if isinstance(text, Mapping) else {})
        if place.get("quantization_config") is not None
    ]
    if len(found) > 1 and found[0] != found[1]:
        raise ConfigReader(config, origin).error("quantization_config and text_config.quantization_config disagree")
    return cast("Mapping[str, Any]", found[0]) if found else None


def _text_contract(
    config: Mapping[str, Any],
    reader: ConfigReader,
    architecture: str,
    name: str,
    whole: Mapping[str, Any],
    folder: Path,
) -> TargetContract:
    """The contract of a text config; `whole` says ids and dtype."""
    refuse_unread(config, reader, read=_READ | _INERT, neutral=_NEUTRAL)
    config, reader = _one_spelling(config, reader)
    num_heads, num_layers = reader.whole("num_attention_heads"), reader.whole("num_hidden_layers")
    num_kv_heads = reader.whole("num_key_value_heads", default=num_heads)
    if num_kv_heads != num_heads:
        raise reader.error(f"num_key_value_heads is {num_kv_heads}; latent attention has as many as heads, {num_heads}")
    eps = reader.positive("rms_norm_eps")
    latent = _latent(config, reader, eps)
    activation = reader.text("hidden_act")
    if activation not in ("silu", "situ"):
        raise reader.error(f"hidden_act is {activation!r}; supported are 'silu' and 'situ'")
    linear_beta = config.get("activation_situ_linear_beta")
    block_size = config.get("attn_res_block_size")
    kimi = KimiSettings(
        latent=latent,
        delta=_delta(config, num_layers, reader),
        experts=_experts(config, num_layers, reader),
        activation=cast(Activation, activation),
        situ_beta=reader.positive("activation_situ_beta") if config.get("activation_situ_beta") else 1.0,
        situ_linear_beta=None if linear_beta is None else reader.positive("activation_situ_linear_beta"),
        residual_block_size=None if block_size is None else reader.whole("attn_res_block_size"),
        logit_scale=reader.positive("logit_scale", default=1.0),
        num_mtp_layers=reader.whole("num_nextn_predict_layers", default=0, minimum=0),
    )
    return TargetContract(
        architecture=architecture,
        name=name,
        origin=str(folder / "config.json"),
        num_layers=num_layers,
        hidden_size=reader.whole("hidden_size"),
        intermediate_size=reader.whole("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=latent.qk_nope_head_size,
        vocab_size=reader.whole("vocab_size"),
        rms_norm_eps=eps,
        rope=RopeSettings(theta=_theta(config)),
        max_position_embeddings=reader.whole("model_max_length"),
        has_qk_norm=False,
        attention_bias=False,
        mlp_bias=False,
        tie_word_embeddings=False,
        stop_token_ids=read_stop_token_ids(folder, whole, reader),
        bos_token_id=read_first_id(whole.get("bos_token_id"), reader),
        dtype=read_stored_dtype(folder, whole, reader),
        kimi=kimi,
    )


def _one_spelling(config: Mapping[str, Any], reader: ConfigReader) -> tuple[dict[str, Any], ConfigReader]:
    """The config with the published spelling of every key that has two."""
    flat = dict(config)
    for key, alias in _ALIASES.items():
        values = [flat.pop(spelling) for spelling in (alias, key) if flat.get(spelling) is not None]
        if len(values) > 1 and values[0] != values[1]:
            raise reader.error(f"{key} is {values[1]!r} and {alias} is {values[0]!r}: two names of one setting")
        if values:
            flat[key] = values[0]
    return flat, ConfigReader(flat, reader.origin)


def _latent(config: Mapping[str, Any], reader: ConfigReader, eps: float) -> NopeLatentSettings:
    if not reader.flag("mla_use_nope", default=False):
        raise reader.error("mla_use_nope is not true; supported is latent attention without rotary positions")
    own = config.get(OWN_KEY) or {}
    if not isinstance(own, Mapping) or set(own) - {"latent_norm_eps"}:
        raise reader.error(f"{OWN_KEY} is {own!r}, expected an object with at most latent_norm_eps")
    own_reader = ConfigReader(own, f"{reader.origin} ({OWN_KEY})")
    return NopeLatentSettings(
        q_lora_rank=None if config.get("q_lora_rank") is None else reader.whole("q_lora_rank"),
        kv_lora_rank=reader.whole("kv_lora_rank"),
        qk_nope_head_size=reader.whole("qk_nope_head_dim"),
        qk_rope_head_size=reader.whole("qk_rope_head_dim"),
        v_head_size=reader.whole("v_head_dim"),
        has_output_gate=reader.flag("mla_use_output_gate", default=False),
        norm_eps=own_reader.positive("latent_norm_eps", default=eps),
    )


def _delta(config: Mapping[str, Any], num_layers: int, reader: ConfigReader) -> DeltaAttentionSettings | None:
    linear = config.get("linear_attn_config")
    if linear is None:
        _check_stated(config, reader, layer_types=["full_attention"] * num_layers)
        return None
    if not isinstance(linear, Mapping) or set(linear) - _DELTA_KEYS:
        unknown = sorted(set(linear) - _DELTA_KEYS) if isinstance(linear, Mapping) else linear
        raise reader.error(f"linear_attn_config has {unknown}; known are {', '.join(sorted(_DELTA_KEYS))}")
    inner = ConfigReader(linear, f"{reader.origin} (linear_attn_config)")
    delta = _layer_numbers(linear, "kda_layers", inner)
    full = _layer_numbers(linear, "full_attn_layers", inner)
    if sorted(delta + full) != list(range(1, num_layers + 1)):
        raise inner.error(
            f"kda_layers {delta} and full_attn_layers {full} are not each of the layers 1 to {num_layers} once",
            hint="numbers that count from 1; each layer has one kind of attention",
        )
    bound = linear.get("gate_lower_bound")
    is_number = isinstance(bound, int | float) and not isinstance(bound, bool)
    if bound is not None and not (is_number and _LOWEST_GATE_BOUND <= bound < 0):
        raise inner.error(f"gate_lower_bound is {bound!r}, expected a number from {_LOWEST_GATE_BOUND} to below 0")
    settings = DeltaAttentionSettings(
        layers=tuple(number - 1 for number in sorted(delta)),
        num_heads=inner.whole("num_heads"),
        head_size=inner.whole("head_dim"),
        convolution_size=inner.whole("short_conv_kernel_size", minimum=2),
        has_full_rank_gate=inner.flag("use_full_rank_gate", default=False),
        gate_lower_bound=None if bound is None else float(bound),
    )
    kinds = ["linear_attention" if number in delta else "full_attention" for number in range(1, num_layers + 1)]
    _check_stated(
        config,
        reader,
        layer_types=kinds,
        linear_head_dim=settings.head_size,
        linear_num_heads=settings.num_heads,
        linear_conv_kernel_dim=settings.convolution_size,
    )
    return settings if delta else None


def _layer_numbers(linear: Mapping[str, Any], key: str, reader: ConfigReader) -> list[int]:
    numbers = linear.get(key)
    if not isinstance(numbers, list) or not all(type(number) is int for number in numbers):
        raise reader.error(f"{key} is {numbers!r}, expected a list of layer numbers that count from 1")
    return list(numbers)


def _experts(config: Mapping[str, Any], num_layers: int, reader: ConfigReader) -> ExpertSettings | None:
    num_experts = reader.whole("num_experts", default=0, minimum=0)
    if num_experts == 0:
        _check_stated(config, reader, mlp_layer_types=["dense"] * num_layers)
        return None
    is_grouped = reader.flag("use_grouped_topk", default=True)
    scores = reader.text("moe_router_activation_func", default="sigmoid")
    if scores not in ("sigmoid", "softmax"):
        raise reader.error(f"moe_router_activation_func is {scores!r}; supported are 'sigmoid' and 'softmax'")
    latent_size = reader.whole("routed_expert_hidden_size", default=0, minimum=0)
    experts = ExpertSettings(
        num_experts=num_experts,
        num_experts_per_token=reader.whole("num_experts_per_token"),
        intermediate_size=reader.whole("moe_intermediate_size"),
        num_shared_experts=reader.whole("num_shared_experts", default=0, minimum=0),
        latent_size=latent_size or None,
        has_latent_norm=reader.flag("latent_moe_use_norm", default=False),
        scores=cast(RouterScores, scores),
        renormalises=reader.flag("moe_renormalize", default=True),
        scaling_factor=reader.positive("routed_scaling_factor", default=1.0),
        num_groups=reader.whole("num_expert_group", default=1) if is_grouped else 1,
        num_groups_kept=reader.whole("topk_group", default=1) if is_grouped else 1,
        first_layer=reader.whole("first_k_dense_replace", default=0, minimum=0),
        layer_step=reader.whole("moe_layer_freq", default=1),
    )
    if experts.has_latent_norm and experts.latent_size is None:
        raise reader.error("latent_moe_use_norm is true, and routed_expert_hidden_size is not set")
    if num_experts % experts.num_groups or experts.num_groups_kept > experts.num_groups:
        raise reader.error(
            f"num_expert_group is {experts.num_groups} and topk_group {experts.num_groups_kept}; "
            f"{num_experts} experts must make equal groups, of which as many or fewer are kept"
        )
    reachable = num_experts // experts.num_groups * experts.num_groups_kept
    if experts.num_experts_per_token > reachable:
        raise reader.error(
            f"num_experts_per_token is {experts.num_experts_per_token}, of {reachable} that can be chosen"
        )
    kinds = ["sparse" if experts.has_experts(layer) else "dense" for layer in range(num_layers)]
    _check_stated(config, reader, mlp_layer_types=kinds)
    return experts


def _check_stated(config: Mapping[str, Any], reader: ConfigReader, **found: object) -> None:
    """Refuse what transformers' own keys say otherwise."""
    for key, value in found.items():
        if config.get(key) is not None and config[key] != value:
            raise reader.error(f"{key} is {config[key]!r}; the published keys of the same config make it {value!r}")


def _theta(config: Mapping[str, Any]) -> float:
    """The base that a drafter of this target would turn by; the target itself turns nothing."""
    nested = config.get("rope_parameters")
    for place in (nested if isinstance(nested, Mapping) else {}, config):
        theta = place.get("rope_theta")
        if isinstance(theta, int | float) and not isinstance(theta, bool) and theta > 0:
            return float(theta)
    return _DEFAULT_THETA
