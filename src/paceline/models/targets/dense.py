"""Dense decoder targets: the Llama and Qwen3 families, told apart by config alone.

B requests, T tokens, D width, V vocabulary.
"""

from __future__ import annotations

from typing import ClassVar, Final

from torch import Tensor, nn

from paceline.checkpoint.contract import AuxHiddenStream, CaptureId, TargetContract
from paceline.models.fused_layer import FusedLayer, run_fused
from paceline.models.layers import (
    NATIVE_MODES,
    Attend,
    Linear,
    LinearMode,
    RMSNorm,
    fused_layers,
    native_calls,
    score_rows,
)
from paceline.models.taps import TapCollector
from paceline.models.targets.dense_stage import DenseStage, DenseStream
from paceline.ops.embed_rows import embed_rows, gather_rows
from paceline.ops.native.attention import InLayer
from paceline.ops.native.layer import LayersCall
from paceline.ops.paged_attention import PagedAttend
from paceline.ops.skinny_product import ScaledRows

MOST_ROWS_IN_ONE_CALL: Final = 64  # it keeps the stream behind every layer


class DenseTarget(DenseStage):
    """A pre-norm decoder with grouped-query attention and a gated MLP.

    Args:
        contract: sizes and switches (q/k norm, biases, tied head, RoPE).
        max_positions: rows of the position table; at most the contract's own limit is meaningful.
    """

    supports_eagle3: ClassVar[bool] = True
    aux_hidden_streams: ClassVar[frozenset[AuxHiddenStream]] = frozenset({"prefix"})
    embed_tokens: nn.Embedding
    norm: RMSNorm
    lm_head: Linear

    def __init__(self, contract: TargetContract, *, max_positions: int | None = None) -> None:
        super().__init__(contract, 0, contract.num_layers, max_positions=max_positions)
        self._fused: list[FusedLayer] = []
        self._native: LayersCall | None = None

    def set_mode(self, mode: LinearMode) -> None:
        """Gather the layers' fused or native forms; they come before the whole."""
        self._fused = fused_layers(self.layers, mode)
        calls = native_calls(self.layers) if mode in NATIVE_MODES else []
        self._native = LayersCall(calls) if calls else None

    @property
    def capture_ids(self) -> range:
        """0 is the embedding, `num_layers` the last layer's output before the final norm."""
        return range(len(self.layers) + 1)

    def default_capture_ids(self) -> tuple[CaptureId, ...]:
        """EAGLE-3's choice: an early, the middle and a late layer boundary."""
        depth = len(self.layers)
        return CaptureId(2), CaptureId(depth // 2), CaptureId(depth - 3)

    def forward(
        self, token_ids_BT: Tensor, positions_BT: Tensor, attend: Attend, taps: TapCollector | None = None
    ) -> Tensor:
        """Run every layer.

        Args:
            token_ids_BT: int64.
            positions_BT: int64, absolute, below the table's length.
            attend: attention over whatever the caller keeps.
            taps: receives the residual stream at every layer boundary; reading changes nothing.
        Returns:
            [B, T, D], after the final norm.
        """
        if taps is not None:
            assert taps.stream in self.aux_hidden_streams, f"no stream {taps.stream!r}: ask `require_taps`"
        if self._fused and isinstance(attend, PagedAttend):
            return self._forward_fused(token_ids_BT, positions_BT, attend, taps)
        stream = self.run(self.begin(self.embed_tokens(token_ids_BT), positions_BT), attend, taps)
        hidden: Tensor = self.norm(self.finish(stream, taps))
        return hidden

    def run(self, stream: DenseStream, attend: Attend, taps: TapCollector | None) -> DenseStream:
        """Run the layers, few rows in one native call where they have one."""
        native, x_BTD = self._native, stream.x_BTD
        is_small = x_BTD.shape[0] * x_BTD.shape[1] <= MOST_ROWS_IN_ONE_CALL
        key_stride = attend.key_stride() if native is not None and is_small and isinstance(attend, InLayer) else None
        # Whoever changed or wrapped a layer since wants to see it run.
        if key_stride is None or native is None or native_calls(self.layers) != list(native.calls):
            return super().run(stream, attend, taps)
        assert isinstance(attend, InLayer), "it has a stride"
        y = native(x_BTD, stream.turns, attend, key_stride).unbind(0)
        if taps is not None:
            for capture, tapped in enumerate((x_BTD, *y)):
                taps.observe(CaptureId(capture), tapped)
        return DenseStream(y[-1], stream.turns)

    def _forward_fused(
        self, token_ids_BT: Tensor, positions_BT: Tensor, attend: PagedAttend, taps: TapCollector | None
    ) -> Tensor:
        rows: ScaledRows | None = None
        if type(self.embed_tokens) is nn.Embedding:
            embedding_VD, gain_D = self.embed_tokens.weight, self._fused[0].input_gain_D
            rows, turns = embed_rows(
                embedding_VD, token_ids_BT.flatten(), gain_D, self.position_table, positions_BT.flatten()
            )
            x = rows.x_TD.view(*token_ids_BT.shape, -1)
        else:  # rows of the table that others have
            x, turns = self.embed_tokens(token_ids_BT), self.position_table[positions_BT.flatten()]
        if taps is not None:
            taps.observe(0, x)
        observe, is_kept = (None, None) if taps is None else (taps.observe, taps.wants)
        x = run_fused(self._fused, x, turns, attend, observe=observe, is_kept=is_kept, prepared=rows)
        hidden: Tensor = self.norm(x)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of every vocabulary id, [..., D] to [..., V], in the model's dtype."""
        return score_rows(self.lm_head, hidden)

    def embed(self, token_ids: Tensor) -> Tensor:
        """Raw embedding rows, without any scale."""
        if self._fused and type(self.embed_tokens) is nn.Embedding:  # ranks that share the table add up rows
            return gather_rows(self.embed_tokens.weight, token_ids)
        rows: Tensor = self.embed_tokens(token_ids)
        return rows
