"""The stages of a comparison between training and serving: what each may differ by, and what it means if it does not.

A anchors, S tokens, K drafts, D width, V scored ids.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as functional
from torch import Tensor

from paceline.models.drafters.block_drafter import BlockDrafter
from paceline.models.drafters.table import Drafter
from paceline.models.loading import LoadedDrafter, LoadedTarget
from paceline.training.anchors import Blocks
from paceline.training.objective import Features
from paceline.training.serving_pass import ServedText

COSINE_MEAN, COSINE_MIN = 0.999, 0.98


@dataclass(frozen=True)
class Gates:
    """What may differ by rounding, in a dtype.

    Attributes:
        score_error: of a score, absolute.
        score_rms: of all scores, root mean square: a small fault in all of them, which no single one shows.
        near_tie: two scores closer than this may change places, as may two closer than twice what their row is off by.
        equal_share: of drafts, near ties left out.
        teacher_share: of the target's own tokens that its states foretell.
    """

    score_error: float
    score_rms: float
    near_tie: float
    equal_share: float
    teacher_share: float

    @classmethod
    def of(cls, dtype: torch.dtype, largest_score: float) -> Gates:
        """Of a coarse dtype scores may be off by 0.1 on the whole; a single one by that, or by four of its steps where
        that is more: above 16 a step of bf16 is 0.125.
        """
        if dtype == torch.float32:
            return cls(1e-3, 1e-3, 2e-3, 0.999, 0.995)
        return cls(max(0.1, 4 * torch.finfo(dtype).eps * largest_score), 0.1, 0.2, 0.99, 0.97)


@dataclass(frozen=True)
class KnownText:
    """A text to draft in: `ids` whole, the first `num_prompt_tokens` of which are never drafted."""

    ids: tuple[int, ...]
    num_prompt_tokens: int


@dataclass(frozen=True)
class BothWays:
    """One text, drafted in by training and by serving.

    Attributes:
        text: whole.
        blocks: of training.
        features: of training.
        served: what serving made of it.
        served_scores_AKV: of the served drafts.
        margin_AK: how far each draft is from another: the best score's distance from the second, among those that a
            draft was chosen from, or a candidate's from the best id that is none, if that is less.
        trained_scores_AKV: of training, behind the same drafts.
        chosen_alike_AK: bool, whether training would choose the served draft.
    """

    text: KnownText
    blocks: Blocks
    features: Features
    served: ServedText
    served_scores_AKV: Tensor
    margin_AK: Tensor
    trained_scores_AKV: Tensor
    chosen_alike_AK: Tensor


@dataclass(frozen=True)
class Stage:
    """One comparison.

    Attributes:
        name: what was compared.
        ok: whether it is within its gate.
        note: the figures.
        cause: what a difference here means; empty where there is none.
    """

    name: str
    ok: bool
    note: str
    cause: str = ""


@dataclass(frozen=True)
class SlotCounts:
    """Draft k of every block.

    Attributes:
        max_error: largest absolute difference of a score.
        squared_error: mean square of all differences.
        num_equal: blocks in which both chose the same id.
        num_equal_or_near: the same, or chosen between scores that nearly tie.
        num_blocks: all of them.
    """

    max_error: float
    squared_error: float
    num_equal: int
    num_equal_or_near: int
    num_blocks: int


@dataclass(frozen=True)
class Parity:
    """Everything that was compared, stages in the order of the computation."""

    dtype: str
    num_texts: int
    stages: tuple[Stage, ...]
    slots: tuple[SlotCounts, ...]

    @property
    def first_difference(self) -> Stage | None:
        """The stage that explains those behind it."""
        return next((stage for stage in self.stages if not stage.ok), None)


def judge(
    target: LoadedTarget,
    served: LoadedDrafter,
    trained: Drafter,
    pairs: Sequence[BothWays],
    dtype: torch.dtype,
    are_own_texts: bool,
) -> Parity:
    """Put the comparisons of all texts together.

    Args:
        target: that both ways ran on.
        served: the drafter as it serves.
        trained: the drafter as training holds it.
        pairs: one per text.
        dtype: of both drafters.
        are_own_texts: the target wrote the answers greedily, so that its states must foretell them.
    """
    gates = Gates.of(dtype, max(float(pair.served_scores_AKV.abs().max()) for pair in pairs))
    slots = _slots(pairs, gates)
    stages = [_labels_stage(pairs)]
    if are_own_texts:
        stages.append(_teacher_stage(target, pairs, gates))
    stages += _tap_stages(served, pairs)
    stages += _context_stages(trained, pairs)
    stages += [_scores_stage(slots, gates), _choice_stage(slots, gates)]
    return Parity(str(dtype).removeprefix("torch."), len(pairs), tuple(stages), slots)


def _labels_stage(pairs: Sequence[BothWays]) -> Stage:
    wrong_ids, wrong_positions, num_rows = 0, 0, 0
    for pair in pairs:
        blocks, ids_S = pair.blocks, torch.tensor(pair.text.ids, device=pair.blocks.anchors_BA.device)
        place_BAQ = blocks.anchors_BA.unsqueeze(-1) + torch.arange(blocks.labels_BAQ.shape[-1], device=ids_S.device)
        is_inside = place_BAQ < len(ids_S)
        meant = ids_S[place_BAQ.clamp(max=len(ids_S) - 1)]
        wrong_ids += int((is_inside & blocks.labels_BAQ.ne(meant)).sum())
        wrong_positions += int(blocks.positions_BAQ.ne(place_BAQ).sum())
        num_rows += is_inside.numel()
    cause = ""
    if wrong_ids:
        cause = "the label of draft k is not the token at its anchor + k, which verification holds it against"
    elif wrong_positions:
        cause = "row k of a block does not sit at its anchor + k, where serving puts it"
    note = f"{wrong_ids} labels and {wrong_positions} positions of {num_rows} rows are not those of serving"
    return Stage("labels", not cause, note, cause)


def _teacher_stage(target: LoadedTarget, pairs: Sequence[BothWays], gates: Gates) -> Stage:
    right, number = 0, 0
    for pair in pairs:
        first = pair.text.num_prompt_tokens
        states_SD = pair.features.hidden_BSD[0, first - 1 : -1]
        foretold_S = target.model.logits(states_SD).argmax(-1)
        answer_S = torch.tensor(pair.text.ids[first:], device=foretold_S.device)
        right, number = right + int(foretold_S.eq(answer_S).sum()), number + len(answer_S)
    share, gate = right / number, gates.teacher_share
    cause = "" if share >= gate else "the states that teach a draft are not those which predict its token"
    return Stage("teacher", not cause, f"{right} of {number} tokens foretold ({share:.4f}, at least {gate})", cause)


def _tap_stages(served: LoadedDrafter, pairs: Sequence[BothWays]) -> list[Stage]:
    stages = []
    for index, layer in enumerate(served.contract.target_layer_ids):
        cosine = torch.cat([_cosine(pair.features.taps[index][0], pair.served.taps[index]) for pair in pairs])
        ok, note = _cosine_verdict(cosine)
        cause = (
            "" if ok else f"training reads tap {index} elsewhere than serving, which reads the output of layer {layer}"
        )
        stages.append(Stage(f"tap {index} (layer {layer})", ok, note, cause))
    return stages


def _context_stages(trained: Drafter, pairs: Sequence[BothWays]) -> list[Stage]:
    if not isinstance(trained, BlockDrafter):
        return []
    found: list[list[Tensor]] = []
    for pair in pairs:
        length = len(pair.served.taps[0])
        features_SD = trained.backbone.context_features([tap[0, :length] for tap in pair.features.taps])
        position_S = torch.arange(length, device=features_SD.device)
        ours = trained.backbone.context_kv(features_SD, position_S)
        found.append(
            [
                torch.cat((_cosine(k.transpose(0, 1), keys), _cosine(v.transpose(0, 1), values)))
                for (k, v), (keys, values) in zip(ours, pair.served.context, strict=True)
            ]
        )
    stages = []
    for layer, cosines in enumerate(zip(*found, strict=True)):
        ok, note = _cosine_verdict(torch.cat([cosine.flatten() for cosine in cosines]))
        cause = "" if ok else "taps agree, the keys and values made of them do not: projection, norms or RoPE positions"
        stages.append(Stage(f"context of drafter layer {layer}", ok, note, cause))
    return stages


def _slots(pairs: Sequence[BothWays], gates: Gates) -> tuple[SlotCounts, ...]:
    difference = [pair.trained_scores_AKV.float() - pair.served_scores_AKV.float() for pair in pairs]
    error_AK = torch.cat([one.abs().amax(-1) for one in difference]).nan_to_num(nan=torch.inf)
    squared_AK = torch.cat([one.square().mean(-1) for one in difference]).nan_to_num(nan=torch.inf)
    alike_AK = torch.cat([pair.chosen_alike_AK for pair in pairs])
    near_AK = torch.cat([pair.margin_AK for pair in pairs]) <= (2 * error_AK).clamp(min=gates.near_tie)
    return tuple(
        SlotCounts(
            float(error_AK[:, k].max()),
            float(squared_AK[:, k].mean()),
            int(alike_AK[:, k].sum()),
            int((alike_AK | near_AK)[:, k].sum()),
            len(alike_AK),
        )
        for k in range(alike_AK.shape[1])
    )


def _scores_stage(slots: Sequence[SlotCounts], gates: Gates) -> Stage:
    worst = max(range(len(slots)), key=lambda k: slots[k].max_error)
    typical = [math.sqrt(slot.squared_error) for slot in slots]
    whole = math.sqrt(sum(slot.squared_error for slot in slots) / len(slots))
    is_far = [not (slot.max_error < gates.score_error) for slot in slots]
    if whole >= gates.score_rms:
        is_far = [far or one >= gates.score_rms for far, one in zip(is_far, typical, strict=True)]
    first = next((k for k, far in enumerate(is_far) if far), None)
    note = (
        f"largest difference {slots[worst].max_error:.2g}, at draft {worst + 1} (below {gates.score_error:.2g}); "
        f"root mean square {whole:.2g} (below {gates.score_rms:.2g})"
    )
    cause = ""
    if first is not None:
        cause = (
            f"the scores of draft {first + 1} differ though labels, taps and context agree: what its row may see, its "
            "RoPE position, the mask token, or the drafter's layers"
        )
    return Stage("scores", first is None, note, cause)


def _choice_stage(slots: Sequence[SlotCounts], gates: Gates) -> Stage:
    number = sum(slot.num_blocks for slot in slots)
    equal, near = sum(slot.num_equal for slot in slots), sum(slot.num_equal_or_near for slot in slots)
    ok = near / number >= gates.equal_share
    note = (
        f"{equal} of {number} drafts equal, {near - equal} of the others are near ties (at least {gates.equal_share})"
    )
    return Stage("drafts", ok, note, "" if ok else "scores agree, the ids chosen from them do not: heads or their walk")


def _cosine(ours: Tensor, served: Tensor) -> Tensor:
    """Along the last dimension, over the rows that serving has; two rows of zeros agree."""
    rows = ours[..., : served.shape[-2], :].float()
    return functional.cosine_similarity(rows, served.float(), dim=-1).where(rows.any(-1) | served.any(-1), 1.0)


def _cosine_verdict(cosine: Tensor) -> tuple[bool, str]:
    mean, least = float(cosine.mean()), float(cosine.min())
    ok = mean > COSINE_MEAN and least > COSINE_MIN
    return ok, f"cosine mean {mean:.6f}, min {least:.6f} (above {COSINE_MEAN} and {COSINE_MIN})"
