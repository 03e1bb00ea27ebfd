"""What of each layer a rank has: sizes of a share, and parts that know whose they are."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from tests.tiny_kimi import fill_kimi, k3_tiny_config, kimi_contract

from paceline.distributed.mesh import TensorGroup
from paceline.distributed.sharding import (
    ReducedLinear,
    ShardedEmbedding,
    ShardedExperts,
    require_shares,
    sharded_stage,
    share_of,
    vocabulary_shard,
)
from paceline.errors import ConfigError
from paceline.models.layers import Linear
from paceline.models.targets.kimi_experts import Experts, MixtureOfExperts
from paceline.ops.mixture_of_experts import Routing

CONTRACT = kimi_contract(k3_tiny_config())


def test_a_share_keeps_what_a_stage_asks_of_the_whole() -> None:
    share = share_of(CONTRACT, 2)
    assert (share.num_heads, share.intermediate_size, share.vocab_size) == (2, 128, 512)
    assert share.kimi is not None and share.kimi.delta is not None and share.kimi.delta.num_heads == 2
    assert dataclasses.replace(share, num_heads=4, intermediate_size=256, kimi=CONTRACT.kimi) == CONTRACT


def test_one_rank_has_the_parts_of_a_process_without_ranks() -> None:
    stage = sharded_stage(CONTRACT, 0, 8, TensorGroup())
    kinds = {type(module) for module in stage.modules()}
    assert not kinds & {ReducedLinear, ShardedExperts, ShardedEmbedding}


def test_what_is_summed_and_what_is_not() -> None:
    with torch.device("meta"):
        stage: Any = sharded_stage(CONTRACT, 0, 8, TensorGroup(1, 2))
    reduced = {name.split(".", 2)[2] for name, part in stage.named_modules() if isinstance(part, ReducedLinear)}
    assert reduced == {"self_attn.o_proj", "mlp.down_proj", "mlp.shared_experts.down_proj"}
    mixture = stage.layers[1].mlp
    assert isinstance(mixture, MixtureOfExperts) and mixture.experts is mixture._modules["experts"]
    assert (mixture.experts.num_experts, mixture.experts.first_expert) == (2, 2)
    assert mixture.gate.weight.shape == (4, 128), "every rank routes over all experts"
    for part in (mixture.routed_expert_down_proj, mixture.routed_expert_up_proj):
        assert type(part) is Linear and part.weight.shape in ((64, 128), (128, 64))


@pytest.mark.parametrize(
    ("vocab_size", "size", "rows"), [(512, 2, [256, 256]), (21, 2, [11, 10]), (21, 4, [6, 6, 6, 3])]
)
def test_every_id_is_somebodys(vocab_size: int, size: int, rows: list[int]) -> None:
    contract = kimi_contract(k3_tiny_config(vocab_size=vocab_size))
    shards = [vocabulary_shard(contract, TensorGroup(index, size)) for index in range(size)]
    assert [shard.num_rows for shard in shards] == rows
    ids = [number for shard in shards for number in range(shard.ranges[0].first_id, shard.ranges[0].end_id)]
    assert ids == list(range(vocab_size))


def test_a_vocabulary_too_small_for_its_ranks() -> None:
    with pytest.raises(ConfigError, match="vocab_size 5"):
        require_shares(kimi_contract(k3_tiny_config(vocab_size=5)), 4)


def test_experts_of_all_ranks_add_up() -> None:
    """The sum is what a rank gets from the others; here each is alone, and adds nothing of theirs."""
    assert CONTRACT.kimi is not None and CONTRACT.kimi.experts is not None
    settings, activation = (
        CONTRACT.kimi.experts,
        MixtureOfExperts(CONTRACT, CONTRACT.kimi, CONTRACT.kimi.experts).experts,
    )
    whole = Experts(64, settings, activation.activation)
    fill_kimi(whole, 0)
    rows = torch.randn(5, 64)
    routing = Routing(torch.tensor([[0, 1], [1, 2], [3, 0], [2, 3], [1, 3]]), torch.rand(5, 2))
    total = torch.zeros_like(rows)
    for index in range(2):
        part = ShardedExperts(64, settings, activation.activation, TensorGroup(index, 2))
        part._tensor = TensorGroup()  # its sum is taken below
        with torch.no_grad():
            part.gate_up.copy_(whole.gate_up.chunk(2)[index])
            part.down.copy_(whole.down.chunk(2)[index])
            total += part(rows, routing)
    assert torch.allclose(total, whole(rows, routing).detach(), atol=1e-5)
