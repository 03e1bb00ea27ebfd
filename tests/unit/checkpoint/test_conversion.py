"""Checkpoints of every dialect into our own layout and back: each tensor keeps its bits, and each promise."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.unit.checkpoint.dialects.conftest import GOLDEN_NAMES, golden_folder, load_golden, tiny_tensors
from tests.unit.cli.folders import target_folder

from paceline.checkpoint.conversion import WRITABLE_DIALECTS, convert_drafter
from paceline.checkpoint.dialects import contract_from_config, read_drafter
from paceline.checkpoint.dialects.table import detect_dialect

__all__ = ["golden_folder"]  # a fixture


def target_of(name: str, folder: Path) -> Path | None:
    """A target for layouts that leave it to the reader how deep it is; the others say all that is needed."""
    if contract_from_config(load_golden(name), "c", list(tiny_tensors(name))).target_num_layers:
        return None
    path = target_folder(folder, num_hidden_layers=36, vocab_size=128)
    save_file({"model.embed_tokens.weight": torch.randn(128, 32)}, path / "model.safetensors")
    return path


def assert_same_tensors(one: Path, other: Path) -> None:
    first, second = read_drafter(one), read_drafter(other)
    names = [name for name in first.source.names() if name not in ("t2d", "d2t")]
    assert set(names) == {name for name in second.source.names() if name not in ("t2d", "d2t")}
    for name in names:
        a, b = first.source.load(name), second.source.load(name)
        assert a.dtype == b.dtype and torch.equal(a, b), name
    tables = first.draft_to_target, second.draft_to_target
    assert (tables[0] is None) == (tables[1] is None)
    if tables[0] is not None and tables[1] is not None:
        assert torch.equal(tables[0], tables[1])


@pytest.mark.parametrize("name", GOLDEN_NAMES)
def test_a_checkpoint_of_every_dialect_keeps_its_bits(
    name: str, golden_folder: Callable[..., Path], tmp_path: Path
) -> None:
    source, target = golden_folder(name), target_of(name, tmp_path / "target")
    convert_drafter(source, tmp_path / "ours", "zlab", target=target)
    assert_same_tensors(source, tmp_path / "ours")
    dialect = detect_dialect(load_golden(name), "c")
    if dialect not in WRITABLE_DIALECTS or dialect == "zlab":
        return
    convert_drafter(tmp_path / "ours", tmp_path / "back", dialect, target=target)
    written, stored = load_file(tmp_path / "back" / "model.safetensors"), tiny_tensors(name)
    assert set(written) == set(stored)
    for tensor, value in stored.items():
        assert torch.equal(written[tensor], value), tensor
    back, ours = read_drafter(tmp_path / "back").contract, read_drafter(tmp_path / "ours").contract
    unstated = {
        field.name: getattr(ours, field.name) for field in dataclasses.fields(back) if not getattr(back, field.name)
    }
    assert dataclasses.replace(back, **{**unstated, "origin": ours.origin}) == ours


def test_a_bit_that_changes_on_the_way_would_be_seen(golden_folder: Callable[..., Path], tmp_path: Path) -> None:
    source = golden_folder("specforge-eagle3")
    convert_drafter(source, tmp_path / "ours", "zlab", target=target_of("specforge-eagle3", tmp_path / "target"))
    file = tmp_path / "ours" / "model.safetensors"
    tensors = load_file(file)
    tensors["norm.weight"] = torch.nextafter(tensors["norm.weight"], torch.tensor(9.0))
    save_file(tensors, file)
    with pytest.raises(AssertionError, match=r"norm\.weight"):
        assert_same_tensors(source, tmp_path / "ours")
