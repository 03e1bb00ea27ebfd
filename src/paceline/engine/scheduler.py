"""Who runs, who waits, who steps back, and how much of a prompt runs between two decode steps. Host only, no torch.

Requests wait in the order of their priority, then of their arrival; nobody overtakes, so a request that needs many
blocks is not starved by small ones. An admitted request keeps its place: one that has to step back is the first of its
priority again. It steps back when a request that decodes needs a block and there is none: the least important one that
was admitted last, be it the one that asked. The pool holds one full context at least, so the first always gets on.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import time
from collections.abc import Iterable

from paceline.engine.request_blocks import RequestBlocks
from paceline.engine.running import RunningRequest
from paceline.errors import QueueFullError


def now_s() -> float:
    """The clock of deadlines."""
    return time.monotonic()


class Scheduler:
    """The queue, the slots and the running requests.

    Args:
        blocks: keeps requests in blocks.
        num_slots: requests that may run at the same time.
        max_num_waiting: requests that may wait beyond those for which slots are free; None for any number.

    Attributes:
        blocks: as given.
        running: requests in slots, in the order of their admission.
        waiting: requests without a slot, first come first.
        num_preemptions: how often a request stepped back.
        num_queue_refusals: requests that were refused because too many waited.
        num_deadlines_passed: requests whose time was up.
    """

    def __init__(self, blocks: RequestBlocks, *, num_slots: int, max_num_waiting: int | None = None) -> None:
        self.blocks = blocks
        self.running: list[RunningRequest] = []
        self.waiting: list[RunningRequest] = []
        self.num_preemptions = self.num_queue_refusals = self.num_deadlines_passed = 0
        self._num_slots, self._max_num_waiting = num_slots, max_num_waiting
        self._free_slots = list(reversed(range(num_slots)))
        self._arrivals, self._admissions = itertools.count(), itertools.count(1)
        self._deadlines: list[tuple[float, int]] = []  # with arrivals; a heap, where ended requests stay until then
        self._timed: dict[int, RunningRequest] = {}  # by arrival, those that have a deadline and have not ended
        self._stuck_at: tuple[int, int, int] | None = None  # what the pool was like when the first did not fit

    @property
    def num_free_slots(self) -> int:
        """Slots without a request."""
        return len(self._free_slots)

    # The queue

    def require_room(self, count: int) -> None:
        """Refuse requests that would have to wait where too many wait already.

        Raises:
            QueueFullError: the settings allow no more.
        """
        limit = self._max_num_waiting
        num_behind = len(self.waiting) + count - len(self._free_slots)
        if limit is not None and num_behind > limit:
            self.num_queue_refusals += count
            raise QueueFullError(
                f"{len(self.waiting)} requests wait and {len(self._free_slots)} slots are free; max_num_waiting is "
                f"{limit}",
                hint="the same request later, or a larger max_num_waiting",
            )

    def add(self, request: RunningRequest) -> None:
        """Queue a request behind those of its priority, and start the clock of its deadline."""
        request.arrival = next(self._arrivals)
        if request.timeout_s is not None:
            request.deadline_s = now_s() + request.timeout_s
            heapq.heappush(self._deadlines, (request.deadline_s, request.arrival))
            self._timed[request.arrival] = request
        self._queue(request)

    def _queue(self, request: RunningRequest) -> None:
        bisect.insort(self.waiting, request, key=_place_in_queue)

    def pop_expired(self) -> list[RunningRequest]:
        """Requests whose time is up, waiting or running, each given out once."""
        expired = []
        while self._deadlines and self._deadlines[0][0] <= now_s():
            request = self._timed.pop(heapq.heappop(self._deadlines)[1], None)
            if request is not None:
                expired.append(request)
        self.num_deadlines_passed += len(expired)
        return expired

    # Slots

    def admit(self) -> RunningRequest | None:
        """Give the first waiting request a slot and blocks; None if nobody waits or it has to wait on."""
        if not self.waiting or not self._free_slots:
            return None
        request, pool = self.waiting[0], self.blocks.pool
        moment = (request.arrival, pool.num_free, pool.num_cached)
        if self._stuck_at == moment and self.running:
            return None  # nothing has changed, and looking for a long prompt takes its time
        request.prefill_goal = request.num_cached if request.is_resumed else len(request.prompt_ids)
        if not self.blocks.admit(request, self._free_slots[-1]):
            self._stuck_at = moment
            return None
        request.slot = self._free_slots.pop()
        if request.admission == 0:
            request.num_cached_tokens = request.held.num_hit
        request.context_start = max(request.context_start, request.held.context_start)
        request.admission = next(self._admissions)
        self.running.append(request)
        del self.waiting[0]
        return request

    def next_to_prefill(self) -> RunningRequest | None:
        """The running request whose prompt is to be gone on with."""
        return next((request for request in self.running if not request.is_decoding), None)

    def remove(self, request: RunningRequest, *, is_spoiled: bool) -> None:
        """Take a request that has ended out of the queue, or out of its slot; its sound blocks stay to be found."""
        self._timed.pop(request.arrival, None)
        if request.slot is None:
            index = bisect.bisect_left(self.waiting, _place_in_queue(request), key=_place_in_queue)
            if self.waiting[index : index + 1] == [request]:
                del self.waiting[index]
            return
        self.blocks.publish(request)
        self._leave(request, is_spoiled=is_spoiled)

    def _leave(self, request: RunningRequest, *, is_spoiled: bool) -> None:
        self.blocks.release(request, is_spoiled=is_spoiled)
        self.running.remove(request)
        assert request.slot is not None, "it runs"
        self._free_slots.append(request.slot)
        request.slot = None

    def rebuild(self, requests: Iterable[RunningRequest]) -> None:
        """After an interruption: queue, slots and blocks follow from what each request knows of itself.

        Args:
            requests: all that have not ended.
        """
        for request in requests:
            if request.slot is None or not request.held.blocks:  # on its way in or out
                request.slot, request.held.blocks, request.num_prefilled = None, [], 0
        self.waiting = sorted((request for request in requests if request.slot is None), key=_place_in_queue)
        self.running = sorted(
            (request for request in requests if request.slot is not None), key=lambda request: request.admission
        )
        taken = {request.slot for request in self.running}
        self._free_slots = [slot for slot in reversed(range(self._num_slots)) if slot not in taken]
        self.blocks.reclaim(self.running, self._num_slots)
        self._stuck_at = None

    # Stepping back

    def victim(self) -> RunningRequest:
        """Who steps back next: of the least important requests the one that was admitted last."""
        return max(self.running, key=lambda request: (request.priority, request.admission))

    def preempt(self, request: RunningRequest) -> None:
        """Take a request's slot and blocks, publish what it has, and let it wait in front of those of its priority.

        Args:
            request: running; nothing of it is in flight.
        """
        if request.is_decoding or request.is_resumed:
            self.blocks.publish(request)
        else:
            self.blocks.publish_if_sound(request)
        self._leave(request, is_spoiled=False)
        request.num_prefilled = request.num_drawn = request.num_waiting = 0
        request.epoch += 1
        request.num_preemptions += 1
        self.num_preemptions += 1
        self._queue(request)


def _place_in_queue(request: RunningRequest) -> tuple[int, int]:
    return request.priority, request.arrival
