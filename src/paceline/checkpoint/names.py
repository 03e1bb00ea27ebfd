"""Weight names: which checkpoint tensor fills which rows of which module parameter, for each family.

Modules keep q, k, v in one `qkv_proj` and gate, up in one `gate_up_proj`; files keep them apart. One list of `Slot` per
family says both sides and the shape, so that loading, exporting and checking cannot drift from each other. Names are
built whole, never by replacing substrings: `up_proj` also occurs inside names of other families.

Drafter names here are those of the z-lab layout (no `model.` prefix); other layouts are renamed as they are read
(`dialects/`). Sources: Hugging Face Llama and Qwen3 checkpoints; z-lab, DeepSpec and K3 drafters.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from paceline.checkpoint.contract import (
    DrafterContract,
    Eagle3Settings,
    LatentAttentionSettings,
    TargetContract,
)
from paceline.checkpoint.weights import Destination


@dataclass(frozen=True)
class Slot:
    """One checkpoint tensor and the place that it fills."""

    name: str  # in the checkpoint
    parameter: str  # in the module
    shape: tuple[int, ...]  # of the checkpoint tensor
    first_row: int | None = None  # inside a fused parameter; None when the tensor is the whole parameter

    @property
    def destination(self) -> Destination:
        """The place as `weights.load_strict` takes it."""
        rows = None if self.first_row is None else (self.first_row, self.first_row + self.shape[0])
        return Destination(self.parameter, rows)


@dataclass(frozen=True)
class _DecoderShape:
    """The sizes that decide a decoder layer's tensors, the same for targets and drafters."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    has_qk_norm: bool
    attention_bias: bool
    mlp_bias: bool


def _fused(prefix: str, module: str, parts: list[tuple[str, int]], width: int, *, bias: bool) -> Iterator[Slot]:
    for kind in ("weight", "bias") if bias else ("weight",):
        first_row = 0
        for part, num_rows in parts:
            shape = (num_rows, width) if kind == "weight" else (num_rows,)
            yield Slot(f"{prefix}.{part}.{kind}", f"{prefix}.{module}.{kind}", shape, first_row)
            first_row += num_rows


def _whole(name: str, *shape: int) -> Slot:
    return Slot(name, name, shape)


def _decoder_layer(layer: int, sizes: _DecoderShape) -> Iterator[Slot]:
    prefix = f"layers.{layer}"
    width = sizes.hidden_size
    query_size, kv_size = sizes.num_heads * sizes.head_size, sizes.num_kv_heads * sizes.head_size
    yield _whole(f"{prefix}.input_layernorm.weight", width)
    qkv = [("q_proj", query_size), ("k_proj", kv_size), ("v_proj", kv_size)]
    yield from _fused(f"{prefix}.self_attn", "qkv_proj", qkv, width, bias=sizes.attention_bias)
    yield _whole(f"{prefix}.self_attn.o_proj.weight", width, query_size)
    if sizes.attention_bias:
        yield _whole(f"{prefix}.self_attn.o_proj.bias", width)
    if sizes.has_qk_norm:
        yield _whole(f"{prefix}.self_attn.q_norm.weight", sizes.head_size)
        yield _whole(f"{prefix}.self_attn.k_norm.weight", sizes.head_size)
    yield _whole(f"{prefix}.post_attention_layernorm.weight", width)
    gate_up = [("gate_proj", sizes.intermediate_size), ("up_proj", sizes.intermediate_size)]
    yield from _fused(f"{prefix}.mlp", "gate_up_proj", gate_up, width, bias=sizes.mlp_bias)
    yield _whole(f"{prefix}.mlp.down_proj.weight", width, sizes.intermediate_size)
    if sizes.mlp_bias:
        yield _whole(f"{prefix}.mlp.down_proj.bias", width)


def dense_target_slots(contract: TargetContract) -> list[Slot]:
    """Every tensor of a dense target, in file order.

    Args:
        contract: the target; its sizes give the shapes.
    Returns:
        One slot per checkpoint tensor that must exist. A tied target has no `lm_head.weight` among them.
    """
    sizes = _DecoderShape(
        hidden_size=contract.hidden_size,
        intermediate_size=contract.intermediate_size,
        num_heads=contract.num_heads,
        num_kv_heads=contract.num_kv_heads,
        head_size=contract.head_size,
        has_qk_norm=contract.has_qk_norm,
        attention_bias=contract.attention_bias,
        mlp_bias=contract.mlp_bias,
    )
    body = [_whole("embed_tokens.weight", contract.vocab_size, contract.hidden_size)]
    for layer in range(contract.num_layers):
        body.extend(_decoder_layer(layer, sizes))
    body.append(_whole("norm.weight", contract.hidden_size))
    slots = [Slot(f"model.{slot.name}", slot.parameter, slot.shape, slot.first_row) for slot in body]
    if not contract.tie_word_embeddings:
        slots.append(_whole("lm_head.weight", contract.vocab_size, contract.hidden_size))
    return slots


def dense_target_destinations(contract: TargetContract) -> dict[str, Destination]:
    """Checkpoint name to module place for a dense target (Llama, Qwen3).

    Args:
        contract: the target.
    Returns:
        One entry per tensor that the checkpoint must hold.
    """
    return {slot.name: slot.destination for slot in dense_target_slots(contract)}


def dense_target_ignored(contract: TargetContract) -> set[str]:
    """Names that a target file may hold although nothing reads them.

    Args:
        contract: the target.
    Returns:
        Rotary tables (old writers stored them; they follow from the config) and, for a tied target, the copy of the
        embedding that some writers store as `lm_head.weight`.
    """
    ignored = {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq" for layer in range(contract.num_layers)}
    ignored.add("model.rotary_emb.inv_freq")
    if contract.tie_word_embeddings:
        ignored.add("lm_head.weight")
    return ignored


def drafter_slots(contract: DrafterContract) -> list[Slot]:
    """Every floating-point tensor of a drafter, in file order.

    Args:
        contract: the drafter; its optional parts ask for tensors of their own.
    Returns:
        One slot per checkpoint tensor that must exist. The vocabulary tables `d2t` and `t2d` hold no parameters and are
        not among them; embedding and output head are only where the drafter brings its own.
    """
    slots = [_whole("fc.weight", contract.hidden_size, contract.num_taps * contract.target_hidden_size)]
    if contract.has_tap_norm:
        slots.extend(_whole(f"fc_norm.{tap}.weight", contract.target_hidden_size) for tap in range(contract.num_taps))
    if contract.eagle3 is not None:
        slots.extend(_eagle3_body(contract, contract.eagle3))
    else:
        slots.append(_whole("hidden_norm.weight", contract.hidden_size))
        for layer in range(contract.num_layers):
            slots.extend(_drafter_layer(layer, contract))
    slots.append(_whole("norm.weight", contract.hidden_size))
    slots.extend(_proposal_heads(contract))
    if contract.has_own_embedding:
        slots.append(_whole("embed_tokens.weight", contract.vocab_size, contract.hidden_size))
    if contract.has_own_head:
        slots.append(_whole("lm_head.weight", contract.draft_vocab_size, contract.hidden_size))
    return slots


def drafter_destinations(contract: DrafterContract) -> dict[str, Destination]:
    """Checkpoint name to module place for a drafter.

    Args:
        contract: the drafter.
    Returns:
        One entry per tensor that the checkpoint must hold.
    """
    return {slot.name: slot.destination for slot in drafter_slots(contract)}


def _decoder_shape(contract: DrafterContract) -> _DecoderShape:
    return _DecoderShape(
        hidden_size=contract.hidden_size,
        intermediate_size=contract.intermediate_size,
        num_heads=contract.num_heads,
        num_kv_heads=contract.num_kv_heads,
        head_size=contract.head_size,
        has_qk_norm=contract.has_qk_norm,
        attention_bias=contract.attention_bias,
        mlp_bias=False,
    )


def _drafter_layer(layer: int, contract: DrafterContract) -> Iterator[Slot]:
    prefix = f"layers.{layer}"
    body = list(_decoder_layer(layer, _decoder_shape(contract)))
    if contract.latent is not None:
        own = f"{prefix}.self_attn."
        body = [slot for slot in body if not slot.name.startswith(own)]
        body[1:1] = _latent_attention(f"{prefix}.self_attn", contract, contract.latent)
    yield from body
    if contract.has_attention_sink:
        yield _whole(f"{prefix}.self_attn.attention_sink_bias", contract.num_heads)
    if contract.convolution is not None:
        taps, width = contract.convolution.num_taps, contract.hidden_size
        num_groups = width // contract.convolution.group_size
        for around in ("attention_conv", "mlp_conv"):
            yield _whole(f"{prefix}.{around}.base_kernel", 2, taps, width)
            yield _whole(f"{prefix}.{around}.kernel_projection.weight", 2 * taps * num_groups, width)


def _latent_attention(prefix: str, contract: DrafterContract, latent: LatentAttentionSettings) -> Iterator[Slot]:
    width, heads = contract.hidden_size, contract.num_heads
    query_size = latent.qk_nope_head_size + latent.qk_rope_head_size
    yield _whole(f"{prefix}.q_a_proj.weight", latent.q_lora_rank, width)
    yield _whole(f"{prefix}.q_a_layernorm.weight", latent.q_lora_rank)
    yield _whole(f"{prefix}.q_b_proj.weight", heads * query_size, latent.q_lora_rank)
    yield _whole(f"{prefix}.kv_a_proj_with_mqa.weight", latent.latent_size, width)
    yield _whole(f"{prefix}.kv_a_layernorm.weight", latent.kv_lora_rank)
    kv_size = latent.qk_nope_head_size + latent.v_head_size
    yield _whole(f"{prefix}.kv_b_proj.weight", heads * kv_size, latent.kv_lora_rank)
    yield _whole(f"{prefix}.o_proj.weight", width, heads * latent.v_head_size)


def _eagle3_body(contract: DrafterContract, eagle3: Eagle3Settings) -> Iterator[Slot]:
    if eagle3.norm_before_fc:
        yield _whole("input_norm.weight", contract.num_taps * contract.target_hidden_size)
    sizes = _decoder_shape(contract)
    for layer in range(contract.num_layers):
        is_double = layer == 0 or eagle3.doubles_every_layer
        for slot in _decoder_layer(layer, sizes):
            is_wide = is_double and ".qkv_proj.weight" in slot.parameter
            shape = (slot.shape[0], 2 * contract.hidden_size) if is_wide else slot.shape
            yield Slot(slot.name, slot.parameter, shape, slot.first_row)
        if is_double:
            yield _whole(f"layers.{layer}.hidden_norm.weight", contract.hidden_size)


def _proposal_heads(contract: DrafterContract) -> Iterator[Slot]:
    width = contract.hidden_size
    if contract.selector is not None:
        rank = contract.selector.rank
        yield _whole("candidate_selector.predecessor_codebook", contract.vocab_size, rank)
        yield _whole("candidate_selector.successor_codebook", contract.vocab_size, rank)
        yield _whole("candidate_selector.hidden_projection.weight", rank, width)
    if contract.markov is not None:
        rank = contract.markov.rank
        yield _whole("markov_head.markov_w1.weight", contract.target_vocab_size, rank)
        yield _whole("markov_head.markov_w2.weight", contract.draft_vocab_size, rank)
        # vanilla heads have no projection; a gate reads [hidden, embedding], the recurrent one its state as well
        if contract.markov.kind == "gated":
            yield _whole("markov_head.gate_proj.weight", rank, width + rank)
            yield _whole("markov_head.gate_proj.bias", rank)
        elif contract.markov.kind == "rnn":
            yield _whole("markov_head.joint_proj.weight", 3 * rank, 2 * rank + width)
            yield _whole("markov_head.joint_proj.bias", 3 * rank)
    if contract.confidence is not None:
        with_markov = contract.confidence.with_markov and contract.markov is not None
        num_inputs = width + (contract.markov.rank if with_markov and contract.markov is not None else 0)
        yield _whole("confidence_head.proj.weight", 1, num_inputs)
        yield _whole("confidence_head.proj.bias", 1)
