"""Engines with recurrent states: prompts by each kernel, and steps with states in float32 and in bf16."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median

import torch
from benchmarks.gpu_gate import GRAPH, answer, engine_settings, records_steps
from benchmarks.gpu_micro_clock import Row
from benchmarks.random_dense import random_prompts
from benchmarks.step_driver import time_steps
from benchmarks.step_shapes import DFLASH, KINDS, make_drafter, make_target

from paceline.engine.engine import Engine
from paceline.errors import ConfigError
from paceline.models.loading import LoadedDrafter, LoadedTarget
from paceline.trace.acceptance import AcceptanceSummary

Case = tuple[tuple[str, str, str, int], Callable[[], Row]]
_PROMPT_TOKENS, _NEW_TOKENS, _MAX_MODEL_LEN = 128, 96, 512
_NUM_PROMPTS, _NUM_ROUNDS = 4, 3
_WARM_UP, _TIMED = 30, 120
_STATES: dict[str, dict[str, str]] = {
    "float32": {},
    "float32, prompts by row": {"prompt_kernel": "recurrent"},
    "bfloat16": {"recurrent_state_dtype": "bfloat16"},
}


def prompt_cases(options: argparse.Namespace, device: torch.device) -> Iterator[Case]:
    """Prompts of one length at a time, one after the other, by each kernel that can be had."""
    target = make_target(options.shape, device, dtype=torch.bfloat16)
    longest = target.contract.max_position_embeddings - 1
    first_tokens: dict[int, list[tuple[int, ...]]] = {}
    for length in (length for length in options.lengths if length <= longest):
        for kernel in ("recurrent", "chunks", "fla", "auto"):
            measure = partial(_prompt_pass, target, kernel, length, first_tokens)
            yield ("prompts", options.shape, kernel, length), measure


def _prompt_pass(target: LoadedTarget, kernel: str, length: int, first_tokens: dict[int, list[tuple[int, ...]]]) -> Row:
    settings = engine_settings(max_num_seqs=1, max_model_len=length + 1, prompt_kernel=kernel)
    try:
        engine = Engine(target, None, settings)
    except ConfigError as error:
        return {"left_out": str(error).splitlines()[0][:120]}
    try:
        prompts = random_prompts(_NUM_PROMPTS, length, target.contract.vocab_size)
        answer(engine, prompts[:1], 1)
        took_ms, found = [], []
        for prompt in prompts:
            began_s = time.perf_counter()
            (result,) = answer(engine, [prompt], 1)
            took_ms.append(1e3 * (time.perf_counter() - began_s))
            found.append(tuple(result.token_ids))
        expected = first_tokens.setdefault(length, found)
        num_same = sum(one == other for one, other in zip(found, expected, strict=True))
        runs = {name: how for name, how in engine.stats().implementations.items() if "of prompts" in name}
        return {"prompt_ms": median(took_ms), "num_same": num_same, "num_prompts": len(prompts), "runs": str(runs)}
    finally:
        engine.close()


def state_cases(options: argparse.Namespace, device: torch.device) -> Iterator[Case]:
    """Closed batches and bare recorded steps, states in float32 first."""
    target = make_target(options.shape, device, dtype=torch.bfloat16)
    drafters = {kind: make_drafter(target) if kind == DFLASH else None for kind in KINDS}
    texts: dict[tuple[str, int], list[tuple[int, ...]]] = {}
    for kind, drafter in drafters.items():
        for batch in options.batches:
            for name, chosen in _STATES.items():
                measure = partial(_states, target, drafter, (kind, batch), chosen, texts)
                yield ("states", options.shape, f"{kind}, {name}", batch), measure


def _states(
    target: LoadedTarget,
    drafter: LoadedDrafter | None,
    case: tuple[str, int],
    chosen: dict[str, str],
    texts: dict[tuple[str, int], list[tuple[int, ...]]],
) -> Row:
    batch = case[1]
    mode = {"mode": GRAPH} if records_steps(target.model.norm.weight.device) else {}
    settings = engine_settings(**mode, max_num_seqs=batch, max_model_len=_MAX_MODEL_LEN, **chosen)
    engine = Engine(target, drafter, settings)
    try:
        prompts = random_prompts(batch, _PROMPT_TOKENS, target.contract.vocab_size)
        results = answer(engine, prompts, _NEW_TOKENS)
        found = [tuple(result.token_ids) for result in results]
        prefixes = [_num_same(*pair) for pair in zip(found, texts.setdefault(case, found), strict=True)]
        summary = AcceptanceSummary.from_steps(record for result in results for record in result.trace.records)
        steps = [
            time_steps(
                engine, batch=batch, context=_PROMPT_TOKENS + _NEW_TOKENS // 2, num_warm_up=_WARM_UP, num_timed=_TIMED
            )
            for _ in range(2)
        ]
        best = min(steps, key=lambda one: one.median_ms)
        stats = engine.stats()
        return {
            "step_ms": best.median_ms,
            "noise": max(one.median_ms for one in steps) / best.median_ms - 1,
            "state_mb": stats.recurrent_state_bytes / 1e6,
            "num_replayed": stats.num_replayed_steps,
            "acceptance_length": summary.acceptance_length if drafter is not None else None,
            "num_equal_texts": sum(count == _NEW_TOKENS for count in prefixes),
            "median_prefix": float(median(prefixes)),
            "shortest_prefix": min(prefixes),
        }
    finally:
        engine.close()


def _num_same(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens that are equal before the first that is not."""
    pairs = zip(one, other, strict=True)
    return next((index for index, (left, right) in enumerate(pairs) if left != right), len(one))
