"""What an engine's blocks are used for, and what became of requests that wanted some. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.engine.scheduler import Scheduler


@dataclass(frozen=True)
class BlockStats:
    """Blocks and the queue in front of them. Gauges are of the moment, counters since the engine was made.

    Attributes:
        num_blocks: blocks that can be given away.
        num_free_blocks: of them, those that a request can have now; cached text that nobody uses is among them.
        num_used_blocks: of them, those that requests hold.
        num_cached_blocks: of all, those that a later request can find, in use or not.
        num_fenced_blocks: of all, those that wait for a step that was launched while somebody held them.
        num_queried_tokens: tokens of admitted requests that were looked for in the prefix cache.
        num_hit_tokens: of them, found.
        num_resumed_tokens: of these, those of requests that had stepped back.
        num_evictions: cached blocks that were given up for others.
        num_cached_snapshots: recurrent states that a later request can begin with; 0 where the target has none.
        num_used_snapshots: states that requests hold for themselves, or are about to begin with.
        num_snapshot_evictions: of those, given up for others.
        num_preemptions: how often a request stepped back for lack of blocks.
        num_consolidations: how often a request's blocks were copied into one run, on a CPU.
        num_fragmented: how often a request's blocks were left in pieces there, which attention then gathers.
        num_deadlines_passed: requests that ended because their time was up.
        num_queue_refusals: requests that were refused because too many waited.
        num_running: requests in slots.
        num_waiting: requests without a slot.
        num_free_slots: slots without a request.
    """

    num_blocks: int
    num_free_blocks: int
    num_used_blocks: int
    num_cached_blocks: int
    num_fenced_blocks: int
    num_queried_tokens: int
    num_hit_tokens: int
    num_resumed_tokens: int
    num_evictions: int
    num_cached_snapshots: int
    num_used_snapshots: int
    num_snapshot_evictions: int
    num_preemptions: int
    num_consolidations: int
    num_fragmented: int
    num_deadlines_passed: int
    num_queue_refusals: int
    num_running: int
    num_waiting: int
    num_free_slots: int

    @classmethod
    def of(cls, scheduler: Scheduler) -> BlockStats:
        """Ask the scheduler and the pool behind it."""
        blocks = scheduler.blocks
        pool, states = blocks.pool, blocks.states
        return cls(
            num_blocks=pool.num_blocks - 1,
            num_free_blocks=pool.num_free,
            num_used_blocks=pool.num_used,
            num_cached_blocks=pool.num_cached,
            num_fenced_blocks=pool.num_fenced,
            num_queried_tokens=pool.num_queried_tokens,
            num_hit_tokens=pool.num_hit_tokens,
            num_resumed_tokens=blocks.num_resumed_tokens,
            num_evictions=pool.num_evictions,
            num_cached_snapshots=states.pool.num_cached if states is not None else 0,
            num_used_snapshots=states.pool.num_used if states is not None else 0,
            num_snapshot_evictions=states.pool.num_evictions if states is not None else 0,
            num_preemptions=scheduler.num_preemptions,
            num_consolidations=blocks.num_consolidations,
            num_fragmented=blocks.num_fragmented,
            num_deadlines_passed=scheduler.num_deadlines_passed,
            num_queue_refusals=scheduler.num_queue_refusals,
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_free_slots=scheduler.num_free_slots,
        )
