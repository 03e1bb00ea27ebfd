"""What judged blocks tell: the kernel against the reference, whose sums `test_acceptance_estimator.py` looks into."""

from __future__ import annotations

import math

import pytest
import torch
from tests.unit.ops.test_draft_chances import COEFFICIENTS, NUM_SLOTS, K, known, on

from paceline.ops.draft_chances import Coefficients, KnownFeatures, count_drafts
from paceline.ops.observe_drafts import NUM_SUMS, observe_drafts_reference, observe_drafts_triton


@pytest.mark.parametrize("num_drafts", [1, 4, K])
@pytest.mark.parametrize("num_requests", [1, 4, 150])
@pytest.mark.parametrize("has_teaches", [False, True])
def test_the_kernel_learns_what_the_reference_does(
    kernel_device: torch.device, num_drafts: int, num_requests: int, has_teaches: bool
) -> None:
    """150 requests take two turns of the loop."""
    generator = torch.Generator().manual_seed(num_requests)
    slots = torch.randint(0, NUM_SLOTS + 1, (num_requests,), generator=generator)
    ids = torch.randint(-1, 4, (num_requests, num_drafts), generator=generator)
    accepted = torch.minimum(torch.randint(0, num_drafts + 1, (num_requests,), generator=generator), count_drafts(ids))
    teaches = torch.rand(num_requests, generator=generator) < 0.6 if has_teaches else None
    here = known(1)
    here.is_known_S[slots[0]] = True
    here.features_SK[:, -1] = math.nan if num_drafts < K else 0.3  # never drafted: may hold anything
    sums = torch.rand(NUM_SUMS, K, dtype=torch.float64)
    there = KnownFeatures(*on(kernel_device, here))  # type: ignore[arg-type]
    coefficients = Coefficients(*on(kernel_device, COEFFICIENTS))  # type: ignore[arg-type]
    found = sums.to(kernel_device, copy=True)
    observe_drafts_triton(found, there, coefficients, *on(kernel_device, (slots, ids, accepted, teaches)))  # type: ignore[arg-type]
    expected = sums.clone()
    observe_drafts_reference(expected, here, COEFFICIENTS, slots, ids, accepted, teaches)
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(found.cpu()[:, num_drafts:], sums[:, num_drafts:])
