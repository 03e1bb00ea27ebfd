"""Shards of captured conversations: token files with a few arrays more, so whatever reads token files reads a shard.

Further arrays: `id`, `turn`, `end`, `temperature`, `top_p` and `seed` of each conversation; `dropped_id` and
`dropped_reason` of what was not kept. Needs no torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from paceline.capture.token_file import Conversation, save_arrays, token_arrays
from paceline.capture.writer import Passage, PassageRequest

SHARD_SUFFIX = ".npz"


@dataclass(frozen=True)
class CapturedRow:
    """One answer and how it came about.

    Attributes:
        id: of the conversation; the same whatever the order of a file or the size of shards.
        turn: which of its answers, from 0.
        request: the rendered prompt and how its answer was drawn.
        passage: the answer and why it ends.
    """

    id: str
    turn: int
    request: PassageRequest
    passage: Passage


@dataclass(frozen=True)
class ShardContent:
    """What a shard holds: rows that are kept, and (id, reason) of what is not."""

    rows: Sequence[CapturedRow]
    dropped: Sequence[tuple[str, str]]


def write_rows(path: Path, content: ShardContent) -> dict[str, int]:
    """Write a shard's file; equal content gives equal bytes.

    Returns:
        What to count: conversations, tokens, answer tokens, ends, and what was dropped for which reason.
    """
    rows = content.rows
    conversations = [Conversation(np.array(r.request.prompt_ids), np.array(r.passage.token_ids)) for r in rows]
    arrays = token_arrays(conversations) | {
        "id": np.array([row.id for row in rows], np.str_),
        "turn": np.array([row.turn for row in rows], np.uint16),
        "end": np.array([row.passage.end for row in rows], np.str_),
        "temperature": np.array([row.request.temperature for row in rows], np.float32),
        "top_p": np.array([row.request.top_p for row in rows], np.float32),
        "seed": np.array([row.request.seed for row in rows], np.int64),
        "dropped_id": np.array([name for name, _ in content.dropped], np.str_),
        "dropped_reason": np.array([reason for _, reason in content.dropped], np.str_),
    }
    save_arrays(path, arrays)
    num_answer_tokens = sum(len(row.passage.token_ids) for row in rows)
    counts = {
        "conversations": len(rows),
        "tokens": num_answer_tokens + sum(len(row.request.prompt_ids) for row in rows),
        "answer_tokens": num_answer_tokens,
        "greedy": sum(row.request.temperature == 0 for row in rows),
    }
    ends = Counter(f"ended by {row.passage.end}" for row in rows)
    reasons = Counter(f"dropped: {reason}" for _, reason in content.dropped)
    return counts | dict(sorted(ends.items())) | dict(sorted(reasons.items()))
