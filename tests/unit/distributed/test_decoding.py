"""Tokens of real processes, with every family of drafter: those of one process without drafts, to the last one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.unit.distributed.spread import CPU, FAMILIES, decode, decode_cases
from tests.unit.training.processes import run_ranks, values

from paceline.distributed.world import World

SPREADS: dict[str, dict[str, Any]] = {"two stages": {"num_stages": 2}, "two parts": {"tensor_size": 2}}
CASES: dict[str, dict[str, Any]] = {
    f"{spread}, {family}": {"drafter": family, **fields} for spread, fields in SPREADS.items() for family in FAMILIES
}
CASES |= {f"{spread}, plain": fields for spread, fields in SPREADS.items()}
CASES |= {
    "inside a block": {"drafter": "dflash", "borders": (5,)},
    "after layer 0": {"drafter": "eagle3", "borders": (1,)},
    "bf16": {"drafter": "dflash2", "num_stages": 2, "dtype": "bfloat16"},
    "other stream": {"drafter": "dflash", "num_stages": 2, "aux_hidden_stream": "prefix"},
    "fewer drafts": {"drafter": "dspark", "num_stages": 2, "num_draft_tokens": 3},
    "one row counts": {"drafter": "dflash", "num_stages": 2, "fault": "one row counts"},
    "noise on rank 1": {"drafter": "dflash", "tensor_size": 2, "fault": "noise on rank 1"},
}


@pytest.fixture(scope="module")
def two(models: Path, plain: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks found."""
    cases = {name: {**case, "scripts": plain[case.get("dtype", "float32")]["tokens"]} for name, case in CASES.items()}
    return values(run_ranks(decode_cases, tmp_path_factory.mktemp("two") / "run", models, cases))


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if "fault" not in case])
def test_two_processes_write_what_one_writes_without_drafts(
    name: str, two: list[dict[str, Any]], plain: dict[str, Any]
) -> None:
    found = [rank[name] for rank in two]
    assert found[0] == found[1], "every rank gets the results"
    assert found[0].get("tokens") == plain[CASES[name].get("dtype", "float32")]["tokens"], found[0]
    if CASES[name].get("drafter"):
        assert 0 < sum(found[0]["accepted"]) < sum(found[0]["drafted"]) and found[0]["drafted"][2] == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_one_process_writes_with_drafts_what_it_writes_without(
    family: str, models: Path, plain: dict[str, Any]
) -> None:
    case = {"drafter": family, "scripts": plain["float32"]["tokens"]}
    found = decode(World(0, 1, CPU), models, case)
    assert found["tokens"] == plain["float32"]["tokens"]


def test_two_stages_of_two_parts(models: Path, plain: dict[str, Any], tmp_path: Path) -> None:
    scripts = {"scripts": plain["float32"]["tokens"]}
    cases = {
        "dflash": {"drafter": "dflash", "num_stages": 2, "tensor_size": 2, **scripts},
        "eagle3": {"drafter": "eagle3", "borders": (3,), "tensor_size": 2, **scripts},
    }
    for rank in values(run_ranks(decode_cases, tmp_path / "run", models, cases, size=4)):
        for name in cases:
            assert rank[name].get("tokens") == plain["float32"]["tokens"], rank[name]


def test_accepted_counts_that_are_not_sent_are_seen(two: list[dict[str, Any]], plain: dict[str, Any]) -> None:
    found = two[0]["one row counts"]
    assert "tokens" in found and found["tokens"] != plain["float32"]["tokens"]


def test_ranks_whose_logits_differ_still_write_one_text(two: list[dict[str, Any]]) -> None:
    """One rank decides; were each to decide for itself, they would wait for each other for good."""
    found = [rank["noise on rank 1"] for rank in two]
    assert "tokens" in found[0] and found[0] == found[1]
