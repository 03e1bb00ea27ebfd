"""The blocks of one request, and what is known of them. Host only, no torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.engine.prefix_chain import PrefixChain


@dataclass(eq=False)
class HeldBlocks:
    """What a request holds of the caches.

    Attributes:
        blocks: ids, in the order of its positions.
        chain: digests of its text; None until it was first looked for.
        hit_contexts: for each block that was found cached at its admission, whether that has draft context.
        num_hit: positions of these blocks.
        num_published: blocks that were offered to the index, those found there included.
        context_start: positions below have no draft context.
        context_end: positions from here on have none, either; None while it is written.
        snapshot: row of the recurrent state that it begins with, until it has begun; None where it begins with nothing.
        states: rows of its own with recurrent states of its text, by position, until they are published.
    """

    blocks: list[int] = field(default_factory=list)
    chain: PrefixChain | None = None
    hit_contexts: list[bool] = field(default_factory=list)
    num_hit: int = 0
    num_published: int = 0
    context_start: int = 0
    context_end: int | None = None
    snapshot: int | None = None
    states: dict[int, int] = field(default_factory=dict)

    def begin(self, hit_contexts: list[bool], block_size: int, *, context_end: int | None) -> None:
        """Start anew with what an admission found cached.

        Args:
            hit_contexts: as the attribute.
            block_size: positions per block.
            context_end: as the attribute; 0 for a request whose rows no drafter gets.
        """
        self.hit_contexts = hit_contexts
        self.num_published = len(hit_contexts)
        self.num_hit = len(hit_contexts) * block_size
        last_lacking = max((index for index, has in enumerate(hit_contexts) if not has), default=-1)
        self.context_start = 0 if context_end == 0 else (last_lacking + 1) * block_size
        self.context_end = context_end

    def wants_context(self, position: int) -> bool:
        """Whether a prompt pass that begins at a position is to write draft context."""
        return self.context_end is None or position < self.context_end

    def has_draft_context(self, index: int, block_size: int) -> bool:
        """Whether the context keys of all positions of a block are there."""
        if index < len(self.hit_contexts):
            return self.hit_contexts[index]
        end = (index + 1) * block_size
        return index * block_size >= self.context_start and (self.context_end is None or end <= self.context_end)

    def end_context(self, length: int) -> None:
        """From this position on nothing more is drafted for, so later context may be missing."""
        if self.context_end is None:
            self.context_end = length
