"""Kimi-Linear and the text model of Kimi-K3, told apart by config alone.

B requests, T rows, D width, V vocabulary.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from paceline.checkpoint.contract import AuxHiddenStream, CaptureId, TargetContract
from paceline.errors import CompatibilityError
from paceline.models.hybrid import HybridAttend
from paceline.models.layers import Attend, Linear, RMSNorm, score_rows
from paceline.models.taps import TapCollector
from paceline.models.targets.kimi_stage import KimiStage


class KimiTarget(KimiStage):
    """A whole target: delta and latent attention, mixtures of experts, an ordinary residual or attention residuals.

    Args:
        contract: sizes and switches, with `kimi` set.
    """

    supports_eagle3: ClassVar[bool] = True
    # what the class can do; an instance without attention residuals has one stream
    aux_hidden_streams: frozenset[AuxHiddenStream] = frozenset({"prefix", "attn_res"})
    embed_tokens: nn.Embedding
    norm: RMSNorm
    lm_head: Linear

    def __init__(self, contract: TargetContract) -> None:
        super().__init__(contract, 0, contract.num_layers)
        assert contract.kimi is not None
        self.aux_hidden_streams = contract.aux_hidden_streams
        self.logit_scale = contract.kimi.logit_scale
        self.position_table: Tensor
        # no position turns anything; the length of the table is still the number of positions that are served
        self.register_buffer("position_table", torch.empty(contract.max_position_embeddings, 0), persistent=False)

    @property
    def capture_ids(self) -> range:
        """0 is the embedding, `num_layers` the output before the final norm."""
        return range(self.contract.num_layers + 1)

    def default_capture_ids(self) -> tuple[CaptureId, ...]:
        """EAGLE-3's choice: an early, the middle and a late layer boundary."""
        depth = self.contract.num_layers
        return CaptureId(2), CaptureId(depth // 2), CaptureId(depth - 3)

    def forward(
        self,
        token_ids_BT: Tensor,
        positions_BT: Tensor,
        attend: Attend,
        taps: TapCollector | None = None,
        *,
        embeddings_BTD: Tensor | None = None,
    ) -> Tensor:
        """Run every layer.

        Args:
            token_ids_BT: int64.
            positions_BT: not used: order is all that these models know, and the caller's cache has it.
            attend: a `HybridAttend` over whatever the caller keeps.
            taps: receives the residual stream at the wanted layer boundaries; reading changes nothing.
            embeddings_BTD: what stands in place of the tokens' embeddings, where a prompt holds more than text.
        Returns:
            [B, T, D], after the final norm.
        Raises:
            CompatibilityError: the caller keeps no state for delta and latent attention.
        """
        x_BTD = self.embed_tokens(token_ids_BT) if embeddings_BTD is None else embeddings_BTD
        if taps is not None:
            assert taps.stream in self.aux_hidden_streams, f"no stream {taps.stream!r}: ask `require_taps`"
        stream = self.run(self.begin(x_BTD), hybrid(attend), taps)
        hidden_BTD: Tensor = self.norm(self.finish(stream, taps))
        return hidden_BTD

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of every vocabulary id, [..., D] to [..., V], in the model's dtype."""
        scores = score_rows(self.lm_head, hidden)
        return scores if self.logit_scale == 1.0 else scores * self.logit_scale

    def embed(self, token_ids: Tensor) -> Tensor:
        """Raw embedding rows, without any scale."""
        rows: Tensor = self.embed_tokens(token_ids)
        return rows


def hybrid(attend: Attend) -> HybridAttend:
    """The caller's attention, if it serves hybrid targets.

    Raises:
        CompatibilityError: it knows keys and values alone.
    """
    if not isinstance(attend, HybridAttend):
        raise CompatibilityError(
            f"{type(attend).__name__} keeps keys and values alone; a Kimi target has latent rows and recurrent states",
            hint="a caller with `latent` and `delta` (models/hybrid.py)",
        )
    return attend
