"""The drafter's fingerprint: what each stage of its draft computation gave in training, replayed where it is to serve.

Verification hides a tap taken one layer off, a lost norm, another RoPE or another mask row: text stays right, only
acceptance falls. So training stores a short probe with a witness for every stage, and loading compares.

The taps are compared with the serving target's; every later stage is computed from stored inputs (`probe/stages.py`).
Last, the recorded contract is held against the served one: numbers do not see every field. A drafter recorded by an
earlier version has taps and context features only, and is checked by those.

P probe tokens, C compared positions, D width.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoint.contract import DrafterContract, capture_id
from paceline.checkpoint.export import DEQUANTIZED_MARK
from paceline.errors import CheckpointError
from paceline.models.drafters.table import Drafter
from paceline.models.probe.description import (
    FORMAT,
    FieldDifference,
    described,
    differing_fields,
    is_rounded,
    read_description,
)
from paceline.models.probe.places import Place, states_of_text
from paceline.models.probe.programs import program_of
from paceline.models.probe.search import is_beaten
from paceline.models.probe.stages import (
    FLOAT32,
    NUM_CONTEXT_ROWS,
    REACH,
    StageResult,
    check_tensor,
    compare_stage,
)
from paceline.models.targets.target import Target
from paceline.ops.sample_tokens import NO_TOKEN

# Relative error of a tap, SmolLM2-135M-Instruct, the shipped fingerprint (32 tokens, bf16 on a CPU): 0.000 in bf16
# (packed, plain, row-invariant), 0.016 in float16 and float32; on copies of the target quantised again 0.027 as Q8_0,
# 0.098 Q4_1, 0.156 Q5_0, 0.323 Q4_0. The nearest other layer is off by 0.21 to 0.51, and in each copy farther than the
# declared one: no absolute limit could tell a coarse copy from a tap one layer off, the comparison does. Random tiny
# targets amplify rounding: 0.05 in bf16, 0.54 as Q4_1, where other weights are off by 1.4.
NEAR_TOLERANCE = 0.15  # beyond it a load says that the target is not quite the one of training
TAP_TOLERANCE = 0.6
PROBE_TOKENS = 32  # of an exported drafter: a load runs them through the target, or half of them where that is enough
_CLEARLY_BETTER = 0.8  # another place matches "better" if its error is below this share of the declared one's
_FEWEST_TOKENS = 4
_NUM_QUICK_ROWS = 1  # of those compared; the target need not read the rest of the probe where these leave no doubt
_NOT_QUICK = frozenset({"block_hidden_alone"})  # what repeats another witness, with each block by itself
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TapComparison:
    """One tap against the stored one.

    Attributes:
        tap: index in the drafter's list.
        configured: the place that the contract asks for.
        error: relative error ||served - stored|| / ||stored|| there.
        best: the place that fits best.
        best_error: its relative error.
    """

    tap: int
    configured: Place
    error: float
    best: Place
    best_error: float

    @property
    def is_ok(self) -> bool:
        """Whether the declared place fits, and no other fits clearly better."""
        is_beaten = self.best != self.configured and self.best_error < _CLEARLY_BETTER * self.error
        return self.error <= TAP_TOLERANCE and not is_beaten


@dataclass(frozen=True)
class Replay:
    """A fingerprint replayed.

    Attributes:
        taps: one comparison per tap.
        results: one per stage, taps first and the config last.
        differences: fields that are not served as they were recorded.
    """

    taps: tuple[TapComparison, ...]
    results: tuple[StageResult, ...]
    differences: tuple[FieldDifference, ...] = ()

    @property
    def failed(self) -> tuple[StageResult, ...]:
        """Stages that differ."""
        return tuple(result for result in self.results if not result.is_ok)


@torch.no_grad()
def record_fingerprint(target: Target, drafter: Drafter, probe_ids: list[int]) -> dict[str, Tensor]:
    """Run a probe through target and drafter and keep what a later load compares.

    Args:
        target: the one trained on.
        drafter: the one to be exported.
        probe_ids: 32 to 64 tokens of ordinary text; at least 4.
    Returns:
        `probe_ids` int64 [P]; `tap.{t}` [C, D] per tap; what the stages of the drafter's family give, whole numbers as
        they are and states in bf16; `description` uint8, the contract.
    Raises:
        CheckpointError: the probe is too short.
    """
    contract = drafter.contract
    if len(probe_ids) < _FEWEST_TOKENS:
        raise CheckpointError(f"a fingerprint needs a probe of {_FEWEST_TOKENS} tokens, this one has {len(probe_ids)}")
    stored: dict[str, Tensor] = {"probe_ids": torch.tensor(probe_ids), "description": described(contract)}
    states = states_of_text(target, probe_ids, _compared(len(probe_ids)), [contract.aux_hidden_stream])
    for tap, place in enumerate(_declared(contract)):
        stored[f"tap.{tap}"] = _as_kept("tap", states[place])
    program = program_of(drafter)
    stored |= program.plan(probe_ids)
    for stage in program.stages:
        found = program.run(stage, target, stored)
        stored |= {name: _as_kept(name, tensor) for name, tensor in found.items()}
    return stored


@torch.no_grad()
def replay_fingerprint(
    target: Target, drafter: Drafter, stored: Mapping[str, Tensor], *, is_quick: bool = False
) -> Replay:
    """Compare every stage with what is stored, the taps at every place of the target, and the contract.

    Args:
        target: serving.
        drafter: as loaded.
        stored: the fingerprint.
        is_quick: leave out what repeats another witness, as a load does.
    Raises:
        CheckpointError: the fingerprint is damaged, proves nothing, or belongs to another kind of drafter.
    """
    check_stored(stored, drafter, target)
    comparisons = tuple(compare_taps(target, drafter, stored, num_rows=_NUM_QUICK_ROWS))
    if not all(c.best == c.configured and c.error <= NEAR_TOLERANCE / 2 for c in comparisons):
        comparisons = tuple(compare_taps(target, drafter, stored))
    worst = max(comparisons, key=lambda c: (not c.is_ok, not c.error <= 0, c.error))
    note = f"tap {worst.tap}: relative error {worst.error:.3f}, nearest other place {_other(worst)}"
    results = [StageResult("taps", worst.error / TAP_TOLERANCE, all(c.is_ok for c in comparisons), note)]
    program = program_of(drafter)
    inputs = {name: tensor for name, tensor in stored.items() if not (is_quick and name in _NOT_QUICK)}
    for stage in program.stages if not is_old(stored) else ("context",):
        found = program.run(stage, target, inputs)
        result = compare_stage(stage, found, inputs, is_quantised=is_rounded(drafter.contract, stored))
        if is_beaten(target, drafter, stored, result):
            result = replace(result, is_ok=False)
        results.append(result)
    if is_old(stored):
        return Replay(comparisons, tuple(results))
    fields = read_description(stored["description"])[1]
    differences = differing_fields(fields, drafter.contract, target.contract.vocab_size)
    note = f"other than recorded: {', '.join(d.name for d in differences)}" if differences else "as recorded"
    results.append(StageResult("config", float("inf") if differences else 0.0, not differences, note))
    return Replay(comparisons, tuple(results), differences)


def check_fingerprint(target: Target, drafter: Drafter, stored: Mapping[str, Tensor]) -> None:
    """Refuse a target on which the drafter does not compute what it was trained to, and name the cause.

    Raises:
        CheckpointError: the fingerprint cannot be replayed.
        CompatibilityError: a stage differs; says which, why, and what to do.
    """
    from paceline.models.diagnosis import explain  # only a load that fails pays for the search

    replay = replay_fingerprint(target, drafter, stored, is_quick=True)
    if replay.failed:
        whole = replay_fingerprint(target, drafter, stored)
        raise explain(target, drafter, stored, whole if whole.failed else replay)
    worst = max(replay.taps, key=lambda c: c.error)
    if worst.error > NEAR_TOLERANCE:
        _log.warning(
            "the target's states differ by up to %.0f %% from those the drafter was trained on: other weights or a "
            "coarser quantisation; acceptance may be lower",
            100 * worst.error,
        )


def is_old(stored: Mapping[str, Tensor]) -> bool:
    """Whether a fingerprint is of format 1, which has taps and context features only."""
    return "description" not in stored


def compare_taps(
    target: Target, drafter: Drafter, stored: Mapping[str, Tensor], *, num_rows: int | None = None
) -> list[TapComparison]:
    """Each stored tap against every place of the target, in all of its streams: they may lie close together.

    Args:
        target: serving.
        drafter: whose contract names the taps.
        stored: the fingerprint, checked.
        num_rows: how many of the stored rows to compare, from the first on; None is all.
    """
    contract = drafter.contract
    probe_ids = [int(token) for token in stored["probe_ids"]]
    positions = _old_compared(len(probe_ids)) if is_old(stored) else _compared(len(probe_ids))
    if num_rows is not None:
        positions = slice(positions.start, min(positions.stop, positions.start + num_rows))
    states = states_of_text(target, probe_ids[: positions.stop], positions, sorted(target.aux_hidden_streams))
    places, found = list(states), torch.stack(list(states.values())).float()
    comparisons = []
    for tap, configured in enumerate(_declared(contract)):
        errors = dict(zip(places, _errors(found, stored[f"tap.{tap}"][:num_rows]), strict=True))
        best = min(errors, key=lambda place: errors[place] if errors[place] >= 0 else float("inf"))  # NaN is no match
        comparisons.append(TapComparison(tap, configured, errors.get(configured, float("inf")), best, errors[best]))
    return comparisons


def check_stored(stored: Mapping[str, Tensor], drafter: Drafter, target: Target) -> None:
    """Refuse a fingerprint that is damaged or proves nothing.

    Raises:
        CheckpointError: says what is wrong with it.
    """
    contract = drafter.contract
    try:
        fields = _described_fields(stored)
        if fields is not None:
            _check_family(fields, contract)
        _check_probe(stored, target.contract.vocab_size)
        num_tokens = len(stored["probe_ids"])
        positions = _compared(num_tokens) if fields is not None else _old_compared(num_tokens)
        num_rows = positions.stop - positions.start
        shapes: dict[str, tuple[int | None, ...]] = {
            f"tap.{tap}": (num_rows, contract.target_hidden_size) for tap in range(contract.num_taps)
        }
        if fields is None:
            shapes["context"] = (num_rows, contract.hidden_size)
        else:
            shapes |= program_of(drafter).shapes(num_rows)
        present = set(stored) - {"probe_ids", "description", DEQUANTIZED_MARK}
        if present != set(shapes):
            lost, extra = sorted(set(shapes) - present), sorted(present - set(shapes))
            said = [f"lacks {', '.join(lost)}"] * bool(lost) + [f"holds {', '.join(extra)}"] * bool(extra)
            raise ValueError(f"it {' and '.join(said)}; the contract has {contract.num_taps} taps")
        for name, shape in shapes.items():
            check_tensor(name, stored[name], shape)
        _check_numbers(stored, target.contract.vocab_size)
        if DEQUANTIZED_MARK in stored and stored[DEQUANTIZED_MARK].dtype != torch.uint8:
            raise ValueError(f"{DEQUANTIZED_MARK} is {stored[DEQUANTIZED_MARK].dtype}, expected bytes")
    except ValueError as error:
        raise CheckpointError(
            f"the fingerprint cannot be replayed: {error}",
            origin={"drafter": contract.origin},
            hint="export the drafter again, or `paceline check --record` beside a target that is known to be right",
        ) from error


def _described_fields(stored: Mapping[str, Tensor]) -> Mapping[str, Any] | None:
    if is_old(stored):
        return None
    number, fields = read_description(stored["description"])
    if number != FORMAT:
        raise ValueError(f"it is of format {number}, this version reads 1 and {FORMAT}")
    return fields


def _check_family(fields: Mapping[str, Any], contract: DrafterContract) -> None:
    if fields["family"] != contract.family:
        raise ValueError(
            f"it was recorded with a drafter of family {fields['family']!r}, the config says {contract.family!r}"
        )
    ids = fields.get("target_layer_ids")
    if not isinstance(ids, list) or len(ids) != contract.num_taps:
        raise ValueError(f"it was recorded with the taps {ids}, the config says {list(contract.target_layer_ids)}")


def _check_probe(stored: Mapping[str, Tensor], vocab_size: int) -> None:
    if "probe_ids" not in stored:
        raise ValueError("it lacks probe_ids")
    probe = stored["probe_ids"]
    fewest = 2 if is_old(stored) else _FEWEST_TOKENS
    if not (probe.dim() == 1 and not probe.is_floating_point() and len(probe) >= fewest):
        raise ValueError(f"probe_ids is {probe.dtype} of shape {list(probe.shape)}, expected several ids")
    if not (int(probe.min()) >= 0 and int(probe.max()) < vocab_size):
        raise ValueError(
            f"probe_ids reaches from {int(probe.min())} to {int(probe.max())}, outside the target's vocabulary"
        )


def _check_numbers(stored: Mapping[str, Tensor], vocab_size: int) -> None:
    """Ids and positions that something is looked up by."""
    limits = {name: 2 * REACH for name in stored if name.endswith("_positions")}
    limits |= {name: vocab_size for name in stored if name.endswith("_ids")}
    if "draft_ids" in stored:
        shapes = {tuple(stored[name].shape) for name in ("candidate_ids", "candidate_log_q")}
        if {shape[:-1] for shape in shapes} != {tuple(stored["draft_ids"].shape)} or len(shapes) > 1:
            raise ValueError("draft_ids, candidate_ids and candidate_log_q are not of the same drafts")
        if stored["logit_ids"].shape != stored["logit_values"].shape:
            raise ValueError("logit_ids and logit_values are not of the same logits")
        is_best = stored["candidate_log_q"] >= stored["candidate_log_q"].amax(-1, keepdim=True) - 1e-3
        if not bool(((stored["candidate_ids"] == stored["draft_ids"].unsqueeze(-1)) & is_best).any(-1).all()):
            raise ValueError("draft_ids are not the likeliest of candidate_ids")
    if "block_lengths" in stored:
        limits["block_lengths"] = stored["block_context_positions"].shape[1] + 1
    for name, limit in limits.items():
        low, high = int(stored[name].min()), int(stored[name].max())
        least = {"block_lengths": 1, "candidate_ids": NO_TOKEN}.get(name, 0)
        if low < least or high >= limit:
            raise ValueError(f"{name} reaches from {low} to {high}, outside {least} to {limit - 1}")


def _declared(contract: DrafterContract) -> list[Place]:
    return [Place(contract.aux_hidden_stream, capture_id(layer)) for layer in contract.target_layer_ids]


def _compared(num_tokens: int) -> slice:
    """Positions whose taps are stored: the last few before the last; position 0 is an outlier in most targets."""
    num_rows = min(NUM_CONTEXT_ROWS, num_tokens - 2)
    return slice(num_tokens - 1 - num_rows, num_tokens - 1)


def _old_compared(num_tokens: int) -> slice:
    return slice(max(1, num_tokens - 8), num_tokens)


def _errors(found: Tensor, stored: Tensor) -> list[float]:
    """Relative error of every place, [places, C, D]; `stages.relative_error` of many at once."""
    if found.shape[1:] != stored.shape:
        return [float("inf")] * len(found)
    stored = stored.to(found.device).float()
    differences = (found - stored).flatten(1).norm(dim=1)
    errors: list[float] = (differences / stored.norm().clamp(min=1e-12)).tolist()
    return errors


def _other(comparison: TapComparison) -> str:
    if comparison.best != comparison.configured:
        return f"{comparison.best} at {comparison.best_error:.3f}"
    return "is farther"


def _as_kept(name: str, tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point():
        return tensor.cpu().clone()  # where all ids are target ids, two names hold one tensor
    return tensor.to(torch.float32 if name in FLOAT32 else torch.bfloat16).cpu().contiguous()
