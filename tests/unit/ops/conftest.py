"""Where kernels run in tests: interpreted on the CPU, and, under the marker `gpu`, compiled on a CUDA device."""

from __future__ import annotations

import os

import pytest
import torch

from paceline.ops.dispatch import HAS_TRITON


@pytest.fixture(params=["interpreted", pytest.param("compiled", marks=pytest.mark.gpu)])
def kernel_device(request: pytest.FixtureRequest) -> torch.device:
    """The device whose tensors a kernel takes."""
    if not HAS_TRITON:
        pytest.skip("Triton is not installed")
    is_interpreting = os.environ.get("TRITON_INTERPRET") == "1"
    if is_interpreting != (request.param == "interpreted"):
        pytest.skip("Triton either interprets (TRITON_INTERPRET=1) or compiles")
    return torch.device("cpu" if is_interpreting else "cuda")
