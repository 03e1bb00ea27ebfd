"""Does the gain of drafting survive the prefix cache? Accept sequences with the cache off, cold and warm.

    python -m benchmarks.prefix_cache_gain --out docs/results
    python -m benchmarks.prefix_cache_gain --draft-model drafters/smollm2-135m-instruct-dflash2 --prefix-tokens 1024

Greedy, on the CPU in row-invariant arithmetic, where equal means equal bits: per step the drafts, how many of them
were accepted, and the tokens. Every prompt is the same text of `--prefix-tokens` tokens and a question of its own.
With `--device cuda` the arithmetic is what serves there, whose bits depend on how many rows run together: there a
near-tie may fall either way behind a hit, and the exit code looks at hits alone.

* `off`: an engine without a prefix cache.
* `cold`: with one, emptied before each prompt, so nothing is found.
* `warm`: the text was left behind by another question; then the very same prompt once more (`again`).

`identical_sequences` counts the prompts whose accept sequence is that of `off`; `num_hit_tokens` is what the cache gave
per prompt, `num_hit_tokens_plain` what it gave to an engine without a drafter. Exit code 3 if a sequence differs, or a
drafter costs more than one block of a hit.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
from benchmarks.command_line import PROMPTS, TARGET, name_of, positive, report, run, say
from benchmarks.prompt_sets import NamedFile, read_set
from benchmarks.results import ROOT, Row, text_table

from paceline.errors import EXIT_CHECK_SAYS_NO, EXIT_DONE, DataError
from paceline.trace.acceptance import AcceptanceSummary

if TYPE_CHECKING:
    from paceline.checkpoint.tokenizer import TextTokenizer
    from paceline.engine.engine import Engine
    from paceline.engine.request import RequestResult
    from paceline.models.loading import LoadedDrafter, LoadedTarget

NAME, GPU_NAME = "prefix-cache-gain", "prefix-cache-gain-gpu"
FAMILIES = ("dflash2", "dflash", "dspark", "eagle3")
DRAFTERS = tuple(f"drafters/smollm2-135m-instruct-{family}" for family in FAMILIES)
TEXTS = ("LICENSE", "CONTRIBUTING.md", "docs/pitfalls.md", "docs/architecture.md")  # long enough, and always there
CACHES = ("off", "cold", "warm", "again")
_ROOM = 64  # positions beyond prompt and answer: the last block may reach past the budget

Prompts = Sequence[tuple[int, ...]]


@dataclass(frozen=True)
class Measured:
    """One prompt with the cache in one state."""

    result: RequestResult

    @property
    def accept_sequence(self) -> list[tuple[tuple[int, ...], int, tuple[int, ...]]]:
        """Step by step: drafts, how many were accepted, tokens."""
        records = self.result.trace.records
        return [(record.proposed_ids, record.num_verified_accepted, record.emitted_ids) for record in records]


def main(arguments: Sequence[str]) -> int:
    """Measure every drafter with every prefix, print the table, say no if the cache costs anything."""
    options = parse(arguments)
    import torch

    torch.set_num_threads(options.threads)
    rows = list(measure(options))
    print(text_table(rows))
    is_cpu = options.device == "cpu"
    facts = [f"{options.dtype}{', row-invariant' if is_cpu else ''}, {options.max_tokens} tokens"]
    report(NAME if is_cpu else GPU_NAME, rows, options, arguments, device=options.device, facts=facts)
    return exit_code(rows) if is_cpu else exit_code(rows, block_size=64, is_exact=False)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=TARGET, help=f"target; default {TARGET}")
    parser.add_argument("--draft-model", nargs="+", default=DRAFTERS, help="one or more; default all that are shipped")
    parser.add_argument("--device", default="cpu", help="cpu or cuda; default cpu")
    parser.add_argument("--threads", type=positive, default=2, help="CPU threads; default 2")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="also write FOLDER/NAME.json, such as docs/results")
    parser.add_argument("--prefix-tokens", type=positive, nargs="+", default=[1024, 4096], help="default 1024 4096")
    parser.add_argument("--texts", type=Path, nargs="+", default=[ROOT / text for text in TEXTS])
    parser.add_argument("--prompts", type=Path, default=PROMPTS, help=f"questions; default {PROMPTS}")
    parser.add_argument("--num-prompts", type=positive, default=4, help="questions per prefix; default 4")
    parser.add_argument("--max-tokens", type=positive, default=48)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    return parser.parse_args(arguments)


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """Load the target once and yield the rows of each drafter."""
    from paceline.models.loading import load_drafter, load_target

    mode: Literal["auto", "row_invariant"] = "row_invariant" if options.device == "cpu" else "auto"
    say(f"loading {options.model} in {options.dtype} on {options.device}, linear mode {mode}")
    target = load_target(options.model, dtype=options.dtype, device=options.device, linear_mode=mode)
    questions = read_set(
        NamedFile("questions", options.prompts),
        target.tokenizer,
        vocab_size=target.contract.vocab_size,
        limit=options.num_prompts + 1,  # the first one warms the cache
    ).prompts
    for num_prefix_tokens in options.prefix_tokens:
        prefix = read_prefix(options.texts, target.tokenizer, num_prefix_tokens)
        prompts = [(*prefix, *question) for question in questions]
        say(f"prefix of {num_prefix_tokens} tokens, without a drafter")
        plain = run_states(target, None, prompts, options.max_tokens)
        for name in options.draft_model:
            drafter = load_drafter(name, target)
            say(f"prefix of {num_prefix_tokens} tokens, {name_of(name)}")
            found = run_states(target, drafter, prompts, options.max_tokens)
            head = {"target": name_of(options.model), "drafter": name_of(name), "prefix_tokens": num_prefix_tokens}
            rows = [{**head, **row} for row in rows_of(found, plain)]
            say(text_table(rows))  # the longest prefixes take minutes
            yield from rows


def read_prefix(texts: Sequence[Path], tokenizer: TextTokenizer, num_tokens: int) -> list[int]:
    """The first tokens of some texts.

    Raises:
        DataError: they are shorter.
    """
    token_ids = tokenizer.encode("\n\n".join(path.read_text(encoding="utf-8") for path in texts))
    if len(token_ids) < num_tokens:
        raise DataError(f"the texts have {len(token_ids)} tokens, fewer than {num_tokens}", hint="more --texts")
    return list(token_ids[:num_tokens])


def run_states(
    target: LoadedTarget, drafter: LoadedDrafter | None, prompts: Prompts, max_tokens: int
) -> dict[str, list[Measured]]:
    """Every prompt but the first, with the cache in every state."""
    max_model_len = max(map(len, prompts)) + max_tokens + _ROOM
    first, *others = prompts
    engine = make_engine(target, drafter, max_model_len, prefix_cache=False)
    found = {"off": [answer(engine, prompt, max_tokens) for prompt in others]}
    engine.close()
    engine = make_engine(target, drafter, max_model_len, prefix_cache=True)
    found["cold"] = []
    for prompt in others:
        engine.clear_prefix_cache()
        found["cold"].append(answer(engine, prompt, max_tokens))
    engine.clear_prefix_cache()
    answer(engine, first, max_tokens)
    found["warm"], found["again"] = [], []
    for prompt in others:
        found["warm"].append(answer(engine, prompt, max_tokens))
        found["again"].append(answer(engine, prompt, max_tokens))
    engine.close()
    return found


def make_engine(
    target: LoadedTarget, drafter: LoadedDrafter | None, max_model_len: int, *, prefix_cache: bool
) -> Engine:
    """Room for two contexts, so that nothing of the shared text is evicted."""
    from paceline.engine.engine import Engine, EngineSettings

    return Engine(
        target, drafter, EngineSettings(max_num_seqs=2, max_model_len=max_model_len, prefix_cache=prefix_cache)
    )


def answer(engine: Engine, prompt: Sequence[int], max_tokens: int) -> Measured:
    """Answer one prompt, alone."""
    from paceline.engine.request import SamplingParameters

    (result,) = engine.generate([prompt], SamplingParameters(max_tokens=max_tokens, ignore_eos=True))
    return Measured(result)


def rows_of(found: dict[str, list[Measured]], plain: dict[str, list[Measured]]) -> Iterator[dict[str, object]]:
    """One row per state of the cache."""
    for cache in CACHES:
        pairs = list(zip(found[cache], found["off"], plain["off"], strict=True))
        steps = (record for one in found[cache] for record in one.result.trace.records)
        yield {
            "cache": cache,
            "acceptance_length": AcceptanceSummary.from_steps(steps).acceptance_length,
            "identical_sequences": sum(one.accept_sequence == off.accept_sequence for one, off, _ in pairs),
            "identical_texts": sum(one.result.token_ids == text.result.token_ids for one, _, text in pairs),
            "num_prompts": len(pairs),
            "num_hit_tokens": hit_tokens(found[cache]),
            "num_hit_tokens_plain": hit_tokens(plain[cache]),
            "prefill_ms": float(np.median([one.result.trace.prefill_ms for one, _, _ in pairs])),
        }


def hit_tokens(found: Sequence[Measured]) -> float:
    """Tokens per prompt that the cache gave."""
    return float(np.mean([one.result.num_cached_tokens for one in found]))


def exit_code(rows: Sequence[Row], block_size: int = 32, *, is_exact: bool = True) -> int:
    """3 if a sequence or a text differs, if a drafter costs more than a block of a hit, or if nothing was hit.

    Args:
        rows: measured.
        block_size: of the caches.
        is_exact: equal bits are to be had; else sequences and texts are told and not judged.
    """
    for row in rows:
        num_prompts = row["num_prompts"]
        costs = float(str(row["num_hit_tokens_plain"])) - float(str(row["num_hit_tokens"]))
        has_missed = row["cache"] in ("warm", "again") and row["num_hit_tokens"] == 0.0
        if is_exact and (row["identical_sequences"] != num_prompts or row["identical_texts"] != num_prompts):
            return EXIT_CHECK_SAYS_NO
        if costs > block_size or has_missed:
            return EXIT_CHECK_SAYS_NO
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(run(main))
