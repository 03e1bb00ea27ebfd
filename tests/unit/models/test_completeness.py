"""Files that lack a tensor, or hold another model's, are told from their headers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.tiny import tiny_target, wrap_target
from tests.tiny_kimi import kimi_target, kimi_tensors, small_kimi_config, write_kimi
from tests.tiny_run import write_drafter, write_target_folder, write_tokenizer
from torch import Tensor

from paceline.checkpoint.contract import DrafterContract, TargetContract
from paceline.errors import CheckpointError
from paceline.models.completeness import _fits, read_complete

Change = Callable[[dict[str, Tensor]], object]


def edited(folder: Path, change: Change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return write_target_folder(tmp_path / "target", tiny_target())


@pytest.fixture
def drafter(tmp_path: Path) -> Path:
    return write_drafter(tmp_path / "drafter", wrap_target(tiny_target()), fingerprint=False)


def test_whole_ones(target: Path, drafter: Path) -> None:
    assert isinstance(read_complete(target, "some/name"), TargetContract)
    assert read_complete(target, "some/name").name == "some/name"
    assert isinstance(read_complete(drafter, "x"), DrafterContract)


@pytest.mark.parametrize("family", ["dflash", "dflash2", "dspark", "eagle3"])
def test_drafters_of_every_family(tmp_path: Path, family: str) -> None:
    folder = write_drafter(tmp_path / family, wrap_target(tiny_target()), fingerprint=False, family=family)
    assert read_complete(folder, "x").family == family  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda t: t.pop("model.norm.weight"), "1 missing tensors: model.norm.weight"),
        (lambda t: t.update(surplus=torch.zeros(2)), "1 unused tensors: surplus"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(3)}), r"1 misshapen tensors: model.norm.weight is \[3\]"),
    ],
)
def test_a_targets_tensors(target: Path, change: Change, part: str) -> None:
    edited(target, change)
    with pytest.raises(CheckpointError, match=part):
        read_complete(target, "x")


def test_a_drafters_tensors(drafter: Path) -> None:
    edited(drafter, lambda tensors: tensors.pop("layers.1.mlp.down_proj.weight"))
    with pytest.raises(CheckpointError, match=r"1 missing tensors: layers\.1\.mlp\.down_proj\.weight"):
        read_complete(drafter, "x")


def test_many_names_are_cut_short(target: Path) -> None:
    edited(target, lambda tensors: [tensors.pop(name) for name in list(tensors) if name.startswith("model.layers")])
    with pytest.raises(CheckpointError, match=r"36 missing tensors: .* and 28 more\n"):
        read_complete(target, "x")


def test_a_target_without_a_tokenizer(target: Path) -> None:
    (target / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match="tokenizer"):
        read_complete(target, "x")


def test_a_file_cut_short(target: Path) -> None:
    content = (target / "model.safetensors").read_bytes()
    (target / "model.safetensors").write_bytes(content[:-1])
    with pytest.raises(CheckpointError, match="is truncated"):
        read_complete(target, "x")


def test_what_a_layout_leaves_to_the_target_has_any_size() -> None:
    """Sizes of the target that a config does not state are 0 in its contract."""
    assert _fits((64, 8), (0, 8)) and _fits((64, 8), (64, 8))
    assert not _fits((64, 9), (0, 8)) and not _fits((8,), (0, 8))


def test_kimi(tmp_path: Path) -> None:
    config = small_kimi_config(3, 2)
    folder = write_kimi(tmp_path / "kimi", config, kimi_tensors(kimi_target(config)))
    write_tokenizer(folder, config["vocab_size"])
    assert isinstance(read_complete(folder, "x"), TargetContract)
    edited(folder, lambda tensors: tensors.pop("model.norm.weight"))
    with pytest.raises(CheckpointError, match=r"1 missing tensors: model\.norm\.weight"):
        read_complete(folder, "x")
