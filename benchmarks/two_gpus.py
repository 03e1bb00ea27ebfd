"""Targets over two GPUs, by tensor and by pipeline parallelism, against one: the same tokens, and step times.

    python -m benchmarks.two_gpus --out docs/results
    python -m benchmarks.two_gpus --parts steps --step-shapes qwen3-8b --batches 1 32
    python -m benchmarks.two_gpus --device cpu --shapes tiny-k3 tiny-qwen3 --step-shapes tiny-qwen3 --new-tokens 6 \\
        --timed 4        over gloo, as a trial

One process first, then two under torchrun, each once for all shapes (`two_gpus_work.py`); rows are on disk as they
come.

* `tokens`: a random target and a random DFlash drafter in float32, written to a folder and opened as `paceline
  generate --tp 2` and `--pp 2` do, answer prompts greedily, with the drafter and without. `num_equal` counts prompts
  whose tokens are those of one GPU. SmolLM2's nine heads do not halve: it is cut in stages alone.
* `steps`: bf16 weights made on the device. `step_ms` is a bare step between events, with and without recordings
  (`mode`); of stages, which record nothing, the time of a closed batch over its passes. Nothing is timed before the
  same shapes have run: what compiling costs is in no figure.
* `sums`: microseconds of a sum over both GPUs in a recorded chain of them, as layers use it and through memory that
  each GPU reads of the other.

A launch has a time limit, and a case that fails is told while the others go on; exit code 3 if a token differs or
something failed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.command_line import positive, run, say
from benchmarks.growing_result import GrowingResult
from benchmarks.results import ROOT, describe_machine, make_result, text_table
from benchmarks.step_shapes import SHAPES

from paceline.errors import EXIT_CHECK_SAYS_NO, EXIT_DONE

NAME = "gpu-two"
SPREADS = {"one": (1, 1), "tp 2": (2, 1), "pp 2": (1, 2)}  # ranks that share a layer, and stages
PARTS = ("tokens", "steps", "sums")
_NUM_LAST_LINES = 60  # of what a launch says: a line per rank and case, and whatever went wrong
KEY = ("part", "shape", "spread", "drafter", "batch", "mode")


def main(arguments: Sequence[str]) -> int:
    """Launch one process, then two, compare, print the table."""
    options = parse(arguments)
    if options.worker is not None:
        from benchmarks.two_gpus_work import work

        return work(options)
    rows: list[dict[str, Any]] = []
    result = _result(options, arguments)
    failed = False
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        if "tokens" in options.parts:
            from benchmarks.two_gpus_work import write_models

            for shape in options.shapes:
                began_s = time.monotonic()
                write_models(folder / shape, shape)
                say(f"{shape}: written in {time.monotonic() - began_s:.1f} s")
        alone: dict[tuple[str, str], list[list[int]]] = {}
        for num_ranks in (1, 2):
            found, is_complete = launch(num_ranks, folder, options)
            failed |= not is_complete
            for told in found:
                row = {name: told.get(name) for name in KEY} | told
                tokens = row.pop("token_ids", None)
                if tokens is not None:
                    key = (row["shape"], row["drafter"])
                    if num_ranks == 1:
                        alone[key] = tokens
                    known = alone.get(key)
                    row["num_equal"] = None if known is None else sum(map(list.__eq__, tokens, known))
                    failed |= row["num_equal"] is None or row["num_equal"] < len(tokens)
                failed |= "error" in row
                rows.append(row)
                result.put(row)
                print(", ".join(f"{key} {value}" for key, value in row.items() if value is not None), flush=True)
    result.finish()
    print(text_table(rows), flush=True)
    return EXIT_CHECK_SAYS_NO if failed or not rows else EXIT_DONE


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="default cuda")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="default all")
    parser.add_argument(
        "--shapes",
        nargs="+",
        choices=SHAPES,
        default=["slim-qwen3", "k3-mini", "smollm2-135m"],
        help="whose tokens are compared; default slim-qwen3 k3-mini smollm2-135m",
    )
    parser.add_argument(
        "--step-shapes", nargs="+", choices=SHAPES, default=["qwen3-8b", "smollm2-135m"], help="timed, dense ones"
    )
    parser.add_argument("--spreads", nargs="+", choices=tuple(SPREADS), default=list(SPREADS), help="default all")
    parser.add_argument("--drafters", nargs="+", choices=("none", "dflash"), default=["none", "dflash"])
    parser.add_argument("--modes", nargs="+", choices=("recorded", "eager"), default=["recorded", "eager"])
    parser.add_argument("--batches", nargs="+", type=positive, default=[1, 32], help="of steps; default 1 32")
    parser.add_argument("--num-prompts", type=positive, default=4, help="default 4")
    parser.add_argument("--new-tokens", type=positive, default=32, help="of each; default 32")
    parser.add_argument("--timed", type=positive, default=60, help="steps; a third as many run before; default 60")
    parser.add_argument("--case-seconds", type=float, default=75.0, help="for one launch; default 75")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help=f"also write FOLDER/{NAME}.json as rows come")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def launch(num_ranks: int, folder: Path, options: argparse.Namespace) -> tuple[list[dict[str, Any]], bool]:
    """What so many processes found, and whether they came to their end."""
    command = [sys.executable]
    if num_ranks > 1:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    command += ["-m", "benchmarks.two_gpus", "--worker", str(num_ranks), "--folder", str(folder)]
    for name in ("parts", "shapes", "step_shapes", "spreads", "drafters", "modes", "batches"):
        command += ["--" + name.replace("_", "-"), *map(str, getattr(options, name))]
    for name in ("device", "num_prompts", "new_tokens", "timed"):
        command += ["--" + name.replace("_", "-"), str(getattr(options, name))]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT)))}
    began_s, log = time.monotonic(), folder / f"{num_ranks}.log"
    with log.open("w", encoding="utf-8") as file:
        # a group of their own, so that whatever torchrun started ends with it
        process = subprocess.Popen(command, env=variables, stdout=file, stderr=file, cwd=ROOT, start_new_session=True)
        try:
            exit_code: int | None = process.wait(options.case_seconds)
        except subprocess.TimeoutExpired:
            exit_code = None
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    is_complete = exit_code == 0
    told = "\n".join(log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-_NUM_LAST_LINES:])
    how = f"exit code {exit_code}" if exit_code is not None else "stopped"
    say(f"{num_ranks} process{'es' * (num_ranks > 1)}: {how} after {time.monotonic() - began_s:.1f} s\n{told}")
    found = folder / f"{num_ranks}.jsonl"
    lines = found.read_text(encoding="utf-8").splitlines() if found.exists() else []
    return [json.loads(line) for line in lines], is_complete


def _result(options: argparse.Namespace, arguments: Sequence[str]) -> GrowingResult:
    names = " ".join(dict.fromkeys([*options.shapes, *options.step_shapes]))
    head = make_result(NAME, [], machine=describe_machine(names, device=options.device), arguments=arguments)
    settings = {"num_prompts": options.num_prompts, "new_tokens": options.new_tokens, "timed": options.timed}
    return GrowingResult(head, settings, options.out, key=KEY, order=lambda row: [str(row[name]) for name in KEY])


if __name__ == "__main__":
    sys.exit(run(main))
