"""Every Triton kernel of the library once, at small sizes, against its definition: for a memory or race checker.

    python -m benchmarks.sanitize                       first: what has to be compiled is compiled without a checker
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python -m benchmarks.sanitize --without-poison
    compute-sanitizer --tool racecheck python -m benchmarks.sanitize --without-poison --seconds 100

Prints a table; exit code 3 if a kernel computes something else than its definition, fails, or was not run by any case.
Fresh memory is filled with NaN, so an output that a kernel does not write is told. Kernels are counted as they are
launched, and compared with all that the sources have, so that a new one is missed here.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import os
import pkgutil
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.command_line import run, say
from benchmarks.results import ROOT, text_table

from paceline.errors import EXIT_CHECK_SAYS_NO, EXIT_DONE, ConfigError

OPERATIONS = ROOT / "src" / "paceline" / "ops"


def main(arguments: Sequence[str]) -> int:
    """Run all cases and print what was found."""
    options = parse(arguments)
    if options.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported, which is below
    import torch
    from benchmarks.sanitize_cases import make_cases

    from paceline.ops.dispatch import allow_dependent_launch

    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device {options.device} was asked for; torch sees no GPU", hint="--device cpu")
    allow_dependent_launch("on" if options.dependent_launch else "off")
    rows: list[dict[str, object]] = []
    launched: set[str] = set()
    left_out: list[str] = []
    began_s = time.monotonic()
    deadline_s = began_s + options.seconds
    with counted_launches() as counted:
        for name, case in make_cases(device):
            if options.only not in name:
                continue
            if time.monotonic() > deadline_s:
                left_out.append(name)
                continue
            counted.clear()
            rows += _rows(name, case, counted, poisons=not options.without_poison)
            launched |= set(counted)
            say(f"{name}: {rows[-1]['verdict']}, {time.monotonic() - began_s:.1f} s")
    print(text_table(rows), flush=True)
    if left_out:
        say(f"no time was left for {', '.join(left_out)}")
    missing = sorted(entry_kernels(OPERATIONS) - launched) if not (options.only or left_out) else []
    if missing:
        say(f"no case runs {', '.join(missing)}")
    are_right = all(row["verdict"] == "right" for row in rows)
    return EXIT_DONE if are_right and not missing else EXIT_CHECK_SAYS_NO


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N, or cpu, where Triton interprets; default cuda")
    parser.add_argument("--seconds", type=float, default=600.0, help="cases that come later are left out; default 600")
    parser.add_argument("--only", default="", metavar="TEXT", help="only cases whose name contains this")
    parser.add_argument(
        "--dependent-launch", action="store_true", help="kernels that can may begin before those ahead of them end"
    )
    parser.add_argument(
        "--without-poison", action="store_true", help="do not fill fresh memory with NaN: fewer launches"
    )
    return parser.parse_args(arguments)


def _rows(
    name: str, case: Callable[[], list[tuple[str, float, float]]], counted: list[str], *, poisons: bool
) -> list[dict[str, object]]:
    """A row per comparison of a case; one with the reason if it failed."""
    try:
        with poisoned_memory() if poisons else warnings.catch_warnings():
            found = case()
    except Exception:
        lines = traceback.format_exc().strip().splitlines()
        say("\n".join(lines[-6:]))
        return [{"case": name, "error": None, "allowed": None, "verdict": f"FAILED: {lines[-1][:100]}"}]
    kernels = ", ".join(dict.fromkeys(counted))
    return [
        {
            "case": f"{name}, {part}" if part else name,
            "error": error,
            "allowed": allowed,
            "verdict": "right" if error <= allowed else "WRONG",
            "kernels": kernels,
        }
        for part, error, allowed in found
    ]


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fill what torch allocates with NaN, or with the largest integers."""
    import torch

    before = torch.are_deterministic_algorithms_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that some operation has no deterministic form
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = True
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before)
            torch.utils.deterministic.fill_uninitialized_memory = filled


@contextmanager
def counted_launches() -> Iterator[list[str]]:
    """The names of kernels, in the order of their launches, while this is open."""
    launched: list[str] = []
    found = dict(_kernels())
    for name, one in found.items():
        one.run = _told(name, one.run, launched)
    try:
        yield launched
    finally:
        for one in found.values():
            del one.run


def _kernels() -> Iterator[tuple[str, Any]]:
    import paceline.ops
    from paceline.ops.dispatch import triton

    kernel_type = type(triton.jit(_told))
    for entry in pkgutil.iter_modules(paceline.ops.__path__, "paceline.ops."):
        module = importlib.import_module(entry.name)
        for name, value in vars(module).items():
            if isinstance(value, kernel_type):
                yield name, value


def _told(name: str, launch: Callable[..., object], launched: list[str]) -> Callable[..., object]:
    def tell(*arguments: Any, **settings: Any) -> object:
        launched.append(name)
        return launch(*arguments, **settings)

    return tell


def entry_kernels(folder: Path) -> set[str]:
    """Kernels in a folder's files that no other kernel calls, or hands to a reduction: those that are launched."""
    functions: dict[str, ast.FunctionDef] = {}
    for file in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and any(_is_mark(mark) for mark in node.decorator_list):
                functions[node.name] = node
    used = {name.id for node in functions.values() for name in ast.walk(node) if isinstance(name, ast.Name)}
    return set(functions) - used


def _is_mark(decorator: ast.expr) -> bool:
    if isinstance(decorator, ast.Call):
        decorator = decorator.func
    return isinstance(decorator, ast.Name) and decorator.id == "kernel"


if __name__ == "__main__":
    sys.exit(run(main))
