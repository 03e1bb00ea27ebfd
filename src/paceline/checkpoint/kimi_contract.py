"""What a Kimi target has beyond a dense one: delta attention, latent attention, experts, residual blocks, images.

Sizes are in the words of this package; `kimi_config.py` says which config key each comes from. Layer numbers here are
0-based; the files count layers of `linear_attn_config` from 1.

Source: config files of Kimi-Linear and Kimi-K3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Activation = Literal["silu", "situ"]
RouterScores = Literal["sigmoid", "softmax"]


@dataclass(frozen=True)
class DeltaAttentionSettings:
    """Kimi delta attention (KDA): a recurrent state per head instead of a cache."""

    layers: tuple[int, ...]  # 0-based; every other layer has latent attention
    num_heads: int
    head_size: int  # of keys and values alike
    convolution_size: int  # rows that the short causal convolution reads, the row itself included
    has_full_rank_gate: bool  # output gate from one matrix; else from two of rank head_size
    gate_lower_bound: float | None  # log-decay is bound * sigmoid(...) instead of -softplus(...)

    @property
    def projection_size(self) -> int:
        """Width of all queries, of all keys and of all values."""
        return self.num_heads * self.head_size


@dataclass(frozen=True)
class NopeLatentSettings:
    """Multi-head latent attention without positions (MLA): one cached row per token serves all heads."""

    q_lora_rank: int | None  # None: queries come from one matrix
    kv_lora_rank: int
    qk_nope_head_size: int
    qk_rope_head_size: int  # channels of a key that all heads share; nothing turns them
    v_head_size: int
    has_output_gate: bool
    norm_eps: float  # of the two norms on latents; writers disagree whether it is the model's

    @property
    def query_size(self) -> int:
        """Width of one head's query, which also scales the scores."""
        return self.qk_nope_head_size + self.qk_rope_head_size

    @property
    def latent_size(self) -> int:
        """Width of a cached row."""
        return self.kv_lora_rank + self.qk_rope_head_size


@dataclass(frozen=True)
class ExpertSettings:
    """A mixture of experts in place of the MLP, in some layers."""

    num_experts: int
    num_experts_per_token: int
    intermediate_size: int  # of one expert
    num_shared_experts: int  # 0: no shared path
    latent_size: int | None  # experts work at this width between two projections; None: at the model's
    has_latent_norm: bool
    scores: RouterScores
    renormalises: bool  # weights of the chosen experts sum to 1 before scaling
    scaling_factor: float
    num_groups: int
    num_groups_kept: int
    first_layer: int
    layer_step: int

    def has_experts(self, layer: int) -> bool:
        """Whether a layer is a mixture."""
        return layer >= self.first_layer and layer % self.layer_step == 0


@dataclass(frozen=True)
class VisionSettings:
    """The vision tower and the projector of the multimodal model."""

    patch_size: int
    merge_size: tuple[int, int]  # patches, down and across, that become one token
    hidden_size: int
    num_layers: int
    num_heads: int
    projection_size: int  # width of all queries, of all keys and of all values
    intermediate_size: int
    grid: tuple[int, int, int]  # learned positions: height, width, time
    has_attention_bias: bool
    has_linear_bias: bool
    has_patch_bias: bool
    norm_eps: float
    projector_eps: float
    media_token_id: int  # the placeholder that an image's rows take the place of


@dataclass(frozen=True)
class KimiSettings:
    """All that `TargetContract` has no field for."""

    latent: NopeLatentSettings
    delta: DeltaAttentionSettings | None  # None: latent attention everywhere
    experts: ExpertSettings | None  # None: dense everywhere
    activation: Activation  # of MLPs and experts; the short convolution has SiLU whatever this is
    situ_beta: float
    situ_linear_beta: float | None
    residual_block_size: int | None  # decoder layers per block of attention residuals; None: an ordinary residual
    logit_scale: float
    num_mtp_layers: int  # extra layers in the file, which the target itself does not run
    vision: VisionSettings | None = None

    def has_delta(self, layer: int) -> bool:
        """Whether a layer has delta attention, else latent attention."""
        return self.delta is not None and layer in self.delta.layers
