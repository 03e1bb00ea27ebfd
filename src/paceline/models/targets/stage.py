"""What a pipeline and its ranks need of a run of a target's layers, whatever the target's family.

Capture id k, the stream after k layers, belongs to the stage that runs layer k - 1; the first stage owns 0 as well.
B requests, T rows, D width, J bank rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from paceline.checkpoint.contract import AuxHiddenStream, CaptureId, TargetContract
from paceline.errors import ConfigError
from paceline.models.hybrid import HybridAttend
from paceline.models.layers import Linear, RMSNorm
from paceline.models.taps import TapCollector


@dataclass(frozen=True)
class HandOver:
    """What crosses from one stage to the next.

    Attributes:
        prefix_BTD: with nothing pending.
        bank_BTJD: closed blocks, all of them written; None with an ordinary residual.
        taps: of all stages so far, by capture id.
    """

    prefix_BTD: Tensor
    bank_BTJD: Tensor | None
    taps: Mapping[CaptureId, Tensor]


class TargetStage(Protocol):
    """Layers `start` to `end` (half-open) with what stands before the first and behind the last.

    Layers that are elsewhere leave a place without weights, so that a layer has one number and its parameters one name
    at every cut. Every implementation is an `nn.Module` as well. What `begin` and `receive` give is the family's own.
    """

    contract: TargetContract
    start: int
    end: int

    @property
    def is_last(self) -> bool:
        """Whether the stage ends with the output head."""
        ...

    @property
    def embed_tokens(self) -> nn.Embedding | None:
        """The input table, on the first stage."""
        ...

    @property
    def layers(self) -> nn.ModuleList:
        """Places of all layers."""
        ...

    @property
    def norm(self) -> RMSNorm | None:
        """The final norm, on the last stage."""
        ...

    @property
    def lm_head(self) -> Linear | None:
        """The output head, on the last stage."""
        ...

    def prepare_taps(self, capture_ids: Sequence[CaptureId], stream: AuxHiddenStream) -> None:
        """Set which ids of which stream will be tapped, before any forward pass."""
        ...

    def begin(self, embeddings_BTD: Tensor, positions_BT: Tensor) -> Any:
        """The stream before layer 0."""
        ...

    def receive(self, handed: HandOver, positions_BT: Tensor) -> Any:
        """The stream before this stage's first layer, from what the stage before handed over."""
        ...

    def run(self, stream: Any, attend: HybridAttend, taps: TapCollector | None) -> Any:
        """Run this stage's layers, and tap the stream between them."""
        ...

    def hand_over(self, stream: Any, taps: TapCollector | None) -> HandOver:
        """What the next stage needs of this one."""
        ...

    def finish(self, stream: Any, taps: TapCollector | None) -> Tensor:
        """The last stage's output before the final norm, [B, T, D], with the last capture id tapped."""
        ...

    def modules(self) -> Iterator[nn.Module]:
        """Itself and every part."""
        ...


def require_layers(contract: TargetContract, start: int, end: int) -> None:
    """Refuse a stage of layers that a target does not have.

    Raises:
        ConfigError: says which it has.
    """
    if not 0 <= start < end <= contract.num_layers:
        raise ConfigError(
            f"a stage of layers {start} to {end - 1} was asked for; the target has layers 0 to "
            f"{contract.num_layers - 1}, and a stage at least one",
            origin={"target": contract.origin},
        )


def logit_scale(contract: TargetContract) -> float:
    """What the head's scores are multiplied by."""
    return 1.0 if contract.kimi is None else contract.kimi.logit_scale
