"""Frequencies of rotary positions for each kind of RoPE that a config can ask for. R rotated channels."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from paceline.checkpoint.contract import RopeSettings
from paceline.ops.rotary import rotary_table


def rope_frequencies(rope: RopeSettings, head_size: int) -> tuple[Tensor, float]:
    """Radians per position of each channel pair, and the factor on cosines and sines.

    Args:
        rope: kind and parameters; sources: Llama 3.1 model card (llama3), arXiv 2309.00071 (yarn).
        head_size: channels of a head, all of them rotated.
    Returns:
        float32 [head_size / 2], and the attention factor (1 except for yarn).
    """
    exponents = torch.arange(0, head_size, 2, dtype=torch.float32) / head_size
    plain = 1.0 / rope.theta**exponents
    if rope.kind == "linear":
        return plain / rope.factor, 1.0
    if rope.kind == "llama3":
        return _llama3(plain, rope), 1.0
    if rope.kind == "yarn":
        return _yarn(plain, rope, head_size), _yarn_attention_factor(rope)
    return plain, 1.0


def position_table(rope: RopeSettings, head_size: int, num_positions: int) -> Tensor:
    """float32 [num_positions, 2, head_size / 2] for `apply_rotary`."""
    if torch.empty(0).is_meta:  # only the shape counts there, and to compute on that device imports torch's compiler
        return torch.empty(num_positions, 2, head_size // 2)
    frequencies, scale = rope_frequencies(rope, head_size)
    return rotary_table(frequencies, num_positions, scale=scale)


def _original_length(rope: RopeSettings) -> int:
    assert rope.original_max_position_embeddings is not None, "the config reader requires it for this kind"
    return rope.original_max_position_embeddings


def _llama3(plain: Tensor, rope: RopeSettings) -> Tensor:
    """Long waves are slowed by the factor, short ones kept, those between blended by their wavelength."""
    waves_in_original = _original_length(rope) * plain / (2 * math.pi)
    blend = (waves_in_original - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return plain * (blend + (1 - blend) / rope.factor)


def _yarn(plain: Tensor, rope: RopeSettings, head_size: int) -> Tensor:
    """A ramp over channels from plain (fast) to slowed (slow) frequencies, placed by rotations per original context."""

    def channel_of(num_rotations: float) -> float:
        length = _original_length(rope)
        return head_size * math.log(length / (num_rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = channel_of(rope.beta_fast), channel_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_size - 1)
    if low == high:
        high += 0.001  # a ramp of no width would divide by zero
    ramp = ((torch.arange(head_size // 2, dtype=torch.float32) - low) / (high - low)).clamp(0.0, 1.0)
    return plain * (1 - ramp) + plain / rope.factor * ramp


def _yarn_attention_factor(rope: RopeSettings) -> float:
    def magnitude(scale: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * scale * math.log(rope.factor) + 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return magnitude(rope.mscale) / magnitude(rope.mscale_all_dim)
    return magnitude(1.0)
