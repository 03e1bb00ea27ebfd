"""A decoder layer of Kimi targets over one of two residual streams: a running sum, or attention residuals.

With attention residuals, decoder layers form blocks of `residual_block_size`. The prefix is the sum of the current
block, the bank holds what earlier blocks summed to (its first row: the embedding), and each sub-layer reads a learned
mixture of all of them (`ops/attention_residual.py`). The first layer of a block writes the prefix into the bank; after
its attention the prefix starts anew from the attention's output. A layer's MLP output stays pending as `delta` until
the next reader folds it in, which costs no pass of its own.

Source: Kimi-K3. B requests, T rows, D width, J bank rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from paceline.checkpoint.contract import TargetContract
from paceline.models.hybrid import HybridAttend
from paceline.models.layers import Block, LinearMode, RMSNorm
from paceline.models.targets.kimi_attention import DeltaAttention, NopeLatentAttention
from paceline.models.targets.kimi_experts import KimiMLP, MixtureOfExperts, activation_of
from paceline.ops.attention_residual import OutputNorm, attention_residual, score_weights


@dataclass(frozen=True)
class ResidualStream:
    """The state between two layers, of one pass: nothing of it outlives the pass.

    Attributes:
        prefix_BTD: the stream, or with attention residuals the sum of the current block.
        delta_BTD: what is to be added to the prefix before anybody reads it.
        bank_BTJD: closed blocks; rows past `num_closed_blocks` were never written. None with an ordinary residual.
    """

    prefix_BTD: Tensor
    delta_BTD: Tensor | None = None
    bank_BTJD: Tensor | None = None


def num_closed_blocks(layer: int, block_size: int) -> int:
    """Bank rows that are written before a layer runs."""
    return -(-layer // block_size)


class MixtureScores(Block):
    """The two vectors that score the sources of a mixture: the gain of their norm and a projection to one number."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.norm = nn.Parameter(torch.empty(hidden_size))
        self.proj = nn.Parameter(torch.empty(1, hidden_size))
        self._product: Tensor | None = None

    def forward(self) -> Tensor:
        """Their product in float32, [D]."""
        return score_weights(self.norm, self.proj) if self._product is None else self._product

    def set_mode(self, mode: LinearMode) -> None:
        """Keep the product; outside the mode "plain", vectors that change later go unseen."""
        self._product = None if mode == "plain" else score_weights(self.norm.detach(), self.proj.detach())


class KimiLayer(nn.Module):
    """Delta or latent attention, then an MLP or a mixture of experts, in either stream.

    Args:
        contract: of the target.
        layer: 0-based number, which decides the kinds.
    """

    def __init__(self, contract: TargetContract, layer: int) -> None:
        super().__init__()
        kimi = contract.kimi
        assert kimi is not None, "the table chooses this class by architecture"
        width, eps = contract.hidden_size, contract.rms_norm_eps
        self.layer, self.block_size, self.eps = layer, kimi.residual_block_size, eps
        self.input_layernorm = RMSNorm(width, eps)
        self.self_attn: DeltaAttention | NopeLatentAttention
        if kimi.delta is not None and kimi.has_delta(layer):
            self.self_attn = DeltaAttention(contract, kimi.delta)
        else:
            self.self_attn = NopeLatentAttention(contract, kimi.latent)
        self.post_attention_layernorm = RMSNorm(width, eps)
        self.mlp: KimiMLP | MixtureOfExperts
        if kimi.experts is not None and kimi.experts.has_experts(layer):
            self.mlp = MixtureOfExperts(contract, kimi, kimi.experts)
        else:
            self.mlp = KimiMLP(width, contract.intermediate_size, activation_of(kimi))
        if self.block_size is not None:
            self.self_attention_res = MixtureScores(width)
            self.mlp_res = MixtureScores(width)

    def forward(self, stream: ResidualStream, attend: HybridAttend) -> ResidualStream:
        """Return the stream after this layer; of the one handed in, nothing changes but the bank's new row."""
        if self.block_size is None:
            x_BTD = stream.prefix_BTD
            x_BTD = x_BTD + self.self_attn(self.input_layernorm(x_BTD), attend, self.layer)
            return ResidualStream(x_BTD + self.mlp(self.post_attention_layernorm(x_BTD)))
        num_closed, opens_block = num_closed_blocks(self.layer, self.block_size), self.layer % self.block_size == 0
        prefix_BTD, x_BTD = self._mix(stream, self.self_attention_res, self.input_layernorm, num_closed, opens_block)
        attended_BTD: Tensor = self.self_attn(x_BTD, attend, self.layer)
        if opens_block:
            inner = ResidualStream(attended_BTD, None, stream.bank_BTJD)
        else:
            inner = ResidualStream(prefix_BTD, attended_BTD, stream.bank_BTJD)
        num_closed += opens_block
        prefix_BTD, x_BTD = self._mix(inner, self.mlp_res, self.post_attention_layernorm, num_closed, False)
        return ResidualStream(prefix_BTD, self.mlp(x_BTD), stream.bank_BTJD)

    def _mix(
        self, stream: ResidualStream, scores: MixtureScores, norm: RMSNorm, num_closed: int, writes: bool
    ) -> tuple[Tensor, Tensor]:
        """The folded prefix, and the normed mixture that a sub-layer reads."""
        assert stream.bank_BTJD is not None, "attention residuals have a bank"
        return attention_residual(
            stream.prefix_BTD,
            stream.bank_BTJD,
            num_closed,
            scores(),
            eps=self.eps,
            delta_TD=stream.delta_BTD,
            write_row=num_closed if writes else None,
            norm=OutputNorm(norm.weight, norm.eps),
        )
