"""How products are cut: every cut covers all inputs, fits the device, and the workspace holds its parts."""

from __future__ import annotations

import itertools

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
        assert tile.outputs >= (least // 2 if tile.slices > 1 else least)
        options = launch_options(
            tile, torch.empty(num_rows, width, dtype=torch.bfloat16), torch.empty(num_outputs, width)
        )
        assert options["PART"] * tile.parts >= width and options["PART"] % tile.block == 0
        assert tile.stages * 2 * tile.block * (tile.outputs + padded_rows(num_rows)) < 227 * 1024
        assert -(-num_outputs // tile.outputs) <= NUM_COUNTERS or tile.parts == 1


def test_what_is_asked_for_early_lies_in_the_row() -> None:
    for width, parts in ((576, 1), (4096, 3), (100, 1), (72, 8)):
        tile = Tile(32, 64, parts, ahead=20_000)
        options = launch_options(tile, torch.empty(1, width, dtype=torch.bfloat16), torch.empty(32, width))
        chunk, ahead = options["CHUNK"], options["CHUNKS"] * options["CHUNK"]
        assert chunk % 8 == 0 and ahead <= width and 2 * 32 * ahead <= 20_000
        assert options["CHUNKS"] * tile.outputs == 32 * tile.warps
        assert chunk == 0 if width % 8 else chunk > 0


def test_small_weights_alone_are_asked_for_early() -> None:
    for num_outputs, width in SHAPES:
        assert (choose_tile(1, num_outputs, width).ahead > 0) is (width < 4096)


def test_few_rows_go_through_small_weights_in_slices() -> None:
    for num_outputs, width in SHAPES:
        for num_rows, least in itertools.product((1, 16, 17, 64), (16, 32)):
            tile = choose_tile(num_rows, num_outputs, width, least_outputs=least)
            assert (tile.slices > 1) is (num_rows <= 16 and width < 4096), (num_outputs, width, num_rows)
            assert tile.block // tile.slices >= 16, "what one step of the matrix units takes"
    sizes = [(*size, least) for size, least in zip(SHAPES[:4], (32, 16, 32, 16), strict=True)]
    halved = [choose_tile(1, outputs, width, least_outputs=least).outputs for outputs, width, least in sizes]
    assert halved == [16, 8, 32, 8], "not where there would be more programs than multiprocessors"
    assert choose_tile(1, 960, 576, least_outputs=64).slices == 1, "warps have outputs of their own"
    assert choose_tile(1, 576, 576) == choose_tile(16, 576, 576), "a row's sums do not depend on how many there are"


@pytest.mark.parametrize("is_allowed", [True, False])
def test_launches_over_small_weights_begin_early_where_that_is_allowed(
    monkeypatch: pytest.MonkeyPatch, is_allowed: bool
) -> None:
    monkeypatch.setattr(skinny_product, "dependent_launch", lambda num_rows: is_allowed and num_rows <= 16)
    for num_rows, width in itertools.product((16, 17), (64, 4096)):
        weight = torch.empty(4096, width, device="meta")
        options = launch_options(Tile(32, 64), torch.empty(num_rows, width), weight)
        is_early = is_allowed and (num_rows, width) == (16, 64)
        assert (options["BEGINS"] > 0) is options.get("launch_pdl", False) is is_early


def test_a_slice_that_is_no_whole_step_is_refused() -> None:
    with pytest.raises(AssertionError, match="one step"):
        launch_options(Tile(32, 32, slices=4), torch.empty(1, 64), torch.empty(32, 64))


def test_a_held_slice_lies_in_one_piece_or_two() -> None:
    for block, rest in ((64, 16), (128, 0)):
        tile = Tile(32, block, slices=8, is_held=True)
        options = launch_options(tile, torch.empty(1, 576), torch.empty(32, 576))
        assert (options["PART"], options["BLOCK"], options["REST"]) == (72, block, rest)
        assert options["BLOCK"] + options["REST"] >= options["PART"] and options["CHUNK"] == 0
    with pytest.raises(AssertionError, match="among warps alone"):
        launch_options(Tile(32, 64, 2, is_held=True, slices=4), torch.empty(1, 64), torch.empty(32, 64))


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
