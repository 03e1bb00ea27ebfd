"""What a target and a drafter promise: plain, frozen records that every other package reads.

`dialects/` turns config files into these records and back; nothing else reads config keys. Layer ids come in two
numberings, and confusing them costs acceptance without any error, so each has its own type:

* `TargetLayerId`: 0-based decoder layer whose *output* is tapped; -1 is the embedding. The z-lab dialect uses it.
* `CaptureId`: index into hidden states that start with the embedding: `TargetLayerId + 1`. Used inside the engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NewType

from paceline.checkpoint.kimi_contract import KimiSettings

TargetLayerId = NewType("TargetLayerId", int)
CaptureId = NewType("CaptureId", int)

DrafterFamily = Literal["dflash", "dflash2", "dspark", "eagle3"]
# fill_in: row 0 is the anchor, row k predicts its own position; anchor_sampling: row k predicts the position after it;
# autoregressive: one row per pass, as in EAGLE-3
BlockLayout = Literal["fill_in", "anchor_sampling", "autoregressive"]
MarkovKind = Literal["vanilla", "gated", "rnn"]
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
    """Everything the engine must know of a target: sizes of a dense one (Llama or Qwen3 family), and what Kimi adds."""

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
    # Kimi-Linear and Kimi-K3; then head_size and rope are only what a drafter of this target would take over
    kimi: KimiSettings | None = None

    @property
    def aux_hidden_streams(self) -> frozenset[AuxHiddenStream]:
        """The streams that can be tapped; attention residuals make two of the residual stream's one."""
        has_blocks = self.kimi is not None and self.kimi.residual_block_size is not None
        return frozenset({"prefix", "attn_res"}) if has_blocks else frozenset({"prefix"})


@dataclass(frozen=True)
class ConvolutionSettings:
    """DFlash2's convolution around attention and MLP: rows look back inside their own block."""

    num_taps: int  # rows that an output row reads, itself included (`conv_kernel_size`)
    group_size: int  # channels that share one dynamic coefficient


@dataclass(frozen=True)
class SelectorSettings:
    """DFlash2's candidate selector: learned scores between neighbouring candidates."""

    rank: int  # width of both codebooks
    top_k: int  # candidates per position


@dataclass(frozen=True)
class MarkovSettings:
    """DSpark's bias on the next row's logits from the token that was just drawn; no settings at all for rank 0."""

    rank: int
    kind: MarkovKind


@dataclass(frozen=True)
class ConfidenceSettings:
    """DSpark's estimate of each row's acceptance."""

    with_markov: bool  # whether it also reads the previous token's Markov embedding


@dataclass(frozen=True)
class LatentAttentionSettings:
    """Multi-head latent attention of a drafter (K3): the context keeps one latent row per position."""

    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_size: int
    qk_rope_head_size: int
    v_head_size: int

    @property
    def latent_size(self) -> int:
        """Width of a cached row: the normed latent and the turned positional key."""
        return self.kv_lora_rank + self.qk_rope_head_size


@dataclass(frozen=True)
class Eagle3Settings:
    """EAGLE-3's switches; writers disagree on their defaults, so all are explicit here."""

    norm_before_residual: bool  # layer 0's residual is the normed hidden state
    norm_before_fc: bool  # one norm over the concatenated taps (`input_norm.weight`)
    norm_output: bool  # the state fed to the next draft step is the one after the final norm
    doubles_every_layer: bool  # every layer reads [embedding, hidden], not only the first (DeepSpec)


@dataclass(frozen=True)
class DrafterContract:
    """All that a drafter was trained on. A drafter is served exactly as this says, or refused.

    The fields below `dtype` belong to some families only; None or False means the part does not exist.
    """

    family: DrafterFamily
    origin: str
    # the target it rides on; a size is 0 where the file does not say, until `complete_contract` has seen the target
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
    # parts of some families
    convolution: ConvolutionSettings | None = None  # dflash2
    selector: SelectorSettings | None = None  # dflash2
    markov: MarkovSettings | None = None  # dspark
    confidence: ConfidenceSettings | None = None  # dspark
    draft_top_k: int | None = None  # dspark: the Markov bias reorders only the best k base logits, the rest is -inf
    latent: LatentAttentionSettings | None = None  # K3: replaces num_kv_heads and head_size
    eagle3: Eagle3Settings | None = None
    # parts of the shared network that few drafters have
    has_qk_norm: bool = True  # EAGLE-3 of the Llama flavour has none
    has_attention_sink: bool = False  # one learned logit per head and layer in the softmax's denominator
    attention_value_scale: float = 1.0
    # what the folder brings along; the target lends what it does not
    has_own_embedding: bool = False
    has_own_head: bool = False
    has_mask_embedding: bool = False  # `mask_embedding.pt` replaces the embedding row of the mask token
    quantization: str | None = None  # scheme of the stored weights, for the record; they are dequantised as read

    @property
    def num_draft_tokens(self) -> int:
        """Proposals per step at full block size."""
        return self.block_size if self.layout == "anchor_sampling" else self.block_size - 1

    @property
    def first_predicted_row(self) -> int:
        """The first row of a block whose output is sampled: the anchor's own row predicts in anchor_sampling only."""
        return 0 if self.layout == "anchor_sampling" else 1

    @property
    def has_vocabulary_map(self) -> bool:
        """Whether draft ids are not target ids, so that a `d2t` table is part of the weights."""
        return self.draft_vocab_size != self.target_vocab_size

    @property
    def has_full_attention_only(self) -> bool:
        """Whether no layer has a window and none is causal."""
        return not any(self.layer_causal) and all(window is None for window in self.layer_windows)

    @property
    def rotary_size(self) -> int:
        """Channels that a position turns: a whole head, or the positional part of a latent row."""
        return self.latent.qk_rope_head_size if self.latent is not None else self.head_size

    @property
    def num_taps(self) -> int:
        """Number of tapped target layers."""
        return len(self.target_layer_ids)
