"""Where the time of a decode step goes: every kernel of a recorded step, by name, with its share.

    python -m benchmarks.gpu_profile --shape qwen3-8b --kind dflash --batch 32
    python -m benchmarks.gpu_profile --kind dflash --temperature 1 --num-drafts 3
    python -m benchmarks.gpu_profile --device cpu --shape tiny-smollm2 --batch 2        the script itself

Steps of `gpu_steps.py` under torch's profiler, which sees the kernels of a replayed graph one by one. It slows the host
down, not the kernels: `us` is per step, `calls` too, `us_per_call` their ratio. The last line has the sum of all
kernels beside the wall time between events: what is missing is the time between kernels.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from benchmarks.command_line import positive, run, say
from benchmarks.gpu_gate import DEFAULT, MODES, engine_settings
from benchmarks.random_dense import LINEAR_MODES, random_prompts
from benchmarks.random_weights import WEIGHTS
from benchmarks.results import Row, text_table
from benchmarks.step_driver import StepTimes, time_steps
from benchmarks.step_shapes import KINDS, PLAIN, SHAPES, make_drafter, make_target

from paceline.errors import EXIT_DONE

_CONTEXT, _MAX_MODEL_LEN = 224, 512
_NUM_WARM_UP = 8
_LONGEST_NAME = 90


def main(arguments: Sequence[str]) -> int:
    """Make the models, profile some steps, print the table."""
    options = parse(arguments)
    import torch
    from benchmarks.gpu_steps import run_round

    from paceline.engine.engine import Engine

    device = torch.device(options.device)
    target = make_target(
        options.shape, device, dtype=torch.bfloat16, linear_mode=options.linear_mode, weights=options.weights
    )
    drafter = None if options.kind == PLAIN else make_drafter(target, options.weights)
    method = {"draft_sample_method": "probabilistic"} if drafter is not None and options.temperature > 0 else {}
    settings = engine_settings(options.mode, max_num_seqs=options.batch, max_model_len=_MAX_MODEL_LEN, **method)
    engine = Engine(target, drafter, settings)
    run_round(engine, random_prompts(options.batch, 128, target.contract.vocab_size), _NUM_WARM_UP)
    run_steps = partial(
        time_steps,
        engine,
        batch=options.batch,
        context=_CONTEXT,
        temperature=options.temperature,
        num_drafts=options.num_drafts,
    )
    times = run_steps(num_warm_up=_NUM_WARM_UP, num_timed=options.num_steps)
    say(f"{options.shape}, {options.kind}, batch {options.batch}: {times.median_ms:.4g} ms a step, not profiled")
    rows = profile(run_steps, options.num_steps, is_gpu=device.type == "cuda")
    total_us = sum(float(str(row["us"])) for row in rows)
    shown = [{**row, "share": float(str(row["us"])) / total_us} for row in rows[: options.num_rows]]
    print(text_table(shown, ["us", "share", "calls", "us_per_call", "kernel"]))
    num_calls = sum(float(str(row["calls"])) for row in rows)
    print(f"all kernels {total_us:.1f} us in {num_calls:.0f} calls; a step {1e3 * times.median_ms:.1f} us", flush=True)
    return EXIT_DONE


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N, or cpu for a trial; default cuda")
    parser.add_argument("--shape", choices=SHAPES, default="smollm2-135m")
    parser.add_argument("--kind", choices=KINDS, default=PLAIN)
    parser.add_argument("--batch", type=positive, default=1)
    parser.add_argument("--mode", choices=MODES, default=DEFAULT)
    parser.add_argument("--linear-mode", choices=LINEAR_MODES, default="auto")
    parser.add_argument("--weights", choices=WEIGHTS, default="normal", help="as of gpu_steps; default normal")
    parser.add_argument("--temperature", type=float, default=0.0, help="of all requests; default 0")
    parser.add_argument(
        "--num-drafts", type=positive, metavar="N", help="per request and step, as adaptive lengths are; default all"
    )
    parser.add_argument("--num-steps", type=positive, default=16, help="that are profiled; default 16")
    parser.add_argument("--num-rows", type=positive, default=40, help="kernels that are shown; default 40")
    options = parser.parse_args(arguments)
    if options.num_drafts is not None and options.kind == PLAIN:
        parser.error("--num-drafts is for a kind that drafts")
    return options


def profile(run_steps: Callable[..., StepTimes], num_steps: int, *, is_gpu: bool) -> list[Row]:
    """Kernels of a step, the costliest first: microseconds and calls per step."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as torch_profile

    with torch_profile(activities=[ProfilerActivity.CUDA if is_gpu else ProfilerActivity.CPU]) as found:
        run_steps(num_warm_up=0, num_timed=num_steps)
    return summarise(found.key_averages(), num_steps, is_gpu=is_gpu)


def summarise(events: Sequence[Any], num_steps: int, *, is_gpu: bool) -> list[Row]:
    """One row per name.

    Args:
        events: of torch's profiler, averaged by name.
        num_steps: that were run.
        is_gpu: whether time on the device counts; else that of the operator itself.
    """
    rows: list[Row] = []
    for event in events:
        us = float(event.self_device_time_total if is_gpu else event.self_cpu_time_total)
        if us > 0:
            rows.append(
                {
                    "us": us / num_steps,
                    "calls": event.count / num_steps,
                    "us_per_call": us / event.count,
                    "kernel": event.key[:_LONGEST_NAME],
                }
            )
    return sorted(rows, key=lambda row: -float(str(row["us"])))


if __name__ == "__main__":
    sys.exit(run(main))
