"""500 random schedules: whatever happens around a request, it comes out as it does alone, and every block comes back.

`python -m tests.random_schedules` runs more of them. Behind them planted faults; some schedule has to see each, by the
engine's own checks or, with these switched off, by what comes out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.random_schedules import check_schedules
from torch import Tensor

from paceline.engine import step as step_module
from paceline.engine.block_planes import BlockPlanes
from paceline.engine.held_blocks import HeldBlocks
from paceline.engine.proposal import Rows
from paceline.engine.recurrent_state import RecurrentState
from paceline.engine.request_blocks import RequestBlocks
from paceline.engine.running import RunningRequest
from paceline.engine.scheduler import Scheduler
from paceline.engine.slot_states import SlotStates
from paceline.errors import EngineFaultError

NUM_PORTIONS, PER_PORTION = 10, 50
PORTION_WITH_FAULTS = 0  # the faults are planted in schedules that a test finds to be sound without them


@pytest.mark.parametrize("portion", range(NUM_PORTIONS))
def test_every_request_comes_out_as_it_does_alone(portion: int) -> None:
    check_schedules(PER_PORTION, portion)


def free_what_was_hit(patch: pytest.MonkeyPatch) -> None:
    """A hit is read without being held: once its first owner has gone, its blocks are anybody's."""
    admit, release = RequestBlocks.admit, RequestBlocks.release
    unheld: dict[str, list[int]] = {}

    def admit_without(self: RequestBlocks, request: RunningRequest, slot: int) -> bool:
        moves = self.num_consolidations
        is_admitted = admit(self, request, slot)
        if is_admitted and moves == self.num_consolidations:
            unheld[request.request_id] = request.held.blocks[: len(request.held.hit_contexts)]
            self.pool.put_back(unheld[request.request_id])
        return is_admitted

    def release_rest(self: RequestBlocks, request: RunningRequest, *, is_spoiled: bool) -> None:
        gone = unheld.pop(request.request_id, [])
        request.held.blocks = [block for block in request.held.blocks if block not in gone]
        release(self, request, is_spoiled=is_spoiled)

    patch.setattr(RequestBlocks, "admit", admit_without)
    patch.setattr(RequestBlocks, "release", release_rest)


def publish_the_anchor(patch: pytest.MonkeyPatch) -> None:
    """A block counts as full with the last token delivered, whose own keys the next step would write."""
    num_final = RunningRequest.num_final.fget
    assert num_final is not None

    def too_many(self: RunningRequest) -> int:
        final: int = num_final(self)
        return final + int(final == self.num_cached)

    patch.setattr(RunningRequest, "num_final", property(too_many))


def feed_drafted_prompts_alone(patch: pytest.MonkeyPatch) -> None:
    """Prompts of requests without drafts are found as if the drafter's keys were in them, and never were."""
    patch.setattr(HeldBlocks, "wants_context", lambda self, _position: self.context_end is None)


def copy_the_target_alone(patch: pytest.MonkeyPatch) -> None:
    """Blocks are gathered into one run, but the drafter's keys stay behind."""

    def copy(self: BlockPlanes, source: list[int], target: list[int]) -> None:
        self.caches[0].copy_blocks(source, target)

    patch.setattr(BlockPlanes, "copy", copy)


def lose_a_token(patch: pytest.MonkeyPatch) -> None:
    """Who steps back comes again without the last token that was delivered."""
    preempt = Scheduler.preempt

    def forgetful(self: Scheduler, request: RunningRequest) -> None:
        preempt(self, request)
        if len(request.output.token_ids) > 1:
            request.output.token_ids.pop()

    patch.setattr(Scheduler, "preempt", forgetful)


def grow_too_late(patch: pytest.MonkeyPatch) -> None:
    """Blocks come once they are full, not before a step writes behind them."""
    grow = RequestBlocks.grow

    def late(self: RequestBlocks, request: RunningRequest) -> bool:
        lookahead, self._lookahead = self._lookahead, 1
        try:
            return grow(self, request)
        finally:
            self._lookahead = lookahead

    patch.setattr(RequestBlocks, "grow", late)


def start_where_the_host_stands(patch: pytest.MonkeyPatch) -> None:
    """A step takes its rows' positions from the host, which has not read the step before."""

    def stand(rows: Rows, found: Any, choice: Any) -> Rows:
        return rows

    patch.setattr(step_module, "rows_where_they_stand", stand)


FAULTS: tuple[Callable[[pytest.MonkeyPatch], None], ...] = (
    free_what_was_hit,
    publish_the_anchor,
    feed_drafted_prompts_alone,
    copy_the_target_alone,
    lose_a_token,
    grow_too_late,
    start_where_the_host_stands,
)


@pytest.mark.parametrize("is_checked", [True, False], ids=["checks on", "checks off"])
@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
def test_a_planted_fault_is_seen(plant: Callable[[pytest.MonkeyPatch], None], is_checked: bool) -> None:
    with pytest.raises((AssertionError, EngineFaultError)):
        check_schedules(PER_PORTION, PORTION_WITH_FAULTS, is_checked=is_checked, plant=plant)


# Hybrid targets

NUM_HYBRID, SEED_OF_HYBRID = 12, 2_001


@pytest.mark.parametrize("portion", range(4))
def test_every_request_of_a_hybrid_target_comes_out_as_it_does_alone(portion: int) -> None:
    """Stepping back, hits, interruptions and few snapshots, as for dense targets."""
    check_schedules(NUM_HYBRID, SEED_OF_HYBRID + portion, is_hybrid=True)


def keep_the_old_state(patch: pytest.MonkeyPatch) -> None:
    """A slot is not emptied when it changes hands."""
    begin = RecurrentState.begin

    def unchanged(self: RecurrentState, slot: int, *source: Any, position: int = 0) -> None:
        if source:
            begin(self, slot, *source, position=position)
        self.ends_S[slot] = position

    patch.setattr(RecurrentState, "begin", unchanged)


def take_in_a_refused_row(patch: pytest.MonkeyPatch) -> None:
    """One row more than was kept is taken in, where there is one."""
    commit = RecurrentState.commit

    def greedy(self: RecurrentState, slots: Tensor, counts: Tensor, num_rows: int, copies: Any = None) -> None:
        commit(self, slots, (counts + 1).clamp(max=num_rows), num_rows, copies)
        self.ends_S[slots] -= (counts + 1).clamp(max=num_rows) - counts

    patch.setattr(RecurrentState, "commit", greedy)


def go_on_after_an_interruption(patch: pytest.MonkeyPatch) -> None:
    """Requests keep their slots, with states that may have moved on in part."""
    patch.setattr(SlotStates, "is_recurrent", property(lambda _: False))


HYBRID_FAULTS: tuple[Callable[[pytest.MonkeyPatch], None], ...] = (
    keep_the_old_state,
    take_in_a_refused_row,
    go_on_after_an_interruption,
)


@pytest.mark.parametrize("is_checked", [True, False], ids=["checks on", "checks off"])
@pytest.mark.parametrize("plant", HYBRID_FAULTS, ids=lambda plant: plant.__name__)
def test_a_planted_fault_of_states_is_seen(plant: Callable[[pytest.MonkeyPatch], None], is_checked: bool) -> None:
    """In the first portion."""
    with pytest.raises(AssertionError):
        check_schedules(NUM_HYBRID, SEED_OF_HYBRID, is_checked=is_checked, is_hybrid=True, plant=plant)
