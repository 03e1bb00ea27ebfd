"""Which texts are cached, and in which block each of them is.

Host only. A text is one block's tokens behind the text before it. It is found by its digest and recognised by its
tokens and the texts before it, so that two texts with one digest cost a hit and never give a wrong one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from paceline.engine.prefix_chain import PrefixChain, pack_tokens


@dataclass(frozen=True)
class CachedBlock:
    """A block of a hit. Without draft context its positions hold keys of the target alone."""

    block: int
    has_draft_context: bool


@dataclass(eq=False, slots=True)
class CachedText:
    """One entry of the index.

    Attributes:
        digest: what it is found by.
        parent: the text before it; None for a first block.
        content: its tokens, packed.
        next_id: the token behind it where its keys depend on that one.
        block: what a hit gets.
        copies: other blocks with the same text, each in use; one of them stands in where `block` leaves.
        children: the texts behind it.
        snapshot: where the recurrent state right behind it is kept, for targets that have one; see `snapshots.py`.
    """

    digest: bytes
    parent: CachedText | None
    content: bytes
    next_id: int | None
    block: int
    copies: list[int] = field(default_factory=list)
    children: set[CachedText] = field(default_factory=set)
    snapshot: int | None = None

    def equals(self, parent: CachedText | None, content: bytes, next_id: int | None) -> bool:
        """Whether it is that very text, whatever the digests say."""
        return self.parent is parent and self.content == content and self.next_id == next_id


class PrefixIndex:
    """Digest to text, and block to text.

    Args:
        num_blocks: of the pool.
        block_size: positions per block.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self._by_digest: dict[bytes, CachedText] = {}
        self._by_block: list[CachedText | None] = [None] * num_blocks
        self._has_draft_context = bytearray(num_blocks)

    def __len__(self) -> int:
        return len(self._by_digest)

    def __iter__(self) -> Iterator[CachedText]:
        """Every text, each after the one before it."""
        return iter(self._by_digest.values())

    def text(self, block: int) -> CachedText | None:
        """What a block holds; None where that was not published."""
        return self._by_block[block]

    def has_draft_context(self, block: int) -> bool:
        """Whether a published block's context keys were written."""
        return bool(self._has_draft_context[block])

    def match(self, chain: PrefixChain, token_ids: Sequence[int], *, most_tokens: int) -> list[CachedBlock]:
        """The longest cached prefix of a text, in whole blocks, within `most_tokens`."""
        hit: list[CachedBlock] = []
        if not self._by_digest:
            return hit
        before: CachedText | None = None
        num_blocks = min(most_tokens // self.block_size, chain.num_blocks(len(token_ids)))
        for index, digest in enumerate(chain.digests(token_ids, num_blocks)):
            text = self._by_digest.get(digest)
            content = pack_tokens(token_ids[index * self.block_size : (index + 1) * self.block_size])
            if text is None or not text.equals(before, content, chain.next_id(token_ids, index)):
                break
            hit.append(CachedBlock(text.block, self.has_draft_context(text.block)))
            before = text
        return hit

    def enter(
        self,
        block: int,
        digest: bytes,
        parent: CachedText | None,
        token_ids: Sequence[int],
        *,
        next_id: int | None,
        has_draft_context: bool,
    ) -> CachedText | None:
        """Note what a block holds: as the text's own block if it is the first, else as a copy.

        Returns:
            The text; None where its digest belongs to another one.
        """
        content = pack_tokens(token_ids)
        text = self._by_digest.get(digest)
        if text is None:
            text = self._by_digest[digest] = CachedText(digest, parent, content, next_id, block)
            if parent is not None:
                parent.children.add(text)
        elif text.equals(parent, content, next_id):
            text.copies.append(block)
        else:
            return None
        self._by_block[block] = text
        self._has_draft_context[block] = has_draft_context
        return text

    def best_copy(self, text: CachedText) -> int | None:
        """The lowest copy with draft context; the lowest of all where none has it; None without copies."""
        return min(text.copies, key=lambda copy: (not self.has_draft_context(copy), copy), default=None)

    def exchange(self, text: CachedText, copy: int, *, keep: bool) -> None:
        """Let a copy be the text's block.

        Args:
            text: whose.
            copy: among its copies.
            keep: whether the block before it stays, as a copy.
        """
        block = text.block
        text.copies.remove(copy)
        text.block = copy
        if keep:
            text.copies.append(block)
        else:
            self._by_block[block] = None

    def drop_copy(self, copy: int) -> CachedText:
        """A copy leaves; its text stays."""
        text = self._by_block[copy]
        assert text is not None and text.block != copy, f"block {copy} is no copy"
        text.copies.remove(copy)
        self._by_block[copy] = None
        return text

    def remove(self, text: CachedText) -> list[CachedText]:
        """Take out a text and all behind it, which nothing could reach any more; returns them, the first in front."""
        if text.parent is not None:
            text.parent.children.discard(text)
        removed = [text]
        for gone in removed:  # grows while it is walked
            removed += gone.children
            del self._by_digest[gone.digest]
            for block in (gone.block, *gone.copies):
                self._by_block[block] = None
        return removed
