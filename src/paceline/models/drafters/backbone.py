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
from paceline.errors import ShapeError
from paceline.models.fused_layer import FusedLayer, run_fused
from paceline.models.layers import (
    NATIVE_MODES,
    Attend,
    DecoderLayer,
    Linear,
    LinearMode,
    RMSNorm,
    RotaryRows,
    SelfAttention,
    fused_layers,
    native_calls,
    set_drafter_mode,
)
from paceline.models.positions import position_table
from paceline.ops.context_kv import write_context_kv
from paceline.ops.dispatch import needs_gradient
from paceline.ops.linear_residual import linear_residual_scaled, norm_linear
from paceline.ops.native import context as native_context
from paceline.ops.native.attention import InLayer
from paceline.ops.native.context import ContextCall
from paceline.ops.native.layer import LayersCall
from paceline.ops.norm_taps import join_taps, norm_taps
from paceline.ops.paged_attention import PagedAttend
from paceline.ops.rms_norm import rms_norm
from paceline.ops.rotary import expand_rotary, rotary_turns, turn_heads
from paceline.ops.skinny_tile import LARGEST_ROWS


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
        self._fused: list[FusedLayer] = []
        self._native: LayersCall | None = None
        self._tap_gains_KD: Tensor | None = None  # copies of the taps' norms, for fused arithmetic
        self._context_call: ContextCall | None = None

    def set_mode(self, mode: LinearMode) -> None:
        """Gather the layers' fused or native forms, which come before the whole, and the gains of the taps."""
        self._fused = fused_layers(self.layers, mode)
        calls = native_calls(self.layers) if mode in NATIVE_MODES else []
        self._native = LayersCall(calls) if calls and self.contract.is_neox_style else None
        self._tap_gains_KD = self._tap_gains() if mode == "fused" else None
        self._context_call = self._native_context() if mode in NATIVE_MODES else None

    def _tap_gains(self) -> Tensor | None:
        gains: list[Tensor] = [cast(RMSNorm, norm).weight for norm in self.fc_norm]
        return torch.stack(gains).detach() if gains else None

    def _native_context(self) -> ContextCall | None:
        """The whole way from taps to planes in one native call; None where a part of it is not native."""
        contract, features, stacked = self.contract, self.fc.native, self._stacked_kv
        if features is None or stacked is None or stacked.native is None or not contract.is_neox_style:
            return None
        return ContextCall(
            num_taps=contract.num_taps,
            tap_gains_KX=self._tap_gains(),
            features=features,
            feature_gain_D=self.hidden_norm.weight.detach(),
            kv=stacked.native,
            k_gain_LH=self._stacked_k_gain.squeeze(1).to(torch.bfloat16),
            eps=contract.rms_norm_eps,
            value_scale=contract.attention_value_scale,
        )

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
        features: Tensor = self.hidden_norm(self.fc(self._joined(taps)))
        return features

    def _joined(self, taps: Sequence[Tensor]) -> Tensor:
        """The concatenation of the normalised taps."""
        dtype, eps = self.fc.weight.dtype, self.contract.rms_norm_eps
        if self._tap_gains_KD is not None and not needs_gradient(*taps, self.fc.weight):
            return norm_taps(taps, self._tap_gains_KD, eps=eps)
        if self._fused and not self.contract.has_tap_norm and not needs_gradient(*taps, self.fc.weight):
            return join_taps(taps, dtype)
        streams = [tap.to(dtype) for tap in taps]
        if self.contract.has_tap_norm:
            streams = [norm(stream) for norm, stream in zip(self.fc_norm, streams, strict=True)]
        return torch.cat(streams, dim=-1)

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

    @property
    def is_stacked(self) -> bool:
        """Whether the context projections of all layers are one product, which `write_context` takes."""
        return self._stacked_kv is not None

    def writes_at_once(self, planes: Tensor) -> bool:
        """Whether `write_taps` to such planes is one call on the host, so that it is best for any number of rows."""
        return self._context_call is not None and native_context.can_store(planes, self.position_table)

    def write_context(self, features_BTD: Tensor, rows_BT: Tensor, positions_BT: Tensor, planes: Tensor) -> None:
        """`context_kv` and its storing for all layers in one pass, without reading a tensor on the host.

        Args:
            features_BTD: from `context_features`.
            rows_BT: int64, physical rows of the planes, in block 0 for what nobody reads.
            positions_BT: int64, absolute; rows past the position table are turned as its last one.
            planes: [layers, 2, M, blocks, block_size, H], written in place.
        """
        assert self._stacked_kv is not None, "the caller asks `is_stacked`"
        self._write(self._stacked_kv(features_BTD).flatten(0, 1), rows_BT, positions_BT, planes)

    def write_taps(
        self,
        taps: Sequence[Tensor],
        rows_BT: Tensor,
        positions_BT: Tensor,
        planes: Tensor,
        *,
        counters: Tensor | None = None,
    ) -> None:
        """`context_features` and `write_context`; few fused rows take four launches, native ones a single call.

        Args:
            taps: in their order.
            rows_BT: as for `write_context`.
            positions_BT: as for `write_context`.
            planes: written in place.
            counters: of the engine; None takes a layer's.
        """
        stacked, call = self._stacked_kv, self._context_call
        assert stacked is not None, "the caller asks `is_stacked`"
        if call is not None and self.writes_at_once(planes):
            call(taps, rows_BT, positions_BT, planes, self.position_table)
            return
        if not self._fused or rows_BT.numel() > LARGEST_ROWS:
            self.write_context(self.context_features(taps), rows_BT, positions_BT, planes)
            return
        joined_RX = self._joined(taps).flatten(0, 1)
        counters = self._fused[0].counters if counters is None else counters
        rows = linear_residual_scaled(
            joined_RX, self.fc.weight, None, self.hidden_norm.weight, bias_O=self.fc.bias, counters=counters
        )
        eps = self.hidden_norm.eps
        kv_RX = norm_linear(rows, stacked.weight, eps=eps, bias_O=stacked.bias, counters=counters)
        self._write(kv_RX, rows_BT, positions_BT, planes)

    def _write(self, kv_RX: Tensor, rows_BT: Tensor, positions_BT: Tensor, planes: Tensor) -> None:
        write_context_kv(
            kv_RX.unflatten(-1, (len(self.layers), -1)),
            self._stacked_k_gain.squeeze(1),
            self.position_table,
            positions_BT.flatten(),
            rows_BT.flatten(),
            planes,
            eps=self.contract.rms_norm_eps,
            is_neox_style=self.contract.is_neox_style,
            value_scale=self.contract.attention_value_scale,
        )

    def forward(
        self, embeddings_BQD: Tensor, positions_BQ: Tensor, attend: Attend, *, block_rows: int | None = None
    ) -> Tensor:
        """Run the block rows through every layer.

        Args:
            embeddings_BQD: embedded rows of one block per request, or of several of the same length.
            positions_BQ: int64, absolute.
            attend: attention of the rows.
            block_rows: rows of a block; None where Q is one block. Layers that look along the block must know where
                it starts: with a wrong length, rows leak into the next block.
        Returns:
            [B, Q, D] after the final norm.
        """
        x = embeddings_BQD
        neox = self.contract.is_neox_style
        offset_R = None if self.contract.convolution is None else _offsets(positions_BQ, block_rows)
        if self._fused and isinstance(attend, PagedAttend):
            turns = self.position_table[positions_BQ.flatten()]
            x = run_fused(self._fused, x, turns, attend, is_neox_style=neox, offset_R=offset_R)
            fused_hidden: Tensor = self.norm(x)
            return fused_hidden
        rows = rotary_turns(self.position_table, positions_BQ, x.dtype, is_neox_style=neox)
        native = self._native
        key_stride = attend.key_stride() if native is not None and isinstance(attend, InLayer) else None
        # Whoever changed or wrapped a layer since wants to see it run.
        if native is not None and key_stride is not None and native_calls(self.layers) == list(native.calls):
            assert isinstance(attend, InLayer), "it has a stride"
            native_hidden: Tensor = self.norm(native(x, rows, attend, key_stride, offset_R)[-1])
            return native_hidden
        along_block = {} if self.contract.convolution is None else {"offset_R": offset_R}
        for index, layer in enumerate(self.layers):
            x = layer(x, rows, attend, index, is_neox_style=neox, **along_block)
        hidden: Tensor = self.norm(x)
        return hidden

    def prepare_for_serving(self, mode: LinearMode) -> None:
        """Stack the context projections of all layers into one product and set the arithmetic of every linear."""
        self.stack_context()
        set_drafter_mode(self, mode)

    def stack_context(self) -> None:
        """Lay the context projections of all layers side by side, where they can be one product."""
        if self.contract.latent is not None or not self.contract.has_qk_norm:
            return
        stacked = Linear(self.contract.hidden_size, 0, bias=self.contract.attention_bias)
        attentions = [cast(SelfAttention, layer.self_attn) for layer in self.layers]
        weights = [attention.qkv_proj.weight[attention.q_size :] for attention in attentions]
        stacked.weight = nn.Parameter(torch.cat(weights).detach(), requires_grad=False)
        biases = [a.qkv_proj.bias[a.q_size :] for a in attentions if a.qkv_proj.bias is not None]
        stacked.bias = nn.Parameter(torch.cat(biases).detach(), requires_grad=False) if biases else None
        self._stacked_kv = stacked
        gains: list[Tensor] = [attention.k_norm.weight for attention in attentions if attention.k_norm is not None]
        self._stacked_k_gain = torch.stack(gains).detach().float().unsqueeze(1)

    def checkpoint_parameters(self) -> dict[str, Tensor]:
        """Parameters by the names that `checkpoint/names.py` maps to files."""
        return {name: p for name, p in self.named_parameters() if not name.startswith("_stacked_kv.")}


def _offsets(positions_BQ: Tensor, block_rows: int | None) -> Tensor | None:
    """int64 [B * Q]: each row's index in its own block. Positions cannot tell: they are clamped at the table's end.

    None for a lone block on a CPU: there is no neighbour to keep out, which costs a CPU three operations per tap.
    """
    B, Q = positions_BQ.shape
    if block_rows is not None and Q % block_rows:
        raise ShapeError("block rows", expected=f"[B, a multiple of {block_rows}]", found=positions_BQ.shape)
    if B == 1 and block_rows in (None, Q) and positions_BQ.device.type == "cpu":
        return None
    offset_Q = torch.arange(Q, device=positions_BQ.device)
    return (offset_Q if block_rows is None else offset_Q % block_rows).repeat(B)
