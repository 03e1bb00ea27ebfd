"""Held-out acceptance during training, the conversations shared among the ranks. Draws nothing at random."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from paceline import __version__
from paceline.checkpoint.calibration import LEAST_BLOCKS, Calibration
from paceline.configuration.run import TrainRun
from paceline.models.drafters.table import Drafter
from paceline.training.data import Conversations
from paceline.training.evaluation_counters import EvaluationCounters, evaluation_counters
from paceline.training.features import TargetFeatures
from paceline.training.ranks import Ranks
from paceline.training.simulate import Simulation, simulate

_log = logging.getLogger(__name__)


def measure_held_out(
    run: TrainRun,
    drafter: Drafter,
    features: TargetFeatures,
    held_out: Mapping[str, Conversations],
    step: int,
    ranks: Ranks,
    *,
    mixed_precision: bool,
) -> dict[str, object]:
    """A row of metrics: simulated acceptance, file by file.

    Args:
        run: how many conversations, in which portions.
        drafter: whole on every rank.
        features: of the frozen target.
        held_out: by file.
        step: steps done.
        ranks: all of them must call; each walks every so-manieth conversation.
        mixed_precision: as in training.
    """
    wanted = run.evaluate.num_conversations
    if wanted:
        wanted = max(1, wanted // len(held_out))
    row: dict[str, object] = {"kind": "evaluate", "step": step}
    for name, conversations in held_out.items():
        count = min(wanted, len(conversations))
        if count == 0:
            continue
        own = conversations.select(range(ranks.rank, count, ranks.size))
        found = simulate(
            drafter,
            features,
            own,
            batch_size=run.evaluate.batch_size,
            max_length=run.data.max_length,
            mixed_precision=mixed_precision,
        )
        found = pooled(ranks.gathered(found))
        counts = evaluation_counters(
            drafter,
            features,
            own,
            batch_size=run.evaluate.batch_size,
            max_length=run.data.max_length,
            mixed_precision=mixed_precision,
        )
        row[name] = {
            "acceptance_length": found.acceptance_length,
            "all_anchor_length": found.all_anchor_length,
            "per_position": found.per_position,
            "num_conversations": count,
            "num_greedy_steps": found.num_greedy_steps,
            "greedy_kept": list(found.greedy_kept),
            **EvaluationCounters.pooled(ranks.gathered(counts)).row(),
        }
        _log.info(
            "step %d held out %s: acceptance length %.3f (all anchors %.3f)",
            step,
            name,
            found.acceptance_length,
            found.all_anchor_length,
        )
    return row


def pooled(parts: Sequence[Simulation]) -> Simulation:
    """One simulation over the conversations of several: counts are added, never means averaged."""
    if len(parts) == 1:
        return parts[0]
    walks = [walk for part in parts for walk in part.per_conversation]
    num_steps = sum(steps for _, steps in walks)
    if num_steps == 0:
        return parts[0]
    num_anchors = sum(anchors for anchors, _ in walks)
    kept, all_kept = [0] * len(parts[0].per_position), 0
    for part in parts:
        anchors, steps = (sum(walk[column] for walk in part.per_conversation) for column in (0, 1))
        kept = [so_far + round(share * steps) for so_far, share in zip(kept, part.per_position, strict=True)]
        all_kept += round((part.all_anchor_length - 1) * anchors)
    return Simulation(
        acceptance_length=1 + sum(kept) / num_steps,
        all_anchor_length=1 + all_kept / num_anchors,
        per_position=tuple(count / num_steps for count in kept),
        per_conversation=tuple(walks),
        num_greedy_steps=sum(part.num_greedy_steps for part in parts),
        greedy_kept=_added([part.greedy_kept for part in parts if part.greedy_kept]),
    )


def calibration_of(row: Mapping[str, object]) -> Calibration | None:
    """What serving shall be held against, from a row of `measure_held_out`; None where it has too little greedy text.

    Args:
        row: of the weights that are exported.
    """
    measured = {name: found for name, found in row.items() if isinstance(found, dict) and found["num_greedy_steps"]}
    num_blocks = sum(found["num_greedy_steps"] for found in measured.values())
    if num_blocks < LEAST_BLOCKS:
        return None
    kept = _added([tuple(found["greedy_kept"]) for found in measured.values()])
    return Calibration(
        method="walk",
        num_blocks=num_blocks,
        per_position=tuple(count / num_blocks for count in kept),
        texts=tuple(Path(name).name for name in measured),
        recorded_with={"paceline": __version__, "torch": torch.__version__},
    )


def _added(counts: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(map(sum, zip(*counts, strict=True)))
