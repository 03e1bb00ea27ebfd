"""Every Triton kernel on a GPU: first whether it agrees with its float32 definition, then how long it takes.

    python -m benchmarks.kernels --out docs/results
    python -m benchmarks.kernels --device cpu            the script itself, on tiny inputs, through Triton's interpreter

Three versions of each operation: the reference as torch runs it, the reference under torch.compile, the kernel. Times
are medians of 100 calls between CUDA events, each after a pass over a buffer larger than the L2 cache, so weights and
inputs come from memory. `floor_us` is the least traffic over the memory's bandwidth; `share` is floor over kernel time.
Small batches are bound by launches and latency, not by bytes. Exit code 3, and no times, if a kernel is wrong.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.command_line import positive, report, run, say
from benchmarks.results import text_table

from paceline.errors import EXIT_CHECK_SAYS_NO, EXIT_DONE, ConfigError

if TYPE_CHECKING:
    import torch
    from benchmarks.kernel_cases import Case

NAME = "kernels"
BATCHES = (1, 8, 32, 128)
_NUM_WARM_UPS, _NUM_CALLS = 10, 100
_FLUSH_BYTES = 2**30  # far more than an L2 cache, and longer to write than a call takes the host to launch


def main(arguments: Sequence[str]) -> int:
    """Check all kernels, time all versions, print a table, write the result if asked for."""
    options = parse(arguments)
    if options.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported, which is below
    import torch

    from paceline.ops.dispatch import HAS_TRITON, triton

    is_real = options.device != "cpu"
    if not HAS_TRITON:
        raise ConfigError("Triton is not installed", hint="pip install triton")
    if is_real and not torch.cuda.is_available():
        raise ConfigError(f"device {options.device} was asked for; torch sees no GPU", hint="--device cpu")
    device = torch.device(options.device)
    rows = []
    are_right = True
    for case in _cases(device, options.batches, is_real=is_real):
        errors = case.errors()
        is_right = all(found <= allowed for found, allowed in errors)
        are_right &= is_right
        row: dict[str, object] = {
            "operation": case.operation,
            "sizes": case.sizes.name,
            "batch": case.batch,
            "is_right": is_right,
            "error_float32": errors[0][0],
            "error_bfloat16": errors[1][0],
        }
        if is_right and are_right:
            row |= _times(case, device, options, is_real=is_real)
        rows.append(row)
        say(f"{case.operation}, {case.sizes.name}, batch {case.batch}: {'right' if is_right else f'WRONG {errors}'}")
    print(text_table(rows))
    if not are_right:
        say("a kernel does not compute its definition; no result is written")
        return EXIT_CHECK_SAYS_NO
    how = f"{options.bandwidth_tb} TB/s assumed" if is_real else "interpreted: times mean nothing"
    report(NAME, rows, options, arguments, device=options.device, facts=[f"triton {triton.__version__}", how])
    return EXIT_DONE


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N, or cpu for a trial; default cuda")
    parser.add_argument("--batches", type=positive, nargs="+", default=list(BATCHES), help="requests; 1 8 32 128")
    parser.add_argument("--bandwidth-tb", type=float, default=4.8, help="memory bandwidth, TB/s; default 4.8 (H200)")
    parser.add_argument(
        "--without-compile", action="store_true", help="leave torch.compile out, which is slow to start"
    )
    parser.add_argument("--threads", type=positive, default=2, help="CPU threads; default 2")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="also write FOLDER/NAME.json, such as docs/results")
    return parser.parse_args(arguments)


def _cases(device: torch.device, batches: Sequence[int], *, is_real: bool) -> Iterator[Case]:
    from benchmarks.kernel_cases import EIGHT_B, SMOLLM2, TINY, make_cases

    return make_cases((SMOLLM2, EIGHT_B), batches, device) if is_real else make_cases((TINY,), (1, 2), device)


def _times(case: Case, device: torch.device, options: argparse.Namespace, *, is_real: bool) -> dict[str, object]:
    """Median microseconds of each version, the floor, and the kernel's share of what the memory allows."""
    clock = _event_us if is_real else _wall_us
    row: dict[str, object] = {"reference_us": clock(lambda: case.reference(*case.arguments), device)}
    if is_real and not options.without_compile:
        row["compiled_us"] = _compiled_us(case, device)
    kernel_us = clock(lambda: case.kernel(*case.arguments), device)
    row["kernel_us"] = kernel_us
    if is_real:
        floor_us = case.num_bytes / (options.bandwidth_tb * 1e6)
        row |= {"num_bytes": case.num_bytes, "floor_us": floor_us, "share": floor_us / kernel_us}
    return row


def _compiled_us(case: Case, device: torch.device) -> float | None:
    import torch

    torch._dynamo.reset()
    compiled = torch.compile(case.reference, dynamic=False)
    try:
        return _event_us(lambda: compiled(*case.arguments), device)
    except torch._dynamo.exc.TorchDynamoException as error:
        say(f"torch.compile fails on {case.operation}: {str(error).splitlines()[0]}")
        return None


def _event_us(call: Callable[[], object], device: torch.device) -> float:
    """Median of 100 calls, each after the L2 cache was overwritten."""
    import torch

    flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device=device)
    for _ in range(_NUM_WARM_UPS):
        call()
    pairs = []
    for _ in range(_NUM_CALLS):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush.zero_()
        began.record()
        call()
        ended.record()
        pairs.append((began, ended))
    torch.cuda.synchronize(device)
    return statistics.median(began.elapsed_time(ended) for began, ended in pairs) * 1e3


def _wall_us(call: Callable[[], object], device: torch.device) -> float:
    """The best of three calls, to have a number at all."""
    seconds = []
    for _ in range(3):
        began_s = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began_s)
    return min(seconds) * 1e6


if __name__ == "__main__":
    sys.exit(run(main))
