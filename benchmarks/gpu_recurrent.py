"""Recurrent states on a GPU: what runs a prompt's rows, and states in bf16, each checked before it is timed.

    python -m benchmarks.gpu_recurrent --out docs/results
    python -m benchmarks.gpu_recurrent --parts kernels --sizes kimi --lengths 512 4096 --fla tuned
    python -m benchmarks.gpu_recurrent --device cpu --parts states         the script itself, on a tiny target

* `kernels`: one layer's delta attention over prompts of each length, by the recurrent kernel, by ours in chunks, and by
  fla-core where it is installed. Sizes: `mini`, 4 heads of 64 as in `k3-mini`, and `kimi`, 32 heads of 128. The
  recurrent kernel is held against the definition, the others against it. `us` is the time in a recorded graph,
  `eager_us` that of a call as an engine makes it, launches included, `over_recurrent` both of the recurrent kernel over
  these. `--fla quick` gives each of fla-core's kernels one configuration; `tuned` lets them try all of theirs, which
  takes a minute or two per size.
* `prompts`: prompts of each length through an engine, a token each, by every `prompt_kernel`: `prompt_ms` and how many
  of the first tokens are the recurrent kernel's.
* `states`: recorded steps of `k3-mini` with states in float32 and in bf16, plain and with a random drafter: `step_ms`;
  acceptance and tokens of a closed batch, and how many tokens are equal until the first that is not. Texts of a random
  target in bf16 turn at any rounding: `prompts by row` shows how soon, where only sums have another order.

A case that fails is told and left out; one that is wrong is not timed, and the exit code is 3.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.command_line import positive, run, say
from benchmarks.growing_result import GrowingResult
from benchmarks.results import describe_machine, make_result, text_table

from paceline.errors import EXIT_CHECK_SAYS_NO, EXIT_DONE, ConfigError

if TYPE_CHECKING:
    import torch

NAME = "gpu-recurrent"
PARTS = ("kernels", "prompts", "states")
SIZES = {"mini": (4, 64), "kimi": (32, 128)}
KEY = ("part", "size", "case", "length")
# One configuration each: what is sensible for heads of 64 to 128 on Hopper, so that nothing is tried out.
_QUICK: dict[str, tuple[dict[str, int], int, int]] = {
    "l2norm_fwd_kernel": ({"BT": 32}, 4, 3),
    "kda_gate_chunk_cumsum_vector_kernel": ({"BS": 64}, 4, 3),
    "chunk_kda_fwd_kernel_intra_sub_chunk": ({}, 4, 3),
    "chunk_kda_fwd_kernel_intra_token_parallel": ({"BH": 4}, 4, 3),
    "chunk_kda_fwd_kernel_inter_solve_fused": ({"BK": 64}, 4, 3),
    "recompute_w_u_fwd_kda_kernel": ({}, 4, 3),
    "chunk_gated_delta_rule_fwd_kernel_h_blockdim64": ({"BV": 32}, 4, 3),
    "chunk_gla_fwd_kernel_o": ({"BK": 64, "BV": 64}, 4, 3),
}
_NUM_LAST_LINES = 6


def main(arguments: Sequence[str]) -> int:
    """Measure the chosen parts, printing every row as it comes."""
    options = parse(arguments)
    if options.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported, which is below
    with _fla_configurations(options.fla):
        import torch

        device = torch.device(options.device)
        if device.type == "cuda" and not torch.cuda.is_available():
            raise ConfigError(f"device {options.device} was asked for; torch sees no GPU", hint="--device cpu")
        torch.manual_seed(0)
        facts = [options.device if device.type == "cpu" else torch.cuda.get_device_name(device), "bf16"]
        head = make_result(NAME, [], machine=describe_machine(*facts), arguments=arguments)
        result = GrowingResult(head, {"fla": options.fla}, options.out, key=KEY, order=_order)
        wrong: list[str] = []
        for part in (part for part in PARTS if part in options.parts):
            _run_part(part, options, device, result, wrong)
        result.finish()
    print(text_table(result.rows), flush=True)
    for text in wrong:
        say(f"wrong: {text}")
    return EXIT_CHECK_SAYS_NO if wrong else EXIT_DONE


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N, or cpu for a trial; default cuda")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help=f"default {' '.join(PARTS)}")
    parser.add_argument("--sizes", nargs="+", choices=tuple(SIZES), default=list(SIZES), help="of layers; default all")
    parser.add_argument(
        "--lengths", nargs="+", type=positive, default=[64, 256, 1024, 4096, 16384], help="rows of a prompt"
    )
    parser.add_argument("--batch", type=positive, default=1, help="requests of a prompt pass; default 1")
    parser.add_argument("--variants", action="store_true", help="other tiles of our chunks as well")
    parser.add_argument("--fla", choices=("quick", "tuned"), default="quick", help="its configurations; default quick")
    parser.add_argument("--shape", default="k3-mini", help="of the engines' target; default k3-mini")
    parser.add_argument("--batches", nargs="+", type=positive, default=[1, 32], help="of `states`; default 1 32")
    parser.add_argument("--num-replays", type=positive, default=10, help="of each graph; default 10")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help=f"also write FOLDER/{NAME}.json as rows come")
    return parser.parse_args(arguments)


def _run_part(
    part: str, options: argparse.Namespace, device: torch.device, result: GrowingResult, wrong: list[str]
) -> None:
    if part == "kernels":
        from benchmarks.gpu_recurrent_kernels import kernel_cases as cases
    elif part == "prompts":
        from benchmarks.gpu_recurrent_engines import prompt_cases as cases
    else:
        from benchmarks.gpu_recurrent_engines import state_cases as cases

    for key, measure in cases(options, device):
        label = ", ".join(str(value) for value in key)
        began_s = time.perf_counter()
        with _guarded(label, wrong):
            row = {**dict(zip(KEY, key, strict=True)), **measure()}
            error, allowed = row.get("error"), row.pop("allowed", None)
            if isinstance(error, float) and isinstance(allowed, float) and not error <= allowed:
                wrong.append(f"{label}: by {error:.3g}, {allowed:.3g} is allowed")
                row = {name: value for name, value in row.items() if not name.endswith(("us", "ms", "recurrent"))}
            result.put(row)
            numbers = ", ".join(f"{name} {_short(value)}" for name, value in row.items() if name not in KEY)
            say(f"{label}: {numbers} ({time.perf_counter() - began_s:.1f} s)")
        gc.collect()


@contextmanager
def _guarded(label: str, wrong: list[str]) -> Iterator[None]:
    """Tell what fails and go on: a case costs its own row and no other."""
    try:
        yield
    except Exception as error:
        say(f"{label} FAILED:\n  " + "\n  ".join(traceback.format_exc().splitlines()[-_NUM_LAST_LINES:]))
        wrong.append(f"{label}: {type(error).__name__}")


@contextmanager
def _fla_configurations(choice: str) -> Iterator[None]:
    """One configuration for each of fla-core's kernels, which it reads from a folder, or all that it would try."""
    if choice == "tuned":
        yield
        return
    with tempfile.TemporaryDirectory() as folder:
        for name, (values, num_warps, num_stages) in _QUICK.items():
            chosen = {"kwargs": values, "num_warps": num_warps, "num_stages": num_stages, "num_ctas": 1}
            (Path(folder) / f"{name}.json").write_text(json.dumps({"default_config": chosen}))
        os.environ |= {"FLA_CACHE_MODE": "default", "FLA_CONFIG_DIR": folder}  # read when it is imported
        yield


def _order(row: Any) -> tuple[object, ...]:
    return (PARTS.index(row["part"]), row["size"], row["length"], row["case"])


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(run(main))
