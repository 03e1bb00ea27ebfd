"""Learning rate as a pure function of the step; decay on matrices alone; float32 masters."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from tests.unit.models.conftest import tiny_drafter
from torch import nn

from paceline.training.optimizer import RateSchedule, make_optimizer


def test_the_rate_warms_up_stays_and_decays() -> None:
    schedule = RateSchedule(peak=2.0, num_steps=100, warmup_share=0.1, decay_share=0.2, final_share=0.05)
    rates = [schedule.rate(step) for step in range(100)]
    assert rates[:10] == pytest.approx([2.0 * (step + 1) / 10 for step in range(10)])
    assert rates[10:80] == [2.0] * 70
    assert rates[-1] == pytest.approx(0.1)  # final_share of the peak
    assert rates[89] == pytest.approx(2.0 * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * 0.5))))
    assert all(a > b for a, b in itertools.pairwise(rates[79:]))
    assert min(rates) > 0


@pytest.mark.parametrize(("warmup", "decay"), [(0.0, 0.0), (0.5, 0.5), (1.0, 0.0), (0.0, 1.0)])
@pytest.mark.parametrize("num_steps", [1, 2, 7])
def test_extreme_shares_stay_finite_and_positive(warmup: float, decay: float, num_steps: int) -> None:
    schedule = RateSchedule(1.0, num_steps, warmup, decay, 0.1)
    assert all(0 < schedule.rate(step) <= 1.0 for step in range(num_steps))


def test_gains_and_biases_do_not_decay() -> None:
    drafter = tiny_drafter(attention_bias=True, has_tap_norm=True)
    optimizer = make_optimizer(drafter, weight_decay=0.1, betas=(0.9, 0.95))
    decaying, kept = optimizer.param_groups
    assert decaying["weight_decay"] == 0.1 and kept["weight_decay"] == 0.0
    named = {id(parameter): name for name, parameter in drafter.named_parameters()}
    assert all(named[id(p)].endswith("weight") and "norm" not in named[id(p)] for p in decaying["params"])
    assert all("norm" in named[id(p)] or named[id(p)].endswith("bias") for p in kept["params"])
    assert len(decaying["params"]) + len(kept["params"]) == len(named)


def test_frozen_parameters_are_left_out() -> None:
    drafter = tiny_drafter()
    drafter.backbone.fc.weight.requires_grad_(False)
    optimizer = make_optimizer(drafter, weight_decay=0.1, betas=(0.9, 0.95))
    assert all(p is not drafter.backbone.fc.weight for group in optimizer.param_groups for p in group["params"])


def test_a_step_at_rate_zero_changes_nothing() -> None:
    drafter = tiny_drafter()
    before = {name: p.detach().clone() for name, p in drafter.named_parameters()}
    optimizer = make_optimizer(drafter, weight_decay=0.1, betas=(0.9, 0.95))
    for parameter in drafter.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert all(torch.equal(p, before[name]) for name, p in drafter.named_parameters())


@pytest.mark.parametrize(("dtype", "moves"), [(torch.float32, True), (torch.bfloat16, False)])
def test_tiny_updates_add_up_in_float32_and_would_vanish_in_bf16(dtype: torch.dtype, moves: bool) -> None:
    """1,000 updates of 1e-4 relative size: the reason why masters are float32."""
    model = nn.Linear(4, 4, bias=False).to(dtype)
    with torch.no_grad():
        model.weight.fill_(1.0)
    optimizer = make_optimizer(model, weight_decay=0.0, betas=(0.9, 0.95))
    for group in optimizer.param_groups:
        group["lr"] = 1e-4
    for _ in range(1000):
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
    moved = float((1.0 - model.weight.detach()).abs().min())
    assert (moved > 0.09) == moves
