"""Huge pages: contents stay, and nothing is asked for where there is nothing to gain or nobody to ask."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from paceline.ops import huge_pages
from paceline.ops.huge_pages import lay_on_huge_pages

HUGE = 2**21


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, int, int]]]:
    """A kernel that does as it is asked and remembers it."""
    asked: list[tuple[int, int, int]] = []

    def madvise(*arguments: int) -> int:
        asked.append((arguments[0], arguments[1], arguments[2]))
        return 0

    monkeypatch.setattr(huge_pages, "_madvise", lambda: madvise)
    yield asked


def test_what_memory_holds_stays() -> None:
    weight = torch.randn(1024, 2048)
    copy = weight.clone()
    lay_on_huge_pages(weight.data_ptr(), weight.nbytes)
    assert torch.equal(weight, copy)


def test_whole_pages_are_asked_for(calls: list[tuple[int, int, int]]) -> None:
    assert lay_on_huge_pages(5 * HUGE + 4096, 3 * HUGE)
    assert [(first, length) for first, length, _ in calls] == [(5 * HUGE, 4 * HUGE)] * 2
    assert [advice for _, _, advice in calls] == [14, 25]
    calls.clear()
    assert lay_on_huge_pages(HUGE, HUGE)
    assert calls[0][:2] == (HUGE, HUGE)


def test_little_is_not_worth_it(calls: list[tuple[int, int, int]]) -> None:
    assert not lay_on_huge_pages(HUGE, 4096)
    assert calls == []


def test_systems_without_the_call_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "_madvise", lambda: None)
    assert not lay_on_huge_pages(HUGE, HUGE)
    monkeypatch.setattr(huge_pages, "_madvise", lambda: lambda *_: -1)
    assert not lay_on_huge_pages(HUGE, HUGE)
