"""What a target and a drafter promise: plain, frozen records that every other package reads.

`dialects.py` turns config files into these records and back; nothing else reads config keys. Layer ids come in two
numberings, and confusing them costs acceptance without any error, so each has its own type:

* `TargetLayerId`: 0-based decoder layer whose *output* is tapped; -1 is the embedding. The z-lab dialect uses it.
* `CaptureId`: index into hidden states that start with the embedding: `TargetLayerId + 1`. Used inside the engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NewType

TargetLayerId = NewType("TargetLayerId", int)
CaptureId = NewType("CaptureId", int)

DrafterFamily = Literal["dflash"]
BlockLayout = Literal["fill_in", "anchor_sampling"]
AuxHiddenStream = Literal["prefix", "attn_res"]
DraftSampleMethod = Literal["greedy", "probabilistic"]
RopeKind = Literal["default", "linear", "llama3", "yarn"]


def capture_id(layer: TargetLayerId) -> CaptureId:
    """The capture id of a tapped layer's output: one more, since hidden state 0 is the embedding."""
    return CaptureId(layer + 1)


def target_layer_id(capture: CaptureId) -> TargetLayerId:
    """The layer whose output a capture id names; -1 for the embedding."""
    return TargetLayerId(capture - 1)


@dataclass(frozen=True)
class RopeSettings:
    """Rotary position parameters; fields past `theta` matter only to the kinds named beside them."""

    theta: float
    kind: RopeKind = "default"
    factor: float = 1.0  # linear, llama3, yarn
    original_max_position_embeddings: int | None = None  # llama3, yarn
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn; None means derived from factor and the two mscales
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn: whether the correction range is rounded to whole dimensions


@dataclass(frozen=True)
class TargetContract:
    """Everything the engine must know of a dense target (Llama or Qwen3 family)."""

    architecture: str  # key of models/targets/table.py
    name: str  # as given by the user, or the folder's name
    origin: str  # the path that was read
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    rms_norm_eps: float
    rope: RopeSettings
    max_position_embeddings: int
    has_qk_norm: bool
    attention_bias: bool
    mlp_bias: bool
    tie_word_embeddings: bool
    stop_token_ids: tuple[int, ...]
    bos_token_id: int | None
    dtype: str  # "bfloat16", "float16" or "float32", as stored


@dataclass(frozen=True)
class DrafterContract:
    """All that a drafter was trained on. A drafter is served exactly as this says, or refused."""

    family: DrafterFamily
    origin: str
    # the target it rides on
    target_name: str
    target_num_layers: int
    target_hidden_size: int
    target_vocab_size: int
    # taps
    target_layer_ids: tuple[TargetLayerId, ...]
    aux_hidden_stream: AuxHiddenStream
    has_tap_norm: bool  # one RMSNorm per tap before `fc` (`fc_norm.{t}.weight`)
    # block
    block_size: int  # rows of one drafter pass, anchor included
    layout: BlockLayout
    mask_token_id: int
    # vocabulary
    vocab_size: int
    draft_vocab_size: int
    # network
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    rms_norm_eps: float
    attention_bias: bool
    rope: RopeSettings
    is_neox_style: bool
    max_position_embeddings: int
    layer_windows: tuple[int | None, ...]  # tokens a layer may see, the query included; None is all
    layer_causal: tuple[bool, ...]  # whether rows of a block see only earlier rows
    input_embedding_scale: float
    output_multiplier: float
    final_logit_softcapping: float | None
    # proposal
    draft_sample_method: DraftSampleMethod
    dtype: str

    @property
    def num_draft_tokens(self) -> int:
        """Proposals per step at full block size."""
        return self.block_size - 1 if self.layout == "fill_in" else self.block_size

    @property
    def num_taps(self) -> int:
        """Number of tapped target layers."""
        return len(self.target_layer_ids)
