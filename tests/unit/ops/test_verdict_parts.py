"""The common part of the launches that reach a verdict: what stands where, and what takes the place of what is missing.

What the kernels themselves share is tested with them (`test_finalise_block.py`).
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paceline.ops.acceptance import GivenCandidates
from paceline.ops.verdict_parts import verdict_launch

B, K, C, V = 3, 2, 5, 11
DRAFTS, LOGITS = torch.zeros(B, K, dtype=torch.long), torch.zeros(B, K + 1, V)
IDS, LOG_Q = torch.zeros(B, K, C, dtype=torch.long), torch.zeros(B, K, C)
SETTINGS = (torch.zeros(B), *(torch.zeros(B, dtype=torch.long) for _ in range(3)))
STATISTIC = torch.zeros(B, K + 1, 1)


@pytest.mark.parametrize("log_q", [LOG_Q, None], ids=["q", "no q"])
def test_operands_stand_in_the_order_of_the_kernels_parameters(log_q: Tensor | None) -> None:
    launch = verdict_launch(DRAFTS, LOGITS, GivenCandidates(IDS, log_q), *SETTINGS, STATISTIC, all_greedy=True)
    expected = (DRAFTS, LOGITS, IDS, STATISTIC if log_q is None else log_q, *SETTINGS, launch.verdict)
    assert all(found is wanted for found, wanted in zip(launch.operands, expected, strict=True))
    assert launch.verdict.shape == (4, B) and launch.verdict.dtype == torch.int64
    assert launch.constants["HAS_LOG_Q"] is (log_q is not None) and launch.constants["ALL_GREEDY"]
    assert (launch.constants["NUM_ROWS"], launch.constants["CANDIDATES"]) == (K + 1, 8)


def test_rows_without_candidates_have_one_lane_all_the_same() -> None:
    nobody = GivenCandidates(IDS[..., :0], None)
    launch = verdict_launch(DRAFTS, LOGITS, nobody, *SETTINGS, STATISTIC, all_greedy=False)
    assert launch.constants["CANDIDATES"] == 1


def test_what_is_not_contiguous_is_copied() -> None:
    drafts, logits = torch.arange(B * K).view(K, B).T, torch.randn(K + 1, B, V).transpose(0, 1)
    launch = verdict_launch(drafts, logits, GivenCandidates(IDS, None), *SETTINGS, STATISTIC, all_greedy=False)
    for found, given in zip(launch.operands[:2], (drafts, logits), strict=True):
        assert found.is_contiguous() and torch.equal(found, given)
