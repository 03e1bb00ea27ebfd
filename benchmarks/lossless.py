"""Is speculative decoding's text the target's own? Greedy ids with a drafter against plain ids, prompt by prompt.

    python -m benchmarks.lossless --set gsm8k=gsm8k.jsonl --set selfchat=selfchat-T0.0.npz --out docs/results

Row-invariant arithmetic, in which a row's bits do not depend on how many rows are computed with it: so not one id may
differ, whatever the drafter proposes. It runs with the trained drafter and with an untrained one of the same shape.
Exit code 3 if any text differs; `first_divergence_gaps` then has, for each, how far the lower of the two tokens lies
below the largest float32 logit at the first difference.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from benchmarks.command_line import DTYPES, make_parser, positive, report, run, say
from benchmarks.near_ties import NextLogits, find_divergence
from benchmarks.prompt_sets import PromptSet, add_set_argument, read_sets
from benchmarks.results import text_table
from benchmarks.serving import serve

from paceline.errors import EXIT_CHECK_SAYS_NO, EXIT_DONE

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from paceline.models.loading import LoadedDrafter, LoadedTarget

NAME = "lossless-smollm2"

Ids = list[tuple[int, ...]]
Generate = Callable[[PromptSet], Ids]


def main(arguments: Sequence[str]) -> int:
    """Compare in every dtype, print the table, say no if anything differs."""
    options = parse(arguments)
    import torch

    torch.set_num_threads(options.threads)
    rows = [row for dtype in options.dtype for row in check_dtype(dtype, options)]
    print(text_table(rows))
    print(f"\n{num_identical(rows)} of {num_compared(rows)} texts identical")
    facts = [f"row-invariant, {options.max_tokens} tokens, concurrency {options.concurrency}"]
    report(NAME, rows, options, arguments, device=options.device, facts=facts)
    return exit_code(rows)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Options."""
    parser = make_parser(__doc__)
    add_set_argument(parser, required=True)
    parser.add_argument("--num-prompts", type=positive, default=16, help="of each set; default 16")
    parser.add_argument("--max-tokens", type=positive, default=128)
    parser.add_argument("--concurrency", type=positive, default=16, help="requests at once; default 16")
    parser.add_argument("--dtype", choices=DTYPES, nargs="+", default=["bfloat16"], help="one or both")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0, help="of the untrained drafter")
    return parser.parse_args(arguments)


def check_dtype(dtype: str, options: argparse.Namespace) -> list[dict[str, object]]:
    """Load everything in one dtype and compare both drafters with plain decoding on every set."""
    from paceline.models.loading import load_drafter, load_target

    say(f"loading {options.model} in {dtype}, row-invariant")
    target = load_target(options.model, dtype=dtype, device=options.device, linear_mode="row_invariant")
    trained = load_drafter(options.draft_model, target)
    drafters = {"trained": trained, "untrained": untrained_like(trained, target, seed=options.seed)}
    sets = read_sets(options.sets, target.tokenizer, vocab_size=target.contract.vocab_size, limit=options.num_prompts)
    speculative = {name: generator(target, drafter, options, f"{name}, {dtype}") for name, drafter in drafters.items()}
    plain = generator(target, None, options, f"plain, {dtype}")
    rows = compare(sets, plain, speculative, float32_logits(options.model, options.device))
    return [{"dtype": dtype, **row} for row in rows]


def compare(
    sets: Sequence[PromptSet], plain: Generate, speculative: Mapping[str, Generate], next_logits: NextLogits
) -> list[dict[str, object]]:
    """One row per drafter and set.

    Args:
        sets: prompts.
        plain: gives the ids that should come out.
        speculative: drafter's name to what gives the ids under test.
        next_logits: judges differences; not called without any.
    """
    expected = [plain(prompt_set) for prompt_set in sets]
    rows: list[dict[str, object]] = []
    for drafter, generate in speculative.items():
        for prompt_set, reference in zip(sets, expected, strict=True):
            pairs = zip(prompt_set.prompts, generate(prompt_set), reference, strict=True)
            found = [find_divergence(prompt, ours, theirs, next_logits) for prompt, ours, theirs in pairs]
            rows.append(
                {
                    "drafter": drafter,
                    "set": prompt_set.name,
                    "num_prompts": len(found),
                    "num_identical": found.count(None),
                    "first_divergence_gaps": [one.gap for one in found if one is not None],
                }
            )
    return rows


def exit_code(rows: Sequence[Mapping[str, object]]) -> int:
    """3 if any text differs."""
    return EXIT_DONE if num_identical(rows) == num_compared(rows) else EXIT_CHECK_SAYS_NO


def num_identical(rows: Sequence[Mapping[str, object]]) -> int:
    """Identical texts in all rows."""
    return sum(int(str(row["num_identical"])) for row in rows)


def num_compared(rows: Sequence[Mapping[str, object]]) -> int:
    """Texts in all rows."""
    return sum(int(str(row["num_prompts"])) for row in rows)


def untrained_like(trained: LoadedDrafter, target: LoadedTarget, *, seed: int) -> LoadedDrafter:
    """A drafter of the same contract with random weights, in the target's dtype, on its device, ready to serve."""
    import torch

    from paceline.models.building import empty_drafter, initialise_drafter
    from paceline.models.loading import LoadedDrafter

    weight = target.model.norm.weight
    drafter = empty_drafter(trained.contract, weight.dtype, weight.device)
    random = initialise_drafter(trained.contract, torch.device("cpu"), seed=seed)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            parameter.copy_(random.get_parameter(name))
    drafter.prepare_for_serving(target.linear_mode)
    return LoadedDrafter(drafter, trained.contract, trained.num_draft_tokens)


def generator(target: LoadedTarget, drafter: LoadedDrafter | None, options: argparse.Namespace, label: str) -> Generate:
    """An engine that answers sets greedily."""
    from paceline.engine.engine import Engine, EngineSettings
    from paceline.engine.request import SamplingParameters

    engine = Engine(target, drafter, EngineSettings(max_num_seqs=options.concurrency))
    sampling = SamplingParameters(max_tokens=options.max_tokens)

    def generate(prompt_set: PromptSet) -> Ids:
        samplings = [sampling] * len(prompt_set.prompts)
        results = serve(engine, prompt_set.prompts, samplings, f"{label}, {prompt_set.name}")
        return [result.token_ids for result in results]

    return generate


def float32_logits(model: str, device: str) -> NextLogits:
    """The target's own next-token logits in float32, one sequence at a time; loads it when first called."""
    loaded: list[LoadedTarget] = []

    def of(ids: Sequence[int]) -> Tensor:
        if not loaded:
            from paceline.models.loading import load_target

            loaded.append(load_target(model, dtype="float32", device=device, linear_mode="plain"))
        return last_logits(loaded[0], ids)

    return of


def last_logits(target: LoadedTarget, ids: Sequence[int]) -> torch.Tensor:
    """Logits after a sequence, [V] in float32, by one pass without a cache."""
    return all_logits(target, ids)[-1]


def all_logits(target: LoadedTarget, ids: Sequence[int]) -> torch.Tensor:
    """Logits after every token of a sequence, [T, V] in float32."""
    import torch

    from paceline.models.attends import WholeSequence

    device = target.model.norm.weight.device
    token_ids = torch.tensor([list(ids)], device=device)
    positions = torch.arange(token_ids.shape[1], device=device).unsqueeze(0)
    with torch.inference_mode():
        hidden = target.model(token_ids, positions, WholeSequence())
        return target.model.logits(hidden)[0].float().cpu()


if __name__ == "__main__":
    sys.exit(run(main))
