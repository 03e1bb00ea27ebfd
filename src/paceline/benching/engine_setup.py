"""A set-up in this process: an engine on its own thread, whose deltas are timed where they come out of it.

A reader that wakes at each delta takes a core away in the middle of a step, and plain decoding, with more steps, would
pay more for it than drafting. So the engine notes the times itself, and readers wake at the first and last delta alone.
"""

from __future__ import annotations

import hashlib
import math
import time
from typing import TYPE_CHECKING

from paceline.benching.records import AnswerRecord, Question
from paceline.engine.async_engine import AsyncEngine
from paceline.engine.engine import Engine
from paceline.errors import EngineClosedError, PacelineError
from paceline.trace.acceptance import DraftTotals

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.engine.request import RequestDelta, RequestResult, SamplingParameters
    from paceline.engine.settings import EngineSettings
    from paceline.models.loading import LoadedDrafter, LoadedTarget

_TOTALS = (
    "num_steps",
    "mean_step_ms",
    "num_held_back",
    "num_switched_off",
    "num_probes",
    "num_replayed_steps",
    "num_unrecorded_steps",
    "num_queried_tokens",
    "num_hit_tokens",
    "num_preemptions",
    "target_weight_bytes",
    "drafter_weight_bytes",
    "target_cache_bytes",
    "recurrent_state_bytes",
    "drafter_cache_bytes",
)


class TimedEngine(Engine):
    """An engine that notes when it gave out each delta with tokens.

    Attributes:
        deltas: of each request, (clock, tokens); its reader takes them away.
    """

    def __init__(self, target: LoadedTarget, drafter: LoadedDrafter | None, settings: EngineSettings) -> None:
        self.deltas: dict[str, list[tuple[float, int]]] = {}
        super().__init__(target, drafter, settings)

    def step(self) -> list[RequestDelta]:
        """As `Engine.step`."""
        found = super().step()
        now_s = time.perf_counter()
        for delta in found:
            if delta.token_ids:
                self.deltas.setdefault(delta.request_id, []).append((now_s, len(delta.token_ids)))
        return found


class EngineSetUp:
    """Answers questions with an engine.

    Args:
        name: of the set-up.
        engine: that runs; made by `make_engine`.
        timed: gives the engine behind it.
        sampling_of: what a question is sampled with.
    """

    def __init__(
        self,
        name: str,
        engine: AsyncEngine,
        timed: Callable[[], TimedEngine],
        sampling_of: Callable[[Question], SamplingParameters],
    ) -> None:
        self._name, self._engine, self._timed, self._sampling_of = name, engine, timed, sampling_of
        self._num_asked = 0

    @property
    def name(self) -> str:
        """Of the set-up."""
        return self._name

    async def ask(self, question: Question) -> AnswerRecord:
        """Ask, and record.

        Raises:
            EngineClosedError: the engine has ended.
        """
        assert question.prompt.token_ids is not None, "prompts are encoded before they are asked"
        request_id = f"bench-{self._num_asked}"
        self._num_asked += 1
        sent_s = time.perf_counter()
        try:
            async for _ in self._engine.generate(
                question.prompt.token_ids, self._sampling_of(question), request_id, interval_s=math.inf
            ):
                pass
            result = await self._engine.take_result(request_id)
        except EngineClosedError:
            raise
        except PacelineError as error:
            total_s = time.perf_counter() - sent_s
            return AnswerRecord(question.index, question.prompt.id, sent_s, total_s, error=error.message)
        deltas = self._timed().deltas.pop(request_id, [])
        return _record(question, sent_s, result, deltas)

    async def counters(self) -> DraftTotals | None:
        """None: answers tell it."""
        return None

    async def totals(self) -> dict[str, object]:
        """What the engine has counted since it was made, warm-ups included; nothing where it is dead."""
        try:
            stats = await self._engine.stats()
        except EngineClosedError:
            return {}
        return {name: getattr(stats, name) for name in _TOTALS}


def _record(question: Question, sent_s: float, result: RequestResult, deltas: list[tuple[float, int]]) -> AnswerRecord:
    error = None
    if result.finish_reason not in ("stop", "length") or not deltas:
        error = result.error or f"the answer ended with the reason {result.finish_reason!r}"
    ids = ",".join(map(str, result.token_ids))
    return AnswerRecord(
        index=question.index,
        prompt_id=question.prompt.id,
        sent_s=sent_s,
        total_s=(deltas[-1][0] if deltas else time.perf_counter()) - sent_s,
        first_s=deltas[0][0] - sent_s if deltas else None,
        delta_s=tuple(clock - sent_s for clock, _ in deltas),
        delta_tokens=tuple(num_tokens for _, num_tokens in deltas),
        num_prompt_tokens=len(result.prompt_ids),
        num_tokens=len(result.token_ids),
        finish_reason=result.finish_reason if error is None else None,
        output_sha256=hashlib.sha256(ids.encode()).hexdigest() if error is None else None,
        drafting=DraftTotals.from_steps(
            (record.num_draft_tokens, record.num_accepted) for record in result.trace.records
        ),
        error=error,
    )
