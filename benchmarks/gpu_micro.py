"""Where a step's time on a GPU can go: launches, products, the vocabulary, recurrent state, experts; and the ceilings.

    python -m benchmarks.gpu_micro --out docs/results
    python -m benchmarks.gpu_micro --parts ceilings launches
    python -m benchmarks.gpu_micro --device cpu            the script itself, on tiny inputs; times mean nothing

Each row has the median time of a call inside a captured graph (`us`), the least time that its bytes and operations
allow at the ceilings measured first (`floor_us`), their ratio, and the rates achieved. Results are compared with a
wider reference before they count; a case that fails or is wrong is told, the others go on, and the exit code is 3.
Cases that the time does not suffice for are left out, and named. `attention` and `layers` run the scripts that measure
those.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.command_line import positive, run, say
from benchmarks.growing_result import GrowingResult
from benchmarks.results import describe_machine, make_result, text_table

from paceline.errors import EXIT_CHECK_SAYS_NO, EXIT_DONE, ConfigError

if TYPE_CHECKING:
    from benchmarks.gpu_micro_clock import Bench, MicroCase, Row

NAME = "gpu-micro"
PARTS = ("ceilings", "launches", "products", "vocabulary", "delta", "experts")
OTHER_SCRIPTS = {"attention": "benchmarks.gpu_attention", "layers": "benchmarks.gpu_layers"}
_COLUMNS = ("part", "case", "size", "us", "floor_us", "ratio", "gb_per_s", "tflops", "error")


def main(arguments: Sequence[str]) -> int:
    """Measure the chosen parts, printing every row as it comes; write the result if asked for."""
    options = parse(arguments)
    if options.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported, which is below
    import torch
    from benchmarks.gpu_micro_clock import Bench, Ceilings, GraphClock

    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device {options.device} was asked for; torch sees no GPU", hint="--device cpu")
    torch.manual_seed(0)
    bench = Bench(GraphClock(device, options.num_replays), Ceilings())
    result = _result(options, arguments)
    failed, deadline_s = [], time.monotonic() + options.seconds
    for part in (part for part in PARTS if part in options.parts):
        try:
            cases = cases_of(part, bench)
        except ImportError as error:
            failed.append(f"{part}: {error}")
            continue
        for case in cases:
            if options.only not in case.name:
                continue
            row = _row(case, bench, is_late=time.monotonic() > deadline_s)
            if "failure" in row:
                failed.append(f"{case.part}, {case.name}, {case.size}: {row['failure']}")
            else:
                result.put(row)
            _print(row)
    for part in (part for part in OTHER_SCRIPTS if part in options.parts):
        failed += _other(part, options)
    result.finish()
    print(text_table(result.rows, _COLUMNS), flush=True)
    for text in failed:
        say(f"not measured: {text}")
    return EXIT_CHECK_SAYS_NO if failed else EXIT_DONE


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N, or cpu for a trial; default cuda")
    parser.add_argument(
        "--parts", nargs="+", choices=(*PARTS, *OTHER_SCRIPTS), default=list(PARTS), help=f"default {' '.join(PARTS)}"
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="only cases whose name contains this")
    parser.add_argument("--seconds", type=float, default=60.0, help="for all parts together; default 60")
    parser.add_argument("--num-replays", type=positive, default=20, help="of each graph; default 20")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help=f"also write FOLDER/{NAME}.json as rows come")
    return parser.parse_args(arguments)


def cases_of(part: str, bench: Bench) -> Iterator[MicroCase]:
    """The cases of a part, each made when its turn comes."""
    # A part whose operations cannot be imported must not take the others with it.
    if part == "launches":
        from benchmarks.gpu_micro_launches import launch_cases

        return launch_cases()
    if part in ("ceilings", "products"):
        from benchmarks.gpu_micro_products import ceiling_cases, product_cases

        return ceiling_cases() if part == "ceilings" else product_cases(bench.is_real)
    if part == "experts":
        from benchmarks.gpu_micro_experts import expert_cases

        return expert_cases(bench.is_real)
    from benchmarks.gpu_micro_steps import delta_cases, vocabulary_cases

    return (vocabulary_cases if part == "vocabulary" else delta_cases)(bench.is_real)


def _row(case: MicroCase, bench: Bench, *, is_late: bool) -> Row:
    """What a case measured, or why it did not."""
    row: Row = {"part": case.part, "case": case.name, "size": case.size}
    if is_late:
        return {**row, "failure": "no time was left"}
    try:
        found = case.run(bench)
    except Exception as error:
        lines = traceback.format_exc().strip().splitlines()
        say("\n".join(lines[-6:]))
        return {**row, "failure": f"{type(error).__name__}: {lines[-1][:200]}"}
    row |= found
    wrong, allowed = row.get("error"), row.pop("allowed", None)
    if wrong is not None and not (isinstance(wrong, float) and isinstance(allowed, float) and wrong <= allowed):
        return {**row, "failure": f"wrong by {wrong}, {allowed} is allowed"}
    return row


def _print(row: Row) -> None:
    numbers = (f"{key} {value:.4g}" for key, value in row.items() if isinstance(value, float))
    end = row.get("failure") or ", ".join(numbers)
    print(f"{row['part']}: {row['case']}, size {row['size']}: {end}", flush=True)


def _other(part: str, options: argparse.Namespace) -> list[str]:
    """Run another script with the options that all of them have; what kept it from a good end."""
    name = OTHER_SCRIPTS[part]
    if importlib.util.find_spec(name) is None:
        return [f"{part}: {name} does not exist"]
    given = ["--device", options.device, *([] if options.out is None else ["--out", str(options.out)])]
    try:
        code = importlib.import_module(name).main(given)
    except (Exception, SystemExit) as error:
        say("\n".join(traceback.format_exc().strip().splitlines()[-6:]))
        return [f"{part}: {type(error).__name__}"]
    return [f"{part}: exit code {code}"] if code else []


def _result(options: argparse.Namespace, arguments: Sequence[str]) -> GrowingResult:
    facts = [] if options.device != "cpu" else ["a trial: times mean nothing"]
    machine = describe_machine(*facts, device=options.device)
    head = make_result(NAME, [], machine=machine, arguments=arguments)
    settings = {"parts": list(options.parts), "num_replays": options.num_replays, "only": options.only}
    places = {part: place for place, part in enumerate(PARTS)}
    return GrowingResult(
        head,
        settings,
        options.out,
        key=("part", "case", "size"),
        order=lambda row: places[str(row["part"])],  # the order in which they came within a part
    )


if __name__ == "__main__":
    sys.exit(run(main))
