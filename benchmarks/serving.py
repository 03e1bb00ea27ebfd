"""Runs prompts through an engine with a word of progress."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.command_line import say

from paceline.errors import NumericError

if TYPE_CHECKING:
    from paceline.engine.engine import Engine
    from paceline.engine.request import RequestResult, SamplingParameters

_PROMPTS_PER_LINE = 8


@dataclass(frozen=True)
class SetToServe:
    """Prompts that are reported together.

    Attributes:
        prompts: token ids of each.
        samplings: one per prompt.
    """

    prompts: Sequence[Sequence[int]]
    samplings: Sequence[SamplingParameters]


def serve(
    engine: Engine, prompts: Sequence[Sequence[int]], samplings: Sequence[SamplingParameters], label: str
) -> list[RequestResult]:
    """Answer every prompt, as many at once as the engine has slots.

    Args:
        engine: nothing else may run on it meanwhile.
        prompts: token ids.
        samplings: one per prompt.
        label: opens the lines of progress.

    Raises:
        NumericError: a request met NaN or infinity.
    """
    found: list[RequestResult] = []
    serve_sets(engine, {label: SetToServe(prompts, samplings)}, lambda _, results: found.extend(results), label=label)
    return found


def serve_sets(
    engine: Engine,
    sets: Mapping[str, SetToServe],
    on_set: Callable[[str, list[RequestResult]], None],
    *,
    label: str,
    is_time_up: Callable[[], bool] = lambda: False,
) -> list[str]:
    """Answer the prompts of several sets in one run, so that no slot idles while the last prompts of a set finish.

    Args:
        engine: nothing else may run on it meanwhile.
        sets: by name; prompts start in this order.
        on_set: called with a set's results, in the order of its prompts, as soon as the last of them is there; the
            engine waits meanwhile.
        label: opens the lines of progress.
        is_time_up: asked before every step; once it says so, sets of which no prompt was begun are left out.

    Returns:
        Names of the sets left out.

    Raises:
        NumericError: a request met NaN or infinity.
    """
    places: dict[str, tuple[str, int]] = {}
    for name, one in sets.items():
        for index, (prompt, sampling) in enumerate(zip(one.prompts, one.samplings, strict=True)):
            places[engine.add_request(prompt, sampling)] = name, index
    found: dict[str, dict[int, RequestResult]] = {name: {} for name in sets}
    begun: set[str] = set()
    left_out: list[str] = []
    num_prompts, num_done = len(places), 0
    while engine.has_unfinished():
        if not left_out and is_time_up():
            left_out = [name for name in sets if name not in begun]
            for request_id, (name, _) in places.items():
                if name in left_out:
                    engine.abort(request_id)
            num_prompts -= sum(len(sets[name].prompts) for name in left_out)
        for delta in engine.step():
            name, index = places[delta.request_id]
            begun.add(name)
            if delta.finish_reason is None:
                continue
            if delta.finish_reason == "error":
                raise NumericError(f"{label}: a request ended in an error after {num_done} of {num_prompts} prompts")
            found[name][index] = engine.result(delta.request_id)
            num_done += 1
            if num_done % _PROMPTS_PER_LINE == 0 or num_done == num_prompts:
                say(f"{label}: {num_done} of {num_prompts} prompts")
            if len(found[name]) == len(sets[name].prompts):
                on_set(name, [found[name][index] for index in range(len(sets[name].prompts))])
    return left_out
