"""Attention: every form against float64 loops, grouped heads, masks, row-invariant bits, garbage out of sight."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from paceline.ops.attention import (
    KEY_TILE,
    attention,
    attention_reference,
    attention_row_invariant,
    attention_with_bias,
    bias_of,
    causal_attention,
)


def slow_attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """q [N, T, H], k and v [M, S, H], visible [T, S]; one row at a time in float64."""
    num_heads, num_rows, size = q.shape
    group = num_heads // k.shape[0]
    out = torch.zeros(num_heads, num_rows, size, dtype=torch.float64)
    for head in range(num_heads):
        for row in range(num_rows):
            keys = visible[row].nonzero().flatten().tolist()
            scores = [float(q[head, row].double() @ k[head // group, j].double()) / math.sqrt(size) for j in keys]
            best = max(scores)
            weights = [math.exp(score - best) for score in scores]
            for weight, j in zip(weights, keys, strict=True):
                out[head, row] += weight / sum(weights) * v[head // group, j].double()
    return out


def random_case(
    seed: int, num_kv_heads: int, group: int, num_rows: int, num_keys: int, size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(num_kv_heads * group, num_rows, size, generator=generator)
    k = torch.randn(num_kv_heads, num_keys, size, generator=generator)
    v = torch.randn(num_kv_heads, num_keys, size, generator=generator)
    visible = torch.rand(num_rows, num_keys, generator=generator) < 0.6
    visible[torch.arange(num_rows), torch.randint(num_keys, (num_rows,), generator=generator)] = True
    return q, k, v, visible


sizes = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 10_000),
        "num_kv_heads": st.integers(1, 3),
        "group": st.integers(1, 3),
        "num_rows": st.integers(1, 10),
        "num_keys": st.integers(1, 2 * KEY_TILE + 3),
        "size": st.sampled_from([1, 3, 8, 17]),
    }
)


@given(case=sizes)
def test_every_form_agrees_with_float64_loops(case: dict[str, int]) -> None:
    q, k, v, visible = random_case(**case)
    expected = slow_attention(q, k, v, visible).float()
    q4, k4, v4 = q[None], k[None], v[None]
    torch.testing.assert_close(attention_reference(q4, k4, v4, visible)[0], expected, rtol=1e-4, atol=1e-5)
    for mask in (visible, visible[None, None]):
        torch.testing.assert_close(attention(q4, k4, v4, visible=mask)[0], expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(attention_row_invariant(q, k, v, visible), expected, rtol=1e-4, atol=1e-5)


def test_a_batch_takes_a_mask_per_request() -> None:
    q, k, v = torch.randn(3, 4, 5, 8), torch.randn(3, 2, 7, 8), torch.randn(3, 2, 7, 8)
    visible = torch.rand(3, 1, 5, 7) < 0.5
    visible[..., 0] = True
    y = attention(q, k, v, visible=visible)
    for b in range(3):
        torch.testing.assert_close(y[b].double(), slow_attention(q[b], k[b], v[b], visible[b, 0]), rtol=1e-4, atol=1e-5)


def test_a_mask_over_keys_alone_holds_for_every_row() -> None:
    q, k, v = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 7, 8), torch.randn(2, 2, 7, 8)
    keys = torch.tensor([True, True, False, True, False, True, True])
    y = attention(q, k, v, visible=keys.view(1, 1, 1, 7))
    torch.testing.assert_close(y, attention(q, k[:, :, keys], v[:, :, keys]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_causal_attention_is_a_triangle(num_kv_heads: int) -> None:
    q, k, v = torch.randn(2, 4, 9, 8), torch.randn(2, num_kv_heads, 9, 8), torch.randn(2, num_kv_heads, 9, 8)
    triangle = torch.ones(9, 9, dtype=torch.bool).tril()
    expected = attention_reference(q, k, v, triangle)
    torch.testing.assert_close(causal_attention(q, k, v), expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(causal_attention(q, k, v), attention(q, k, v), atol=1e-3)  # the triangle matters


def test_gradients_flow_through_the_grouped_form() -> None:
    q, k, v, visible = (t.double() if t.dtype != torch.bool else t for t in random_case(0, 2, 2, 3, 5, 4))
    for t in (q, k, v):
        t.requires_grad_()
    assert torch.autograd.gradcheck(lambda a, b, c: attention(a[None], b[None], c[None], visible=visible), (q, k, v))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 2, 8), (4, 4, 16), (9, 3, 64), (1, 1, 7), (6, 2, 5)])
def test_row_invariant_bits_depend_on_what_a_row_sees_alone(
    heads: int, kv_heads: int, size: int, dtype: torch.dtype
) -> None:
    num_rows, num_keys, first = 20, 77, 30
    q = torch.randn(heads, num_rows, size).to(dtype)
    k, v = torch.randn(2, kv_heads, num_keys, size).to(dtype).unbind(0)
    visible = torch.arange(num_keys) < first + torch.arange(num_rows)[:, None]
    whole = attention_row_invariant(q, k, v, visible)
    assert whole.dtype == dtype
    for row in (0, 3, 7, 8, 13, 19):
        for end in {first + row, first + row + 1, 60, num_keys} - set(range(first + row)):
            alone = attention_row_invariant(q[:, row : row + 1], k[:, :end], v[:, :end], visible[row : row + 1, :end])
            assert torch.equal(alone[:, 0], whole[:, row]), (row, end)


@pytest.mark.parametrize("garbage", [1e30, float("inf"), float("nan")])
def test_keys_out_of_sight_may_hold_anything(garbage: float) -> None:
    q, k, v, visible = random_case(1, 2, 2, 10, 70, 8)
    visible[:, 40:] = False
    visible[:, 0] = True
    clean = attention_row_invariant(q, k, v, visible)
    k[:, 40:], v[:, 40:] = garbage, garbage
    assert torch.equal(attention_row_invariant(q, k, v, visible), clean)
    # Inside a tile that some rows see and others do not, too.
    seen_by_one = visible.clone()
    seen_by_one[3, 45] = True
    mixed = attention_row_invariant(q, k, v, seen_by_one)
    others = [row for row in range(10) if row != 3]
    assert torch.equal(mixed[:, others], clean[:, others])


def test_a_visible_nan_does_show() -> None:
    """The mirror of the test above: garbage that a row does see must not be hidden."""
    q, k, v, visible = random_case(2, 1, 1, 2, 5, 4)
    visible[0, 2], visible[1, 2] = True, False
    v[:, 2] = float("nan")
    y = attention_row_invariant(q, k, v, visible)
    assert y[0, 0].isnan().all() and not y[0, 1].isnan().any()


def test_values_whose_sum_overflows_are_no_garbage() -> None:
    q, k, v, visible = random_case(3, 2, 2, 4, 9, 8)
    v[:, :3] = 1e38
    assert not v.sum().isfinite()
    y = attention_row_invariant(q, k, v, visible)
    torch.testing.assert_close(y, attention(q[None], k[None], v[None], visible=visible)[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_heads", "num_rows", "num_keys"), [(2, 3, 9), (6, 3, 16), (6, 1, 21), (4, 5, 33)])
def test_a_bias_made_once_gives_the_bits_of_a_mask(
    dtype: torch.dtype, num_heads: int, num_rows: int, num_keys: int
) -> None:
    generator = torch.Generator().manual_seed(num_keys)
    q = torch.randn(2, num_heads, num_rows, 8, generator=generator).to(dtype)
    k, v = (torch.randn(2, 2, num_keys, 8, generator=generator).to(dtype) for _ in range(2))
    visible = torch.rand(2, num_rows, num_keys, generator=generator) < 0.5
    visible[..., 0] = True
    bias = bias_of(visible, num_heads // 2, dtype)
    assert bias.shape == (2, 1, num_heads // 2 * num_rows, num_keys) and bias.stride(-2) % 16 == 0
    right = attention(q, k, v, visible=visible.unsqueeze(1))
    assert torch.equal(attention_with_bias(q, k, v, bias), right)
    interleaved = bias.unflatten(2, (-1, num_rows)).transpose(2, 3).flatten(2, 3)  # rows of another head's order
    if num_heads > 2 and num_rows > 1:
        assert not torch.equal(attention_with_bias(q, k, v, interleaved), right)
