"""The two attentions of Kimi targets: projections, norms and gates around what `HybridAttend` keeps.

    delta    qkv = q, k, v side by side; forget = f_b f_a x; beta = b x; o_proj(norm(answer) * sigmoid(gate))
    latent   q = q_proj x, or q_b norm(q_a x); row = [norm(latent); shared key] of kv_a x; o_proj(mixed * sigmoid(gate))

There are no positions: the channels that other models turn are one more key, which all heads share, and count in the
scale of scores. Source: Kimi-Linear and Kimi-K3. B requests, T rows, D width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from paceline.checkpoint.contract import TargetContract
from paceline.checkpoint.kimi_contract import DeltaAttentionSettings, NopeLatentSettings
from paceline.models.hybrid import DeltaProjections, DeltaWeights, HybridAttend, LatentHeads
from paceline.models.layers import Block, Linear, LinearMode, RMSNorm
from paceline.models.stacked_products import StackedProducts, stack_products
from paceline.ops.delta_attention import DeltaGate
from paceline.ops.gated_rms_norm import gate_by_sigmoid, gated_rms_norm
from paceline.ops.multi_head_latent_attention import split_expansion


class Float32Block(Block):
    """A part without parts whose own parameters stay in float32, or wider, whatever dtype the model is moved to."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        def keep(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            if moved.dtype in (torch.float32, torch.float64):
                return moved
            wide = torch.float32
            return torch.empty(moved.shape, dtype=wide, device="meta") if moved.is_meta else tensor.to(moved.device)

        return super()._apply(keep, recurse)  # type: ignore[no-untyped-call]


class ShortConvolution(Float32Block):
    """The weights of a causal convolution over each channel's own rows."""

    def __init__(self, num_channels: int, num_taps: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_channels, num_taps))


class DecayGate(Float32Block):
    """How fast each channel forgets: one rate per head, one offset per channel."""

    def __init__(self, settings: DeltaAttentionSettings) -> None:
        super().__init__()
        self.A_log = nn.Parameter(torch.empty(settings.num_heads))
        self.dt_bias = nn.Parameter(torch.empty(settings.projection_size))
        self.lower_bound = settings.gate_lower_bound

    def forward(self) -> DeltaGate:
        """The gate as operations take it."""
        return DeltaGate(self.A_log, self.dt_bias.unflatten(0, (self.A_log.shape[0], -1)), self.lower_bound)


class GatedNorm(Float32Block):
    """A norm of each head with one gain for all, followed by a sigmoid gate."""

    def __init__(self, head_size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(head_size))
        self.eps = eps

    def forward(self, x_BTNH: Tensor, gate_BTNH: Tensor) -> Tensor:
        """Norm first, then the gate."""
        return gated_rms_norm(x_BTNH, gate_BTNH, self.weight, eps=self.eps)


class LowRank(Block):
    """Two products, one after the other."""

    def __init__(self, in_size: int, rank: int, out_size: int) -> None:
        super().__init__()
        self.a, self.b = Linear(in_size, rank), Linear(rank, out_size)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., in_size] to [..., out_size]."""
        y: Tensor = self.b(self.a(x))
        return y


class DeltaAttention(Block):
    """Kimi delta attention."""

    def __init__(self, contract: TargetContract, settings: DeltaAttentionSettings) -> None:
        super().__init__()
        width, size = contract.hidden_size, settings.projection_size
        self.num_heads = settings.num_heads
        self.qkv_proj = Linear(width, 3 * size)
        self.convolution = ShortConvolution(3 * size, settings.convolution_size)
        self.f_proj = LowRank(width, settings.head_size, size)
        self.b_proj = Linear(width, settings.num_heads)
        self.decay = DecayGate(settings)
        full = settings.has_full_rank_gate
        self.g_proj = Linear(width, size) if full else LowRank(width, settings.head_size, size)
        self.o_norm = GatedNorm(settings.head_size, contract.rms_norm_eps)
        self.o_proj = Linear(size, width)
        self._stacked: StackedProducts | None = None

    def forward(self, x_BTD: Tensor, attend: HybridAttend, layer: int) -> Tensor:
        """Map normed rows [B, T, D] to what is added to the stream."""
        heads = (self.num_heads, -1)
        qkv_BTC, forget_BTE, gate_BTE, beta_BTN = self._project(x_BTD)
        rows = DeltaProjections(qkv_BTC, forget_BTE.unflatten(-1, heads), beta_BTN)
        answers_BTNK = attend.delta(layer, rows, DeltaWeights(self.convolution.weight, self.decay()))
        gated: Tensor = self.o_norm(answers_BTNK, gate_BTE.unflatten(-1, heads))
        projected: Tensor = self.o_proj(gated.flatten(-2))
        return projected

    def _project(self, x_BTD: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries, keys and values side by side; logits of decay and output gate; of beta."""
        if self._stacked is None:
            return self.qkv_proj(x_BTD), self.f_proj(x_BTD), self.g_proj(x_BTD), self.b_proj(x_BTD)
        qkv, forget, gate, beta = self._stacked(x_BTD)
        return qkv, self.f_proj.b(forget), self.g_proj.b(gate) if isinstance(self.g_proj, LowRank) else gate, beta

    def set_mode(self, mode: LinearMode) -> None:
        """In the mode "fused", project with one product what is read from the rows as they are."""
        gate = self.g_proj.a if isinstance(self.g_proj, LowRank) else self.g_proj
        parts = (self.qkv_proj, self.f_proj.a, gate, self.b_proj)
        self._stacked = stack_products(parts) if mode == "fused" else None


class LatentExpansion(Linear):
    """`kv_b_proj`: each head's key and value matrices; which rows it is applied to, the caller decides."""

    def __init__(self, num_heads: int, settings: NopeLatentSettings) -> None:
        super().__init__(settings.kv_lora_rank, num_heads * (settings.qk_nope_head_size + settings.v_head_size))
        self.num_heads, self.nope_size = num_heads, settings.qk_nope_head_size
        self.scale = settings.query_size**-0.5

    def heads(self) -> LatentHeads:
        """The matrices as `HybridAttend` takes them."""
        key_NPR, value_NVR = split_expansion(self.weight, num_heads=self.num_heads, nope_size=self.nope_size)
        return LatentHeads(key_NPR, value_NVR, self.scale, self.mode)

    def set_mode(self, mode: LinearMode) -> None:
        """Switch the arithmetic; the whole matrix is never multiplied at once, so there is nothing to pack."""
        self.mode = mode


class NopeLatentAttention(Block):
    """Multi-head latent attention without positions."""

    def __init__(self, contract: TargetContract, settings: NopeLatentSettings) -> None:
        super().__init__()
        width, num_heads = contract.hidden_size, contract.num_heads
        self.num_heads = num_heads
        self.sizes = (settings.kv_lora_rank, settings.qk_rope_head_size)
        query_width, value_width = num_heads * settings.query_size, num_heads * settings.v_head_size
        self.q_proj: Linear | None = None
        self.q_a_layernorm: RMSNorm | None = None
        if settings.q_lora_rank is None:
            self.q_proj = Linear(width, query_width)
        else:
            self.q_a_proj = Linear(width, settings.q_lora_rank)
            self.q_a_layernorm = RMSNorm(settings.q_lora_rank, settings.norm_eps)
            self.q_b_proj = Linear(settings.q_lora_rank, query_width)
        self.kv_a_proj_with_mqa = Linear(width, settings.latent_size)
        self.kv_a_layernorm = RMSNorm(settings.kv_lora_rank, settings.norm_eps)
        self.kv_b_proj = LatentExpansion(num_heads, settings)
        self.g_proj = Linear(width, value_width) if settings.has_output_gate else None
        self.o_proj = Linear(value_width, width)
        self._stacked: StackedProducts | None = None

    def forward(self, x_BTD: Tensor, attend: HybridAttend, layer: int) -> Tensor:
        """Map normed rows [B, T, D] to what is added to the stream."""
        query_BTE, row_BTX, gate_BTE = self._project(x_BTD)
        q_BTE = query_BTE if self.q_a_layernorm is None else self.q_b_proj(self.q_a_layernorm(query_BTE))
        latent, shared = row_BTX.split_with_sizes(self.sizes, -1)
        rows_BTX = torch.cat((self.kv_a_layernorm(latent), shared), dim=-1)
        q_BTNQ = q_BTE.unflatten(-1, (self.num_heads, -1))
        mixed_BTF = attend.latent(layer, q_BTNQ, rows_BTX, self.kv_b_proj.heads()).flatten(-2)
        if gate_BTE is not None:
            mixed_BTF = gate_by_sigmoid(mixed_BTF, gate_BTE)
        projected: Tensor = self.o_proj(mixed_BTF)
        return projected

    @property
    def _parts(self) -> tuple[Linear, ...]:
        """Products of the rows as they are: of queries, or their low rank; of the cached row; of the output gate."""
        first = self.q_a_proj if self.q_proj is None else self.q_proj
        return (first, self.kv_a_proj_with_mqa, *(() if self.g_proj is None else (self.g_proj,)))

    def _project(self, x_BTD: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        products = [part(x_BTD) for part in self._parts] if self._stacked is None else self._stacked(x_BTD)
        return products[0], products[1], products[2] if len(products) > 2 else None

    def set_mode(self, mode: LinearMode) -> None:
        """In the mode "fused", project with one product what is read from the rows as they are."""
        self._stacked = stack_products(self._parts) if mode == "fused" else None
