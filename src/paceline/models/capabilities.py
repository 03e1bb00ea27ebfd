"""What a target class can do for a drafter, declared by the class and checked against its machinery."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Protocol, runtime_checkable

from paceline.checkpoint.contract import AuxHiddenStream, CaptureId, TargetContract
from paceline.errors import CompatibilityError, ConfigError


@runtime_checkable
class SupportsEagle3(Protocol):
    """A target whose residual stream can be tapped at any layer boundary during its forward pass.

    The name is the field's: EAGLE-3 introduced the interface, and every hidden-state drafter uses it.
    """

    supports_eagle3: ClassVar[bool]

    @property
    def aux_hidden_streams(self) -> frozenset[AuxHiddenStream]:
        """Which of its streams can be tapped: of a class, what any of its instances can offer."""
        ...

    @property
    def capture_ids(self) -> range:
        """Every id that can be tapped, from 0 (embedding) to the number of layers."""
        ...

    def default_capture_ids(self) -> tuple[CaptureId, ...]:
        """The ids that EAGLE-3 uses where a drafter names none."""
        ...


_MACHINERY = ("capture_ids", "default_capture_ids", "aux_hidden_streams", "forward")


def supports_eagle3(model: object) -> bool:
    """Whether a target class or instance both declares the capability and has what it takes."""
    return getattr(model, "supports_eagle3", False) is True and all(hasattr(model, name) for name in _MACHINERY)


def require_taps(model: object, stream: AuxHiddenStream) -> None:
    """Refuse a target that cannot be tapped, or not in the stream that the drafter was trained on.

    Raises:
        CompatibilityError: names the class and what to do.
    """
    name = model.__name__ if isinstance(model, type) else type(model).__name__
    if not supports_eagle3(model):
        raise CompatibilityError(
            f"Model does not support EAGLE3 interface: {name} offers no taps of its hidden states",
            hint="a target class that sets `supports_eagle3 = True` and feeds a TapCollector, or run without a drafter",
        )
    available: frozenset[str] = getattr(model, "aux_hidden_streams", frozenset())
    if stream not in available:
        raise CompatibilityError(
            f"the drafter reads the {stream!r} stream; {name} offers {sorted(available)}",
            hint="the target that the drafter's config names",
        )


def check_capture_ids(contract: TargetContract, capture_ids: Sequence[CaptureId], stream: AuxHiddenStream) -> None:
    """Refuse taps that a target does not have, before any forward pass.

    Args:
        contract: of the target.
        capture_ids: 0 to the number of layers, strictly increasing.
        stream: that they are read from.
    Raises:
        CompatibilityError: the target has no such stream.
        ConfigError: an id is out of range, or ids repeat or descend.
    """
    if stream not in contract.aux_hidden_streams:
        raise CompatibilityError(
            f"the stream {stream!r} was asked for; this {contract.architecture} has "
            f"{' and '.join(sorted(contract.aux_hidden_streams))}",
            origin={"target": contract.origin},
            hint="a target with attention residuals (attn_res_block_size), or the stream 'prefix'",
        )
    ids = list(capture_ids)
    if ids != sorted(set(ids)) or not all(0 <= capture <= contract.num_layers for capture in ids):
        raise ConfigError(
            f"capture ids {ids} were asked for; legal are 0 (the embedding) to {contract.num_layers}, each once and in "
            "ascending order",
            origin={"target": contract.origin},
        )
