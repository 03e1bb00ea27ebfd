"""The common part of a launch: the cut as kernels have it, when the next one begins, and a workspace for the parts."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from paceline.ops import skinny_launch
from paceline.ops.skinny_launch import Cut, make_cut, new_counters, new_parts
from paceline.ops.skinny_tile import Tile


def cut_of(tile: Tile, x_TI: Tensor) -> Cut:
    return make_cut(tile, x_TI, is_pair=False, is_dependent=False)


def test_what_is_asked_for_early_lies_in_the_row() -> None:
    for width, parts in ((576, 1), (4096, 3), (100, 1), (72, 8)):
        tile = Tile(32, 64, parts, ahead=20_000)
        cut = cut_of(tile, torch.empty(1, width, dtype=torch.bfloat16))
        chunk, ahead = cut.chunk, cut.chunks * cut.chunk
        assert chunk % 8 == 0 and ahead <= width and 2 * 32 * ahead <= 20_000
        assert cut.chunks * tile.outputs == 32 * tile.warps
        assert chunk == 0 if width % 8 else chunk > 0


@pytest.mark.parametrize("is_allowed", [True, False])
def test_launches_over_small_weights_begin_early_where_that_is_allowed(
    monkeypatch: pytest.MonkeyPatch, is_allowed: bool
) -> None:
    monkeypatch.setattr(skinny_launch, "dependent_launch", lambda num_rows: is_allowed and num_rows <= 16)
    for num_rows, width in itertools.product((16, 17), (64, 4096)):
        x, weight = torch.empty(num_rows, width), torch.empty(4096, width, device="meta")
        constants = skinny_launch.skinny_launch(Tile(32, 64), 128, x, None, weight, None, None).constants
        is_early = is_allowed and (num_rows, width) == (16, 64)
        assert (constants["CUT"].begins > 0) is constants.get("launch_pdl", False) is is_early


def test_a_slice_that_is_no_whole_step_is_refused() -> None:
    with pytest.raises(AssertionError, match="one step"):
        cut_of(Tile(32, 32, slices=4), torch.empty(1, 64))


def test_a_held_slice_lies_in_one_piece_or_two() -> None:
    for block, rest in ((64, 16), (128, 0)):
        tile = Tile(32, block, slices=8, is_held=True)
        cut = cut_of(tile, torch.empty(1, 576))
        assert (cut.part, cut.block, cut.rest) == (72, block, rest)
        assert cut.block + cut.rest >= cut.part and cut.chunk == 0
    with pytest.raises(AssertionError, match="among warps alone"):
        cut_of(Tile(32, 64, 2, is_held=True, slices=4), torch.empty(1, 64))


def test_a_workspace_holds_the_sums_of_every_part() -> None:
    x = torch.empty(17, 64)
    parts, counters = new_parts(Tile(32, 64, 4), 5, x, None)
    assert parts.shape == (5 * 4 * 32 * 32,) and not counters.any()
    given = new_counters(x.device)
    assert new_parts(Tile(32, 64, 4), 5, x, given)[1] is given


def test_half_of_a_pair_is_a_run_of_outputs() -> None:
    x = torch.empty(3, 64)
    alone, pair = (
        make_cut(Tile(32, 16, ahead=4096), x, is_pair=is_pair, is_dependent=False) for is_pair in (False, True)
    )
    assert (alone.outputs, pair.outputs) == (32, 16) and pair.chunks == 2 * alone.chunks
    assert alone._replace(outputs=16, is_pair=True, chunks=pair.chunks, chunk=pair.chunk) == pair


def test_what_is_missing_is_the_rows_and_is_said_to_be_missing() -> None:
    x, weight, bias, squares = torch.empty(2, 64), torch.empty(32, 64), torch.empty(32), torch.empty(2, 5)
    bare = skinny_launch.skinny_launch(Tile(16, 64), 2, x, None, weight, None, None)
    assert bare.grid == (2, 1) and all(a is b for a, b in zip(bare.operands, (x, x, weight, x), strict=True))
    assert bare.workspace[2:] == (2, 0)
    assert [bare.constants[name] for name in ("SQUARES", "HAS_SQUARES", "HAS_BIAS")] == [1, False, False]
    full = skinny_launch.skinny_launch(Tile(16, 16, 2), 2, x, squares, weight, bias, None)
    assert full.grid == (2, 2) and all(a is b for a, b in zip(full.operands, (x, squares, weight, bias), strict=True))
    assert full.workspace[2:] == (2, 5)
    assert [full.constants[name] for name in ("SQUARES", "HAS_SQUARES", "HAS_BIAS")] == [8, True, True]
