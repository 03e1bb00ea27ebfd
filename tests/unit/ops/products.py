"""What the tests of the fused products share: shapes, cuts, and how close a kernel must come."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.ops.skinny_tile import Tile

DTYPES = [torch.float32, torch.bfloat16]
# Rows and cuts: one part and several, parts without inputs, blocks that do and do not divide the width, slices,
# held weights in one piece and in two.
CUTS = [
    (1, Tile(32, 16)),
    (3, Tile(32, 32, 2)),
    (16, Tile(32, 16, 5)),
    (17, Tile(32, 16, 8)),
    (64, Tile(64, 32, 3)),
    (1, Tile(32, 64, slices=4)),
    (3, Tile(32, 32, 2, slices=2)),
    (16, Tile(32, 64, 3, slices=4)),
    (1, Tile(32, 64, slices=2, is_held=True)),
    (3, Tile(32, 16, slices=4, is_held=True)),
]


def random(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    """Normal numbers."""
    return (torch.randn(*shape) * scale).to(dtype)


def assert_close(found: Tensor, expected: Tensor, *, is_interpreted: bool, roundings: int = 1) -> None:
    """Float32 sums in another order, or `roundings` to bf16; the interpreter cuts where a GPU rounds."""
    assert found.dtype == expected.dtype and found.shape == expected.shape
    unit = 2e-5 if expected.dtype == torch.float32 else roundings * (2**-7 if is_interpreted else 2**-8)
    wide = expected.float()
    torch.testing.assert_close(found.cpu().float(), wide, rtol=unit, atol=unit * float(wide.abs().max()))
