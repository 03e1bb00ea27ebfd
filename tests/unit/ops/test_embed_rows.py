"""What a pass begins with: the gathers one by one, and the kernel."""

from __future__ import annotations

import pytest
import torch
from tests.unit.ops.products import DTYPES, assert_close, random
from torch import Tensor

from paceline.errors import ShapeError
from paceline.ops.embed_rows import embed_rows, embed_rows_reference, embed_rows_triton, gather_rows
from paceline.ops.scale_rows import scale_rows


def inputs(rows: int, width: int, turns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    ids, positions = torch.randint(0, 11, (rows,)), torch.randint(0, 9, (rows,))
    return random(11, width, dtype=dtype), ids, random(width), random(9, 2, turns), positions


def test_it_is_its_parts() -> None:
    embedding, ids, gain, table, positions = inputs(4, 6, 3, torch.float32)
    rows, turns = embed_rows(embedding, ids, gain, table, positions)
    for found, expected in zip(rows, scale_rows(embedding[ids], gain), strict=True):
        assert torch.equal(found, expected)
    assert torch.equal(turns, table[positions])


def test_shapes_that_differ_are_refused() -> None:
    embedding, ids, gain, table, positions = inputs(4, 6, 3, torch.float32)
    with pytest.raises(ShapeError, match="gain has shape"):
        embed_rows(embedding, ids, gain[:5], table, positions)
    with pytest.raises(ShapeError, match="positions has shape"):
        embed_rows(embedding, ids, gain, table, positions[:3])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width", "turns"), [(1, 1, 1), (5, 100, 6), (3, 576, 32)])
def test_the_kernel_agrees_with_the_reference(
    kernel_device: torch.device, dtype: torch.dtype, rows: int, width: int, turns: int
) -> None:
    given = inputs(rows, width, turns, dtype)
    expected, expected_turns = embed_rows_reference(*given)
    found, found_turns = embed_rows_triton(*(part.to(kernel_device) for part in given))
    assert torch.equal(found.x_TD.cpu(), expected.x_TD) and torch.equal(found_turns.cpu(), expected_turns)
    assert_close(found.scaled_TD, expected.scaled_TD, is_interpreted=kernel_device.type == "cpu")
    torch.testing.assert_close(found.squares_TS.cpu(), expected.squares_TS, rtol=1e-5, atol=1e-5)


def test_rows_are_gathered_as_torch_gathers_them() -> None:
    embedding, ids = random(11, 6), torch.randint(0, 11, (2, 3))
    assert torch.equal(gather_rows(embedding, ids), torch.nn.functional.embedding(ids, embedding))
    assert gather_rows(embedding.requires_grad_(), ids).requires_grad
