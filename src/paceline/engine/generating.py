"""Running requests to their ends where nobody else drives the engine: a list of prompts, or one stream."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from paceline.engine.request import RequestDelta, RequestResult, SamplingParameters
from paceline.errors import RequestError

if TYPE_CHECKING:
    from paceline.engine.engine import Engine


def run_prompts(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParameters | Sequence[SamplingParameters],
) -> list[RequestResult]:
    """See `Engine.generate`."""
    each = [sampling] * len(prompts) if isinstance(sampling, SamplingParameters) else list(sampling)
    if len(each) != len(prompts):
        raise RequestError(f"{len(prompts)} prompts came with {len(each)} sampling parameters")
    names: dict[str, None] = {}  # an ordered set
    finished: dict[str, RequestResult] = {}
    try:
        for prompt, parameters in zip(prompts, each, strict=True):
            if parameters.n == 1:
                names[engine.add_request(prompt, parameters)] = None
            else:
                names.update(dict.fromkeys(engine.add_samples(prompt, parameters)))
        while len(finished) < len(names):
            for delta in engine.step():
                if delta.finish_reason is not None and delta.request_id in names:
                    finished[delta.request_id] = engine.take_result(delta.request_id)
    except BaseException:
        for name in names:
            engine.abort(name)
        raise
    return [finished[name] for name in names]


def stream_prompt(engine: Engine, prompt_ids: Sequence[int], sampling: SamplingParameters) -> Iterator[RequestDelta]:
    """See `Engine.stream`."""
    name = engine.add_request(prompt_ids, sampling)
    is_running = True
    try:
        while is_running:
            for delta in engine.step():
                if delta.request_id == name:
                    is_running = delta.finish_reason is None
                    yield delta
    finally:
        engine.abort(name)
