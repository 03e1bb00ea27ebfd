"""Recurrent states and the requests they belong to: how a request begins, and which of its states are kept.

A state is worth keeping at block boundaries alone, since hits end there. In a prompt, chunks end where one is wanted,
and the slot's is copied. In a decode step nobody knows beforehand where it ends: where it may cross a boundary, the
device leaves the state behind the boundary that it does cross, and whether it crossed one follows from its results.

Targets without such states have this, too: it does nothing for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from paceline.engine.blocks import BlockPool
from paceline.engine.recurrent_state import RecurrentState, StateCopies, StateRows
from paceline.engine.request_blocks import StateStore
from paceline.engine.running import RunningRequest
from paceline.engine.settings import SnapshotSizes
from paceline.engine.slots import SlotState
from paceline.engine.snapshots import SnapshotPool, boundaries_within
from paceline.engine.state_checks import StateChecks
from paceline.engine.step import HostStep, StepBatch


class SlotStates:
    """Keeps the recurrent states of the requests in slots, and copies of them for later ones.

    Args:
        recurrent: by slot; None where the target has none.
        kept: the rows for copies; None keeps none.
        sizes: of these.
        pool: of the blocks that they lie behind.
        fence: the last step launched so far.

    Attributes:
        store: for `RequestBlocks`; None where no states are kept.
    """

    def __init__(
        self,
        recurrent: RecurrentState | None,
        kept: StateRows | None,
        sizes: SnapshotSizes,
        pool: BlockPool,
        *,
        fence: Callable[[], int],
    ) -> None:
        self._recurrent, self._kept, self._fence = recurrent, kept, fence
        self._block_size, self._spacing = pool.block_size, sizes.spacing
        self._launched: dict[int, dict[str, int]] = {}  # by number of the pass: rows by request
        self.store: StateStore | None = None
        if kept is not None:
            self.store = StateStore(SnapshotPool(sizes.num_snapshots, pool), sizes.spacing, kept.is_finite)

    def checks(self, state: SlotState) -> StateChecks | None:
        """What debug mode asserts of these states; None where there are none.

        Args:
            state: of the slots.
        """
        if self._recurrent is None:
            return None
        return StateChecks(self._recurrent, state, self._kept, self.store.pool if self.store is not None else None)

    @property
    def is_recurrent(self) -> bool:
        """Whether a request's state can be neither cut back nor left half done."""
        return self._recurrent is not None

    def begin(self, request: RunningRequest) -> None:
        """Give a slot's state to the request that got the slot: that of its cached prefix, or an empty one."""
        if self._recurrent is None:
            return
        assert request.slot is not None, "only admitted requests have a state"
        row = request.held.snapshot
        if row is None:
            self._recurrent.begin(request.slot)
            return
        assert self.store is not None and self._kept is not None, "somebody kept it"
        self._recurrent.begin(request.slot, self._kept, row, position=request.held.num_hit)
        request.held.snapshot = None
        self.store.pool.free(row, fence=self._fence())

    def chunk_end(self, request: RunningRequest, end: int) -> int:
        """Where a prompt's next chunk ends at the latest, so that a state can be kept there."""
        return min(self._boundaries(request, end), default=end)

    def keep_after_chunk(self, request: RunningRequest, end: int) -> None:
        """A chunk up to `end` was launched: keep the state behind it, if that is where one is wanted."""
        if self.store is None or self._kept is None or self._recurrent is None or request.slot is None:
            return
        if end not in self._boundaries(request, end):
            return
        row = self.store.pool.allocate()
        if row is not None:
            self._kept.copy_from(self._recurrent.rows, request.slot, to=row)
            request.held.states[end] = row

    def _boundaries(self, request: RunningRequest, end: int) -> list[int]:
        if self.store is None:
            return []
        return boundaries_within(
            request.num_prefilled,
            end,
            num_prompt_tokens=request.prefill_goal,
            block_size=self._block_size,
            spacing=self._spacing,
        )

    def keep_in_step(self, batch: StepBatch, requests: Sequence[RunningRequest], number: int) -> StepBatch:
        """Let a step leave the states behind boundaries that its requests may cross.

        Args:
            batch: about to be launched.
            requests: of the batch; the positions that they are known to have reached may be behind `batch.rows`.
            number: of the pass.
        """
        if self.store is None or self._kept is None:
            return batch
        rows, size = batch.rows, self._block_size
        row_of: dict[str, int] = {}
        for request, start in zip(requests, rows.starts, strict=True):
            if (start + rows.num_rows) // size > request.num_cached // size:
                row = self.store.pool.allocate()
                if row is not None:
                    row_of[request.request_id] = row
        if not row_of:
            return batch
        self._launched[number] = row_of
        rows_B = [row_of.get(request.request_id, -1) for request in requests]
        copies = StateCopies(self._kept, torch.tensor(rows_B), size)
        return replace(batch, state_copies=copies)

    def take_step(self, number: int, request: RunningRequest, start: int, step: HostStep) -> None:
        """A request's part of a step was taken in: keep the state that it left, if it crossed a boundary.

        Args:
            number: of the pass.
            request: whose.
            start: n before it.
            step: what the step decided; its rows up to the one that gave no token were committed.
        """
        row = self._launched.get(number, {}).pop(request.request_id, None)
        if row is None:
            return
        assert self.store is not None, "it gave the row"
        end = start + step.num_accepted + (0 if step.is_bad else 1)
        boundary = end // self._block_size * self._block_size
        if not start < boundary <= request.num_cached:
            self.store.pool.free(row, fence=self._fence())
            return
        states = request.held.states
        for position in list(states):
            if position > request.prefill_goal and position % self._spacing:
                self.store.pool.free(states.pop(position), fence=self._fence())
        states[boundary] = row

    def settle_step(self, number: int) -> None:
        """A step was taken in: whatever it left for requests that are gone is nobody's."""
        for row in self._launched.pop(number, {}).values():
            assert self.store is not None, "it gave the row"
            self.store.pool.free(row, fence=self._fence())

    def forget_steps(self) -> None:
        """After an interruption: what launched steps left is nobody's; `RequestBlocks.reclaim_states` frees it."""
        self._launched.clear()
