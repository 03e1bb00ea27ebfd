"""What the operations around a product of few rows share on the host: its definition, and what does not fit."""

from __future__ import annotations

import pytest
import torch

from paceline.errors import ShapeError
from paceline.ops.skinny_product import check_product, multiply_reference
from paceline.ops.skinny_tile import LARGEST_ROWS


def test_the_norms_factor_may_stand_behind_the_product() -> None:
    x, weight, gain = torch.randn(3, 8, dtype=torch.float64), torch.randn(5, 8), torch.randn(8)
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * gain
    squares = x.float().square().view(3, 2, 4).sum(-1)
    found = multiply_reference((x * gain).float(), weight, squares, 1e-5)
    torch.testing.assert_close(found, (normed @ weight.double().T).float(), rtol=1e-5, atol=1e-6)


def test_products_that_do_not_fit_are_refused() -> None:
    x, weight = torch.zeros(2, 8), torch.zeros(4, 8)
    with pytest.raises(ShapeError, match="weight has shape"):
        check_product(x, torch.zeros(4, 7), None)
    with pytest.raises(ShapeError, match="bias has shape"):
        check_product(x, weight, torch.zeros(3))
    with pytest.raises(ShapeError, match="squares has shape"):
        check_product(x, weight, None, torch.zeros(3, 1))
    many = torch.zeros(LARGEST_ROWS + 1, 8)
    check_product(many, weight, None)
    with pytest.raises(ShapeError, match=r"rows has shape \[65, 8\]"):
        check_product(many.to("meta"), weight, None, holds_any_number=False)
