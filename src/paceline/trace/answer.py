"""A line of a trace file: a request's steps, what was asked, the text of its tokens, and the run that it belongs to.

A file is JSONL. A line of kind "run" says what the answers behind it come from, up to the next such line; a file may
have none. All other lines are answers. Schema 1 had steps alone; schema 2 adds the rest, and every part of it may be
missing.

    {"schema": 2, "kind": "run", "run": {"command": ..., "versions": {...}, "target": {...}, "settings": {...}}}
    {"schema": 2, "request_id": ..., "records": [...], ..., "prompt": {...}, "tokens": {"262": " the", "9": [226, 130]}}

No torch here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from paceline.trace.step import RequestTrace

_MOST_NAME = 80  # characters
RunFacts = Mapping[str, object]  # plain JSON values; `reporting/provenance.py` names the keys that it shows


@dataclass(frozen=True)
class PromptFacts:
    """What an answer answers.

    Attributes:
        id: of the prompt, unique in its set.
        set: name of the prompt set; None where there is none.
        category: kind of prompt; None where the set does not say.
        turn: which of the prompt's questions, from 0.
        sample_index: which of its samples, from 0.
        seed: that the answer was drawn with; None for a greedy one.
        sha256: of the prompt's token ids; equal prompts have equal ones.
        text: the question, where the prompt is one; None otherwise.
    """

    id: str
    set: str | None = None
    category: str | None = None
    turn: int = 0
    sample_index: int = 0
    seed: int | None = None
    sha256: str | None = None
    text: str | None = None

    @property
    def key(self) -> tuple[str | None, str, int, int]:
        """What finds the answer to the same question in another file."""
        return (self.set, self.id, self.turn, self.sample_index)


@dataclass(frozen=True)
class TracedAnswer:
    """One answer as a trace file has it.

    Attributes:
        trace: its steps.
        prompt: what was asked; None where the file does not say.
        tokens: the bytes of every token that the steps name; empty where the file has none.
        run: of which run; None where the file does not say.
    """

    trace: RequestTrace
    prompt: PromptFacts | None = None
    tokens: Mapping[int, bytes] = field(default_factory=dict)
    run: RunFacts | None = None

    @property
    def name(self) -> str:
        """How tables call it: by its prompt, else by its request; of a long id the beginning."""
        if self.prompt is None:
            return self.trace.request_id[:_MOST_NAME]
        parts = [self.prompt.id[:_MOST_NAME]]
        parts += [f"turn {self.prompt.turn}"] if self.prompt.turn else []
        parts += [f"sample {self.prompt.sample_index}"] if self.prompt.sample_index else []
        return ", ".join(parts)

    @property
    def is_plain(self) -> bool:
        """Whether nothing drafted for it; an answer of one token, which has no step, is judged by its method."""
        if self.trace.method == "plain" or not self.trace.records:
            return self.trace.method == "plain"
        return all(record.num_draft_tokens == 0 for record in self.trace.records)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens; of one that the file has no text for, its id in angle brackets."""
        data = b"".join(self.tokens.get(token, b"<%d>" % token) for token in ids)
        return data.decode("utf-8", errors="replace")


def hash_ids(ids: Sequence[int]) -> str:
    """SHA-256 of token ids, as `PromptFacts.sha256` has it."""
    return hashlib.sha256(" ".join(map(str, ids)).encode()).hexdigest()


def ids_of(trace: RequestTrace) -> set[int]:
    """Every token id that a trace names."""
    ids = {trace.first_token_id} if trace.first_token_id is not None else set()
    for record in trace.records:
        ids |= {record.anchor_id, *record.proposed_ids, *record.emitted_ids}
        if record.details is not None:
            ids |= {token for row in record.details.target_top for token, _ in row}
    return ids
