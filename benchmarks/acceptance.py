"""Served acceptance of a drafter on prompt sets, and beside it what the training's simulation says.

    python -m benchmarks.acceptance --set gsm8k=gsm8k.jsonl --set selfchat=selfchat-T0.0.npz --out docs/results

Every set is served greedily and at temperature 1; the interval is a 95 % bootstrap over prompts. Conversations of a
token file keep their own prompt ids, and the length of the stored response is the budget, so that the walk of
`training/simulate.py` over the same conversations, in the same dtype, should come to the same length: that is a row
with `simulated`. The greedy row has what served is over it, less 1, twice: `over_simulated` for the stored text, and
`over_simulated_served_text` for a walk over what serving wrote, since bf16 may leave the stored text at a near-tie;
`same_text` is the share of conversations that it did not leave. A walk judges greedy text alone, so a set that was
sampled is named with `--served-only NAME`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.command_line import DTYPES, make_parser, name_of, positive, report, run, say
from benchmarks.prompt_sets import PromptSet, add_set_argument, read_sets
from benchmarks.results import text_table
from benchmarks.serving import serve

from paceline.errors import EXIT_DONE
from paceline.evaluation.acceptance import Answer, summarise
from paceline.evaluation.statistics import Interval, bootstrap_ratio
from paceline.trace.acceptance import AcceptanceSummary

if TYPE_CHECKING:
    from paceline.engine.engine import Engine
    from paceline.engine.request import RequestResult, SamplingParameters
    from paceline.models.loading import LoadedDrafter, LoadedTarget
    from paceline.training.data import Conversations

NAME = "acceptance-smollm2"


@dataclass(frozen=True)
class Walk:
    """The simulated walk of each conversation: tokens committed and steps taken, as served steps are counted."""

    committed: tuple[float, ...]
    num_steps: tuple[int, ...]

    def interval(self) -> Interval:
        """Acceptance length with its interval over conversations."""
        return bootstrap_ratio(self.committed, self.num_steps)


def main(arguments: Sequence[str]) -> int:
    """Serve all sets at all temperatures, simulate where that can be compared, print the table."""
    options = parse(arguments)
    import torch

    from paceline.models.loading import load_target

    torch.set_num_threads(options.threads)
    target = load_target(options.model, dtype=options.dtype, device=options.device)
    sets = read_sets(options.sets, target.tokenizer, vocab_size=target.contract.vocab_size, limit=options.num_prompts)
    drafters = [options.draft_model, *options.also_draft_model]
    rows = [row for name in drafters for row in drafter_rows(name, target, sets, options)]
    print(text_table(rows))
    facts = [options.dtype, f"concurrency {options.concurrency}"]
    report(NAME, rows, options, arguments, device=options.device, facts=facts)
    return EXIT_DONE


def drafter_rows(
    name: str, target: LoadedTarget, sets: Sequence[PromptSet], options: argparse.Namespace
) -> list[dict[str, object]]:
    """Every row of one drafter."""
    from paceline.engine.engine import Engine, EngineSettings
    from paceline.models.loading import load_drafter

    drafter = load_drafter(name, target)
    engine = Engine(target, drafter, EngineSettings(max_num_seqs=options.concurrency))
    say(f"{name_of(name)}: block size {drafter.contract.block_size}")
    rows: list[dict[str, object]] = []
    for prompt_set in sets:
        is_simulated = prompt_set.conversations is not None and prompt_set.name not in options.served_only
        for temperature in options.temperatures:
            results = serve_set(engine, prompt_set, temperature, options)
            rows.append(served_row(prompt_set, results, temperature))
            if is_simulated and temperature == 0:
                assert prompt_set.conversations is not None, "checked just before"
                stored = simulate_walk(prompt_set.conversations, target, drafter, f"{prompt_set.name}, stored text")
                served = simulate_walk(
                    served_conversations(results), target, drafter, f"{prompt_set.name}, served text"
                )
                rows[-1] |= comparison(prompt_set, results, stored=stored, served=served)
                rows.append(simulated_row(prompt_set, stored))
    return [{"drafter": name_of(name), **row} for row in rows]


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Options."""
    parser = make_parser(__doc__)
    parser.add_argument(
        "--also-draft-model", action="append", default=[], metavar="DRAFTER", help="another one, on the same prompts"
    )
    add_set_argument(parser, required=True)
    parser.add_argument("--num-prompts", type=positive, default=64, help="of each set; default 64")
    parser.add_argument("--max-tokens", type=positive, default=256, help="for sets of mere prompts; default 256")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0], metavar="T", help="default 0 1")
    parser.add_argument("--seed", type=int, default=0, help="prompt i of a set draws with seed + i")
    parser.add_argument("--concurrency", type=positive, default=8, help="requests at once; default 8")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--served-only", action="append", default=[], metavar="NAME", help="set not to be simulated")
    options = parser.parse_args(arguments)
    unknown = set(options.served_only) - {file.name for file in options.sets}
    if unknown:
        parser.error(f"--served-only {', '.join(sorted(unknown))} is none of the sets")
    return options


def budgets(prompt_set: PromptSet, max_tokens: int) -> list[int]:
    """Tokens that each prompt may get: the stored response's number where there is one."""
    if prompt_set.responses is None:
        return [max_tokens] * len(prompt_set.prompts)
    return [len(response) for response in prompt_set.responses]


def serve_set(
    engine: Engine, prompt_set: PromptSet, temperature: float, options: argparse.Namespace
) -> list[RequestResult]:
    """Answer every prompt of a set, to a natural stop or the budget."""
    from paceline.engine.request import SamplingParameters

    samplings: list[SamplingParameters] = [
        SamplingParameters(max_tokens=budget, temperature=temperature, seed=options.seed + index)
        for index, budget in enumerate(budgets(prompt_set, options.max_tokens))
    ]
    return serve(engine, prompt_set.prompts, samplings, f"{prompt_set.name} at temperature {temperature:g}")


def served_conversations(results: Sequence[RequestResult]) -> Conversations:
    """Prompts and what serving wrote, as training reads conversations."""
    import numpy as np

    from paceline.training.data import Conversations

    texts = [(*result.prompt_ids, *result.token_ids) for result in results]
    marks = [[False] * len(result.prompt_ids) + [True] * len(result.token_ids) for result in results]
    return Conversations(
        tokens=np.concatenate([np.array(text, np.int32) for text in texts]),
        supervised=np.concatenate([np.array(mark, bool) for mark in marks]),
        starts=np.cumsum([0, *map(len, texts)]).astype(np.int64),
    )


def simulate_walk(conversations: Conversations, target: LoadedTarget, drafter: LoadedDrafter, label: str) -> Walk:
    """Walk every response with the very modules that serve."""
    from paceline.training.features import TargetFeatures
    from paceline.training.simulate import simulate

    features = TargetFeatures(target.model, drafter.contract.target_layer_ids)
    committed, num_steps = [], []
    for index in range(len(conversations)):
        one = conversations.select([index])
        found = simulate(drafter.model, features, one, batch_size=1, max_length=len(one.tokens), mixed_precision=False)
        steps = sum(steps for _, steps in found.per_conversation)
        committed.append(found.acceptance_length * steps)
        num_steps.append(steps)
        if (index + 1) % 8 == 0 or index + 1 == len(conversations):
            say(f"{label}, simulated: {index + 1} of {len(conversations)} conversations")
    return Walk(tuple(committed), tuple(num_steps))


def served_row(prompt_set: PromptSet, results: Sequence[RequestResult], temperature: float) -> dict[str, object]:
    """The row of one served set."""
    found = summarise(prompt_set.name, [[Answer(result.request_id, 0, result)] for result in results])
    return {
        "set": prompt_set.name,
        "temperature": temperature,
        "acceptance_length": found.summary.acceptance_length,
        "low": found.low,
        "high": found.high,
        "num_prompts": found.num_prompts,
        "simulated": False,
    }


def comparison(
    prompt_set: PromptSet, results: Sequence[RequestResult], *, stored: Walk, served: Walk
) -> dict[str, object]:
    """How greedy serving compares with the walks over the stored text and over its own."""
    length = AcceptanceSummary.from_steps(record for result in results for record in result.trace.records)
    assert prompt_set.responses is not None, "only token files are compared"
    same = [result.token_ids == response for result, response in zip(results, prompt_set.responses, strict=True)]
    return {
        "over_simulated": relative_difference(length.acceptance_length, stored.interval().estimate),
        "over_simulated_served_text": relative_difference(length.acceptance_length, served.interval().estimate),
        "same_text": sum(same) / len(same),
    }


def relative_difference(served: float, simulated: float) -> float:
    """Served over simulated, less 1."""
    return served / simulated - 1


def simulated_row(prompt_set: PromptSet, walk: Walk) -> dict[str, object]:
    """The row of a simulated set."""
    interval = walk.interval()
    return {
        "set": prompt_set.name,
        "temperature": 0.0,
        "acceptance_length": interval.estimate,
        "low": interval.low,
        "high": interval.high,
        "num_prompts": interval.num_units,
        "simulated": True,
    }


if __name__ == "__main__":
    sys.exit(run(main))
