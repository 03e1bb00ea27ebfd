"""Drafts computed once more from a whole text, without cache, chunks or steps, and held against those that were served.

In 16-bit arithmetic two passes of different shapes round differently, and a drafter that is not sure may then choose
another id. So what is compared first of all is how likely the drafter thought its candidates; of ids, a block counts as
different only where the direct pass finds the served draft clearly less likely than its own. Drafts of a block may
depend on those before them; behind the first that differs nothing is compared.

T tokens of a text, K draft tokens, C candidates, M key/value heads, H head size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.engine.direct_drafts import direct_sequential_proposal, greedy_with_candidates
from paceline.models.attends import WholeSequence
from paceline.models.drafters.block_drafter import BlockDrafter
from paceline.models.drafters.eagle3 import Eagle3Drafter
from paceline.models.drafters.proposal import Proposal
from paceline.models.loading import LoadedDrafter
from paceline.models.taps import TapCollector
from paceline.models.targets.target import Target
from paceline.ops.attention import attention

Block = tuple[int, Sequence[int]]  # anchor position, drafts


@dataclass(frozen=True)
class ServedBlock:
    """What a drafter proposed in a step.

    Attributes:
        position: of the anchor.
        drafts: ids, -1 where there is none.
        candidates: for each draft the likely ids and the logarithm of their probability.
    """

    position: int
    drafts: Sequence[int]
    candidates: Sequence[Mapping[int, float]]


@dataclass(frozen=True)
class DraftComparison:
    """Served blocks beside direct ones.

    Attributes:
        num_compared: blocks.
        num_equal: of them, those whose drafts are the direct ones, or whose first that is not is as likely as the
            direct one, up to rounding.
        num_distances: drafts up to the first of their block that differs, that one included.
        total_distance: sum of their distances, each half of sum |p - q| over the candidates: 0 where served and direct
            pass agree, 1 where they have nothing in common.
    """

    num_compared: int = 0
    num_equal: int = 0
    num_distances: int = 0
    total_distance: float = 0.0

    def __add__(self, other: DraftComparison) -> DraftComparison:
        return DraftComparison(
            self.num_compared + other.num_compared,
            self.num_equal + other.num_equal,
            self.num_distances + other.num_distances,
            self.total_distance + other.total_distance,
        )

    @property
    def mean_distance(self) -> float:
        """Of the drafts that were compared; 0 where there were none."""
        return self.total_distance / max(1, self.num_distances)


def candidates_of(proposal: Proposal, row: int) -> list[dict[int, float]]:
    """The candidates of one request's drafts, with the logarithm of their probability."""
    assert proposal.candidate_ids_BKC is not None and proposal.log_q_BKC is not None, "drafted to be compared"
    ids: list[list[int]] = proposal.candidate_ids_BKC[row].tolist()
    log_q: list[list[float]] = proposal.log_q_BKC[row].tolist()
    return [dict(zip(*both, strict=True)) for both in zip(ids, log_q, strict=True)]


def compare_drafts(
    target: Target, drafter: LoadedDrafter, text: Sequence[int], blocks: Sequence[ServedBlock]
) -> DraftComparison:
    """Hold served drafts of a greedy request against direct ones.

    Args:
        target: as served.
        drafter: as served.
        text: prompt and output.
        blocks: of this text.
    """
    found = DraftComparison()
    tolerance = _tolerance(target.norm.weight.dtype)
    wanted = [(block.position, block.drafts) for block in blocks]
    for served, proposal in zip(blocks, direct_proposals(target, drafter, text, wanted), strict=True):
        found += _compared(served, proposal, tolerance)
    return found


def count_equal_drafts(target: Target, drafter: LoadedDrafter, text: Sequence[int], blocks: Sequence[Block]) -> int:
    """How many served drafts are the direct ones, id by id; arguments as for `compare_drafts`."""
    return sum(
        a == b
        for (_, drafts), proposal in zip(blocks, direct_proposals(target, drafter, text, blocks), strict=True)
        for a, b in zip(proposal.ids_BK[0].tolist(), drafts, strict=True)
    )


def _tolerance(dtype: torch.dtype) -> float:
    """How much less likely, in nats, a served draft may be than the direct one."""
    return 0.5 if dtype.itemsize < 4 else 0.01


def _compared(served: ServedBlock, proposal: Proposal, tolerance: float) -> DraftComparison:
    direct_ids: list[int] = proposal.ids_BK[0].tolist()
    direct = candidates_of(proposal, 0)
    distances = []
    for index, (draft, wanted) in enumerate(zip(served.drafts, direct_ids, strict=True)):
        if draft < 0:
            break
        distances.append(_distance(served.candidates[index], direct[index]))
        if draft != wanted:
            gap = direct[index][wanted] - direct[index].get(draft, -math.inf)
            return DraftComparison(1, int(gap <= tolerance), len(distances), sum(distances))
    return DraftComparison(1, 1, len(distances), sum(distances))


def _distance(one: Mapping[int, float], other: Mapping[int, float]) -> float:
    ids = one.keys() | other.keys()
    return sum(abs(math.exp(one.get(i, -math.inf)) - math.exp(other.get(i, -math.inf))) for i in ids) / 2


@torch.inference_mode()
def direct_proposals(
    target: Target, drafter: LoadedDrafter, text: Sequence[int], blocks: Sequence[Block]
) -> Iterator[Proposal]:
    """The greedy proposal of each block, with its candidates and their probabilities beside it."""
    model = drafter.model
    text_1T = torch.tensor([text], device=target.norm.weight.device)
    positions_T = torch.arange(len(text), device=text_1T.device)
    collector = TapCollector.of_layers(drafter.contract.target_layer_ids, drafter.contract.aux_hidden_stream)
    target(text_1T, positions_T.unsqueeze(0), WholeSequence(), collector)
    taps = collector.collected()
    if isinstance(model, Eagle3Drafter):
        features_1TD = model.features(taps)
        for n, drafts in blocks:
            yield direct_sequential_proposal(target, model, text_1T, features_1TD, n, len(drafts))
        return
    context = model.backbone.context_kv(model.backbone.context_features(taps)[0], positions_T)
    for n, drafts in blocks:
        before = [(k[:n], v[:n]) for k, v in context]
        yield _block_proposal(target, model, text_1T[:, n], n, before, len(drafts))


def _block_proposal(
    target: Target,
    model: BlockDrafter,
    anchors_1: Tensor,
    position: int,
    context: Sequence[tuple[Tensor, Tensor]],
    num_drafts: int,
) -> Proposal:
    """Greedy drafts of one block over given context keys and values."""
    block_ids = model.block_ids(anchors_1, num_drafts)
    embeddings = model.embed(block_ids, target).to(model.backbone.fc.weight.dtype)
    positions_1Q = position + torch.arange(block_ids.shape[1], device=anchors_1.device).unsqueeze(0)
    attend = _DirectBlock(context, model.contract.layer_windows, model.contract.layer_causal)
    hidden = model.predicted_rows(model.backbone(embeddings, positions_1Q, attend)).to(target.norm.weight.dtype)
    return model.propose(hidden, model.logits(hidden, target), anchors_1, greedy_with_candidates(anchors_1))


@dataclass(frozen=True)
class _DirectBlock:
    """Attention of one block over given context keys and values, per layer [T, M, H]."""

    context: Sequence[tuple[Tensor, Tensor]]
    windows: Sequence[int | None]
    causal: Sequence[bool]

    def __call__(
        self, layer: int, q_BTNH: Tensor, k_BTMH: Tensor, v_BTMH: Tensor, *, sink_N: Tensor | None = None
    ) -> Tensor:
        context_k, context_v = self.context[layer]
        k = torch.cat((context_k, k_BTMH[0])).transpose(0, 1)
        v = torch.cat((context_v, v_BTMH[0])).transpose(0, 1)
        key_S = torch.arange(k.shape[1], device=k.device)
        distance = key_S[context_k.shape[0] :, None] - key_S
        window = self.windows[layer]
        visible = (distance >= 0) if self.causal[layer] else torch.ones_like(distance, dtype=torch.bool)
        if window is not None:
            visible = visible & (distance.abs() < window)
        mixed = attention(q_BTNH.transpose(1, 2), k[None], v[None], visible=visible, sink_N=sink_N)
        return mixed.transpose(1, 2)
