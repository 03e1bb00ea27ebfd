"""The least time that a step can take on a device: its bytes over what a copy reaches, its sums over what a large
product reaches, both measured on the spot.

Every group of products reads its weights once and computes every row: max(bytes / bandwidth, operations / rate).
Attention reads the keys of every request's context, logits are written once and read twice (by statistics and by the
choice), draft logits are written and read once. Nothing is counted for launches, norms, or partly filled tiles.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from paceline.checkpoint.contract import TargetContract
    from paceline.models.loading import LoadedDrafter, LoadedTarget

_ELEMENT_BYTES = 2  # of weights, keys and logits in bfloat16
_STATE_BYTES = 4  # of a recurrent state
_NUM_CALLS = 10


@dataclass(frozen=True)
class Ceilings:
    """What a device reaches.

    Attributes:
        bytes_per_s: read and written by a copy of a large tensor.
        operations_per_s: multiplications and additions of a large product in bfloat16, on random numbers.
    """

    bytes_per_s: float
    operations_per_s: float

    def phase_ms(self, num_parameters: float, num_rows: int) -> float:
        """A group of products: each weight is read once and meets every row."""
        return 1e3 * max(
            num_parameters * _ELEMENT_BYTES / self.bytes_per_s,
            2 * num_parameters * num_rows / self.operations_per_s,
        )

    def traffic_ms(self, num_bytes: float) -> float:
        """Bytes that have to pass."""
        return 1e3 * num_bytes / self.bytes_per_s


def measure_ceilings(device: torch.device) -> Ceilings:
    """Copy a tensor far larger than any cache and multiply large matrices; the best of ten of each."""
    import torch

    num_bytes, width = (2**31, 8192) if device.type == "cuda" else (2**20, 64)  # a CPU is for trials
    source = torch.ones(num_bytes // 4, device=device)
    copied = torch.empty_like(source)
    copy_s = _best_s(lambda: copied.copy_(source), device)
    a, b = (torch.randn(width, width, device=device, dtype=torch.bfloat16) for _ in range(2))
    product = torch.empty_like(a)
    product_s = _best_s(lambda: torch.mm(a, b, out=product), device)
    return Ceilings(2 * num_bytes / copy_s, 2 * width**3 / product_s)


def _best_s(call: Callable[[], object], device: torch.device) -> float:
    import torch

    seconds = []
    for _ in range(_NUM_CALLS):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began_s = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began_s)
    return min(seconds)


def step_floor_ms(
    target: LoadedTarget, drafter: LoadedDrafter | None, *, batch: int, context: float, ceilings: Ceilings
) -> float:
    """The floor of one step of the whole batch.

    Args:
        target: whose shape counts.
        drafter: its rows are verified, and a block of its own follows; None decodes plainly.
        batch: B.
        context: positions of each request, on average over the steps.
        ceilings: of the device.
    """
    rows = 1 if drafter is None else drafter.num_draft_tokens + 1
    floor = _verify_ms(target, batch * rows, batch=batch, context=context, ceilings=ceilings)
    if drafter is None:
        return floor
    contract, model = drafter.contract, drafter.model
    num_body = _num_parameters(model, "backbone.layers.")
    num_context = _num_parameters(model, "backbone.fc.") + _num_parameters(model, "backbone._stacked_kv.")
    num_drafts = batch * drafter.num_draft_tokens
    head = target.contract.vocab_size * contract.hidden_size
    key_bytes = 2 * contract.num_layers * contract.num_kv_heads * contract.head_size * _ELEMENT_BYTES
    return (
        floor
        + ceilings.phase_ms(num_body, batch * rows)
        + ceilings.phase_ms(num_context, batch * rows)
        + ceilings.phase_ms(head, num_drafts)
        + ceilings.traffic_ms(2 * num_drafts * contract.draft_vocab_size * _ELEMENT_BYTES)
        + ceilings.traffic_ms(batch * context * key_bytes)
    )


def _verify_ms(target: LoadedTarget, num_rows: int, *, batch: int, context: float, ceilings: Ceilings) -> float:
    contract = target.contract
    experts = sum(parameter.numel() for name, parameter in target.model.named_parameters() if ".experts." in name)
    body = _num_parameters(target.model, "layers.") - experts
    touched = 1.0
    computed = 0.0  # of the experts' parameters, what a row meets
    if contract.kimi is not None and contract.kimi.experts is not None:
        share = contract.kimi.experts.num_experts_per_token / contract.kimi.experts.num_experts
        touched, computed = 1 - (1 - share) ** num_rows, share
    expert_ms = 1e3 * max(
        experts * touched * _ELEMENT_BYTES / ceilings.bytes_per_s,
        2 * experts * computed * num_rows / ceilings.operations_per_s,
    )
    head = contract.vocab_size * contract.hidden_size
    return (
        ceilings.phase_ms(body, num_rows)
        + expert_ms
        + ceilings.phase_ms(head, num_rows)
        + ceilings.traffic_ms(3 * num_rows * contract.vocab_size * _ELEMENT_BYTES)
        + max(
            ceilings.traffic_ms(batch * context * _position_bytes(contract)),
            1e3 * num_rows * context * _position_operations(contract) / ceilings.operations_per_s,
        )
        + ceilings.traffic_ms(batch * _state_traffic_bytes(contract))
    )


def _num_parameters(model: Any, prefix: str) -> int:
    """Weights of the parts whose names begin so; what two parts share counts once."""
    return sum(parameter.numel() for name, parameter in model.named_parameters() if name.startswith(prefix))


def _position_bytes(contract: TargetContract) -> int:
    """What a cached position of all layers holds."""
    if contract.kimi is None:
        return 2 * contract.num_layers * contract.num_kv_heads * contract.head_size * _ELEMENT_BYTES
    return _num_latent_layers(contract) * contract.kimi.latent.latent_size * _ELEMENT_BYTES


def _position_operations(contract: TargetContract) -> int:
    """Multiplications and additions of one row with one cached position, in all layers."""
    if contract.kimi is None:
        return 4 * contract.num_layers * contract.num_heads * contract.head_size
    latent = contract.kimi.latent
    return 2 * _num_latent_layers(contract) * contract.num_heads * (2 * latent.kv_lora_rank + latent.qk_rope_head_size)


def _num_latent_layers(contract: TargetContract) -> int:
    assert contract.kimi is not None, "only these have latent layers"
    delta = contract.kimi.delta
    return contract.num_layers - (0 if delta is None else len(delta.layers))


def _state_traffic_bytes(contract: TargetContract) -> int:
    """Reading and writing one request's recurrent states once."""
    if contract.kimi is None or contract.kimi.delta is None:
        return 0
    delta = contract.kimi.delta
    return 2 * len(delta.layers) * delta.num_heads * delta.head_size**2 * _STATE_BYTES
