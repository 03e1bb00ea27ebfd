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


class Copying(torch.nn.Module):
    """A drafter that keeps parts of its weights once more, as vLLM's does."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv_proj, self.k_norm = torch.nn.Linear(8, 12, bias=False), torch.nn.LayerNorm(4, bias=False)
        self.requires_grad_(False)
        self._build_fused_kv_buffers()

    def _build_fused_kv_buffers(self) -> None:
        self._fused_kv_weight, self._fused_kv_bias = self.qkv_proj.weight[4:].clone(), None
        self._k_norm_weights = torch.stack([self.k_norm.weight])


def test_copies_of_weights_follow_in_place() -> None:
    drafter = Copying()
    place = drafter._fused_kv_weight.data_ptr()
    runner = SimpleNamespace(model=torch.nn.Linear(2, 2), drafter=SimpleNamespace(model=torch.nn.Sequential(drafter)))
    fill_models(SimpleNamespace(model_runner=runner), "dummy")
    assert torch.equal(drafter._fused_kv_weight, drafter.qkv_proj.weight[4:])
    assert torch.equal(drafter._k_norm_weights[0], drafter.k_norm.weight)
    assert drafter._fused_kv_weight.data_ptr() == place
