"""Weight names of Kimi targets: which checkpoint tensor fills which rows of which module parameter.

Names here are those of published files. `kimi_tensors.py` presents every file under them, with one shape per tensor,
whatever variant of prefix and storage it has. Layers of multi-token prediction stand behind the target's own and are
passed over by number.

Source: tensor inventories of Kimi-Linear-48B-A3B and Kimi-K3.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from paceline.checkpoint.contract import TargetContract
from paceline.checkpoint.kimi_contract import DeltaAttentionSettings, ExpertSettings, KimiSettings, VisionSettings
from paceline.checkpoint.names import Slot

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def text_prefix(contract: TargetContract) -> str:
    """What stands before the names of the text model's body."""
    return "model." if _kimi(contract).vision is None else "language_model.model."


def head_name(contract: TargetContract) -> str:
    """The output head."""
    return "lm_head.weight" if _kimi(contract).vision is None else "language_model.lm_head.weight"


def boundary_names(contract: TargetContract, layer: int) -> tuple[str, str]:
    """The two vectors that a stage of a pipeline copies from the layer behind it."""
    prefix = f"{text_prefix(contract)}layers.{layer}.self_attention_res"
    return f"{prefix}_norm.weight", f"{prefix}_proj.weight"


def kimi_text_slots(contract: TargetContract) -> list[Slot]:
    """Every tensor of the text model, in file order.

    Args:
        contract: with `kimi` set.
    Returns:
        One slot per checkpoint tensor that must exist; parameters are named as in `KimiTarget` and its stages.
    """
    kimi, width, prefix = _kimi(contract), contract.hidden_size, text_prefix(contract)
    body = [_whole("embed_tokens.weight", contract.vocab_size, width)]
    for layer in range(contract.num_layers):
        body.extend(_layer(layer, contract, kimi))
    body.append(_whole("norm.weight", width))
    if kimi.residual_block_size is not None:
        body.extend(_scores("output_attn_res", "output_attn_res", width))
    slots = [Slot(f"{prefix}{slot.name}", slot.parameter, slot.shape, slot.first_row) for slot in body]
    slots.append(Slot(head_name(contract), "lm_head.weight", (contract.vocab_size, width)))
    return slots


def kimi_slots(contract: TargetContract) -> list[Slot]:
    """Every tensor of a target; of a multimodal one, the text model's parameters stand under its name."""
    slots, vision = kimi_text_slots(contract), _kimi(contract).vision
    if vision is None:
        return slots
    inner = [Slot(slot.name, f"language_model.{slot.parameter}", slot.shape, slot.first_row) for slot in slots]
    return [*inner, *_vision(vision, contract.hidden_size)]


def mtp_names(contract: TargetContract, names: Iterable[str]) -> set[str]:
    """Those of a file's names that belong to its layers of multi-token prediction."""
    first = contract.num_layers
    beyond = range(first, first + _kimi(contract).num_mtp_layers)
    found = ((name, _LAYER.search(name)) for name in names)
    return {name for name, match in found if match is not None and int(match[1]) in beyond}


def _kimi(contract: TargetContract) -> KimiSettings:
    assert contract.kimi is not None, "the caller chooses by this field"
    return contract.kimi


def _whole(name: str, *shape: int) -> Slot:
    return Slot(name, name, shape)


def _scores(name: str, parameter: str, width: int) -> Iterator[Slot]:
    yield Slot(f"{name}_norm.weight", f"{parameter}.norm", (width,))
    yield Slot(f"{name}_proj.weight", f"{parameter}.proj", (1, width))


def _layer(layer: int, contract: TargetContract, kimi: KimiSettings) -> Iterator[Slot]:
    prefix, width = f"layers.{layer}", contract.hidden_size
    yield _whole(f"{prefix}.input_layernorm.weight", width)
    if kimi.delta is not None and kimi.has_delta(layer):
        yield from _delta_attention(f"{prefix}.self_attn", width, kimi.delta)
    else:
        yield from _latent_attention(f"{prefix}.self_attn", contract, kimi)
    yield _whole(f"{prefix}.post_attention_layernorm.weight", width)
    if kimi.experts is not None and kimi.experts.has_experts(layer):
        yield from _mixture(f"{prefix}.block_sparse_moe", f"{prefix}.mlp", width, kimi.experts)
    else:
        yield from _mlp(f"{prefix}.mlp", f"{prefix}.mlp", width, contract.intermediate_size)
    if kimi.residual_block_size is not None:
        yield from _scores(f"{prefix}.self_attention_res", f"{prefix}.self_attention_res", width)
        yield from _scores(f"{prefix}.mlp_res", f"{prefix}.mlp_res", width)


def _delta_attention(prefix: str, width: int, delta: DeltaAttentionSettings) -> Iterator[Slot]:
    size, heads, rank = delta.projection_size, delta.num_heads, delta.head_size
    for index, part in enumerate("qkv"):
        yield Slot(f"{prefix}.{part}_proj.weight", f"{prefix}.qkv_proj.weight", (size, width), index * size)
    for index, part in enumerate("qkv"):
        shape = (size, delta.convolution_size)
        yield Slot(f"{prefix}.{part}_conv1d.weight", f"{prefix}.convolution.weight", shape, index * size)
    yield Slot(f"{prefix}.f_a_proj.weight", f"{prefix}.f_proj.a.weight", (rank, width))
    yield Slot(f"{prefix}.f_b_proj.weight", f"{prefix}.f_proj.b.weight", (size, rank))
    yield _whole(f"{prefix}.b_proj.weight", heads, width)
    yield Slot(f"{prefix}.A_log", f"{prefix}.decay.A_log", (heads,))
    yield Slot(f"{prefix}.dt_bias", f"{prefix}.decay.dt_bias", (size,))
    if delta.has_full_rank_gate:
        yield _whole(f"{prefix}.g_proj.weight", size, width)
    else:
        yield Slot(f"{prefix}.g_a_proj.weight", f"{prefix}.g_proj.a.weight", (rank, width))
        yield Slot(f"{prefix}.g_b_proj.weight", f"{prefix}.g_proj.b.weight", (size, rank))
    yield _whole(f"{prefix}.o_norm.weight", rank)
    yield _whole(f"{prefix}.o_proj.weight", width, size)


def _latent_attention(prefix: str, contract: TargetContract, kimi: KimiSettings) -> Iterator[Slot]:
    latent, width, heads = kimi.latent, contract.hidden_size, contract.num_heads
    if latent.q_lora_rank is None:
        yield _whole(f"{prefix}.q_proj.weight", heads * latent.query_size, width)
    else:
        yield _whole(f"{prefix}.q_a_proj.weight", latent.q_lora_rank, width)
        yield _whole(f"{prefix}.q_a_layernorm.weight", latent.q_lora_rank)
        yield _whole(f"{prefix}.q_b_proj.weight", heads * latent.query_size, latent.q_lora_rank)
    yield _whole(f"{prefix}.kv_a_proj_with_mqa.weight", latent.latent_size, width)
    yield _whole(f"{prefix}.kv_a_layernorm.weight", latent.kv_lora_rank)
    expanded = heads * (latent.qk_nope_head_size + latent.v_head_size)
    yield _whole(f"{prefix}.kv_b_proj.weight", expanded, latent.kv_lora_rank)
    if latent.has_output_gate:
        yield _whole(f"{prefix}.g_proj.weight", heads * latent.v_head_size, width)
    yield _whole(f"{prefix}.o_proj.weight", width, heads * latent.v_head_size)


def _mlp(name: str, parameter: str, width: int, inner: int) -> Iterator[Slot]:
    for index, part in enumerate(("gate_proj", "up_proj")):
        yield Slot(f"{name}.{part}.weight", f"{parameter}.gate_up_proj.weight", (inner, width), index * inner)
    yield Slot(f"{name}.down_proj.weight", f"{parameter}.down_proj.weight", (width, inner))


def _mixture(name: str, parameter: str, width: int, experts: ExpertSettings) -> Iterator[Slot]:
    inner, outer = experts.intermediate_size, experts.latent_size or width
    yield Slot(f"{name}.gate.weight", f"{parameter}.gate.weight", (experts.num_experts, width))
    bias = f"{parameter}.gate.correction_bias"
    yield Slot(f"{name}.gate.e_score_correction_bias", bias, (experts.num_experts,))
    if experts.latent_size is not None:
        down = "routed_expert_down_proj.weight"
        yield Slot(f"{name}.{down}", f"{parameter}.{down}", (outer, width))
        if experts.has_latent_norm:
            norm = "routed_expert_norm.weight"
            yield Slot(f"{name}.{norm}", f"{parameter}.{norm}", (outer,))
        up = "routed_expert_up_proj.weight"
        yield Slot(f"{name}.{up}", f"{parameter}.{up}", (width, outer))
    for expert in range(experts.num_experts):
        stem, first = f"{name}.experts.{expert}", 2 * inner * expert
        yield Slot(f"{stem}.w1.weight", f"{parameter}.experts.gate_up", (inner, outer), first)
        yield Slot(f"{stem}.w3.weight", f"{parameter}.experts.gate_up", (inner, outer), first + inner)
        yield Slot(f"{stem}.w2.weight", f"{parameter}.experts.down", (outer, inner), outer * expert)
    if experts.num_shared_experts:
        shared = experts.num_shared_experts * inner
        yield from _mlp(f"{name}.shared_experts", f"{parameter}.shared_experts", width, shared)


def _vision(vision: VisionSettings, text_width: int) -> Iterator[Slot]:
    width, tower = vision.hidden_size, "vision_tower"
    yield _whole(f"{tower}.patch_embed.proj.weight", width, 3, vision.patch_size, vision.patch_size)
    if vision.has_patch_bias:
        yield _whole(f"{tower}.patch_embed.proj.bias", width)
    yield Slot(f"{tower}.patch_embed.pos_emb.weight", f"{tower}.patch_embed.grid", (*vision.grid[:2], width))
    for layer in range(vision.num_layers):
        prefix = f"{tower}.encoder.blocks.{layer}"
        yield Slot(f"{prefix}.norm0.weight", f"{tower}.blocks.{layer}.norm0.weight", (width,))
        yield Slot(f"{prefix}.norm1.weight", f"{tower}.blocks.{layer}.norm1.weight", (width,))
        inner, outer = vision.projection_size, vision.intermediate_size
        for name, rows, columns, has_bias in (
            ("wqkv", 3 * inner, width, vision.has_attention_bias),
            ("wo", width, inner, vision.has_attention_bias),
            ("mlp.fc0", outer, width, vision.has_linear_bias),
            ("mlp.fc1", width, outer, vision.has_linear_bias),
        ):
            own = f"{tower}.blocks.{layer}.{name.rpartition('.')[2]}"
            yield Slot(f"{prefix}.{name}.weight", f"{own}.weight", (rows, columns))
            if has_bias:
                yield Slot(f"{prefix}.{name}.bias", f"{own}.bias", (rows,))
    yield Slot(f"{tower}.encoder.final_layernorm.weight", f"{tower}.final_layernorm.weight", (width,))
    merged = width * vision.merge_size[0] * vision.merge_size[1]
    yield Slot("mm_projector.proj.0.weight", "mm_projector.linear_1.weight", (merged, merged))
    yield Slot("mm_projector.proj.2.weight", "mm_projector.linear_2.weight", (text_width, merged))
    yield Slot("mm_projector.post_norm.weight", "mm_projector.post_norm.weight", (text_width,))
