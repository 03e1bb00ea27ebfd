"""Tokens of real processes, with every family of drafter: those of one process without drafts, to the last one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests import trained_kimi
from tests.tiny import wrap_target
from tests.tiny_kimi import k3_tiny_config, kimi_target
from tests.unit.distributed.spread import CPU, FAMILIES, REQUESTS, decode, decode_cases
from tests.unit.training.processes import run_ranks, values

from paceline.distributed.world import World

STAGES: dict[str, dict[str, Any]] = {family: {"drafter": family, "num_stages": 2} for family in FAMILIES}
STAGES |= {
    "plain": {"num_stages": 2},
    "inside a block": {"drafter": "dflash", "borders": (5,)},
    "after layer 0": {"drafter": "eagle3", "borders": (1,)},
    "bf16": {"drafter": "dflash2", "num_stages": 2, "dtype": "bfloat16"},
    "other stream": {"drafter": "dflash", "num_stages": 2, "aux_hidden_stream": "prefix"},
    "fewer drafts": {"drafter": "dspark", "num_stages": 2, "num_draft_tokens": 3},
    "trained": {"drafter": "trained-latent", "num_stages": 2, "scripts": ()},
    "one row counts": {"drafter": "dflash", "num_stages": 2, "fault": "one row counts"},
}
PARTS: dict[str, dict[str, Any]] = {family: {"drafter": family, "tensor_size": 2} for family in FAMILIES}
PARTS |= {
    "plain": {"tensor_size": 2},
    "trained": {"drafter": "trained-latent", "tensor_size": 2, "scripts": ()},
    "noise on rank 1": {"drafter": "dflash", "tensor_size": 2, "fault": "noise on rank 1"},
}
Found = list[dict[str, Any]]


def on_two_ranks(
    cases: dict[str, dict[str, Any]], models: Path, plain: dict[str, Any], factory: pytest.TempPathFactory
) -> Found:
    """What each of two ranks found, all cases in one start of the processes."""
    # A trained drafter needs no help: its case has scripts of its own, none.
    helped = {name: {"scripts": plain[case.get("dtype", "float32")]["tokens"], **case} for name, case in cases.items()}
    return values(run_ranks(decode_cases, factory.mktemp("two") / "run", models, helped))


@pytest.fixture(scope="module")
def stages(models: Path, plain: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Found:
    return on_two_ranks(STAGES, models, plain, tmp_path_factory)


@pytest.fixture(scope="module")
def parts(models: Path, plain: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Found:
    return on_two_ranks(PARTS, models, plain, tmp_path_factory)


def check(case: dict[str, Any], ranks: Found, name: str, plain: dict[str, Any]) -> None:
    """Every rank has the plain text of one process, and of the drafts some were accepted and some not."""
    first, second = (rank[name] for rank in ranks)
    assert first == second, "every rank gets the results"
    assert first.get("tokens") == plain[case.get("dtype", "float32")]["tokens"], first
    if "drafter" in case:
        assert 0 < sum(first["accepted"]) < sum(first["drafted"]) and first["drafted"][2] == 0


@pytest.mark.parametrize("name", [name for name, case in STAGES.items() if "fault" not in case])
def test_two_stages_write_what_one_process_writes_without_drafts(
    name: str, stages: Found, plain: dict[str, Any]
) -> None:
    check(STAGES[name], stages, name, plain)


@pytest.mark.parametrize("name", [name for name, case in PARTS.items() if "fault" not in case])
def test_two_parts_write_what_one_process_writes_without_drafts(name: str, parts: Found, plain: dict[str, Any]) -> None:
    check(PARTS[name], parts, name, plain)


@pytest.mark.slow
def test_trained_drafters_of_every_family_write_it_too(models: Path, plain: dict[str, Any], tmp_path: Path) -> None:
    """The latent one among them is in the cases above, which run always."""
    target: Any = wrap_target(kimi_target(k3_tiny_config()), "row_invariant")  # type: ignore[arg-type]
    texts = [[*request.prompt_ids, *ids[:5]] for request, ids in zip(REQUESTS, plain["float32"]["tokens"], strict=True)]
    cases: dict[str, dict[str, Any]] = {}
    for family in trained_kimi.FAMILIES:
        drafter = trained_kimi.train_by_heart(tmp_path / f"training-{family}", family, target, texts)
        for name, spread in (("stages", {"num_stages": 2}), ("parts", {"tensor_size": 2})):
            cases[f"{family}, {name}"] = {"drafter": str(drafter), "scripts": (), **spread}
    found = values(run_ranks(decode_cases, tmp_path / "two" / "run", models, cases))
    for name, case in cases.items():
        check(case, found, name, plain)


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


def test_accepted_counts_that_are_not_sent_are_seen(stages: Found, plain: dict[str, Any]) -> None:
    found = stages[0]["one row counts"]
    assert "tokens" in found and found["tokens"] != plain["float32"]["tokens"]


def test_ranks_whose_logits_differ_still_write_one_text(parts: Found) -> None:
    """One rank decides; were each to decide for itself, they would wait for each other for good."""
    found = [rank["noise on rank 1"] for rank in parts]
    assert "tokens" in found[0] and found[0] == found[1]
