"""AdamW on float32 master weights, and a learning rate that is a pure function of the step."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from paceline.models.layers import Linear


@dataclass(frozen=True)
class RateSchedule:
    """Warm-up, flat middle, cosine decay (WSD).

    Attributes:
        peak: rate of the flat part.
        num_steps: optimizer steps of the whole run.
        warmup_share, decay_share: shares of the steps at either end.
        final_share: last rate over the peak.
    """

    peak: float
    num_steps: int
    warmup_share: float
    decay_share: float
    final_share: float

    def rate(self, step: int) -> float:
        """The rate of a step, counted from 0; derived, so there is no schedule state to save."""
        warmup = round(self.num_steps * self.warmup_share)
        decay = round(self.num_steps * self.decay_share)
        if step < warmup:
            return self.peak * (step + 1) / warmup
        into_decay = step - (self.num_steps - decay)
        if into_decay < 0:
            return self.peak
        progress = (into_decay + 1) / decay
        cosine = 0.5 * (1 + math.cos(math.pi * progress))
        return self.peak * (self.final_share + (1 - self.final_share) * cosine)


def make_optimizer(drafter: nn.Module, *, weight_decay: float, betas: tuple[float, float]) -> torch.optim.AdamW:
    """AdamW over the drafter alone; projections decay, all else does not.

    Gains and biases have no scale to lose, and rows of a table (a selector's codebooks) would fade while their token
    does not come up. The frozen target must never get here: it would be given moments, and decay.
    """
    decayed: list[nn.Parameter] = []
    kept: list[nn.Parameter] = []
    for module in drafter.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad:
                (decayed if isinstance(module, Linear) and name == "weight" else kept).append(parameter)
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": kept, "weight_decay": 0.0}]
    parameters = decayed + kept
    fused = bool(parameters) and parameters[0].device.type == "cuda"
    return torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=1e-8, fused=fused)
