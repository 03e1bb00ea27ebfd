"""What a target's makers recommend is read as far as it can be sampled with, and refused where it cannot."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.checkpoint.generation_defaults import FILE, SamplingDefaults, read_sampling_defaults
from paceline.engine.sampling import SamplingParameters
from paceline.errors import CheckpointError

NAMES = [field.name for field in dataclasses.fields(SamplingDefaults)]


def written(folder: Path, values: object) -> Path:
    (folder / FILE).write_text(values if isinstance(values, str) else json.dumps(values))
    return folder


def test_a_target_that_recommends_nothing(tmp_path: Path) -> None:
    assert read_sampling_defaults(tmp_path) == SamplingDefaults()
    assert read_sampling_defaults(tmp_path / "missing") == SamplingDefaults()
    weights = tmp_path / "model.gguf"
    weights.write_bytes(b"GGUF")
    assert read_sampling_defaults(weights) == SamplingDefaults()
    assert read_sampling_defaults(written(tmp_path, {})) == SamplingDefaults()


def test_defaults_are_those_of_the_api() -> None:
    values = dataclasses.asdict(SamplingDefaults())
    assert values == {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    assert set(values) <= set(SamplingParameters.__dataclass_fields__)


def test_what_is_recommended_is_read(tmp_path: Path) -> None:
    values = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.05}
    others = {"do_sample": False, "eos_token_id": [1, 2], "max_length": 4096, "transformers_version": "5.0"}
    assert read_sampling_defaults(written(tmp_path, values | others)) == SamplingDefaults(**values)


@pytest.mark.parametrize("name", NAMES)
def test_one_field_leaves_the_others(tmp_path: Path, name: str) -> None:
    found = read_sampling_defaults(written(tmp_path, {name: 1}))
    assert found == dataclasses.replace(SamplingDefaults(), **{name: 1})
    assert type(getattr(found, name)) is type(getattr(SamplingDefaults(), name))
    assert read_sampling_defaults(written(tmp_path, {name: None})) == SamplingDefaults()


def test_greedy_and_everything_are_values(tmp_path: Path) -> None:
    assert read_sampling_defaults(written(tmp_path, {"temperature": 0})).temperature == 0.0
    for top_k in (0, -1):
        assert read_sampling_defaults(written(tmp_path, {"top_k": top_k})).top_k == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", "0.7"),
        ("temperature", True),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", 10**400),
        ("temperature", [0.7]),
        ("top_p", 0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("min_p", 1.5),
        ("repetition_penalty", 0),
        ("repetition_penalty", -1),
        ("top_k", 1.5),
        ("top_k", "20"),
        ("top_k", True),
        ("top_k", -2),
        ("top_k", 2**63),
    ],
)
def test_what_nothing_can_be_sampled_with_is_refused(tmp_path: Path, name: str, value: object) -> None:
    with pytest.raises(CheckpointError, match=name) as caught:
        read_sampling_defaults(written(tmp_path, {name: value}))
    assert FILE in str(caught.value)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize("text", ["", "{", "[]", "5", '{"temperature": ', "9" * 5000, "[" * 100_000])
def test_damaged_files_are_named(tmp_path: Path, text: str) -> None:
    with pytest.raises(CheckpointError, match=FILE):
        read_sampling_defaults(written(tmp_path, text))


VALUES = st.one_of(
    st.none(), st.integers(-2, 2**64), st.floats(allow_nan=False), st.sampled_from([0, 1, 0.5, 1e-6, 5e-324, 1e308])
)


@given(st.dictionaries(st.sampled_from(NAMES), VALUES))
def test_whatever_is_read_can_be_sampled_with(tmp_path_factory: pytest.TempPathFactory, values: dict[str, Any]) -> None:
    """Else every request that says nothing of its own would be refused."""
    folder = written(tmp_path_factory.mktemp("target"), values)
    try:
        found = read_sampling_defaults(folder)
    except CheckpointError:
        return
    SamplingParameters(**dataclasses.asdict(found))
