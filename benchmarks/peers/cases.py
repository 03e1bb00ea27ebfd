"""Which drafters are compared on which targets."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from benchmarks.command_line import name_of, say
from benchmarks.peers.folders import (
    TINY,
    TINY_VOCAB_SIZE,
    add_dflash2_parts,
    dflash2_changes,
    export_target,
    load_exact,
    random_dflash,
    random_tensors,
    read_tensors,
)
from benchmarks.peers.folding import fold_tap_norms
from benchmarks.prompt_sets import read_sets
from torch import Tensor

from paceline.checkpoint.locate import locate_target
from paceline.checkpoint.tokenizer import open_tokenizer

if TYPE_CHECKING:
    from paceline.checkpoint.contract import DrafterContract
    from paceline.models.loading import LoadedTarget

NUM_TINY_PROMPTS, TINY_PROMPT_LENGTH = 4, 12
NUM_FOLDING_TEXTS = 8
SCALED = {"input_embedding_scale": 2.0, "output_multiplier": 0.5, "final_logit_softcapping": 3.0}
# windows shorter than the texts; the first of each pair is what a mask off by one would show in
CAUSAL_WINDOW = {"layer_windows": (12, None), "layer_causal": (True, False)}
WINDOWS = {"layer_windows": (12, 12), "layer_causal": (False, False)}


@dataclass(frozen=True)
class PreparedTarget:
    """A target in a folder that peers load, and on our side.

    Attributes:
        name: for tables.
        folder: Hugging Face layout, float32.
        loaded: the same folder as we load it.
        prompts: token ids.
    """

    name: str
    folder: Path
    loaded: LoadedTarget
    prompts: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class PreparedDrafter:
    """A drafter in memory, by canonical tensor names."""

    name: str
    contract: DrafterContract
    tensors: dict[str, Tensor]


def prepared_targets(options: argparse.Namespace, root: Path) -> Iterator[PreparedTarget]:
    """The tiny target, then the real one unless only the tiny one was asked for."""
    yield prepare_target(TINY, options, root)
    if not options.tiny_only:
        yield prepare_target(options.model, options, root)


def prepare_target(name: str, options: argparse.Namespace, root: Path) -> PreparedTarget:
    """Export a target below `root` and load it from there."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    folder = root / name_of(name)
    say(f"exporting {name} in float32")
    export_target(name, folder)
    loaded = load_exact(folder)
    prompts = _tiny_prompts() if name == TINY else _real_prompts(name, options, loaded)
    return PreparedTarget(name_of(name), folder, loaded, prompts)


def tiny_dflash(target: PreparedTarget, *, with_windows: bool = True) -> list[PreparedDrafter]:
    """Random DFlash drafters: plain, and where a peer promises them with windows, causality and logit transforms."""
    variants: dict[str, dict[str, Any]] = {"dflash": {}}
    if with_windows:
        variants |= {"dflash, causal window": CAUSAL_WINDOW, "dflash, windows, scaled": WINDOWS | SCALED}
    return [_random_drafter(name, target, changes) for name, changes in variants.items()]


def tiny_dflash2(target: PreparedTarget) -> list[PreparedDrafter]:
    """Random DFlash2 drafters: two and three taps, with and without windows and logit transforms."""
    variants = {
        "dflash2": dflash2_changes(2),
        "dflash2, 3 taps, causal window, scaled": dflash2_changes(3) | CAUSAL_WINDOW | SCALED,
        "dflash2, windows": dflash2_changes(2, group_size=16) | WINDOWS,
    }
    return [_random_drafter(name, target, changes) for name, changes in variants.items()]


def folded_dflash(target: PreparedTarget, options: argparse.Namespace) -> PreparedDrafter:
    """The given drafter without its tap norms."""
    contract, tensors = read_tensors(Path(options.draft_model))
    texts = target.prompts[:NUM_FOLDING_TEXTS]
    suffix = ", norms folded" if contract.has_tap_norm else ""
    contract, tensors = fold_tap_norms(contract, tensors, target.loaded, texts)
    return PreparedDrafter(f"{name_of(options.draft_model)}{suffix}", contract, tensors)


def with_random_dflash2_parts(drafter: PreparedDrafter) -> PreparedDrafter:
    """A DFlash2 drafter of a real target's size: a DFlash drafter amid random convolutions and codebooks."""
    contract, tensors = add_dflash2_parts(
        drafter.contract, drafter.tensors, seed=2, num_taps=2, group_size=16, rank=64, top_k=16
    )
    return PreparedDrafter(f"{drafter.name}, random dflash2 parts", contract, tensors)


def _random_drafter(name: str, target: PreparedTarget, changes: dict[str, Any]) -> PreparedDrafter:
    contract = random_dflash(target.loaded.contract, **changes)
    return PreparedDrafter(name, contract, random_tensors(contract, seed=1))


def _tiny_prompts() -> tuple[tuple[int, ...], ...]:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(4, TINY_VOCAB_SIZE, (NUM_TINY_PROMPTS, TINY_PROMPT_LENGTH), generator=generator)
    return tuple(map(tuple, ids.tolist()))


def _real_prompts(name: str, options: argparse.Namespace, loaded: LoadedTarget) -> tuple[tuple[int, ...], ...]:
    tokenizer = open_tokenizer(locate_target(name))  # the exported folder has no chat template
    sets = read_sets(options.sets, tokenizer, vocab_size=loaded.contract.vocab_size, limit=options.num_prompts)
    return tuple(prompt for prompt_set in sets for prompt in prompt_set.prompts)
