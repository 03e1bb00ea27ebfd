"""Digests of the full blocks of a text, each over everything before it: what a cached block is found by.

Host only, no torch. A digest stands for (what the keys were computed with, every token up to the block's end), and for
an EAGLE-3 drafter the one token behind it as well: its keys at position p depend on token p + 1.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from hashlib import blake2b

DIGEST_SIZE = 32  # bytes; they alone keep identities apart, while within one a hit compares tokens as well


@dataclass(frozen=True)
class PrefixIdentity:
    """What cached keys belong to. Chains of different identities have no digest in common.

    Attributes:
        target: names the target's weights and arithmetic.
        drafter: names the drafter's, for its context keys live in the same blocks; None without one.
        adapter: names weights that a request adds to the target's.
        salt: of a request that shares its blocks with nobody but requests of the same salt.
        reads_ahead: draft keys at a position depend on the token after it (EAGLE-3).
    """

    target: str
    drafter: str | None
    adapter: str | None = None
    salt: str | None = None
    reads_ahead: bool = False


def digest_block(parent: bytes, content: bytes) -> bytes:
    """Digest of one block behind the block with digest `parent`."""
    return blake2b(parent + content, digest_size=DIGEST_SIZE).digest()


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Token ids as int64 bytes: what is digested, kept beside a cached block and compared on a hit."""
    return array("q", token_ids).tobytes()


class PrefixChain:
    """Digests of the full blocks of one text, which only ever grows at its end.

    Args:
        identity: what the keys belong to; the first block's parent.
        block_size: positions per block.
    """

    def __init__(self, identity: PrefixIdentity, block_size: int) -> None:
        self.identity = identity
        self.block_size = block_size
        # repr tells None from "None" and keeps the fields apart, which joining them would not.
        self.root = digest_block(b"", repr((block_size, *astuple(identity))).encode())
        self._digests: list[bytes] = []
        self._last_content = b""

    def num_blocks(self, num_tokens: int) -> int:
        """How many blocks of a text of that length have a digest."""
        return max(num_tokens - self.identity.reads_ahead, 0) // self.block_size

    def content(self, token_ids: Sequence[int], index: int) -> bytes:
        """What block `index` adds to its parent's digest: its tokens, and the next one where that is read ahead."""
        start = index * self.block_size
        return pack_tokens(token_ids[start : start + self.block_size + self.identity.reads_ahead])

    def next_id(self, token_ids: Sequence[int], index: int) -> int | None:
        """The token behind block `index` where the block's keys depend on it, else None."""
        return token_ids[(index + 1) * self.block_size] if self.identity.reads_ahead else None

    def digests(self, token_ids: Sequence[int], num_blocks: int) -> list[bytes]:
        """Digests of the first `num_blocks` blocks. Blocks that an earlier call has seen are not read again.

        Args:
            token_ids: the text so far, from its start; it begins with the text of every earlier call.
            num_blocks: at most `self.num_blocks(len(token_ids))`.
        """
        assert num_blocks <= self.num_blocks(len(token_ids)), "a digest needs its whole block"
        done = self._digests
        if done and num_blocks > len(done):
            assert self.content(token_ids, len(done) - 1) == self._last_content, "the text of a chain only grows"
        for index in range(len(done), num_blocks):
            self._last_content = self.content(token_ids, index)
            done.append(digest_block(done[-1] if done else self.root, self._last_content))
        return done[:num_blocks]
