"""What is asked and what came of it: questions, one record per answer, one pass per set-up, load and round.

All times are seconds of one clock, `time.perf_counter`. A pass begins at 0; within an answer 0 is when it was due: in a
closed loop when it was sent, in an open one when it arrived, so that waiting for a place among `concurrency` counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from paceline.evaluation.prompts import Prompt
from paceline.trace.acceptance import DraftTotals


@dataclass(frozen=True)
class Question:
    """One request of a pass.

    Attributes:
        index: its place; the same in every pass.
        prompt: what is asked. Of several turns the first is.
        seed: of its draws; None leaves that to who answers.
    """

    index: int
    prompt: Prompt
    seed: int | None = None


@dataclass
class AnswerRecord:
    """One request and how it ended.

    Attributes:
        index: of the question.
        prompt_id: of its prompt.
        sent_s: when it was sent; within a pass, since the pass began.
        total_s: until the answer was complete, or failed.
        first_s: until its first delta with output; None where there was none, or the answer came whole.
        delta_s: until each delta with output. A delta of speculative decoding holds several tokens.
        delta_tokens: tokens of each delta; None where the deltas do not tell, as over HTTP.
        num_prompt_tokens: of the prompt; None where nobody says.
        num_tokens: of the answer; None where nobody says.
        finish_reason: why it ended; None of a failure.
        output_sha256: of its token ids, or of its text over HTTP, to tell equal answers; None of a failure.
        drafting: what drafting did for it; None where nobody says.
        error: why it failed; None of an answer that is whole.
        due_s: when it should have been sent, within a pass; a closed loop sends at once.
    """

    index: int
    prompt_id: str
    sent_s: float
    total_s: float
    first_s: float | None = None
    delta_s: tuple[float, ...] = ()
    delta_tokens: tuple[int, ...] | None = None
    num_prompt_tokens: int | None = None
    num_tokens: int | None = None
    finish_reason: str | None = None
    output_sha256: str | None = None
    drafting: DraftTotals | None = None
    error: str | None = None
    due_s: float = 0.0

    @property
    def is_whole(self) -> bool:
        """Whether the answer came to its end."""
        return self.error is None

    @property
    def came_at_once(self) -> bool:
        """Whether several tokens came in one delta: between it and the end lies no decoding."""
        return len(self.delta_s) == 1 and self.num_tokens is not None and self.num_tokens > 1

    def place(self, began_s: float, due_s: float | None) -> None:
        """Count from the beginning of its pass, and its times from when it was due.

        Args:
            began_s: when the pass began, by the clock.
            due_s: since then; None for when it was sent.
        """
        self.sent_s -= began_s
        self.due_s = self.sent_s if due_s is None else due_s
        waited_s = self.sent_s - self.due_s
        self.total_s += waited_s
        self.first_s = None if self.first_s is None else self.first_s + waited_s
        self.delta_s = tuple(each + waited_s for each in self.delta_s)


@dataclass(frozen=True)
class Load:
    """How requests come.

    Attributes:
        concurrency: most at once; None sets no limit.
        request_rate: arrivals per second of an open loop; None is a closed loop, which needs a concurrency.
        burstiness: shape of the gamma distribution of the gaps; 1 is a Poisson process, less comes in bursts.
    """

    concurrency: int | None
    request_rate: float | None = None
    burstiness: float = 1.0

    def describe(self) -> str:
        """A few words for tables and lines of progress."""
        limit = None if self.concurrency is None else f"{self.concurrency} at once"
        if self.request_rate is None:
            return limit or "all at once"
        rate = f"{self.request_rate:g} requests/s"
        return rate if limit is None else f"{rate}, {limit}"


@dataclass
class Pass:
    """All questions, answered once by one set-up.

    Attributes:
        setup: its name.
        load: how requests came.
        round_index: from 0.
        records: in the order of their ends.
        total_s: from the beginning to the last end.
        is_whole: whether it came to its end; only then it counts.
        drafting: of all its steps, by the counters of a server; None where there are none.
    """

    setup: str
    load: Load
    round_index: int
    records: list[AnswerRecord] = field(default_factory=list)
    total_s: float = 0.0
    is_whole: bool = False
    drafting: DraftTotals | None = None

    @property
    def answers(self) -> list[AnswerRecord]:
        """Those that are whole."""
        return [record for record in self.records if record.is_whole]


class SetUp(Protocol):
    """Something that answers questions: an engine or a server."""

    @property
    def name(self) -> str:
        """Differs from those of the others."""

    async def ask(self, question: Question) -> AnswerRecord:
        """Ask, and record; what fails of one request alone is in its record, and anything else is raised."""

    async def counters(self) -> DraftTotals | None:
        """What drafting has done here so far, whoever asked; None where answers tell it, or nobody does."""


def first_error(records: Sequence[AnswerRecord]) -> str | None:
    """Why the first of the failed ones failed."""
    return next((record.error for record in records if record.error is not None), None)
