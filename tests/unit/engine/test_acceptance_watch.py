"""Low acceptance is said once, next to none once more and louder, and good drafters are left in peace."""

from __future__ import annotations

import logging
import random

import pytest

from paceline.engine.acceptance_watch import WINDOW, AcceptanceWatch


def said(caplog: pytest.LogCaptureFixture, blocks: list[tuple[int, int]]) -> list[str]:
    watch = AcceptanceWatch()
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="paceline"):
        for num_judged, num_accepted in blocks:
            watch.observe(num_judged, num_accepted)
    return [record.levelname for record in caplog.records]


def test_what_is_said(caplog: pytest.LogCaptureFixture) -> None:
    low = [(7, int(index % 10 == 0)) for index in range(WINDOW)]  # 1.1
    none, good = [(7, 0)] * WINDOW, [(7, 2)] * WINDOW
    assert said(caplog, 3 * low) == ["WARNING"]
    assert said(caplog, 3 * none) == ["ERROR"]
    assert said(caplog, low + none + low + none) == ["WARNING", "ERROR"]
    assert said(caplog, none + low) == ["ERROR"]
    assert said(caplog, 5 * good) == []
    assert said(caplog, none[:-1]) == []
    assert said(caplog, good + low) == ["WARNING"]


def test_steps_without_drafts_do_not_count(caplog: pytest.LogCaptureFixture) -> None:
    blocks = [(7, 1)] * 100 + [(0, 0)] * 10 * WINDOW + [(7, 1)] * 100
    random.Random(0).shuffle(blocks)
    assert said(caplog, blocks) == []
