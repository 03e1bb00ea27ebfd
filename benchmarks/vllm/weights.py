"""Overwrites the random weights of a vLLM engine, from inside its worker."""

from __future__ import annotations

from typing import Any

from benchmarks.random_weights import Weights, fill

# Of its DFlash drafters (v1, Qwen3): context keys come from copies of the projections, made when they were loaded.
_COPIER = "_build_fused_kv_buffers"
_COPIES = ("_fused_kv_weight", "_fused_kv_bias", "_k_norm_weights")


def fill_models(worker: Any, weights: Weights) -> list[str]:
    """Overwrite the weights of a worker's models, target and drafter, where they lie: graphs stay as they are.

    Args:
        worker: of vLLM, in whose process this runs.
        weights: of `random_weights.fill`.

    Returns:
        The classes of the models, and how many parameters each has.
    """
    import torch

    models = [worker.model_runner.model]
    drafter = getattr(worker.model_runner, "drafter", None) or getattr(worker.model_runner, "speculator", None)
    if drafter is not None:
        models.append(drafter.model)
    with torch.inference_mode():  # vLLM's parameters may have been made in it
        for seed, model in enumerate(models):
            fill(model, seed, weights)
            for module in model.modules():
                if hasattr(module, _COPIER) and hasattr(module, _COPIES[0]):
                    refresh_copies(module)
    return [f"{type(model).__name__} of {sum(one.numel() for one in model.parameters())}" for model in models]


def refresh_copies(module: Any) -> None:
    """Make a drafter's copies of its weights again, and put them where the old ones lie, as a recording reads them."""
    before = {name: getattr(module, name) for name in _COPIES}
    getattr(module, _COPIER)()
    for name, old in before.items():
        if old is not None:
            old.copy_(getattr(module, name))
            setattr(module, name, old)
