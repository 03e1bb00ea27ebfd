"""Features of texts that begin alike: each has a row for every token, and the rows that it has when captured alone.

A capture runs whole texts through the target and keeps no prefix, so there is nothing that a hit could leave out.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.tiny import tiny_prompts
from tests.unit.capture.feature_runs import make_capture, small_target, write_all
from torch import Tensor

from paceline.capture.feature_file import StoredConversations
from paceline.capture.feature_record import Texts
from paceline.capture.features import finish_capture
from paceline.capture.shards import ShardFolder

NUM_SHARED = 256


def captured(folder: Path, rows: list[list[int]]) -> list[Tensor]:
    """Taps and last states of texts, from one capture."""
    starts = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int64)
    tokens = np.concatenate([np.array(row, np.int32) for row in rows])
    supervised = np.ones(len(tokens), bool)
    supervised[starts[:-1]] = False
    capture = make_capture(small_target(max_position_embeddings=512), Texts(tokens, supervised, starts))
    finish_capture(write_all(folder, capture))
    stored = StoredConversations(ShardFolder.read(folder))
    assert len(stored) == len(rows)
    found = []
    for row in rows:
        taps, hidden = stored.find(np.array(row, np.int32))
        assert hidden is not None
        found.append(torch.cat((taps.float(), hidden.float()), dim=-1))
    return found


def compare(folder: Path, rows: list[list[int]]) -> None:
    together = captured(folder / "together", rows)
    for index, (row, states) in enumerate(zip(rows, together, strict=True)):
        assert len(states) == len(row), "rows and tokens"
        (alone,) = captured(folder / f"alone{index}", [row])
        torch.testing.assert_close(states, alone, rtol=0, atol=1e-5)


def texts() -> list[list[int]]:
    prefix, *tails = tiny_prompts([NUM_SHARED, 7, 40])
    return [[*prefix, *tail] for tail in tails]


def test_two_texts_that_share_their_first_256_tokens(tmp_path: Path) -> None:
    rows = texts()
    assert rows[0][:NUM_SHARED] == rows[1][:NUM_SHARED]
    compare(tmp_path, rows)


def test_rows_that_a_hit_leaves_out_would_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: of a text that begins like an earlier one, only what is new passes the capture."""
    find, seen = StoredConversations.find, []

    def hit(self: StoredConversations, token_ids: np.ndarray) -> tuple[Tensor, Tensor | None]:
        taps, hidden = find(self, token_ids)
        is_hit = len(self) > 1 and any(np.array_equal(token_ids[:NUM_SHARED], earlier[:NUM_SHARED]) for earlier in seen)
        seen.append(token_ids)
        first = NUM_SHARED if is_hit else 0
        return taps[first:], hidden[first:] if hidden is not None else None

    monkeypatch.setattr(StoredConversations, "find", hit)
    with pytest.raises(AssertionError, match="rows and tokens"):
        compare(tmp_path, texts())
