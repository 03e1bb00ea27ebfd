"""What the engine, capture, training and evaluation need of a target, whatever its family.

A target computes; where keys, rows and states live is the business of whoever runs it, and reaches the target as its
`attend` argument (`layers.Attend`, and `hybrid.HybridAttend` where a target has more than keys and values).

B requests, T tokens, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Protocol

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from paceline.checkpoint.contract import AuxHiddenStream, CaptureId, TargetContract
from paceline.models.layers import Attend, Linear, RMSNorm
from paceline.models.taps import TapCollector


class Target(Protocol):
    """A decoder whose residual stream can be tapped; every implementation is an `nn.Module` as well."""

    supports_eagle3: ClassVar[bool]

    @property
    def aux_hidden_streams(self) -> frozenset[AuxHiddenStream]:
        """The streams that a tap may read."""
        ...

    @property
    def contract(self) -> TargetContract:
        """What its files promise."""
        ...

    @property
    def embed_tokens(self) -> nn.Embedding:
        """The input table, which drafters may share."""
        ...

    @property
    def layers(self) -> nn.ModuleList:
        """Decoder layers, in order."""
        ...

    @property
    def norm(self) -> RMSNorm:
        """The final norm. Its gain's dtype and device are the model's."""
        ...

    @property
    def lm_head(self) -> Linear:
        """The output head, which drafters may share; `logits` may do more than multiply with it."""
        ...

    @property
    def position_table(self) -> Tensor:
        """One row per position that can be served; of no width where a target has no positions."""
        ...

    @property
    def capture_ids(self) -> range:
        """Every id that can be tapped, from 0 (embedding) to the number of layers."""
        ...

    def default_capture_ids(self) -> tuple[CaptureId, ...]:
        """The ids that EAGLE-3 uses where a drafter names none."""
        ...

    def __call__(
        self, token_ids_BT: Tensor, positions_BT: Tensor, attend: Attend, taps: TapCollector | None = None
    ) -> Tensor:
        """Run every layer; [B, T, D] after the final norm."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of every vocabulary id, [..., D] to [..., V]."""
        ...

    def embed(self, token_ids: Tensor) -> Tensor:
        """Embedding rows as layer 0 reads them."""
        ...

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Every weight by name."""
        ...

    def parameters(self) -> Iterator[nn.Parameter]:
        """Every weight."""
        ...

    def modules(self) -> Iterator[nn.Module]:
        """Itself and every part."""
        ...

    def register_forward_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Call something behind every pass."""
        ...
