"""What is chosen from scores in bf16 on a CPU: the k best, and a walk through a draft block's candidates.

Each gives what the operation of its name elsewhere in `ops` gives, in one call of the native library: torch takes one
number after the other in 16 bits, and dozens of operations for a walk.

B requests, K positions, C candidates, R ranks, V scores.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from paceline.ops.dispatch import needs_gradient
from paceline.ops.native.build import loaded_library
from paceline.ops.native.rows import can_run, flat_rows

MOST_KEPT: Final = 64  # of the C file


def can_find_top_k(x_RV: Tensor, k: int) -> bool:
    """Whether `top_k` takes these scores."""
    return k <= MOST_KEPT and can_run(x_RV) and not needs_gradient(x_RV)


def top_k(x_RV: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """`top_k_tokens`: values [..., k] descending and int64 ids, equal values by ascending id; k is at most V."""
    rows = flat_rows(x_RV, x_RV.shape[-1])
    values = torch.empty(*x_RV.shape[:-1], k, dtype=torch.bfloat16)
    indices = torch.empty(*x_RV.shape[:-1], k, dtype=torch.int64)
    loaded_library().paceline_top_k(
        rows.data_ptr(),
        rows.stride(0),
        values.data_ptr(),
        indices.data_ptr(),
        rows.shape[0],
        rows.shape[1],
        k,
        torch.get_num_threads(),
    )
    return values, indices


def can_walk(*tensors: Tensor) -> bool:
    """Whether `walk` takes scores, projected rows and codebooks of these dtypes."""
    return all(can_run(tensor) for tensor in tensors) and not needs_gradient(*tensors)


def walk(
    unary_BKC: Tensor,
    candidate_ids_BKC: Tensor,
    projected_BKR: Tensor,
    predecessor_VR: Tensor,
    successor_VR: Tensor,
    anchor_ids_B: Tensor,
) -> tuple[Tensor, Tensor]:
    """`candidate_walk` of greedy requests; scores are float32 sums in another order."""
    given = (unary_BKC, candidate_ids_BKC, projected_BKR, predecessor_VR, successor_VR, anchor_ids_B)
    dense = [tensor.contiguous() for tensor in given]
    ids_BK = torch.empty(unary_BKC.shape[:2], dtype=torch.int64)
    scores_BKC = torch.empty(unary_BKC.shape, dtype=torch.float32)
    loaded_library().paceline_walk(
        *(tensor.data_ptr() for tensor in dense),
        ids_BK.data_ptr(),
        scores_BKC.data_ptr(),
        *unary_BKC.shape,
        predecessor_VR.shape[1],
        torch.get_num_threads(),
    )
    return ids_BK, scores_BKC
