"""What a drafter needs of a target that is spread over ranks: its embedding table and its output head, whole.

The decider has them beside its own layers: the drafter runs on that rank alone, so whether it shares the target's
tables is settled once, against all of their rows. B requests, T rows, D width, V vocabulary.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn

from paceline.checkpoint.contract import AuxHiddenStream, CaptureId, TargetContract
from paceline.distributed.mesh import Mesh
from paceline.distributed.sharded_weights import load_table
from paceline.models.layers import Linear, LinearMode, RMSNorm, score_rows
from paceline.models.targets.kimi_stage import KimiStage


class TargetEnds(nn.Module):
    """A target without its layers, which is all of it that lends something.

    Args:
        contract: of the whole target.
        embedding_VD: the table.
        head: the output head.
        norm: the final norm.
    """

    supports_eagle3: ClassVar[bool] = True

    def __init__(self, contract: TargetContract, embedding_VD: Tensor, head: Linear, norm: RMSNorm) -> None:
        super().__init__()
        assert contract.kimi is not None
        self.contract, self.logit_scale = contract, contract.kimi.logit_scale
        self.aux_hidden_streams: frozenset[AuxHiddenStream] = contract.aux_hidden_streams
        self.embed_tokens = nn.Embedding.from_pretrained(embedding_VD)
        self.lm_head, self.norm = head, norm

    @property
    def capture_ids(self) -> range:
        """Those of the target."""
        return range(self.contract.num_layers + 1)

    def default_capture_ids(self) -> tuple[CaptureId, ...]:
        """Those of the target."""
        depth = self.contract.num_layers
        return CaptureId(2), CaptureId(depth // 2), CaptureId(depth - 3)

    def forward(self, token_ids_BT: Tensor) -> Tensor:
        """Its layers are elsewhere."""
        raise AssertionError("a target that is spread over ranks is run by all of them")

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of every vocabulary id, [..., D] to [..., V]."""
        scores = score_rows(self.lm_head, hidden)
        return scores if self.logit_scale == 1.0 else scores * self.logit_scale

    def embed(self, token_ids: Tensor) -> Tensor:
        """Raw embedding rows."""
        rows: Tensor = self.embed_tokens(token_ids)
        return rows


def load_ends(contract: TargetContract, path: Path, mesh: Mesh, stage: KimiStage, mode: LinearMode) -> TargetEnds:
    """The decider's ends: its stage's own where these are whole, and read again where they are not.

    Args:
        contract: of the whole target.
        path: its folder.
        mesh: this rank's place, the decider's.
        stage: this rank's layers.
        mode: arithmetic of the stage.
    """
    assert stage.norm is not None and stage.lm_head is not None, "the decider runs the last stage"
    is_whole, weight = mesh.tensor.size == 1, stage.norm.weight
    if is_whole and stage.embed_tokens is not None:
        embedding_VD: Tensor = stage.embed_tokens.weight.detach()
    else:
        embedding_VD = load_table(contract, path, "embed_tokens.weight", like=weight)
    head = stage.lm_head
    if not is_whole:
        with torch.device("meta"):
            head = Linear(contract.hidden_size, contract.vocab_size)
        table_VD = load_table(contract, path, "lm_head.weight", like=weight)
        head.weight = nn.Parameter(table_VD, requires_grad=False)
        head.set_mode(mode)
    return TargetEnds(contract, embedding_VD, head, stage.norm).eval()
