"""Views of a file: other names, fused tensors as their parts; lazy, and nothing lost or doubled."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from paceline.checkpoint.sources import RenamedSource, SplitRowsSource
from paceline.errors import CheckpointError

QKV = {"qkv.weight": [("q.weight", 4), ("k.weight", 2), ("v.weight", 2)]}


class MemorySource:
    """A source in memory that counts how often each tensor is read."""

    origin = "memory"

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = dict(tensors)
        self.loads: list[str] = []

    def names(self) -> list[str]:
        return list(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def load(self, name: str) -> Tensor:
        self.loads.append(name)
        return self.tensors[name]


def fused() -> MemorySource:
    return MemorySource({"qkv.weight": torch.arange(24.0).view(8, 3), "o.weight": torch.ones(2, 2)})


def test_renamed_tensors_keep_their_order_and_others_their_name() -> None:
    file = MemorySource({"context_proj.weight": torch.ones(2), "other": torch.zeros(3)})
    source = RenamedSource(file, {"context_proj.weight": "fc.weight", "absent": "norm.weight"})
    assert source.names() == ["fc.weight", "other"]
    assert (source.shape("fc.weight"), source.shape("other"), source.origin) == ((2,), (3,), "memory")
    assert file.loads == []
    assert torch.equal(source.load("fc.weight"), torch.ones(2))
    assert file.loads == ["context_proj.weight"]


@pytest.mark.parametrize("name", ["context_proj.weight", "norm.weight"])
def test_names_that_are_not_there(name: str) -> None:
    source = RenamedSource(MemorySource({"context_proj.weight": torch.ones(2)}), {"context_proj.weight": "fc.weight"})
    with pytest.raises(CheckpointError, match=f"memory has no tensor {name}"):
        source.load(name)
    with pytest.raises(CheckpointError, match="has no tensor"):
        source.shape(name)


@pytest.mark.parametrize("canonical_of", [{"a": "b"}, {"a": "c", "b": "c"}])
def test_two_tensors_of_one_name_are_refused(canonical_of: dict[str, str]) -> None:
    with pytest.raises(CheckpointError, match="the tensors a and b both stand for"):
        RenamedSource(MemorySource({"a": torch.ones(1), "b": torch.ones(1)}), canonical_of)


def test_names_may_be_swapped() -> None:
    source = RenamedSource(MemorySource({"a": torch.zeros(1), "b": torch.ones(1)}), {"a": "b", "b": "a"})
    assert (source.load("a").item(), source.load("b").item()) == (1.0, 0.0)


def test_parts_are_the_rows_of_the_fused_tensor() -> None:
    file = fused()
    source = SplitRowsSource(file, {**QKV, "absent": [("x", 1)]})
    assert source.names() == ["q.weight", "k.weight", "v.weight", "o.weight"]
    assert [source.shape(name) for name in source.names()] == [(4, 3), (2, 3), (2, 3), (2, 2)]
    assert file.loads == []
    whole = file.tensors["qkv.weight"]
    assert torch.equal(source.load("k.weight"), whole[4:6])
    assert torch.equal(torch.cat([source.load(f"{part}.weight") for part in "qkv"]), whole)
    assert torch.equal(source.load("o.weight"), torch.ones(2, 2))
    with pytest.raises(CheckpointError, match=r"has no tensor qkv\.weight"):
        source.load("qkv.weight")


def test_biases_are_split_too() -> None:
    source = SplitRowsSource(MemorySource({"qkv.bias": torch.arange(3)}), {"qkv.bias": [("q.bias", 2), ("k.bias", 1)]})
    assert source.shape("k.bias") == (1,)
    assert source.load("k.bias").tolist() == [2]


@pytest.mark.parametrize("rows", [(4, 2, 1), (4, 2, 3)])
def test_row_counts_must_be_those_of_the_parts(rows: tuple[int, int, int]) -> None:
    parts = {"qkv.weight": list(zip(("q", "k", "v"), rows, strict=True))}
    with pytest.raises(CheckpointError, match=rf"qkv.weight is \[8, 3\]; its parts have {sum(rows)} rows"):
        SplitRowsSource(fused(), parts)


def test_a_scalar_has_no_rows() -> None:
    with pytest.raises(CheckpointError, match="its parts have 1 rows"):
        SplitRowsSource(MemorySource({"a": torch.tensor(1.0)}), {"a": [("b", 1)]})


@pytest.mark.parametrize(
    ("tensors", "parts"),
    [
        ({"qkv": torch.ones(2), "q": torch.ones(1)}, {"qkv": [("q", 1), ("k", 1)]}),
        ({"q": torch.ones(1), "qkv": torch.ones(2)}, {"qkv": [("q", 1), ("k", 1)]}),
        ({"qkv": torch.ones(2)}, {"qkv": [("q", 1), ("q", 1)]}),
        ({"a": torch.ones(1), "b": torch.ones(1)}, {"a": [("q", 1)], "b": [("q", 1)]}),
    ],
)
def test_a_part_that_is_stored_twice_is_refused(
    tensors: dict[str, Tensor], parts: dict[str, list[tuple[str, int]]]
) -> None:
    with pytest.raises(CheckpointError, match="tensor q is stored twice"):
        SplitRowsSource(MemorySource(tensors), parts)
