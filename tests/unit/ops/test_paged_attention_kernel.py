"""The kernel of attention over blocks against the formula in float64: what it may not read, how it shares a context."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.unit.ops.paged_cases import make_case
from torch import Tensor

from paceline.ops import paged_attention_kernel as kernels
from paceline.ops.paged_attention_kernel import Launch, paged_attention_triton

SMALL = Launch(queries=16, keys=16, warps=4, stages=2, least_keys=16)


@pytest.fixture(autouse=True)
def _nan_in_what_is_handed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workspaces hold anything at first."""

    def poisoned(num_sums: int, device: torch.device) -> Tensor:
        return torch.full((num_sums,), torch.nan, dtype=torch.float32, device=device)

    monkeypatch.setattr(kernels, "_room_for_sums", poisoned)


def check(device: torch.device, starts: list[int], num_rows: int, num_parts: int, **form: Any) -> None:
    """Every row of every request, twice: counters are back at zero behind a launch."""
    case = make_case(starts, num_rows, **form)
    expected = case.expected()[: len(starts)]
    dtype = case.q_BTNH.dtype
    tolerance = 2e-6 if dtype == torch.float32 else 2**-8
    first, second = (
        paged_attention_triton(*case.arguments(device), num_parts=num_parts, launch=SMALL).cpu()[: len(starts)]
        for _ in range(2)
    )
    assert first.dtype == dtype
    torch.testing.assert_close(first.double(), expected, rtol=tolerance, atol=tolerance)
    assert torch.equal(first, second)


@pytest.mark.parametrize("num_parts", [1, 2, 16])
@pytest.mark.parametrize("window", [None, 15, 16, 17, 48])
@pytest.mark.parametrize("form", [{}, {"has_tail": True}, {"has_tail": True, "is_causal": False}], ids=str)
def test_windows_tails_and_masks(
    kernel_device: torch.device, num_parts: int, window: int | None, form: dict[str, Any]
) -> None:
    check(kernel_device, [70, 0], 5, num_parts, window=window, **form)
