"""From the settings of a run to what its drafter will promise; heads, widths and RoPE are the target's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.checkpoint.contract import (
    ConfidenceSettings,
    ConvolutionSettings,
    DrafterContract,
    DraftSampleMethod,
    Eagle3Settings,
    LatentAttentionSettings,
    MarkovSettings,
    SelectorSettings,
    TargetContract,
    TargetLayerId,
)
from paceline.checkpoint.dialects import default_target_layer_ids
from paceline.configuration.run import DrafterSettings, TrainRun
from paceline.errors import ConfigError

_NO_MASK = -1  # an EAGLE-3 drafter has no masked rows
# Where drafts depend on those before them, drawing keeps more of sampled text. Others take the best id.
_SAMPLE_METHODS: dict[str, DraftSampleMethod] = {"dflash2": "probabilistic", "dspark": "probabilistic"}


def drafter_contract(run: TrainRun, target: TargetContract) -> DrafterContract:
    """What the drafter of a run will promise.

    Raises:
        ConfigError: a tap, the mask id, a position or a draft vocabulary does not exist in this target.
    """
    asked = run.drafter
    _check_sizes(run, target)
    layers = asked.target_layer_ids or default_target_layer_ids(target.num_layers, asked.num_taps)
    if layers[-1] >= target.num_layers - 1:
        raise ConfigError(
            f"drafter.target_layer_ids ends at {layers[-1]}; the target has {target.num_layers} layers, "
            f"of which {target.num_layers - 2} is the last that can be tapped",
            hint="leave target_layer_ids out to spread the taps",
        )
    if target.kimi is not None and target.kimi.logit_scale != 1.0:
        # the loss multiplies with the bare head, so the teacher would be another distribution than the target's
        raise ConfigError(
            f"the target multiplies its logits by {target.kimi.logit_scale}; only targets without a logit_scale can be "
            "trained for",
            origin={"target": target.origin},
        )
    if asked.aux_hidden_stream not in target.aux_hidden_streams:
        raise ConfigError(
            f"drafter.aux_hidden_stream is {asked.aux_hidden_stream!r}; the target has "
            f"{' and '.join(sorted(target.aux_hidden_streams))}",
            origin={"target": target.origin},
            hint="drafter.aux_hidden_stream=prefix",
        )
    is_causal = asked.family == "eagle3"
    return DrafterContract(
        family=asked.family,
        origin=str(run.output),
        target_name=_portable(target.name),
        target_num_layers=target.num_layers,
        target_hidden_size=target.hidden_size,
        target_vocab_size=target.vocab_size,
        target_layer_ids=tuple(TargetLayerId(layer) for layer in layers),
        aux_hidden_stream=asked.aux_hidden_stream,
        has_tap_norm=asked.tap_norm,
        block_size=asked.block_size,
        layout="autoregressive" if is_causal else asked.layout,
        mask_token_id=_NO_MASK if asked.mask_token_id is None else asked.mask_token_id,
        vocab_size=target.vocab_size,
        draft_vocab_size=asked.draft_vocab_size or target.vocab_size,
        num_layers=asked.num_layers,
        hidden_size=target.hidden_size,
        intermediate_size=asked.intermediate_size,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_size=target.head_size,
        rms_norm_eps=target.rms_norm_eps,
        attention_bias=False,
        rope=target.rope,
        is_neox_style=asked.kv_lora_rank == 0,  # K3's drafters turn interleaved pairs
        max_position_embeddings=target.max_position_embeddings,
        layer_windows=(None,) * asked.num_layers,
        layer_causal=(is_causal,) * asked.num_layers,
        input_embedding_scale=1.0,
        output_multiplier=1.0,
        final_logit_softcapping=None,
        draft_sample_method=asked.draft_sample_method or _SAMPLE_METHODS.get(asked.family, "greedy"),
        dtype="bfloat16",
        has_own_head=asked.own_head or _is_reduced(asked, target),
        latent=_latent(asked),
        **_parts(asked),
    )


def _check_sizes(run: TrainRun, target: TargetContract) -> None:
    asked = run.drafter
    if run.data.max_length > target.max_position_embeddings:
        raise ConfigError(
            f"data.max_length is {run.data.max_length}; the target has {target.max_position_embeddings} positions",
            origin={"target": target.origin},
            hint=f"data.max_length={target.max_position_embeddings}",
        )
    if asked.mask_token_id is not None and asked.mask_token_id >= target.vocab_size:
        raise ConfigError(
            f"drafter.mask_token_id {asked.mask_token_id} is outside the vocabulary of {target.vocab_size}"
        )
    if asked.draft_vocab_size is not None and asked.draft_vocab_size > target.vocab_size:
        raise ConfigError(
            f"drafter.draft_vocab_size {asked.draft_vocab_size} is more than the vocabulary of {target.vocab_size}"
        )
    if asked.family == "dflash2" and target.hidden_size % asked.conv_group_size:
        raise ConfigError(
            f"drafter.conv_group_size {asked.conv_group_size} does not divide the width, {target.hidden_size}"
        )


def _is_reduced(asked: DrafterSettings, target: TargetContract) -> bool:
    return asked.draft_vocab_size not in (None, target.vocab_size)


def _latent(asked: DrafterSettings) -> LatentAttentionSettings | None:
    if asked.kv_lora_rank == 0:
        return None
    return LatentAttentionSettings(
        q_lora_rank=asked.q_lora_rank,
        kv_lora_rank=asked.kv_lora_rank,
        qk_nope_head_size=asked.qk_nope_head_size,
        qk_rope_head_size=asked.qk_rope_head_size,
        v_head_size=asked.v_head_size,
    )


def _parts(asked: DrafterSettings) -> dict[str, Any]:
    """The fields that one family alone has."""
    if asked.family == "dflash2":
        return {
            "convolution": ConvolutionSettings(asked.conv_kernel_size, asked.conv_group_size),
            "selector": SelectorSettings(asked.selector_rank, asked.selector_top_k),
        }
    if asked.family == "dspark":
        rank = asked.markov_rank
        return {
            "markov": MarkovSettings(rank, asked.markov_kind) if rank else None,
            "confidence": ConfidenceSettings(with_markov=rank > 0) if asked.confidence_head else None,
        }
    if asked.family == "eagle3":
        return {
            "eagle3": Eagle3Settings(
                norm_before_residual=asked.norm_before_residual,
                norm_before_fc=False,
                norm_output=asked.norm_output,
                doubles_every_layer=False,
            ),
            "has_qk_norm": False,
        }
    return {}


def _portable(name: str) -> str:
    """A target's name as another machine may read it: an alias or hub name as typed, of a path the last part."""
    return Path(name).name if Path(name).exists() else name
