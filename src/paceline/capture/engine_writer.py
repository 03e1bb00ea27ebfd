"""Passages through the serving engine: what is captured is what would be served, with a drafter or without."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.capture.writer import LoopWatch, Passage, PassageEnd, PassageRequest, Progress
from paceline.engine.engine import Engine, EngineSettings
from paceline.engine.request import RequestDelta, SamplingParameters
from paceline.models.loading import LoadedDrafter, LoadedTarget


class EngineWriter:
    """A `Writer` over an engine of its own.

    Drafts are judged by the method "match", so a drafter changes how fast a passage is written, never what it says.

    Args:
        target: what writes.
        drafter: what drafts; None for plain decoding.
        batch_size: passages at a time.
        max_model_len: tokens that prompt and passage may have together.
        num_draft_tokens: proposals per step; None takes the drafter's own number.
    """

    def __init__(
        self,
        target: LoadedTarget,
        drafter: LoadedDrafter | None = None,
        *,
        batch_size: int,
        max_model_len: int,
        num_draft_tokens: int | None = None,
    ) -> None:
        settings = EngineSettings(
            max_num_seqs=batch_size,
            max_model_len=max_model_len,
            num_draft_tokens=num_draft_tokens,
            verify_method="standard" if drafter is None else "match",
        )
        self._engine = Engine(target, drafter, settings)

    def write(self, requests: Sequence[PassageRequest], on_progress: Progress | None = None) -> list[Passage]:
        """One passage per request; interrupted, none of them stays in the engine.

        Raises:
            RequestError: a prompt is empty, too long, or holds an id outside the vocabulary.
        """
        names: dict[str, int] = {}
        try:
            for index, request in enumerate(requests):
                sampling = SamplingParameters(
                    max_tokens=request.max_tokens,
                    temperature=request.temperature,
                    top_p=request.top_p,
                    seed=request.seed,
                )
                names[self._engine.add_request(request.prompt_ids, sampling)] = index
            return self._run(names, len(requests), on_progress)
        finally:
            for name in names:
                self._engine.abort(name)

    def _run(self, names: dict[str, int], count: int, on_progress: Progress | None) -> list[Passage]:
        tokens: list[list[int]] = [[] for _ in range(count)]
        watches = [LoopWatch() for _ in range(count)]
        passages: dict[int, Passage] = {}
        while len(passages) < count:
            num_before, num_tokens = len(passages), 0
            for delta in self._engine.step():
                index = names[delta.request_id]
                tokens[index].extend(delta.token_ids)
                num_tokens += len(delta.token_ids)
                end = _end_of(delta, watches[index], tokens[index])
                if end is not None:
                    self._engine.abort(delta.request_id)
                    passages[index] = Passage(tuple(tokens[index]), end)
            if on_progress is not None:
                on_progress(len(passages) - num_before, num_tokens)
        return [passages[index] for index in range(count)]


def _end_of(delta: RequestDelta, watch: LoopWatch, tokens: list[int]) -> PassageEnd | None:
    """Why a passage ends with this delta, if it does; tokens behind the end of a loop are taken off again."""
    num_kept = watch.push(delta.token_ids)
    if num_kept is not None and (num_kept < len(delta.token_ids) or delta.finish_reason != "stop"):
        del tokens[len(tokens) - len(delta.token_ids) + num_kept :]
        return "loop"
    match delta.finish_reason:
        case "stop" | "length" | None as reason:
            return reason
        case _:
            return "error"
