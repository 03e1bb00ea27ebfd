"""The decoder that every DFlash-family drafter shares: layers whose past keys and values come from target features.

Context keys and values depend on a position's taps alone, never on drafter hidden states or token ids, so they are
written once per committed position. Source: spec of the public z-lab layout (`fc`, `hidden_norm`, `layers.*`, `norm`).

B requests, S context positions, Q block rows, D width, M key/value heads, H head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from paceline.checkpoint.contract import DrafterContract
from paceline.models.layers import Attend, DecoderLayer, Linear, LinearMode, RMSNorm, RotaryRows, set_linear_mode
from paceline.models.positions import position_table
from paceline.ops.rms_norm import rms_norm
from paceline.ops.rotary import expand_rotary, turn_heads


class ContextAttention(Protocol):
    """What the backbone asks of a layer's `self_attn` beside its forward pass."""

    def context_kv(self, features: Tensor, rows: RotaryRows, *, is_neox_style: bool) -> tuple[Tensor, Tensor]:
        """Keys and values of context features, [..., D] to two of [..., M, H]."""
        ...


def plain_layer(contract: DrafterContract, layer: int) -> nn.Module:
    """The decoder layer of DFlash and of DSpark's dense form; `layer` makes no difference to it."""
    return DecoderLayer(
        hidden_size=contract.hidden_size,
        intermediate_size=contract.intermediate_size,
        num_heads=contract.num_heads,
        num_kv_heads=contract.num_kv_heads,
        head_size=contract.head_size,
        eps=contract.rms_norm_eps,
        attention_bias=contract.attention_bias,
        mlp_bias=False,
        qk_norm=contract.has_qk_norm,
        has_sink=contract.has_attention_sink,
        value_scale=contract.attention_value_scale,
    )


class DrafterBackbone(nn.Module):
    """Context projection, injected keys and values, decoder layers, final norm.

    Args:
        contract: the drafter's sizes and switches.
        max_positions: rows of the position table; by default the contract's `max_position_embeddings`.
        make_layer: builds layer i; its `self_attn` has `context_kv`, and a call takes what `DecoderLayer` takes.
    """

    def __init__(
        self,
        contract: DrafterContract,
        *,
        max_positions: int | None = None,
        make_layer: Callable[[DrafterContract, int], nn.Module] = plain_layer,
    ) -> None:
        super().__init__()
        self.contract = contract
        eps = contract.rms_norm_eps
        self.fc = Linear(contract.num_taps * contract.target_hidden_size, contract.hidden_size)
        num_norms = contract.num_taps if contract.has_tap_norm else 0
        self.fc_norm = nn.ModuleList(RMSNorm(contract.target_hidden_size, eps) for _ in range(num_norms))
        self.hidden_norm = RMSNorm(contract.hidden_size, eps)
        self.layers = nn.ModuleList(make_layer(contract, layer) for layer in range(contract.num_layers))
        self.norm = RMSNorm(contract.hidden_size, eps)
        self.position_table: Tensor
        table = position_table(contract.rope, contract.rotary_size, max_positions or contract.max_position_embeddings)
        self.register_buffer("position_table", table, persistent=False)
        self._stacked_kv: Linear | None = None
        self._stacked_k_gain: Tensor  # float32 [layers, 1, H], set beside it

    @property
    def cache_shape(self) -> tuple[int, int]:
        """(key/value heads, head size) of a cached context row; latent attention keeps one row for all heads."""
        latent = self.contract.latent
        return (1, latent.latent_size) if latent else (self.contract.num_kv_heads, self.contract.head_size)

    def context_features(self, taps: Sequence[Tensor]) -> Tensor:
        """One feature vector per position from its taps.

        Args:
            taps: ascending by layer, each [..., target width]; float32 streams are cast to the drafter's dtype.
        Returns:
            [..., D]: hidden_norm(fc(concatenation of the normalised taps)).
        """
        dtype = self.fc.weight.dtype
        streams = [tap.to(dtype) for tap in taps]
        if self.contract.has_tap_norm:
            streams = [norm(stream) for norm, stream in zip(self.fc_norm, streams, strict=True)]
        features: Tensor = self.hidden_norm(self.fc(torch.cat(streams, dim=-1)))
        return features

    def context_kv(self, features: Tensor, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of context positions, for every layer.

        The layer's input norm is not applied to features: they were normalised once, by `hidden_norm`.

        Args:
            features: [..., D] from `context_features`.
            positions: int64 [...], absolute.
        Returns:
            Per layer, keys (normed and turned) and values, each [..., M, H].
        """
        neox = self.contract.is_neox_style
        rows = expand_rotary(self.position_table[positions], features.dtype, is_neox_style=neox)
        if self._stacked_kv is None:
            attentions = [cast(ContextAttention, layer.self_attn) for layer in self.layers]
            return [attention.context_kv(features, rows, is_neox_style=neox) for attention in attentions]
        # All layers at once: on a CPU four small norms and rotations cost four times one.
        kv = self._stacked_kv(features).unflatten(-1, (len(self.layers), 2, -1, self.contract.head_size))
        no_gain = torch.ones_like(self._stacked_k_gain[0, 0])
        k = rms_norm(kv[..., 0, :, :].float(), no_gain, eps=self.contract.rms_norm_eps) * self._stacked_k_gain
        per_layer = (rows[0].unsqueeze(-3), rows[1].unsqueeze(-3))
        k = turn_heads(k.to(kv.dtype), per_layer, is_neox_style=neox)  # one rounding, as in the norm of one layer
        v = kv[..., 1, :, :]
        if self.contract.attention_value_scale != 1.0:
            v = v * self.contract.attention_value_scale
        return list(zip(k.unbind(-3), v.unbind(-3), strict=True))

    def forward(self, embeddings_BQD: Tensor, positions_BQ: Tensor, attend: Attend) -> Tensor:
        """Run the block rows through every layer; returns [B, Q, D] after the final norm."""
        x = embeddings_BQD
        neox = self.contract.is_neox_style
        rows = expand_rotary(self.position_table[positions_BQ], x.dtype, is_neox_style=neox)
        for index, layer in enumerate(self.layers):
            x = layer(x, rows, attend, index, is_neox_style=neox)
        hidden: Tensor = self.norm(x)
        return hidden

    def prepare_for_serving(self, mode: LinearMode) -> None:
        """Stack the context projections of all layers into one product and set the arithmetic of every linear."""
        if self.contract.latent is not None or not self.contract.has_qk_norm:
            set_linear_mode(self, mode)
            return
        stacked = Linear(self.contract.hidden_size, 0, bias=self.contract.attention_bias)
        attentions = [layer.self_attn for layer in self._decoder_layers()]
        weights = [attention.qkv_proj.weight[attention.q_size :] for attention in attentions]
        stacked.weight = nn.Parameter(torch.cat(weights).detach(), requires_grad=False)
        biases = [a.qkv_proj.bias[a.q_size :] for a in attentions if a.qkv_proj.bias is not None]
        stacked.bias = nn.Parameter(torch.cat(biases).detach(), requires_grad=False) if biases else None
        self._stacked_kv = stacked
        gains: list[Tensor] = [attention.k_norm.weight for attention in attentions if attention.k_norm is not None]
        self._stacked_k_gain = torch.stack(gains).detach().float().unsqueeze(1)
        set_linear_mode(self, mode)

    def checkpoint_parameters(self) -> dict[str, Tensor]:
        """Parameters by the names that `checkpoint/names.py` maps to files."""
        return {name: p for name, p in self.named_parameters() if not name.startswith("_stacked_kv.")}

    def _decoder_layers(self) -> list[DecoderLayer]:
        return [layer for layer in self.layers if isinstance(layer, DecoderLayer)]
