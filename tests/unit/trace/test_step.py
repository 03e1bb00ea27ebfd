from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from paceline.errors import DataError
from paceline.trace.step import RequestTrace, StepRecord


def step(**changes: Any) -> StepRecord:
    values: dict[str, Any] = {
        "request_id": "r0",
        "step_index": 0,
        "anchor_position": 10,
        "anchor_id": 3,
        "proposed_ids": (4, 5, 6),
        "num_verified_accepted": 2,
        "num_accepted": 2,
        "emitted_ids": (4, 5, 9),
        "bonus_id": 9,
        "step_ms": 1.5,
    }
    return StepRecord(**{**values, **changes})


def test_a_refusal_names_the_refused_draft() -> None:
    assert step().refused_id == 6
    assert step().num_draft_tokens == 3
    full = step(num_verified_accepted=3, num_accepted=3, emitted_ids=(4, 5, 6, 9))
    assert full.refused_id is None


def test_a_cut_step_has_no_bonus_token() -> None:
    cut = step(num_verified_accepted=3, num_accepted=1, emitted_ids=(4,), bonus_id=None)
    assert cut.refused_id is None


def test_plain_decoding_is_a_step_without_drafts() -> None:
    plain = step(proposed_ids=(), num_verified_accepted=0, num_accepted=0, emitted_ids=(9,))
    assert plain.num_draft_tokens == 0 and plain.refused_id is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_accepted": 3}, "accepted 3, verified 2 and proposed 3"),
        ({"num_accepted": -1}, "accepted -1"),
        ({"num_verified_accepted": 4}, "verified 4 and proposed 3"),
        ({"bonus_id": None}, r"emitted \[4, 5, 9\], but .* are \[4, 5\]"),
        ({"emitted_ids": (4, 6, 9)}, r"emitted \[4, 6, 9\]"),
    ],
)
def test_counts_that_contradict_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        step(**changes)


def test_a_request_strings_its_tokens_together() -> None:
    trace = RequestTrace("r0", 7, first_token_id=3, records=[step(), step(step_index=1, anchor_id=9)])
    assert trace.token_ids == (3, 4, 5, 9, 4, 5, 9)
    assert trace.num_output_tokens == 7
    assert RequestTrace("r1", 7).token_ids == ()


@pytest.mark.parametrize("package", ["trace.step", "trace.acceptance", "trace.writer", "trace.reader"])
def test_traces_are_read_without_torch(package: str) -> None:
    script = f"import sys, paceline.{package}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True, env={"PYTHONPATH": ":".join(filter(None, sys.path))})
