"""What a decode step launches around the layers: torch's operations and kernels, in order, with shapes and constants.

Launches of a layer (of the target or of the drafter) are other files' business and left out. Operations that only look
at memory another way launch nothing.
"""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

_VIEWS = """
    view _unsafe_view expand permute transpose t slice select unsqueeze squeeze unbind split split_with_sizes alias
    detach as_strided narrow unflatten flatten empty empty_like new_empty empty_strided lift_fresh _reshape_alias chunk
    diagonal
"""
_LAUNCHES_NOTHING = frozenset(_VIEWS.split())
# What makes the host wait for the device, or copies between them.
_ASKS = ("_local_scalar_dense", "item(", "nonzero", "masked_select", "unique", "_pin_memory", "is_nonzero", "equal(")
_MAY_COPY = frozenset(("contiguous", "to", "reshape"))  # where there is nothing to do, the same memory


class StepCalls(TorchDispatchMode):
    """Records every launch between `__enter__` and `__exit__`."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self._depth = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        found = func(*args, **(kwargs or {}))
        if (
            self._depth == 0
            and name not in _LAUNCHES_NOTHING
            and not (name in _MAY_COPY and _is_same_memory(found, args[0]))
        ):
            self.calls.append(f"{name}({_described((*args, *(kwargs or {}).values()))})")
        return found

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """Nothing in here is recorded."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def counts(self) -> Counter[str]:
        """How often each operation was launched."""
        return Counter(call.partition("(")[0] for call in self.calls)


def _is_same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _described(values: Any) -> str:
    parts = []
    for value in values:
        if isinstance(value, torch.Tensor):
            parts.append(f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}")
        elif isinstance(value, (list, tuple)):
            parts.append(f"[{_described(value)}]")
        else:
            parts.append(repr(value))
    return ", ".join(parts)


@contextmanager
def recorded(*models: torch.nn.Module) -> Iterator[StepCalls]:
    """Record a step of models whose layers are left out."""
    calls, hooks = StepCalls(), []
    open_layers: list[Any] = []

    def enter(*_: Any) -> None:
        open_layers.append(calls.left_out())
        open_layers[-1].__enter__()

    def leave(*_: Any) -> None:
        open_layers.pop().__exit__(None, None, None)

    for model in models:
        for layer in getattr(model, "layers", None) or model.get_submodule("backbone").layers:
            hooks += [layer.register_forward_pre_hook(enter), layer.register_forward_hook(leave)]
    try:
        with calls:
            yield calls
    finally:
        for hook in hooks:
            hook.remove()


def take_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let operations on a CPU take their interpreted kernels, and a recording count each of these as one launch."""
    interpreter = importlib.import_module("triton.runtime.interpreter")
    run = interpreter.GridExecutor.__call__

    def launch(executor: Any, *args: Any, **kwargs: Any) -> Any:
        mode = torch.utils._python_dispatch._get_current_dispatch_mode()
        if not isinstance(mode, StepCalls):
            return run(executor, *args, **kwargs)
        constants = [value for value in kwargs.values() if not isinstance(value, torch.Tensor)]
        if mode._depth == 0:
            mode.calls.append(f"kernel {executor.fn.__name__}({_described((*args, *constants))}) {executor.grid}")
        with mode.left_out():
            return run(executor, *args, **kwargs)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", launch)
    for name, module in list(sys.modules.items()):
        if name.startswith("paceline.ops.") and hasattr(module, "choose") and not name.endswith("dispatch"):
            monkeypatch.setattr(module, "choose", lambda _name, _tensor, _reference, kernel, _native=None: kernel)


def refusals(first: Sequence[str], second: Sequence[str]) -> list[str]:
    """What would go wrong if work was captured the first time and played back for the second.

    Args:
        first: its launches.
        second: the same work on other numbers.
    """
    asks = [call for call in first if call.startswith(_ASKS)]
    asks += [call for call in first if "index(" in call and "[bool[" in call]
    # of a number on the host
    asks += [call for call in first if call.startswith(("index_put_(", "copy_(")) and "[]" in call]
    return asks + [f"{one} became {other}" for one, other in zip(first, second, strict=False) if one != other]
