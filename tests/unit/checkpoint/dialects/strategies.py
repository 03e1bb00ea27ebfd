"""Contracts of every family, for property tests."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from paceline.checkpoint.contract import (
    ConfidenceSettings,
    ConvolutionSettings,
    DrafterContract,
    Eagle3Settings,
    LatentAttentionSettings,
    MarkovSettings,
    RopeSettings,
    SelectorSettings,
    TargetLayerId,
)

_positive = st.floats(1e-3, 1e6, allow_nan=False)


def _usually(draw: st.DrawFn, plain: Any, other: st.SearchStrategy[Any]) -> Any:
    """The value that most layouts assume, more often than not, so that most contracts can be written somewhere."""
    return plain if draw(st.integers(0, 4)) else draw(other)


@st.composite
def contracts(draw: st.DrawFn, family: str | None = None) -> DrafterContract:
    """Any contract that the native layout of its family can state."""
    family = family or draw(st.sampled_from(["dflash", "dflash2", "latent dflash2", "dspark", "k3", "eagle3"]))
    num_layers, num_kv_heads = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    depth = draw(st.integers(2, 40))
    target_vocab_size = draw(st.integers(16, 10**6))
    vocab_size = _usually(draw, target_vocab_size, st.integers(target_vocab_size, 10**6 + 9))
    taps = draw(st.sets(st.integers(-1, depth - 2), min_size=1, max_size=6))
    window = _usually(draw, None, st.integers(1, 4096))
    windows = tuple(window if draw(st.booleans()) else None for _ in range(num_layers))
    sliding = tuple(one is not None for one in windows)
    hidden_size = 8 * draw(st.integers(1, 64))
    block_size = draw(st.integers(2, 64))
    fields: dict[str, Any] = {
        "family": {"k3": "dspark", "latent dflash2": "dflash2"}.get(family, family),
        "origin": "c",
        "target_name": draw(st.text(max_size=8)),
        "target_num_layers": depth,
        "target_hidden_size": _usually(draw, hidden_size, st.integers(1, 8192)),
        "target_vocab_size": target_vocab_size,
        "target_layer_ids": tuple(TargetLayerId(tap) for tap in sorted(taps)),
        "aux_hidden_stream": _usually(draw, "prefix", st.just("attn_res")),
        "has_tap_norm": _usually(draw, False, st.just(True)),
        "block_size": block_size,
        "layout": "fill_in",
        "mask_token_id": draw(st.integers(0, vocab_size - 1)),
        "vocab_size": vocab_size,
        "draft_vocab_size": target_vocab_size,
        "num_layers": num_layers,
        "hidden_size": hidden_size,
        "intermediate_size": draw(st.integers(1, 8192)),
        "num_heads": num_kv_heads * draw(st.integers(1, 4)),
        "num_kv_heads": num_kv_heads,
        "head_size": 2 * draw(st.integers(1, 128)),
        "rms_norm_eps": draw(st.floats(1e-8, 1e-3)),
        "attention_bias": _usually(draw, False, st.just(True)),
        "rope": draw(_ropes()),
        "is_neox_style": _usually(draw, True, st.just(False)),
        "max_position_embeddings": draw(st.integers(1, 10**6)),
        "layer_windows": windows,
        "layer_causal": draw(st.sampled_from([(False,) * num_layers, (True,) * num_layers, sliding])),
        "input_embedding_scale": _usually(draw, 1.0, _positive),
        "output_multiplier": _usually(draw, 1.0, _positive),
        "final_logit_softcapping": _usually(draw, None, _positive),
        "draft_sample_method": draw(st.sampled_from(["greedy", "probabilistic"])),
        "dtype": draw(st.sampled_from(["bfloat16", "float16", "float32"])),
        "has_attention_sink": _usually(draw, False, st.just(True)),
        "attention_value_scale": _usually(draw, 1.0, _positive),
        "has_own_embedding": draw(st.booleans()),
        "has_own_head": draw(st.booleans()),
    }
    if family not in ("k3", "dflash2", "latent dflash2"):
        fields["draft_vocab_size"] = _usually(draw, target_vocab_size, st.integers(1, target_vocab_size))
    fields |= _PARTS[family](draw, fields)
    return DrafterContract(**fields)


@st.composite
def _ropes(draw: st.DrawFn) -> RopeSettings:
    theta = draw(_positive)
    kind = draw(st.sampled_from(["default", "linear", "llama3", "yarn"]))
    if kind == "default":
        return RopeSettings(theta=theta)
    factor = draw(_positive)
    if kind == "linear":
        return RopeSettings(theta=theta, kind="linear", factor=factor)
    length = draw(st.integers(1, 10**6))
    if kind == "llama3":
        return RopeSettings(
            theta=theta, kind="llama3", factor=factor, original_max_position_embeddings=length, low_freq_factor=0.5
        )
    return RopeSettings(
        theta=theta,
        kind="yarn",
        factor=factor,
        original_max_position_embeddings=length,
        mscale=draw(st.none() | st.just(0.7)),
        mscale_all_dim=draw(st.none() | st.just(1.0)),
        truncate=draw(st.booleans()),
    )


def _dflash(draw: st.DrawFn, fields: dict[str, Any]) -> dict[str, Any]:
    return {"layout": _usually(draw, "fill_in", st.just("anchor_sampling"))}


def _dflash2(draw: st.DrawFn, fields: dict[str, Any]) -> dict[str, Any]:
    num_taps = draw(st.integers(1, min(4, fields["block_size"])))
    return {
        "convolution": ConvolutionSettings(num_taps, draw(st.sampled_from([1, 2, 4, 8]))),
        "selector": SelectorSettings(draw(st.integers(1, 256)), draw(st.integers(1, 16))),
    }


def _latent_dflash2(draw: st.DrawFn, fields: dict[str, Any]) -> dict[str, Any]:
    return _dflash2(draw, fields) | {
        "latent": _latent(draw),
        "attention_bias": False,
        "has_attention_sink": False,
        "attention_value_scale": 1.0,
    }


def _latent(draw: st.DrawFn) -> LatentAttentionSettings:
    sizes = st.integers(1, 64)
    return LatentAttentionSettings(draw(sizes), draw(sizes), draw(sizes), 2 * draw(sizes), draw(sizes))


def _dspark(draw: st.DrawFn, fields: dict[str, Any]) -> dict[str, Any]:
    kinds = st.sampled_from(["vanilla", "gated", "rnn"])
    markov = draw(st.none() | st.builds(MarkovSettings, st.integers(1, 64), kinds))
    confidence = draw(st.none() | st.builds(ConfidenceSettings, st.booleans() if markov else st.just(False)))
    return {
        "layout": _usually(draw, "anchor_sampling", st.just("fill_in")),
        "markov": markov,
        "confidence": confidence,
        "draft_top_k": _usually(draw, None, st.integers(1, 32)),
    }


def _k3(draw: st.DrawFn, fields: dict[str, Any]) -> dict[str, Any]:
    num_layers = fields["num_layers"]
    return _dspark(draw, fields) | {
        "layout": "anchor_sampling",
        "latent": _latent(draw),
        "attention_bias": False,
        "has_attention_sink": False,
        "attention_value_scale": 1.0,
        "layer_windows": (None,) * num_layers,
        "layer_causal": (False,) * num_layers,
        "vocab_size": fields["target_vocab_size"],
        "mask_token_id": draw(st.integers(0, fields["target_vocab_size"] - 1)),
    }


def _eagle3(draw: st.DrawFn, fields: dict[str, Any]) -> dict[str, Any]:
    norm_before_fc = draw(st.booleans())
    switches = Eagle3Settings(draw(st.booleans()), norm_before_fc, draw(st.booleans()), draw(st.booleans()))
    return {
        "layout": "autoregressive",
        "eagle3": switches,
        "mask_token_id": draw(st.sampled_from([-1, -1, 3])),
        "has_tap_norm": fields["has_tap_norm"] and not norm_before_fc,
        "has_qk_norm": draw(st.booleans()),
        "layer_causal": (True,) * fields["num_layers"],
        "has_attention_sink": False,
        "attention_value_scale": 1.0,
    }


_PARTS = {
    "dflash": _dflash,
    "dflash2": _dflash2,
    "latent dflash2": _latent_dflash2,
    "dspark": _dspark,
    "k3": _k3,
    "eagle3": _eagle3,
}
