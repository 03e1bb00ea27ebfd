"""Rotary settings: both spellings, never a guess, never a silent winner."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.checkpoint.contract import RopeSettings
from paceline.checkpoint.rope_keys import read_rope, write_rope
from paceline.errors import CheckpointError

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
positive = st.floats(0.1, 1e7, allow_nan=False)


@pytest.mark.parametrize(
    "config",
    [
        {"rope_theta": 5e6},
        {"rope_parameters": {"rope_theta": 5e6, "rope_type": "default"}},
        {"rope_parameters": {"rope_theta": 5e6}, "rope_theta": 5000000},
        {"rope_theta": 5e6, "rope_scaling": None},
        {"rope_parameters": {"rope_theta": 5e6, "original_max_position_embeddings": 4096}},
    ],
)
def test_theta_is_found_in_either_place(config: dict[str, Any]) -> None:
    assert read_rope(config, "c") == RopeSettings(theta=5e6)


def test_two_thetas_that_differ_are_refused_with_both() -> None:
    with pytest.raises(CheckpointError) as caught:
        read_rope({"rope_parameters": {"rope_theta": 5e6}, "rope_theta": 10000.0}, "here/config.json")
    assert "5000000.0" in str(caught.value) and "10000.0" in str(caught.value)
    assert "here/config.json" in str(caught.value)


@pytest.mark.parametrize("config", [{}, {"rope_parameters": {"rope_type": "default"}}, {"rope_theta": None}])
def test_absent_theta_is_refused(config: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="names no rope_theta"):
        read_rope(config, "c")


@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_older_spelling_of_scaling(key: str) -> None:
    found = read_rope({"rope_theta": 5e5, "rope_scaling": {key: "llama3", **LLAMA3}}, "c")
    assert found.kind == "llama3" and found.factor == 8.0 and found.original_max_position_embeddings == 8192
    assert read_rope({"rope_theta": 1e4, "rope_scaling": {key: "linear", "factor": 2}}, "c").factor == 2.0


def test_yarn_fields_are_kept() -> None:
    scaling = {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32768,
        "beta_fast": 16,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "attention_factor": None,
        "truncate": False,
        "finetuned": True,
    }
    found = read_rope({"rope_parameters": {**scaling, "rope_theta": 1e6}}, "c")
    assert found == RopeSettings(
        theta=1e6,
        kind="yarn",
        factor=4.0,
        original_max_position_embeddings=32768,
        beta_fast=16.0,
        mscale=0.707,
        mscale_all_dim=0.707,
        truncate=False,
    )


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "proportional", "su", "mrope", 3])
def test_unsupported_kind_is_named_with_the_supported(kind: object) -> None:
    with pytest.raises(CheckpointError, match=r"is not supported; supported are default, linear, llama3, yarn"):
        read_rope({"rope_theta": 1e4, "rope_scaling": {"rope_type": kind, "factor": 2.0}}, "c")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"rope_theta": 1e4, "rope_scaling": {"rope_type": "linear"}}, "needs factor"),
        ({"rope_theta": 1e4, "rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "needs original_max"),
        ({"rope_theta": 1e4, "rope_scaling": {"rope_type": "linear", "factor": -1}}, "factor is -1"),
        ({"rope_theta": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 2, "twist": 1}}, "twist=1"),
        ({"rope_theta": 1e4, "rope_parameters": {"mrope_section": [1]}}, "mrope_section"),
        ({"rope_theta": 1e4, "rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
        ({"rope_theta": 0}, "rope_theta is 0"),
        ({"rope_theta": float("nan")}, "rope_theta is nan"),
        ({"rope_theta": True}, "rope_theta is True"),
        ({"rope_theta": 1e4, "rope_scaling": "linear"}, "rope_scaling is 'linear', expected an object"),
        (
            {"rope_theta": 1e4, "rope_scaling": {"rope_type": "linear", "type": "yarn", "factor": 2.0}},
            "rope_scaling.rope_type is 'linear' and rope_scaling.type is 'yarn'",
        ),
        (
            {
                "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
                "rope_scaling": {"rope_type": "linear", "factor": 4.0},
            },
            "rope_parameters.factor is 2.0 and rope_scaling.factor is 4.0",
        ),
        (
            {"rope_parameters": {"rope_theta": 1e4}, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
            "rope_scaling has factor and rope_parameters has not",
        ),
        (
            {"rope_theta": 1e4, "rope_scaling": {"rope_type": "llama3", **LLAMA3, "high_freq_factor": 1.0}},
            "high_freq_factor 1.0 is not above",
        ),
    ],
)
def test_malformed_settings_are_named(config: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_rope(config, "c")


@st.composite
def rope_settings(draw: st.DrawFn) -> RopeSettings:
    kind = draw(st.sampled_from(["default", "linear", "llama3", "yarn"]))
    theta, factor, original = draw(positive), draw(positive), draw(st.integers(1, 10**6))
    if kind == "default":
        return RopeSettings(theta=theta)
    if kind == "linear":
        return RopeSettings(theta=theta, kind="linear", factor=factor)
    if kind == "llama3":
        low = draw(st.floats(0.5, 2))
        return RopeSettings(
            theta=theta,
            kind="llama3",
            factor=factor,
            original_max_position_embeddings=original,
            low_freq_factor=low,
            high_freq_factor=low + draw(st.floats(0.5, 4)),
        )
    return RopeSettings(
        theta=theta,
        kind="yarn",
        factor=factor,
        original_max_position_embeddings=original,
        beta_fast=draw(positive),
        beta_slow=draw(positive),
        attention_factor=draw(st.none() | positive),
        mscale=draw(st.none() | positive),
        mscale_all_dim=draw(st.none() | positive),
        truncate=draw(st.booleans()),
    )


@given(rope=rope_settings())
def test_written_settings_read_back_in_both_spellings(rope: RopeSettings) -> None:
    written = write_rope(rope)
    assert read_rope(written, "c") == rope
    assert read_rope({"rope_parameters": written["rope_parameters"]}, "c") == rope
    assert read_rope({key: written[key] for key in ("rope_theta", "rope_scaling")}, "c") == rope


def test_transformers_reads_what_is_written() -> None:
    from transformers import Qwen3Config

    rope = RopeSettings(theta=1e6, kind="yarn", factor=4.0, original_max_position_embeddings=64)
    config = Qwen3Config(max_position_embeddings=256, rope_parameters=write_rope(rope)["rope_parameters"])
    assert config.rope_parameters["rope_theta"] == 1e6 and config.rope_parameters["rope_type"] == "yarn"
