"""Ranks that were not started alike, and cuts that cannot be: one clear error on every rank, and no weight is read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from tests.tiny_kimi import (
    k3_tiny_config,
    kimi_target,
    kimi_tensors,
    multimodal_config,
    multimodal_target,
    write_kimi,
)
from tests.tiny_run import write_tokenizer
from tests.unit.distributed import spread
from tests.unit.distributed.spread import CPU, Case, decode, decode_cases, refuse_cases
from tests.unit.training.processes import run_ranks, values

from paceline.distributed.world import World


@pytest.fixture(scope="module")
def others(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders that differ from the target's in one thing."""
    folder = tmp_path_factory.mktemp("others")
    config = k3_tiny_config()
    write_kimi(folder / "weights", config, kimi_tensors(kimi_target(config, seed=1), rates="padded"))
    tensors = load_file(models / "target" / "model.safetensors")
    write_kimi(folder / "config", {**config, "rms_norm_eps": 1e-6}, tensors)
    boundary = [f"model.layers.4.self_attention_res_{kind}.weight" for kind in ("norm", "proj")]
    kept = {name: tensor for name, tensor in tensors.items() if name not in boundary}
    write_kimi(folder / "boundary", config, kept)
    for name in ("weights", "config", "boundary"):
        write_tokenizer(folder / name, config["vocab_size"])
    return folder


def test_disagreements_are_refused_on_every_rank_before_a_weight_is_read(
    models: Path, others: Path, tmp_path: Path
) -> None:
    two: Case = {"drafter": "dflash", "num_stages": 2}
    cases: dict[str, Sequence[Case]] = {
        "capture ids": (two, {**two, "drafter": "other-taps"}),
        "the stream": (two, {**two, "aux_hidden_stream": "prefix"}),
        "the cut": (two, {**two, "borders": (3,)}),
        "2 ranks per stage": (two, {"drafter": "dflash", "tensor_size": 2}),
        "dtype": (two, {**two, "dtype": "bfloat16"}),
        "linear mode": (two, {**two, "linear_mode": "plain"}),
        "sizes": (two, {**two, "num_draft_tokens": 3}),
        "the target's files": (two, {**two, "target": str(others / "weights")}),
        "the target's config": (two, {**two, "target": str(others / "config")}),
    }
    one_sided: dict[str, Sequence[Case]] = {
        "there is no target named": (two, {**two, "target": str(tmp_path / "nowhere")}),
        "cuts ascend": ({**two, "borders": (9,)}, two),
        "take 4 processes; this run has 2": ({**two, "num_stages": 4},) * 2,
        "cannot share": ({"tensor_size": 3},) * 2,
        "8 layers": ({"num_stages": 9},) * 2,
        "positions for 4096": ({**two, "max_model_len": 5000},) * 2,
    }
    ranks = values(run_ranks(refuse_cases, tmp_path / "run", models, {**cases, **one_sided}))
    for name in cases:
        told = [rank[name]["told"] for rank in ranks]
        assert told[0] == told[1] and name in told[0], told
        assert "not started alike" in told[0] and "on rank 0" in told[0] and "on rank 1" in told[0]
    for name in one_sided:
        for rank in ranks:
            assert name in rank[name]["told"], rank[name]
    assert [rank["read"] for rank in ranks] == [0, 0]


def test_a_checkpoint_without_the_vectors_of_a_boundary(models: Path, others: Path, tmp_path: Path) -> None:
    """Refused by name as taps are set; where the boundary is not tapped, that stage has no use for them."""
    cases = {"tapped": {"drafter": "dflash", "num_stages": 2, "target": str(others / "boundary")}}
    first, second = values(run_ranks(decode_cases, tmp_path / "run", models, cases))
    for kind in ("norm", "proj"):
        name = f"model.layers.4.self_attention_res_{kind}.weight"
        assert name in first["tapped"]["told"] and name in second["tapped"]["told"]
    assert "capture id 4 is tapped where a stage ends" in first["tapped"]["told"]
    assert "missing tensors" in second["tapped"]["told"], "whoever runs the layer needs them in any case"


def test_a_drafter_of_another_target_is_told_by_its_fingerprint_on_every_rank(models: Path, tmp_path: Path) -> None:
    """Replayed over two stages and over two parts, as in one process."""
    cases = {
        kind: {"drafter": "other-target", **fields}
        for kind, fields in (("stages", {"num_stages": 2}), ("parts", {"tensor_size": 2}))
    }
    cases["after it"] = {"drafter": "dflash", "num_stages": 2}
    ranks = values(run_ranks(decode_cases, tmp_path / "run", models, cases))
    alone = decode(World(0, 1, CPU), models, {"drafter": "other-target"})
    assert alone["error"] == "CompatibilityError"
    decider = {"stages": 1, "parts": 0}
    for kind, rank in decider.items():
        assert ranks[rank][kind] == alone
        assert ranks[1 - rank][kind]["error"] == "OtherRankFailedError"
        assert alone["told"].splitlines()[0] in ranks[1 - rank][kind]["told"]
    assert all("tokens" in rank["after it"] for rank in ranks), "a refusal leaves the ranks in step"


def test_requests_that_cannot_be_served(models: Path) -> None:
    alone = World(0, 1, CPU)
    found: dict[str, Any] = decode(alone, models, {"max_model_len": 20})
    assert found["error"] == "RequestError" and "request 1 has a prompt of 23 tokens" in found["told"]


@pytest.mark.parametrize("order", [(2, 0, 3, 1), (3, 2, 1, 0)])
def test_any_order_of_drafted_and_undrafted_requests(
    order: tuple[int, ...], models: Path, plain: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spread, "REQUESTS", tuple(spread.REQUESTS[index] for index in order))
    expected = [plain["float32"]["tokens"][index] for index in order]
    for places in (1, 3):
        case = {"drafter": "eagle3", "num_places": places, "scripts": expected}
        assert decode(World(0, 1, CPU), models, case)["tokens"] == expected


def test_a_multimodal_target_answers_text_as_its_text_model(
    models: Path, plain: dict[str, Any], tmp_path: Path
) -> None:
    folder = write_kimi(tmp_path / "target", multimodal_config(), kimi_tensors(multimodal_target()))
    write_tokenizer(folder, 512)
    found = decode(World(0, 1, CPU), models, {"target": str(folder)})
    assert found.get("tokens") == plain["float32"]["tokens"], found
