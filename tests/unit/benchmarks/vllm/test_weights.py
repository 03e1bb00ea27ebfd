from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from benchmarks.vllm.weights import fill_models


@pytest.mark.parametrize("name", ["drafter", "speculator", None])
def test_models_of_a_worker_are_overwritten_in_place(name: str | None) -> None:
    with torch.inference_mode():
        models = [torch.nn.Linear(64, 64).requires_grad_(False) for _ in range(2)]
    places = [each.weight.data_ptr() for each in models]
    runner = SimpleNamespace(model=models[0])
    if name is not None:
        setattr(runner, name, SimpleNamespace(model=models[1]))
    told = fill_models(SimpleNamespace(model_runner=runner), "normal")
    filled = models if name is not None else models[:1]
    assert told == ["Linear of 4160"] * len(filled)
    assert [each.weight.data_ptr() for each in models] == places
    for model in filled:
        assert 1.1 / 8 < float(model.weight.detach().std()) < 1.4 / 8 and not model.bias.detach().any()
    if name is not None:
        assert not torch.equal(models[0].weight, models[1].weight)
