"""Assisted generation of transformers, `speculation_type="dflash"`: DFlash in the Hugging Face assistant layout.

    python -m benchmarks.peers.transformers_assistant

Both sides load the same exported folder, on a tiny random target and on a real one with the given drafter, whose tap
norms are folded (the class has none). Greedy, in float32, draft step by draft step. Exit code 3 if any step differs.
Layers with windows are left out: the class sees one token more on either side (docs/peers.md).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

from benchmarks.command_line import run, say
from benchmarks.peers.cases import PreparedDrafter, PreparedTarget, folded_dflash, prepared_targets, tiny_dflash
from benchmarks.peers.folders import TINY, write_folder
from benchmarks.peers.script import add_tiny_argument, finish, make_peer_parser, our_results, parse
from benchmarks.peers.stepwise import Agreement, agreement_row, compare_steps, our_steps, steps_of_drafts
from benchmarks.results import Row

PEER = "transformers"


def main(arguments: Sequence[str]) -> int:
    """Compare and print."""
    options = parse(add_tiny_argument(make_peer_parser(__doc__)), arguments)
    return finish(PEER, rows(options), options, arguments)


def rows(options: argparse.Namespace) -> Iterator[Row]:
    """One row per target."""
    import torch

    torch.set_num_threads(options.threads)
    with TemporaryDirectory() as root:
        for target in prepared_targets(options, Path(root)):
            if target.name == TINY:
                (drafter,) = tiny_dflash(target, with_windows=False)
            else:
                drafter = folded_dflash(target, options)
            folder = Path(root, f"{target.name}-assistant")
            write_folder(folder, drafter.contract, drafter.tensors, dialect="assistant")
            yield compare(target, drafter, folder, options.max_tokens)


def compare(target: PreparedTarget, drafter: PreparedDrafter, folder: Path, max_tokens: int) -> Row:
    """Both sides from the same two folders."""
    import transformers

    theirs = transformers.AutoModelForCausalLM.from_pretrained(target.folder, dtype="float32").eval()
    assistant = transformers.AutoModel.from_pretrained(folder, dtype="float32").eval()
    found = Agreement()
    for result in our_results(target.loaded, folder, target.prompts, max_tokens):
        stops = target.loaded.contract.stop_token_ids
        drafts = peer_drafts(assistant, theirs, result.prompt_ids, max_tokens, stops)
        steps = steps_of_drafts(drafts, drafter.contract.num_draft_tokens)
        found += compare_steps(our_steps(result), steps)
    say(f"{PEER}, {drafter.name} on {target.name}: {found}")
    version = transformers.__version__
    return agreement_row(found, peer=PEER, version=version, drafter=drafter.name, target=target.name)


def peer_drafts(
    assistant: Any, target: Any, prompt_ids: Sequence[int], max_tokens: int, stop_token_ids: Sequence[int]
) -> list[tuple[int, tuple[int, ...]]]:
    """(anchor position, drafted ids) of every block that transformers drafts while it generates."""
    import torch
    from transformers.generation import DFlashTokenCandidateGenerator

    drafts: list[tuple[int, tuple[int, ...]]] = []
    propose = DFlashTokenCandidateGenerator.get_candidates

    def noted(generator: Any, input_ids: Any, *arguments: Any, **named: Any) -> Any:
        candidates, logits = propose(generator, input_ids, *arguments, **named)
        num_committed = input_ids.shape[1]
        drafted = tuple(candidates[0, num_committed:].tolist())
        if drafted:  # nothing is drafted before the prompt has run, nor at the end of the budget
            drafts.append((num_committed - 1, drafted))
        return candidates, logits

    prompt = torch.tensor([list(prompt_ids)])
    with patch.object(DFlashTokenCandidateGenerator, "get_candidates", noted), torch.inference_mode():
        target.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            assistant_model=assistant,
            speculation_type="dflash",
            do_sample=False,
            max_new_tokens=max_tokens,
            eos_token_id=list(stop_token_ids),
            pad_token_id=0,
        )
    return drafts


if __name__ == "__main__":
    sys.exit(run(main))
