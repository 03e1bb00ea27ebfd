"""Blocks that targets and drafters share: linear, norm, rotary positions, attention, MLP, decoder layer.

B requests, T tokens, D width, N query heads, M key/value heads, H head size, I MLP width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, Protocol, runtime_checkable

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from paceline.checkpoint.gguf_codes import BlockCodes, nearest_codes
from paceline.models.flat_layer import FlatLayer, flatten, run_flat
from paceline.models.fused_layer import FusedLayer, fuse, run_fused
from paceline.models.native_layer import NativeLayer, native_layer, run_native
from paceline.models.stored_codes import StoredCodes
from paceline.ops.add_norm import add_norm
from paceline.ops.dispatch import needs_gradient
from paceline.ops.linear import FILLED_ROWS, can_pack, linear_packed, linear_row_invariant, pack_weight
from paceline.ops.native import integers, quantized
from paceline.ops.native import rows as native_rows
from paceline.ops.native.layer import LayerCall
from paceline.ops.native.rows import NativeWeight
from paceline.ops.paged_attention import PagedAttend
from paceline.ops.rms_norm import MirroredGain, mirror_gain, rms_norm, rms_norm_mirrored
from paceline.ops.rotary import turn_heads

LinearMode = Literal["plain", "packed", "native", "quantized", "int8", "row_invariant", "fused"]
# "quantized" is "native" with weights in the codes of their file, wherever they have them; "int8" multiplies those
# codes with rows in 8 bits.
CODE_MODES: tuple[LinearMode, ...] = ("quantized", "int8")
NATIVE_MODES: tuple[LinearMode, ...] = ("native", *CODE_MODES)
RotaryRows = tuple[Tensor, Tensor]  # from `ops.rotary.expand_rotary`, for the tokens of one forward pass
FusedRows = Tensor  # float32 [B * T, 2, R / 2], rows of a position table, for fused layers


class Attend(Protocol):
    """What a layer calls for attention: it stores or looks up keys and values, and mixes them.

    A model computes queries, keys and values; where the keys live (a padded batch, a cache, a training block) is the
    caller's business, so one network definition serves training, prefill and decoding.
    """

    def __call__(
        self, layer: int, q_BTNH: Tensor, k_BTMH: Tensor, v_BTMH: Tensor, *, sink_N: Tensor | None = None
    ) -> Tensor:
        """Return [B, T, N, H]; `sink_N` adds exp(sink) of each head to the softmax's denominator."""
        ...


class Block(nn.Module):
    """A part that nobody hooks: a call goes straight to `forward`, and submodules are found as plain attributes.

    A decode step on a CPU makes some 250 such calls. Whole decoder layers stay ordinary modules, for whoever shards or
    wraps them.
    """

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Run `forward`."""
        return self.forward(*arguments, **options)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if isinstance(value, nn.Module):
            self.__dict__[name] = value
        elif name in self._modules:
            self.__dict__.pop(name, None)  # replaced by nothing, or by something plain


class Linear(Block):
    """x @ W^T + b; `set_linear_mode` chooses the arithmetic (see `ops/linear.py`)."""

    def __init__(self, in_size: int, out_size: int, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_size, in_size))
        self.bias = nn.Parameter(torch.empty(out_size)) if bias else None
        self.mode: LinearMode = "plain"
        self._packed: Tensor | None = None
        self._native: NativeWeight | None = None
        self._stored: StoredCodes | None = None
        self._may_round = False
        self._is_laid_out_by_owner = False

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., in_size] to [..., out_size]."""
        if self._native is not None:
            return native_rows.linear(x, self._native)
        return self.product(x, self.bias)

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """The same, with another bias or none, for whoever has to add it later."""
        if self.mode == "row_invariant":
            return linear_row_invariant(x, self.weight, bias, packed=self._packed)
        if self._packed is not None:
            return linear_packed(x, self._packed, bias)
        # Rows that are a slice of others would be multiplied request by request, each reading the weight once more.
        return functional.linear(x.contiguous(), self.weight, bias)

    @property
    def packed(self) -> Tensor | None:
        """The weight in oneDNN's form, where products go through that."""
        return self._packed

    @property
    def native(self) -> NativeWeight | None:
        """The weight in the form of the native product, where products go through that."""
        return self._native

    @property
    def is_packed(self) -> bool:
        """Whether products go through oneDNN's packed form."""
        return self._packed is not None

    def set_mode(self, mode: LinearMode) -> None:
        """Switch the arithmetic; a weight that oneDNN cannot pack stays plain."""
        self.mode = mode
        takes_packed = mode in ("packed", "row_invariant") and can_pack(self.weight)
        self._packed = pack_weight(self.weight) if takes_packed else None
        makes_native = mode in NATIVE_MODES and not self._is_laid_out_by_owner
        self._native = self.native_form() if makes_native else None

    def allow_rounding(self) -> None:
        """Let the mode "int8" round the weight to codes of 8 bits where no file has it in codes."""
        self._may_round = True

    def keep_codes(self, stored: StoredCodes) -> None:
        """Say how the weight is stored, for the modes "quantized" and "int8"."""
        self._stored = stored

    @property
    def has_codes(self) -> bool:
        """Whether the weight is what codes of its file say."""
        return self._stored is not None and self._stored.stand_for(self.weight)

    def native_form(self, *, is_gated: bool = False) -> NativeWeight | None:
        """The weight for the native product of the mode at hand; None where it has none.

        Args:
            is_gated: see `NativeWeight`.
        """
        if not native_rows.can_pack(self.weight):
            return None
        pack = _code_packer(self.mode)
        codes = None if pack is None else self._codes()
        if pack is None or codes is None:
            return native_rows.pack(self.weight, self.bias, is_gated=is_gated)
        parts = codes.scales_OC, codes.minima_OC, codes.codes_OI
        if not quantized.can_pack_codes(*parts):
            return native_rows.pack(self.weight, self.bias, is_gated=is_gated)
        return pack(*parts, self.bias, is_gated=is_gated)

    def _codes(self) -> BlockCodes | None:
        """What stands for the weight in the mode at hand; None where nothing does."""
        if self._stored is not None and self.has_codes:
            return self._stored.read()
        return nearest_codes(self.weight) if self._may_round and self.mode == "int8" else None

    def leave_native_to_owner(self) -> None:
        """Go without a native copy: whoever owns this keeps the weight in another order."""
        self._is_laid_out_by_owner = True

    def some_outputs(self, ids: Tensor) -> Linear:
        """The product that gives these outputs alone, in the same arithmetic; its weight is a copy.

        Args:
            ids: int64, which outputs, in order.
        """
        assert self.bias is None, "output heads and tables have none"
        part = Linear(self.weight.shape[1], 0)
        part.weight = nn.Parameter(self.weight.detach()[ids.to(self.weight.device)], requires_grad=False)
        if self._stored is not None and self.has_codes:
            part.keep_codes(self._stored.of_rows(ids.cpu(), part.weight))
        part._may_round = self._may_round
        part.set_mode(self.mode)
        return part


def _code_packer(mode: LinearMode) -> Callable[..., NativeWeight] | None:
    """What lays codes out for a mode's products, where this machine has these."""
    if mode == "quantized" and quantized.can_run_quantized():
        return quantized.pack_codes
    if mode == "int8" and integers.can_run_integers():
        return integers.pack_integers
    return None


@runtime_checkable
class GivesBestScores(Protocol):
    """An output head of which other processes have the rest."""

    def best_scores(self, hidden: Tensor, num_best: int) -> Tensor:
        """The best scores of all ids, those of others as -inf, [..., D] to [..., V]; of equal ones the lowest ids."""
        ...


@runtime_checkable
class SumsParts(Protocol):
    """A product of which other processes have the rest."""

    def total(self, partial: Tensor) -> Tensor:
        """The sum of all parts."""
        ...


def score_rows(head: Linear, hidden: Tensor) -> Tensor:
    """Scores of an output head, [..., D] to [..., V]; a lone row is filled up where products are packed."""
    if head.is_packed and hidden.shape[:-1] == (1, 1):
        filled: Tensor = head(hidden.expand(1, FILLED_ROWS, -1))
        return filled[:, :1]
    scores: Tensor = head(hidden)
    return scores


@runtime_checkable
class SwitchesArithmetic(Protocol):
    """A part with arithmetics to choose from: linears, norms, experts."""

    def set_mode(self, mode: LinearMode) -> None:
        """Switch to one of them."""
        ...


class HasModules(Protocol):
    """A model, whatever else is known of it."""

    def modules(self) -> Iterator[nn.Module]:
        """Itself and every part."""
        ...


def set_linear_mode(model: HasModules, mode: LinearMode) -> int:
    """Set the arithmetic of every part of a model that has several; returns how many weights are now packed.

    Outside the mode "plain", weights and gains that change later go unseen.
    """
    for module in reversed(list(model.modules())):  # parts before what is put together from them
        if isinstance(module, SwitchesArithmetic):
            module.set_mode(mode)
    return sum(isinstance(module, Linear) and module.is_packed for module in model.modules())


def set_drafter_mode(drafter: HasModules, mode: LinearMode) -> None:
    """`set_linear_mode` for a drafter, whose weights "int8" may round: they decide what is accepted, never the text."""
    for module in drafter.modules():
        if isinstance(module, Linear):
            module.allow_rounding()
    set_linear_mode(drafter, mode)


def native_calls(layers: Iterable[nn.Module]) -> list[LayerCall]:
    """The native calls of a model's layers; none unless all have one, and nobody listens to any."""
    calls = []
    for layer in layers:
        call = getattr(layer, "native_call", None)
        if call is None:
            return []
        calls.append(call)
    return calls


def fused_layers(layers: Iterable[nn.Module], mode: LinearMode) -> list[FusedLayer]:
    """The fused forms of a model's layers; none unless all have one."""
    forms = [getattr(layer, "fused", None) for layer in layers] if mode == "fused" else []
    fused = [form for form in forms if isinstance(form, FusedLayer)]
    return fused if len(fused) == len(forms) else []


class RMSNorm(Block):
    """Root-mean-square norm with a learned gain."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps
        self._mirrored: MirroredGain | None = None
        self._mirrored_to_fill: MirroredGain | None = None
        self._is_native = False
        self._is_fused = False

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        if self._is_fused and not needs_gradient(x, self.weight):
            return add_norm(x, None, self.weight, eps=self.eps)[1]
        if self._is_native and x.dtype == torch.bfloat16:
            return native_rows.norm(x, self.weight, eps=self.eps)
        if self._mirrored is None:
            return rms_norm(x, self.weight, eps=self.eps)
        return rms_norm_mirrored(x.unsqueeze(-2), self._mirrored, eps=self.eps).select(-2, 0)

    def filled(self, x_BTD: Tensor) -> Tensor:
        """`forward`, except that a lone row may come back as several, of which the first counts.

        Packed products are faster on them, and they cost nothing here: the norm works on copies of a row anyway.
        """
        if self._mirrored_to_fill is None or x_BTD.numel() != x_BTD.shape[-1]:
            return self.forward(x_BTD)
        return rms_norm_mirrored(x_BTD, self._mirrored_to_fill, eps=self.eps)

    def set_mode(self, mode: LinearMode) -> None:
        """Prepare for the arithmetic of the products around."""
        self._is_native = mode in NATIVE_MODES and native_rows.can_run(self.weight)
        self._is_fused = mode == "fused"
        is_prepared = mode in ("packed", "row_invariant") and self.weight.device.type == "cpu"
        self._mirrored = mirror_gain(self.weight, 2) if is_prepared else None
        fills = mode == "packed" and can_pack(self.weight)
        self._mirrored_to_fill = mirror_gain(self.weight, FILLED_ROWS) if fills else None

    @property
    def gains(self) -> tuple[MirroredGain, MirroredGain] | None:
        """Its gain for any number of rows, and for a lone one that is filled up; None beside unpacked products."""
        if self._mirrored is None or self._mirrored_to_fill is None:
            return None
        return self._mirrored, self._mirrored_to_fill


class SelfAttention(Block):
    """Grouped-query attention with fused q/k/v projection and optional per-head q/k norms.

    Args:
        hidden_size: width of the residual stream.
        num_heads: query heads.
        num_kv_heads: key/value heads.
        head_size: of both.
        eps: of the q/k norms.
        bias: on all four projections.
        qk_norm: whether there are q/k norms.
        in_size: width of what is projected; by default the residual stream's.
        has_sink: one learned logit per query head in the softmax's denominator.
        value_scale: multiplies every value, those of the context too.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        *,
        eps: float,
        bias: bool,
        qk_norm: bool,
        in_size: int | None = None,
        has_sink: bool = False,
        value_scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_size = num_heads, num_kv_heads, head_size
        self.q_size, self.kv_size = num_heads * head_size, num_kv_heads * head_size
        self.qkv_proj = Linear(in_size or hidden_size, self.q_size + 2 * self.kv_size, bias=bias)
        self.o_proj = Linear(self.q_size, hidden_size, bias=bias)
        self.q_norm = RMSNorm(head_size, eps) if qk_norm else None
        self.k_norm = RMSNorm(head_size, eps) if qk_norm else None
        self.attention_sink_bias = nn.Parameter(torch.zeros(num_heads)) if has_sink else None
        self.value_scale = value_scale

    def forward(self, x_BTD: Tensor, rows: RotaryRows, attend: Attend, layer: int, *, is_neox_style: bool) -> Tensor:
        """Project, turn by position, attend, project back; x and the result are [B, T, D].

        `rows` says how many rows there are: x may hold a lone one that is filled up (`RMSNorm.filled`).
        """
        qkv = self.qkv_proj(x_BTD).narrow(1, 0, rows[0].shape[-3]).unflatten(-1, (-1, self.head_size))
        qk, v = qkv.split_with_sizes((self.num_heads + self.num_kv_heads, self.num_kv_heads), -2)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = qk.split_with_sizes((self.num_heads, self.num_kv_heads), -2)
            qk = torch.cat((self.q_norm(q), self.k_norm(k)), dim=-2)
        turned = turn_heads(qk, rows, is_neox_style=is_neox_style)
        q, k = turned.split_with_sizes((self.num_heads, self.num_kv_heads), -2)
        if self.value_scale != 1.0:
            v = v * self.value_scale
        sink = self.attention_sink_bias
        mixed = attend(layer, q, k, v) if sink is None else attend(layer, q, k, v, sink_N=sink)
        projected: Tensor = self.o_proj(mixed.flatten(-2))
        return projected

    def context_kv(self, features: Tensor, rows: RotaryRows, *, is_neox_style: bool) -> tuple[Tensor, Tensor]:
        """Keys and values of given features, [..., D] to two of [..., M, H]: the drafter's context path."""
        kv_rows = slice(self.q_size, None)
        bias = self.qkv_proj.bias[kv_rows] if self.qkv_proj.bias is not None else None
        kv = functional.linear(features, self.qkv_proj.weight[kv_rows], bias).unflatten(-1, (-1, self.head_size))
        k, v = kv[..., : self.num_kv_heads, :], kv[..., self.num_kv_heads :, :]
        if self.k_norm is not None:
            k = self.k_norm(k)
        if self.value_scale != 1.0:
            v = v * self.value_scale
        return turn_heads(k, rows, is_neox_style=is_neox_style), v


class GatedMLP(Block):
    """down(silu(gate x) * up x) with fused gate and up projections."""

    def __init__(self, hidden_size: int, intermediate_size: int, *, bias: bool = False) -> None:
        super().__init__()
        self.intermediate_size = intermediate_size
        self.gate_up_proj = Linear(hidden_size, 2 * intermediate_size, bias=bias)
        self.down_proj = Linear(intermediate_size, hidden_size, bias=bias)
        self.gate_up_proj.leave_native_to_owner()
        self._native_gate_up: NativeWeight | None = None

    @property
    def native_gate_up(self) -> NativeWeight | None:
        """Both projections for the native product, which multiplies them."""
        return self._native_gate_up

    def set_mode(self, mode: LinearMode) -> None:
        """Switch the arithmetic of what lies between the products; they have theirs already."""
        makes_native = mode in NATIVE_MODES
        self._native_gate_up = self.gate_up_proj.native_form(is_gated=True) if makes_native else None

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Map [B, T, D] to [B, T, D]."""
        if self._native_gate_up is not None:
            down: Tensor = self.down_proj(native_rows.linear(x_BTD, self._native_gate_up))
            return down
        gate, up = self.gate_up_proj(x_BTD).split_with_sizes((self.intermediate_size, self.intermediate_size), -1)
        y: Tensor = self.down_proj(functional.silu(gate) * up)
        return y


class DecoderLayer(nn.Module):
    """Pre-norm decoder layer: attention and MLP, each added to the residual stream; arguments as `SelfAttention`."""

    def __init__(
        self,
        *,
        hidden_size: int,
        intermediate_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        eps: float,
        attention_bias: bool,
        mlp_bias: bool,
        qk_norm: bool,
        has_sink: bool = False,
        value_scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(hidden_size, eps)
        self.self_attn = SelfAttention(
            hidden_size,
            num_heads,
            num_kv_heads,
            head_size,
            eps=eps,
            bias=attention_bias,
            qk_norm=qk_norm,
            has_sink=has_sink,
            value_scale=value_scale,
        )
        self.post_attention_layernorm = RMSNorm(hidden_size, eps)
        self.mlp = GatedMLP(hidden_size, intermediate_size, bias=mlp_bias)
        self._flat: FlatLayer | None = None
        self._native: NativeLayer | None = None
        self._fused: FusedLayer | None = None

    def set_mode(self, mode: LinearMode) -> None:
        """Take the form of the mode where there is one; the parts have their arithmetic already.

        A form reads the parts' weights and never calls them. Where other processes have the rest of each product, the
        only form is the one that has them summed.
        """
        parts = self.input_layernorm, self.self_attn, self.post_attention_layernorm, self.mlp
        output = self.self_attn.o_proj
        is_plain = type(output) is Linear and type(self.mlp.down_proj) is Linear
        self._flat = flatten(*parts) if mode == "packed" and is_plain else None
        self._native = native_layer(*parts) if mode in NATIVE_MODES and is_plain else None
        self._fused = fuse(*parts) if mode == "fused" and (is_plain or isinstance(output, SumsParts)) else None
        if self._fused is not None and isinstance(output, SumsParts):
            self._fused = self._fused._replace(total=output.total)

    @property
    def fused(self) -> FusedLayer | None:
        """Its fused form, for `FusedRows` and a `PagedAttend`."""
        return self._fused

    @property
    def native_call(self) -> LayerCall | None:
        """The layer in one call, where there is one and calling it is all that calling the layer does."""
        is_heard = self._forward_hooks or self._forward_pre_hooks or "forward" in self.__dict__
        return None if self._native is None or is_heard else self._native.whole

    def forward(
        self, x_BTD: Tensor, rows: RotaryRows | FusedRows, attend: Attend, layer: int, *, is_neox_style: bool = True
    ) -> Tensor:
        """Return the residual stream after this layer, a new tensor: the one handed in may have been tapped."""
        if isinstance(rows, Tensor):
            assert self._fused is not None and isinstance(attend, PagedAttend), "the caller looked at `fused`"
            return run_fused([self._fused], x_BTD, rows, attend, is_neox_style=is_neox_style, first_layer=layer)
        if self._native is not None and is_neox_style:
            return run_native(self._native, x_BTD, rows, attend, layer)
        if self._flat is not None and is_neox_style:
            return run_flat(self._flat, x_BTD, rows, attend, layer)
        filled = self.input_layernorm.filled(x_BTD)
        attended: Tensor = self.self_attn(filled, rows, attend, layer, is_neox_style=is_neox_style)
        x_BTD = x_BTD + attended
        mixed: Tensor = self.mlp(self.post_attention_layernorm.filled(x_BTD))
        return x_BTD + mixed.narrow(1, 0, x_BTD.shape[1])
