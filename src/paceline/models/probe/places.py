"""The places of a target where a tap can be read, and the states of a short text at all of them.

P probe tokens, C compared positions, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.checkpoint.contract import AuxHiddenStream, CaptureId, target_layer_id
from paceline.models.attends import WholeSequence
from paceline.models.taps import TapCollector
from paceline.models.targets.target import Target


@dataclass(frozen=True, order=True)
class Place:
    """Where a tap is read.

    Attributes:
        stream: of the target.
        capture: 0 is the embedding.
        is_normed: whether the target's final norm was applied to it.
    """

    stream: AuxHiddenStream
    capture: CaptureId
    is_normed: bool = False

    def __str__(self) -> str:
        layer = target_layer_id(self.capture)
        name = "layer -1 (the embedding)" if layer < 0 else f"layer {layer}"
        return f"{name} after the final norm" if self.is_normed else name


def states_of_text(
    target: Target, token_ids: Sequence[int], positions: slice, streams: Sequence[AuxHiddenStream]
) -> dict[Place, Tensor]:
    """Hidden states of a text at every place that a drafter could have been trained on.

    Args:
        target: frozen.
        token_ids: the whole text.
        positions: which of its positions are wanted.
        streams: of those that the target offers.
    Returns:
        [C, D] per place: every layer boundary of every stream, and the last one behind the final norm, which is what
        some libraries give as the last hidden state.
    """
    device = target.norm.weight.device
    ids_1P = torch.tensor([list(token_ids)], device=device)
    positions_1P = torch.arange(len(token_ids), device=device).unsqueeze(0)
    states: dict[Place, Tensor] = {}
    for stream in streams:
        taps = TapCollector([CaptureId(capture) for capture in target.capture_ids], stream=stream)
        target(ids_1P, positions_1P, WholeSequence(), taps)
        for capture, state in zip(taps.capture_ids, taps.collected(), strict=True):
            states[Place(stream, capture)] = state[0, positions]
        last = taps.capture_ids[-1]
        states[Place(stream, last, is_normed=True)] = target.norm(states[Place(stream, last)])
    return states
