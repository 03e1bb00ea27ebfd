"""Native operations on rows against the formulas in float64, and that a row's bits are its own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from paceline.ops.grouped_convolution import grouped_convolution_reference
from paceline.ops.native import rows as native
from paceline.ops.rms_norm import rms_norm_reference
from paceline.ops.rotary import apply_rotary, expand_rotary, rotary_table

pytestmark = pytest.mark.skipif(
    not native.can_run(torch.empty(1, dtype=torch.bfloat16)), reason="no native operations on this machine"
)

EPS = 1e-5


def numbers(*shape: int, scale: float = 1.0, seed: int = 0) -> Tensor:
    return (scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))).bfloat16()


def assert_near(found: Tensor, exact: Tensor, *, roundings: int = 1) -> None:
    """Within so many roundings to bfloat16, and a float32 sum."""
    assert found.dtype == torch.bfloat16 and found.shape == exact.shape
    assert ((found.double() - exact).abs() <= roundings * 2**-8 * exact.abs() + roundings * 2**-8).all()


@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 21])
@pytest.mark.parametrize(("num_inputs", "num_outputs"), [(2, 1), (72, 40), (64, 32), (130, 97)])
def test_products_are_those_of_the_weight(num_rows: int, num_inputs: int, num_outputs: int) -> None:
    x, weight = numbers(num_rows, num_inputs), numbers(num_outputs, num_inputs, scale=0.1, seed=1)
    bias, residual = numbers(num_outputs, seed=2), numbers(num_rows, num_outputs, seed=3)
    exact = x.double() @ weight.double().T
    assert_near(native.linear(x, native.pack(weight)), exact)
    assert_near(native.linear(x, native.pack(weight, bias)), exact + bias.double())
    added = native.linear(x, native.pack(weight, bias), residual_TO=residual)
    assert_near(added, exact + bias.double() + residual.double())


def gated(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    gate, up = (x.double() @ weight.double().T + bias.double()).chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


@pytest.mark.parametrize("num_rows", [1, 8, 11])
@pytest.mark.parametrize("width", [16, 40, 3])
def test_gated_products_multiply_both_halves(num_rows: int, width: int) -> None:
    x, weight, bias = numbers(num_rows, 64), numbers(2 * width, 64, scale=0.1, seed=1), numbers(2 * width, seed=2)
    found = native.linear(x, native.pack(weight, bias, is_gated=True))
    assert_near(found, gated(x, weight, bias))
    halves_swapped = torch.cat(weight.chunk(2)[::-1])
    with pytest.raises(AssertionError):
        assert_near(native.linear(x, native.pack(halves_swapped, bias, is_gated=True)), gated(x, weight, bias))


def test_gates_at_the_ends_of_the_range() -> None:
    weight = torch.cat((torch.eye(2), torch.ones(2, 2))).bfloat16()
    x = torch.tensor([[-500.0, 500.0], [torch.nan, 1.0], [-torch.inf, 0.0]]).bfloat16()
    y = native.linear(x, native.pack(weight, torch.tensor([0.0, 0.0, 1.0, 1.0]).bfloat16(), is_gated=True))
    assert y[0].tolist() == [0.0, 500.0], "silu(-500) is 0 and silu(500) is 500, both times 1"
    assert y[1].isnan().all() and y[2].isnan()[0]


def test_a_norm_before_a_product_is_the_norm() -> None:
    x, weight, gain = numbers(5, 72, scale=3.0), numbers(40, 72, scale=0.1, seed=1), 1 + numbers(72, scale=0.1, seed=2)
    packed = native.pack(weight)
    fused = native.linear(x, packed, gain_I=gain, eps=EPS)
    assert torch.equal(fused, native.linear(native.norm(x, gain, eps=EPS), packed))


@pytest.mark.parametrize("shape", [(1, 1, 8), (3, 4, 72), (130, 576)])
def test_norms_are_those_of_the_reference(shape: tuple[int, ...]) -> None:
    x, gain = numbers(*shape, scale=3.0), 1 + numbers(shape[-1], scale=0.1, seed=2)
    exact = rms_norm_reference(x.double(), gain.double(), EPS)
    assert_near(native.norm(x, gain, eps=EPS), exact)
    strided = torch.cat((x, x), dim=-1)[..., : shape[-1]]
    assert torch.equal(native.norm(strided, gain, eps=EPS), native.norm(x, gain, eps=EPS))


@pytest.mark.parametrize("rotated", [8, 24, 64])
@pytest.mark.parametrize("has_gains", [False, True])
def test_heads_are_normed_and_turned_and_values_left(rotated: int, has_gains: bool) -> None:
    num_heads, num_kv_heads, head_size = 4, 2, 64
    qkv = numbers(2, 3, (num_heads + 2 * num_kv_heads) * head_size)
    table = rotary_table(torch.linspace(1.0, 0.1, rotated // 2), 50)[torch.tensor([[3, 4, 5], [40, 41, 42]])]
    gains = (1 + numbers(head_size, scale=0.1, seed=1), 1 + numbers(head_size, scale=0.1, seed=2))
    heads = qkv.view(2, 3, -1, head_size).double()
    q, k, v = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=-2)
    if has_gains:
        q, k = (rms_norm_reference(part, gain.double(), EPS) for part, gain in zip((q, k), gains, strict=True))
    exact = torch.cat((apply_rotary(q, table.double()), apply_rotary(k, table.double()), v), dim=-2)
    found = qkv.clone()
    native.turn_heads_(
        found,
        expand_rotary(table, torch.bfloat16),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        gains=gains if has_gains else None,
        eps=EPS,
    )
    assert_near(found.view(2, 3, -1, head_size), exact, roundings=3)  # the tables are rounded, and norms before it
    assert torch.equal(found.view(2, 3, -1, head_size)[..., -num_kv_heads:, :], v.bfloat16())


@pytest.mark.parametrize("num_taps", [1, 2, 3])
@pytest.mark.parametrize("num_blocks", [1, 3])
def test_convolutions_are_those_of_the_reference(num_taps: int, num_blocks: int) -> None:
    width, num_groups, length = 48, 8, 5
    num_rows = num_blocks * length
    x, residual = numbers(num_rows, width), numbers(num_rows, width, seed=4)
    base = numbers(2 * num_taps, width, seed=1).float()
    delta = numbers(num_rows, 2 * num_taps * num_groups, scale=0.3, seed=2)
    offset = None if num_blocks == 1 else torch.arange(length).repeat(num_blocks)
    for side in (0, 1):
        taps = slice(side * num_taps, (side + 1) * num_taps)
        by_tap = delta.view(num_rows, 2 * num_taps, num_groups)[:, taps].double()
        exact = grouped_convolution_reference(x.double(), base[taps].double(), by_tap, offset).double()
        kind = {"first_tap": taps.start, "num_taps": num_taps, "offset_T": offset}
        assert_near(native.convolve(x, base, delta, **kind), exact, roundings=2)
        added = native.convolve(x, base, delta, residual_TD=residual, **kind)
        assert_near(added, exact + residual.double(), roundings=2)


def test_nothing_is_read_across_the_start_of_a_block() -> None:
    x = torch.cat((torch.full((4, 16), torch.nan), torch.ones(4, 16))).bfloat16()
    delta = torch.zeros(8, 2 * 2 * 2).bfloat16()
    kind = {"first_tap": 0, "num_taps": 2}
    blocks = torch.arange(4).repeat(2)
    assert native.convolve(x, torch.ones(4, 16), delta, offset_T=blocks, **kind)[4:].isfinite().all()
    assert not native.convolve(x, torch.ones(4, 16), delta, offset_T=None, **kind)[4:].isfinite().all()


OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "product": lambda x: native.linear(x, native.pack(numbers(70, 96, scale=0.1, seed=1))),
    "norm and gated product": lambda x: native.linear(
        x, native.pack(numbers(70, 96, scale=0.1, seed=1), is_gated=True), gain_I=numbers(96, seed=2), eps=EPS
    ),
    "norm": lambda x: native.norm(x, numbers(96, seed=2), eps=EPS),
}


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_a_rows_bits_are_its_own(operation: Callable[[Tensor], Tensor]) -> None:
    x = numbers(37, 96)
    together = operation(x)
    for num_rows in (1, 3, 8, 13):
        apart = torch.cat([operation(part) for part in x.split(num_rows)])
        assert torch.equal(apart, together)
    assert torch.equal(operation(x.flip(0)), together.flip(0))


def test_threads_change_no_bit() -> None:
    x, before = numbers(9, 96), torch.get_num_threads()
    try:
        found = []
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            found.append(OPERATIONS["norm and gated product"](x))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(each, found[0]) for each in found)


def test_only_bf16_on_the_cpu_and_pairs_of_inputs_are_taken() -> None:
    assert not native.can_run(torch.empty(4, dtype=torch.float32))
    assert not native.can_run(torch.empty(4, dtype=torch.bfloat16, device="meta"))
    assert native.can_pack(torch.empty(3, 4, dtype=torch.bfloat16))
    assert not native.can_pack(torch.empty(4, 3, dtype=torch.bfloat16))


def test_packing_is_a_copy() -> None:
    weight, x = numbers(40, 72), numbers(1, 72, seed=1)
    packed = native.pack(weight)
    before = native.linear(x, packed)
    weight.zero_()
    assert torch.equal(native.linear(x, packed), before)
