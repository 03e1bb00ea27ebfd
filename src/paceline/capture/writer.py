"""What writes text with the target: one protocol, and what its two implementations share. Needs no torch.

A passage is what the target adds to a prompt. The engine writes passages of any length with a drafter's help
(`engine_writer.py`); lockstep is plainer and faster with thousands of rows on one GPU (`lockstep.py`). Both key their
noise by (seed, position), so in row-invariant arithmetic they write the same tokens, whatever the batch.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

LOOP_TOKENS, LOOP_TIMES = 8, 4  # an n-gram that comes so often is a loop, which any drafter foresees

PassageEnd = Literal["stop", "length", "loop", "error"]
Progress = Callable[[int, int], None]  # passages and tokens since the last call


@dataclass(frozen=True)
class PassageRequest:
    """What to write.

    Attributes:
        prompt_ids: at least one token.
        max_tokens: the passage is cut there.
        temperature: 0 is greedy.
        top_p: share of probability that is sampled from.
        seed: int64, of this passage's noise.
    """

    prompt_ids: Sequence[int]
    max_tokens: int
    temperature: float
    top_p: float
    seed: int


@dataclass(frozen=True)
class Passage:
    """What was written.

    Attributes:
        token_ids: a stop token, if one ended it, included.
        end: "stop" at one of the target's stop tokens; "length"; "loop" where an 8-gram came for the fourth time, which
            is where it was cut; "error" for NaN or infinity in the logits.
    """

    token_ids: tuple[int, ...]
    end: PassageEnd


class Writer(Protocol):
    """Writes passages in batches. The same requests in the same order give the same passages."""

    def write(self, requests: Sequence[PassageRequest], on_progress: Progress | None = None) -> list[Passage]:
        """One passage per request, in their order."""
        ...


class LoopWatch:
    """Notices that a text repeats itself: some 8 tokens in a row have occurred four times."""

    def __init__(self) -> None:
        self._last: tuple[int, ...] = ()
        self._counts: Counter[tuple[int, ...]] = Counter()

    def push(self, token_ids: Sequence[int]) -> int | None:
        """Add tokens; returns how many of them there are up to the one that closes a loop, or None."""
        for index, token in enumerate(token_ids):
            self._last = (*self._last[-LOOP_TOKENS + 1 :], token)
            if len(self._last) == LOOP_TOKENS:
                self._counts[self._last] += 1
                if self._counts[self._last] == LOOP_TIMES:
                    return index + 1
        return None


def key_number(*key: object) -> int:
    """A signed 64-bit number that follows from a key alone, for seeds and choices that hang on a name."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "little", signed=True)


def key_share(*key: object) -> float:
    """A number in [0, 1) that follows from a key alone."""
    return (key_number(*key) + 2**63) / 2**64
