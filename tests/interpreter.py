"""Triton's interpreter without five things that it does again and again for nothing.

Interpreted kernels take a good part of the suite's time, and these took more than half of theirs. What a kernel
computes, and what is refused, stays the same; `as_it_ships` is there to compare.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import math
import sys
from collections.abc import Iterator
from typing import Any

import pytest

_changes = pytest.MonkeyPatch()
_NAMES = ("_LangPatchScope", "_get_np_dtype", "_patch_lang", "interpreter_builder")


def hasten() -> None:
    """Change the interpreter in place, if it was imported and has not been changed; other versions are left alone."""
    interpreter: Any = sys.modules.get("triton.runtime.interpreter")
    if interpreter is None or hasattr(interpreter, "is_hastened"):
        return
    _changes.setattr(interpreter, "is_hastened", True, raising=False)
    if all(hasattr(interpreter, name) for name in _NAMES):
        _patch_the_language_once_a_launch(interpreter)
        _leave_out_checks_that_nobody_reads(interpreter)
        _look_types_up(interpreter)
        _name_types_of_tuples_when_asked(interpreter.tl.core)
        _keep_shapes(interpreter.tl.core)


@contextlib.contextmanager
def as_it_ships() -> Iterator[None]:
    """The interpreter without these changes."""
    _changes.undo()
    try:
        yield
    finally:
        hasten()


def _patch_the_language_once_a_launch(interpreter: Any) -> None:
    """A launch replaces the functions of `tl`; every call of a function within a kernel looked for them once more."""
    core, patch = interpreter.tl.core, interpreter._patch_lang

    @functools.cache
    def languages(function: Any) -> list[Any]:
        modules = [value for value in function.__globals__.values() if inspect.ismodule(value)]
        return [module for module in modules if module is interpreter.tl or module is core]

    def patch_once(function: Any) -> Any:
        functions = [core.tensor.__add__, *(module.load for module in languages(function))]
        is_patched = len(functions) > 1 and not any(map(core.is_builtin, functions))
        return interpreter._LangPatchScope() if is_patched else patch(function)

    _changes.setattr(interpreter, "_patch_lang", patch_once)


def _leave_out_checks_that_nobody_reads(interpreter: Any) -> None:
    """Integers were added and multiplied again, in 64 bits, for an assertion that is dropped unless Triton debugs."""
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        _changes.setattr(builder, "options", dataclasses.replace(builder.options, sanitize_overflow=False))


def _look_types_up(interpreter: Any) -> None:
    """NumPy's type for one of Triton's: a table of all of them was built for each question."""
    tl, find = interpreter.tl, interpreter._get_np_dtype
    known: dict[str, Any] = {}

    def find_once(dtype: Any) -> Any:
        scalar = dtype.element_ty if isinstance(dtype, tl.block_type) else dtype
        if isinstance(scalar, tl.pointer_type):
            return find(dtype)
        if scalar.name not in known:
            known[scalar.name] = find(dtype)
        return known[scalar.name]

    _changes.setattr(interpreter, "_get_np_dtype", find_once)


def _name_types_of_tuples_when_asked(core: Any) -> None:
    """Shapes are tuples of integers, for each of which a type was made and spelt out that next to nobody reads."""
    make = core.tuple.__init__

    def make_without(self: Any, args: Any, type: Any = None) -> None:
        values = list(args)
        if type is None and all(value.__class__ is int or value.__class__ is core.constexpr for value in values):
            self.values = values
        else:
            make(self, values, type)

    read_type = functools.cached_property(lambda self: core._type_for_tuple_values(self.values))
    read_type.__set_name__(core.tuple, "type")
    _changes.setattr(core.tuple, "type", read_type, raising=False)
    _changes.setattr(core.tuple, "__init__", make_without)


def _keep_shapes(core: Any) -> None:
    """Every tensor wrapped the sides of its shape again, and every change of an element's type checked the shape."""
    known: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def make(self: Any, handle: Any, type: Any) -> None:
        sides = tuple(type.shape) if type.is_block() else ()
        if sides not in known:
            known[sides] = core.constexpr(math.prod(sides)), core.tuple([core.constexpr(side) for side in sides])
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = known[sides]

    def with_element_type(self: Any, scalar: Any) -> Any:
        changed = object.__new__(core.block_type)
        changed.element_ty, changed.shape, changed.numel = scalar, self.shape, self.numel
        changed.name = f"<{self.shape}, {scalar}>"
        return changed

    _changes.setattr(core.tensor, "__init__", make)
    _changes.setattr(core.block_type, "with_element_ty", with_element_type)
