"""The verification methods on the same sampled prompts: how many tokens a step commits, and what that says of speed.

    python -m benchmarks.verify_methods --set gsm8k=gsm8k.jsonl --set own=prompts/first.jsonl --out docs/results

Every method answers every prompt with the same seeds. `acceptance_length` pools all steps, `low` and `high` are its
95 % bootstrap interval over prompts. `over_standard` is the mean over prompts of the difference to `standard`, with
its interval. Texts of `standard` and `block` differ between methods, as draws do; those of `match` and `coupled` are
plain decoding's own at the same seed, where arithmetic is row-invariant: `same_text` is the share of answers that
`match` and `coupled` have in common, and 1 in float32 or with --linear-mode row_invariant.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.command_line import DTYPES, make_parser, name_of, positive, report, run
from benchmarks.prompt_sets import PromptSet, add_set_argument, read_sets
from benchmarks.results import text_table
from benchmarks.serving import serve

from paceline.errors import EXIT_DONE
from paceline.evaluation.statistics import bootstrap_mean, bootstrap_ratio
from paceline.ops.acceptance import VERIFY_METHODS, VerifyMethod, is_lossless

if TYPE_CHECKING:
    from paceline.engine.engine import Engine
    from paceline.engine.request import RequestResult

NAME = "verify-methods"
_BASE: VerifyMethod = "standard"


@dataclass(frozen=True)
class Counts:
    """Committed tokens and steps of each prompt, over all its seeds."""

    committed: tuple[int, ...]
    num_steps: tuple[int, ...]

    @property
    def lengths(self) -> list[float]:
        """Acceptance length of each prompt."""
        return [committed / steps for committed, steps in zip(self.committed, self.num_steps, strict=True)]


def main(arguments: Sequence[str]) -> int:
    """Serve all sets by all methods, print the table, write the result if asked for."""
    options = parse(arguments)
    import torch

    from paceline.engine.engine import Engine, EngineSettings
    from paceline.models.loading import load_drafter, load_target

    torch.set_num_threads(options.threads)
    target = load_target(options.model, dtype=options.dtype, device="cpu", linear_mode=options.linear_mode)
    drafter = load_drafter(options.draft_model, target)
    engines = {
        method: Engine(
            target,
            drafter,
            EngineSettings(max_num_seqs=options.concurrency, verify_method=method, draft_sample_method="probabilistic"),
        )
        for method in VERIFY_METHODS
    }
    rows: list[dict[str, object]] = []
    for prompt_set in read_sets(
        options.sets, target.tokenizer, vocab_size=target.contract.vocab_size, limit=options.num_prompts
    ):
        answers = {method: serve_set(engine, prompt_set, options) for method, engine in engines.items()}
        rows += set_rows(prompt_set.name, answers, options)
    print(text_table(rows))
    facts = [options.dtype, f"temperature {options.temperature:g}", f"linear mode {target.linear_mode}"]
    report(NAME, rows, options, arguments, facts=[*facts, name_of(options.draft_model)])
    return EXIT_DONE


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Options."""
    parser = make_parser(__doc__)
    add_set_argument(parser, required=True)
    parser.set_defaults(draft_model="drafters/smollm2-135m-instruct-dflash2")
    parser.add_argument("--num-prompts", type=positive, default=16, help="of each set; default 16")
    parser.add_argument("--num-seeds", type=positive, default=3, help="answers per prompt and method; default 3")
    parser.add_argument("--max-tokens", type=positive, default=128)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0, help="of the first answer; the others count on")
    parser.add_argument("--concurrency", type=positive, default=8, help="requests at once; default 8")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--linear-mode", default="auto", help="arithmetic of matrix products; default auto")
    options = parser.parse_args(arguments)
    if options.temperature <= 0:
        parser.error("--temperature has to be above 0: methods judge greedy drafts alike")
    return options


def serve_set(engine: Engine, prompt_set: PromptSet, options: argparse.Namespace) -> list[list[RequestResult]]:
    """Answers of a set, one list per seed."""
    from paceline.engine.request import SamplingParameters

    method = engine.settings.verify_method
    rounds = []
    for index in range(options.num_seeds):
        first = options.seed + index * len(prompt_set.prompts)
        samplings = [
            SamplingParameters(max_tokens=options.max_tokens, temperature=options.temperature, seed=first + prompt)
            for prompt in range(len(prompt_set.prompts))
        ]
        rounds.append(serve(engine, prompt_set.prompts, samplings, f"{prompt_set.name}, {method}, seed {index + 1}"))
    return rounds


def set_rows(
    name: str, answers: dict[VerifyMethod, list[list[RequestResult]]], options: argparse.Namespace
) -> list[dict[str, object]]:
    """One row per method."""
    counts = {method: count(rounds) for method, rounds in answers.items()}
    base = counts[_BASE].lengths
    rows: list[dict[str, object]] = []
    for method, found in counts.items():
        pooled = bootstrap_ratio(found.committed, found.num_steps)
        row: dict[str, object] = {
            "set": name,
            "method": method,
            "lossless": is_lossless(method),
            "acceptance_length": pooled.estimate,
            "low": pooled.low,
            "high": pooled.high,
        }
        if method != _BASE:
            difference = bootstrap_mean([ours - theirs for ours, theirs in zip(found.lengths, base, strict=True)])
            row |= {
                "over_standard": difference.estimate,
                "over_standard_low": difference.low,
                "over_standard_high": difference.high,
            }
        if method == "coupled":
            row["same_text"] = share_of_same_texts(answers["match"], answers["coupled"])
        rows.append({**row, "num_prompts": len(found.committed), "num_seeds": options.num_seeds})
    return rows


def count(rounds: Sequence[Sequence[RequestResult]]) -> Counts:
    """Sums over the seeds of each prompt; a prompt that no step was needed for counts as one step of one token."""
    committed, steps = [], []
    for of_prompt in zip(*rounds, strict=True):
        records = [record for result in of_prompt for record in result.trace.records if record.num_draft_tokens]
        committed.append(sum(record.num_accepted + 1 for record in records) or 1)
        steps.append(len(records) or 1)
    return Counts(tuple(committed), tuple(steps))


def share_of_same_texts(ours: Sequence[Sequence[RequestResult]], theirs: Sequence[Sequence[RequestResult]]) -> float:
    """Share of answers whose ids are the same in both."""
    pairs = [
        (a.token_ids, b.token_ids)
        for one, other in zip(ours, theirs, strict=True)
        for a, b in zip(one, other, strict=True)
    ]
    return sum(a == b for a, b in pairs) / len(pairs)


if __name__ == "__main__":
    sys.exit(run(main))
