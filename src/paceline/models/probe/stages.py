"""Stages of a draft computation, and how what a stage gives is compared with what is stored.

Every stage is computed from what is *stored* for the stages before it, never from what was just computed. So a fault
shows in the stage where it happens and in no other, and several faults show one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from paceline.models.targets.target import Target

Stage = Literal["taps", "fc_input", "context", "keys", "embeddings", "rows", "recycled", "logits", "drafts", "config"]
TITLES: dict[Stage, str] = {
    "taps": "taps",
    "fc_input": "normed taps",
    "context": "context features",
    "keys": "context keys and values",
    "embeddings": "embedded block rows",
    "rows": "hidden rows",
    "recycled": "rows of the second pass",
    "logits": "draft logits",
    "drafts": "drafts",
    "config": "recorded config",
}

NUM_CONTEXT_ROWS = 16
REACH = 4096  # farthest position that is tried, where the drafter has so many
NUM_KEYS = 8
NUM_TOP = 8  # best draft ids whose logits are stored, and as many spread over the vocabulary beside them
FLOAT32 = frozenset({"logit_values", "candidate_log_q", "confidence"})  # all other numbers are kept in bf16
_QUANTISED = 5.0  # factor on the tolerance of what quantised weights make
_CLEAR = 1.0  # nats between two candidates, beyond which a draft may not flip


class Program(Protocol):
    """The draft computation of a family, cut into stages."""

    stages: tuple[Stage, ...]

    def plan(self, probe_ids: list[int]) -> dict[str, Tensor]:
        """The whole numbers that fix the computation: positions, anchors, lengths."""
        ...

    def shapes(self, num_rows: int) -> dict[str, tuple[int | None, ...]]:
        """Shape of everything that is stored beside the taps, with None for what follows from the recorded contract."""
        ...

    def run(self, stage: Stage, target: Target, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What a stage after the taps gives, from stored inputs; by the names under which it is stored."""
        ...


@dataclass(frozen=True)
class StageResult:
    """How one stage compares.

    Attributes:
        stage: which.
        error: the largest of its tensors, each in its own measure, as a multiple of what is tolerated.
        is_ok: whether it is what was recorded.
        note: the worst tensor and its numbers.
    """

    stage: Stage
    error: float
    is_ok: bool
    note: str


def relative_error(found: Tensor, stored: Tensor) -> float:
    """||found - stored|| / ||stored||, infinite for other shapes."""
    if found.shape != stored.shape:
        return float("inf")
    stored = stored.float()
    return float((found.float().to(stored.device) - stored).norm() / stored.norm().clamp(min=1e-12))


def spread_error(found: Tensor, stored: Tensor) -> float:
    """The same with each row's mean taken from the divisor: logits may share an offset that says nothing."""
    if found.shape != stored.shape:
        return float("inf")
    stored = stored.float()
    spread = (stored - stored.mean(-1, keepdim=True)).norm().clamp(min=1e-12)
    return float((found.float().to(stored.device) - stored).norm() / spread)


def share_unequal(found: Tensor, stored: Tensor) -> float:
    """Share of entries that differ, infinite for other shapes."""
    return float(found.to(stored.device).ne(stored).float().mean()) if found.shape == stored.shape else float("inf")


def mean_difference(found: Tensor, stored: Tensor) -> float:
    """Mean of |found - stored|, infinite for other shapes."""
    if found.shape != stored.shape:
        return float("inf")
    return float((found.float().to(stored.device) - stored.float()).abs().mean())


@dataclass(frozen=True)
class Measure:
    """How a stored tensor is compared, how far it may be off, and whether the drafter's weights make it."""

    compare: Callable[[Tensor, Tensor], float]
    tolerance: float
    text: str
    is_of_weights: bool = False


# Stages after the taps are computed from stored inputs, so that only arithmetic differs and, for embeddings and logits,
# the target's own tables. Largest errors seen with SmolLM2-135M-Instruct, recorded in bf16, replayed in bf16 (packed,
# plain, row-invariant), float16 and float32, and on copies of the target quantised as Q8_0, Q5_0, Q4_1 and Q4_0: states
# 0.003, hidden rows 0.008, embedded rows 0.117, logits 0.071, candidates 0.16 nats. Random tiny drafters, which are
# rougher: states 0.005, hidden rows 0.027. A drafter whose own matrices were rounded to 4 bits: states 0.085, hidden
# rows 0.138; only one that says so is allowed `_QUANTISED` times as much.
_STATE = Measure(relative_error, 0.04, "relative error", True)
_HIDDEN = Measure(relative_error, 0.06, "relative error", True)
_EMBEDDED = Measure(relative_error, 0.25, "relative error")
MEASURES: dict[str, Measure] = {
    "fc_input": _STATE,
    "context": _STATE,
    "context_key": _STATE,
    "context_value": _STATE,
    "block_embedding": _EMBEDDED,
    "row_embedding": _EMBEDDED,
    "draft_embedding": _EMBEDDED,
    "block_hidden": _HIDDEN,
    "block_hidden_alone": _HIDDEN,
    "row_hidden": _HIDDEN,
    "row_recycled": _HIDDEN,
    "second_hidden": _HIDDEN,
    "logit_values": Measure(spread_error, 0.15, "relative error"),
    "top_target_ids": Measure(share_unequal, 0.0, "share of other ids"),
    "draft_ids": Measure(share_unequal, 0.34, "share of other ids"),
    "candidate_log_q": Measure(mean_difference, 0.5, "mean difference in nats", True),
    "confidence": Measure(mean_difference, 0.1, "mean difference", True),
}


def compare_stage(
    stage: Stage, found: Mapping[str, Tensor], stored: Mapping[str, Tensor], *, is_quantised: bool = False
) -> StageResult:
    """Compare what a stage gives now with what it gave when the fingerprint was recorded.

    Args:
        stage: which.
        found: what it gives now.
        stored: the fingerprint.
        is_quantised: whether the drafter's own weights were rounded since: what they make is then allowed to differ.
    """
    worst, note = 0.0, ""
    for name, tensor in found.items():
        measure = MEASURES.get(name)
        if measure is None:
            continue
        error = measure.compare(tensor, stored[name])
        tolerance = measure.tolerance * (_QUANTISED if is_quantised and measure.is_of_weights else 1.0)
        multiple = error / tolerance if tolerance else error * 1e9
        if not multiple < worst or not note:  # NaN counts as worst
            worst, note = multiple, f"{measure.text} {error:.3f}, tolerated {tolerance:g}"
            if tensor.shape != stored[name].shape:
                note = f"{name} has shape {list(tensor.shape)}, recorded was {list(stored[name].shape)}"
            if not worst <= 1e30:
                break
    return StageResult(stage, worst, worst <= 1.0, note)


def check_tensor(name: str, tensor: Tensor, shape: tuple[int | None, ...]) -> None:
    """Refuse what no error can be measured against: NaN fits nothing, and nothing is told by zeros or by no rows.

    Args:
        name: in the fingerprint.
        tensor: as stored.
        shape: expected; None stands for any size but 0.
    Raises:
        ValueError: says what is wrong.
    """
    fits = tensor.dim() == len(shape) and all(
        wanted in (None, n) for wanted, n in zip(shape, tensor.shape, strict=True)
    )
    if not fits or tensor.numel() == 0:
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name} has shape {list(tensor.shape)}, expected [{wanted}]")
    is_number = name.endswith(("_ids", "_positions", "_lengths"))
    if is_number == tensor.is_floating_point():
        raise ValueError(f"{name} is {tensor.dtype}")
    if tensor.is_floating_point():
        if not bool(torch.isfinite(tensor).all()):
            raise ValueError(f"{name} holds NaN or infinity")
        if name not in FLOAT32 and not bool(tensor.flatten(1).any(dim=1).all()):
            raise ValueError(f"{name} has rows of nothing but zeros, which prove nothing")


def scored_ids(logits: Tensor) -> Tensor:
    """Draft ids whose logits are kept: the best few of each row, and as many spread over the vocabulary."""
    size = logits.shape[-1]
    best = logits.topk(min(NUM_TOP, size), dim=-1).indices
    spread = (torch.arange(NUM_TOP, device=logits.device) * size) // NUM_TOP
    return torch.cat((best, spread.expand(*best.shape[:-1], NUM_TOP)), dim=-1)


def settled(found: Tensor, stored: Tensor, candidates: Tensor, log_q: Tensor, is_out: Tensor) -> Tensor:
    """Drafts with everything taken from the record that a near-tie may turn: [B, K].

    A draft follows from those before it. So where the first difference of a block is a near-tie, to a recorded
    candidate that was hardly less likely, nothing behind it can be compared; nor where the recorded draft is no longer
    in the short list that was chosen from, which the head makes and the logits answer for.

    Args:
        found: drafts as they are now, [B, K].
        stored: as they were.
        candidates: the recorded ones of each row, [B, K, C].
        log_q: theirs.
        is_out: bool [B, K], the recorded draft fell off a list that is otherwise the recorded one.
    """
    differs = found.ne(stored)
    gap = log_q.amax(-1, keepdim=True) - log_q
    is_near_tie = ((candidates == found.unsqueeze(-1)) & (gap <= _CLEAR)).any(-1)
    is_first = differs & (differs.long().cumsum(-1) == 1)
    is_excused = (is_first & (is_near_tie | is_out)).long().cumsum(-1) > 0
    return torch.where(is_excused, stored, found)


def stretched(count: int, reach: int) -> list[int]:
    """Strictly rising distances from 1 to `reach` in about equal ratios; fewer where `reach` is short."""
    count = max(1, min(count, reach))
    distances: list[int] = []
    for index in range(count):
        wanted = round(reach ** (index / max(1, count - 1)))
        distances.append(max(wanted, distances[-1] + 1 if distances else 1))
    return [min(distance, reach - count + 1 + index) for index, distance in enumerate(distances)]
