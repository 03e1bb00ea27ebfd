"""Weights in the codes of their file against their copy in bf16, on a CPU: products, how near they come, whole texts.

    python -m benchmarks.cpu_quantized --threads 1
    python -m benchmarks.cpu_quantized --quick

Three arithmetics take turns: "native" multiplies a copy in bf16, "quantized" the codes as they are, "int8" the codes
with rows rounded to 8 bits. Products are those of all layers and of the head, one after the other as a step makes them,
so each weight comes from memory. Times are the processor's, of all threads, not the clock's: others may be at work.
`_ratio` is over "native", the median of passes over all products, or of prompts.

The second table takes answers of the prompts in float32, with the weights as the file means them, and asks each
arithmetic for the next token's distribution all along: `divergence` is the mean of KL(float32 || mode) in nats, `agree`
the share of positions with the same most likely token, `loss` the mean of -log p of the answer's own tokens.

Texts are greedy, plain and with 1, 3 and all drafts, one request at a time; `_ms` is processor time per token behind
the first, `_length` the tokens of a step.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.command_line import PROMPTS, make_parser, positive, report, run, say
from benchmarks.prompt_sets import NamedFile, read_set
from benchmarks.results import text_table

from paceline.errors import EXIT_DONE, ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.engine.engine import Engine
    from paceline.models.loading import LoadedTarget
    from paceline.ops.native.rows import NativeWeight

NAME = "cpu-quantized"
MODES = ("native", "quantized", "int8")
_RATIOS = tuple(f"{mode}_ratio" for mode in MODES[1:])
_SHAPES = ("qkv", "o", "gate_up", "down", "head")


def main(arguments: Sequence[str]) -> int:
    """Measure all three, print three tables, write the result if asked for."""
    options = parse(arguments)
    import torch

    from paceline.engine.engine import Engine, EngineSettings
    from paceline.models.loading import load_drafter, load_target
    from paceline.ops.native.integers import can_run_integers
    from paceline.ops.native.quantized import can_run_quantized

    torch.set_num_threads(options.threads)
    if not (can_run_quantized() and can_run_integers()):
        raise ConfigError("this machine has no products with codes", hint="`paceline doctor` says what it has")
    say(f"loading {options.model} three times")
    targets = {mode: load_target(options.model, dtype="bfloat16", device="cpu", linear_mode=mode) for mode in MODES}
    weights = [dict(_weights(targets[mode])) for mode in MODES]
    rows: list[dict[str, object]] = []
    for num_rows in options.rows:
        rows += product_rows(weights, num_rows, options.passes)
        say(f"products of {num_rows} rows")
    print(text_table(rows, ("rows", "weight", *(f"{mode}_ms" for mode in MODES), *_RATIOS)))
    prompts = read_set(
        NamedFile("prompts", options.prompts),
        targets[MODES[0]].tokenizer,
        vocab_size=targets[MODES[0]].contract.vocab_size,
        limit=options.num_prompts,
    ).prompts
    exact = load_target(options.model, dtype="float32", device="cpu", linear_mode="plain")
    nearness = nearness_rows(exact, targets, prompts, options.max_tokens)
    print()
    print(text_table(nearness, ("mode", "divergence", "agree", "loss", "positions")))
    drafters = {mode: load_drafter(options.draft_model, targets[mode]) for mode in MODES}
    texts = []
    for num_drafts in (0, 1, 3, drafters[MODES[0]].num_draft_tokens):
        engines = {}
        for mode in MODES:
            drafter = dataclasses.replace(drafters[mode], num_draft_tokens=num_drafts) if num_drafts else None
            engines[mode] = Engine(targets[mode], drafter, EngineSettings(max_num_seqs=1))
        texts.append(text_row(engines, prompts, num_drafts, options.max_tokens))
        say(f"texts with {num_drafts} drafts")
    print()
    columns = (f"{mode}_{kind}" for kind in ("ms", "length") for mode in MODES)
    print(text_table(texts, ("drafts", *columns, *_RATIOS)))
    report(NAME, rows + nearness + texts, options, arguments, facts=["processor time"])
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
    """Times of each kind of product and of all, with so many rows.

    Args:
        weights: of each mode, by their place in a layer.
        num_rows: of every product.
        num_passes: over all of them; one more warms up.
    """
    import torch

    from paceline.ops.native.rows import linear

    times: list[list[dict[str, float]]] = [[] for _mode in MODES]
    for index in range(num_passes + 1):
        for which in _in_turns(index):
            spent = dict.fromkeys(weights[which], 0.0)
            for name, forms in weights[which].items():
                x = torch.ones(num_rows, forms[0].num_inputs, dtype=torch.bfloat16)
                spent[name] = processor_ms(lambda x=x, forms=forms: [linear(x, form) for form in forms])  # type: ignore[misc]
            spent["all"] = sum(spent.values())
            times[which].append(spent)
    return [
        {"rows": num_rows, "weight": name} | _compared([[spent[name] for spent in of_one[1:]] for of_one in times])
        for name in (*weights[0], "all")
    ]


def nearness_rows(
    exact: LoadedTarget, targets: Mapping[str, LoadedTarget], prompts: Sequence[Sequence[int]], max_tokens: int
) -> list[dict[str, object]]:
    """How far each mode's next-token distributions are from those of float32, on float32's own answers.

    Args:
        exact: the target in float32.
        targets: the same by mode.
        prompts: token ids of each.
        max_tokens: of each answer.
    """
    import torch

    from paceline.engine.engine import Engine, EngineSettings
    from paceline.engine.request import SamplingParameters

    engine = Engine(exact, None, EngineSettings(max_num_seqs=1))
    answers = [result.token_ids for result in engine.generate(prompts, SamplingParameters(max_tokens=max_tokens))]
    engine.close()
    totals = {name: [0.0, 0.0, 0.0] for name in ("float32", *targets)}
    num_positions = 0
    for prompt, answer in zip(prompts, answers, strict=True):
        expected_TV = _log_probabilities(exact, prompt, answer)
        answer_T1 = torch.tensor(answer).unsqueeze(1)
        num_positions += len(answer)
        for name, target in (("float32", exact), *targets.items()):
            found_TV = expected_TV if target is exact else _log_probabilities(target, prompt, answer)
            same_T = expected_TV.argmax(-1) == found_TV.argmax(-1)
            own_T = found_TV.gather(1, answer_T1)
            divergence = (expected_TV.exp() * (expected_TV - found_TV)).sum()
            for place, value in enumerate((divergence, same_T.sum(), -own_T.sum())):
                totals[name][place] += float(value)
    keys = ("divergence", "agree", "loss")
    return [
        {"mode": name, "positions": num_positions}
        | {key: total / num_positions for key, total in zip(keys, found, strict=True)}
        for name, found in totals.items()
    ]


def _log_probabilities(target: LoadedTarget, prompt: Sequence[int], answer: Sequence[int]) -> Tensor:
    """Float32 [answer, vocabulary], each row seen from the tokens before."""
    import torch

    from paceline.models.sequence_attend import sequence_attend

    ids_1T = torch.tensor([[*prompt, *answer[:-1]]])
    positions_1T = torch.arange(ids_1T.shape[1]).unsqueeze(0)
    with torch.inference_mode():
        hidden_1TD = target.model(ids_1T, positions_1T, sequence_attend(target.model))
        logits: Tensor = target.model.logits(hidden_1TD[:, len(prompt) - 1 :])
    return logits[0].float().log_softmax(-1)


def text_row(
    engines: Mapping[str, Engine], prompts: Sequence[Sequence[int]], num_drafts: int, max_tokens: int
) -> dict[str, object]:
    """Processor time per token of each mode's engine on the same prompts, in turns."""
    times: list[list[float]] = [[] for _mode in MODES]
    for index, prompt in enumerate((prompts[0], *prompts)):
        for which in _in_turns(index):
            spent = time_text(engines[MODES[which]], prompt, max_tokens)
            if index:  # the first text warms up
                times[which].append(spent)
    lengths = {}
    for mode, engine in engines.items():
        stats = engine.stats()
        lengths[f"{mode}_length"] = 1.0 + stats.num_accepted / max(1, stats.num_request_steps)
    return {"drafts": num_drafts} | _compared(times) | lengths


def _in_turns(index: int) -> Sequence[int]:
    """The modes by number, forwards and backwards."""
    return range(len(MODES))[:: -1 if index % 2 else 1]


def _compared(times: Sequence[Sequence[float]]) -> dict[str, float]:
    """The median of each mode, and of its pairwise ratios to the first."""
    row = {f"{mode}_ms": statistics.median(found) for mode, found in zip(MODES, times, strict=True)}
    for mode, found in zip(MODES[1:], times[1:], strict=True):
        row[f"{mode}_ratio"] = statistics.median(after / before for before, after in zip(times[0], found, strict=True))
    return row


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
