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


def let_the_interpreter_multiply(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of bf16: the interpreter keeps bf16 as 16-bit integers, and multiplies those."""
    interpreter = importlib.import_module("triton.runtime.interpreter")
    multiply = interpreter.InterpreterBuilder.create_dot

    def widened(operand: Any) -> Any:
        if str(operand.dtype.scalar) != "bf16":
            return operand
        bits = operand.data.astype("uint32") << 16
        return interpreter.TensorHandle(bits.view("float32"), importlib.import_module("triton.language").float32)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return multiply(self, widened(a), widened(b), *rest)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


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
        let_the_interpreter_multiply(monkeypatch)
    return torch.device("cpu" if is_interpreting else "cuda")
