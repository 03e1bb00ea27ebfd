"""A run of a dense target's layers: all of them, or what one stage of a pipeline holds.

The residual stream is all that crosses a cut; taps of earlier stages travel beside it, untouched. A tied head that sits
on another stage than the embeddings is a copy of the table there.

B requests, T rows, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from paceline.checkpoint.contract import AuxHiddenStream, CaptureId, TargetContract
from paceline.models.capabilities import check_capture_ids
from paceline.models.embedding import empty_embedding
from paceline.models.layers import Attend, DecoderLayer, Linear, RMSNorm, RotaryRows
from paceline.models.positions import position_table
from paceline.models.taps import TapCollector
from paceline.models.targets.stage import HandOver, require_layers
from paceline.ops.rotary import rotary_turns


class DenseStream(NamedTuple):
    """Between two layers: the residual stream, and how far its rows are turned."""

    x_BTD: Tensor
    turns: RotaryRows


class DenseStage(nn.Module):
    """Layers `start` to `end` (half-open) with what stands before the first and behind the last.

    Args:
        contract: sizes and switches; of the whole target, or of one rank's share of each layer.
        start: first layer.
        end: behind the last layer.
        max_positions: rows of the position table; at most the contract's own limit is meaningful.
    Raises:
        ConfigError: there are no such layers.
    """

    def __init__(self, contract: TargetContract, start: int, end: int, *, max_positions: int | None = None) -> None:
        super().__init__()
        require_layers(contract, start, end)
        self.contract, self.start, self.end = contract, start, end
        self._num_positions = max_positions or contract.max_position_embeddings
        self.embed_tokens = empty_embedding(contract.vocab_size, contract.hidden_size) if start == 0 else None
        self.layers = nn.ModuleList(
            decoder_layer(contract) if start <= layer < end else nn.Identity() for layer in range(contract.num_layers)
        )
        self.norm = RMSNorm(contract.hidden_size, contract.rms_norm_eps) if self.is_last else None
        self.lm_head = Linear(contract.hidden_size, contract.vocab_size) if self.is_last else None
        self.position_table: Tensor
        self.register_buffer("position_table", self._turns(), persistent=False)
        self.tie()

    @property
    def is_last(self) -> bool:
        """Whether the stage ends with the output head."""
        return self.end == self.contract.num_layers

    def settle(self, device: torch.device) -> None:
        """Make again what memory that was only allocated does not have: the position table, and a tied head."""
        self.position_table = self._turns().to(device)
        self.tie()

    def tie(self) -> None:
        """Make a tied head the embedding table, where both are here."""
        if self.contract.tie_word_embeddings and self.embed_tokens is not None and self.lm_head is not None:
            self.lm_head.weight = cast(nn.Parameter, self.embed_tokens.weight)

    def prepare_taps(self, capture_ids: Sequence[CaptureId], stream: AuxHiddenStream) -> None:
        """Set which ids of which stream will be tapped, before any forward pass.

        Raises:
            CompatibilityError: the target has no such stream.
            ConfigError: an id is out of range, or ids repeat or descend.
        """
        check_capture_ids(self.contract, capture_ids, stream)

    def begin(self, embeddings_BTD: Tensor, positions_BT: Tensor) -> DenseStream:
        """The stream before layer 0."""
        return DenseStream(embeddings_BTD, rotary_turns(self.position_table, positions_BT, embeddings_BTD.dtype))

    def receive(self, handed: HandOver, positions_BT: Tensor) -> DenseStream:
        """The stream before this stage's first layer, from what the stage before handed over."""
        return self.begin(handed.prefix_BTD, positions_BT)

    def run(self, stream: DenseStream, attend: Attend, taps: TapCollector | None) -> DenseStream:
        """Run this stage's layers and tap the stream behind each."""
        x_BTD, turns = stream
        if taps is not None and self.start == 0:
            taps.observe(CaptureId(0), x_BTD)
        for index, layer in enumerate(self.layers):
            if not self.start <= index < self.end:
                continue
            x_BTD = layer(x_BTD, turns, attend, index)
            if taps is not None:
                taps.observe(CaptureId(index + 1), x_BTD)
        return DenseStream(x_BTD, turns)

    def hand_over(self, stream: DenseStream, taps: TapCollector | None) -> HandOver:
        """What the next stage needs of this one."""
        return HandOver(stream.x_BTD, None, {} if taps is None else taps.found())

    def finish(self, stream: DenseStream, taps: TapCollector | None) -> Tensor:
        """The last stage's output before the final norm, [B, T, D]; the last layer has tapped it."""
        return stream.x_BTD

    def _turns(self) -> Tensor:
        return position_table(self.contract.rope, self.contract.head_size, self._num_positions)


def decoder_layer(contract: TargetContract) -> DecoderLayer:
    """One layer of a dense target."""
    return DecoderLayer(
        hidden_size=contract.hidden_size,
        intermediate_size=contract.intermediate_size,
        num_heads=contract.num_heads,
        num_kv_heads=contract.num_kv_heads,
        head_size=contract.head_size,
        eps=contract.rms_norm_eps,
        attention_bias=contract.attention_bias,
        mlp_bias=contract.mlp_bias,
        qk_norm=contract.has_qk_norm,
    )
