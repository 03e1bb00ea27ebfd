"""What held-out text says about a drafter beside its acceptance: sums and counts per draft, from every anchor.

Every draft is scored beside the tokens that really came before it, as in the loss, so that draft k says how good draft
k is and not how good those before it were. `simulate.py` has the acceptance; what is here explains it:

- all families: accuracy, cross-entropy, KL to the target, and sum min(p, q), the share that sampling would accept;
- DFlash2: how often the label is among the candidates, how much of the target's mass is, how often the selector finds
  it there, the share that sampling would accept of what the selector draws, and the length of three walks: by the best
  score of each row alone, by the selector, and by an oracle that
  always finds a label among the candidates;
- DSpark: the confidence head's estimate against what sampling would accept, its bias along the block, its calibration.

B conversations, A blocks, K drafts, D width, V vocabulary, C candidates, N bins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from paceline.models.drafters.dflash2 import DFlash2Drafter
from paceline.models.drafters.dspark import DSparkDrafter
from paceline.models.drafters.table import Drafter
from paceline.ops.top_k_tokens import top_k_tokens
from paceline.training.anchors import Blocks, all_anchors, make_blocks
from paceline.training.data import Batch, Conversations
from paceline.training.drafting import greedy_drafts, states_after_labels
from paceline.training.dspark import markov_codes
from paceline.training.features import TargetFeatures
from paceline.training.objective import Features, only_drafted
from paceline.training.simulate import walk
from paceline.training.step import autocast

_NUM_BINS = 10
_SCORES = 2**25  # that exist at the same time, several times over


@dataclass
class EvaluationCounters:
    """Sums over the drafts that count, a list entry per draft.

    Attributes:
        sums: by name, float64 [K]; `counted` is the number of drafts, `counted_blocks` that of the blocks whose drafts
            count up to there.
        bins: of the confidence, float64 [3, K, N]: drafts, confidence, acceptance.
        largest_score: of all, absolute.
        walks: tokens and steps by name, of a verification walk over every response.
    """

    sums: dict[str, Tensor] = field(default_factory=dict)
    bins: Tensor | None = None
    largest_score: float = 0.0
    walks: dict[str, tuple[int, int]] = field(default_factory=dict)

    def add(self, name: str, values_BAK: Tensor, counts_BAK: Tensor) -> None:
        """Add up what counts, per draft."""
        summed_K = torch.where(counts_BAK, values_BAK.double(), 0.0).sum((0, 1)).cpu()
        self.sums[name] = self.sums[name] + summed_K if name in self.sums else summed_K

    def add_walk(self, name: str, right_BAK: Tensor, anchors_BA: Tensor, valid_BA: Tensor) -> None:
        """Walk every response by the drafts that are right; a gap between anchors is a new response."""
        accepted_BA = right_BAK.long().cumprod(-1).sum(-1).cpu().numpy()
        tokens, steps = self.walks.get(name, (0, 0))
        for accepted, anchors, valid in zip(accepted_BA, anchors_BA.cpu().numpy(), valid_BA.cpu().numpy(), strict=True):
            counts, places = accepted[valid], anchors[valid]
            for part in np.split(counts, np.flatnonzero(np.diff(places) != 1) + 1):
                visited = walk(part.tolist(), len(part) + 1)
                tokens, steps = tokens + int(part[visited].sum()) + len(visited), steps + len(visited)
        self.walks[name] = (tokens, steps)

    @classmethod
    def pooled(cls, parts: Sequence[EvaluationCounters]) -> EvaluationCounters:
        """The counters of several ranks, each of which scored other conversations, or none."""
        whole = cls(largest_score=max(part.largest_score for part in parts))
        for part in parts:
            for name, values in part.sums.items():
                whole.sums[name] = whole.sums[name] + values if name in whole.sums else values
            for name, counts in part.walks.items():
                tokens, steps = whole.walks.get(name, (0, 0))
                whole.walks[name] = (tokens + counts[0], steps + counts[1])
            if part.bins is not None:
                whole.bins = part.bins if whole.bins is None else whole.bins + part.bins
        return whole

    def row(self) -> dict[str, object]:
        """Everything as plain numbers: sums as they are, and the rates that people look at."""
        if not self.sums:
            return {}
        found: dict[str, object] = {f"{name}_by_draft": values.tolist() for name, values in self.sums.items()}
        counted_K = self.sums["counted"]
        found["accuracy_by_draft"] = _share(self.sums["correct"], counted_K)
        found["largest_score"] = self.largest_score
        for name, (tokens, steps) in self.walks.items():
            found[f"{name}_length"] = tokens / steps if steps else 1.0
        if "confidence" in self.sums and self.bins is not None:
            gap_K = (self.bins[1] - self.bins[2]).abs().sum(-1)
            found["calibration_error_by_draft"] = _share(gap_K, counted_K)
            bias_K = self.sums["confidence_product"] - self.sums["acceptance_product"]
            found["confidence_bias_by_draft"] = _share(bias_K, self.sums["counted_blocks"])
        return found


def _share(sums_K: Tensor, counts_K: Tensor) -> list[float | None]:
    pairs: Sequence[tuple[float, float]] = list(zip(sums_K.tolist(), counts_K.tolist(), strict=True))
    return [total / count if count else None for total, count in pairs]


@torch.no_grad()
def evaluation_counters(
    drafter: Drafter,
    target: TargetFeatures,
    conversations: Conversations,
    *,
    batch_size: int,
    max_length: int,
    mixed_precision: bool,
) -> EvaluationCounters:
    """Score every draft of every anchor beside the tokens that really came before it.

    Args:
        drafter: as it is; its mode is left alone.
        target: frozen.
        conversations: held out; arguments as for `simulate`.
        batch_size: conversations per pass.
        max_length: cut of each conversation.
        mixed_precision: as in training.
    """
    device = next(drafter.parameters()).device
    num_rows = drafter.contract.num_draft_tokens + 1
    counters = EvaluationCounters()
    for first in range(0, len(conversations), batch_size):
        indices = range(first, min(first + batch_size, len(conversations)))
        batch = conversations.batch(indices, max_length).to(device)
        anchors, valid = all_anchors(batch.supervised_BS)
        if not bool(valid.any()):
            continue
        blocks = make_blocks(batch.token_ids_BS, batch.supervised_BS, anchors, valid, num_rows)
        with autocast(device, mixed_precision):
            features = target(batch)
            hidden_BAKD = states_after_labels(drafter, target, features, batch, blocks)
            _add_batch(counters, drafter, target, features, batch, blocks, hidden_BAKD.to(target.head_VD.dtype))
    return counters


def _add_batch(
    counters: EvaluationCounters,
    drafter: Drafter,
    target: TargetFeatures,
    features: Features,
    batch: Batch,
    blocks: Blocks,
    hidden_BAKD: Tensor,
) -> None:
    drafted_BAK = only_drafted(blocks, drafter).counts_BAQ[..., 1:]
    found, largest = _scored(drafter, target, features, blocks, hidden_BAKD, drafted_BAK)
    counters.largest_score = max(counters.largest_score, largest)
    counters.add("counted", torch.ones_like(found["ce"]), drafted_BAK)
    has_selector = isinstance(drafter, DFlash2Drafter)
    for name, values_BAK in found.items():
        is_known = target.has_hidden or name not in _TEACHER_COLUMNS
        if is_known and (has_selector or name not in _SELECTOR_COLUMNS):
            counters.add(name, values_BAK, drafted_BAK)
    if has_selector:
        right_BAK = {
            "unary": found["correct"].bool(),
            "selector": greedy_drafts(drafter, target, features, batch, blocks).eq(blocks.labels_BAQ[..., 1:]),
            "oracle": found["label_in_candidates"].bool(),
        }
        for name, values_BAK in right_BAK.items():
            counters.add_walk(name, values_BAK & drafted_BAK, blocks.anchors_BA, blocks.valid_BA)
    if isinstance(drafter, DSparkDrafter) and drafter.confidence_head is not None:
        _add_confidence(counters, drafter, blocks, hidden_BAKD, found["acceptance"], drafted_BAK)


_COLUMNS = (
    "correct",
    "ce",
    "kl",
    "acceptance",
    "label_in_candidates",
    "target_mass_in_candidates",
    "selector_correct",
    "selector_acceptance",
)
_SELECTOR_COLUMNS = _COLUMNS[4:]
# The target's last states take part in these.
_TEACHER_COLUMNS = ("kl", "acceptance", "target_mass_in_candidates", "selector_acceptance")


def _scored(
    drafter: Drafter,
    target: TargetFeatures,
    features: Features,
    blocks: Blocks,
    hidden_BAKD: Tensor,
    counts_BAK: Tensor,
) -> tuple[dict[str, Tensor], float]:
    """Numbers of every draft by name, float32 [B, A, K], 0 where it does not count; and the largest score.

    The drafts that count are gathered, scored in portions and put back in their places.
    """
    conversation, block, draft = counts_BAK.nonzero(as_tuple=True)
    place = (conversation, block, draft)
    hidden_RD = hidden_BAKD[place]
    teacher_RD = features.hidden_BSD[conversation, blocks.anchors_BA[conversation, block] + draft]
    labels_R = blocks.labels_BAQ[conversation, block, draft + 1]
    previous_R = blocks.labels_BAQ[place]
    markov = drafter.markov_head if isinstance(drafter, DSparkDrafter) else None
    codes_RS = None if markov is None else markov_codes(markov, blocks.labels_BAQ[..., :-1], hidden_BAKD)[place]
    columns = torch.zeros(len(_COLUMNS), *counts_BAK.shape, device=counts_BAK.device)
    largest = 0.0
    portion = max(1, _SCORES // drafter.contract.target_vocab_size)
    for some in torch.arange(len(labels_R), device=labels_R.device).split(portion):
        scores_RV = drafter.logits(hidden_RD[some], target).float()
        if markov is not None and codes_RS is not None:
            scores_RV = scores_RV + markov.markov_w2(codes_RS[some]).float()
        largest = max(largest, float(scores_RV.abs().max()))
        teacher_RV = target.logits(teacher_RD[some]).float()
        numbers = _of_rows(drafter, scores_RV, teacher_RV, labels_R[some])
        if isinstance(drafter, DFlash2Drafter):
            numbers += _of_candidates(drafter, hidden_RD[some], scores_RV, teacher_RV, labels_R[some], previous_R[some])
        columns[: len(numbers), conversation[some], block[some], draft[some]] = torch.stack(numbers)
    return dict(zip(_COLUMNS, columns.unbind(0), strict=True)), largest


def _of_rows(drafter: Drafter, scores_RV: Tensor, teacher_RV: Tensor, labels_R: Tensor) -> list[Tensor]:
    """float32 [R] each: whether the best id is right, cross-entropy, KL, sum min(p, q)."""
    target_ids_V = drafter.vocabulary.target_ids_V
    columns_R = labels_R
    all_p_RV = p_RV = teacher_RV.softmax(-1)
    if target_ids_V is not None:  # a label that counts stands among the drafted ids exactly once
        columns_R = (target_ids_V == labels_R.unsqueeze(1)).int().argmax(-1)
        # The loss compares with what the target would say of these ids alone; sampling with what it says of all.
        teacher_RV = teacher_RV[:, target_ids_V]
        all_p_RV, p_RV = all_p_RV[:, target_ids_V], teacher_RV.softmax(-1)
    log_q_RV, log_p_RV = scores_RV.log_softmax(-1), teacher_RV.log_softmax(-1)
    return [
        scores_RV.argmax(-1).eq(columns_R).float(),
        -log_q_RV.gather(1, columns_R.unsqueeze(1)).squeeze(1),
        (p_RV * (log_p_RV - log_q_RV)).sum(-1),
        torch.minimum(all_p_RV, log_q_RV.exp()).sum(-1).clamp(0.0, 1.0),
    ]


def _of_candidates(
    drafter: DFlash2Drafter,
    hidden_RD: Tensor,
    scores_RV: Tensor,
    teacher_RV: Tensor,
    labels_R: Tensor,
    previous_R: Tensor,
) -> list[Tensor]:
    """float32 [R] each: label among the candidates, the target's mass there; selector picks the label, sum min(p, q).

    The candidates are the drafter's own: unlike in the loss, a label that is missing is not put among them.
    """
    selector = drafter.candidate_selector
    unary_RC, candidates_RC = top_k_tokens(scores_RV, selector.top_k)
    rows = hidden_RD.unsqueeze(1), unary_RC.unsqueeze(1), candidates_RC.unsqueeze(1)
    picked_R1, chosen_R1C = selector.walk(*rows, previous_R)
    p_RC = teacher_RV.softmax(-1).gather(1, candidates_RC)
    return [
        candidates_RC.eq(labels_R.unsqueeze(1)).any(-1).float(),
        p_RC.sum(-1),
        picked_R1.squeeze(1).eq(labels_R).float(),
        torch.minimum(p_RC, chosen_R1C.squeeze(1).softmax(-1)).sum(-1),
    ]


def _add_confidence(
    counters: EvaluationCounters,
    drafter: DSparkDrafter,
    blocks: Blocks,
    hidden_BAKD: Tensor,
    acceptance_BAK: Tensor,
    counts_BAK: Tensor,
) -> None:
    head = drafter.confidence_head
    assert head is not None, "called only where there is one"
    embedding = None
    if head.reads_markov and drafter.markov_head is not None:
        embedding = drafter.markov_head.markov_w1(blocks.labels_BAQ[..., :-1])
    confidence_BAK = head(hidden_BAKD, embedding).float()
    counters.add("confidence", confidence_BAK, counts_BAK)
    whole_BAK = counts_BAK.cumprod(-1).bool()
    counters.add("counted_blocks", torch.ones_like(confidence_BAK), whole_BAK)
    for name, values_BAK in (("confidence", confidence_BAK), ("acceptance", acceptance_BAK)):
        product_BAK = torch.where(counts_BAK, values_BAK, 1.0).cumprod(-1)
        counters.add(f"{name}_product", product_BAK, whole_BAK)
    conversation, block, draft = counts_BAK.nonzero(as_tuple=True)
    confidence_R = confidence_BAK[conversation, block, draft].double()
    bin_R = (confidence_R * _NUM_BINS).long().clamp(0, _NUM_BINS - 1)
    index_R = draft * _NUM_BINS + bin_R
    K = counts_BAK.shape[-1]
    values = (torch.ones_like(confidence_R), confidence_R, acceptance_BAK[conversation, block, draft].double())
    bins = torch.stack([torch.bincount(index_R, weights=v, minlength=K * _NUM_BINS).view(K, _NUM_BINS) for v in values])
    counters.bins = bins.cpu() if counters.bins is None else counters.bins + bins.cpu()
