"""What an engine counts. Ratios of these counts are defined in `trace/acceptance.py` and nowhere else."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from paceline.engine.alarm import AlarmState
from paceline.engine.block_stats import BlockStats
from paceline.engine.draft_planner import DraftPlanner
from paceline.models.drafters.short_list import ShortList
from paceline.models.layers import LinearMode
from paceline.trace.step import StepRecord


@dataclass(frozen=True)
class ComponentStats:
    """What an engine consists of: where its memory goes, and what carries it out.

    Attributes:
        target_weight_bytes: parameters of the target.
        drafter_weight_bytes: parameters of the drafter, tables that it shares with the target left out.
        target_cache_bytes: the target's keys and values, or its latent rows, of all blocks.
        recurrent_state_bytes: the target's recurrent states of all slots, and records of a step; 0 where it has none.
        snapshot_bytes: recurrent states that are kept for later requests, all of them.
        drafter_cache_bytes: the drafter's context, of all blocks.
        token_rules_bytes: what rules on tokens need; 0 before the first request with any.
        linear_mode: arithmetic of the linears.
        attention: form of attention: "row_invariant", "per_request" or "batched".
        implementations: "reference" or "triton", for each operation that has run in this process, by name and device.
        method: "plain", or how drafts are made.
    """

    target_weight_bytes: int
    drafter_weight_bytes: int
    target_cache_bytes: int
    recurrent_state_bytes: int
    snapshot_bytes: int
    drafter_cache_bytes: int
    token_rules_bytes: int
    linear_mode: LinearMode
    attention: str
    implementations: Mapping[str, str]
    method: str


@dataclass(frozen=True)
class EngineStats(BlockStats, ComponentStats):
    """A snapshot of an engine's counters since it was made, beside its blocks and its components.

    Attributes:
        num_steps: decode steps of the batch.
        num_request_steps: the same, counted once per request taking part.
        num_draft_tokens: drafts judged.
        num_accepted: drafts kept and delivered.
        drafted_per_position: drafts judged at each position of a block.
        accepted_per_position: of them, kept and delivered.
        num_prefill_tokens: prompt tokens run.
        num_output_tokens: tokens delivered.
        num_finished: requests that ended, whatever the reason.
        num_aborted: of them, aborted.
        num_numeric_errors: of them, ended by NaN or infinity in the target's logits.
        num_dead_ends: of them, ended because their rules left no token.
        num_undrafted: requests that went on without drafts because the drafter has fewer positions than they needed.
        num_impossible_drafts: drafts that their own distribution gave probability 0; anything but 0 is a bug.
        num_spoiled_blocks: blocks run again without drafts because a draft overflowed.
        num_drafts: drafts that the next block in "adaptive" mode gets; `num_draft_tokens` of the settings before there
            was one.
        num_switched_off: how often "adaptive" mode stopped drafting.
        num_probes: blocks that it drafted while off, to find out whether drafting pays again.
        num_held_back: drafts that were drawn but not judged, because too little was expected of them.
        mean_step_ms: wall time per decode step; 0 before the first.
        num_recordings: CUDA graphs that were captured.
        num_replayed_steps: decode steps that were played back from one.
        num_unrecorded_steps: decode steps that were not, where steps are recorded: the first of each shape, and those
            that cannot be.
        num_replayed_prompts: passes of prompts that were played back.
        num_unrecorded_prompts: passes of prompts that were not, where these are recorded: the first of each shape,
            those of long prompts, and chunks before a prompt's last.
        num_failed_recordings: shapes of steps and passes whose capture failed, which the log explains; they run
            unrecorded.
        num_listed_ids: ids of the short list that drafts are chosen from; None where it is all that the drafter can.
        listed_share: share of the counted tokens that the list covers.
        alarm: whether drafting earns too little, see `alarm.py`.
    """

    num_steps: int
    num_request_steps: int
    num_draft_tokens: int
    num_accepted: int
    drafted_per_position: tuple[int, ...]
    accepted_per_position: tuple[int, ...]
    num_prefill_tokens: int
    num_output_tokens: int
    num_finished: int
    num_aborted: int
    num_numeric_errors: int
    num_dead_ends: int
    num_undrafted: int
    num_impossible_drafts: int
    num_spoiled_blocks: int
    num_drafts: int
    num_switched_off: int
    num_probes: int
    num_held_back: int
    mean_step_ms: float
    num_recordings: int
    num_replayed_steps: int
    num_unrecorded_steps: int
    num_replayed_prompts: int
    num_unrecorded_prompts: int
    num_failed_recordings: int
    num_listed_ids: int | None = None
    listed_share: float | None = None
    alarm: AlarmState = field(default_factory=AlarmState)


class Counters:
    """The running totals behind `EngineStats`."""

    def __init__(self, num_draft_tokens: int) -> None:
        self.num_steps = self.num_request_steps = self.num_prefill_tokens = self.num_output_tokens = 0
        self.num_finished = self.num_aborted = self.num_numeric_errors = self.num_dead_ends = 0
        self.num_undrafted = self.num_impossible_drafts = self.num_spoiled_blocks = self.num_held_back = 0
        self.num_recordings = self.num_replayed_steps = self.num_unrecorded_steps = 0
        self.num_replayed_prompts = self.num_unrecorded_prompts = self.num_failed_recordings = 0
        self.total_step_ms = 0.0
        # How many steps drafted, and kept, exactly so many: a step adds to two numbers, not to one per position.
        self._drafted = [0] * (num_draft_tokens + 1)
        self._accepted = [0] * (num_draft_tokens + 1)

    def count_step(self, record: StepRecord) -> None:
        """Add one request's part of a step."""
        self.num_request_steps += 1
        self._drafted[len(record.proposed_ids)] += 1
        self._accepted[record.num_accepted] += 1

    @property
    def drafted_per_position(self) -> list[int]:
        """Steps that had a draft at each position of a block."""
        return _reaching(self._drafted)

    @property
    def accepted_per_position(self) -> list[int]:
        """Of them, those that kept and delivered it."""
        return _reaching(self._accepted)

    def snapshot(
        self,
        planner: DraftPlanner,
        blocks: BlockStats,
        components: ComponentStats,
        *,
        short_list: ShortList | None = None,
    ) -> EngineStats:
        """Put the totals beside what the engine knows of the moment."""
        controller = planner.controller
        return EngineStats(
            **_values(blocks),
            **_values(components),
            num_steps=self.num_steps,
            num_request_steps=self.num_request_steps,
            num_draft_tokens=sum(depth * count for depth, count in enumerate(self._drafted)),
            num_accepted=sum(depth * count for depth, count in enumerate(self._accepted)),
            drafted_per_position=tuple(self.drafted_per_position),
            accepted_per_position=tuple(self.accepted_per_position),
            num_prefill_tokens=self.num_prefill_tokens,
            num_output_tokens=self.num_output_tokens,
            num_finished=self.num_finished,
            num_aborted=self.num_aborted,
            num_numeric_errors=self.num_numeric_errors,
            num_dead_ends=self.num_dead_ends,
            num_undrafted=self.num_undrafted,
            num_impossible_drafts=self.num_impossible_drafts,
            num_spoiled_blocks=self.num_spoiled_blocks,
            num_drafts=controller.num_drafts if controller is not None else planner.num_draft_tokens,
            num_switched_off=controller.num_switched_off if controller is not None else 0,
            num_probes=controller.num_probes if controller is not None else 0,
            num_held_back=self.num_held_back,
            mean_step_ms=self.total_step_ms / max(1, self.num_steps),
            num_recordings=self.num_recordings,
            num_replayed_steps=self.num_replayed_steps,
            num_unrecorded_steps=self.num_unrecorded_steps,
            num_replayed_prompts=self.num_replayed_prompts,
            num_unrecorded_prompts=self.num_unrecorded_prompts,
            num_failed_recordings=self.num_failed_recordings,
            num_listed_ids=None if short_list is None else len(short_list.ids_V),
            listed_share=None if short_list is None else short_list.coverage,
            alarm=planner.alarm.state,
        )


def _values(part: BlockStats | ComponentStats) -> dict[str, Any]:
    return {entry.name: getattr(part, entry.name) for entry in fields(part)}


def _reaching(num_steps: list[int]) -> list[int]:
    """From steps of depth exactly d to steps deeper than position 0, 1, ..."""
    return list(itertools.accumulate(reversed(num_steps[1:])))[::-1]
