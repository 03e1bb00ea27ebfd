"""What a server's `/metrics` tells of drafting: vLLM's counters, which paceline has under its own prefix.

Read before and after a pass, their growth is what drafting did meanwhile, for whoever asked. All series of a counter
are added up: engines of one server count apart.
"""

from __future__ import annotations

import math
import re

from paceline.trace.acceptance import DraftTotals

_SAMPLE = re.compile(
    r"(?:vllm|paceline):spec_decode_num_(?P<what>drafts|draft_tokens|accepted_tokens|accepted_tokens_per_pos)"
    r"(?:_total)?(?:\{(?P<labels>.*)\})?\s+(?P<value>[^\s]+)(?:\s+-?\d+)?\s*"
)
_POSITION = re.compile(r'(?:^|[,\s])position="(\d+)"')


def read_counters(exposition: str) -> DraftTotals | None:
    """Counters of a scrape; None where the server has none, as without a drafter.

    Args:
        exposition: in Prometheus's text format.
    """
    sums = {"drafts": 0.0, "draft_tokens": 0.0, "accepted_tokens": 0.0}
    kept: dict[int, float] = {}
    is_there = False
    for line in exposition.splitlines():
        found = _SAMPLE.fullmatch(line)
        if found is None:
            continue
        try:
            value = float(found["value"])
        except ValueError:
            continue
        if not math.isfinite(value):
            continue
        if found["what"] == "accepted_tokens_per_pos":
            position = _POSITION.search(found["labels"] or "")
            if position is not None:
                kept[int(position[1])] = kept.get(int(position[1]), 0.0) + value
            continue
        is_there = is_there or found["what"] == "drafts"
        sums[found["what"]] += value
    if not is_there:
        return None
    return DraftTotals(
        round(sums["drafts"]),
        round(sums["draft_tokens"]),
        round(sums["accepted_tokens"]),
        tuple(round(kept.get(position, 0.0)) for position in range(max(kept, default=-1) + 1)),
        None,
    )
