"""Compiling what a training step runs most: the layers of the frozen target."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from paceline.models.targets.target import Target


class CompiledLayers:
    """While it is entered, the layers of a target run through torch.compile; again and again, once at a time.

    One compilation serves all layers, since they differ in their weights alone, and every batch shape. Outside they
    are what serving runs: what is recorded of a target, such as a drafter's fingerprint, must not come from others.

    Args:
        model: frozen.
        backend: of torch.compile, by name or itself.
    """

    def __init__(self, model: Target, *, backend: str | Callable[..., Any] = "inductor") -> None:
        self._layers: list[Any] = list(model.layers)
        self._compiled = [torch.compile(layer.forward, dynamic=True, backend=backend) for layer in self._layers]

    def __enter__(self) -> None:
        for layer, compiled in zip(self._layers, self._compiled, strict=True):
            layer.forward = compiled

    def __exit__(self, *_: object) -> None:
        for layer in self._layers:
            del layer.forward  # the class's own is seen again
