"""Keeping a block of drafts: worked cases, and what replaces the reference against it with every slot compared."""

from __future__ import annotations

import pytest
import torch
from tests.unit.ops.conftest import Version
from tests.unit.ops.slot_cases import VOCAB_SIZE, assert_same, moved, odd_slots

from paceline.ops.native import steps as native
from paceline.ops.step_rows import WaitingDrafts
from paceline.ops.store_drafts import store_drafts, store_drafts_reference, store_drafts_triton

SLOTS = [4, 0, 2]


def test_what_is_wanted_is_kept_and_counted() -> None:
    _, drafts = odd_slots(5, 4, 2)
    others = drafts.ids_SK[[1, 3, 5]].clone()
    ids = torch.tensor([[1, 2, 3], [4, -1, 6], [7, 8, 9]])
    waiting = torch.full((3, 2), 99)
    store_drafts(drafts, torch.tensor(SLOTS), ids, wanted_B=torch.tensor([2, 3, 0]), waiting_B=waiting[:, 1])
    assert drafts.ids_SK[SLOTS].tolist() == [[1, 2, -1, -1], [4, -1, 6, -1], [-1] * 4]
    assert waiting.tolist() == [[99, 2], [99, 1], [99, 0]]
    assert torch.equal(drafts.ids_SK[[1, 3, 5]], others)
    assert drafts.candidate_ids_SKC is not None and drafts.log_q_SKC is not None
    assert drafts.candidate_ids_SKC[4].tolist() == [[1, -1], [2, -1], [-1, -1], [-1, -1]]
    assert drafts.log_q_SKC[4].exp().tolist() == [[1.0, 0.0]] * 3 + [[0.0, 0.0]]


@pytest.mark.parametrize("num_drafts", [1, 3, 4])
@pytest.mark.parametrize("num_candidates", [0, 3])
@pytest.mark.parametrize("has_q", [False, True])
@pytest.mark.parametrize("has_wanted", [False, True])
@pytest.mark.parametrize("num_requests", [1, 3])
def test_every_version_agrees_with_the_reference(
    version: Version,
    num_drafts: int,
    num_candidates: int,
    has_q: bool,
    has_wanted: bool,
    num_requests: int,
) -> None:
    _, drafts = odd_slots(5, 4, num_candidates, seed=num_drafts)
    slots = torch.tensor(SLOTS[:num_requests])
    ids = torch.randint(-1, VOCAB_SIZE, (num_requests, num_drafts))
    candidates = torch.randint(-1, VOCAB_SIZE, (num_requests, num_drafts, num_candidates)) if has_q else None
    log_q = torch.rand(num_requests, num_drafts, num_candidates).log() if has_q else None
    wanted = torch.tensor([2, 9, 0])[:num_requests] if has_wanted else None
    if num_candidates == 0:
        drafts = WaitingDrafts(drafts.ids_SK, None, None)
    there = WaitingDrafts(*moved(drafts, version.device))
    arguments = moved((slots, ids, candidates, log_q, wanted), version.device)
    waiting = torch.full((num_requests, 5), 7)
    found = waiting.to(version.device, copy=True)
    store_drafts_reference(drafts, slots, ids, candidates, log_q, wanted, waiting[:, 3])
    version.of(store_drafts_triton, native.store_drafts)(there, *arguments, found[:, 3])
    assert_same((there, found), (drafts, waiting))
