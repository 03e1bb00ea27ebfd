"""What two and three ranks remove together is what one process removes, ties on either side of a cut included."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from tests.unit.training.processes import run_ranks, values
from torch import Tensor

from paceline.ops import sharded_truncation as module
from paceline.ops.sharded_truncation import process_sharded_logits
from paceline.ops.target_distribution import process_logits
from paceline.training.ranks import Ranks

VOCAB, ROWS = 301, 96
KINDS = {
    "min-p": {"max_top_k": 0, "any_top_p": False, "any_min_p": True},
    "top-k": {"max_top_k": 40, "any_top_p": False, "any_min_p": False},
    "top-p": {"max_top_k": 0, "any_top_p": True, "any_min_p": False},
    "all": {"max_top_k": 40, "any_top_p": True, "any_min_p": True},
}


def rows() -> dict[str, Tensor]:
    """Logits in steps, so that many are equal, some rows below zero as a whole, and settings of every kind."""
    generator = torch.Generator().manual_seed(0)
    logits_RV = (torch.randn(ROWS, VOCAB, generator=generator) * 12).round() / 4
    logits_RV[::7] -= 50.0
    logits_RV[::5, : VOCAB // 2] = -torch.inf
    logits_RV[3] = 1.5  # nothing but ties
    temperature_R = torch.rand(ROWS, generator=generator) + 0.3
    temperature_R[::9] = 0.0
    top_p_R = torch.rand(ROWS, generator=generator).clamp(0.02, 0.97)
    top_p_R[::8] = 1.0
    return {
        "logits_RV": logits_RV,
        "temperature_R": temperature_R,
        "top_k_R": torch.randint(0, 41, (ROWS,), generator=generator),
        "top_p_R": top_p_R,
        "min_p_R": torch.rand(ROWS, generator=generator) * 0.2,
    }


def on_rank(ranks: Ranks) -> dict[str, Tensor]:
    given = rows()
    logits_RV = given.pop("logits_RV")
    width = -(-VOCAB // ranks.size)
    own_RI = logits_RV[:, ranks.rank * width : (ranks.rank + 1) * width]
    group = dist.new_group(list(range(ranks.size)))

    def found(kind: str) -> Tensor:
        return process_sharded_logits(own_RI, vocab_size=VOCAB, group=group, **given, **KINDS[kind])

    told = {kind: found(kind) for kind in KINDS}
    with patch.object(module, "_summed", lambda own, _group: own):  # the fault: each rank's own mass
        told["own mass"] = found("top-p")
    with patch.object(module, "_gathered", lambda own, _group: own.expand(ranks.size, *own.shape)):
        told["own best"] = found("top-k")
    return told


def alone(kind: str) -> Tensor:
    given: dict[str, Any] = rows()
    return process_logits(given.pop("logits_RV"), **given, **KINDS[kind])


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_remove_what_one_process_removes(size: int, tmp_path: Path) -> None:
    ranks = values(run_ranks(on_rank, tmp_path / "run", size=size))
    for kind in KINDS:
        assert torch.equal(torch.cat([rank[kind] for rank in ranks], dim=1), alone(kind)), kind
    for fault, kind in (("own mass", "top-p"), ("own best", "top-k")):
        assert not torch.equal(torch.cat([rank[fault] for rank in ranks], dim=1), alone(kind)), fault


def test_one_rank_is_a_process_without_ranks() -> None:
    given: dict[str, Any] = rows()
    logits_RV = given.pop("logits_RV")
    for kind, flags in KINDS.items():
        found = process_sharded_logits(logits_RV, vocab_size=VOCAB, group=None, **given, **flags)
        assert torch.equal(found, alone(kind)), kind
