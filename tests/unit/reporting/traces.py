"""Hand-made traces whose figures can be worked out on paper, and the files that hold them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from paceline.trace.answer import PromptFacts, TracedAnswer
from paceline.trace.step import RequestTrace, StepDetails, StepRecord
from paceline.trace.writer import TraceWriter

WORDS = ["The", " cat", " sat", " 12", "{", "\n", " Anna", ".", " on", "<script>alert(1)</script>", "```", " ran"]
TOKENS = {token: word.encode() for token, word in enumerate(WORDS)}
RUN = {
    "date": "2026-01-01T00:00:00+00:00",
    "command": "paceline generate m --draft-model d",
    "versions": {"paceline": "0.1"},
    "target": {"name": "m", "weights": "aa"},
    "drafter": {"origin": "d", "family": "dflash"},
    "settings": {"model": "m", "draft_model": "d", "temperature": 0.0, "max_tokens": 64},
    "prompt_files": [{"file": "p.jsonl", "sha256": "ff"}],
    "requests_at_once": 1,
}


def step(
    name: str,
    index: int,
    anchor: int,
    proposed: Sequence[int],
    verified: int,
    bonus: int | None,
    *,
    kept: int | None = None,
    step_ms: float = 10.0,
    details: StepDetails | None = None,
) -> StepRecord:
    """One step; `kept` below `verified` is a step that a stop cut."""
    kept = verified if kept is None else kept
    emitted = tuple(proposed[:kept]) + (() if bonus is None else (bonus,))
    return StepRecord(name, index, anchor, 0, tuple(proposed), verified, kept, emitted, bonus, step_ms, details)


def answer(
    name: str,
    blocks: Sequence[tuple[Sequence[int], int, int]],
    *,
    category: str | None = None,
    method: str = "dflash/greedy",
    details: StepDetails | None = None,
    tokens: dict[int, bytes] | None = None,
    step_ms: float = 10.0,
    sha256: str = "aa",
    prompt: bool = True,
) -> TracedAnswer:
    """An answer to prompt `name` from (drafts, kept, bonus) of each step; its prompt has 10 tokens."""
    records, anchor = [], 10
    for index, (drafts, kept, bonus) in enumerate(blocks):
        records.append(step(name, index, anchor, drafts, kept, bonus, step_ms=step_ms, details=details))
        anchor += kept + 1
    total = 5.0 + step_ms * len(records)
    trace = RequestTrace(name, 10, 0, records, "length", 5.0, total, True, method)
    facts = PromptFacts(name, "first", category, sha256=sha256, text=f"ask {name}") if prompt else None
    return TracedAnswer(trace, facts, TOKENS if tokens is None else tokens, RUN)


def two_answers() -> list[TracedAnswer]:
    """Three steps of three drafts each to "a", which keep 3, 1 and 0; one to "b", which keeps 2."""
    return [
        answer("a", [([1, 2, 8], 3, 3), ([4, 5, 6], 1, 7), ([1, 1, 1], 0, 6)], category="prose"),
        answer("b", [([1, 2, 4], 2, 7)], category="code"),
    ]


def write(path: Path, answers: Sequence[TracedAnswer], *, with_run: bool = True) -> Path:
    """Write a trace file as a run does."""
    with TraceWriter(path, RUN if with_run else None) as writer:
        for each in answers:
            writer.write(each.trace, each.prompt, each.tokens)
    return path
