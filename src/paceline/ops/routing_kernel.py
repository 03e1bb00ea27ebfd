"""The kernel of `mixture_of_experts.route`: one program reads a row's logits and finds its experts one after the other.

Equal scores go to the lower id. A row with NaN among its logits gets experts, any of them, and weights of NaN.
T rows, E experts, A chosen per row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.ops.dispatch import kernel, tl, triton


@kernel
def _route_kernel(
    logits_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    num_experts: tl.tensor,
    scaling_factor: tl.tensor,
    smallest_sum: tl.tensor,
    HAS_BIAS: tl.constexpr,
    IS_SIGMOID: tl.constexpr,
    IS_RENORMALISED: tl.constexpr,
    CHOSEN: tl.constexpr,
    SLOTS: tl.constexpr,
    EXPERTS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    expert, slot = tl.arange(0, EXPERTS), tl.arange(0, SLOTS)
    exists = expert < num_experts
    logits = tl.load(logits_ptr + row * num_experts + expert, mask=exists, other=float("-inf"))
    has_nan = tl.max((logits != logits).to(tl.int32), axis=0) > 0
    if IS_SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-logits))
    else:
        scores = tl.exp(logits - tl.max(logits, axis=0))
        scores = scores / tl.sum(scores, axis=0)
    choice = scores
    if HAS_BIAS:
        choice += tl.load(bias_ptr + expert, mask=exists, other=0.0)
    # Below every score, and above what is taken: each expert is chosen once, also where numbers are bad.
    choice = tl.where(exists, tl.where(choice == choice, choice, -1.0e38), float("-inf"))
    ids = tl.zeros([SLOTS], dtype=tl.int64)
    weights = tl.zeros([SLOTS], dtype=tl.float32)
    for turn in tl.static_range(CHOSEN):
        best = tl.max(choice, axis=0)
        chosen = tl.min(tl.where(choice == best, expert, EXPERTS), axis=0)
        weight = tl.sum(tl.where(expert == chosen, scores, 0.0), axis=0)
        ids = tl.where(slot == turn, chosen.to(tl.int64), ids)
        weights = tl.where(slot == turn, weight, weights)
        choice = tl.where(expert == chosen, float("-inf"), choice)
    if IS_RENORMALISED:
        weights = weights / (tl.sum(weights, axis=0) + smallest_sum)
    weights = tl.where(has_nan, float("nan"), weights * scaling_factor)
    tl.store(ids_ptr + row * CHOSEN + slot, ids, mask=slot < CHOSEN)
    tl.store(weights_ptr + row * CHOSEN + slot, weights, mask=slot < CHOSEN)


def route_triton(
    logits_TE: Tensor,
    correction_bias_E: Tensor | None,
    num_chosen: int,
    *,
    is_sigmoid: bool,
    is_renormalised: bool,
    scaling_factor: float,
    smallest_sum: float,
) -> tuple[Tensor, Tensor]:
    """Launch one program per row.

    Args:
        logits_TE: float32.
        correction_bias_E: float32, added for the choice alone; None for none.
        num_chosen: A; all experts are one group.
        is_sigmoid: how logits become scores; else by softmax.
        is_renormalised: weights are divided by their sum.
        scaling_factor: of the weights.
        smallest_sum: added to the sum.
    Returns:
        int64 ids and float32 weights, [T, A], best first.
    """
    num_rows, num_experts = logits_TE.shape
    ids_TA = torch.empty(num_rows, num_chosen, dtype=torch.int64, device=logits_TE.device)
    weights_TA = torch.empty(num_rows, num_chosen, dtype=torch.float32, device=logits_TE.device)
    with torch.cuda.device_of(logits_TE):
        _route_kernel[(num_rows,)](
            logits_TE.contiguous(),
            logits_TE if correction_bias_E is None else correction_bias_E.contiguous(),
            ids_TA,
            weights_TA,
            num_experts,
            float(scaling_factor),
            smallest_sum,
            HAS_BIAS=correction_bias_E is not None,
            IS_SIGMOID=is_sigmoid,
            IS_RENORMALISED=is_renormalised,
            CHOSEN=num_chosen,
            SLOTS=triton.next_power_of_2(num_chosen),
            EXPERTS=triton.next_power_of_2(num_experts),
        )
    return ids_TA, weights_TA
