from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from benchmarks.peers import cases
from benchmarks.peers.cases import (
    PreparedTarget,
    folded_dflash,
    prepared_targets,
    tiny_dflash,
    tiny_dflash2,
    with_random_dflash2_parts,
)
from benchmarks.peers.folders import random_dflash, random_tensors, write_folder
from tests import tiny


def prepare(folder: Path) -> PreparedTarget:
    target, _ = tiny.loaded(linear_mode="plain")
    return PreparedTarget("tiny", folder, target, tuple(map(tuple, tiny.tiny_prompts([5, 6]))))


def test_only_the_tiny_target_if_asked(tmp_path: Path) -> None:
    (found,) = prepared_targets(argparse.Namespace(tiny_only=True), tmp_path)
    assert found.name == "tiny" and (found.folder / "model.safetensors").is_file()
    assert len(found.prompts) == cases.NUM_TINY_PROMPTS


def test_random_drafters_cover_windows_and_scales(tmp_path: Path) -> None:
    target = prepare(tmp_path)
    dflash, dflash2 = tiny_dflash(target), tiny_dflash2(target)
    assert [one.contract.family for one in (*dflash, *dflash2)] == ["dflash"] * 3 + ["dflash2"] * 3
    assert {one.contract.layer_causal for one in dflash} == {(False, False), (True, False)}
    assert {one.contract.final_logit_softcapping for one in dflash2} == {None, 3.0}
    assert {one.contract.convolution.num_taps for one in dflash2 if one.contract.convolution} == {2, 3}
    assert len({one.name for one in (*dflash, *dflash2)}) == 6
    (plain,) = tiny_dflash(target, with_windows=False)
    assert plain.contract.has_full_attention_only


@pytest.mark.parametrize("has_tap_norm", [True, False])
def test_norms_are_folded_where_there_are_any(has_tap_norm: bool, tmp_path: Path) -> None:
    target = prepare(tmp_path)
    contract = random_dflash(target.loaded.contract, has_tap_norm=has_tap_norm, hidden_size=64)
    folder = write_folder(tmp_path / "given", contract, random_tensors(contract, seed=1))
    folded = folded_dflash(target, argparse.Namespace(draft_model=str(folder)))
    assert folded.name == ("given, norms folded" if has_tap_norm else "given")
    assert not folded.contract.has_tap_norm
    wider = with_random_dflash2_parts(folded)
    assert wider.contract.family == "dflash2" and wider.tensors["fc.weight"] is folded.tensors["fc.weight"]
