"""Overwrites the random weights of a vLLM engine, from inside its worker."""

from __future__ import annotations

from typing import Any

from benchmarks.random_weights import Weights, fill


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
    return [f"{type(model).__name__} of {sum(one.numel() for one in model.parameters())}" for model in models]
