"""Weights in the codes of their file against their copy in bf16, on a CPU: products by themselves, then whole texts.

    python -m benchmarks.cpu_quantized --threads 1
    python -m benchmarks.cpu_quantized --quick

Products are those of all layers and of the head, one after the other as a step makes them, so each weight comes from
memory. Texts are greedy, plain and with 1, 3 and all drafts, one request at a time. Both arithmetics take turns, and
times are the processor's, of all threads, not the clock's: others may be at work. `ratio` is codes over bf16, the
median of passes over all products, or of prompts. `tokens_ms` is processor time per token behind the first.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.command_line import PROMPTS, make_parser, positive, report, run, say
from benchmarks.prompt_sets import NamedFile, read_set
from benchmarks.results import text_table

from paceline.errors import EXIT_DONE, ConfigError

if TYPE_CHECKING:
    from paceline.engine.engine import Engine
    from paceline.models.loading import LoadedTarget
    from paceline.ops.native.rows import NativeWeight

NAME = "cpu-quantized"
MODES = ("native", "quantized")
_SHAPES = ("qkv", "o", "gate_up", "down", "head")


def main(arguments: Sequence[str]) -> int:
    """Measure both, print two tables, write the result if asked for."""
    options = parse(arguments)
    import torch

    from paceline.engine.engine import Engine, EngineSettings
    from paceline.models.loading import load_drafter, load_target
    from paceline.ops.native.quantized import can_run_quantized

    torch.set_num_threads(options.threads)
    if not can_run_quantized():
        raise ConfigError("this machine has no products with codes", hint="`paceline doctor` says what it has")
    say(f"loading {options.model} twice")
    targets = {mode: load_target(options.model, dtype="bfloat16", device="cpu", linear_mode=mode) for mode in MODES}
    weights = [dict(_weights(targets[mode])) for mode in MODES]
    rows: list[dict[str, object]] = []
    for num_rows in options.rows:
        rows += product_rows(weights, num_rows, options.passes)
        say(f"products of {num_rows} rows")
    print(text_table(rows, ("rows", "weight", "bf16_ms", "codes_ms", "ratio")))
    drafters = {mode: load_drafter(options.draft_model, targets[mode]) for mode in MODES}
    prompts = read_set(
        NamedFile("prompts", options.prompts),
        targets[MODES[0]].tokenizer,
        vocab_size=targets[MODES[0]].contract.vocab_size,
        limit=options.num_prompts,
    ).prompts
    texts = []
    for num_drafts in (0, 1, 3, drafters[MODES[0]].num_draft_tokens):
        engines = []
        for mode in MODES:
            drafter = dataclasses.replace(drafters[mode], num_draft_tokens=num_drafts) if num_drafts else None
            engines.append(Engine(targets[mode], drafter, EngineSettings(max_num_seqs=1)))
        texts.append(text_row(engines, prompts, num_drafts, options.max_tokens))
        say(f"texts with {num_drafts} drafts")
    print()
    print(text_table(texts, ("drafts", "bf16_tokens_ms", "codes_tokens_ms", "ratio", "bf16_length", "codes_length")))
    report(NAME, rows + texts, options, arguments, facts=["processor time"])
    return EXIT_DONE


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = make_parser(__doc__)
    parser.add_argument("--rows", type=positive, nargs="+", default=[1, 2, 4, 8, 16], help="default 1 2 4 8 16")
    parser.add_argument("--passes", type=positive, default=20, help="over all products, of each; default 20")
    parser.add_argument("--prompts", type=Path, default=PROMPTS, help=f"prompt file; default {PROMPTS}")
    parser.add_argument("--num-prompts", type=positive, default=8)
    parser.add_argument("--max-tokens", type=positive, default=64, help="of every answer, at least 2; default 64")
    parser.add_argument("--quick", action="store_true", help="1 and 8 rows, 3 passes, 1 prompt, 8 tokens")
    options = parser.parse_args(arguments)
    if options.quick:
        options.rows, options.passes, options.num_prompts, options.max_tokens = [1, 8], 3, 1, 8
    if options.max_tokens < 2:
        parser.error("--max-tokens: at least 2, as times are those behind the first")
    return options


def _weights(target: LoadedTarget) -> Iterator[tuple[str, list[NativeWeight]]]:
    """The native weights of a target by their place in a layer."""
    from paceline.models.layers import DecoderLayer, Linear

    layers = [part for part in target.model.modules() if isinstance(part, DecoderLayer)]
    forms = (
        [layer.self_attn.qkv_proj.native for layer in layers],
        [layer.self_attn.o_proj.native for layer in layers],
        [layer.mlp.native_gate_up for layer in layers],
        [layer.mlp.down_proj.native for layer in layers],
        [target.model.lm_head.native] if isinstance(target.model.lm_head, Linear) else [],
    )
    for name, found in zip(_SHAPES, forms, strict=True):
        yield name, [form for form in found if form is not None]


def product_rows(
    weights: Sequence[dict[str, list[NativeWeight]]], num_rows: int, num_passes: int
) -> list[dict[str, object]]:
    """Times of each kind of product and of all, with so many rows."""
    import torch

    from paceline.ops.native.rows import linear

    times: list[list[dict[str, float]]] = [[], []]
    for index in range(num_passes + 1):
        for which in (0, 1) if index % 2 else (1, 0):
            spent = dict.fromkeys(weights[which], 0.0)
            for name, forms in weights[which].items():
                x = torch.ones(num_rows, forms[0].num_inputs, dtype=torch.bfloat16)
                spent[name] = processor_ms(lambda x=x, forms=forms: [linear(x, form) for form in forms])  # type: ignore[misc]
            spent["all"] = sum(spent.values())
            times[which].append(spent)
    rows = []
    for name in (*weights[0], "all"):
        bf16, codes = ([spent[name] for spent in of_one[1:]] for of_one in times)  # the first pass warms up
        rows.append(
            {
                "rows": num_rows,
                "weight": name,
                "bf16_ms": statistics.median(bf16),
                "codes_ms": statistics.median(codes),
                "ratio": statistics.median(after / before for before, after in zip(bf16, codes, strict=True)),
            }
        )
    return rows


def text_row(
    engines: Sequence[Engine], prompts: Sequence[Sequence[int]], num_drafts: int, max_tokens: int
) -> dict[str, object]:
    """Processor time per token of both engines on the same prompts, in turns."""
    times: list[list[float]] = [[], []]
    for index, prompt in enumerate((prompts[0], *prompts)):
        for which in (0, 1) if index % 2 else (1, 0):
            spent = time_text(engines[which], prompt, max_tokens)
            if index:  # the first text warms up
                times[which].append(spent)
    lengths = []
    for engine in engines:
        stats = engine.stats()
        lengths.append(1.0 + stats.num_accepted / max(1, stats.num_request_steps))
    return {
        "drafts": num_drafts,
        "bf16_tokens_ms": statistics.median(times[0]),
        "codes_tokens_ms": statistics.median(times[1]),
        "ratio": statistics.median(after / before for before, after in zip(*times, strict=True)),
        "bf16_length": lengths[0],
        "codes_length": lengths[1],
    }


def time_text(engine: Engine, prompt: Sequence[int], max_tokens: int) -> float:
    """Milliseconds of the processor per token behind the first."""
    from paceline.engine.request import SamplingParameters

    name = engine.add_request(prompt, SamplingParameters(max_tokens=max_tokens, ignore_eos=True))
    while not engine.step():
        pass  # the prompt; its last pass gives the first token
    spent = 0.0
    while engine.has_unfinished():
        spent += processor_ms(engine.step)
    return spent / (len(engine.take_result(name).token_ids) - 1)


def processor_ms(work: Callable[[], object]) -> float:
    """Time of all of this process's threads while something runs."""
    began_s = time.process_time()
    work()
    return (time.process_time() - began_s) * 1e3


if __name__ == "__main__":
    sys.exit(run(main))
