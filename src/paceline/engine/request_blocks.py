"""From requests to blocks: what an admission takes, what growth adds, what is published, what goes back. No torch here.

A request holds the blocks of all its positions and of `lookahead` more, so that the rows of a step, and of one that is
launched before its results are read, have a place. On a CPU it should hold one run of neighbours, which attention reads
through a view; where it does not, its blocks are copied into a run once there is one, and gathered until then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from paceline.engine.blocks import BlockPool
from paceline.engine.prefix_chain import PrefixChain, PrefixIdentity
from paceline.engine.running import RunningRequest
from paceline.engine.snapshots import SnapshotHit, SnapshotPool

_LEAST_FREE_SHARE = 0.25  # of the pool: with less, requests go on sharing blocks, as a run of one's own takes more


class SlotTables(Protocol):
    """The part of `BlockTables` that hands blocks to slots."""

    def assign(self, slot: int, blocks: Sequence[int]) -> None:
        """Replace a slot's blocks."""
        ...

    def append(self, slot: int, blocks: Sequence[int]) -> None:
        """Add blocks behind a slot's."""
        ...

    def clear(self, slot: int) -> None:
        """Leave a slot without blocks."""
        ...


class StoredBlocks(Protocol):
    """Whatever is stored under block ids, such as `BlockPlanes`."""

    def copy(self, source: Sequence[int], target: Sequence[int]) -> None:
        """Copy the contents of blocks to others."""
        ...

    def clear(self, blocks: Sequence[int]) -> None:
        """Zero blocks."""
        ...

    def are_finite(self, blocks: Sequence[int]) -> bool:
        """Whether there is neither NaN nor infinity in blocks; waits for the device."""
        ...


class BlockChecks(Protocol):
    """Told what becomes of blocks, in debug mode; such as `LoopChecks`."""

    def on_admission(self, request: RunningRequest, slot: int) -> None:
        """A request's blocks were set."""
        ...

    def on_publish(self, request: RunningRequest, index: int) -> None:
        """A block of a request is about to be published."""
        ...

    def on_free(self, blocks: Sequence[int], *, fence: int) -> None:
        """Blocks are about to be freed."""
        ...

    def on_clear(self, blocks: Sequence[int]) -> None:
        """Blocks were zeroed."""
        ...


@dataclass(frozen=True)
class StateStore:
    """The recurrent states that are kept for later requests, where a target has any.

    Attributes:
        pool: who holds which row.
        spacing: positions between two that a long text keeps for good.
        is_finite: whether there is neither NaN nor infinity in a row; waits for the device.
    """

    pool: SnapshotPool
    spacing: int
    is_finite: Callable[[int], bool]


class RequestBlocks:
    """Keeps requests in blocks of a pool.

    Args:
        pool: whose blocks.
        tables: told what each slot holds.
        planes: what the blocks contain.
        lookahead: positions beyond a request's own.
        identity: what cached keys belong to; a request's salt is added.
        context_limit: positions that the drafter has; 0 without one that keeps context.
        wants_runs: whether neighbours are worth a copy.
        fence: the last step launched so far.
        checks: told what becomes of blocks; None outside debug mode.
        states: where hits have to end; None where they may end behind any block.

    Attributes:
        num_consolidations: how often a request's blocks were copied into one run.
        num_fragmented: how often an admission or growth left a request in pieces.
        num_resumed_tokens: positions of resumed requests that were found cached.
    """

    def __init__(
        self,
        pool: BlockPool,
        tables: SlotTables,
        planes: StoredBlocks,
        *,
        lookahead: int,
        identity: PrefixIdentity,
        wants_runs: bool,
        context_limit: int = 0,
        fence: Callable[[], int],
        checks: BlockChecks | None = None,
        states: StateStore | None = None,
    ) -> None:
        self.pool, self.states = pool, states
        self._tables, self._planes, self._checks = tables, planes, checks
        self._context_limit = context_limit
        self._lookahead, self._identity, self._wants_runs, self._fence = lookahead, identity, wants_runs, fence
        self._block_size = pool.block_size
        self.num_consolidations = self.num_fragmented = self.num_resumed_tokens = 0

    # Admission

    def admit(self, request: RunningRequest, slot: int) -> bool:
        """Take the blocks that a request needs to be run, those found cached among them.

        Args:
            request: waiting; whether it is drafted for is settled.
            slot: that it gets.

        Returns:
            False, and nothing was taken, if there are too few.
        """
        held, pool = request.held, self.pool
        needed = self._num_blocks(request.prefill_goal + self._lookahead)
        if needed - request.prefill_goal // pool.block_size > pool.num_free:
            return False  # not even with everything cached
        text = request.text_ids
        if held.chain is None:
            held.chain = PrefixChain(self._identity_of(request), pool.block_size)
        most_tokens = request.prefill_goal - 1  # one row has to be run, for its logits or to draft behind
        hit = pool.match(held.chain, text, most_tokens=most_tokens)
        start = None if self.states is None else self.states.pool.match(hit)
        if self.states is not None:
            hit = [] if start is None else hit[: start.num_blocks]
        blocks = [cached.block for cached in hit]
        contexts = [cached.has_draft_context for cached in hit]
        pool.take(blocks)
        self._take_state(request, start)
        placed = self._place(blocks, needed, self._most_blocks(request))
        if placed is None:
            pool.put_back(blocks)
            self._drop_states(request)
            return False
        held.begin(contexts, pool.block_size, context_end=self._context_end(request))
        held.blocks, request.num_prefilled = blocks, held.num_hit
        if placed[: len(blocks)] != blocks:
            self._move(request, slot, placed)
        else:
            held.blocks = placed
            self._tables.assign(slot, placed)
        if self._checks is not None:
            self._checks.on_admission(request, slot)
        pool.record_query(num_queried_tokens=most_tokens, num_hit_tokens=held.num_hit)
        if request.is_resumed:
            self.num_resumed_tokens += held.num_hit
        return True

    def _take_state(self, request: RunningRequest, start: SnapshotHit | None) -> None:
        """Keep the state that a request is to begin with from being given up for another."""
        if self.states is not None and start is not None:
            self.states.pool.take(start.row)
            request.held.snapshot = start.row

    def _drop_states(self, request: RunningRequest) -> None:
        """A request gives back every row that it holds."""
        held = request.held
        if self.states is not None:
            for row in (held.snapshot, *held.states.values()):
                if row is not None:
                    self.states.pool.free(row, fence=self._fence())
        held.snapshot, held.states = None, {}

    def _context_end(self, request: RunningRequest) -> int | None:
        """Prompts get draft context whoever sends them: one that asks for drafts may begin the same way."""
        if request.is_drafted:
            return None
        return request.prefill_goal if request.prefill_goal < self._context_limit else 0

    def _identity_of(self, request: RunningRequest) -> PrefixIdentity:
        base = self._identity
        if request.cache_salt is None:
            return base
        return PrefixIdentity(base.target, base.drafter, base.adapter, request.cache_salt, base.reads_ahead)

    def _num_blocks(self, num_positions: int) -> int:
        return -(-num_positions // self.pool.block_size)

    def _most_blocks(self, request: RunningRequest) -> int:
        """Blocks that a request has at its end, unless it stops before."""
        return self._num_blocks(len(request.prompt_ids) + request.output.max_tokens + self._lookahead)

    def _place(self, hit: list[int], needed: int, room: int) -> list[int] | None:
        """Blocks for a whole request: behind its hit, or in a run of their own that the hit has to be copied into."""
        pool = self.pool
        if not self._wants_runs:
            more = pool.allocate(needed - len(hit), behind=hit[-1] if hit else None)
            return None if more is None else hit + more
        room = max(room, needed)
        run = pool.allocate_run(needed - len(hit), behind=hit[-1] if hit else None, room=room - len(hit))
        if run is not None and is_one_run(hit + run):
            return hit + run
        if run is not None:
            pool.free(run)
        run = self._spare_run(needed, room) if hit else None
        if run is not None:
            return run
        more = pool.allocate(needed - len(hit), behind=hit[-1] if hit else None, room=room - len(hit))
        if more is None:
            return None
        self.num_fragmented += 1
        return hit + more

    def _spare_run(self, count: int, room: int) -> list[int] | None:
        """A run for a copy, unless the pool is better off without one."""
        if self.pool.num_free - count < _LEAST_FREE_SHARE * self.pool.num_blocks:
            return None
        return self.pool.allocate_run(count, room=room)

    def _move(self, request: RunningRequest, slot: int, run: list[int]) -> None:
        """Copy what a request holds into a run of its own, which the index takes over before the old blocks go."""
        held = request.held
        old, num_published = held.blocks, held.num_published
        self._planes.copy(old, run[: len(old)])
        held.blocks, held.num_published = run, 0
        self._tables.assign(slot, run)
        if self._checks is not None and request.slot is not None:
            self._checks.on_admission(request, slot)
        self._offer(request, num_published)
        self._free(old)
        self.num_consolidations += 1

    def _free(self, blocks: Sequence[int]) -> None:
        fence = self._fence()
        if self._checks is not None:
            self._checks.on_free(blocks, fence=fence)
        self.pool.free(blocks, fence=fence)

    def lend(self, count: int) -> list[int]:
        """Blocks for something else than a request, in one run; none if there is none. `give_back` them."""
        return self.pool.allocate_run(count) or []

    def give_back(self, blocks: Sequence[int]) -> None:
        """Take back what was lent."""
        self._free(blocks)

    # While it runs

    def lacking(self, running: Iterable[RunningRequest]) -> list[RunningRequest]:
        """Those of some requests that decode and have to `grow`: in most steps, none."""
        size, lookahead = self._block_size, self._lookahead
        return [
            request
            for request in running
            if len(request.held.blocks) * size < request.num_cached + lookahead and request.is_decoding
        ]

    def grow(self, request: RunningRequest) -> bool:
        """Make sure that a decoding request has `lookahead` positions beyond those it has.

        Returns:
            False if it needs a block more and there is none; nothing has changed then.
        """
        held, pool = request.held, self.pool
        needed = self._num_blocks(request.num_cached + self._lookahead)
        missing = needed - len(held.blocks)
        if missing <= 0:
            return True
        assert request.slot is not None, "only admitted requests grow"
        room = max(self._most_blocks(request) - len(held.blocks), missing)
        more = pool.allocate(missing, behind=held.blocks[-1], room=room if self._wants_runs else None)
        if more is None:
            return False
        if self._wants_runs and not is_one_run(held.blocks + more):
            run = self._spare_run(needed, len(held.blocks) + room)
            if run is not None:
                pool.free(more)
                self._move(request, request.slot, run)
                return True
            self.num_fragmented += 1
        held.blocks = held.blocks + more
        self._tables.append(request.slot, more)
        return True

    def publish(self, request: RunningRequest) -> None:
        """Let later requests find the blocks of a request that are full, final and sound."""
        self.publish_below(request, request.num_final)

    def publish_below(self, request: RunningRequest, num_final: int) -> None:
        """`publish` where it is known how many positions are final and sound."""
        num_full = num_final // self._block_size
        if num_full > request.held.num_published:
            self._offer(request, num_full)

    def publish_if_sound(self, request: RunningRequest) -> None:
        """Publish what a prompt pass wrote that has not come to its end: nobody has seen logits behind it yet."""
        num_full = request.num_prefilled // self.pool.block_size
        held, states = request.held, self.states
        fresh = held.blocks[held.num_published : num_full]
        if not fresh or not self._planes.are_finite(fresh):
            return
        if states is not None and not all(states.is_finite(row) for row in held.states.values()):
            return
        self._offer(request, num_full)

    def _offer(self, request: RunningRequest, num_full: int) -> None:
        held, pool = request.held, self.pool
        chain = held.chain
        assert chain is not None, "an admission has looked for it"
        if pool.prefix_cache:
            text, size = request.text_ids, pool.block_size
            digests = chain.digests(text, num_full)
            for index in range(held.num_published, num_full):
                if self._checks is not None:
                    self._checks.on_publish(request, index)
                pool.publish(
                    held.blocks[index],
                    digests[index],
                    held.blocks[index - 1] if index > 0 else None,
                    text[index * size : (index + 1) * size],
                    next_id=chain.next_id(text, index),
                    has_draft_context=held.has_draft_context(index, size),
                )
        held.num_published = max(held.num_published, num_full)
        self._publish_states(request)

    def _publish_states(self, request: RunningRequest, *, is_leaving: bool = False) -> None:
        """Let later requests begin where a request's states were kept, once the blocks before are published.

        Behind its prompt, a request keeps only the latest to itself until it leaves: it is the place from which its
        answer would be gone on with, and the next one soon takes its place.
        """
        held, states, size = request.held, self.states, self.pool.block_size
        if states is None:
            return
        for position in sorted(held.states):
            is_lasting = is_leaving or position <= request.prefill_goal or position % states.spacing == 0
            if is_lasting and position <= held.num_published * size:
                row = held.states.pop(position)
                states.pool.publish(row, held.blocks[position // size - 1], fence=self._fence())

    # The end

    def release(self, request: RunningRequest, *, is_spoiled: bool) -> None:
        """Give a request's blocks back.

        Args:
            request: in a slot.
            is_spoiled: NaN or infinity may be in its blocks; those that are not published are zeroed, as a masked key
                counts nothing, but a masked NaN spoils the sum.
        """
        if request.slot is not None:
            self._tables.clear(request.slot)
        if not is_spoiled:
            self._publish_states(request, is_leaving=True)
        self._drop_states(request)
        blocks, request.held.blocks = request.held.blocks, []
        if is_spoiled:
            bad = [block for block in blocks if not self.pool.is_hashed(block)]
            self._planes.clear(bad)
            if self._checks is not None:
                self._checks.on_clear(bad)
        self._free(blocks)

    def reclaim(self, running: Iterable[RunningRequest], num_slots: int) -> None:
        """After an interruption: what requests hold is what they know of, and so is what the tables say.

        Args:
            running: all requests in slots.
            num_slots: of the engine.
        """
        by_slot = {request.slot: request.held.blocks for request in running}
        for slot in range(num_slots):
            self._tables.assign(slot, by_slot.get(slot, []))
        wanted = Counter(block for blocks in by_slot.values() for block in blocks)
        for block in range(1, self.pool.num_blocks):
            num_lost = self.pool.references(block) - wanted[block]
            if num_lost > 0:
                self._free([block] * num_lost)

    def reclaim_states(self, requests: Iterable[RunningRequest]) -> None:
        """After an interruption that everybody stepped back from: nobody holds a row.

        Args:
            requests: all that have not ended.
        """
        for request in requests:
            request.held.snapshot, request.held.states = None, {}
        if self.states is not None:
            self.states.pool.reclaim(fence=self._fence())


def is_one_run(blocks: Sequence[int]) -> bool:
    """Whether blocks are neighbours in ascending order."""
    return not blocks or list(blocks) == list(range(blocks[0], blocks[0] + len(blocks)))
