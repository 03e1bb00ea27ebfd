"""What a soak notes while it runs, and its verdict: is memory flat, do the counters agree, does acceptance stay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

_STATM, _PAGE = Path("/proc/self/statm"), 4096
WARM_UP_SHARE = 0.25  # of a run: allocators, caches and kept results fill up
MEMORY_TOLERANCE = 0.02  # growth of the fitted line over the rest of the run, as a share of its level
ACCEPTANCE_TOLERANCE = 0.03


@dataclass(frozen=True)
class Sample:
    """One look at the engine.

    Attributes:
        second: since the soak began.
        rss_bytes: resident memory of the process.
        num_free_blocks: of the pool.
        num_running: requests in slots.
        num_waiting: requests without.
    """

    second: float
    rss_bytes: int
    num_free_blocks: int
    num_running: int
    num_waiting: int


@dataclass
class Window:
    """What ended within a minute: accepted drafts and steps of each request of the mix.

    Attributes:
        by_request: index in the mix to (accepted, steps with drafts), over all its runs in this window.
        num_tokens: delivered.
        num_requests: ended.
    """

    by_request: dict[int, tuple[int, int]] = field(default_factory=dict)
    num_tokens: int = 0
    num_requests: int = 0

    def add(self, index: int, num_accepted: int, num_steps: int, num_tokens: int) -> None:
        """Count one request that ran to its end."""
        accepted, steps = self.by_request.get(index, (0, 0))
        self.by_request[index] = accepted + num_accepted, steps + num_steps
        self.num_tokens += num_tokens
        self.num_requests += 1

    def acceptance_length(self, indices: Sequence[int] | None = None) -> float:
        """Over some requests of the mix, each counted once however often it ran; NaN without steps."""
        chosen = [self.by_request[index] for index in (self.by_request if indices is None else indices)]
        lengths = [1 + accepted / steps for accepted, steps in chosen if steps]
        return float(np.mean(lengths)) if lengths else float("nan")


def resident_bytes() -> int:
    """Memory of this process; 0 where the system does not tell."""
    return int(_STATM.read_text().split()[1]) * _PAGE if _STATM.is_file() else 0


def memory_faults(samples: Sequence[Sample], tolerance: float = MEMORY_TOLERANCE) -> list[str]:
    """Whether a line through the resident memory after the warm-up rises by more than a share of its level."""
    last = samples[-1].second
    late = [sample for sample in samples if sample.second >= WARM_UP_SHARE * last]
    if len(late) < 3:
        return ["too few samples for a verdict on memory"]
    seconds = np.array([sample.second for sample in late])
    megabytes = np.array([sample.rss_bytes for sample in late]) / 2**20
    slope = float(np.polyfit(seconds, megabytes, 1)[0])
    growth, level = slope * (seconds[-1] - seconds[0]), float(np.median(megabytes))
    if growth > tolerance * level:
        return [f"memory grew by {growth:.1f} MiB at {level:.0f} MiB, {60 * slope:.2f} MiB a minute"]
    return []


def acceptance_faults(first: Window, last: Window, tolerance: float = ACCEPTANCE_TOLERANCE) -> list[str]:
    """Whether the requests that ended in both windows were accepted alike."""
    both = sorted(set(first.by_request) & set(last.by_request))
    if not both:
        return ["no request of the mix ended in the first window and in the last"]
    before, after = first.acceptance_length(both), last.acceptance_length(both)
    if abs(after / before - 1) > tolerance:
        return [f"acceptance length was {before:.3f} at first and is {after:.3f} at the end, over {len(both)} requests"]
    return []


def counter_faults(stats: object, seen: Mapping[str, int], *, num_free_at_start: int) -> list[str]:
    """Whether an idle engine's counters agree with each other and with what the load saw.

    Args:
        stats: `EngineStats`.
        seen: counter's name to what it has to be.
        num_free_at_start: free blocks before the first request.
    """
    drafted, accepted = getattr(stats, "drafted_per_position"), getattr(stats, "accepted_per_position")  # noqa: B009
    expected = {
        **seen,
        "num_draft_tokens": sum(drafted),
        "num_accepted": sum(accepted),
        "num_running": 0,
        "num_waiting": 0,
        "num_used_blocks": 0,
        "num_fenced_blocks": 0,
        "num_free_blocks": num_free_at_start,
        "num_impossible_drafts": 0,
        "num_numeric_errors": 0,
    }
    found = [
        f"{name} is {getattr(stats, name)}, not {value}"
        for name, value in expected.items()
        if getattr(stats, name) != value
    ]
    for name, per_position in (("drafted", drafted), ("accepted", accepted)):
        if list(per_position) != sorted(per_position, reverse=True):
            found.append(f"{name} per position rises: {per_position}")
    if getattr(stats, "num_hit_tokens") > getattr(stats, "num_queried_tokens"):  # noqa: B009
        found.append("more tokens were hit than asked for")
    return found
