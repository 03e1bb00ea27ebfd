"""Settings of a chat: defaults of their own, and values that cannot be."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from paceline.configuration.chat import ChatRun


def test_defaults() -> None:
    run = ChatRun.model_validate({"model": "m", "draft_model": "d"})
    assert (run.max_tokens, run.draft_length, run.temperature) == (1024, "adaptive", 0.0)


@pytest.mark.parametrize(
    ("values", "part"),
    [
        ({"raw": True}, "paceline generate --raw"),
        ({"n": 2}, "n"),
        ({"draft_length": "fixed"}, "no draft_model"),
        ({"min_tokens": 2000}, "min_tokens is 2000, more than max_tokens, which is 1024"),
        ({"stop": [""]}, "stop"),
        ({"logit_bias": {"042": 1.0}}, "'042' is no token id"),
    ],
)
def test_impossible_values(values: dict[str, Any], part: str) -> None:
    with pytest.raises(ValidationError, match=part):
        ChatRun.model_validate({"model": "m", **values})
