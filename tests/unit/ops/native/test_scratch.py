"""Working memory is kept by a thread, grows, and is shared with no other thread."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor

from paceline.ops.native import scratch as scratch_module
from paceline.ops.native.scratch import scratch


def test_it_is_kept_and_grows() -> None:
    first = scratch(10)
    assert first.numel() >= 10 and first.dtype == torch.bfloat16
    assert scratch(5).data_ptr() == first.data_ptr() and scratch(10).data_ptr() == first.data_ptr()
    larger = scratch(first.numel() + 1)
    assert larger.numel() > first.numel() and scratch(10).data_ptr() == larger.data_ptr()


def test_threads_have_their_own() -> None:
    found: list[Tensor] = []
    mine = scratch(100)
    thread = threading.Thread(target=lambda: found.append(scratch(100)))
    thread.start()
    thread.join()
    assert found[0].data_ptr() != mine.data_ptr()


def test_what_is_very_large_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = scratch(10)
    monkeypatch.setattr(scratch_module, "_MOST_KEPT", kept.numel())
    assert scratch(kept.numel() + 1).data_ptr() != kept.data_ptr()
    assert scratch(10).data_ptr() == kept.data_ptr()
