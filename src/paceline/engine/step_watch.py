"""Looking into decode steps for a trace with details: how sure drafter and target were, and where the time went.

Only an engine made with `trace_details` has one of these. It waits for the device at every mark, so that the parts of a
step have times of their own; what looking costs is kept apart and is nobody's time.

B requests, K draft tokens, T rows, C candidates, V vocabulary of the target or, for drafts, of the drafter.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from paceline.models.drafters.proposal import Proposal
from paceline.ops.sample_tokens import NO_TOKEN
from paceline.ops.top_k_tokens import top_k_tokens
from paceline.trace.step import StepDetails, StepRecord

NUM_TOP = 5
LOWEST = -100.0  # JSON has no infinity
StepPart = Literal["verify", "sampling", "draft"]


@dataclass(frozen=True)
class _Drawn:
    """What is known of one request's waiting drafts, an entry each; confidences are empty without such a head."""

    logprobs: list[float]
    entropies: list[float]
    confidences: list[float]


@dataclass(frozen=True)
class _Judged:
    """What the target thought of one request's rows: of each row's draft, of its emitted token, and of all."""

    draft_logprobs: list[float]
    emitted_logprobs: list[float]
    entropies: list[float]
    top: list[list[tuple[int, float]]]


class StepWatch:
    """Looks at one step after the other; a step is asked about before the next begins.

    Args:
        device: of the models.

    Attributes:
        own_ms: what looking at the step took.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._waiting: dict[int, _Drawn] = {}
        self._drawn: dict[int, _Drawn] = {}
        self._judged: dict[int, _Judged] = {}
        self._slots: Sequence[int] = ()
        self._mark_s = 0.0
        self._parts_ms: dict[StepPart, float] = {}
        self.own_ms = 0.0

    def begin(self, slots: Sequence[int]) -> None:
        """A step begins; the drafts that wait for these slots are the ones that it judges."""
        self._slots = list(slots)
        self._drawn = {slot: self._waiting.pop(slot) for slot in self._slots if slot in self._waiting}
        self._judged, self.own_ms = {}, 0.0
        self._parts_ms = {"verify": 0.0, "sampling": 0.0, "draft": 0.0}
        self._mark_s = self._now()

    def passed(self, part: StepPart) -> None:
        """A part of the step has ended here; the next begins."""
        now = self._now()
        self._parts_ms[part] += (now - self._mark_s) * 1e3
        self._mark_s = now

    def drafted(
        self, slots: Sequence[int], proposal: Proposal, logits_BKV: Tensor, target_ids_V: Tensor | None
    ) -> None:
        """Remember what a block was drawn from.

        Args:
            slots: one per request.
            proposal: as drawn.
            logits_BKV: any float dtype, of the drafter's rows.
            target_ids_V: int64, the target ids that they score; None where these are all.
        """
        began = self._now()
        logprobs_BK, entropies_BK = _under_q(proposal)
        if logprobs_BK is None or entropies_BK is None:
            logprobs_BK, entropies_BK = _under_softmax(proposal.ids_BK, logits_BKV, target_ids_V)
        confidence_BK = proposal.confidence_BK
        confidences = [[] for _ in slots] if confidence_BK is None else _numbers(confidence_BK)
        columns = zip(slots, _numbers(logprobs_BK), _numbers(entropies_BK), confidences, strict=True)
        for slot, logprobs, entropies, sure in columns:
            self._waiting[slot] = _Drawn(logprobs, entropies, sure)
        self._leave_out(began)

    def judged(self, logits_BTV: Tensor | None, draft_ids_BK: Tensor, tokens_BT: Tensor) -> None:
        """Read what the target thought of each row.

        Args:
            logits_BTV: the target's; None where no process has all of them.
            draft_ids_BK: int64, K = T - 1; -1 where there was none.
            tokens_BT: int64, emitted; -1 behind them.
        """
        if logits_BTV is None:
            return
        began = self._now()
        logprobs_BTV = logits_BTV.float().log_softmax(dim=-1)
        num_top = min(NUM_TOP, logprobs_BTV.shape[-1])
        best_BTN, ids_BTN = top_k_tokens(logprobs_BTV, num_top)
        columns = zip(
            self._slots,
            _numbers(_at(logprobs_BTV[:, :-1], draft_ids_BK)),
            _numbers(_at(logprobs_BTV, tokens_BT)),
            _numbers(_entropy(logprobs_BTV)),
            ids_BTN.tolist(),
            [_numbers(best_TN) for best_TN in best_BTN],
            strict=True,
        )
        for slot, drafts, emitted, entropies, ids, best in columns:
            pairs = [list(zip(*row, strict=True)) for row in zip(ids, best, strict=True)]
            top = [[pair for pair in row if pair[1] > LOWEST] for row in pairs]
            self._judged[slot] = _Judged(drafts, emitted, entropies, top)
        self._leave_out(began)

    def details_of(self, slot: int, record: StepRecord) -> StepDetails:
        """What the step that just ended tells of one request.

        Args:
            slot: the request's.
            record: of the step.
        """
        num_drafts, num_kept = record.num_draft_tokens, record.num_verified_accepted
        drawn, judged = self._drawn.get(slot), self._judged.get(slot)
        if drawn is None or len(drawn.logprobs) < num_drafts:
            drawn = _Drawn([], [], [])
        if judged is None:
            judged = _Judged([], [], [], [])
        has_bonus = record.bonus_id is not None and len(judged.emitted_logprobs) > num_kept
        parts = self._parts_ms
        return StepDetails(
            draft_logprobs=tuple(drawn.logprobs[:num_drafts]),
            draft_entropies=tuple(drawn.entropies[:num_drafts]),
            confidences=tuple(drawn.confidences[:num_drafts]),
            target_logprobs=tuple(judged.draft_logprobs[: min(num_kept + 1, num_drafts)]),
            target_entropies=tuple(judged.entropies[: num_kept + 1]),
            target_top=tuple(tuple(row) for row in judged.top[: num_kept + 1]),
            bonus_logprob=judged.emitted_logprobs[num_kept] if has_bonus else None,
            verify_ms=round(parts["verify"], 4),
            sampling_ms=round(parts["sampling"], 4),
            draft_ms=round(parts["draft"], 4),
            host_ms=round(max(0.0, record.step_ms - sum(parts.values())), 4),
        )

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def _leave_out(self, began: float) -> None:
        """What was done since then is nobody's time."""
        own_s = self._now() - began
        self.own_ms += own_s * 1e3
        self._mark_s += own_s


@runtime_checkable
class ShowsDrafts(Protocol):
    """A proposer that lets a watch see what it drew from."""

    watch: StepWatch | None


def watch_steps(proposer: object, device: torch.device) -> StepWatch:
    """Make a watch, which a proposer that can shows its blocks to.

    Args:
        proposer: what drafts, or None.
        device: of the models.
    """
    watch = StepWatch(device)
    if isinstance(proposer, ShowsDrafts):
        proposer.watch = watch
    return watch


@contextlib.contextmanager
def looking_away(proposer: object) -> Iterator[None]:
    """Steps of nobody, which are to take as long as they would without a watch."""
    watch = proposer.watch if isinstance(proposer, ShowsDrafts) else None
    if isinstance(proposer, ShowsDrafts):
        proposer.watch = None
    try:
        yield
    finally:
        if isinstance(proposer, ShowsDrafts):
            proposer.watch = watch


def _under_q(proposal: Proposal) -> tuple[Tensor | None, Tensor | None]:
    """Of drawn drafts, float32 [B, K] each; None for one-hot ones."""
    log_q_BKC, candidate_ids_BKC = proposal.log_q_BKC, proposal.candidate_ids_BKC
    if log_q_BKC is None or candidate_ids_BKC is None:
        return None, None
    log_q_BKC = log_q_BKC.float().log_softmax(dim=-1)
    is_drawn_BKC = candidate_ids_BKC == proposal.ids_BK.unsqueeze(-1)
    logprobs_BK = log_q_BKC.masked_fill(~is_drawn_BKC, -torch.inf).amax(dim=-1)
    return logprobs_BK, _entropy(log_q_BKC)


def _under_softmax(ids_BK: Tensor, logits_BKV: Tensor, target_ids_V: Tensor | None) -> tuple[Tensor, Tensor]:
    """Of each draft in its row, float32 [B, K] each."""
    logprobs_BKV = logits_BKV.float().log_softmax(dim=-1)
    columns_BK = ids_BK
    if target_ids_V is not None:
        is_of_draft_BKV = target_ids_V == ids_BK.unsqueeze(-1)
        columns_BK = torch.where(is_of_draft_BKV.any(-1), is_of_draft_BKV.long().argmax(-1), NO_TOKEN)
    return _at(logprobs_BKV, columns_BK), _entropy(logprobs_BKV)


def _at(logprobs: Tensor, ids: Tensor) -> Tensor:
    """Entries of given ids, [..., V] to [...]; -inf where there is no id."""
    found = logprobs.gather(-1, ids.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return found.masked_fill(ids == NO_TOKEN, -torch.inf)


def _entropy(logprobs: Tensor) -> Tensor:
    """In nats, [..., V] to [...]; what is impossible counts nothing."""
    return -(logprobs.exp() * logprobs.clamp(min=LOWEST)).sum(dim=-1)


def _numbers(values: Tensor) -> list[list[float]]:
    """On the host, to four places: a trace is read by people. What is below the lowest, or no number, is the lowest."""
    return values.double().nan_to_num(nan=LOWEST).clamp(min=LOWEST, max=-LOWEST).round(decimals=4).tolist()
