"""Whether a drafter without a fingerprint is read rightly: its weights are scored under other readings of its config.

The target continues prompts greedily; at places inside its answers the drafter says what comes next, the true text
before it. A drafter was trained for one reading, and that one must do best. Another that is clearly better, over whole
prompts, names the fault; one that is hardly better than nothing on any reading was made for another target.

    better    mean log-likelihood of the next tokens higher by `MARGIN` nats per prompt, sign-rank p below
              `LEVEL` / number of readings, first drafts accepted hardly less often (`ACCEPTANCE_SLACK`: of a few
              hundred places that share is a coarse figure), and at least as often as `CONVINCING`: a drafter that
              fits no reading may do a little better on one by chance

S tokens of a text, A places, Q rows of a block, R scored rows, V draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.errors import DataError
from paceline.evaluation.readings import Reading, readings_of
from paceline.evaluation.statistics import wilcoxon_signed_rank
from paceline.models.attends import BlocksOverContext
from paceline.models.drafters.block_drafter import BlockDrafter
from paceline.models.drafters.eagle3 import Eagle3Drafter
from paceline.models.probe.block import head_dtype, visible_keys
from paceline.models.probe.places import Place, states_of_text
from paceline.models.targets.target import Target

FEWEST_PROMPTS = 16  # with fewer, no agreement of all prompts could reach the level for some forty readings
MARGIN = 0.05
LEVEL = 0.01
ACCEPTANCE_SLACK = 0.05
CONVINCING = 0.2
HARDLY = 0.05  # first drafts accepted below this share: the drafter says next to nothing about this target
_NUM_ANCHORS = 10
_NUM_SCORED = 3
_FLOOR = -20.0  # log-likelihood of a token that a reduced vocabulary cannot draft


@dataclass(frozen=True)
class Text:
    """A prompt and the target's own greedy answer."""

    ids: tuple[int, ...]
    num_prompt_tokens: int


@dataclass(frozen=True)
class Score:
    """How well one reading predicts.

    Attributes:
        name: of the reading, in words.
        fix: what to do if it is right.
        log_likelihoods: per prompt, mean over its places and scored rows, in nats.
        first_accepted: share of places whose first draft is the target's token.
    """

    name: str
    fix: str
    log_likelihoods: tuple[float, ...]
    first_accepted: float

    @property
    def log_likelihood(self) -> float:
        """Mean over prompts."""
        return sum(self.log_likelihoods) / len(self.log_likelihoods)


@dataclass(frozen=True)
class Verdict:
    """What the scores say.

    Attributes:
        declared: the config's own reading.
        others: all that were tried, best first.
        better: the best of those that are clearly better, or None.
        p_value: of that one, not corrected.
    """

    declared: Score
    others: tuple[Score, ...]
    better: Score | None
    p_value: float | None

    @property
    def is_lost(self) -> bool:
        """Whether no reading predicts this target."""
        return self.better is None and self.declared.first_accepted < HARDLY

    @property
    def says_yes(self) -> bool:
        """Whether the declared reading holds."""
        return self.better is None and not self.is_lost


def judge(declared: Score, others: Sequence[Score]) -> Verdict:
    """Look for a reading that is clearly better than the declared one.

    Raises:
        DataError: too few prompts to tell.
    """
    if len(declared.log_likelihoods) < FEWEST_PROMPTS:
        raise DataError(
            f"{len(declared.log_likelihoods)} answered prompts are too few to judge by, {FEWEST_PROMPTS} are needed",
            hint="--prompts with a longer file",
        )
    ranked = sorted(others, key=lambda score: -score.log_likelihood)
    for score in ranked:
        gains = [there - here for there, here in zip(score.log_likelihoods, declared.log_likelihoods, strict=True)]
        if sum(gains) / len(gains) < MARGIN:
            break
        p_value = wilcoxon_signed_rank(gains)
        fewest = max(CONVINCING, declared.first_accepted - ACCEPTANCE_SLACK)
        if p_value * len(ranked) < LEVEL and score.first_accepted >= fewest:
            return Verdict(declared, tuple(ranked), score, p_value)
    return Verdict(declared, tuple(ranked), None, None)


def search_contract(
    target: Target,
    drafter: BlockDrafter | Eagle3Drafter,
    texts: Sequence[Text],
    *,
    mask_candidates: Sequence[int] = (),
    on_progress: Callable[[int, int], None] | None = None,
) -> Verdict:
    """Score the declared reading and every other on the same places of the same texts.

    Args:
        target: frozen.
        drafter: as loaded.
        texts: at least `FEWEST_PROMPTS`; those whose answer is too short are passed over.
        mask_candidates: ids that a config could have confused with the mask's.
        on_progress: called with the readings done and their number.
    Raises:
        DataError: too few texts.
    """
    usable = [text for text in texts if len(text.ids) - text.num_prompt_tokens > _NUM_SCORED + 1]
    declared, *others = readings_of(target, drafter, mask_candidates)
    wanted = {place for reading in (declared, *others) for place in reading.places}
    states = [_states(target, text, wanted) for text in usable]
    scores: list[Score] = []
    for number, reading in enumerate((declared, *others)):
        scores.append(_score(target, reading, usable, states))
        if on_progress is not None:
            on_progress(number + 1, 1 + len(others))
    return judge(scores[0], scores[1:])


def places_of_text(text: Text) -> list[int]:
    """Positions of the anchors: spread over the answer, where all scored rows have a token to meet."""
    first, last = text.num_prompt_tokens, len(text.ids) - 1 - _NUM_SCORED
    count = min(_NUM_ANCHORS, last - first + 1)
    return sorted({first + (last - first) * index // max(1, count - 1) for index in range(count)})


@torch.no_grad()
def _states(target: Target, text: Text, wanted: set[Place]) -> dict[Place, Tensor]:
    streams = sorted({place.stream for place in wanted})
    found = states_of_text(target, text.ids, slice(0, len(text.ids)), streams)
    return {place: found[place] for place in wanted if place in found}


@torch.no_grad()
def _score(target: Target, reading: Reading, texts: Sequence[Text], states: Sequence[dict[Place, Tensor]]) -> Score:
    means, num_right, num_places = [], 0, 0
    for text, there in zip(texts, states, strict=True):
        taps = [there[place] for place in reading.places]
        anchors = places_of_text(text)
        if isinstance(reading.drafter, BlockDrafter):
            logits_ARV = _block_logits(target, reading.drafter, text, taps, anchors)
        else:
            logits_ARV = _row_logits(target, reading.drafter, text, taps, anchors)
        ids = torch.tensor(text.ids, device=logits_ARV.device)
        offsets = torch.arange(1, logits_ARV.shape[1] + 1, device=ids.device)
        labels_AR = ids[torch.tensor(anchors, device=ids.device)[:, None] + offsets]
        log_p, is_best = _against(reading.drafter, logits_ARV.float(), labels_AR)
        means.append(float(log_p.mean()))
        num_right += int(is_best[:, 0].sum())
        num_places += len(anchors)
    return Score(reading.name, reading.fix, tuple(means), num_right / max(1, num_places))


def _against(drafter: BlockDrafter | Eagle3Drafter, logits_ARV: Tensor, labels_AR: Tensor) -> tuple[Tensor, Tensor]:
    """Log-likelihood of each label, and whether it is the best id."""
    table = drafter.vocabulary.target_ids_V
    log_p = logits_ARV.log_softmax(-1)
    best_AR = drafter.vocabulary.to_target_ids(logits_ARV.argmax(-1))
    if table is None:
        return log_p.gather(-1, labels_AR.unsqueeze(-1)).squeeze(-1).clamp(min=_FLOOR), best_AR == labels_AR
    is_label = table == labels_AR.unsqueeze(-1)
    found = log_p.masked_fill(~is_label, _FLOOR).amax(-1)
    return found.clamp(min=_FLOOR), best_AR == labels_AR


def _block_logits(
    target: Target, drafter: BlockDrafter, text: Text, taps: Sequence[Tensor], anchors: Sequence[int]
) -> Tensor:
    """The first rows of a block at every anchor, all blocks of a text as one batch."""
    backbone, contract = drafter.backbone, drafter.contract
    device = backbone.fc.weight.device
    anchors_A = torch.tensor(anchors, device=device)
    positions_S = torch.arange(max(anchors), device=device)
    pairs = backbone.context_kv(backbone.context_features([tap[: max(anchors)] for tap in taps]), positions_S)
    A = len(anchors)
    context = [(k.expand(A, *k.shape), v.expand(A, *v.shape)) for k, v in pairs]
    positions_AS = positions_S.expand(A, -1)
    block_ids = drafter.block_ids(torch.tensor(text.ids, device=device)[anchors_A], contract.num_draft_tokens)
    own_AQ = anchors_A.unsqueeze(1) + torch.arange(block_ids.shape[1], device=device)
    masks = [
        visible_keys(positions_AS, positions_AS < anchors_A.unsqueeze(1), own_AQ, window=window, causal=causal)
        for window, causal in zip(contract.layer_windows, contract.layer_causal, strict=True)
    ]
    embeddings = drafter.embed(block_ids, target).to(backbone.fc.weight.dtype)
    hidden = drafter.predicted_rows(backbone(embeddings, own_AQ, BlocksOverContext(context, masks)))
    return drafter.logits(hidden[:, :_NUM_SCORED].to(head_dtype(drafter.vocabulary, target)), target)


def _row_logits(
    target: Target, drafter: Eagle3Drafter, text: Text, taps: Sequence[Tensor], anchors: Sequence[int]
) -> Tensor:
    """EAGLE-3's first draft behind every anchor, from one pass over the text."""
    contract = drafter.contract
    device = drafter.fc.weight.device
    last = max(anchors)
    following = torch.tensor(text.ids, device=device)[1 : last + 1].unsqueeze(0)
    positions = torch.arange(last, device=device).unsqueeze(0)
    masks = [
        visible_keys(positions[:, :0], positions[:, :0].bool(), positions, window=window, causal=True)
        for window in contract.layer_windows
    ]
    embeddings = drafter.embed(following, target)
    empty = embeddings.new_zeros(1, 0, contract.num_kv_heads, contract.head_size)
    attend = BlocksOverContext([(empty, empty)] * contract.num_layers, masks)
    features = drafter.features([tap[:last] for tap in taps]).unsqueeze(0)
    out, _ = drafter(embeddings, features, positions, attend)
    rows = out[0, torch.tensor(anchors, device=device) - 1].unsqueeze(1)
    return drafter.logits(rows.to(head_dtype(drafter.vocabulary, target)), target)
