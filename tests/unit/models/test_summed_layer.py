"""Layers whose outputs are summed elsewhere: with nothing to add they are the whole layers, whatever form runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from tests.tiny import tiny_target
from torch import Tensor

from paceline.engine.block_tables import BlockTables
from paceline.engine.cache import KeyValueCache
from paceline.engine.paged_attends import CausalPaged
from paceline.models import fused_layer
from paceline.models.fused_layer import run_fused
from paceline.models.layers import set_linear_mode

ROWS = 5
BIASED = {"attention_bias": True, "mlp_bias": True}


def stream(most_rows: int, total: Callable[[Tensor], Tensor] | None, **changes: Any) -> tuple[Tensor, list[Tensor]]:
    """The stream behind two requests' rows, and behind each layer."""
    model = tiny_target(**changes)
    set_linear_mode(model, "fused")
    contract = model.contract
    tables = BlockTables.fixed(2, capacity=32, device=torch.device("cpu"))
    cache = KeyValueCache(
        tables,
        num_layers=contract.num_layers,
        num_kv_heads=contract.num_kv_heads,
        head_size=contract.head_size,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    starts_B = torch.zeros(2, dtype=torch.int64)
    attend = CausalPaged(cache, torch.arange(2), starts_B, None, ROWS, None)
    x_BTD = model.embed_tokens(torch.arange(10, 10 + 2 * ROWS).view(2, ROWS))
    turns = model.position_table[torch.arange(ROWS).repeat(2)]
    layers = [layer._replace(most_rows=most_rows, total=total) for layer in model._fused]
    seen: list[Tensor] = []
    found = run_fused(layers, x_BTD, turns, attend, observe=lambda _index, after: seen.append(after.clone()))
    return found, seen


@pytest.mark.parametrize("changes", [{}, {"family": "qwen3"}, BIASED], ids=["llama", "qwen3", "biased"])
@pytest.mark.parametrize("most_rows", [0, 64], ids=["many", "few"])
def test_with_nothing_to_add_they_are_the_whole_layers(most_rows: int, changes: dict[str, Any]) -> None:
    whole, after_each = stream(64, None, **changes)
    summed, also = stream(most_rows, lambda partial: partial, **changes)
    torch.testing.assert_close(summed, whole, rtol=1e-4, atol=1e-4)
    for one, two in zip(also, after_each, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("most_rows", [0, 64], ids=["many", "few"])
def test_every_output_is_summed_once_and_biases_are_not(most_rows: int) -> None:
    """Two equal halves: of each product half, of each bias all."""
    whole, _ = stream(64, None, **BIASED)
    calls = []

    def doubled(partial: Tensor) -> Tensor:
        calls.append(partial.shape)
        return partial * 2

    halved = _halved(most_rows, doubled)
    torch.testing.assert_close(halved, whole, rtol=1e-4, atol=1e-4)
    assert calls == [(2 * ROWS, 64)] * 8, "two of each layer"
    assert not torch.allclose(_halved(most_rows, lambda partial: partial), whole, atol=1e-2), "the fault: no sum"


def _halved(most_rows: int, total: Callable[[Tensor], Tensor]) -> Tensor:
    run = fused_layer.run_summed

    def with_halves(layers: Any, *arguments: Any) -> Any:
        return run([layer._replace(o=layer.o / 2, down=layer.down / 2) for layer in layers], *arguments)

    with patch.object(fused_layer, "run_summed", with_halves):
        return stream(most_rows, total, **BIASED)[0]
