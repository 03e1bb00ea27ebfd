"""The authors' reference package `dflash`: DFlash and DFlash2 from one folder each, greedy, draft step by draft step.

    pip install --no-deps --target peer-site dflash==0.1.0
    PYTHONPATH=peer-site python -m benchmarks.peers.dflash_reference

On a tiny random target, and on a real one with the given drafter, whose tap norms are folded (the package has none); if
it is of DFlash, random DFlash2 parts are put around it for a second comparison. All in float32. Exit code 3 if any step
differs.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

from benchmarks.command_line import run, say
from benchmarks.peers.cases import (
    PreparedDrafter,
    PreparedTarget,
    folded_dflash,
    prepared_targets,
    tiny_dflash,
    tiny_dflash2,
    with_random_dflash2_parts,
)
from benchmarks.peers.folders import TINY, write_folder
from benchmarks.peers.script import add_tiny_argument, finish, make_peer_parser, our_results, parse
from benchmarks.peers.stepwise import Agreement, DraftStep, agreement_row, compare_steps, our_steps, steps_of_drafts
from benchmarks.results import Row

PEER = "dflash"


def main(arguments: Sequence[str]) -> int:
    """Compare and print."""
    options = parse(add_tiny_argument(make_peer_parser(__doc__)), arguments)
    return finish(PEER, rows(options), options, arguments)


def rows(options: argparse.Namespace) -> Iterator[Row]:
    """One row per drafter and target."""
    import torch

    torch.set_num_threads(options.threads)
    with TemporaryDirectory() as root:
        for target in prepared_targets(options, Path(root)):
            for index, drafter in enumerate(_drafters(target, options)):
                folder = write_folder(Path(root, f"{target.name}-{index}"), drafter.contract, drafter.tensors)
                yield compare(target, drafter, folder, options.max_tokens)


def compare(target: PreparedTarget, drafter: PreparedDrafter, folder: Path, max_tokens: int) -> Row:
    """Both sides from the same two folders."""
    import transformers

    theirs = transformers.AutoModelForCausalLM.from_pretrained(target.folder, dtype="float32").eval()
    peer = load_peer(folder)
    ours = our_results(target.loaded, folder, target.prompts, max_tokens)
    found = Agreement()
    for result in ours:
        drafts = peer_drafts(peer, theirs, result.prompt_ids, max_tokens, target.loaded.contract.stop_token_ids)
        steps: list[DraftStep] = steps_of_drafts(drafts, drafter.contract.num_draft_tokens)
        found += compare_steps(our_steps(result), steps)
    say(f"{PEER}, {drafter.name} on {target.name}: {found}")
    version = importlib.metadata.version("dflash")
    return agreement_row(found, peer=PEER, version=version, drafter=drafter.name, target=target.name)


def load_peer(folder: Path) -> Any:
    """The package's class for a folder, by its architecture string, as the package's own script chooses it."""
    from dflash import model as peer

    from paceline.checkpoint.locate import read_json

    (architecture,) = read_json(folder / "config.json")["architectures"]
    return getattr(peer, architecture).from_pretrained(folder, dtype="float32").eval()


def peer_drafts(
    drafter: Any, target: Any, prompt_ids: Sequence[int], max_tokens: int, stop_token_ids: Sequence[int]
) -> list[tuple[int, tuple[int, ...]]]:
    """(anchor position, drafted ids) of every block that the package drafts while it generates."""
    import torch
    from dflash.model import dflash_generate

    anchors: list[int] = []
    drafted: list[tuple[int, ...]] = []
    # DFlash takes the best logit of each row, DFlash2 what its selector walks to
    name = "propose" if hasattr(drafter, "propose") else "compute_logits"
    propose = getattr(drafter, name)

    def note_anchor(_module: Any, _arguments: Any, named: dict[str, Any]) -> None:
        num_rows = named["noise_embedding"].shape[1]
        anchors.append(int(named["position_ids"][0, -num_rows]))

    def note_drafts(*arguments: Any) -> Any:
        found = propose(*arguments)
        ids = found[0] if name == "propose" else found.argmax(-1)
        drafted.append(tuple(ids[0].tolist()))
        return found

    hook = drafter.register_forward_pre_hook(note_anchor, with_kwargs=True)
    try:
        with patch.object(drafter, name, note_drafts):
            prompt = torch.tensor([list(prompt_ids)])
            dflash_generate(drafter, target, prompt, max_tokens, list(stop_token_ids))
    finally:
        hook.remove()
    return list(zip(anchors, drafted, strict=True))


def _drafters(target: PreparedTarget, options: argparse.Namespace) -> list[PreparedDrafter]:
    if target.name == TINY:
        return [*tiny_dflash(target), *tiny_dflash2(target)]
    folded = folded_dflash(target, options)
    return [folded, with_random_dflash2_parts(folded)] if folded.contract.family == "dflash" else [folded]


if __name__ == "__main__":
    sys.exit(run(main))
