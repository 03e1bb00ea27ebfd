"""RoPE frequencies of every kind: against transformers, and against what each kind is meant to do."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from paceline.checkpoint.contract import RopeSettings
from paceline.models.positions import position_table, rope_frequencies

DEFAULT = RopeSettings(theta=10000.0)
LLAMA3 = RopeSettings(
    theta=500000.0,
    kind="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
YARN = RopeSettings(theta=10000.0, kind="yarn", factor=4.0, original_max_position_embeddings=32)
CASES = {
    "default": DEFAULT,
    "linear": RopeSettings(theta=10000.0, kind="linear", factor=4.0),
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn-betas": dataclasses.replace(YARN, beta_fast=16.0, beta_slow=2.0),
    "yarn-untruncated": dataclasses.replace(YARN, truncate=False),
    "yarn-factor": dataclasses.replace(YARN, attention_factor=1.25),
    "yarn-mscales": dataclasses.replace(YARN, mscale=0.7, mscale_all_dim=1.3),
    "yarn-short": dataclasses.replace(YARN, original_max_position_embeddings=8),
}


def hugging_face_keys(rope: RopeSettings) -> dict[str, Any]:
    """The `rope_parameters` of a config that means these settings."""
    keys: dict[str, Any] = {"rope_type": rope.kind, "rope_theta": rope.theta}
    if rope.kind != "default":
        keys["factor"] = rope.factor
    if rope.kind in ("llama3", "yarn"):
        keys["original_max_position_embeddings"] = rope.original_max_position_embeddings
    if rope.kind == "llama3":
        keys |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.kind == "yarn":
        keys |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "truncate": rope.truncate}
        for name in ("attention_factor", "mscale", "mscale_all_dim"):
            if getattr(rope, name) is not None:
                keys[name] = getattr(rope, name)
    return keys


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("head_size", [6, 16, 64])
def test_tables_agree_with_transformers(name: str, head_size: int) -> None:
    rope = CASES[name]
    length = 4 * (rope.original_max_position_embeddings or 32)
    config = LlamaConfig(
        hidden_size=2 * head_size,
        num_attention_heads=2,
        head_dim=head_size,
        max_position_embeddings=length,
        rope_parameters=hugging_face_keys(rope),
    )
    cosines, sines = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(length)[None])
    table = position_table(rope, head_size, length)
    assert table.shape == (length, 2, head_size // 2) and table.dtype == torch.float32
    torch.testing.assert_close(table[:, 0], cosines[0, :, : head_size // 2], rtol=0, atol=2e-5)
    torch.testing.assert_close(table[:, 1], sines[0, :, : head_size // 2], rtol=0, atol=2e-5)


def test_default_frequencies_are_powers_of_theta() -> None:
    frequencies, scale = rope_frequencies(DEFAULT, 8)
    expected = [10000.0 ** (-2 * i / 8) for i in range(4)]
    torch.testing.assert_close(frequencies, torch.tensor(expected))
    assert scale == 1.0


def test_linear_divides_positions() -> None:
    rope = CASES["linear"]
    stretched, plain = position_table(rope, 8, 41), position_table(DEFAULT, 8, 11)
    torch.testing.assert_close(stretched[::4], plain, rtol=0, atol=1e-6)


def test_llama3_keeps_short_waves_and_slows_long_ones() -> None:
    plain, _ = rope_frequencies(RopeSettings(theta=LLAMA3.theta), 64)
    scaled, _ = rope_frequencies(LLAMA3, 64)
    wavelength = 2 * math.pi / plain
    short, long = wavelength < 64 / 4.0, wavelength > 64 / 1.0
    assert short.any() and long.any() and (~short & ~long).any()
    torch.testing.assert_close(scaled[short], plain[short])
    torch.testing.assert_close(scaled[long], plain[long] / 8)
    between = scaled[~short & ~long] / plain[~short & ~long]
    assert ((between > 1 / 8) & (between < 1)).all()


def test_yarn_ramps_from_plain_to_slowed_and_scales_attention() -> None:
    plain, _ = rope_frequencies(DEFAULT, 64)
    scaled, scale = rope_frequencies(YARN, 64)
    ratio = scaled / plain
    assert ratio[0].item() == pytest.approx(1.0) and ratio[-1].item() == pytest.approx(0.25)
    assert (ratio.diff() <= 1e-6).all()
    assert scale == pytest.approx(0.1 * math.log(4.0) + 1.0)


def test_yarn_of_factor_one_scales_nothing() -> None:
    assert rope_frequencies(dataclasses.replace(YARN, factor=1.0), 8)[1] == 1.0
