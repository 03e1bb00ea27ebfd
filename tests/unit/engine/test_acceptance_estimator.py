"""The worked estimator step, the dense solve it stands for, and what it learns from blocks with a known rule."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from paceline.engine.acceptance_estimator import STEPS_PER_UPDATE, AcceptanceEstimator, newton_step
from paceline.ops.draft_chances import KnownFeatures, chances, draft_features, largest_log_odds
from paceline.ops.observe_drafts import NewtonSums, newton_sums, observe_drafts

CPU = torch.device("cpu")
SLOPE, INTERCEPT = torch.tensor(0.5, dtype=torch.float64), torch.full((2,), -0.2, dtype=torch.float64)
FEATURES = torch.tensor([[1.0, 0.5], [2.0, 0.0], [-1.0, 1.0]])
JUDGED, ACCEPTED = torch.tensor([2, 2, 1]), torch.tensor([2, 0, 1])


def test_feature_and_confidence_of_the_worked_row() -> None:
    feature = largest_log_odds(torch.tensor([[[2.0, 1.0, 0.0]]]))
    assert feature.item() == pytest.approx(0.686738, abs=1e-6)
    assert chances(feature, SLOPE, INTERCEPT).item() == pytest.approx(0.535781, abs=1e-6)


def test_features_stay_in_bounds() -> None:
    rows = torch.tensor([[0.0, -math.inf, -math.inf], [-math.inf] * 3, [0.0, 0.0, -math.inf], [0.0, -90.0, -90.0]])
    assert largest_log_odds(rows.unsqueeze(0)).tolist() == [[40, -40, 0, 40]]
    heads = draft_features(rows.unsqueeze(0), torch.tensor([[0.0, 0.5, 1.0]]))
    assert heads is not None and heads.tolist() == [[-40, 0, 40]]
    assert draft_features(None, None) is None


def test_worked_newton_step() -> None:
    sums = newton_sums(FEATURES, JUDGED, ACCEPTED, SLOPE, INTERCEPT)
    expected = {
        "num_K": (3, 1),
        "A_K": (1.321810, 0.062461),
        "B_K": (0.450565, 0.124922),
        "C_K": (0.680081, 0.249844),
        "slope_gradient_K": (-1.622579, 0.243751),
        "intercept_gradient_K": (0.403771, 0.487503),
    }
    for name, values in expected.items():
        assert getattr(sums, name).tolist() == pytest.approx(values, abs=1e-6), name
    # From half a slope the raw step, -1.84, would be damped to -0.136.
    slope_change, intercept_change = newton_step(sums, SLOPE)
    assert slope_change.item() == pytest.approx(-0.136494, abs=1e-6)
    assert slope_change.item() * 54 / 4 == pytest.approx(-1.842670, abs=1e-5)
    assert (SLOPE + slope_change).item() == pytest.approx(0.363506, abs=1e-6)
    assert intercept_change.tolist() == pytest.approx((0.038668, 0.039440), abs=1e-6)


def dense_solution(sums: NewtonSums) -> Tensor:
    """The same system written out as a matrix."""
    num_positions = sums.C_K.shape[0]
    matrix = torch.zeros(num_positions + 1, num_positions + 1, dtype=torch.float64)
    matrix[0, 0] = sums.A_K.sum()
    matrix[0, 1:] = matrix[1:, 0] = sums.B_K
    matrix[1:, 1:] = torch.diag(sums.C_K)
    matrix += 1e-3 * torch.eye(num_positions + 1, dtype=torch.float64)
    gradient = torch.cat((sums.slope_gradient_K.sum().reshape(1), sums.intercept_gradient_K))
    return torch.linalg.solve(matrix, gradient)


def test_the_step_is_the_dense_solve_damped() -> None:
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(400, 5, generator=generator)
    accepted = torch.randint(0, 6, (400,), generator=generator)
    slope, intercept = torch.tensor(0.7, dtype=torch.float64), torch.linspace(-1, 1, 5, dtype=torch.float64)
    sums = newton_sums(features, torch.full((400,), 5), accepted, slope, intercept)
    sums = sums._replace(slope_gradient_K=sums.slope_gradient_K.abs())  # so that the slope rises and is kept
    total = sums.num_K.sum()
    change, _ = newton_step(sums, slope)
    assert change.item() == pytest.approx((dense_solution(sums)[0] * total / (total + 50)).item(), rel=1e-9)


def test_a_slope_that_would_turn_negative_stays() -> None:
    sums = newton_sums(FEATURES, JUDGED, ACCEPTED, SLOPE, INTERCEPT)
    change, intercept_change = newton_step(sums, torch.tensor(0.1, dtype=torch.float64))
    assert change.item() == 0
    assert torch.isfinite(intercept_change).all()
    broken = sums._replace(slope_gradient_K=torch.full((2,), math.nan, dtype=torch.float64))
    assert newton_step(broken, SLOPE)[0].item() == 0


def test_rows_that_were_not_judged_do_not_count_whatever_they_hold() -> None:
    features = FEATURES.clone()
    features[1, 1] = math.nan  # behind the first refused draft
    features[2, 1] = math.inf  # not judged
    sums = newton_sums(features, JUDGED, ACCEPTED, SLOPE, INTERCEPT)
    clean = newton_sums(FEATURES, JUDGED, ACCEPTED, SLOPE, INTERCEPT)
    assert all(torch.equal(one, other) for one, other in zip(sums, clean, strict=True))
    left_out = newton_sums(features, torch.tensor([2, 0, 0]), ACCEPTED, SLOPE, INTERCEPT)
    assert left_out.num_K.tolist() == [1, 1]


def observe(estimator: AcceptanceEstimator, features: Tensor, judged: Tensor, accepted: Tensor) -> None:
    """Take in blocks of slots 0, 1, ..."""
    num_requests, num_drafts = features.shape
    known = KnownFeatures(
        torch.zeros(num_requests + 1, estimator.intercept_K.shape[0]),
        torch.ones(num_requests + 1, dtype=torch.bool),
    )
    known.features_SK[:-1, :num_drafts] = features
    ids = torch.where(torch.arange(num_drafts) < judged.unsqueeze(1), 7, -1)
    slots = torch.arange(num_requests)
    observe_drafts(estimator.sums_6K, known, estimator.coefficients, slots, ids, accepted)


def accepted_under(features: Tensor, slope: float, intercept: float, generator: torch.Generator) -> Tensor:
    keeps = torch.rand(features.shape, generator=generator) < torch.sigmoid(slope * features + intercept)
    return keeps.long().cumprod(dim=1).sum(dim=1)


@pytest.mark.parametrize("has_head", [False, True])
def test_it_learns_the_rule_behind_the_blocks(has_head: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    estimator = AcceptanceEstimator(3, has_confidence_head=has_head, device=CPU)
    for _ in range(12 * STEPS_PER_UPDATE):
        features = 2 * torch.randn(8, 3, generator=generator)
        observe(estimator, features, torch.full((8,), 3), accepted_under(features, 1.5, 0.5, generator))
        estimator.advance()
    assert estimator.slope.item() == pytest.approx(1.5, abs=0.15)
    assert estimator.intercept_K.tolist() == pytest.approx([0.5] * 3, abs=0.35)  # of the last 100 steps alone


def test_features_of_the_wrong_row_teach_something_else() -> None:
    """The planted fault: rows shifted by one carry no signal, and the slope stays far from the rule's."""
    generator = torch.Generator().manual_seed(0)
    estimator = AcceptanceEstimator(3, has_confidence_head=False, device=CPU)
    for _ in range(6 * STEPS_PER_UPDATE):
        features = 2 * torch.randn(8, 3, generator=generator)
        accepted = accepted_under(features, 1.5, 0.5, generator)
        observe(estimator, features.roll(1, dims=1), torch.full((8,), 3), accepted)
        estimator.advance()
    assert estimator.slope.item() < 0.8


def test_coefficients_move_every_hundred_steps_and_shorter_blocks_count_for_their_positions() -> None:
    estimator = AcceptanceEstimator(4, has_confidence_head=False, device=CPU)
    for step in range(STEPS_PER_UPDATE):
        assert estimator.intercept_K.tolist() == [-0.2] * 4, step
        observe(estimator, FEATURES, JUDGED, ACCEPTED)
        estimator.advance()
    assert -0.2 not in estimator.intercept_K[:2].tolist()
    assert estimator.intercept_K[2:].tolist() == [-0.2, -0.2]
    assert estimator.confidence(FEATURES).shape == (3, 2)
