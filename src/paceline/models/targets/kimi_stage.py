"""A run of a Kimi target's layers: all of them, or what one stage of a pipeline holds.

What a capture id means, and every number that the target computes, must not depend on where it is cut. So stages hand
over the prefix with everything folded in, rounded once as the next layer would, and the closed blocks untouched; every
mixture is formed by the same operation on either side of a cut; and the tap at a stage's end, whose score vectors are
those of the next stage's first layer, is computed here from a copy of them. The copy is NaN until it is loaded, and
looked at when capture ids are set: a checkpoint without them is refused before anything runs.

Capture id k, the stream after k layers, belongs to the stage that runs layer k - 1; the first stage owns 0 as well.

B requests, T rows, D width, J bank rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paceline.checkpoint.contract import AuxHiddenStream, CaptureId, TargetContract
from paceline.checkpoint.kimi_names import boundary_names
from paceline.errors import CheckpointError
from paceline.models.capabilities import check_capture_ids
from paceline.models.embedding import empty_embedding
from paceline.models.hybrid import HybridAttend
from paceline.models.layers import Linear, RMSNorm
from paceline.models.taps import TapCollector
from paceline.models.targets.kimi_layer import KimiLayer, MixtureScores, ResidualStream, num_closed_blocks
from paceline.models.targets.stage import HandOver, require_layers
from paceline.ops.attention_residual import attention_residual, fold_delta, score_weights, tap_attention_residual


class BoundaryScores(nn.Module):
    """A copy of the score vectors of the layer behind a stage; NaN, whatever is done to the module, until it is set."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.norm: Tensor
        self.proj: Tensor
        for name, shape in (("norm", (hidden_size,)), ("proj", (1, hidden_size))):
            self.register_buffer(name, torch.full(shape, float("nan")), persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        was_meta = self.norm.is_meta
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if was_meta:  # memory that was only allocated may hold numbers
            self.norm.fill_(float("nan"))
            self.proj.fill_(float("nan"))
        return self

    def set(self, norm_D: Tensor, proj_1D: Tensor) -> None:
        """Copy both vectors."""
        self.norm.copy_(norm_D)
        self.proj.copy_(proj_1D)

    def is_set(self) -> bool:
        """Whether every value is a number."""
        return bool(torch.isfinite(self.norm).all() & torch.isfinite(self.proj).all())

    def forward(self) -> Tensor:
        """Their product in float32, [D]."""
        return score_weights(self.norm, self.proj)


class KimiStage(nn.Module):
    """Layers `start` to `end` (half-open) with what stands before the first and behind the last.

    Layers that are elsewhere leave a place without weights, so that a layer has one number and its parameters one name
    at every cut.

    Args:
        contract: of the whole target.
        start: first layer.
        end: behind the last layer.
    Raises:
        ConfigError: there are no such layers.
    """

    def __init__(self, contract: TargetContract, start: int, end: int) -> None:
        super().__init__()
        kimi = contract.kimi
        assert kimi is not None, "the table chooses this class by architecture"
        require_layers(contract, start, end)
        self.contract, self.start, self.end = contract, start, end
        self.block_size = kimi.residual_block_size
        self.embed_tokens = empty_embedding(contract.vocab_size, contract.hidden_size) if start == 0 else None
        self.layers = nn.ModuleList(
            KimiLayer(contract, layer) if start <= layer < end else nn.Identity()
            for layer in range(contract.num_layers)
        )
        self.norm: RMSNorm | None = None
        self.lm_head: Linear | None = None
        self.output_attn_res: MixtureScores | None = None
        self.boundary: BoundaryScores | None = None
        if self.is_last:
            self.norm = RMSNorm(contract.hidden_size, contract.rms_norm_eps)
            self.lm_head = Linear(contract.hidden_size, contract.vocab_size)
            self.output_attn_res = MixtureScores(contract.hidden_size) if self.block_size is not None else None
        elif self.block_size is not None:
            self.boundary = BoundaryScores(contract.hidden_size)
        self._prepared: tuple[tuple[CaptureId, ...], AuxHiddenStream] | None = None

    @property
    def is_last(self) -> bool:
        """Whether the stage ends with the output head."""
        return self.end == self.contract.num_layers

    def prepare_taps(self, capture_ids: Sequence[CaptureId], stream: AuxHiddenStream) -> None:
        """Set which ids of which stream will be tapped, before any forward pass.

        Args:
            capture_ids: of the whole target, the same on every stage.
            stream: that the drafter reads.
        Raises:
            CompatibilityError: the target has no such stream.
            ConfigError: an id is out of range, or ids repeat or descend.
            CheckpointError: the id at this stage's end is tapped, and the two vectors of the next layer were not there.
        """
        check_capture_ids(self.contract, capture_ids, stream)
        is_tapped = stream == "attn_res" and self.end in capture_ids
        if self.boundary is not None and is_tapped and not self.boundary.is_set():
            names = " and ".join(boundary_names(self.contract, self.end))
            raise CheckpointError(
                f"capture id {self.end} is tapped where a stage ends, and the score vectors of the next layer are "
                f"missing: {names}",
                origin={"target": self.contract.origin},
                hint="a checkpoint with these tensors, another cut, or other capture ids",
            )
        self._prepared = (tuple(capture_ids), stream)

    def begin(self, embeddings_BTD: Tensor, positions_BT: Tensor | None = None) -> ResidualStream:
        """The stream before layer 0; order is all that these layers know, and `attend` has it."""
        return ResidualStream(embeddings_BTD, None, self._new_bank(embeddings_BTD))

    def receive(self, handed: HandOver, positions_BT: Tensor | None = None) -> ResidualStream:
        """The stream before this stage's first layer, from what the stage before handed over; positions as there."""
        prefix_BTD, bank_BTJD = handed.prefix_BTD, self._new_bank(handed.prefix_BTD)
        if bank_BTJD is None or self.block_size is None:
            return ResidualStream(prefix_BTD)
        num_closed = num_closed_blocks(self.start, self.block_size)
        assert handed.bank_BTJD is not None and handed.bank_BTJD.shape[-2] == num_closed, "all closed blocks cross"
        bank_BTJD[..., :num_closed, :] = handed.bank_BTJD
        # Within one stage this layer would fold a delta in. Adding zero changes no number, and a kernel that is chosen
        # by whether there is a delta is chosen as it would be there. A layer that opens a block takes none either way.
        is_inside_block = self.start % self.block_size != 0
        return ResidualStream(prefix_BTD, self.entry_delta(prefix_BTD) if is_inside_block else None, bank_BTJD)

    @staticmethod
    def entry_delta(prefix_BTD: Tensor) -> Tensor | None:
        """What a stage that starts inside a block has pending: zeros."""
        return torch.zeros_like(prefix_BTD)

    def run(self, stream: ResidualStream, attend: HybridAttend, taps: TapCollector | None) -> ResidualStream:
        """Run this stage's layers and tap the stream behind each, but for the target's last."""
        if taps is not None:
            is_whole = self.start == 0 and self.is_last
            assert is_whole or self._prepared == (taps.capture_ids, taps.stream), "taps that were not prepared"
            if self.start == 0:
                taps.observe(CaptureId(0), stream.prefix_BTD)
        for layer in range(self.start, self.end):
            stream = self.layers[layer](stream, attend)
            if taps is not None and layer + 1 < self.contract.num_layers and taps.wants(layer + 1):
                taps.observe(layer + 1, self.tapped(stream, layer + 1, taps.stream))
        return stream

    def tapped(self, stream: ResidualStream, capture: int, kind: AuxHiddenStream) -> Tensor:
        """The feature of a capture id below the last: a pure read of the stream in front of layer `capture`."""
        if self.block_size is None:
            return stream.prefix_BTD
        folded_BTD = fold_delta(stream.prefix_BTD, stream.delta_BTD)
        if kind == "prefix":
            return folded_BTD
        return self._mixed_tap(folded_BTD, stream, capture)

    def _mixed_tap(self, folded_BTD: Tensor, stream: ResidualStream, capture: int) -> Tensor:
        """The mixture that layer `capture` would read, without that layer's norm."""
        assert stream.bank_BTJD is not None and self.block_size is not None
        scores_D = self.boundary() if self.boundary is not None and capture == self.end else self._scores(capture)
        num_closed = num_closed_blocks(capture, self.block_size)
        return tap_attention_residual(
            folded_BTD, stream.bank_BTJD, num_closed, scores_D, eps=self.contract.rms_norm_eps
        )

    def hand_over(self, stream: ResidualStream, taps: TapCollector | None) -> HandOver:
        """What the next stage needs of this one."""
        found = {} if taps is None else taps.found()
        return HandOver(fold_delta(stream.prefix_BTD, stream.delta_BTD), stream.bank_BTJD, found)

    def finish(self, stream: ResidualStream, taps: TapCollector | None) -> Tensor:
        """The last stage's output before the final norm, [B, T, D], with the last capture id tapped."""
        last = self.contract.num_layers
        if self.output_attn_res is None or self.block_size is None:
            hidden_BTD = stream.prefix_BTD
        else:
            assert stream.bank_BTJD is not None
            _, hidden_BTD = attention_residual(
                stream.prefix_BTD,
                stream.bank_BTJD,
                num_closed_blocks(last, self.block_size),
                self.output_attn_res(),
                eps=self.contract.rms_norm_eps,
                delta_TD=stream.delta_BTD,
            )
        if taps is not None and taps.wants(last):
            is_output = taps.stream == "attn_res" or self.block_size is None
            taps.observe(last, hidden_BTD if is_output else fold_delta(stream.prefix_BTD, stream.delta_BTD))
        return hidden_BTD

    def _scores(self, layer: int) -> Tensor:
        module = self.layers[layer]
        assert isinstance(module, KimiLayer), "a stage taps no further than its end"
        scores_D: Tensor = module.self_attention_res()
        return scores_D

    def _new_bank(self, prefix_BTD: Tensor) -> Tensor | None:
        if self.block_size is None:
            return None
        num_rows = num_closed_blocks(self.end, self.block_size)
        return prefix_BTD.new_empty(*prefix_BTD.shape[:-1], num_rows, prefix_BTD.shape[-1])
