"""What the frozen target says about a batch, computed on the spot: taps, final states, embeddings, head."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.checkpoint.contract import AuxHiddenStream, TargetLayerId
from paceline.models.sequence_attend import sequence_attend
from paceline.models.taps import TapCollector
from paceline.models.targets.target import Target
from paceline.training.compiling import CompiledLayers
from paceline.training.data import Batch
from paceline.training.objective import Features


class TargetFeatures:
    """Runs a frozen target over whole conversations.

    Args:
        target: on its device, in its dtype, in eval mode; never changed.
        layer_ids: tapped layers, ascending.
        stream: which of the target's streams they are read from.
        is_compiled: run the target's layers through torch.compile.
    """

    def __init__(
        self,
        target: Target,
        layer_ids: Sequence[TargetLayerId],
        stream: AuxHiddenStream = "prefix",
        *,
        is_compiled: bool = False,
    ) -> None:
        self._target, self._stream = target, stream
        self._layers = CompiledLayers(target) if is_compiled else contextlib.nullcontext()
        self._layer_ids = tuple(layer_ids)

    @torch.no_grad()
    def __call__(self, batch: Batch) -> Features:
        """Taps and post-norm states of right-padded rows; padding computes, and no block may look at it."""
        taps = TapCollector.of_layers(self._layer_ids, self._stream)
        attend = sequence_attend(self._target, batch.documents_BS if batch.is_packed else None)
        # As it serves: inside the drafter's mixed precision a target's own float32 parts would lose theirs.
        with torch.autocast(batch.token_ids_BS.device.type, enabled=False), self._layers:
            hidden = self._target(batch.token_ids_BS, batch.positions_BS, attend, taps)
        return Features(taps.collected(), hidden)

    @property
    def has_hidden(self) -> bool:
        """Whether the last states that it gives are numbers; a folder may hold taps alone."""
        return True

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
