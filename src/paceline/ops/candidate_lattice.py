"""Parts of two published heads that score a block's candidates jointly; folders with these heads are refused by name.

XPress mixes the rows of a block, channel by channel, with a triangle that is learnt beside the identity:

    x <- (tril(L) + I) x,      L [C, Q, Q]

LiLiCorr attends over a lattice of K candidates for each of S slots. What it knows of candidate k of a slot is

    [lp, exp(lp), lp - max lp, rank / (K - 1), rank == 0],      lp = log-softmax over the whole vocabulary, at k

and its attention scores gain, for head n of a block trained with Q rows,

    relative[n, slot_q - slot_k + Q - 1] + same[n] * [slot_q == slot_k]

Source: both heads as their public checkpoints have them. B requests, Q block rows, C channels, S slots, K candidates of
a slot, N heads, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.errors import ShapeError

NUM_FEATURES = 5


def fold_mixer(raw_CQQ: Tensor) -> Tensor:
    """The matrix that a stored mixer stands for: what lies above its diagonal is not part of it, and 1 is added on it.

    Args:
        raw_CQQ: float, one matrix per channel; any leading dimensions.
    Raises:
        ShapeError: the matrices are not square.
    """
    if raw_CQQ.dim() < 2 or raw_CQQ.shape[-1] != raw_CQQ.shape[-2]:
        raise ShapeError("mixer", expected="[..., Q, Q]", found=raw_CQQ.shape)
    return raw_CQQ.tril() + torch.eye(raw_CQQ.shape[-1], dtype=raw_CQQ.dtype, device=raw_CQQ.device)


def mix_rows(x_BQC: Tensor, mixer_CQQ: Tensor) -> Tensor:
    """Apply a folded mixer to the first rows of a block: a shorter block has the values that it has in a whole one.

    Args:
        x_BQC: rows of blocks, at most as many as the mixer has.
        mixer_CQQ: from `fold_mixer`.
    Raises:
        ShapeError: the block is longer than the mixer, or has other channels.
    """
    num_rows = x_BQC.shape[-2]
    if num_rows > mixer_CQQ.shape[-1] or x_BQC.shape[-1] != mixer_CQQ.shape[0]:
        raise ShapeError(
            "block rows", expected=f"[B, at most {mixer_CQQ.shape[-1]}, {mixer_CQQ.shape[0]}]", found=x_BQC.shape
        )
    return torch.einsum("cqr,brc->bqc", mixer_CQQ[:, :num_rows, :num_rows], x_BQC)


def candidate_features(logits_BSV: Tensor, num_candidates: int) -> tuple[Tensor, Tensor]:
    """The best candidates of every slot by rank, and what the lattice is told of each.

    Args:
        logits_BSV: of every slot.
        num_candidates: K, at least 2.
    Returns:
        ids_BSK: int64, best first; of equal logits the lower id comes first.
        features_BSKF: float32, F = 5.
    """
    log_probabilities_BSV = logits_BSV.float().log_softmax(dim=-1)
    order_BSV = log_probabilities_BSV.argsort(dim=-1, descending=True, stable=True)
    ids_BSK = order_BSV[..., :num_candidates]
    lp_BSK = log_probabilities_BSV.gather(-1, ids_BSK)
    rank_K = torch.arange(num_candidates, device=logits_BSV.device)
    rows = (lp_BSK, lp_BSK.exp(), lp_BSK - lp_BSK[..., :1], rank_K / (num_candidates - 1), (rank_K == 0).float())
    return ids_BSK, torch.stack([row.expand_as(lp_BSK) for row in rows], dim=-1)


def slot_bias(relative_NR: Tensor, same_N: Tensor, *, num_slots: int, num_candidates: int) -> Tensor:
    """What is added to attention scores over a flattened lattice, [N, S * K, S * K].

    The offset is that of the block size which the table was trained with, however few slots there are.

    Args:
        relative_NR: R = 2 Q - 1, by distance of slots.
        same_N: for candidates of one slot.
        num_slots: S, at most Q - 1.
        num_candidates: K.
    Raises:
        ShapeError: the table has an even width, or there are more slots than it was trained for.
    """
    width = relative_NR.shape[-1]
    block_size = (width + 1) // 2
    if width % 2 == 0 or not 1 <= num_slots < block_size:
        raise ShapeError(
            "relative_slot_bias", expected=f"[N, at least {2 * num_slots + 1}, odd]", found=relative_NR.shape
        )
    slot_S = torch.arange(num_slots, device=relative_NR.device)
    distance_SS = slot_S[:, None] - slot_S[None, :]
    bias_NSS = relative_NR[:, distance_SS + block_size - 1] + same_N[:, None, None] * (distance_SS == 0)
    return bias_NSS.repeat_interleave(num_candidates, dim=1).repeat_interleave(num_candidates, dim=2)
