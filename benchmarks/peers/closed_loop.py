"""A closed loop: a fixed number of requests in flight, and the next one starts when one of them ends.

Both sides of a comparison are driven and timed by this file. One of them runs in an environment without paceline, so
the standard library has to do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

Piece = tuple[int, Sequence[int], bool]  # which request, its new tokens, whether it has ended


@dataclass
class TimedAnswer:
    """One request of a loop; times are seconds since the loop began.

    Attributes:
        token_ids: everything that came.
        added_s: when it was handed over.
        first_s: when its first token was there.
        last_s: when its last token was there.
    """

    token_ids: list[int] = field(default_factory=list)
    added_s: float = 0.0
    first_s: float = 0.0
    last_s: float = 0.0

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> TimedAnswer:
        """The inverse of `to_json`."""
        return cls(**values)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def closed_loop(
    num_requests: int,
    concurrency: int,
    add: Callable[[int], None],
    step: Callable[[], Iterable[Piece]],
    clock: Callable[[], float] = time.perf_counter,
) -> list[TimedAnswer]:
    """Run requests 0, 1, 2, ... with `concurrency` of them in flight.

    Args:
        num_requests: how many in all.
        concurrency: how many at once; fewer while the last ones end.
        add: hands a request to the engine.
        step: runs the engine once and says what it gave.
        clock: in seconds.

    Returns:
        One answer per request.
    """
    answers = [TimedAnswer() for _ in range(num_requests)]
    began_s = clock()
    num_added = num_ended = 0
    while num_ended < num_requests:
        while num_added < min(num_requests, num_ended + concurrency):
            answers[num_added].added_s = clock() - began_s
            add(num_added)
            num_added += 1
        pieces = list(step())  # all of it, before the clock is read
        now_s = clock() - began_s
        for index, token_ids, has_ended in pieces:
            answer = answers[index]
            if token_ids and not answer.token_ids:
                answer.first_s = now_s
            if token_ids:
                answer.last_s = now_s
            answer.token_ids.extend(token_ids)
            num_ended += has_ended
    return answers
