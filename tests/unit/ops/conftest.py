"""Where kernels run in tests: interpreted on the CPU, and, under the marker `gpu`, compiled on a CUDA device."""

from __future__ import annotations

import importlib
import os
from typing import Any

import pytest
import torch

from paceline.ops.dispatch import HAS_TRITON


def let_the_interpreter_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loops with bounds of run time: the interpreter takes int() of an array of one, which fails since numpy 2.4."""
    interpreter = importlib.import_module("triton.runtime.interpreter")
    patch_tensor = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch)


@pytest.fixture(params=["interpreted", pytest.param("compiled", marks=pytest.mark.gpu)])
def kernel_device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """The device whose tensors a kernel takes."""
    if not HAS_TRITON:
        pytest.skip("Triton is not installed")
    is_interpreting = os.environ.get("TRITON_INTERPRET") == "1"
    if is_interpreting != (request.param == "interpreted"):
        pytest.skip("Triton either interprets (TRITON_INTERPRET=1) or compiles")
    if is_interpreting:
        let_the_interpreter_count(monkeypatch)
    return torch.device("cpu" if is_interpreting else "cuda")
