"""MXFP4: worked bytes, every byte and scale against a slow reading of the format, exactness, what is refused."""

from __future__ import annotations

import math

import pytest
import torch

from paceline.errors import ShapeError
from paceline.ops.mxfp4 import dequantise_mxfp4


def slow_nibble(nibble: int) -> float:
    """Sign, two bits of exponent with bias 1, one bit of mantissa."""
    sign, exponent, mantissa = -1.0 if nibble & 8 else 1.0, nibble >> 1 & 3, nibble & 1
    return sign * (mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1))


def test_worked_bytes() -> None:
    packed = torch.zeros(1, 32, dtype=torch.uint8)
    packed[0, :4] = torch.tensor([0x21, 0xF7, 0x93, 0x80])  # low nibble first
    packed[0, 16] = 0x5E
    found = dequantise_mxfp4(packed, torch.tensor([[128, 126]], dtype=torch.uint8))
    assert found.dtype == torch.bfloat16 and found.shape == (1, 64)
    assert found[0, :8].tolist() == [1.0, 2.0, 12.0, -12.0, 3.0, -1.0, 0.0, -0.0]
    assert found[0, 32:34].tolist() == [-2.0, 1.5], "the second run has its own scale"
    assert found[0, 7].signbit() and found.count_nonzero() == 8


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_byte_and_scale_exactly(dtype: torch.dtype) -> None:
    packed = torch.arange(256, dtype=torch.uint8).view(16, 16)
    for scale in (0, 1, 100, 127, 130, 251):
        found = dequantise_mxfp4(packed, torch.full((16, 1), scale, dtype=torch.uint8), dtype=dtype).view(256, 2)
        expected = [[slow_nibble(byte & 15), slow_nibble(byte >> 4)] for byte in range(256)]
        wide = torch.tensor(expected, dtype=torch.float64) * math.ldexp(1.0, scale - 127)
        assert torch.equal(found.double(), wide)


def test_a_scale_of_255_is_not_a_number() -> None:
    packed = torch.full((2, 16), 0x22, dtype=torch.uint8)
    found = dequantise_mxfp4(packed, torch.tensor([[255], [127]], dtype=torch.uint8))
    assert found[0].isnan().all() and torch.equal(found[1].float(), torch.ones(32))


def test_leading_dimensions_are_kept() -> None:
    packed = torch.randint(256, (3, 2, 5, 32), dtype=torch.uint8)
    scales = torch.randint(100, 150, (3, 2, 5, 2), dtype=torch.uint8)
    found = dequantise_mxfp4(packed, scales)
    assert found.shape == (3, 2, 5, 64)
    assert torch.equal(found[2, 1], dequantise_mxfp4(packed[2, 1], scales[2, 1]))


@pytest.mark.parametrize(
    ("packed", "scales", "message"),
    [
        (torch.zeros(2, 16, dtype=torch.uint8), torch.zeros(2, 2, dtype=torch.uint8), r"expected \[2, 32\]"),
        (torch.zeros(2, 16, dtype=torch.uint8), torch.zeros(1, 1, dtype=torch.uint8), r"expected \[1, 16\]"),
        (torch.zeros(2, 16, dtype=torch.int8), torch.zeros(2, 1, dtype=torch.uint8), "torch.int8 and torch.uint8"),
        (torch.zeros(2, 16, dtype=torch.uint8), torch.zeros(2, 1), "torch.uint8 and torch.float32"),
    ],
)
def test_what_does_not_fit_is_refused(packed: torch.Tensor, scales: torch.Tensor, message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        dequantise_mxfp4(packed, scales)
