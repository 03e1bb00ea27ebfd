"""Runs prompts through an engine with a word of progress."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from benchmarks.command_line import say

from paceline.errors import NumericError

if TYPE_CHECKING:
    from paceline.engine.engine import Engine
    from paceline.engine.request import RequestResult, SamplingParameters


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
    names = [engine.add_request(prompt, sampling) for prompt, sampling in zip(prompts, samplings, strict=True)]
    results: dict[str, RequestResult] = {}
    while engine.has_unfinished():
        for delta in engine.step():
            if delta.finish_reason is None:
                continue
            if delta.finish_reason == "error":
                raise NumericError(f"{label}: a request ended in an error after {len(results)} of {len(names)} prompts")
            results[delta.request_id] = engine.result(delta.request_id)
            if len(results) % 8 == 0 or len(results) == len(names):
                say(f"{label}: {len(results)} of {len(names)} prompts")
    return [results[name] for name in names]
