"""Which rank has which layers, and sums that are the same bits on every rank."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.unit.training.processes import run_ranks, values
from torch import Tensor

from paceline.distributed.mesh import Layout, Mesh, TensorGroup
from paceline.distributed.world import World
from paceline.errors import ConfigError
from paceline.training.ranks import Ranks

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "borders"),
    [(8, 1, ()), (8, 2, (4,)), (7, 3, (3, 5)), (27, 4, (7, 14, 21)), (3, 3, (1, 2))],
)
def test_even_stages(num_layers: int, num_stages: int, borders: tuple[int, ...]) -> None:
    assert Layout.even(num_layers, num_stages).borders == borders


@pytest.mark.parametrize("num_stages", [0, 9])
def test_more_stages_than_layers(num_stages: int) -> None:
    with pytest.raises(ConfigError, match="8 layers"):
        Layout.even(8, num_stages)


def test_ranks_of_two_stages_of_two_parts() -> None:
    layout = Layout((3,), 2)
    meshes = [
        Mesh(World(rank, 4, CPU), layout, ((0, 3), (3, 8))[rank // 2], TensorGroup(rank % 2, 2)) for rank in range(4)
    ]
    assert [mesh.stage for mesh in meshes] == [0, 0, 1, 1]
    assert [mesh.is_decider for mesh in meshes] == [False, False, True, False]
    assert [mesh.is_last_stage for mesh in meshes] == [False, False, True, True]
    assert [mesh.next_rank for mesh in meshes[:2]] == [2, 3]
    assert [mesh.previous_rank for mesh in meshes[2:]] == [0, 1]


def partials(rank: int, dtype: torch.dtype, num_rows: int = 33) -> Tensor:
    return torch.randn(num_rows, 3, 40, generator=torch.Generator().manual_seed(rank)).to(dtype)


def totals(ranks: Ranks) -> list[Tensor]:
    mesh = Mesh.of(World(ranks.rank, ranks.size, ranks.device), Layout((), ranks.size), 8)
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        own = partials(ranks.rank, dtype)
        found += [mesh.tensor.total(own.clone(), in_order=in_order) for in_order in (True, False)]
        found.append(torch.cat([mesh.tensor.total(row, in_order=True) for row in own.split(1)]))
        found.append(mesh.tensor.total(own.transpose(0, 2), in_order=True).transpose(0, 2))
    return found


def test_sums_are_the_same_on_every_rank_and_in_order_for_any_number_of_rows(tmp_path: Path) -> None:
    found = values(run_ranks(totals, tmp_path / "run", size=3))
    for one, two, three in zip(*found, strict=True):
        assert torch.equal(one, two) and torch.equal(two, three)
    for at, dtype in ((0, torch.float32), (4, torch.bfloat16)):
        first, second, third = (partials(rank, dtype).float() for rank in range(3))
        in_order = (first + second + third).to(dtype)
        assert torch.equal(found[0][at], in_order) and torch.allclose(
            found[0][at + 1].float(), in_order.float(), atol=0.1
        )
        assert torch.equal(found[0][at + 2], in_order) and torch.equal(found[0][at + 3], in_order)
