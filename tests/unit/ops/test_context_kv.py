"""Storing context keys and values: equal to the backbone and the cache bit for bit, and the kernel against that."""

from __future__ import annotations

import pytest
import torch
from tests.caches import make_cache, scattered_tables
from tests.tiny import tiny_drafter, tiny_target_contract
from torch import Tensor

from paceline.errors import ShapeError
from paceline.ops.context_kv import write_context_kv, write_context_kv_reference, write_context_kv_triton
from paceline.ops.rms_norm import rms_norm_reference
from paceline.ops.rotary import apply_rotary, rotary_table

EPS = 1e-6


def table(num_positions: int, rotated: int) -> Tensor:
    return rotary_table(100.0 ** (-torch.arange(rotated // 2) / max(rotated // 2, 1)), num_positions)


def test_rows_equal_those_of_the_norm_and_the_rotation_layer_by_layer() -> None:
    """In float64-free small steps: each layer and head on its own, through the definitions of the other operations."""
    T, L, M, H, blocks, block_size = 5, 3, 2, 6, 4, 3
    kv, gain = torch.randn(T, L, 2 * M * H), torch.randn(L, H)
    positions, rows = torch.tensor([0, 1, 2, 4, 6]), torch.tensor([5, 11, 3, 1, 7])
    turns = table(9, H)
    for is_neox_style in (True, False):
        planes = torch.full((L, 2, M, blocks, block_size, H), 7.0)
        write_context_kv(
            kv, gain, turns, positions, rows, planes, eps=EPS, is_neox_style=is_neox_style, value_scale=0.5
        )
        expected = torch.full_like(planes, 7.0)
        for t in range(T):
            block, offset = divmod(int(rows[t]), block_size)
            for layer in range(L):
                k, v = kv[t, layer].view(2, M, H)
                k = rms_norm_reference(k, gain[layer], EPS)
                k = apply_rotary(k, turns[positions[t]], is_neox_style=is_neox_style)
                expected[layer, 0, :, block, offset] = k
                expected[layer, 1, :, block, offset] = v * 0.5
        torch.testing.assert_close(planes, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value_scale", [1.0, 0.4])
@torch.inference_mode()
def test_rows_equal_those_of_the_backbone_in_the_cache_bit_for_bit(dtype: torch.dtype, value_scale: float) -> None:
    drafter = tiny_drafter(tiny_target_contract(), attention_value_scale=value_scale).to(dtype)
    backbone = drafter.backbone
    backbone.position_table = backbone.position_table.float()
    backbone.prepare_for_serving("plain")
    heads, head_size = backbone.cache_shape
    caches = [
        make_cache(
            scattered_tables(3, 12, block_size=4), num_layers=2, num_kv_heads=heads, head_size=head_size, dtype=dtype
        )
        for _ in range(2)
    ]
    features, slots = torch.randn(2, 4, 64).to(dtype), torch.tensor([2, 0])
    positions = torch.tensor([[0, 1, 2, 3], [7, 8, 9, 10]])
    rows = caches[0].tables.rows_of(slots, positions)
    for layer, (k, v) in enumerate(backbone.context_kv(features, positions)):
        caches[0].write_batch(layer, k, v, caches[0].cells_to_write(rows))
    backbone.write_context(features, rows, positions, caches[1].planes)
    assert caches[0].planes.any()
    assert torch.equal(caches[0].planes, caches[1].planes)


def test_positions_past_the_table_are_turned_as_its_last_row_and_stored_where_they_are() -> None:
    kv, turns = torch.randn(1, 1, 8), table(3, 4)
    last, beyond = torch.zeros(1, 2, 1, 2, 6, 4), torch.zeros(1, 2, 1, 2, 6, 4)
    for position, planes in ((2, last), (5, beyond)):
        where = torch.tensor([position])
        write_context_kv(kv, torch.ones(1, 4), turns, where, torch.tensor([9]), planes, eps=EPS, is_neox_style=True)
    assert last[..., 1, 3, :].all()
    assert torch.equal(last, beyond)
    assert beyond.count_nonzero() == 8


def test_tensors_that_do_not_fit_are_refused() -> None:
    planes, one = torch.zeros(2, 2, 1, 1, 6, 4), torch.tensor([0])
    for kv, gain, rows, message in (
        (torch.zeros(1, 2, 4), torch.ones(2, 4), one, "kv has shape"),
        (torch.zeros(1, 2, 8), torch.ones(1, 4), one, "k_gain has shape"),
        (torch.zeros(1, 2, 8), torch.ones(2, 4), one.repeat(2), "rows has shape"),
    ):
        with pytest.raises(ShapeError, match=message):
            write_context_kv(kv, gain, table(3, 4), one, rows, planes, eps=EPS, is_neox_style=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_neox_style", [True, False])
@pytest.mark.parametrize(
    ("T", "L", "M", "H", "rotated"),
    [(1, 1, 1, 2, 2), (5, 2, 3, 16, 16), (7, 3, 2, 10, 10), (4, 2, 2, 24, 8), (3, 5, 8, 64, 64)],
)
def test_the_kernel_agrees_with_the_reference(
    kernel_device: torch.device, dtype: torch.dtype, is_neox_style: bool, T: int, L: int, M: int, H: int, rotated: int
) -> None:
    blocks, block_size = 4, 5
    kv, gain = torch.randn(T, L, 2 * M * H).to(dtype), 1 + 0.2 * torch.randn(L, H)
    turns = table(9, rotated)
    positions = torch.randperm(11)[:T]
    rows = block_size + torch.randperm((blocks - 1) * block_size)[:T]
    rows[1::3] = 2  # padding rows, of block 0
    kv[rows == 2] = torch.nan  # hold anything
    expected = torch.full((L, 2, M, blocks, block_size, H), torch.nan).to(dtype)
    found = expected.clone().to(kernel_device)
    write_context_kv_reference(kv, gain, turns, positions, rows, expected, EPS, is_neox_style, 1.5)
    there = [t.to(kernel_device) for t in (kv, gain, turns, positions, rows)]
    write_context_kv_triton(*there, found, EPS, is_neox_style, 1.5)
    found = found.cpu()
    assert torch.equal(found.isnan(), expected.isnan()), "cells of nobody stay as they were"
    written = ~expected.isnan()
    # The interpreter cuts float32 down to bf16 where a GPU rounds: up to a unit of the last place in each of 3 steps.
    unit = 1e-5 if dtype == torch.float32 else 3 * 2**-8 if kernel_device.type == "cpu" else 2**-8
    tolerance = {"rtol": unit, "atol": unit * float(expected[written].abs().max())}
    torch.testing.assert_close(found[written], expected[written], **tolerance)
    other = expected.clone()
    write_context_kv_reference(kv, gain, turns, positions, rows, other, EPS, not is_neox_style, 1.5)
    if rotated > 2:
        assert (other[written] - found[written]).abs().max() > 0.05, "the pairing is told apart"
