"""A target that is spread over ranks, as the decider's drafter sees it: both ends whole, and layers that can be asked.

The decider has embedding table and output head beside its own layers: the drafter runs on that rank alone, so whether
it shares the target's tables is settled once, against all of their rows. While the drafter is loaded, its fingerprint
is replayed: the decider asks all ranks to run a text, and they answer until it has no further question.

B requests, T rows, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn

from paceline.checkpoint.contract import AuxHiddenStream, CaptureId, TargetContract
from paceline.distributed.mesh import Mesh
from paceline.distributed.sharded_weights import load_table
from paceline.distributed.stage_pass import StagePass
from paceline.models.attends import WholeSequence
from paceline.models.layers import Attend, Linear, LinearMode, RMSNorm, score_rows
from paceline.models.taps import TapCollector
from paceline.models.targets.stage import logit_scale

Ask = Callable[[Tensor, TapCollector], Tensor]


class TargetEnds(nn.Module):
    """A target without its layers.

    Args:
        contract: of the whole target.
        embedding_VD: the table.
        head: the output head.
        norm: the final norm.
        ask: runs the layers wherever they are, over whole sequences; gives the output before the final norm.
    """

    supports_eagle3: ClassVar[bool] = True

    def __init__(self, contract: TargetContract, embedding_VD: Tensor, head: Linear, norm: RMSNorm, ask: Ask) -> None:
        super().__init__()
        self.contract, self.logit_scale = contract, logit_scale(contract)
        self.aux_hidden_streams: frozenset[AuxHiddenStream] = contract.aux_hidden_streams
        self.embed_tokens = nn.Embedding.from_pretrained(embedding_VD)
        self.lm_head, self.norm, self._ask = head, norm, ask

    @property
    def capture_ids(self) -> range:
        """Those of the target."""
        return range(self.contract.num_layers + 1)

    def default_capture_ids(self) -> tuple[CaptureId, ...]:
        """Those of the target."""
        depth = self.contract.num_layers
        return CaptureId(2), CaptureId(depth // 2), CaptureId(depth - 3)

    def forward(
        self, token_ids_BT: Tensor, positions_BT: Tensor, attend: Attend, taps: TapCollector | None = None
    ) -> Tensor:
        """Run a text on all ranks, [B, T, D] after the final norm; whoever else listens must be answering."""
        assert isinstance(attend, WholeSequence) and taps is not None, "what a fingerprint is replayed with"
        normed: Tensor = self.norm(self._ask(token_ids_BT, taps))
        return normed

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of every vocabulary id, [..., D] to [..., V]."""
        scores = score_rows(self.lm_head, hidden)
        return scores if self.logit_scale == 1.0 else scores * self.logit_scale

    def embed(self, token_ids: Tensor) -> Tensor:
        """Raw embedding rows."""
        rows: Tensor = self.embed_tokens(token_ids)
        return rows


def load_ends(contract: TargetContract, path: Path, mesh: Mesh, stage_pass: StagePass, mode: LinearMode) -> TargetEnds:
    """The decider's ends: its stage's own where these are whole, and read again where they are not.

    Args:
        contract: of the whole target.
        path: its folder.
        mesh: this rank's place, the decider's.
        stage_pass: this rank's layers.
        mode: arithmetic of the stage.
    """
    stage = stage_pass.stage
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

    def ask(token_ids_BT: Tensor, taps: TapCollector) -> Tensor:
        mesh.world.given_by(mesh.decider, (token_ids_BT.cpu(), taps))
        return _answer(stage_pass, token_ids_BT, taps)

    return TargetEnds(contract, embedding_VD, head, stage.norm, ask).eval()


@contextmanager
def others_answering(mesh: Mesh) -> Iterator[None]:
    """The decider's side: inside, its `TargetEnds` may be asked; all other ranks are in `answer`."""
    try:
        yield
    finally:
        mesh.world.given_by(mesh.decider, None)


def answer(mesh: Mesh, stage_pass: StagePass, device: torch.device) -> None:
    """Every other rank's side: run what the decider asks for, until it is done."""
    asked: tuple[Tensor, TapCollector] | None
    while (asked := mesh.world.given_by(mesh.decider, None)) is not None:
        token_ids_BT, taps = asked
        _answer(stage_pass, token_ids_BT.to(device), taps)


def _answer(stage_pass: StagePass, token_ids_BT: Tensor, taps: TapCollector) -> Tensor:
    """One run over whole sequences; on the decider, the taps end in its collector."""
    stage_pass.prepare_taps(taps.capture_ids, taps.stream)
    found = stage_pass.run(token_ids_BT, WholeSequence())
    if found is None:
        return token_ids_BT
    hidden_BTD, collected = found
    for capture, tap_BTD in zip(taps.capture_ids, collected, strict=True):
        taps.observe(capture, tap_BTD)
    return hidden_BTD
