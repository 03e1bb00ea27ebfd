"""Everything that is measured on a GPU, in one call: is it right, what does a step cost, what does drafting gain.

    make bench-gpu
    make bench-gpu ARGS="--parts gate steps --out docs/results"
    python -m benchmarks.bench_gpu --out OUT --data DATA --with-vllm --seconds 570
    python -m benchmarks.bench_gpu --steps-args "--batches 1 32 --rounds 1" --parts steps

Parts, in this order, each a process of its own, so that a crash costs one part:

* `gate`: recorded steps equal eager ones for 50 steps, bf16 follows float32. A shape that fails is not measured.
* `micro`: launches, library products, the ceilings of copies and products (`gpu_micro.py`).
* `steps`: steps with random weights, plain and drafting, beside vLLM's and their floors (`gpu_steps.py`).
* `text`: speculative over plain decoding of real text, A-B-B-A, at 1, 8, 32 and 128 requests at once (`gpu_text.py`).
  `--data` is a folder with `gsm8k.jsonl` and token files of the target's own text; without one, the prompts of this
  repository are read.
* `prefix`: does the gain survive the prefix cache, at 1k and 4k tokens (`prefix_cache_gain.py`).
* `vllm`, only with `--with-vllm`: its steps (`benchmarks/vllm/`). Its processes start together once nothing of ours is
  timed, which takes minutes, then measure in turn; their times are put into the rows of `steps`.

Every part has a limit of its own, `--steps-seconds` and so on, and writes OUT/NAME.json as its rows come, so a part
that is cut short leaves what it has. Exit code 3 if the gate says no, 1 if a part failed or was cut short.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.command_line import DRAFTER, TARGET, run, say
from benchmarks.results import text_table
from benchmarks.vllm.peers import join_peers, read_peers
from benchmarks.vllm.stepping import CONFIGS, RESULT

from paceline.errors import EXIT_CHECK_SAYS_NO, EXIT_DONE, EXIT_FAILED

PARTS = ("gate", "micro", "steps", "text", "prefix")
PEER = "vllm"
SHAPES = ("smollm2-135m", "qwen3-8b", "k3-mini")
LIMITS_S = {"gate": 120, "micro": 75, "steps": 300, "text": 180, "prefix": 120, PEER: 420}
_TIME_UP = "time is up"
_GRACE_S = 5.0  # between asking a process to end and ending it
_SMALLEST_S = 10.0  # no part is begun with less


@dataclass(frozen=True)
class Outcome:
    """What became of a part; `code` is None if it was not run to its end."""

    part: str
    code: int | None
    seconds: float
    note: str = ""


class Clock:
    """What is left of the time for the whole call."""

    def __init__(self, seconds: float) -> None:
        self._end_s = time.monotonic() + seconds

    @property
    def left_s(self) -> float:
        """Seconds."""
        return self._end_s - time.monotonic()


def main(arguments: Sequence[str]) -> int:
    """Run the parts, then say what became of each."""
    options = parse(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    clock = Clock(options.seconds)
    outcomes: list[Outcome] = []
    shapes = options.shapes
    if "gate" in options.parts:
        gate_result(options).unlink(missing_ok=True)  # an older verdict is none
        outcomes.append(run_part("gate", options, shapes, clock))
        shapes = sound_shapes(options, has_failed=outcomes[0].code != EXIT_DONE)
    for part in (part for part in PARTS[1:] if part in options.parts):
        wanted = needs(part, shapes)
        if wanted is not None and not wanted:
            outcomes.append(Outcome(part, None, 0.0, "the gate said no"))
        else:
            outcomes.append(run_part(part, options, wanted or shapes, clock))
    if options.with_vllm:
        outcomes.append(run_vllm(options, clock))
    print(text_table([vars(outcome) for outcome in outcomes]), flush=True)
    print("files:", *sorted(path.name for path in options.out.glob("*.json")), flush=True)
    return exit_code(outcomes)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", choices=PARTS, nargs="+", default=list(PARTS))
    parser.add_argument("--out", type=Path, default=Path("runs/bench-gpu"), metavar="FOLDER")
    parser.add_argument("--seconds", type=float, default=1800.0, help="for everything; default 1800")
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), help=f"default {' '.join(SHAPES)}")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N, or cpu for a trial; default cuda")
    parser.add_argument("--model", default=TARGET, help=f"target of the text; default {TARGET}")
    parser.add_argument("--draft-model", default=DRAFTER, help=f"drafter of the text; default {DRAFTER}")
    parser.add_argument("--data", type=Path, metavar="FOLDER", help="gsm8k.jsonl and *.npz for `text`")
    parser.add_argument("--with-vllm", action="store_true", help="measure vLLM's steps as well, if it is installed")
    parser.add_argument("--despite-gate", action="store_true", help="measure what did not pass the gate, too")
    for part, limit_s in LIMITS_S.items():
        parser.add_argument(f"--{part}-args", default="", metavar="ARGS", help=f"more arguments for `{part}`")
        parser.add_argument(
            f"--{part}-seconds", type=float, default=limit_s, metavar="S", help=f"its limit; default {limit_s}"
        )
    return parser.parse_args(arguments)


def command(part: str, options: argparse.Namespace, shapes: Sequence[str], seconds: float) -> list[str]:
    """The module of a part and its arguments."""
    device, out = ["--device", options.device], ["--out", str(options.out)]
    models = ["--model", options.model, "--draft-model", options.draft_model]
    more = shlex.split(getattr(options, f"{part}_args"))
    match part:
        case "gate":
            return ["gpu_steps", "--gate-only", "--shapes", *shapes, *device, *out, *more]
        case "micro":
            return ["gpu_micro", "--seconds", f"{min(60.0, seconds):.0f}", *device, *out, *more]
        case "steps":
            peer = options.out / PEER / RESULT
            peers = ["--peer", str(peer)] if peer.exists() else []
            return ["gpu_steps", "--skip-gate", "--shapes", *shapes, *peers, *device, *out, *more]
        case "text":
            limit = ["--seconds", f"{max(1.0, seconds - _SMALLEST_S):.0f}"]  # to end by itself
            return ["gpu_text", *models, *text_sets(options.data), *limit, *device, *out, *more]
        case "prefix":
            return ["prefix_cache_gain", *models, *device, *out, *more]
        case _:
            known = [shape for shape in shapes if shape in CONFIGS]
            return ["vllm.stepping", "--out", str(options.out / PEER), "--shapes", *known, *more]


def text_sets(data: Path | None) -> list[str]:
    """Prompt files of a folder as arguments: gsm8k, and the held-out part of the target's own text."""
    if data is None:
        return []
    files = [("gsm8k", path) for path in data.glob("gsm8k.jsonl")]
    files += [("selfchat", path) for path in sorted(data.glob("*.npz"))]
    return [argument for name, path in files for argument in ("--set", f"{name}={path}")]


def run_part(part: str, options: argparse.Namespace, shapes: Sequence[str], clock: Clock) -> Outcome:
    """Run a part to its end, or to the end of the time."""
    limit_s = min(clock.left_s, getattr(options, f"{part}_seconds"))
    if limit_s < _SMALLEST_S:
        return Outcome(part, None, 0.0, _TIME_UP)
    module, *arguments = command(part, options, shapes, limit_s)
    say(f"=== {part}, {limit_s:.0f} s: python -m benchmarks.{shlex.join([module, *arguments])}")
    began_s = time.monotonic()
    process = start(module, arguments)
    try:
        code: int | None = process.wait(timeout=limit_s)
    except subprocess.TimeoutExpired:
        code = None
    finally:
        end(process)
    seconds = time.monotonic() - began_s
    say(f"=== {part}: {'cut short' if code is None else f'exit code {code}'} after {seconds:.1f} s")
    return Outcome(part, code, round(seconds, 1), _TIME_UP if code is None else "")


def start(module: str, arguments: Sequence[str]) -> subprocess.Popen[bytes]:
    """A script of this folder as the head of its own group of processes."""
    return subprocess.Popen([sys.executable, "-m", f"benchmarks.{module}", *arguments], start_new_session=True)


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process and those that it started, if it still runs; it may say a last word."""
    if process.poll() is not None:
        return
    for how, seconds in ((signal.SIGINT, _GRACE_S), (signal.SIGKILL, None)):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, how)
        with suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
            return


def run_vllm(options: argparse.Namespace, clock: Clock) -> Outcome:
    """Measure vLLM, and put what it found, if only a part, beside our steps."""
    if not any(shape in CONFIGS for shape in options.shapes):
        return Outcome(PEER, None, 0.0, "it has none of these shapes")
    if importlib.util.find_spec("vllm") is None:
        return Outcome(PEER, None, 0.0, "not installed")
    outcome = run_part(PEER, options, options.shapes, clock)
    count = join_peers(options.out / "gpu-steps.json", read_peers(options.out / PEER / RESULT))
    return replace(outcome, note=f"{outcome.note} {count} rows have its times".strip())


def gate_result(options: argparse.Namespace) -> Path:
    """Where the gate writes what it found."""
    return Path(options.out / "gpu-gate.json")


def sound_shapes(options: argparse.Namespace, *, has_failed: bool) -> list[str]:
    """Shapes without those that failed the gate; what it was told to leave out is measured, and named."""
    path = gate_result(options)
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []
    verdicts = {row["shape"]: row["passes"] for row in rows if "passes" in row}
    unchecked = [shape for shape in options.shapes if shape not in verdicts]
    if unchecked:
        say(f"not checked: {', '.join(unchecked)}")
    return [shape for shape in options.shapes if verdicts.get(shape, not has_failed) or options.despite_gate]


def needs(part: str, shapes: Sequence[str]) -> list[str] | None:
    """Which of the sound shapes a part measures; None where it is about no shape."""
    if part == "steps":
        return list(shapes)
    if part in ("text", "prefix"):  # of real models of the smallest shape
        return [shape for shape in shapes if "smollm2" in shape]
    return None


def exit_code(outcomes: Sequence[Outcome]) -> int:
    """3 if the gate said no, 1 if a part failed or was cut short."""
    codes = {outcome.part: outcome.code for outcome in outcomes}
    if codes.get("gate", EXIT_DONE) == EXIT_CHECK_SAYS_NO:
        return EXIT_CHECK_SAYS_NO
    return EXIT_DONE if all(code == EXIT_DONE for code in codes.values()) else EXIT_FAILED


if __name__ == "__main__":
    sys.exit(run(main))
