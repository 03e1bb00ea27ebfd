"""Dense decoder targets: the Llama and Qwen3 families, told apart by config alone.

B requests, T tokens, D width, V vocabulary.
"""

from __future__ import annotations

from typing import ClassVar, cast

from torch import Tensor, nn

from paceline.checkpoint.contract import AuxHiddenStream, CaptureId, TargetContract
from paceline.models.fused_layer import FusedLayer, run_fused
from paceline.models.layers import (
    Attend,
    DecoderLayer,
    Linear,
    LinearMode,
    RMSNorm,
    fused_layers,
    score_rows,
)
from paceline.models.positions import position_table
from paceline.models.taps import TapCollector
from paceline.ops.embed_rows import embed_rows
from paceline.ops.paged_attention import PagedAttend
from paceline.ops.rotary import expand_rotary


class DenseTarget(nn.Module):
    """A pre-norm decoder with grouped-query attention and a gated MLP.

    Args:
        contract: sizes and switches (q/k norm, biases, tied head, RoPE).
        max_positions: rows of the position table; at most the contract's own limit is meaningful.
    """

    supports_eagle3: ClassVar[bool] = True
    aux_hidden_streams: ClassVar[frozenset[AuxHiddenStream]] = frozenset({"prefix"})

    def __init__(self, contract: TargetContract, *, max_positions: int | None = None) -> None:
        super().__init__()
        self.contract = contract
        self.embed_tokens = nn.Embedding(contract.vocab_size, contract.hidden_size)
        self.layers = nn.ModuleList(
            DecoderLayer(
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
            for _ in range(contract.num_layers)
        )
        self.norm = RMSNorm(contract.hidden_size, contract.rms_norm_eps)
        self.lm_head = Linear(contract.hidden_size, contract.vocab_size)
        if contract.tie_word_embeddings:
            self.lm_head.weight = cast(nn.Parameter, self.embed_tokens.weight)
        self.position_table: Tensor
        table = position_table(contract.rope, contract.head_size, max_positions or contract.max_position_embeddings)
        self.register_buffer("position_table", table, persistent=False)
        self._fused: list[FusedLayer] = []

    def set_mode(self, mode: LinearMode) -> None:
        """Gather the layers' fused forms; they come before the whole."""
        self._fused = fused_layers(self.layers, mode)

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
        x = self.embed_tokens(token_ids_BT)
        if taps is not None:
            taps.observe(0, x)
        rows = expand_rotary(self.position_table[positions_BT], x.dtype)
        for index, layer in enumerate(self.layers):
            x = layer(x, rows, attend, index)
            if taps is not None:
                taps.observe(index + 1, x)
        hidden: Tensor = self.norm(x)
        return hidden

    def _forward_fused(
        self, token_ids_BT: Tensor, positions_BT: Tensor, attend: PagedAttend, taps: TapCollector | None
    ) -> Tensor:
        embedding_VD, gain_D = self.embed_tokens.weight, self._fused[0].input_gain_D
        rows, turns = embed_rows(
            embedding_VD, token_ids_BT.flatten(), gain_D, self.position_table, positions_BT.flatten()
        )
        x = rows.x_TD.view(*token_ids_BT.shape, -1)
        if taps is not None:
            taps.observe(0, x)
        x = run_fused(self._fused, x, turns, attend, observe=None if taps is None else taps.observe, prepared=rows)
        hidden: Tensor = self.norm(x)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of every vocabulary id, [..., D] to [..., V], in the model's dtype."""
        return score_rows(self.lm_head, hidden)

    def embed(self, token_ids: Tensor) -> Tensor:
        """Raw embedding rows, without any scale."""
        rows: Tensor = self.embed_tokens(token_ids)
        return rows
