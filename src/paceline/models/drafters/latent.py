"""Multi-head latent attention of K3 drafters, in absorbed form: one cached row per position serves all heads.

    cached row   [RMSNorm(kv); RoPE(kpe)]      with [kv; kpe] = kv_a x
    query        [q_nope W_uk; RoPE(q_rope)]   with [q_nope; q_rope] = q_b RMSNorm(q_a x), per head
    output       o_proj [W_uv (softmax(scale q . rows) rows)[first kv_lora channels]], per head

W_uk and W_uv are each head's rows of `kv_b_proj`. Scores equal those of the explicit form, in which every head has keys
and values of its own, since q_nope . (W_uk c) = (q_nope W_uk) . c. Their scale is that of the explicit heads:
(nope + rope)^-0.5, times the square of YaRN's magnitude where the config has `mscale_all_dim`.

Source: public K3 DSpark checkpoints. B requests, T rows, D width, N heads, C latent channels (kv_lora), L = C + R
channels of a cached row, R of them turned by position.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from paceline.checkpoint.contract import DrafterContract, LatentAttentionSettings, RopeSettings
from paceline.models.layers import Attend, Block, GatedMLP, Linear, LinearMode, RMSNorm, RotaryRows
from paceline.ops.linear import linear_row_invariant
from paceline.ops.rotary import turn_heads


def latent_layer(contract: DrafterContract, layer: int) -> nn.Module:
    """The decoder layer of K3 drafters; `layer` makes no difference to it."""
    assert contract.latent is not None, "the caller chooses by this field"
    return LatentDecoderLayer(contract, contract.latent)


def attention_scale(latent: LatentAttentionSettings, rope: RopeSettings) -> float:
    """The factor on scores: 1 / sqrt(width of an explicit head), times m^2 under YaRN with `mscale_all_dim`."""
    magnitude = 1.0
    if rope.kind == "yarn" and rope.mscale_all_dim and rope.factor > 1:
        magnitude = 0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0
    return magnitude * magnitude / math.sqrt(latent.qk_nope_head_size + latent.qk_rope_head_size)


class LatentDecoderLayer(nn.Module):
    """Pre-norm decoder layer with latent attention.

    Args:
        contract: sizes of the drafter.
        latent: sizes of its attention.
    """

    def __init__(self, contract: DrafterContract, latent: LatentAttentionSettings) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(contract.hidden_size, contract.rms_norm_eps)
        self.self_attn = LatentAttention(contract, latent)
        self.post_attention_layernorm = RMSNorm(contract.hidden_size, contract.rms_norm_eps)
        self.mlp = GatedMLP(contract.hidden_size, contract.intermediate_size)

    def forward(
        self, x_BTD: Tensor, rows: RotaryRows, attend: Attend, layer: int, *, is_neox_style: bool = False
    ) -> Tensor:
        """Return the residual stream after this layer; arguments as for `DecoderLayer`."""
        attended: Tensor = self.self_attn(self.input_layernorm(x_BTD), rows, attend, layer, is_neox_style=is_neox_style)
        x_BTD = x_BTD + attended
        mixed: Tensor = self.mlp(self.post_attention_layernorm(x_BTD))
        return x_BTD + mixed


class LatentAttention(Block):
    """Queries of low rank over latent rows; the caller's `Attend` sees one key/value head of width L."""

    def __init__(self, contract: DrafterContract, latent: LatentAttentionSettings) -> None:
        super().__init__()
        self.num_heads, self.latent = contract.num_heads, latent
        width, eps = contract.hidden_size, contract.rms_norm_eps
        query_size = latent.qk_nope_head_size + latent.qk_rope_head_size
        self.q_a_proj = Linear(width, latent.q_lora_rank)
        self.q_a_layernorm = RMSNorm(latent.q_lora_rank, eps)
        self.q_b_proj = Linear(latent.q_lora_rank, contract.num_heads * query_size)
        self.kv_a_proj_with_mqa = Linear(width, latent.latent_size)
        self.kv_a_layernorm = RMSNorm(latent.kv_lora_rank, eps)
        self.kv_b_proj = _Expansion(contract.num_heads, latent)
        self.o_proj = Linear(contract.num_heads * latent.v_head_size, width)
        # `Attend` divides by sqrt(L), which is not the width of an explicit head.
        self.query_scale = attention_scale(latent, contract.rope) * math.sqrt(latent.latent_size)

    def forward(self, x_BTD: Tensor, rows: RotaryRows, attend: Attend, layer: int, *, is_neox_style: bool) -> Tensor:
        """Attend over latent rows; x and the result are [B, T, D]."""
        latent = self.latent
        q_BTNH: Tensor = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x_BTD))).unflatten(-1, (self.num_heads, -1))
        nope, turned = q_BTNH.split_with_sizes((latent.qk_nope_head_size, latent.qk_rope_head_size), -1)
        turned = turn_heads(turned, rows, is_neox_style=is_neox_style)
        q_BTNL = torch.cat((self.kv_b_proj.absorb_key(nope), turned), dim=-1) * self.query_scale
        row_BT1L = self._latent_rows(x_BTD, rows, is_neox_style)
        mixed_BTNL = attend(layer, q_BTNL, row_BT1L, row_BT1L)
        # Values are the rows without their positional channels.
        out_BTNH = self.kv_b_proj.expand_value(mixed_BTNL[..., : latent.kv_lora_rank])
        projected: Tensor = self.o_proj(out_BTNH.flatten(-2))
        return projected

    def context_kv(self, features: Tensor, rows: RotaryRows, *, is_neox_style: bool) -> tuple[Tensor, Tensor]:
        """Cached rows of given features, [..., D] to [..., 1, L], as keys and as values."""
        latent_rows = self._latent_rows(features, rows, is_neox_style)
        return latent_rows, latent_rows

    def _latent_rows(self, x: Tensor, rows: RotaryRows, is_neox_style: bool) -> Tensor:
        sizes = (self.latent.kv_lora_rank, self.latent.qk_rope_head_size)
        kv, positional = self.kv_a_proj_with_mqa(x).unsqueeze(-2).split_with_sizes(sizes, -1)
        turned = turn_heads(positional, rows, is_neox_style=is_neox_style)
        return torch.cat((self.kv_a_layernorm(kv), turned), dim=-1)


class _Expansion(Linear):
    """`kv_b_proj`: each head's key and value matrices, applied to queries and to mixed rows, never to a cached row."""

    def __init__(self, num_heads: int, latent: LatentAttentionSettings) -> None:
        super().__init__(latent.kv_lora_rank, num_heads * (latent.qk_nope_head_size + latent.v_head_size))
        self.num_heads = num_heads
        self.sizes = (latent.qk_nope_head_size, latent.v_head_size)

    def absorb_key(self, q_BTNH: Tensor) -> Tensor:
        """[B, T, N, nope] to [B, T, N, C]: the query that meets latent rows as the given one meets keys."""
        key_NHC, _ = self._matrices()
        return self._per_head(q_BTNH, key_NHC.transpose(1, 2))

    def expand_value(self, mixed_BTNC: Tensor) -> Tensor:
        """[B, T, N, C] to [B, T, N, v]."""
        _, value_NHC = self._matrices()
        return self._per_head(mixed_BTNC, value_NHC)

    def set_mode(self, mode: LinearMode) -> None:
        """Switch the arithmetic; the whole matrix is never multiplied at once, so there is nothing to pack."""
        self.mode = mode

    def _matrices(self) -> tuple[Tensor, Tensor]:
        key_NHC, value_NHC = self.weight.unflatten(0, (self.num_heads, -1)).split_with_sizes(self.sizes, 1)
        return key_NHC, value_NHC

    def _per_head(self, x_BTNI: Tensor, weight_NOI: Tensor) -> Tensor:
        if self.mode == "row_invariant":
            heads = zip(x_BTNI.unbind(-2), weight_NOI.unbind(0), strict=True)
            return torch.stack([linear_row_invariant(x, weight, None) for x, weight in heads], dim=-2)
        return torch.einsum("btni,noi->btno", x_BTNI, weight_NOI)
