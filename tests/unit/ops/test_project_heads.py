"""From the stream to stored heads: the layer's own parts as the twin, both pairings, every cut of the kernel."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from tests.unit.ops.products import DTYPES, assert_close, random
from torch import Tensor

from paceline.errors import ShapeError
from paceline.ops.heads import Cells, HeadForm
from paceline.ops.project_heads import project_heads, project_heads_reference, project_heads_triton
from paceline.ops.rms_norm import rms_norm_reference
from paceline.ops.rotary import apply_rotary, rotary_table
from paceline.ops.skinny_launch import new_counters
from paceline.ops.skinny_tile import Tile

EPS = 1e-5


class Given(NamedTuple):
    x: Tensor
    squares: Tensor | None
    weight: Tensor
    bias: Tensor | None
    qk_gains: tuple[Tensor, Tensor] | None
    turns: Tensor
    cells: Cells
    form: HeadForm

    def on(self, device: torch.device) -> Given:
        """With planes of its own."""

        def move(part: object) -> object:
            if isinstance(part, Tensor):
                return part.to(device, copy=True)
            if isinstance(part, tuple) and not isinstance(part, HeadForm):
                moved = [move(inner) for inner in part]
                return type(part)(*moved) if hasattr(part, "_fields") else tuple(moved)
            return part

        return Given(*(move(part) for part in self))  # type: ignore[arg-type]


def inputs(
    T: int,
    *,
    dtype: torch.dtype = torch.float32,
    width: int = 64,
    num_heads: int = 3,
    num_kv_heads: int = 2,
    head_size: int = 16,
    rotated: int | None = None,
    has_bias: bool = False,
    is_normed: bool = True,
    has_qk_norm: bool = False,
    is_neox_style: bool = True,
    value_scale: float = 1.0,
) -> Given:
    num_outputs = (num_heads + 2 * num_kv_heads) * head_size
    rotated = head_size if rotated is None else rotated
    table = rotary_table(100.0 ** (-torch.arange(rotated // 2) / (rotated // 2)), 70)
    blocks, block_size = 9, 8
    planes = torch.full((2, num_kv_heads, blocks, block_size, head_size), torch.nan).to(dtype)
    rows = block_size + torch.randperm((blocks - 1) * block_size)[:T]
    if T > 2:
        rows[1::3] = 3  # rows of nobody, in block 0
    return Given(
        random(T, width, dtype=dtype),
        torch.rand(T, 3) * width / 3 + 0.1 if is_normed else None,
        random(num_outputs, width, dtype=dtype, scale=width**-0.5),
        random(num_outputs, dtype=dtype) if has_bias else None,
        (1 + random(head_size, scale=0.3), 1 + random(head_size, scale=0.3)) if has_qk_norm else None,
        table[torch.randint(1, 70, (T,))],
        Cells(planes, rows),
        HeadForm(num_heads, EPS, is_neox_style, value_scale),
    )


def assert_same(q: Tensor, cells: Cells, expected_q: Tensor, expected: Cells, *, is_interpreted: bool) -> None:
    assert_close(q, expected_q, is_interpreted=is_interpreted, roundings=3)
    found_planes, planes = cells.planes.cpu()[:, :, 1:], expected.planes.cpu()[:, :, 1:]
    assert torch.equal(found_planes.isnan(), planes.isnan()), "cells of nobody stay as they were"
    written = ~planes.isnan()
    assert_close(found_planes[written], planes[written], is_interpreted=is_interpreted, roundings=3)


@pytest.mark.parametrize("is_neox_style", [True, False])
@pytest.mark.parametrize("has_qk_norm", [True, False])
def test_the_reference_is_what_the_parts_of_a_layer_compute(is_neox_style: bool, has_qk_norm: bool) -> None:
    given = inputs(4, has_bias=True, has_qk_norm=has_qk_norm, is_neox_style=is_neox_style, value_scale=0.5)
    assert given.bias is not None and given.squares is not None
    planes, rows = given.cells
    q = project_heads(
        given.x,
        given.squares,
        given.weight,
        given.turns,
        given.cells,
        given.form,
        bias_X=given.bias,
        qk_gains=given.qk_gains,
    )
    factor = torch.rsqrt(given.squares.sum(-1, keepdim=True) / 64 + EPS)
    qkv = given.x * factor @ given.weight.T + given.bias
    heads = qkv.view(4, 7, 16)
    for t in range(4):
        for head in range(5):
            one = heads[t, head]
            if given.qk_gains is not None:
                one = rms_norm_reference(one, given.qk_gains[0 if head < 3 else 1], EPS)
            one = apply_rotary(one.unsqueeze(0), given.turns[t], is_neox_style=is_neox_style)[0]
            found = q[t, head] if head < 3 else planes[0, head - 3].flatten(0, 1)[rows[t]]
            if head < 3 or t != 1:
                torch.testing.assert_close(found, one, rtol=1e-5, atol=2e-6)
        if t != 1:
            values = planes[1].flatten(1, 2)[:, rows[t]]
            torch.testing.assert_close(values, heads[t, 5:] * 0.5, rtol=1e-5, atol=2e-6)


def test_tensors_that_do_not_fit_are_refused() -> None:
    given = inputs(3)
    three = (given.x, given.squares, given.weight)
    with pytest.raises(ShapeError, match="heads has shape"):
        project_heads(*three, given.turns, given.cells, HeadForm(4, EPS))
    with pytest.raises(ShapeError, match="turns has shape"):
        project_heads(*three, given.turns[:2], given.cells, given.form)
    with pytest.raises(ShapeError, match="rows has shape"):
        project_heads(*three, given.turns, given.cells._replace(rows_T=torch.zeros(2, dtype=torch.int64)), given.form)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_neox_style", [True, False])
@pytest.mark.parametrize("has_qk_norm", [True, False])
@pytest.mark.parametrize(("T", "tile"), [(1, None), (3, Tile(32, 16, 2)), (16, Tile(32, 32)), (17, Tile(32, 16, 5))])
def test_the_kernel_agrees_with_the_reference(
    kernel_device: torch.device,
    T: int,
    tile: Tile | None,
    has_qk_norm: bool,
    is_neox_style: bool,
    dtype: torch.dtype,
) -> None:
    given = inputs(
        T,
        dtype=dtype,
        width=40 if T == 3 else 64,
        has_bias=T != 16,
        has_qk_norm=has_qk_norm,
        is_neox_style=is_neox_style,
        value_scale=1.0 if T == 1 else 0.5,
    )
    there, counters = given.on(kernel_device), new_counters(kernel_device)
    expected_q = project_heads_reference(*given)
    is_interpreted = kernel_device.type == "cpu"
    for _ in range(2):
        q = project_heads_triton(*there, tile=tile, counters=counters)
        assert_same(q, there.cells, expected_q, given.cells, is_interpreted=is_interpreted)
        assert not counters.any()
    other = given.on(torch.device("cpu"))
    other_q = project_heads_reference(*other[:-1], other.form._replace(is_neox_style=not is_neox_style))
    assert (other_q.float() - q.cpu().float()).abs().max() > 0.05, "the pairing is told apart"


@pytest.mark.parametrize(
    ("head_size", "rotated", "outputs"),
    [(64, 64, 32), (48, 48, 32), (80, 80, 64), (64, 16, 32), (24, 8, 32), (10, 10, 32)],
)
@pytest.mark.parametrize("has_qk_norm", [True, False])
def test_heads_of_any_size_and_heads_that_are_turned_in_part(
    kernel_device: torch.device, head_size: int, rotated: int, outputs: int, has_qk_norm: bool
) -> None:
    for is_neox_style in (True, False):
        given = inputs(
            2,
            width=32,
            num_heads=2,
            num_kv_heads=1,
            head_size=head_size,
            rotated=rotated,
            has_bias=True,
            is_normed=is_neox_style,
            has_qk_norm=has_qk_norm,
            is_neox_style=is_neox_style,
        )
        there = given.on(kernel_device)
        expected_q = project_heads_reference(*given)
        q = project_heads_triton(*there, tile=Tile(outputs, 16))
        is_interpreted = kernel_device.type == "cpu"
        assert_same(q, there.cells, expected_q, given.cells, is_interpreted=is_interpreted)


@pytest.mark.gpu
@pytest.mark.parametrize("T", [1, 8, 16, 32, 64])
@pytest.mark.parametrize("shape", ["smollm2", "8b"])
def test_real_sizes_on_a_gpu(shape: str, T: int) -> None:
    sizes = (
        {"width": 576, "num_heads": 9, "num_kv_heads": 3, "head_size": 64}
        if shape == "smollm2"
        else {"width": 4096, "num_heads": 32, "num_kv_heads": 8, "head_size": 128, "has_qk_norm": True}
    )
    given = inputs(T, dtype=torch.bfloat16, **sizes)  # type: ignore[arg-type]
    there, counters = given.on(torch.device("cuda")), new_counters(torch.device("cuda"))
    first_q, first_planes = None, None
    for _ in range(3):
        q = project_heads_triton(*there, counters=counters)
        planes = there.cells.planes[:, :, 1:].clone()
        first_q, first_planes = (q, planes) if first_q is None else (first_q, first_planes)
        assert torch.equal(q, first_q) and torch.equal(planes.nan_to_num(), first_planes.nan_to_num())
    expected = given.on(torch.device("cuda"))
    assert_same(q, there.cells, project_heads_reference(*expected).cpu(), expected.cells, is_interpreted=False)
