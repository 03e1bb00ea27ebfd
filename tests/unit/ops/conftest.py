"""Where kernels run in tests: interpreted on the CPU, and, under the marker `gpu`, compiled on a CUDA device."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from paceline.ops.dispatch import HAS_TRITON
from paceline.ops.native.build import library


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
    return _ready_device(request.param, monkeypatch)


@dataclass(frozen=True)
class Version:
    """What takes the place of a reference.

    Attributes:
        device: whose tensors it takes.
        is_native: a call of the native library; else a kernel.
    """

    device: torch.device
    is_native: bool

    def of(self, launcher: Callable[..., Any], native: Callable[..., Any]) -> Callable[..., Any]:
        """The one of the two that is tried."""
        return native if self.is_native else launcher


@pytest.fixture(params=["native", "interpreted", pytest.param("compiled", marks=pytest.mark.gpu)])
def version(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Version:
    """A kernel, or the native library, for operations that have both."""
    if request.param != "native":
        return Version(_ready_device(request.param, monkeypatch), is_native=False)
    if library() is None:
        pytest.skip("no native operations on this machine")
    return Version(torch.device("cpu"), is_native=True)


def _ready_device(form: str, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    if not HAS_TRITON:
        pytest.skip("Triton is not installed")
    is_interpreting = os.environ.get("TRITON_INTERPRET") == "1"
    if is_interpreting != (form == "interpreted"):
        pytest.skip("Triton either interprets (TRITON_INTERPRET=1) or compiles")
    if is_interpreting:
        let_the_interpreter_count(monkeypatch)
        let_the_interpreter_multiply(monkeypatch)
    return torch.device("cpu" if is_interpreting else "cuda")
