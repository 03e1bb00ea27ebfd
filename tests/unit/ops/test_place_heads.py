"""Heads of a finished projection: what `project_heads` makes of the same sums, and the kernel."""

from __future__ import annotations

import pytest
import torch
from tests.unit.ops.products import DTYPES
from tests.unit.ops.test_project_heads import assert_same, inputs

from paceline.errors import ShapeError
from paceline.ops import place_heads as module
from paceline.ops.place_heads import place_heads, place_heads_reference, place_heads_triton
from paceline.ops.project_heads import project_heads


@pytest.mark.parametrize("has_qk_norm", [True, False])
def test_it_is_the_second_half_of_project_heads(has_qk_norm: bool) -> None:
    given = inputs(4, is_normed=False, has_bias=True, has_qk_norm=has_qk_norm, value_scale=0.5)
    other = given.on(torch.device("cpu"))
    assert given.bias is not None
    q = project_heads(
        given.x, None, given.weight, given.turns, given.cells, given.form, bias_X=given.bias, qk_gains=given.qk_gains
    )
    qkv = given.x @ given.weight.T + given.bias
    placed = place_heads(qkv, other.turns, other.cells, other.form, qk_gains=other.qk_gains)
    assert_same(placed, other.cells, q, given.cells, is_interpreted=True)


def test_heads_that_do_not_fit_are_refused() -> None:
    given = inputs(2)
    with pytest.raises(ShapeError, match="heads has shape"):
        place_heads(torch.zeros(2, 96), given.turns, given.cells, given.form)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_neox_style", [True, False])
@pytest.mark.parametrize("has_qk_norm", [True, False])
@pytest.mark.parametrize(
    ("T", "head_size", "rotated", "filling"), [(1, 64, 64, 99), (5, 16, 8, 99), (3, 10, 10, 99), (5, 10, 8, 0)]
)
def test_the_kernel_agrees_with_the_reference(
    kernel_device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    T: int,
    head_size: int,
    rotated: int,
    has_qk_norm: bool,
    is_neox_style: bool,
    dtype: torch.dtype,
    filling: int,
) -> None:
    """With more programs than fill a GPU each takes several rows: here four, the last of them alone."""
    monkeypatch.setattr(module, "_FILLING", filling)
    monkeypatch.setattr(module, "_TILE", 64)
    given = inputs(
        T,
        num_heads=4 if T == 5 else 3,  # two of a kind, or one, in a program
        dtype=dtype,
        head_size=head_size,
        rotated=rotated,
        has_qk_norm=has_qk_norm,
        is_neox_style=is_neox_style,
        value_scale=0.5,
    )
    qkv = (given.x.float() @ given.weight.float().T).to(dtype)
    there = given.on(kernel_device)
    expected_q = place_heads_reference(qkv, given.qk_gains, given.turns, given.cells, given.form)
    q = place_heads_triton(qkv.to(kernel_device), there.qk_gains, there.turns, there.cells, there.form)
    assert_same(q, there.cells, expected_q, given.cells, is_interpreted=kernel_device.type == "cpu")
    turned_otherwise = given.form._replace(is_neox_style=not is_neox_style)
    other_q = place_heads_reference(
        qkv, given.qk_gains, given.turns, given.on(torch.device("cpu")).cells, turned_otherwise
    )
    assert (other_q.float() - q.cpu().float()).abs().max() > 0.05, "the pairing is told apart"
