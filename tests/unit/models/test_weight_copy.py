"""Either way of copying a weight sees the same faults."""

from __future__ import annotations

import pytest
import torch

from paceline.models import weight_copy
from paceline.models.weight_copy import copy_weight


@pytest.fixture(params=["what this machine has", "torch"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways, where there are two."""
    if request.param == "torch":
        monkeypatch.setattr(weight_copy.finite_copy, "can_copy", lambda *_: False)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("stored_dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_what_is_finite_arrives_and_the_rest_is_seen(stored_dtype: torch.dtype, dtype: torch.dtype) -> None:
    stored = torch.randn(40, 33, generator=torch.Generator().manual_seed(0)).to(stored_dtype)
    parameter = torch.zeros(50, 33, dtype=dtype)
    assert copy_weight(parameter[5:45], stored)
    assert torch.equal(parameter[5:45], stored.to(dtype))
    assert not parameter[:5].any() and not parameter[45:].any()
    for place in (0, 700, 40 * 33 - 1):
        for value in (torch.nan, torch.inf, -torch.inf):
            wrong = stored.clone()
            wrong.view(-1)[place] = value
            assert not copy_weight(parameter[5:45], wrong)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_overflows_on_its_way_is_seen(dtype: torch.dtype) -> None:
    assert not copy_weight(torch.zeros(3, dtype=dtype), torch.tensor([1.0, 3.4e38, 1.0]))


@pytest.mark.usefixtures("way")
def test_parts_of_a_stored_tensor_are_copied_too() -> None:
    stored = torch.arange(12.0).view(3, 4)
    to = torch.zeros(4, 2)
    assert copy_weight(to, stored.t()[:, 1:])
    assert torch.equal(to, stored.t()[:, 1:])
