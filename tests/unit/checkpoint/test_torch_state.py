"""State dicts of `torch.save`: read as tensors and nothing else, and never run."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.unit.checkpoint.dialects.conftest import load_golden, tiny_tensors
from torch import nn

from paceline.checkpoint.conversion import convert_drafter
from paceline.checkpoint.dialects import read_drafter, read_drafter_contract
from paceline.checkpoint.torch_state import find_torch_state, open_torch_state, open_weights
from paceline.errors import CheckpointError


class RunsCode:
    """What a pickle can do to whoever opens it without care."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.trace),)


def torchspec_folder(folder: Path, *, name: str = "pytorch_model.bin", **options: Any) -> Path:
    """TorchSpec's extract: its flat config, and a state dict in place of safetensors."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(load_golden("torchspec-dflash")))
    torch.save(tiny_tensors("torchspec-dflash"), folder / name, **options)
    return folder


@pytest.mark.parametrize("name", ["pytorch_model.bin", "draft_model.pt", "extract.pth"])
@pytest.mark.parametrize("is_zip", [True, False])
def test_an_extract_of_torchspec_reads_as_its_safetensors_twin(tmp_path: Path, name: str, is_zip: bool) -> None:
    twin = tmp_path / "twin"
    twin.mkdir()
    (twin / "config.json").write_text(json.dumps(load_golden("torchspec-dflash")))
    save_file(tiny_tensors("torchspec-dflash"), twin / "model.safetensors")
    folder = torchspec_folder(tmp_path / "extract", name=name, _use_new_zipfile_serialization=is_zip)
    expected, files = read_drafter(twin), read_drafter(folder)
    assert files.dialect == "torchspec" and set(files.source.names()) == set(expected.source.names())
    assert files.contract.has_own_embedding and files.contract.target_layer_ids == expected.contract.target_layer_ids
    for tensor in expected.source.names():
        assert files.source.shape(tensor) == expected.source.shape(tensor)
        assert files.source.load(tensor).equal(expected.source.load(tensor))
    assert read_drafter_contract(folder) == files.contract


def test_it_converts_like_any_other(tmp_path: Path) -> None:
    folder = torchspec_folder(tmp_path / "extract")
    done = convert_drafter(folder, tmp_path / "converted", "zlab")
    assert (done.from_dialect, done.left_behind) == ("torchspec", ())
    source, converted = read_drafter(folder).source, read_drafter(tmp_path / "converted").source
    for name in converted.names():
        assert converted.load(name).equal(source.load(name)), name


def test_a_modules_own_state_is_flat(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))
    torch.save(module.state_dict(), tmp_path / "model.pt")
    source = open_torch_state(tmp_path / "model.pt")
    assert source.names() == ["0.weight", "0.bias", "1.weight", "1.bias"] and source.shape("0.weight") == (2, 3)
    assert source.load("1.weight").equal(torch.ones(2)) and not source.load("0.weight").requires_grad
    with pytest.raises(CheckpointError, match=r"has no tensor 2\.weight"):
        source.load("2.weight")


def test_code_is_refused_and_not_run(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    folder = torchspec_folder(tmp_path / "drafter")
    torch.save({"fc.weight": RunsCode(trace)}, folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="cannot be read as tensors alone") as caught:
        read_drafter(folder)
    assert "never run" in str(caught.value) and not trace.exists()
    # the planted fault: the loader that trusts its file
    torch.load(folder / "pytorch_model.bin", weights_only=False)
    assert trace.is_dir()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"model": {"fc.weight": torch.ones(2)}, "step": 8000}, r"model \(an object of type dict\), step \(.*int\)"),
        ({"fc.weight": torch.ones(2), "args": None}, r"other things than tensors: args \(an object of type NoneType\)"),
        ([torch.ones(2)], "an object of type list, expected a mapping"),
        (torch.ones(2), "an object of type Tensor, expected a mapping"),
        ({}, "holds no tensors"),
        ({3: torch.ones(2)}, "names that are not text"),
        ({"fc.weight": torch.eye(3).to_sparse()}, "sparse tensors"),
        ({f"k{i}": i for i in range(11)}, "and 3 more"),
    ],
)
def test_other_contents_are_named(tmp_path: Path, content: Any, message: str) -> None:
    torch.save(content, tmp_path / "state.pt")
    with pytest.raises(CheckpointError, match=message):
        open_torch_state(tmp_path / "state.pt")


@pytest.mark.parametrize("damage", [lambda b: b[:200], lambda b: b[:-40], lambda _: b"", lambda _: b"{}"])
def test_a_damaged_file_is_said(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    folder = torchspec_folder(tmp_path / "drafter")
    path = folder / "pytorch_model.bin"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(CheckpointError, match=r"pytorch_model.bin (is truncated|cannot be read)"):
        read_drafter(folder)


def test_which_file_is_read(tmp_path: Path) -> None:
    folder = torchspec_folder(tmp_path / "drafter")
    torch.save(torch.ones(3), folder / "mask_embedding.pt")
    torch.save({"lr": 1e-4}, folder / "training_args.bin")
    assert find_torch_state(folder) == folder / "pytorch_model.bin"
    torch.save({}, folder / "optimizer.pt")
    with pytest.raises(CheckpointError, match=r"2 files of torch.save: optimizer.pt, pytorch_model.bin"):
        open_weights(folder)
    save_file({"a": torch.ones(1)}, folder / "model.safetensors")
    assert find_torch_state(folder) is None and open_weights(folder).names() == ["a"], "safetensors come first"
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
        open_weights(tmp_path)
    with pytest.raises(CheckpointError, match="does not exist"):
        open_weights(tmp_path / "nowhere")


def test_strictness_is_that_of_safetensors(tmp_path: Path) -> None:
    """A tensor too many, or of another family, is named in the same words."""
    folder = torchspec_folder(tmp_path / "drafter")
    torch.save(
        tiny_tensors("torchspec-dflash") | {"candidate_selector.predecessor_codebook": torch.ones(2)},
        folder / "pytorch_model.bin",
    )
    with pytest.raises(CheckpointError, match="candidate_selector, and the config describes a DFlash drafter without"):
        read_drafter(folder)
