"""Taps: reading a target's residual stream at chosen layers while it runs, without touching it.

`TargetLayerId` and `CaptureId` are two numberings of the same places; see `checkpoint/contract.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from paceline.checkpoint.contract import AuxHiddenStream, CaptureId, TargetLayerId, capture_id, target_layer_id

__all__ = ["CaptureId", "TapCollector", "TargetLayerId", "capture_id", "target_layer_id"]


class TapCollector:
    """Keeps the hidden states of the requested capture ids of one forward pass.

    A tap is a pure read: the model hands over the tensor that it goes on with, or computes one aside from its own
    stream, so logits are bit-identical with and without a collector.

    Args:
        capture_ids: strictly increasing; 0 is the embedding, `num_layers` the last layer's output before the final
            norm.
        stream: which of its streams a target with several hands over; a target that lacks it must not be run.
    """

    def __init__(self, capture_ids: Sequence[CaptureId], stream: AuxHiddenStream = "prefix") -> None:
        assert list(capture_ids) == sorted(set(capture_ids)), f"capture ids must strictly increase, got {capture_ids}"
        self.capture_ids = tuple(capture_ids)
        self.stream = stream
        self._wanted = frozenset(capture_ids)
        self._hidden: dict[CaptureId, Tensor] = {}

    @classmethod
    def of_layers(cls, layer_ids: Iterable[TargetLayerId], stream: AuxHiddenStream = "prefix") -> TapCollector:
        """A collector for layer outputs, given by zero-based layer id."""
        return cls([capture_id(layer) for layer in layer_ids], stream)

    def wants(self, capture: int) -> bool:
        """Whether an id was asked for: a model that would have to compute its tap asks first."""
        return capture in self._wanted

    def observe(self, capture: int, hidden_BTD: Tensor) -> None:
        """Called by the model at every capture point; keeps the state if it was asked for."""
        if capture in self._wanted:
            self._hidden[CaptureId(capture)] = hidden_BTD

    def found(self) -> dict[CaptureId, Tensor]:
        """What was observed so far, by capture id: what a stage of a pipeline hands on."""
        return dict(self._hidden)

    def collected(self) -> list[Tensor]:
        """The taps in ascending order, each [B, T, D]; every requested id must have been observed."""
        missing = [capture for capture in self.capture_ids if capture not in self._hidden]
        assert not missing, f"the target never reached capture ids {missing}"
        return [self._hidden[capture] for capture in self.capture_ids]

    def concatenated(self) -> Tensor:
        """All taps joined on the feature axis, [B, T, num_taps * D]."""
        return torch.cat(self.collected(), dim=-1)
