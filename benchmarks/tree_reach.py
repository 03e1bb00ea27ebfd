"""How far trees of drafts would reach on sampled text, found without building them.

    python -m benchmarks.tree_reach --set gsm8k=gsm8k.jsonl --set own=prompts/first.jsonl --out docs/results

The target answers plainly at a temperature. A text that was drawn is what verification of a tree would have drawn, so a
tree behind any of its tokens is walked as far as the text goes on along its branches: nothing has to be verified. Trees
grow best first, by the drafter's own probability of a branch, so one of 15 drafts lies within one of 31. A row of kind

- "tree" has so many `drafts` in the tree of every step, its rows the target's own tokens;
- "candidates" has all that a selector can choose from: no tree over these candidates, however large, goes further in a
  step, however it is judged;
- "chain" is what is served: one drawn chain, judged by p and q, on the same prompts and seeds.

`acceptance_length` is tokens per step with the target's own; `low` and `high` are its 95 % bootstrap interval over
prompts.
"""

from __future__ import annotations

import argparse
import heapq
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.command_line import DTYPES, make_parser, name_of, positive, report, run
from benchmarks.prompt_sets import PromptSet, add_set_argument, read_sets
from benchmarks.results import Row, text_table
from benchmarks.serving import serve

from paceline.errors import EXIT_DONE, CompatibilityError
from paceline.evaluation.statistics import bootstrap_ratio
from paceline.training.simulate import walk

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.engine.request import RequestResult
    from paceline.models.drafters.dflash2 import DFlash2Drafter
    from paceline.models.loading import LoadedDrafter, LoadedTarget

NAME = "tree-reach"
_PORTION = 64  # anchors whose candidates are scored after each other at once


@dataclass(frozen=True)
class Lattice:
    """What may be drafted behind one anchor. K drafts, C candidates.

    Attributes:
        ids: K lists of C target ids.
        first: C log-probabilities of the first draft.
        later: of draft k + 1, a row per candidate of draft k: K - 1 tables of C x C.
    """

    ids: list[list[int]]
    first: list[float]
    later: list[list[list[float]]]


def main(arguments: Sequence[str]) -> int:
    """Answer, draft behind every token of the answers, print the table, write the result if asked for."""
    options = parse(arguments)
    import torch

    from paceline.models.loading import load_drafter, load_target

    torch.set_num_threads(options.threads)
    target = load_target(options.model, dtype=options.dtype, device="cpu")
    drafter = load_drafter(options.draft_model, target)
    sets = read_sets(options.sets, target.tokenizer, vocab_size=target.contract.vocab_size, limit=options.num_prompts)
    require_selector(drafter)
    rows = [row for one in sets for row in set_rows(one, target, drafter, options)]
    print(text_table(rows))
    facts = [options.dtype, f"linear mode {target.linear_mode}", name_of(options.draft_model)]
    report(NAME, rows, options, arguments, facts=facts)
    return EXIT_DONE


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Options."""
    parser = make_parser(__doc__)
    add_set_argument(parser, required=True)
    parser.add_argument("--drafts", type=positive, nargs="+", default=[7, 15, 31, 63], help="in a tree")
    parser.add_argument("--num-prompts", type=positive, default=24, help="of each set; default 24")
    parser.add_argument("--max-tokens", type=positive, default=96, help="of an answer; default 96")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0, help="of the first answer; the others count on")
    parser.add_argument("--concurrency", type=positive, default=8, help="answers at once; default 8")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    options = parser.parse_args(arguments)
    if options.temperature <= 0:
        parser.error("--temperature has to be above 0: greedy text is one branch")
    if options.max_tokens < 2:
        parser.error("--max-tokens has to be at least 2: the first token comes from the prompt, not from a step")
    return options


def set_rows(
    prompt_set: PromptSet, target: LoadedTarget, drafter: LoadedDrafter, options: argparse.Namespace
) -> list[Row]:
    """Rows of one set."""
    answers = answer(prompt_set, target, None, options)
    sizes = sorted(set(options.drafts))
    reached: dict[int | None, list[tuple[int, int]]] = {size: [] for size in [*sizes, None]}
    for prompt, result in zip(prompt_set.prompts, answers, strict=True):
        ids = [*prompt, *result.token_ids]
        anchors = range(len(prompt), len(ids) - 1)
        found = [
            depths(lattice, ids[anchor + 1 :], sizes)
            for anchor, lattice in zip(anchors, lattices(target, drafter, ids, anchors), strict=True)
        ]
        for size, parts in reached.items():
            kept = [depth[size] for depth in found]
            steps = walk(kept, len(kept) + 1)
            parts.append((sum(min(kept[step], len(kept) - 1 - step) + 1 for step in steps), len(steps)))
    head: Row = {"set": prompt_set.name, "temperature": options.temperature}
    rows: list[Row] = [
        {**head, "kind": "candidates" if size is None else "tree", "drafts": size, **_lengths(parts)}
        for size, parts in reached.items()
    ]
    served = [result.trace.records for result in answer(prompt_set, target, drafter, options)]
    counts = [(sum(len(record.emitted_ids) for record in records), len(records)) for records in served]
    return [*rows, {**head, "kind": "chain", "drafts": drafter.num_draft_tokens, **_lengths(counts)}]


def _lengths(parts: Sequence[tuple[int, int]]) -> Row:
    some = [(tokens, steps) for tokens, steps in parts if steps]
    found = bootstrap_ratio([tokens for tokens, _ in some], [steps for _, steps in some])
    return {
        "acceptance_length": found.estimate,
        "low": found.low,
        "high": found.high,
        "num_prompts": len(some),
        "steps": sum(steps for _, steps in some),
    }


def answer(
    prompt_set: PromptSet, target: LoadedTarget, drafter: LoadedDrafter | None, options: argparse.Namespace
) -> list[RequestResult]:
    """Sampled answers, one seed per prompt."""
    from paceline.engine.engine import Engine, EngineSettings
    from paceline.engine.request import SamplingParameters

    samplings = [
        SamplingParameters(max_tokens=options.max_tokens, temperature=options.temperature, seed=options.seed + index)
        for index in range(len(prompt_set.prompts))
    ]
    engine = Engine(target, drafter, EngineSettings(max_num_seqs=options.concurrency))
    kind = "plain" if drafter is None else "chain"
    return serve(engine, prompt_set.prompts, samplings, f"{prompt_set.name}, {kind}")


def lattices(target: LoadedTarget, drafter: LoadedDrafter, ids: Sequence[int], anchors: Sequence[int]) -> list[Lattice]:
    """What the drafter offers behind every anchor of a text, by the engine's own parts."""
    import torch

    from paceline.training.serving_pass import ServingPass

    if not anchors:
        return []
    model = require_selector(drafter)
    served = ServingPass(target, drafter, max_tokens=len(ids) + 1)(ids, anchors)
    anchor_ids_A = torch.tensor([ids[anchor] for anchor in anchors])
    found: list[Lattice] = []
    with torch.no_grad():
        for hidden_AKD, some_A in zip(served.hidden_AKD.split(_PORTION), anchor_ids_A.split(_PORTION), strict=True):
            found += _score(model, target, hidden_AKD, some_A)
    return found


def require_selector(drafter: LoadedDrafter) -> DFlash2Drafter:
    """The drafter's network.

    Raises:
        CompatibilityError: it does not score candidates after each other.
    """
    from paceline.models.drafters.dflash2 import DFlash2Drafter

    if not isinstance(drafter.model, DFlash2Drafter):
        raise CompatibilityError(
            f"a drafter of family {drafter.contract.family!r} has no selector; trees are grown from its candidates"
        )
    return drafter.model


def _score(model: DFlash2Drafter, target: LoadedTarget, hidden_AKD: Tensor, anchor_ids_A: Tensor) -> list[Lattice]:
    """Log-probabilities of every candidate after every candidate of the draft before it."""
    import torch

    from paceline.ops.top_k_tokens import top_k_tokens

    unary_AKC, ids_AKC = top_k_tokens(model.logits(hidden_AKD, target.model), model.num_candidates)
    num_anchors, num_drafts, num_candidates = ids_AKC.shape
    walk_one = model.candidate_selector.walk
    _, scores_A1C = walk_one(hidden_AKD[:, :1], unary_AKC[:, :1], ids_AKC[:, :1], anchor_ids_A)
    first_AC = scores_A1C[:, 0].log_softmax(-1)
    tables = []
    for k in range(1, num_drafts):
        rows = (
            part[:, k : k + 1].repeat_interleave(num_candidates, dim=0) for part in (hidden_AKD, unary_AKC, ids_AKC)
        )
        _, scores = walk_one(*rows, ids_AKC[:, k - 1].flatten())
        tables.append(scores.view(num_anchors, num_candidates, num_candidates).log_softmax(-1))
    later = torch.stack(tables, dim=1).tolist() if tables else [[] for _ in range(num_anchors)]
    return [Lattice(*parts) for parts in zip(ids_AKC.tolist(), first_AC.tolist(), later, strict=True)]


def depths(lattice: Lattice, text: Sequence[int], sizes: Sequence[int]) -> dict[int | None, int]:
    """How many drafts of each tree, and of all candidates, are the text that came.

    Args:
        lattice: of the anchor.
        text: tokens behind the anchor.
        sizes: drafts in a tree, rising.
    Returns:
        By size; None is what any tree over these candidates could reach.
    """
    path: list[int] = []  # the text's candidates, while there are any
    for token, ids in zip(text, lattice.ids, strict=False):
        if token not in ids:
            break
        path.append(ids.index(token))
    order = _joining(lattice, path, sizes[-1])
    return {**{size: sum(at < size for at in order) for size in sizes}, None: len(path)}


def _joining(lattice: Lattice, path: Sequence[int], most: int) -> list[int]:
    """When the drafts of a path join the tree, from 0; the first so many drafts of it that ever do."""
    joined: list[int] = []
    branches = [(-value, (c,)) for c, value in enumerate(lattice.first)]
    heapq.heapify(branches)
    for at in range(most):
        if not branches or len(joined) == len(path):
            break
        cost, branch = heapq.heappop(branches)
        if branch == tuple(path[: len(branch)]):
            joined.append(at)
        if len(branch) < len(lattice.ids):
            for c, value in enumerate(lattice.later[len(branch) - 1][branch[-1]]):
                heapq.heappush(branches, (cost - value, (*branch, c)))
    return joined


if __name__ == "__main__":
    sys.exit(run(main))
