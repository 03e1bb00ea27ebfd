"""Compile every launch of the sanitizer's cases for a GPU that need not be there, and say what each takes of it.

    python -m benchmarks.compile_kernels
    python -m benchmarks.compile_kernels --only delta --dependent-launch

The interpreter runs plain Python, of which the compiler takes a part; so this finds what tests without a GPU cannot.
Launches are caught, specialised as Triton would specialise them, and compiled; nothing is computed by them. The table
has registers of a thread, bytes that do not fit into them (`spilled`), and shared memory of a program. Exit code 3 if a
variant does not compile.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.command_line import run, say
from benchmarks.results import text_table

from paceline.errors import EXIT_CHECK_SAYS_NO, EXIT_DONE, ConfigError

_OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg", "launch_pdl")  # of a launch, not of the kernel
_DIVISIBLE = [["tt.divisibility", 16]]


def main(arguments: Sequence[str]) -> int:
    """Compile all variants and print the table."""
    options = parse(arguments)
    import torch
    from benchmarks import sanitize, sanitize_comparing
    from benchmarks.sanitize_cases import make_cases

    from paceline.ops.dispatch import HAS_TRITON, triton

    if not HAS_TRITON or triton.knobs.runtime.interpret:
        raise ConfigError("Triton is not installed, or interprets", hint="without TRITON_INTERPRET")
    rows: dict[str, dict[str, object]] = {}
    compiler = _Compiler(rows, options.capability)
    with sanitize.counted_launches(), _all_variants(sanitize_comparing, torch, is_early=options.dependent_launch):
        for name, one in sanitize._kernels():
            one.run = compiler.instead_of(name, one)
        for name, case in make_cases(torch.device("cpu")):
            if options.only in name:
                try:
                    case()
                except Exception as error:  # results of launches that were not made: only the launches count
                    say(f"{name}: {type(error).__name__}: {str(error)[:80]}")
    print(text_table(list(rows.values())), flush=True)
    failed = [key for key, row in rows.items() if row["problem"] is not None]
    say(f"{len(rows)} variants, {len(failed)} do not compile")
    return EXIT_CHECK_SAYS_NO if failed or not rows else EXIT_DONE


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capability", type=int, default=90, help="of the GPU, times ten; default 90 (Hopper)")
    parser.add_argument("--only", default="", metavar="TEXT", help="only cases whose name contains this")
    parser.add_argument("--dependent-launch", action="store_true", help="as where kernels may begin early")
    return parser.parse_args(arguments)


@contextmanager
def _all_variants(comparing: Any, torch: Any, *, is_early: bool) -> Iterator[None]:
    """Both dtypes of every case, though it runs on a CPU; and early launches, though there is no GPU."""
    both = lambda _device, *, multiplies=False: [(torch.float32, 1.0), (torch.bfloat16, 1.0)]  # noqa: E731
    names = [name for name in sys.modules if name.startswith("benchmarks.sanitize_")]
    names += [name for name in sys.modules if is_early and name.startswith("paceline.ops.")]
    patches = [
        patch.object(sys.modules[name], attribute, value)
        for name in names
        for attribute, value in (("dtypes", both), ("dependent_launch", lambda _num_rows: True))
        if hasattr(sys.modules[name], attribute) and (attribute == "dtypes" or is_early)
    ]
    for one in patches:
        one.start()
    try:
        yield
    finally:
        for one in patches:
            one.stop()


class _Compiler:
    """Compiles what would be launched, each variant once."""

    def __init__(self, rows: dict[str, dict[str, object]], capability: int) -> None:
        self._rows, self._capability = rows, capability

    def instead_of(self, name: str, function: Any) -> Callable[..., None]:
        """What takes the place of a kernel's launch."""

        def compile_launch(*values: Any, **named: Any) -> None:
            named = {key: value for key, value in named.items() if key not in ("grid", "warmup")}
            options = {key: named.pop(key) for key in _OPTIONS if key in named}
            bound = {**dict(zip((p.name for p in function.params), values, strict=False)), **named}
            signature, constants, attributes = _specialised(function.params, bound)
            shown = ", ".join(f"{key}={value}" for key, value in constants.items() if key.isupper())
            key = f"{name} {signature} {constants} {options}"
            if key not in self._rows:
                found = self._compile(function, signature, constants, attributes, options)
                self._rows[key] = {"kernel": name, **found, "warps": options.get("num_warps", 4), "constants": shown}

        return compile_launch

    def _compile(
        self,
        function: Any,
        signature: dict[str, str],
        constants: dict[str, Any],
        attributes: dict[tuple[int], Any],
        options: dict[str, Any],
    ) -> dict[str, object]:
        from paceline.ops.dispatch import triton

        found: dict[str, object] = {"problem": None, "registers": None, "spilled": None, "shared": None}
        source = triton.compiler.ASTSource(fn=function, signature=signature, constexprs=constants, attrs=attributes)
        target = triton.backends.compiler.GPUTarget("cuda", self._capability, 32)
        try:
            compiled = triton.compile(source, target=target, options=options)
        except Exception as error:
            return {**found, "problem": str(error).strip().splitlines()[-1][:120]}
        registers, spilled = _usage(compiled.asm["ptx"], self._capability)
        return {**found, "registers": registers, "spilled": spilled, "shared": compiled.metadata.shared}


def _specialised(
    parameters: Sequence[Any], bound: dict[str, Any]
) -> tuple[dict[str, str], dict[str, Any], dict[tuple[int], Any]]:
    """Types, constants and known divisors as Triton derives them: 1 is a constant, pointers of torch are aligned."""
    import torch
    from triton.runtime.jit import mangle_type

    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int], Any] = {}
    for index, parameter in enumerate(parameters):
        value = bound.get(parameter.name, parameter.default if parameter.has_default else None)
        is_one = isinstance(value, int) and value == 1 and not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (is_one and not isinstance(value, bool)):
            signature[parameter.name], constants[parameter.name] = "constexpr", value
            continue
        signature[parameter.name] = mangle_type(value)
        is_multiple = isinstance(value, int) and value % 16 == 0 and not parameter.do_not_specialize
        if isinstance(value, torch.Tensor) or is_multiple:
            attributes[index,] = _DIVISIBLE
    return signature, constants, attributes


def _usage(ptx: str, capability: int) -> tuple[int | None, int | None]:
    """Registers of a thread, and bytes of it that were spilled, by the assembler."""
    from paceline.ops.dispatch import triton

    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        name = f"sm_{capability}{'a' if capability >= 90 else ''}"
        command = [triton.knobs.nvidia.ptxas.path, "-v", f"--gpu-name={name}", str(source), "-o", f"{folder}/out"]
        said = subprocess.run(command, capture_output=True, text=True).stderr
    numbers = [re.search(pattern, said) for pattern in (r"(\d+) registers", r"(\d+) bytes spill stores")]
    registers, spilled = (None if number is None else int(number[1]) for number in numbers)
    return registers, spilled


if __name__ == "__main__":
    sys.exit(run(main))
