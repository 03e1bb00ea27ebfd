"""Compiled target layers: the same features, one compilation for all layers and lengths, nothing left behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.tiny import tiny_target

from paceline.models.attends import WholeSequence
from paceline.models.taps import TapCollector
from paceline.training.compiling import CompiledLayers


def test_compiled_layers_compute_the_same_and_are_compiled_once() -> None:
    model = tiny_target()
    rows = [torch.randint(3, 500, (2, length)) for length in (24, 40, 64, 17)]
    expected = [run(model, ids) for ids in rows]
    torch._dynamo.reset()
    graphs: list[torch.fx.GraphModule] = []  # ours alone: torch's own counters are the whole process's

    def counting(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    layers, found = CompiledLayers(model, backend=counting), []
    for ids in rows:
        with layers:
            found.append(run(model, ids))
    for (hidden, taps), (hidden_before, taps_before) in zip(found, expected, strict=True):
        torch.testing.assert_close(hidden, hidden_before)
        torch.testing.assert_close(taps, taps_before)
    assert 1 <= len(graphs) <= 2, "a compilation per layer or per length would take minutes"


def test_the_layers_are_themselves_again_after_a_failure() -> None:
    model = tiny_target()
    before = [layer.forward for layer in model.layers]
    with pytest.raises(ValueError, match="meanwhile"), CompiledLayers(model, backend="aot_eager"):
        raise ValueError("meanwhile")
    assert [layer.forward for layer in model.layers] == before


@torch.no_grad()
def run(model: torch.nn.Module, ids: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    taps = TapCollector([1, 3], "prefix")
    hidden = model(ids, torch.arange(ids.shape[1]).expand(ids.shape), WholeSequence(), taps)
    return hidden, list(taps.collected())
