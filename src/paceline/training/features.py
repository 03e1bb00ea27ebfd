"""What the frozen target says about a batch, computed on the spot: taps, final states, embeddings, head."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.checkpoint.contract import AuxHiddenStream, TargetLayerId
from paceline.models.attends import WholeSequence
from paceline.models.taps import TapCollector
from paceline.models.targets.dense import DenseTarget
from paceline.training.objective import Features


class TargetFeatures:
    """Runs a frozen target over whole conversations.

    Args:
        target: on its device, in its dtype, in eval mode; never changed.
        layer_ids: tapped layers, ascending.
        stream: which of the target's streams they are read from.
    """

    def __init__(
        self, target: DenseTarget, layer_ids: Sequence[TargetLayerId], stream: AuxHiddenStream = "prefix"
    ) -> None:
        self._target, self._stream = target, stream
        self._layer_ids = tuple(layer_ids)

    @torch.no_grad()
    def __call__(self, token_ids_BS: Tensor) -> Features:
        """Taps and post-norm states of right-padded rows; padding computes, and no block may look at it."""
        taps = TapCollector.of_layers(self._layer_ids, self._stream)
        positions = torch.arange(token_ids_BS.shape[1], device=token_ids_BS.device).expand(token_ids_BS.shape)
        hidden = self._target(token_ids_BS, positions, WholeSequence(), taps)
        return Features(taps.collected(), hidden)

    @torch.no_grad()
    def embed(self, token_ids: Tensor) -> Tensor:
        """Raw embedding rows."""
        return self._target.embed(token_ids)

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of every vocabulary id."""
        return self._target.logits(hidden)

    @property
    def head_VD(self) -> Tensor:
        """The output head, frozen."""
        return self._target.lm_head.weight.detach()
