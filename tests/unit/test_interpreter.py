"""The interpreter of the tests against the one that ships: the same numbers, the same refusals, less work."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from tests.interpreter import as_it_ships

from paceline.ops.dispatch import HAS_TRITON, kernel, tl

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")


@kernel
def _mix(x, word: tl.uint32):
    """Wraps around in 32 bits, as hashes do."""
    x = (x ^ word) * 0xCC9E2D51
    return (x << 15) | (x >> 17)


@kernel
def _mixed_kernel(x_ptr, sums_ptr, words_ptr, count, BLOCK: tl.constexpr):
    """Functions within a kernel, loads behind a mask, shapes, reductions, casts, both kinds of integers."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < count, other=0.0)
    words = _mix(_mix(offsets.to(tl.uint32), 7), 2**31 + 11)
    tl.store(words_ptr + offsets, words.to(tl.int32, bitcast=True) + 2**30, mask=offsets < count)
    x = tl.where(words % 3 == 0, x, -x).to(tl.float16).to(tl.float32)
    tile = tl.reshape(x, (4, BLOCK // 4)) * (1 + tl.arange(0, 4))[:, None]
    columns = tl.sum(tile, axis=0) + tile.shape[0] * 100 + tile.numel
    tl.store(sums_ptr + tl.program_id(0) * (BLOCK // 4) + tl.arange(0, BLOCK // 4), columns)


@kernel
def _refused_kernel(x_ptr, BLOCK: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, BLOCK), tl.zeros((BLOCK,), tl.float32) % (x_ptr + 1))


def _interpreter() -> Any:
    interpreter = importlib.import_module("triton.runtime.interpreter")
    if not isinstance(_mix, interpreter.InterpretedFunction):
        pytest.skip("Triton compiles here")
    return interpreter


def _run() -> tuple[list[float], list[int]]:
    count, block = 100, 32
    x = torch.randn(count, generator=torch.Generator().manual_seed(0))
    sums, words = torch.zeros(32), torch.zeros(count, dtype=torch.int32)
    _mixed_kernel[(4,)](x, sums, words, count, BLOCK=block)
    return sums.tolist(), words.tolist()


def test_it_computes_what_the_one_that_ships_computes() -> None:
    """Bit for bit."""
    _interpreter()
    hastened = _run()
    with as_it_ships():
        assert _run() == hastened
    assert len(set(hastened[1])) == 100 and min(hastened[1]) < 0 < max(hastened[1])


def test_it_refuses_what_the_one_that_ships_refuses() -> None:
    interpreter = _interpreter()
    with pytest.raises(interpreter.InterpreterError) as hastened:
        _refused_kernel[(1,)](torch.zeros(4), BLOCK=4)
    with as_it_ships(), pytest.raises(interpreter.InterpreterError) as shipped:
        _refused_kernel[(1,)](torch.zeros(4), BLOCK=4)
    assert str(hastened.value) == str(shipped.value)


def test_a_launch_patches_once_and_leaves_the_language_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four programs with two calls each; in between, and after a fault, `tl` is what it was."""
    interpreter, calls = _interpreter(), []
    patch = interpreter._patch_lang_tensor
    monkeypatch.setattr(interpreter, "_patch_lang_tensor", lambda *args: (calls.append(1), patch(*args)))
    _run()  # the first one may patch the module of `tl.sum` as well, and nobody restores that one
    for _ in range(2):
        calls.clear()
        _run()
        assert len(calls) == 1
        with pytest.raises(interpreter.InterpreterError):
            _refused_kernel[(1,)](torch.zeros(4), BLOCK=4)
        assert interpreter.tl.core.is_builtin(tl.load) and interpreter.tl.core.is_builtin(tl.tensor.__add__)
    with as_it_ships():
        calls.clear()
        _run()
        assert len(calls) > 8
