"""Short convolution: a slow float64 twin, histories of slots, cutting a text anywhere, the kernel."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from paceline.errors import ShapeError
from paceline.ops.causal_convolution import (
    causal_convolution,
    causal_convolution_reference,
    causal_convolution_triton,
    next_history,
)


def slow_convolution(x_TC: Tensor, weight_CW: Tensor, history_HC: Tensor) -> Tensor:
    rows = torch.cat((history_HC, x_TC)).double()
    y = torch.zeros(x_TC.shape, dtype=torch.float64)
    for t in range(x_TC.shape[0]):
        for c in range(x_TC.shape[1]):
            total = sum(float(weight_CW[c, j]) * float(rows[t + j, c]) for j in range(weight_CW.shape[1]))
            y[t, c] = total / (1 + math.exp(-total))
    return y


@given(
    num_rows=st.integers(1, 6), num_channels=st.integers(1, 9), num_taps=st.integers(1, 5), seed=st.integers(0, 1000)
)
def test_the_reference_agrees_with_a_slow_float64_twin(
    num_rows: int, num_channels: int, num_taps: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, num_rows, num_channels, generator=generator)
    weight = torch.randn(num_channels, num_taps, generator=generator)
    history = torch.randn(2, num_taps - 1, num_channels, generator=generator)
    found = causal_convolution(x, weight, history)
    at_the_start = causal_convolution(x, weight.unsqueeze(1))  # as checkpoints store it
    for request in range(2):
        expected = slow_convolution(x[request], weight, history[request])
        torch.testing.assert_close(found[request].double(), expected, rtol=1e-5, atol=1e-5)
        expected = slow_convolution(x[request], weight, torch.zeros_like(history[request]))
        torch.testing.assert_close(at_the_start[request].double(), expected, rtol=1e-5, atol=1e-5)


def test_worked_numbers() -> None:
    # 1 * 0.5 + 2 * 1 = 2.5, 2 * 0.5 - 3 * 1 = -2; SiLU of 1 (before it stands a zero), 2.5 and -2.
    found = causal_convolution(torch.tensor([[[1.0], [2.0], [-3.0]]]), torch.tensor([[0.5, 1.0]]))
    torch.testing.assert_close(found.flatten(), torch.tensor([0.731059, 2.310355, -0.238406]), rtol=0, atol=1e-6)


@pytest.mark.parametrize("cut", [0, 1, 2, 5, 7])
def test_a_text_may_be_cut_anywhere(cut: int) -> None:
    x, weight = torch.randn(2, 7, 5).bfloat16(), torch.randn(5, 4)
    whole = causal_convolution(x, weight)
    history = next_history(x[:, :cut], torch.zeros(2, 3, 5, dtype=torch.bfloat16))
    assert torch.equal(causal_convolution(x[:, :cut], weight), whole[:, :cut])
    assert torch.equal(causal_convolution(x[:, cut:], weight, history), whole[:, cut:])


def test_lengths_say_which_rows_a_history_ends_with() -> None:
    x, history = torch.randn(4, 5, 2), torch.randn(4, 3, 2)
    x[0] = torch.nan  # nothing of it counts
    found = next_history(x, history, torch.tensor([0, 1, 3, 5]))
    for request, length in enumerate((0, 1, 3, 5)):
        rows = torch.cat((history[request], x[request, :length]))
        assert torch.equal(found[request], rows[-3:])
    assert torch.equal(next_history(x, history)[3], found[3])
    found.fill_(7.0)
    assert not (history == 7.0).any()


def test_requests_read_the_histories_of_their_slots() -> None:
    x, weight, histories = torch.randn(3, 2, 5), torch.randn(5, 3), torch.randn(6, 2, 5)
    histories[-1] = torch.nan  # the end of the store is what index -1 would read
    found = causal_convolution(x, weight, histories, torch.tensor([4, 0, -1]))
    assert torch.equal(found[:2], causal_convolution(x[:2], weight, histories[[4, 0]]))
    assert torch.equal(found[2:], causal_convolution(x[2:], weight))


def test_a_rows_bits_do_not_depend_on_other_rows() -> None:
    x, weight, history = torch.randn(2, 9, 13), torch.randn(13, 4), torch.randn(2, 3, 13)
    whole = causal_convolution(x, weight, history)
    for row in range(9):
        before = next_history(x[:, :row], history)
        assert torch.equal(causal_convolution(x[:1, row : row + 1], weight, before[:1])[0, 0], whole[0, row])


def test_gradients() -> None:
    x, weight, history = (torch.randn(s, dtype=torch.float64) for s in ((2, 3, 2), (2, 3), (2, 2, 2)))
    leaves = [t.requires_grad_() for t in (x, weight, history)]
    assert torch.autograd.gradcheck(causal_convolution, leaves)


@pytest.mark.parametrize(
    ("weight", "histories", "slots", "message"),
    [
        ((4, 3), None, None, "weight has shape"),
        ((5, 3), (2, 3, 5), None, r"histories has shape \[2, 3, 5\], expected \[S, 2, 5\]"),
        ((5, 3), (4, 2, 5), None, r"expected \[2, 2, 5\]"),
        ((5, 3), (4, 2, 5), 3, "slots has shape"),
    ],
)
def test_what_does_not_fit_is_refused(
    weight: tuple[int, ...], histories: tuple[int, ...] | None, slots: int | None, message: str
) -> None:
    store = None if histories is None else torch.zeros(histories)
    with pytest.raises(ShapeError, match=message):
        causal_convolution(
            torch.zeros(2, 1, 5), torch.zeros(weight), store, None if slots is None else torch.zeros(slots).long()
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "channels", "taps"), [(1, 1, 1), (1, 6, 4), (5, 7, 4), (3, 530, 2)])
@pytest.mark.parametrize("has_slots", [True, False])
def test_the_kernel_agrees_with_the_reference(
    kernel_device: torch.device, dtype: torch.dtype, rows: int, channels: int, taps: int, has_slots: bool
) -> None:
    wider = torch.randn(2, rows, channels + 3).to(dtype)  # x is a part of a joint projection
    weight = torch.randn(channels, taps)
    histories = torch.randn(4 if has_slots else 2, taps - 1, channels).to(dtype)
    histories[2:3] = torch.nan
    slots = torch.tensor([3, -1]) if has_slots else None
    expected = causal_convolution_reference(wider[..., 3:], weight, histories, slots)
    there = [t.to(kernel_device) for t in (wider, weight, histories)]
    slots_there = None if slots is None else slots.to(kernel_device)
    found = causal_convolution_triton(there[0][..., 3:], there[1], there[2], slots_there).cpu()
    assert found.dtype == dtype and found.shape == expected.shape
    tolerance = 5e-6 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
