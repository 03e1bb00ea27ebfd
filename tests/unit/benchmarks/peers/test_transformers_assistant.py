"""Assisted generation is in the transformers that tests have anyway, so a short comparison runs for real."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import pytest
from benchmarks.peers.cases import PreparedDrafter, PreparedTarget, prepare_target, tiny_dflash
from benchmarks.peers.folders import write_folder
from benchmarks.peers.transformers_assistant import compare


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> PreparedTarget:
    prepared = prepare_target("tiny", argparse.Namespace(), tmp_path_factory.mktemp("peer"))
    return dataclasses.replace(prepared, prompts=prepared.prompts[:1])


def exported(target: PreparedTarget, folder: Path, **changes: Any) -> PreparedDrafter:
    (drafter,) = tiny_dflash(target, with_windows=False)
    contract = dataclasses.replace(drafter.contract, **changes)
    write_folder(folder, contract, drafter.tensors, dialect="assistant")
    return dataclasses.replace(drafter, contract=contract)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_every_step_is_the_same(target: PreparedTarget, tmp_path: Path) -> None:
    row = compare(target, exported(target, tmp_path / "drafter"), tmp_path / "drafter", 16)
    assert row["as_expected"] and row["same_proposals"] and int(str(row["num_steps"])) > 5
    assert row["acceptance_ours"] == row["acceptance_peer"]


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_windows_show_the_known_deviation(target: PreparedTarget, tmp_path: Path) -> None:
    drafter = exported(target, tmp_path / "drafter", layer_windows=(7, 7))
    row = compare(target, drafter, tmp_path / "drafter", 16)
    assert not row["as_expected"] and not row["same_proposals"]
