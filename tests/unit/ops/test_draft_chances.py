"""Chances of drafts: what is held back, and the kernel against its reference."""

from __future__ import annotations

import math

import pytest
import torch

from paceline.ops.draft_chances import (
    Coefficients,
    KnownFeatures,
    count_drafts,
    draft_features,
    hold_back_drafts,
    hold_back_drafts_reference,
    hold_back_drafts_triton,
)

NUM_SLOTS, K = 6, 5
COEFFICIENTS = Coefficients(torch.tensor(0.7, dtype=torch.float64), torch.linspace(-0.5, 0.8, K, dtype=torch.float64))


def known(seed: int = 0) -> KnownFeatures:
    generator = torch.Generator().manual_seed(seed)
    is_known = torch.rand(NUM_SLOTS + 1, generator=generator) < 0.7
    is_known[-1] = False
    return KnownFeatures(2 * torch.randn(NUM_SLOTS + 1, K, generator=generator), is_known)


def on(device: torch.device, parts: tuple[torch.Tensor | None, ...]) -> list[torch.Tensor | None]:
    return [None if part is None else part.to(device, copy=True) for part in parts]


def odd_log_q(num_requests: int, num_drafts: int, num_candidates: int) -> torch.Tensor:
    """Rows that are certain, hopeless, tied, or hold what is no number, among others."""
    log_q = (3 * torch.randn(num_requests, num_drafts, num_candidates)).log_softmax(-1)
    log_q[0, 0] = -math.inf
    log_q[-1, -1, 1:] = -math.inf
    if num_drafts > 2:
        log_q[0, 1], log_q[0, 2] = -math.log(num_candidates), math.nan
    return log_q


def test_drafts_before_the_first_missing_one_are_counted() -> None:
    assert count_drafts(torch.tensor([[4, -1, 5], [-1, -1, -1], [1, 2, 3]])).tolist() == [1, 0, 3]


def test_what_is_held_back_does_not_depend_on_which_ids_were_drawn() -> None:
    log_q = torch.randn(2, 4, 5).log_softmax(-1)
    thresholds = torch.full((K,), 0.3, dtype=torch.float64)
    kept = [
        hold_back_drafts(
            known(),
            COEFFICIENTS,
            torch.tensor([1, 2]),
            torch.full((2, 4), token),
            log_q_BKC=log_q,
            thresholds_K=thresholds,
        )
        for token in range(5)
    ]
    assert all(torch.equal(each == -1, kept[0] == -1) for each in kept)
    assert 0 < (kept[0] == -1).sum() < 8


@pytest.mark.parametrize("source", ["q", "head", "both", "nothing"])
@pytest.mark.parametrize("num_drafts", [1, 3, K])
@pytest.mark.parametrize("has_adaptive", [False, True])
@pytest.mark.parametrize("has_thresholds", [False, True])
def test_the_kernel_holds_back_what_the_reference_does(
    kernel_device: torch.device, source: str, num_drafts: int, has_adaptive: bool, has_thresholds: bool
) -> None:
    torch.manual_seed(num_drafts)
    slots = torch.tensor([4, 0, NUM_SLOTS, 2, NUM_SLOTS])  # the trash slot stands there twice
    ids = torch.randint(0, 99, (5, num_drafts))
    log_q = odd_log_q(5, num_drafts, 6) if source in ("q", "both") else None
    head = torch.rand(5, num_drafts) if source in ("head", "both") else None
    if head is not None:
        head[0, 0], head[1, -1], head[3, 0] = 0.0, 1.0, math.nan
    thresholds = torch.linspace(0.5, 0.1, K, dtype=torch.float64) if has_thresholds else None
    adaptive = torch.tensor([True, False, True, True, True]) if has_adaptive else None
    there = KnownFeatures(*on(kernel_device, known()))  # type: ignore[arg-type]
    coefficients = Coefficients(*on(kernel_device, COEFFICIENTS))  # type: ignore[arg-type]
    arguments = on(kernel_device, (slots, ids, log_q, head, thresholds, adaptive))
    here = known()
    expected = hold_back_drafts_reference(here, COEFFICIENTS, slots, ids, log_q, head, thresholds, adaptive)
    found = hold_back_drafts_triton(there, coefficients, *arguments)  # type: ignore[arg-type]
    assert torch.equal(found.cpu(), expected)
    if has_thresholds and source != "nothing":
        assert (expected == -1).any()
    assert torch.equal(there.is_known_S.cpu(), here.is_known_S)
    torch.testing.assert_close(there.features_SK[:-1].cpu(), here.features_SK[:-1], rtol=2e-6, atol=2e-6)


def test_the_wrong_slot_or_order_would_be_seen(kernel_device: torch.device) -> None:
    """Planted: features of another row, and survival that is not a product from the front."""
    log_q = odd_log_q(1, K, 6)
    log_q[:, :] = torch.tensor([0.9, 0.02, 0.02, 0.02, 0.02, 0.02]).log()
    log_q[0, 1] = torch.full((6,), 1 / 6).log()
    thresholds = torch.full((K,), 0.35, dtype=torch.float64)
    ids = torch.arange(K).view(1, K)
    kept = hold_back_drafts_triton(
        KnownFeatures(*on(kernel_device, known())),  # type: ignore[arg-type]
        Coefficients(*on(kernel_device, COEFFICIENTS)),  # type: ignore[arg-type]
        *on(kernel_device, (torch.tensor([3]), ids, log_q, None, thresholds, None)),  # type: ignore[arg-type]
    )
    assert kept.tolist() == [[0, -1, -1, -1, -1]], "sure rows behind an unsure one do not come back"
    features = draft_features(log_q, None)
    assert features is not None and features[0, 4] > features[0, 1]
