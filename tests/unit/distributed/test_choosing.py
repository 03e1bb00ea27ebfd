"""Tokens that several ranks choose together are those of one, ties, noise and unsound numbers included."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from tests.unit.training.processes import run_ranks, values
from torch import Tensor

import paceline.distributed.choosing as module
from paceline.distributed.choosing import Truncation, choose_ids
from paceline.distributed.mesh import Layout, Mesh, TensorGroup
from paceline.distributed.sharding import vocabulary_shard
from paceline.distributed.world import World
from paceline.engine.slots import SamplingRows
from paceline.ops.finalise_block import NOT_A_NUMBER, NOTHING_LEFT, fault_of_rows
from paceline.ops.noise import hash32
from paceline.ops.sample_tokens import NO_TOKEN, sample_tokens
from paceline.ops.sharded_top_k import IdRange, VocabularyShard
from paceline.ops.target_distribution import process_logits
from paceline.training.ranks import Ranks

VOCAB, ROWS = 21, 64  # an odd vocabulary: the second rank has fewer ids


KINDS = {
    "greedy": {"is_greedy": True},
    "sampled": {"is_greedy": False},
    "truncated": {"is_greedy": False, "is_truncated": True},
}


def logits() -> Tensor:
    """Few levels, so that ties lie on both sides of the border; and rows that say nothing."""
    found = torch.randint(0, 5, (ROWS, VOCAB), generator=torch.Generator().manual_seed(0)).float()
    found[0, 3], found[1, 20], found[2, 1], found[3, :] = torch.nan, torch.inf, -torch.inf, -torch.inf
    found[4, :11], found[5, 11:] = -torch.inf, -torch.inf
    found[40, 3], found[41, 20], found[42, :] = torch.nan, torch.inf, -torch.inf  # where a nucleus is asked for
    return found


def settings(*, is_greedy: bool, is_truncated: bool) -> SamplingRows:
    temperature_R = torch.full((ROWS,), 0.0 if is_greedy else 0.8)
    temperature_R[10:20] = 0.0
    none_R = torch.zeros(ROWS)
    sampling = SamplingRows(temperature_R, none_R.long(), none_R + 1.0, none_R.clone(), torch.arange(ROWS) * 7)
    if is_truncated:
        sampling.top_k_B[20:40], sampling.top_p_B[30:50], sampling.min_p_B[45:] = 6, 0.6, 0.2
    return sampling


def rows_of(shard: VocabularyShard, tensor: TensorGroup, *, is_greedy: bool, is_truncated: bool = False) -> Tensor:
    """Ids, and what is wrong with the rows, [2, R]."""
    (ids,) = shard.ranges
    ids_R, score_R = choose_ids(
        logits()[:, ids.first_id : ids.end_id],
        shard,
        tensor,
        sampling=settings(is_greedy=is_greedy, is_truncated=is_truncated),
        position_R=torch.arange(ROWS) % 9,
        all_greedy=is_greedy,
        vocab_size=VOCAB,
        truncation=Truncation(6, any_top_p=True, any_min_p=True) if is_truncated else Truncation(),
    )
    return torch.stack((ids_R, fault_of_rows(score_R)))


def choose_on_rank(ranks: Ranks) -> dict[str, Any]:
    from tests.tiny_kimi import k3_tiny_config, kimi_contract

    contract = kimi_contract(k3_tiny_config(vocab_size=VOCAB))
    mesh = Mesh.of(World(ranks.rank, ranks.size, ranks.device), Layout((), ranks.size), contract.num_layers)
    shard = vocabulary_shard(contract, mesh.tensor)
    found = {kind: rows_of(shard, mesh.tensor, **options) for kind, options in KINDS.items()}

    def counted_from_the_shard(seed: Tensor, position: Tensor, ids: Tensor, domain: int) -> Tensor:
        return hash32(seed, position, ids - ids[0], domain)

    with patch.object(module, "hash32", counted_from_the_shard):  # the fault
        found["own ids"] = rows_of(shard, mesh.tensor, is_greedy=False)
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_several_ranks_choose_as_one(size: int, tmp_path: Any) -> None:
    found = values(run_ranks(choose_on_rank, tmp_path / "run", size=size))
    whole = VocabularyShard(VOCAB, (IdRange(0, 0, VOCAB),))
    for kind, options in KINDS.items():
        alone = rows_of(whole, TensorGroup(), **options)
        assert all(torch.equal(rank[kind], alone) for rank in found)
        ids_R, fault_R = alone
        assert ids_R[[0, 1, 3]].tolist() == [NO_TOKEN] * 3 and int(ids_R[4]) >= 11 and int(ids_R[5]) < 11
        assert fault_R[[0, 1, 3]].tolist() == fault_R[40:43].tolist() == [NOT_A_NUMBER, NOT_A_NUMBER, NOTHING_LEFT]
    assert not torch.equal(found[0]["own ids"], found[0]["sampled"]), "noise of an id is its own, wherever it is held"


def test_one_rank_chooses_as_a_process_without_ranks() -> None:
    sampling = settings(is_greedy=False, is_truncated=True)
    processed = process_logits(
        logits(),
        temperature_R=sampling.temperature_B,
        top_k_R=sampling.top_k_B,
        top_p_R=sampling.top_p_B,
        min_p_R=sampling.min_p_B,
    )
    expected = sample_tokens(
        processed,
        temperature_R=sampling.temperature_B,
        seed_R=sampling.seed_B,
        position_R=torch.arange(ROWS) % 9,
    )
    whole = VocabularyShard(VOCAB, (IdRange(0, 0, VOCAB),))
    found = rows_of(whole, TensorGroup(), is_greedy=False, is_truncated=True)
    assert torch.equal(found[0], expected)
    assert not torch.equal(found, rows_of(whole, TensorGroup(), is_greedy=False))
