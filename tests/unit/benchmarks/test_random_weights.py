from __future__ import annotations

import pytest
import torch
from benchmarks.random_dense import DENSE_SHAPES, random_drafter, random_target
from benchmarks.random_weights import Weights, fill

from paceline.models.sequence_attend import sequence_attend

CPU = torch.device("cpu")


def test_dummy_weights_are_one_sequence_everywhere() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.LayerNorm(4), torch.nn.Linear(4, 3, bias=False))
    fill(model, 0, "dummy")
    first = model[0].weight.detach().flatten()
    assert float(first.abs().max()) <= 1e-3 and len(set(first.tolist())) == 24
    for parameter in model.parameters():
        assert torch.equal(parameter.flatten(), first[: parameter.numel()])


@pytest.mark.parametrize(("weights", "are_equal"), [("dummy", True), ("normal", False)])
def test_rows_of_one_token_differ_by_where_they_stand_with_normal_weights_alone(
    weights: Weights, are_equal: bool
) -> None:
    target = random_target(DENSE_SHAPES["tiny-qwen3"], CPU, dtype=torch.bfloat16, linear_mode="plain", weights=weights)
    ids_1T = torch.tensor([[7, 99, 99, 99, 3, 99]])
    hidden_1TD = target.model(ids_1T, torch.arange(6).unsqueeze(0), sequence_attend(target.model))
    first, second = hidden_1TD[0, 1], hidden_1TD[0, 5]
    assert torch.equal(first, second) is are_equal


def test_a_drafter_is_filled_like_its_target() -> None:
    target = random_target(DENSE_SHAPES["tiny-smollm2"], CPU, dtype=torch.bfloat16, linear_mode="plain")
    drafter = random_drafter(target, num_layers=1, block_size=4, weights="dummy")
    assert all(float(each.detach().abs().max()) <= 1e-3 for each in drafter.model.parameters())
