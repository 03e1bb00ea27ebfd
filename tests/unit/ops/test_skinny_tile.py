"""How products are cut: every cut covers all inputs and fits the device; small weights of few rows go in slices."""

from __future__ import annotations

import itertools

import pytest
import torch

from paceline.ops.skinny_launch import NUM_COUNTERS, make_cut
from paceline.ops.skinny_tile import choose_tile, padded_rows

SHAPES = [(960, 576), (576, 576), (3072, 576), (576, 1536), (6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288)]


@pytest.mark.parametrize("num_rows", [1, 3, 16, 17, 64])
@pytest.mark.parametrize(("num_outputs", "width"), [*SHAPES, (10, 7), (130, 100)])
def test_a_cut_fits_a_multiprocessor_and_covers_every_input(num_rows: int, num_outputs: int, width: int) -> None:
    for least in (16, 32, 128):
        tile = choose_tile(num_rows, num_outputs, width, least_outputs=least)
        assert tile.outputs >= (least // 2 if tile.slices > 1 else least)
        x = torch.empty(num_rows, width, dtype=torch.bfloat16)
        cut = make_cut(tile, x, is_pair=False, is_dependent=False)
        assert cut.part * tile.parts >= width and cut.part % tile.block == 0
        assert tile.stages * 2 * tile.block * (tile.outputs + padded_rows(num_rows)) < 227 * 1024
        assert -(-num_outputs // tile.outputs) <= NUM_COUNTERS or tile.parts == 1


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
