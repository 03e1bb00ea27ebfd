"""How `sanitize` compares a kernel with its definition.

Both get copies of their own, each tensor with the strides it has and no memory beside its cells, so that a read past an
end leaves the allocation. What they return and what they change is compared. The definition runs on the CPU: a checker
that slows every launch down has only kernels to look at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

Found = list[tuple[str, float, float]]  # what was compared, its error, what is allowed
Case = tuple[str, Callable[[], Found]]
WIDE = 2e-5  # float32 sums in another order


def max_error(found: Tensor, expected: Tensor) -> float:
    """|found - expected| / |expected|; infinite where NaN, infinity, integers, shape or dtype differ."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return float("inf")
    if not found.is_floating_point():
        return 0.0 if bool((found == expected).all()) else float("inf")
    is_number = expected.isfinite()
    if not bool((found.isfinite() == is_number).all()):
        return float("inf")
    wide, wanted = found[is_number].double(), expected[is_number].double()
    return float((wide - wanted).norm() / wanted.norm().clamp(min=1e-30)) if wanted.numel() else 0.0


def dtypes(device: torch.device, *, multiplies: bool = False) -> list[tuple[torch.dtype, float]]:
    """Dtypes and what is allowed in them; where Triton interprets, slowly, matrices of bf16 would be multiplied as if
    they were integers, and one dtype has to do.
    """
    if device.type == "cpu":
        return [(torch.float32, WIDE)] if multiplies else [(torch.bfloat16, 1e-2)]
    return [(torch.float32, WIDE), (torch.bfloat16, 1e-2)]


def compared(
    reference: Callable[..., object], kernel: Callable[..., object], arguments: tuple[object, ...], allowed: float
) -> Found:
    """Run both on copies of their own, and compare results and changed arguments."""
    given = [_copied(arguments, torch.device("cpu")), _copied(arguments)]
    expected, found = (run(*own) for run, own in zip((reference, kernel), given, strict=True))
    pairs = [(expected, found), (given[0], given[1])]
    errors = [
        max_error(theirs.cpu(), ours) for pair in pairs for ours, theirs in zip(*map(_tensors, pair), strict=True)
    ]
    return [("", max(errors), allowed)]


def _copied(value: Any, device: torch.device | None = None) -> Any:
    """The same structure with tensors of the same strides in memory of their own, here or on another device."""
    if isinstance(value, Tensor):
        with torch.no_grad():
            where = value.device if device is None else device
            own = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=where)
            return own.copy_(value)
    if isinstance(value, tuple):
        parts = [_copied(part, device) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value


def _tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _tensors(part)


def random(device: torch.device, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, device=device).to(dtype)
