"""One pass of one rank: from the stage before, through this rank's layers, to the stage behind. B places, T rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.checkpoint.contract import AuxHiddenStream, CaptureId, TargetContract
from paceline.distributed import hand_over
from paceline.distributed.mesh import Mesh
from paceline.distributed.sharding import ShardedHead
from paceline.models.hybrid import HybridAttend
from paceline.models.layers import score_rows
from paceline.models.taps import TapCollector
from paceline.models.targets.stage import TargetStage, logit_scale


class StagePass:
    """This rank's part of the target.

    Args:
        mesh: this rank's place.
        contract: of the whole target.
        stage: this rank's part, filled.
    """

    def __init__(self, mesh: Mesh, contract: TargetContract, stage: TargetStage) -> None:
        self._mesh, self.contract, self.stage = mesh, contract, stage
        norm = stage.layers[stage.start].get_submodule("input_layernorm")  # which every stage has
        self._like = norm.get_parameter("weight").new_empty(0)
        self._capture_ids: tuple[CaptureId, ...] = ()
        self._stream: AuxHiddenStream = "prefix"

    def prepare_taps(self, capture_ids: Sequence[CaptureId], stream: AuxHiddenStream) -> None:
        """Set what is tapped, before any pass; errors as for the stage."""
        self.stage.prepare_taps(capture_ids, stream)
        self._capture_ids, self._stream = tuple(capture_ids), stream

    @torch.no_grad()
    def run(
        self, token_ids_BT: Tensor, attend: HybridAttend, positions_BT: Tensor | None = None
    ) -> tuple[Tensor, list[Tensor]] | None:
        """Run the layers; a call that the ranks of all stages make.

        Args:
            token_ids_BT: int64, the same on every rank.
            attend: what this rank keeps for its layers and heads.
            positions_BT: int64; None is from 0 on, as for whole sequences.
        Returns:
            On ranks of the last stage, the output before the final norm and all taps by ascending id; else None.
        """
        stage, taps = self.stage, None
        if positions_BT is None:
            positions_BT = torch.arange(token_ids_BT.shape[1], device=token_ids_BT.device).expand_as(token_ids_BT)
        if self._capture_ids:
            taps = TapCollector(self._capture_ids, self._stream)
        if stage.embed_tokens is not None:
            stream = stage.begin(stage.embed_tokens(token_ids_BT), positions_BT)
        else:
            shape = (token_ids_BT.shape[0], token_ids_BT.shape[1])
            handed = hand_over.receive(
                self.contract, stage.start, self._capture_ids, shape, self._like, self._mesh.previous_rank
            )
            if taps is not None:
                for capture, hidden_BTD in handed.taps.items():
                    taps.observe(capture, hidden_BTD)
            stream = stage.receive(handed, positions_BT)
        stream = stage.run(stream, attend, taps)
        if not stage.is_last:
            hand_over.send(stage.hand_over(stream, taps), self._mesh.next_rank)
            return None
        hidden_BTD = stage.finish(stream, taps)
        return hidden_BTD, [] if taps is None else taps.collected()

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of this rank's ids, [..., D] to [..., I], from the output before the final norm."""
        assert self.stage.norm is not None and self.stage.lm_head is not None
        head, normed = self.stage.lm_head, self.stage.norm(hidden)
        scores = head.own(normed) if isinstance(head, ShardedHead) else score_rows(head, normed)
        scale = logit_scale(self.contract)
        return scores if scale == 1.0 else scores * scale
