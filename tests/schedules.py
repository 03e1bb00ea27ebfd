"""Schedules of a serving engine: who arrives, is aborted, late or preempted at which step, in how few blocks.

Every request of a schedule has to come out as it does alone: `faults` compares tokens, ends, and step by step what was
drafted and accepted. Models are tiny and row-invariant, so equal means equal bits. The drafters are real ones, in every
family; since random drafters are hardly ever right, a schedule may ask for help: the first drafts of a block, a
different number each time, are then the plain text's own.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

from tests import tiny, tiny_kimi
from tests.helped_drafts import help_drafts

import paceline.engine.graphs as graphs_module
import paceline.engine.prompt_graphs as prompt_graphs_module
import paceline.engine.prompt_passes as prompts_module
import paceline.engine.scheduler as scheduler_module
from paceline.engine.engine import Engine, EngineSettings
from paceline.engine.request import RequestDelta, RequestResult, SamplingParameters
from paceline.errors import ConfigError
from paceline.models.loading import LoadedDrafter, LoadedTarget
from paceline.trace.step import StepRecord

MAX_MODEL_LEN, MAX_TOKENS, NUM_DRAFT_TOKENS, VOCAB_SIZE = 48, 20, 3, 32
MOST_STEPS = 2_000  # nothing here needs a tenth of them
FAMILIES = ("dflash", "dflash2", "dspark", "eagle3")
METHODS = ("standard", "block", "match", "coupled")
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy, penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.4},
    "greedy, stops": {"stop_token_ids": (5, 9), "min_tokens": 2, "ignore_eos": False},
    "sampled": {"temperature": 1.0, "seed": 11},
    "sampled, cut": {"temperature": 0.7, "top_k": 9, "top_p": 0.9, "presence_penalty": 0.3, "seed": 12},
}
# Texts that begin alike and end around the borders of blocks of 4 and 8.
_PREFIXES = [tiny.tiny_prompts([24], seed=index, vocab_size=VOCAB_SIZE)[0] for index in (1, 2)]
_ENDS = tiny.tiny_prompts([1, 2, 5], seed=3, vocab_size=VOCAB_SIZE)
PROMPTS = tuple(tuple(prefix[:length] + end) for prefix in _PREFIXES for length in (23, 16, 15, 0) for end in _ENDS)


@dataclass(frozen=True)
class RequestPlan:
    """One request of a schedule; steps are counted from the schedule's first.

    Attributes:
        prompt: index into `PROMPTS`.
        max_tokens: of its budget.
        sampling: key of `SAMPLINGS`.
        is_drafted: whether it asks for drafts.
        arrives: before which step.
        priority: lower is served first.
        timeout_s: the clock moves a second per step; None never runs out.
        aborted: before which step, if ever.
        preempted: before which steps.
    """

    prompt: int
    max_tokens: int
    sampling: str
    is_drafted: bool
    arrives: int
    priority: int = 0
    timeout_s: float | None = None
    aborted: int | None = None
    preempted: frozenset[int] = frozenset()

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """Its tokens."""
        return PROMPTS[self.prompt]

    @property
    def parameters(self) -> SamplingParameters:
        """What it asks for."""
        return sampling_parameters(self.sampling, self.max_tokens, is_drafted=self.is_drafted)


@dataclass(frozen=True)
class Schedule:
    """An engine and what happens to it.

    Attributes:
        family: of the drafter; None for an engine without one.
        method: how drafts are judged.
        is_helped: whether the plain text's own tokens are among the drafts, which are then one-hot.
        num_slots: requests at once.
        block_size: positions of a block.
        num_spare_blocks: beyond the fewest that the engine takes.
        chunk_size: of prompts.
        has_cache: whether prefixes are kept.
        requests: in order of their names.
        cache_cleared: before which steps the prefix cache is emptied.
        interrupted: steps in whose first pass something is raised, before it runs or when it has.
        runs_ahead: whether a step is launched before the one before is read.
        is_hybrid: whether the target has recurrent and latent layers.
        num_snapshots: recurrent states that it keeps for later requests.
        spacing: blocks between them in long texts.
    """

    family: str | None
    method: str
    is_helped: bool
    num_slots: int
    block_size: int
    num_spare_blocks: int
    chunk_size: int
    has_cache: bool
    requests: tuple[RequestPlan, ...]
    cache_cleared: frozenset[int] = frozenset()
    interrupted: tuple[tuple[int, str], ...] = ()
    runs_ahead: bool = False
    is_hybrid: bool = False
    num_snapshots: int = 8
    spacing: int = 1

    @property
    def kind(self) -> EngineKind:
        """What its requests' own runs depend on."""
        return EngineKind(self.family, self.method, self.is_helped, self.is_hybrid)


@dataclass(frozen=True)
class EngineKind:
    """Everything about an engine that a single request's drafts depend on."""

    family: str | None
    method: str
    is_helped: bool
    is_hybrid: bool = False


@dataclass(frozen=True)
class Outcome:
    """What a schedule gave.

    Attributes:
        results: one per request.
        deltas: of all requests, in order.
        num_free: blocks free before the first request and after the last.
        stats: at the end.
    """

    results: tuple[RequestResult, ...]
    deltas: tuple[RequestDelta, ...]
    num_free: tuple[int, int]
    stats: Any


def sampling_parameters(name: str, max_tokens: int, *, is_drafted: bool) -> SamplingParameters:
    """Settings by name."""
    wanted: dict[str, Any] = {"ignore_eos": True, **SAMPLINGS[name]}
    return SamplingParameters(
        max_tokens=max_tokens,
        draft_length=None if is_drafted else "off",
        **(wanted | {"min_tokens": min(max_tokens, wanted.get("min_tokens", 0))}),
    )


@functools.cache
def models(family: str | None, is_hybrid: bool = False) -> tuple[LoadedTarget, LoadedDrafter | None]:
    """A target of two layers, or a hybrid one of four, and a drafter of a family for it."""
    target = _hybrid_target() if is_hybrid else _target()
    if family is None:
        return target, None
    drafter = tiny.tiny_drafter(target.contract, family=family, block_size=NUM_DRAFT_TOKENS + (family != "dspark"))
    return target, tiny.wrap_drafter(drafter, num_draft_tokens=NUM_DRAFT_TOKENS)


@functools.cache
def _target() -> LoadedTarget:
    sizes = {"num_layers": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "num_kv_heads": 1}
    changes = {**sizes, "head_size": 16, "vocab_size": VOCAB_SIZE, "max_position_embeddings": MAX_MODEL_LEN}
    return tiny.wrap_target(tiny.tiny_target("qwen3", **changes))


@functools.cache
def _hybrid_target() -> LoadedTarget:
    changes = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": MAX_MODEL_LEN}
    return tiny.wrap_target(tiny_kimi.kimi_target(tiny_kimi.small_kimi_config(4, 2, **changes)))


def make_engine(kind: EngineKind, scripts: Mapping[str, Sequence[int]], **changes: Any) -> Engine:
    """An engine of a kind, with scripts of the requests that it may meet, by name."""
    target, drafter = models(kind.family, kind.is_hybrid)
    draft_method = (
        None if drafter is None or kind.method == "coupled" else "greedy" if kind.is_helped else "probabilistic"
    )
    wanted = {"max_model_len": MAX_MODEL_LEN, "verify_method": kind.method, "draft_sample_method": draft_method}
    engine = Engine(target, drafter, EngineSettings(**(wanted | changes)))
    return help_drafts(engine, scripts) if kind.is_helped else engine


@functools.cache
def least_num_blocks(block_size: int, family: str | None) -> int:
    """The smallest pool that an engine takes."""
    kind = EngineKind(family, "standard", False)
    for num_blocks in itertools.count(1):
        try:
            make_engine(kind, {}, block_size=block_size, num_blocks=num_blocks).close()
        except ConfigError:
            continue
        return num_blocks
    raise AssertionError("unreachable")


@functools.cache
def plain_text(prompt: int, sampling: str, is_hybrid: bool) -> RequestResult:
    """A request alone, in an engine without a drafter, up to the largest budget."""
    parameters = sampling_parameters(sampling, MAX_TOKENS, is_drafted=False)
    settings = EngineSettings(max_num_seqs=1, max_model_len=MAX_MODEL_LEN, prefix_cache=False)
    (result,) = Engine(models(None, is_hybrid)[0], None, settings).generate([PROMPTS[prompt]], parameters)
    return result


@functools.cache
def alone(kind: EngineKind, prompt: int, sampling: str, is_drafted: bool) -> RequestResult:
    """A request alone in an engine of its kind, up to the largest budget."""
    plain = plain_text(prompt, sampling, kind.is_hybrid)
    if kind.family is None or not is_drafted:
        return plain
    script = (*PROMPTS[prompt], *plain.token_ids)
    engine = make_engine(kind, {"alone": script}, max_num_seqs=1, prefix_cache=False)
    engine.add_request(PROMPTS[prompt], sampling_parameters(sampling, MAX_TOKENS, is_drafted=True), "alone")
    while engine.has_unfinished():
        engine.step()
    result = engine.result("alone")
    if sampling.startswith("greedy") or kind.method in ("match", "coupled"):
        assert result.token_ids == plain.token_ids, "drafting changes what has to stay the same"
    return result


PASSES = ((prompts_module, "prefill_chunk"), (prompt_graphs_module, "prefill_prompts"), (graphs_module, "decode_step"))


class Interruption(Exception):
    """What a schedule raises in the middle of a step."""


@dataclass
class Moment:
    """Where a schedule stands.

    Attributes:
        step: the step that comes or runs; also the engine's clock, in seconds.
        interruption: "before" or "after" the next pass; None lets it run.
    """

    step: int = 0
    interruption: str | None = None

    def watched(self, run_pass: Callable[..., Any]) -> Callable[..., Any]:
        """A pass of the models that is interrupted if it has to be."""

        def watched_pass(*arguments: Any, **options: Any) -> Any:
            wanted, self.interruption = self.interruption, None
            if wanted == "before":
                raise Interruption
            output = run_pass(*arguments, **options)
            if wanted == "after":
                raise Interruption
            return output

        return watched_pass


def prepare(schedule: Schedule) -> None:
    """Find out beforehand what a run of a schedule takes from other engines."""
    least_num_blocks(schedule.block_size, schedule.family)
    for request in schedule.requests:
        plain_text(request.prompt, request.sampling, schedule.is_hybrid)


def run(schedule: Schedule, *, is_checked: bool = True) -> Outcome:
    """Let a schedule happen.

    Args:
        schedule: what happens.
        is_checked: whether the engine checks its invariants meanwhile.
    """
    moment = Moment()
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, {"PACELINE_DEBUG": str(int(is_checked))}))
        stack.enter_context(mock.patch.object(scheduler_module, "now_s", lambda: float(moment.step)))
        for module, name in PASSES:
            watched = moment.watched(getattr(module, name))
            stack.enter_context(mock.patch.object(module, name, watched))
        return _run(schedule, moment)


def _run(schedule: Schedule, moment: Moment) -> Outcome:
    names = [str(index) for index in range(len(schedule.requests))]
    scripts = {
        name: (*request.prompt_ids, *plain_text(request.prompt, request.sampling, schedule.is_hybrid).token_ids)
        for name, request in zip(names, schedule.requests, strict=True)
    }
    engine = make_engine(
        schedule.kind,
        scripts,
        max_num_seqs=schedule.num_slots,
        block_size=schedule.block_size,
        num_blocks=least_num_blocks(schedule.block_size, schedule.family) + schedule.num_spare_blocks,
        prefill_chunk_size=schedule.chunk_size,
        prefix_cache=schedule.has_cache,
        run_ahead=schedule.runs_ahead,
        num_snapshots=schedule.num_snapshots,
        snapshot_spacing=schedule.spacing * schedule.block_size,
    )
    num_free = engine.stats().num_free_blocks
    deltas: list[RequestDelta] = []
    interruptions = dict(schedule.interrupted)
    for moment.step in range(MOST_STEPS):
        for name, request in zip(names, schedule.requests, strict=True):
            _act(engine, name, request, moment.step)
        if moment.step in schedule.cache_cleared:
            engine.clear_prefix_cache()
        if not engine.has_unfinished() and all(request.arrives <= moment.step for request in schedule.requests):
            break
        moment.interruption = interruptions.get(moment.step)
        with contextlib.suppress(Interruption):
            deltas += engine.step()
        moment.interruption = None
    else:
        raise AssertionError(f"{MOST_STEPS} steps were not enough: {engine.stats()}")
    stats = engine.stats()
    results = tuple(engine.result(name) for name in names)
    engine.close()
    return Outcome(results, tuple(deltas), (num_free, stats.num_free_blocks), stats)


def _act(engine: Engine, name: str, request: RequestPlan, step: int) -> None:
    if request.arrives == step:
        engine.add_request(
            request.prompt_ids, request.parameters, name, priority=request.priority, timeout_s=request.timeout_s
        )
    if step in request.preempted:
        engine.preempt(name)
    if request.aborted == step:
        engine.abort(name)


def faults(schedule: Schedule, outcome: Outcome) -> list[str]:
    """Everything in which a schedule's outcome is not what it has to be."""
    found = []
    for index, (request, result) in enumerate(zip(schedule.requests, outcome.results, strict=True)):
        reference = alone(schedule.kind, request.prompt, request.sampling, request.is_drafted)
        found += [f"request {index}: {text}" for text in request_faults(schedule, request, result, reference)]
        delivered = [token for delta in outcome.deltas if delta.request_id == str(index) for token in delta.token_ids]
        if tuple(delivered) != result.token_ids:
            found.append(f"request {index}: deltas gave {delivered}, the result has {list(result.token_ids)}")
    stats = outcome.stats
    if outcome.num_free[0] != outcome.num_free[1]:
        found.append(f"{outcome.num_free[0]} blocks were free at the start, {outcome.num_free[1]} at the end")
    counts = {
        "num_used_blocks": 0,
        "num_fenced_blocks": 0,
        "num_used_snapshots": 0,
        "num_running": 0,
        "num_waiting": 0,
        "num_free_slots": schedule.num_slots,
        "num_impossible_drafts": 0,
        "num_spoiled_blocks": 0,
        "num_finished": len(schedule.requests),
        "num_output_tokens": sum(len(result.token_ids) for result in outcome.results),
        "num_preemptions": sum(result.num_preemptions for result in outcome.results),
        "num_aborted": sum(result.finish_reason == "abort" for result in outcome.results),
        "num_accepted": sum(step.num_accepted for result in outcome.results for step in result.trace.records),
    }
    found += [
        f"{name} is {getattr(stats, name)}, not {expected}"
        for name, expected in counts.items()
        if getattr(stats, name) != expected
    ]
    return found


def request_faults(
    schedule: Schedule, request: RequestPlan, result: RequestResult, reference: RequestResult
) -> list[str]:
    """In what a request differs from its own run alone."""
    expected = reference.token_ids[: request.max_tokens]
    has_other_drafts = request.is_drafted and (result.context_start > 0 or bool(schedule.interrupted))
    if has_other_drafts and request.sampling.startswith("sampled") and schedule.method in ("standard", "block"):
        return []  # other drafts or block borders, and under these methods another text, lossless all the same
    if result.finish_reason == "abort":
        found = [] if request.aborted is not None or request.timeout_s is not None else ["nobody aborted it"]
        if result.token_ids != expected[: len(result.token_ids)]:
            found.append(f"aborted after {list(result.token_ids)}; alone it begins with {list(expected)}")
    else:
        found = [] if result.token_ids == expected else [f"{list(result.token_ids)}, alone {list(expected)}"]
        reason = reference.finish_reason if len(reference.token_ids) <= request.max_tokens else "length"
        if result.finish_reason != reason:
            found.append(f"ended with {result.finish_reason!r} ({result.error}), alone with {reason!r}")
    if request.is_drafted and not has_other_drafts:
        steps = comparable(result.trace.records)
        steps_alone = comparable(reference.trace.records, max(0, len(result.token_ids) - 1))
        if steps != steps_alone:
            found.append(f"drafts, accepted, emitted: {steps}, alone {steps_alone}")
    return found


def comparable(
    records: Sequence[StepRecord], num_tokens: int | None = None
) -> list[tuple[tuple[int, ...], int, tuple[int, ...]]]:
    """Drafts, how many were kept and what was emitted, step by step, as far as the first `num_tokens` tokens go."""
    found = []
    for record in records:
        emitted = record.emitted_ids if num_tokens is None else record.emitted_ids[:num_tokens]
        if not emitted:
            break
        found.append((record.proposed_ids, record.num_verified_accepted, emitted))
        num_tokens = None if num_tokens is None else num_tokens - len(emitted)
    return found
