"""The least time a token can take: the bytes that a step must read, over the bandwidth of this machine's memory.

Every decode step reads each weight once, whatever the number of rows, and the keys and values of the context. A step
with drafts also reads the drafter, its context and the output head a second time, and yields several tokens.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from paceline.models.layers import GatedMLP, Linear
from paceline.ops.native.rows import BFLOATS, NativeWeight

if TYPE_CHECKING:
    from paceline.models.loading import LoadedDrafter, LoadedTarget
    from paceline.models.targets.target import Target

_NUM_READS = 10


def read_bandwidth(num_bytes: int = 2**30) -> float:
    """Bytes per second of reading one large tensor with torch's threads; the best of ten reads."""
    tensor = torch.ones(num_bytes // 4)
    seconds = []
    for _ in range(_NUM_READS):
        began_s = time.perf_counter()
        tensor.sum()
        seconds.append(time.perf_counter() - began_s)
    return num_bytes / min(seconds)


def plain_step_bytes(target: LoadedTarget, context_length: float) -> float:
    """Bytes that one step of plain decoding reads."""
    model, contract = target.model, target.contract
    weights = _num_bytes(*model.parameters()) - _saved_by_codes(model)
    if not contract.tie_word_embeddings:
        weights -= _num_bytes(model.embed_tokens.weight)  # a few rows of it
    size = model.norm.weight.element_size()
    return weights + context_length * 2 * contract.num_layers * contract.num_kv_heads * contract.head_size * size


def speculative_step_bytes(
    target: LoadedTarget, drafter: LoadedDrafter, context_length: float, num_listed_ids: int | None = None
) -> float:
    """Bytes that one step with drafts reads: verification, then a draft through the target's head, or rows of it."""
    contract, weights = drafter.contract, list(drafter.model.parameters())
    size = weights[0].element_size()
    keys_and_values = context_length * 2 * contract.num_layers * contract.num_kv_heads * contract.head_size * size
    head = _num_bytes(target.model.lm_head.weight[:num_listed_ids])
    codes = codes_of(target.model.lm_head)
    if codes is not None:
        head = codes.panels.numel() * (num_listed_ids or codes.num_outputs) // codes.num_outputs
    own = _num_bytes(*weights) - _saved_by_codes(drafter.model)
    return plain_step_bytes(target, context_length) + own + head + keys_and_values


def _saved_by_codes(model: nn.Module | Target) -> int:
    """Bytes that products with codes read less than the same weights have in their dtype."""
    saved = 0
    for part in model.modules():
        codes = codes_of(part)
        if codes is not None:
            weight = part.gate_up_proj.weight if isinstance(part, GatedMLP) else part.weight
            saved += _num_bytes(weight) - codes.panels.numel()
    return saved


def codes_of(part: nn.Module) -> NativeWeight | None:
    """The codes that a part's product reads in place of its weight; None where it reads the weight."""
    form = part.native if isinstance(part, Linear) else part.native_gate_up if isinstance(part, GatedMLP) else None
    return form if form is not None and form.form != BFLOATS else None


def _num_bytes(*tensors: Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
