"""What strict loading and the fingerprint cost beside merely reading the same files.

    python -m benchmarks.strict_loading --out docs/results

Three ways to the same numbers, in turns, medians of several loads each: `plain` reads every tensor of the weight files
(of a .gguf file by unpacking it) and casts it, without a single check; `strict` is what a user gets: names, shapes,
coverage, NaN and infinity looked at; tokenizer and packing included, all but the fingerprint; `fingerprint` reads the
stored probe and replays it on the loaded pair. `fingerprint_share` is its part of loading target and drafter. Files are
in the page cache.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.command_line import DTYPES, make_parser, name_of, positive, report, run, say
from benchmarks.results import text_table

from paceline.errors import EXIT_DONE, ConfigError

NAME = "strict-loading"
PLAIN_TARGET, PLAIN_DRAFTER = "plain target", "plain drafter"
STRICT_TARGET, STRICT_DRAFTER = "strict target", "strict drafter"
FINGERPRINT = "fingerprint"


def main(arguments: Sequence[str]) -> int:
    """Load in every dtype and print the table."""
    options = parse(arguments)
    import torch

    torch.set_num_threads(options.threads)
    rows = [row for dtype in options.dtype for row in measure_dtype(dtype, options)]
    print(text_table(rows))
    report(NAME, rows, options, arguments, facts=[f"medians of {options.num_loads} loads"])
    return EXIT_DONE


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Options."""
    parser = make_parser(__doc__)
    parser.add_argument("--num-loads", type=positive, default=7, help="of each kind; default 7")
    parser.add_argument("--dtype", choices=DTYPES, nargs="+", default=list(DTYPES), help="one or both; default both")
    return parser.parse_args(arguments)


def measure_dtype(dtype: str, options: argparse.Namespace) -> list[dict[str, object]]:
    """One row for the target and one for the drafter, in one dtype on the CPU."""
    from paceline.checkpoint.locate import locate_drafter, locate_target
    from paceline.models.fingerprint import check_fingerprint
    from paceline.models.loading import load_drafter, load_target, read_fingerprint

    say(f"loading {options.model} and {options.draft_model} in {dtype}, {options.num_loads} times")
    target_files = weight_files(locate_target(options.model))
    folder = locate_drafter(options.draft_model)
    drafter_files = weight_files(folder)
    target = load_target(options.model, dtype=dtype, device="cpu")
    drafter = load_drafter(str(folder), target, check_fingerprint=False)

    def replay() -> None:
        stored = read_fingerprint(folder)
        if stored is None:
            raise ConfigError(f"{folder} has no fingerprint, whose cost is measured here")
        check_fingerprint(target.model, drafter.model, stored)

    seconds = median_seconds(
        {
            PLAIN_TARGET: lambda: read_plainly(target_files, dtype),
            STRICT_TARGET: lambda: load_target(options.model, dtype=dtype, device="cpu"),
            PLAIN_DRAFTER: lambda: read_plainly(drafter_files, dtype),
            STRICT_DRAFTER: lambda: load_drafter(str(folder), target, check_fingerprint=False),
            FINGERPRINT: replay,
        },
        options.num_loads,
    )
    sizes = [sum(file.stat().st_size for file in files) / 1e6 for files in (target_files, drafter_files)]
    names = [name_of(options.model), name_of(options.draft_model)]
    return [{"dtype": dtype, **row} for row in rows_of(seconds, names, sizes)]


def weight_files(path: Path) -> list[Path]:
    """A .gguf file itself, or the safetensors files that hold the weights of a model folder.

    Raises:
        ConfigError: there are none.
    """
    from paceline.checkpoint.export import FINGERPRINT_FILE

    if path.suffix == ".gguf":
        return [path]
    files = sorted(file for file in path.glob("*.safetensors") if file.name != FINGERPRINT_FILE)
    if not files:
        raise ConfigError(f"{path} holds no safetensors files to be read")
    return files


def read_plainly(files: Sequence[Path], dtype: str) -> None:
    """Read and cast all tensors; every number is touched, since a mapped file costs nothing until it is."""
    import torch
    from safetensors.torch import load_file

    from paceline.checkpoint.gguf import open_gguf

    for file in files:
        source = open_gguf(file) if file.suffix == ".gguf" else None
        found = load_file(file) if source is None else {}
        for name in found if source is None else source.names():
            tensor = found[name] if source is None else source.load(name)
            tensor.to(getattr(torch, dtype), copy=True)


def median_seconds(actions: Mapping[str, Callable[[], object]], num_loads: int) -> dict[str, float]:
    """Medians; the actions take turns, so that a drift of the machine meets all of them, and the first turn is warm-up.

    Args:
        actions: by name.
        num_loads: turns that count.
    """
    seconds: dict[str, list[float]] = {name: [] for name in actions}
    for turn in range(num_loads + 1):
        for name, action in actions.items():
            gc.collect()  # a load must not pay for freeing the one before
            began_s = time.perf_counter()
            action()
            if turn:
                seconds[name].append(time.perf_counter() - began_s)
    return {name: statistics.median(found) for name, found in seconds.items()}


def rows_of(seconds: Mapping[str, float], names: Sequence[str], megabytes: Sequence[float]) -> list[dict[str, object]]:
    """One row per model, target first; the fingerprint is in the drafter's."""
    both = seconds[STRICT_TARGET] + seconds[STRICT_DRAFTER]
    kinds = ((PLAIN_TARGET, STRICT_TARGET, None), (PLAIN_DRAFTER, STRICT_DRAFTER, seconds[FINGERPRINT]))
    return [
        {
            "model": name,
            "megabytes": size,
            "plain_s": seconds[plain],
            "strict_s": seconds[strict],
            "strict_over_plain": seconds[strict] / seconds[plain],
            "fingerprint_s": fingerprint,
            "fingerprint_share": None if fingerprint is None else fingerprint / both,
        }
        for name, size, (plain, strict, fingerprint) in zip(names, megabytes, kinds, strict=True)
    ]


if __name__ == "__main__":
    sys.exit(run(main))
