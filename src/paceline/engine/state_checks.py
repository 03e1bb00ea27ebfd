"""What must hold for the recurrent states of a hybrid target, asserted in debug mode beside `invariants.py`.

R1   A slot's state stands where its request does: at n, as the device has it, or behind the chunks of its prompt that
     were launched.
R2   Slots without a request and rows without a state are filled with NaN and stay so: nobody writes there, and who
     reads one meets NaN.
R3   A state that requests may begin with keeps its bits.
R4   What a step recorded is never read once it was committed: the records are filled with NaN.
R5   No store changes its address.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from paceline.engine.prefix_index import CachedText
from paceline.engine.recurrent_state import RecurrentState, StateRows
from paceline.engine.running import RunningRequest
from paceline.engine.slots import SlotState
from paceline.engine.snapshots import SnapshotPool


class StateChecks:
    """Raises AssertionError, named R1 to R5, at the first pass around which something does not hold.

    Args:
        recurrent: by slot.
        state: of the slots.
        kept: rows for later requests; None where none are kept.
        pool: who holds these; None with them.
    """

    def __init__(
        self, recurrent: RecurrentState, state: SlotState, kept: StateRows | None, pool: SnapshotPool | None
    ) -> None:
        self._recurrent, self._state, self._kept, self._pool = recurrent, state, kept, pool
        self._num_slots = recurrent.ends_S.shape[0] - 1
        self._poisoned_slots: dict[int, int] = {}
        self._poisoned_rows: dict[int, int] = {}
        self._num_taken = [0] * self._num_slots
        self._published: dict[int, tuple[CachedText, bytes]] = {}
        self._addresses = self._find_addresses()

    def before_pass(self, running: Iterable[RunningRequest]) -> None:
        """A pass is about to be launched.

        Args:
            running: every request in a slot.
        """
        for request in running:
            slot = request.slot
            assert slot is not None, "only admitted requests have a state"
            self._num_taken[slot] += 1
            if request.is_decoding and not self._state.is_alive[slot]:
                continue  # it ended, or its last step gave no token and is done again, which the host is about to read
            expected = int(self._state.lengths[slot]) if request.is_decoding else request.num_prefilled
            end = int(self._recurrent.ends_S[slot])
            assert end == expected, f"R1: {request.request_id} stands at {expected}, its state at {end}"
        self._check_rows()

    def after_pass(self, running: Iterable[RunningRequest]) -> None:
        """The results of a pass were taken in.

        Args:
            running: every request that still has a slot.
        """
        taken = {request.slot for request in running}
        free_slots = {slot: self._num_taken[slot] for slot in range(self._num_slots) if slot not in taken}
        self._poisoned_slots = self._poison(self._recurrent.rows, free_slots, self._poisoned_slots)
        self._recurrent.poison_records()
        self._check_rows()
        assert self._find_addresses() == self._addresses, "R5: states moved since the engine was set up"

    def _check_rows(self) -> None:
        if self._kept is None or self._pool is None:
            return
        published = {}
        for row, text in self._pool.published_rows().items():
            found = self._kept.checksum(row)
            known = self._published.get(row)
            assert known is None or known[0] is not text or known[1] == found, f"R3: the state in row {row} changed"
            published[row] = (text, found)
        self._published = published
        self._poisoned_rows = self._poison(self._kept, self._pool.free_rows(), self._poisoned_rows)

    def _poison(self, rows: StateRows, free: Mapping[int, int], known: Mapping[int, int]) -> dict[int, int]:
        """Fill what became free with NaN, and see whether what has been free since the last time stayed so."""
        for place, times in free.items():
            if known.get(place) != times:
                rows.poison(place)
            assert rows.is_poisoned(place), f"R2: somebody wrote to place {place}, which nobody has"
        return dict(free)

    def _find_addresses(self) -> list[int]:
        stores = [*self._recurrent.rows, *(self._kept or ())]
        return [part.data_ptr() for part in stores]
