"""Greedy EAGLE-3 drafts computed from a whole text at once: no cache, chunks or steps. For the canary and for tests.

T rows of the drafter, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.models.drafters.draw import draw_rows, join_rows
from paceline.models.drafters.eagle3 import Eagle3Drafter
from paceline.models.drafters.proposal import DraftSampling, Proposal
from paceline.models.targets.target import Target
from paceline.ops.attention import attention


@dataclass(frozen=True)
class CausalWindows:
    """Causal attention over complete sequences in which each layer has its own window; None is all."""

    windows: Sequence[int | None]

    def __call__(
        self, layer: int, q_BTNH: Tensor, k_BTMH: Tensor, v_BTMH: Tensor, *, sink_N: Tensor | None = None
    ) -> Tensor:
        """Attend within each row of the batch."""
        key_T = torch.arange(k_BTMH.shape[1], device=k_BTMH.device)
        distance = key_T[:, None] - key_T
        visible = distance >= 0
        window = self.windows[layer]
        if window is not None:
            visible = visible & (distance < window)
        q, k, v = (part.transpose(1, 2) for part in (q_BTNH, k_BTMH, v_BTMH))
        return attention(q, k, v, visible=visible, sink_N=sink_N).transpose(1, 2)


def direct_sequential_drafts(
    target: Target, drafter: Eagle3Drafter, text_1T: Tensor, features_1TD: Tensor, anchor: int, num_drafts: int
) -> list[int]:
    """The ids of `direct_sequential_proposal`, which has the same arguments."""
    proposal = direct_sequential_proposal(target, drafter, text_1T, features_1TD, anchor, num_drafts)
    drafts: list[int] = proposal.ids_BK[0].tolist()
    return drafts


@torch.inference_mode()
def direct_sequential_proposal(
    target: Target, drafter: Eagle3Drafter, text_1T: Tensor, features_1TD: Tensor, anchor: int, num_drafts: int
) -> Proposal:
    """Draft behind an anchor with the whole text in view; every draft runs all rows again.

    Args:
        target: lends embedding and head.
        drafter: as served.
        text_1T: int64, at least as far as the anchor.
        features_1TD: `drafter.features` of the text, at least as far as the position before the anchor.
        anchor: its position; at least 1.
        num_drafts: how many tokens to draft.
    Returns:
        Greedy drafts, with the best candidates of each position and their log-probabilities.
    """
    attend = CausalWindows(drafter.contract.layer_windows)
    following_1T, hidden_1TD = text_1T[:, 1 : anchor + 1], features_1TD[:, :anchor]
    greedy = greedy_with_candidates(text_1T[:, 0])
    rows = []
    for index in range(num_drafts):
        positions_1T = torch.arange(following_1T.shape[1], device=text_1T.device).unsqueeze(0)
        out_1TD, recycled_1TD = drafter(drafter.embed(following_1T, target), hidden_1TD, positions_1T, attend)
        logits_11V = drafter.logits(out_1TD[:, -1:].to(target.norm.weight.dtype), target)
        rows.append(draw_rows(logits_11V, greedy, drafter.vocabulary, first=index))
        following_1T = torch.cat((following_1T, rows[-1].ids_BK), dim=1)
        hidden_1TD = torch.cat((hidden_1TD, recycled_1TD[:, -1:]), dim=1)
    return join_rows(rows) if rows else Proposal(text_1T[:, :0])


def greedy_with_candidates(anchors_B: Tensor) -> DraftSampling:
    """Draws the best ids as greedy drafting does, and keeps what else was likely."""
    nothing_B = torch.zeros_like(anchors_B)
    return DraftSampling("probabilistic", nothing_B.float(), nothing_B, nothing_B, nothing_B)
