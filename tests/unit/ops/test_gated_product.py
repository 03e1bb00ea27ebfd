"""Gates, ups and the activation behind them in one launch, against a float64 twin and the kernel."""

from __future__ import annotations

import pytest
import torch
from tests.unit.ops.products import assert_close, random

from paceline.errors import ShapeError
from paceline.ops import gated_product as module
from paceline.ops.gated_product import ProductTile, gated_product, gated_product_reference, gated_product_triton


def test_the_definition_agrees_with_a_float64_twin() -> None:
    x, weight = torch.randn(5, 24), torch.randn(2 * 8, 24)
    gate, up = (x.double() @ weight.double().T).chunk(2, dim=-1)
    expected = gate * torch.sigmoid(gate) * up
    torch.testing.assert_close(gated_product(x, weight), expected.float(), rtol=1e-5, atol=1e-5)
    swapped = gated_product(x, weight.roll(8, 0))
    assert not torch.allclose(swapped, expected.float(), atol=0.1), "gates come before ups"
    assert gated_product(x[:0], weight).shape == (0, 8)


def test_a_weight_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ShapeError, match="gate_up has shape"):
        gated_product(torch.zeros(2, 24), torch.zeros(16, 16))
    with pytest.raises(ShapeError, match="gate_up has shape"):
        gated_product(torch.zeros(2, 24), torch.zeros(15, 24))


@pytest.mark.parametrize(("rows", "outputs", "width"), [(16, 16, 16), (40, 24, 56), (3, 40, 16)])
@pytest.mark.parametrize("programs", [2, 132])
def test_the_kernel_agrees_with_the_reference(
    kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch, rows: int, outputs: int, width: int, programs: int
) -> None:
    """Tiles that are not full in any direction, and programs that take several."""
    is_interpreted = kernel_device.type == "cpu"
    monkeypatch.setattr(module, "_MULTIPROCESSORS", programs)
    tile = ProductTile(16, 16, 16, 4, 2) if is_interpreted else ProductTile(64, 32, 32, 4, 3)
    dtype = torch.float32 if is_interpreted else torch.bfloat16
    x, weight = random(rows, width, dtype=dtype), random(2 * outputs, width, dtype=dtype, scale=width**-0.5)
    expected = gated_product_reference(x, weight)
    for cut in (tile,) if is_interpreted else (tile, None):
        found = gated_product_triton(x.to(kernel_device), weight.to(kernel_device), cut)
        assert_close(found, expected, is_interpreted=is_interpreted, roundings=2)


@pytest.mark.parametrize(
    ("rows", "width", "outputs", "is_large"),
    [
        (512, 4096, 12288, True),
        (2048, 4096, 12288, True),
        (511, 4096, 12288, False),
        (2048, 576, 1536, False),
        (512, 4096, 12288 + 64, False),
        (512, 4096 + 8, 12288, False),
    ],
)
def test_one_launch_is_for_shapes_that_were_measured(rows: int, width: int, outputs: int, is_large: bool) -> None:
    """The 8B shape with at least 512 rows; full tiles alone; never on a CPU."""
    x = torch.empty(rows, width, dtype=torch.bfloat16, device="meta")
    weight = torch.empty(2 * outputs, width, dtype=torch.bfloat16, device="meta")
    assert module._is_large(x, weight) is is_large
    assert not module.takes_one_launch(x, weight)
