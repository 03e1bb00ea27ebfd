"""What tests see of memory that nobody wrote."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.complex64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_is_not_a_number(dtype: torch.dtype) -> None:
    like = torch.zeros(2, 3).to(dtype)
    for tensor in (
        torch.empty(2, 3, dtype=dtype),
        torch.empty_like(like),
        torch.empty_strided((2, 3), (1, 2), dtype=dtype),
        like.new_empty(2, 3),
    ):
        assert tensor.shape == (2, 3) and tensor.dtype == dtype
        assert tensor.to(torch.complex64).isnan().all()


def test_no_index_is_within_a_table() -> None:
    assert torch.empty(3, dtype=torch.int64).tolist() == [2**63 - 1] * 3
    assert torch.empty(2, dtype=torch.uint8).tolist() == [255] * 2
    assert torch.empty(2, dtype=torch.bool).tolist() == [True] * 2


def test_what_has_no_memory_or_an_owner_is_left_alone() -> None:
    assert torch.empty(2, device="meta").shape == (2,)
    with torch.device("meta"):
        assert torch.empty(2).is_meta and torch.nn.Linear(3, 2).weight.is_meta
    written = torch.ones(2)
    assert torch.empty(2, out=written) is written and written.tolist() == [1.0, 1.0]
    parameter = torch.nn.Parameter(torch.empty(2))
    assert parameter.requires_grad and torch.empty(2, requires_grad=True).isnan().all()


def test_who_watches_operations_sees_the_allocation_alone() -> None:
    seen = []

    class Watcher(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Watcher():
        torch.empty(2)
    assert seen == [torch.ops.aten.empty.memory_format]
