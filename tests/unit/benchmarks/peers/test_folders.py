from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from benchmarks.lossless import all_logits
from benchmarks.peers.folders import (
    TINY,
    add_dflash2_parts,
    dflash2_changes,
    export_target,
    load_exact,
    random_dflash,
    random_tensors,
    read_tensors,
    write_folder,
)
from tests import tiny

from paceline.models.loading import load_drafter

CONTRACT = tiny.tiny_target_contract()


def test_tiny_target_is_the_same_network_on_both_sides(tmp_path: Path) -> None:
    import transformers

    export_target(TINY, tmp_path)
    target = load_exact(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype="float32").eval()
    ids = [5, 9, 4, 30, 11]
    with torch.no_grad():
        theirs = model(torch.tensor([ids])).logits[0]
    assert torch.allclose(all_logits(target, ids), theirs, atol=1e-5)
    assert target.tokenizer.decode([5, 9]) == "<5> <9>"


def test_target_in_its_own_format_is_exported_as_it_is(tmp_path: Path) -> None:
    export_target(TINY, tmp_path / "first")
    export_target(str(tmp_path / "first"), tmp_path / "second")
    first, second = load_exact(tmp_path / "first").model, load_exact(tmp_path / "second").model
    assert all(map(torch.equal, first.state_dict().values(), second.state_dict().values()))


@pytest.mark.parametrize("dialect", ["zlab", "assistant"])
def test_random_drafters_are_served_from_their_folders(dialect: str, tmp_path: Path) -> None:
    export_target(TINY, tmp_path / "target")
    target = load_exact(tmp_path / "target")
    contract = random_dflash(target.contract)
    tensors = random_tensors(contract, seed=1)
    folder = write_folder(tmp_path / "drafter", contract, tensors, dialect=dialect)
    loaded = load_drafter(str(folder), target)
    assert loaded.contract.family == "dflash" and not loaded.contract.has_tap_norm
    assert torch.equal(loaded.model.backbone.fc.weight, tensors["fc.weight"])


def test_dflash2_parts_leave_the_backbone_alone(tmp_path: Path) -> None:
    contract = random_dflash(CONTRACT)
    tensors = random_tensors(contract, seed=1)
    wider, everything = add_dflash2_parts(contract, tensors, seed=2, num_taps=3, group_size=8, rank=4, top_k=2)
    assert wider.family == "dflash2" and wider.convolution is not None and wider.convolution.num_taps == 3
    assert all(torch.equal(everything[name], tensor) for name, tensor in tensors.items())
    kernel = everything["layers.0.attention_conv.base_kernel"]
    assert kernel.shape == (2, 3, 64) and 0.7 < float(kernel[:, 0].mean()) < 1.3 and float(kernel.std()) > 0.1
    again, stored = read_tensors(write_folder(tmp_path / "drafter", wider, everything))
    assert again.selector == wider.selector and stored.keys() == everything.keys()
    assert json.loads((tmp_path / "drafter/config.json").read_text())["architectures"] == ["DFlash2DraftModel"]


def test_same_seed_same_weights() -> None:
    contract = random_dflash(CONTRACT, **dflash2_changes(2))
    first, second, other = (random_tensors(contract, seed=seed) for seed in (1, 1, 2))
    assert all(map(torch.equal, first.values(), second.values()))
    assert not torch.equal(first["fc.weight"], other["fc.weight"])
