"""Records and passes made by hand."""

from __future__ import annotations

from typing import Any

from paceline.benching.records import AnswerRecord, Load, Pass

ONE = Load(1)


def answer(index: int = 0, *, total_s: float = 1.0, num_tokens: int | None = 10, **changes: Any) -> AnswerRecord:
    """A whole answer of prompt `p{index}`."""
    values: dict[str, Any] = {
        "index": index,
        "prompt_id": f"p{index}",
        "sent_s": 0.0,
        "total_s": total_s,
        "num_tokens": num_tokens,
        "finish_reason": "length",
        "output_sha256": f"text {index}",
    }
    return AnswerRecord(**(values | changes))


def failed(index: int = 0, error: str = "status 500") -> AnswerRecord:
    return AnswerRecord(index, f"p{index}", 0.0, 0.5, error=error)


def passed(setup: str, *records: AnswerRecord, total_s: float = 1.0, round_index: int = 0, **changes: Any) -> Pass:
    return Pass(setup, changes.pop("load", ONE), round_index, list(records), total_s, is_whole=True, **changes)
