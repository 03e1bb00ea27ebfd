"""DFlash2's decoder layer: attention and MLP, each between the two sides of a grouped dynamic convolution.

B requests, Q rows of a [B] row (one block or several), R = B * Q flat rows, D width, T taps, G groups of channels.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from paceline.checkpoint.contract import ConvolutionSettings, DrafterContract
from paceline.models.drafters.backbone import plain_layer
from paceline.models.drafters.latent import LatentDecoderLayer, latent_layer
from paceline.models.flat_layer import FlatConvolution, FlatLayer, flatten, run_flat
from paceline.models.fused_layer import FusedConvolution, FusedLayer, fuse, run_fused
from paceline.models.layers import (
    NATIVE_MODES,
    Attend,
    Block,
    DecoderLayer,
    FusedRows,
    Linear,
    LinearMode,
    RotaryRows,
    SelfAttention,
)
from paceline.models.native_layer import NativeLayer, native_layer, run_native
from paceline.ops.grouped_convolution import grouped_convolution
from paceline.ops.native.layer import LayerCall, NativeConvolution
from paceline.ops.paged_attention import PagedAttend


class GroupedConvolution(Block):
    """Both sides of the convolution around a sublayer; their coefficients come from one projection of its input.

    A new one is the identity: it hands every row on as it is.

    Args:
        hidden_size: D.
        settings: taps, and channels per group.
    """

    def __init__(self, hidden_size: int, settings: ConvolutionSettings) -> None:
        super().__init__()
        self.num_taps = settings.num_taps
        num_groups = hidden_size // settings.group_size
        base_2TD = torch.zeros(2, settings.num_taps, hidden_size)
        base_2TD[:, 0] = 1.0
        self.base_kernel = nn.Parameter(base_2TD)
        self.kernel_projection = Linear(hidden_size, 2 * settings.num_taps * num_groups)
        nn.init.zeros_(self.kernel_projection.weight)

    def prepare(self, x_BQD: Tensor, offset_R: Tensor | None) -> tuple[Tensor, Tensor]:
        """Convolve a sublayer's input; the second result, [R, T, G], is what `finish` adds to its coefficients."""
        delta_R2TG = self.kernel_projection(x_BQD).view(x_BQD.shape[0] * x_BQD.shape[1], 2, self.num_taps, -1)
        opening_RTG, closing_RTG = delta_R2TG.unbind(1)
        return self._convolve(x_BQD, 0, opening_RTG, offset_R), closing_RTG

    def finish(self, z_BQD: Tensor, delta_RTG: Tensor, offset_R: Tensor | None) -> Tensor:
        """Convolve the sublayer's complete output, before it is added to the stream."""
        return self._convolve(z_BQD, 1, delta_RTG, offset_R)

    def flat(self) -> FlatConvolution | None:
        """Both sides in one tuple; None where the projection is not packed."""
        projection = self.kernel_projection.packed
        if projection is None:
            return None
        return FlatConvolution(projection, self.base_kernel.detach().flatten(0, 1).float())

    def native(self) -> NativeConvolution | None:
        """The same for native products; None where the projection has none."""
        projection = self.kernel_projection.native
        if projection is None:
            return None
        return NativeConvolution(projection, self.base_kernel.detach().flatten(0, 1).float())

    def fused(self) -> FusedConvolution:
        """The same for fused layers: the weights themselves."""
        opening_TD, closing_TD = self.base_kernel.detach().unbind(0)
        return FusedConvolution(self.kernel_projection.weight.detach(), opening_TD, closing_TD)

    def _convolve(self, x_BQD: Tensor, side: int, delta_RTG: Tensor, offset_R: Tensor | None) -> Tensor:
        y_RD = grouped_convolution(x_BQD.flatten(0, 1), self.base_kernel[side], delta_RTG, offset_R)
        return y_RD.view(x_BQD.shape)


class ConvolvedLayer(nn.Module):
    """A decoder layer whose rows also look back along their block, around attention and around the MLP.

    Context keys and values are those of the layer without convolutions.

    Args:
        plain: that layer; its parts become parts of this one.
        hidden_size: D.
        settings: of both convolutions.
    """

    def __init__(
        self, plain: DecoderLayer | LatentDecoderLayer, hidden_size: int, settings: ConvolutionSettings
    ) -> None:
        super().__init__()
        self.input_layernorm = plain.input_layernorm
        self.self_attn = plain.self_attn
        self.post_attention_layernorm = plain.post_attention_layernorm
        self.mlp = plain.mlp
        self.attention_conv = GroupedConvolution(hidden_size, settings)
        self.mlp_conv = GroupedConvolution(hidden_size, settings)
        self._flat: FlatLayer | None = None
        self._native: NativeLayer | None = None
        self._fused: FusedLayer | None = None

    @property
    def fused(self) -> FusedLayer | None:
        """Its fused form, for `FusedRows` and a `PagedAttend`."""
        return self._fused

    @property
    def native_call(self) -> LayerCall | None:
        """As that of `DecoderLayer`."""
        is_heard = self._forward_hooks or self._forward_pre_hooks or "forward" in self.__dict__
        return None if self._native is None or is_heard else self._native.whole

    def set_mode(self, mode: LinearMode) -> None:
        """Take the form of the mode where there is one; the parts have their arithmetic already."""
        self._fused = self._fused_form() if mode == "fused" else None
        self._native = self._native_form() if mode in NATIVE_MODES else None
        self._flat, flat = None, None
        around_attention, around_mlp = self.attention_conv.flat(), self.mlp_conv.flat()
        if mode == "packed" and isinstance(self.self_attn, SelfAttention):
            flat = flatten(self.input_layernorm, self.self_attn, self.post_attention_layernorm, self.mlp)
        if flat is not None and around_attention is not None and around_mlp is not None:
            self._flat = flat._replace(attention_convolution=around_attention, mlp_convolution=around_mlp)

    def _fused_form(self) -> FusedLayer | None:
        if not isinstance(self.self_attn, SelfAttention):
            return None
        fused = fuse(self.input_layernorm, self.self_attn, self.post_attention_layernorm, self.mlp)
        if fused is None:
            return None
        around_attention, around_mlp = self.attention_conv.fused(), self.mlp_conv.fused()
        return fused._replace(attention_convolution=around_attention, mlp_convolution=around_mlp)

    def _native_form(self) -> NativeLayer | None:
        around_attention, around_mlp = self.attention_conv.native(), self.mlp_conv.native()
        if around_attention is None or around_mlp is None or not isinstance(self.self_attn, SelfAttention):
            return None
        parts = self.input_layernorm, self.self_attn, self.post_attention_layernorm, self.mlp
        return native_layer(*parts, (around_attention, around_mlp))

    def forward(
        self,
        x_BTD: Tensor,
        rows: RotaryRows | FusedRows,
        attend: Attend,
        layer: int,
        *,
        is_neox_style: bool = True,
        offset_R: Tensor | None = None,
    ) -> Tensor:
        """Return the residual stream after this layer.

        Args:
            x_BTD: rows of whole blocks.
            rows: positions.
            attend: attention.
            layer: its index.
            is_neox_style: the pairing of turned channels.
            offset_R: int64, each flat row's index in its own block; None where each [B] row is one block.
        """
        if isinstance(rows, Tensor):
            assert self._fused is not None and isinstance(attend, PagedAttend), "the caller looked at `fused`"
            return run_fused(
                [self._fused],
                x_BTD,
                rows,
                attend,
                is_neox_style=is_neox_style,
                first_layer=layer,
                offset_R=offset_R,
            )
        if offset_R is None and x_BTD.shape[0] > 1:
            offset_R = torch.arange(x_BTD.shape[1], device=x_BTD.device).repeat(x_BTD.shape[0])
        if self._native is not None and is_neox_style:
            return run_native(self._native, x_BTD, rows, attend, layer, offset_R)
        if self._flat is not None and is_neox_style:
            return run_flat(self._flat, x_BTD, rows, attend, layer, offset_R)
        y, closing_RTG = self.attention_conv.prepare(self.input_layernorm(x_BTD), offset_R)
        y = self.self_attn(y, rows, attend, layer, is_neox_style=is_neox_style)
        x_BTD = x_BTD + self.attention_conv.finish(y, closing_RTG, offset_R)
        y, closing_RTG = self.mlp_conv.prepare(self.post_attention_layernorm(x_BTD), offset_R)
        return x_BTD + self.mlp_conv.finish(self.mlp(y), closing_RTG, offset_R)


def convolved_layer(contract: DrafterContract, layer: int) -> nn.Module:
    """The decoder layer of DFlash2, with plain or latent attention; `layer` makes no difference to it."""
    assert contract.convolution is not None, "the drafter's class refuses a contract without"
    plain = plain_layer(contract, layer) if contract.latent is None else latent_layer(contract, layer)
    assert isinstance(plain, DecoderLayer | LatentDecoderLayer)
    return ConvolvedLayer(plain, contract.hidden_size, contract.convolution)
