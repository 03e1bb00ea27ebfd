"""The feed-forward half of Kimi layers: a gated MLP, or a mixture of experts with a shared path.

    out = up_proj(norm(sum_j w_j * expert_j(down_proj x))) + shared(x)

The router reads the full width in float32; its correction bias takes part in the choice and not in the weights. The
norm follows the weighted sum, so that sum must be complete before it.

Source: Kimi-Linear and Kimi-K3. B requests, T rows, D width, X width of an expert's input.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from paceline.checkpoint.contract import TargetContract
from paceline.checkpoint.kimi_contract import ExpertSettings, KimiSettings
from paceline.models.layers import Block, Linear, LinearMode, RMSNorm
from paceline.models.stacked_products import StackedProducts, stack_products
from paceline.models.targets.kimi_attention import Float32Block
from paceline.ops.gated_activation import Activation, gated_activation
from paceline.ops.mixture_of_experts import (
    ExpertWeights,
    Routing,
    RoutingRule,
    mix_experts,
    pack_experts,
    route,
    router_logits,
)


def activation_of(kimi: KimiSettings) -> Activation:
    """The function inside MLPs and experts."""
    return Activation(kimi.activation, kimi.situ_beta, kimi.situ_linear_beta)


class KimiMLP(Block):
    """down(act(gate x) * up x) with fused gate and up projections."""

    def __init__(self, hidden_size: int, intermediate_size: int, activation: Activation) -> None:
        super().__init__()
        self.intermediate_size, self.activation = intermediate_size, activation
        self.gate_up_proj = Linear(hidden_size, 2 * intermediate_size)
        self.down_proj = Linear(intermediate_size, hidden_size)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Map [B, T, D] to [B, T, D]."""
        return self.finish(self.gate_up_proj(x_BTD))

    def finish(self, gate_up_BTZ: Tensor) -> Tensor:
        """What follows the first product."""
        gate, up = gate_up_BTZ.split_with_sizes((self.intermediate_size, self.intermediate_size), -1)
        y: Tensor = self.down_proj(gated_activation(gate, up, self.activation))
        return y


class Router(Float32Block):
    """Which experts serve a row, and with what weights.

    All in float32: a logit in 16 bits turns close choices among many experts. The bias is added to scores for the
    choice alone, and set by balancing, not by gradients.
    """

    def __init__(self, hidden_size: int, settings: ExpertSettings) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(settings.num_experts, hidden_size))
        self.correction_bias = nn.Parameter(torch.zeros(settings.num_experts), requires_grad=False)
        self.rule = RoutingRule(
            settings.num_experts_per_token,
            scores=settings.scores,
            num_groups=settings.num_groups,
            num_kept_groups=settings.num_groups_kept,
            is_renormalised=settings.renormalises,
            scaling_factor=settings.scaling_factor,
        )
        self.mode: LinearMode = "plain"

    def forward(self, x_TD: Tensor) -> Routing:
        """Choose experts for rows, [T, D]."""
        mode: LinearMode = "row_invariant" if self.mode == "row_invariant" else "plain"
        return route(router_logits(x_TD, self.weight, mode=mode), self.correction_bias, self.rule)

    def set_mode(self, mode: LinearMode) -> None:
        """Switch the arithmetic."""
        self.mode = mode


class Experts(Block):
    """All experts' matrices, end to end: gate rows, then up rows of each in one parameter, down rows in another."""

    def __init__(self, width: int, settings: ExpertSettings, activation: Activation) -> None:
        super().__init__()
        self.num_experts, self.activation = settings.num_experts, activation
        num_rows = settings.num_experts * 2 * settings.intermediate_size
        self.gate_up = nn.Parameter(torch.empty(num_rows, width))
        self.down = nn.Parameter(torch.empty(settings.num_experts * width, settings.intermediate_size))
        self.mode: LinearMode = "plain"
        self._prepared: ExpertWeights | None = None

    def forward(self, x_TX: Tensor, routing: Routing) -> Tensor:
        """The weighted sum of each row's experts, [T, X]."""
        weights = self._prepared if self._prepared is not None else self._weights()
        return mix_experts(x_TX, routing, weights, self.activation, mode=self.mode)

    def set_mode(self, mode: LinearMode) -> None:
        """Switch the arithmetic; outside the mode "plain", weights that change later go unseen."""
        self.mode = mode
        self._prepared = None if mode == "plain" else pack_experts(self._weights())

    def _weights(self) -> ExpertWeights:
        shape = (self.num_experts, -1)
        return ExpertWeights(self.gate_up.unflatten(0, shape), self.down.unflatten(0, shape))


class MixtureOfExperts(Block):
    """Routed experts, at the model's width or in a latent space, and shared ones."""

    def __init__(self, contract: TargetContract, kimi: KimiSettings, settings: ExpertSettings) -> None:
        super().__init__()
        width, activation = contract.hidden_size, activation_of(kimi)
        latent = settings.latent_size
        self.gate = Router(width, settings)
        self.experts = Experts(latent or width, settings, activation)
        self.routed_expert_down_proj = Linear(width, latent) if latent else None
        self.routed_expert_norm = (
            RMSNorm(latent, contract.rms_norm_eps) if latent and settings.has_latent_norm else None
        )
        self.routed_expert_up_proj = Linear(latent, width) if latent else None
        shared = settings.num_shared_experts * settings.intermediate_size
        self.shared_experts = KimiMLP(width, shared, activation) if shared else None
        self._stacked: StackedProducts | None = None

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Map [B, T, D] to [B, T, D]."""
        rows_TD, shared_TD = x_BTD.flatten(0, -2), None
        if self._stacked is not None and self.shared_experts is not None:
            inner_TX, gate_up_TZ = self._stacked(rows_TD)
            shared_TD = self.shared_experts.finish(gate_up_TZ)
        else:
            inner_TX = rows_TD if self.routed_expert_down_proj is None else self.routed_expert_down_proj(rows_TD)
            if self.shared_experts is not None:
                shared_TD = self.shared_experts(rows_TD)
        y_TX = self.experts(inner_TX, self.gate(rows_TD))
        if self.routed_expert_norm is not None:
            y_TX = self.routed_expert_norm(y_TX)
        if self.routed_expert_up_proj is not None:
            y_TX = self.routed_expert_up_proj(y_TX)
        y_TD: Tensor = y_TX if shared_TD is None else y_TX + shared_TD
        return y_TD.view_as(x_BTD)

    def set_mode(self, mode: LinearMode) -> None:
        """In the mode "fused", one product leads into the latent space and into the shared experts."""
        self._stacked = None
        if mode == "fused" and self.routed_expert_down_proj is not None and self.shared_experts is not None:
            self._stacked = stack_products((self.routed_expert_down_proj, self.shared_experts.gate_up_proj))
