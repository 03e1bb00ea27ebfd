"""How products are cut: every cut covers all inputs, fits the device, and the workspace holds its parts."""

from __future__ import annotations

import pytest
import torch

from paceline.errors import ShapeError
from paceline.ops import skinny_product
from paceline.ops.skinny_product import (
    LARGEST_ROWS,
    NUM_COUNTERS,
    Tile,
    check_product,
    choose_tile,
    held_tile,
    launch_options,
    multiply_reference,
    new_counters,
    new_parts,
    padded_rows,
)

SHAPES = [(960, 576), (576, 576), (3072, 576), (576, 1536), (6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288)]


@pytest.mark.parametrize("num_rows", [1, 3, 16, 17, 64])
@pytest.mark.parametrize(("num_outputs", "width"), [*SHAPES, (10, 7), (130, 100)])
def test_a_cut_fits_a_multiprocessor_and_covers_every_input(num_rows: int, num_outputs: int, width: int) -> None:
    for least in (16, 32, 128):
        tile = choose_tile(num_rows, num_outputs, width, least_outputs=least)
        assert tile.outputs >= least
        x, weight = (torch.empty(size, width, dtype=torch.bfloat16) for size in (num_rows, 1))
        options = launch_options(tile, x, weight)
        if tile.is_held:
            assert options["PART"] * tile.warps >= width and options["PART"] <= tile.block
            assert 2 * tile.block * tile.warps * (tile.outputs + padded_rows(num_rows)) < 227 * 1024
            continue
        assert options["PART"] * tile.parts >= width and options["PART"] % tile.block == 0
        assert tile.stages * 2 * tile.block * (tile.outputs + padded_rows(num_rows)) < 227 * 1024
        assert -(-num_outputs // tile.outputs) <= NUM_COUNTERS or tile.parts == 1


def test_what_is_asked_for_early_lies_in_the_part() -> None:
    x = torch.empty(1, 4096, dtype=torch.bfloat16)
    for ahead, lines in ((0, 0), (32 * 128, 1), (32 * 128 * 7, 4), (10**6, 16)):
        assert launch_options(Tile(32, 64, 4, ahead=ahead), x, x)["LINES"] == lines
    assert 16 * 128 == 4096 // 4 * 2, "never more than a part of a row"


def test_warps_that_hold_a_weight_divide_its_inputs() -> None:
    for width, block, part in ((576, 128, 72), (1536, 256, 192), (40, 16, 8)):
        tile = held_tile(32, width)
        assert tile.block == block
        x = torch.empty(1, width, dtype=torch.bfloat16)
        assert launch_options(tile, x, x)["PART"] == part


def test_launches_that_read_much_begin_behind_the_one_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(skinny_product, "dependent_launch", lambda: True)
    for num_outputs, is_dependent in ((960, True), (24576, False)):
        x, weight = (torch.empty(size, 576, dtype=torch.bfloat16) for size in (1, num_outputs))
        options = launch_options(Tile(32, 64), x, weight)
        assert options["IS_DEPENDENT"] is options.get("launch_pdl", False) is is_dependent


def test_a_workspace_holds_the_sums_of_every_part() -> None:
    x = torch.empty(17, 64)
    parts, counters = new_parts(Tile(32, 64, 4), 5, x, None)
    assert parts.shape == (5 * 4 * 32 * 32,) and not counters.any()
    given = new_counters(x.device)
    assert new_parts(Tile(32, 64, 4), 5, x, given)[1] is given


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
