"""A block pool beside a naive model of it: random requests come, grow, publish, move, leave and come again."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from paceline.engine import prefix_chain
from paceline.engine.blocks import BlockPool, BlockState, CachedBlock
from paceline.engine.prefix_chain import PrefixChain, PrefixIdentity

BLOCK = 2
NUM_BLOCKS = 9
IDENTITIES = (
    PrefixIdentity("target", "drafter"),
    PrefixIdentity("target", "other"),
    PrefixIdentity("target", "eagle", reads_ahead=True),
)
Key = tuple[int, ...]  # identity, tokens up to a block's end, and the one behind it where that is read ahead


@dataclass(eq=False)
class Request:
    identity: int
    text: list[int]
    has_draft_context: bool
    blocks: list[int] = field(default_factory=list)
    num_published: int = 0
    last_launched: int = 0

    def __post_init__(self) -> None:
        self.chain = PrefixChain(IDENTITIES[self.identity], BLOCK)

    @property
    def num_full(self) -> int:
        return self.chain.num_blocks(len(self.text))

    def key(self, index: int) -> Key:
        end = (index + 1) * BLOCK + self.chain.identity.reads_ahead
        return (self.identity, *self.text[:end])


class NaivePool:
    """What the pool should hold, by exhaustive search over plain dictionaries."""

    def __init__(self) -> None:
        self.holders: dict[int, int] = {}  # block -> references
        self.keys: dict[int, Key] = {}  # block -> what was published of it
        self.owner: dict[Key, int] = {}  # text -> the block that a hit gets
        self.digests: dict[bytes, Key] = {}
        self.draft: dict[int, bool] = {}
        self.fence = dict.fromkeys(range(NUM_BLOCKS), 0)
        self.used = dict.fromkeys(range(NUM_BLOCKS), 0)
        self.clock = self.retired = self.num_evictions = 0

    def state(self, block: int) -> BlockState:
        if self.holders.get(block, 0):
            return BlockState.USED
        if self.fence[block] > self.retired:
            return BlockState.FENCED
        return BlockState.IDLE if block in self.keys else BlockState.FREE

    def blocks(self, state: BlockState) -> list[int]:
        return [block for block in range(1, NUM_BLOCKS) if self.state(block) == state]

    def children(self, key: Key) -> list[Key]:
        return [other for other in self.owner if other[:-BLOCK] == key]

    def copies(self, key: Key) -> list[int]:
        return [block for block, other in self.keys.items() if other == key and self.owner[key] != block]

    def hit(self, request: Request, most_tokens: int) -> list[CachedBlock]:
        blocks: list[CachedBlock] = []
        for index in range(min(most_tokens // BLOCK, request.num_full)):
            block = self.owner.get(request.key(index))
            if block is None:
                break
            blocks.append(CachedBlock(block, self.draft[block]))
        return blocks

    def evict(self) -> None:
        """The text used longest ago that has none behind it, or has another block to live in."""
        idle = [block for block in self.blocks(BlockState.IDLE) if self.owner[self.keys[block]] == block]
        leaves = [block for block in idle if self.copies(self.keys[block]) or not self.children(self.keys[block])]
        victim = min(leaves, key=lambda block: (self.used[block], block))
        self.num_evictions += not self.copies(self.keys[victim])
        self.leave(victim)

    def leave(self, block: int) -> None:
        key = self.keys.pop(block)
        copies = [other for other, name in self.keys.items() if name == key]
        if copies:
            self.owner[key] = min(copies, key=lambda copy: (not self.draft[copy], copy))
            self.inherit(self.owner[key], block)
        else:
            self.drop(key)

    def drop(self, key: Key) -> None:
        for gone in [other for other in self.owner if other[: len(key)] == key and self.under(other, key)]:
            del self.owner[gone]
            self.digests = {digest: name for digest, name in self.digests.items() if name != gone}
            for block in [block for block, name in self.keys.items() if name == gone]:
                del self.keys[block]

    def under(self, key: Key, above: Key) -> bool:
        """A text is behind another if dropping whole blocks from its end leads there."""
        return (len(key) - len(above)) % BLOCK == 0

    def own(self, blocks: list[int]) -> None:
        for block in blocks:
            assert self.state(block) == BlockState.FREE
            self.holders[block] = 1

    def free(self, blocks: list[int], fence: int, *, is_use: bool) -> None:
        self.clock += is_use
        for block in blocks:
            if is_use:
                self.used[block] = self.clock
            self.fence[block] = max(self.fence[block], fence)
            self.holders[block] -= 1
            if self.holders[block] or block not in self.keys:
                continue
            key = self.keys[block]
            owner = self.owner[key]
            if owner == block:
                if any(self.draft[copy] >= self.draft[block] for copy in self.copies(key)):
                    del self.keys[block]
                    copies = [other for other, name in self.keys.items() if name == key]
                    self.owner[key] = min(copies, key=lambda copy: (not self.draft[copy], copy))
                    self.inherit(self.owner[key], block)
            else:
                del self.keys[block]
                self.inherit(owner, block)

    def inherit(self, block: int, former: int) -> None:
        self.used[block] = max(self.used[block], self.used[former])
        self.fence[block] = max(self.fence[block], self.fence[former])

    def publish(self, request: Request, index: int, digest: bytes) -> bool:
        block, key = request.blocks[index], request.key(index)
        if index and request.blocks[index - 1] not in self.keys:
            return False
        if self.digests.get(digest, key) != key:
            return False
        self.digests[digest] = key
        self.draft[block] = request.has_draft_context
        owner = self.owner.setdefault(key, block)
        self.keys[block] = key
        if self.draft[block] and not self.draft[owner]:
            self.owner[key] = block
            self.inherit(block, owner)
            if not self.holders.get(owner, 0):
                del self.keys[owner]
        return self.owner[key] == block


class PoolMachine(RuleBasedStateMachine):
    """Every call goes to the pool and to the model; afterwards they must agree in all that can be asked."""

    requests = Bundle("requests")
    num_identities = len(IDENTITIES)

    @initialize()
    def start(self) -> None:
        self.pool = BlockPool(NUM_BLOCKS, BLOCK)
        self.model = NaivePool()
        self.step = 0
        self.running: list[Request] = []
        self.texts: list[list[int]] = [[0] * 8]

    def allocate(self, count: int, **where: int | None) -> list[int] | None:
        num_free = len(self.model.blocks(BlockState.FREE)) + len(self.model.blocks(BlockState.IDLE))
        num_before = self.pool.num_free
        behind = where.get("behind")
        may_take = {BlockState.FREE}
        if behind is not None and count <= self.pool.runs.claim(behind):
            may_take.add(BlockState.IDLE)
        is_behind = behind is not None and all(
            block < NUM_BLOCKS and self.model.state(block) in may_take
            for block in range(behind + 1, behind + 1 + count)
        )
        found = self.pool.allocate(count, **where)
        assert (found is None) == (count > num_free)
        if found is None:
            assert self.pool.num_free == num_before
            return None
        assert found == sorted(set(found)) and len(found) == count
        if behind is not None and is_behind and count:
            assert found[0] == behind + 1 and found[-1] == behind + count
            self.evict_idle(found)
        while len(self.model.blocks(BlockState.FREE)) < count:
            self.model.evict()
        self.model.own(found)
        return found

    @rule(
        target=requests,
        identity=st.integers(0, len(IDENTITIES) - 1),
        source=st.integers(0, 7),
        num_shared=st.integers(0, 10),
        tail=st.lists(st.integers(0, 1), max_size=5),
        has_draft_context=st.booleans(),
        room=st.none() | st.integers(1, 8),
    )
    def admit(self, identity, source, num_shared, tail, has_draft_context, room) -> Request | None:
        text = [*self.texts[source % len(self.texts)][:num_shared], *tail] or [0]
        request = Request(identity % self.num_identities, text, has_draft_context)
        hit = self.pool.match(request.chain, text, most_tokens=len(text) - 1)
        assert hit == self.model.hit(request, len(text) - 1)
        assert self.pool.match(request.chain, text, most_tokens=len(text)) == self.model.hit(request, len(text))
        blocks = [cached.block for cached in hit]
        self.pool.take(blocks)
        for block in blocks:
            self.model.holders[block] = self.model.holders.get(block, 0) + 1
        needed = -(-len(text) // BLOCK) - len(blocks)
        found = self.allocate(needed, behind=blocks[-1] if blocks else None, room=room)
        if found is None:
            self.pool.put_back(blocks)
            self.model.free(blocks, 0, is_use=False)
            return None
        request.blocks = blocks + found
        request.num_published = len(blocks)
        self.texts.append(text)
        self.running.append(request)
        return request

    @rule(request=requests, tokens=st.lists(st.integers(0, 1), min_size=1, max_size=4))
    def grow(self, request, tokens) -> None:
        if request not in self.running:
            return
        needed = -(-(len(request.text) + len(tokens)) // BLOCK) - len(request.blocks)
        found = self.allocate(needed, behind=request.blocks[-1])
        if found is not None:
            request.text += tokens
            request.blocks += found
            self.texts.append(list(request.text))

    @rule(request=requests)
    def publish(self, request) -> None:
        if request not in self.running:
            return
        digests = request.chain.digests(request.text, request.num_full)
        for index in range(request.num_published, request.num_full):
            tokens = request.text[index * BLOCK : (index + 1) * BLOCK]
            parent = request.blocks[index - 1] if index else None
            says = self.pool.publish(
                request.blocks[index],
                digests[index],
                parent,
                tokens,
                next_id=request.chain.next_id(request.text, index),
                has_draft_context=request.has_draft_context,
            )
            assert says == self.model.publish(request, index, digests[index])
        request.num_published = request.num_full

    @rule()
    def launch(self) -> None:
        self.step += 1
        for request in self.running:
            request.last_launched = self.step

    @rule(late=st.integers(0, 2))
    def retire(self, late) -> None:
        step = max(self.step - late, 0)
        self.pool.retire(step)
        self.model.retired = max(self.model.retired, step)

    @rule(request=consumes(requests), publishes=st.booleans())
    def finish(self, request, publishes) -> None:
        if request not in self.running:
            return
        if publishes:
            self.publish(request)
        self.pool.free(request.blocks, fence=request.last_launched)
        self.model.free(request.blocks, request.last_launched, is_use=True)
        self.running.remove(request)

    @rule(request=requests, more=st.integers(0, 4))
    def consolidate(self, request, more) -> None:
        if request not in self.running:
            return
        states = [self.model.state(block) for block in range(NUM_BLOCKS)]
        count = len(request.blocks)
        found = self.pool.allocate_run(count, room=count + more)
        if found is None:
            assert not self.windows(states, count, BlockState.FREE, BlockState.IDLE)
            return
        assert found == list(range(found[0], found[0] + count))
        if not self.windows(states, count, BlockState.FREE):
            self.evict_idle(found)
        self.model.own(found)
        old, request.blocks, request.num_published = request.blocks, found, 0
        self.publish(request)
        self.pool.free(old, fence=request.last_launched)
        self.model.free(old, request.last_launched, is_use=True)

    def evict_idle(self, blocks: list[int]) -> None:
        for block in blocks:
            if self.model.state(block) == BlockState.IDLE:
                key = self.model.keys[block]
                self.model.num_evictions += self.count_behind(key) * (not self.model.copies(key))
                self.model.leave(block)

    def windows(self, states: list[BlockState], count: int, *allowed: BlockState) -> list[int]:
        return [
            first
            for first in range(1, NUM_BLOCKS - count + 1)
            if all(state in allowed for state in states[first : first + count])
        ]

    def count_behind(self, key: Key) -> int:
        return sum(other[: len(key)] == key and self.model.under(other, key) for other in self.model.owner)

    @rule(request=requests, index=st.integers(0, 9))
    def forget(self, request, index) -> None:
        if request not in self.running:
            return
        block = request.blocks[index % len(request.blocks)]
        self.pool.forget(block)
        if block in self.model.keys:
            self.model.drop(self.model.keys[block])

    @rule()
    def clear_cache(self) -> None:
        unused = [block for block in self.model.keys if not self.model.holders.get(block, 0)]
        assert self.pool.clear_cache() == len(unused)
        for block in unused:
            if block in self.model.keys:
                self.model.leave(block)

    @invariant()
    def agrees(self) -> None:
        pool, model = self.pool, self.model
        for block in range(1, NUM_BLOCKS):
            assert pool.references(block) == sum(block in request.blocks for request in self.running)
            assert pool.references(block) == model.holders.get(block, 0)
            assert pool.state(block) == model.state(block)
            assert pool.is_hashed(block) == (block in model.keys)
            assert (block in pool.runs) == (pool.state(block) == BlockState.FREE)
        assert pool.num_used + pool.num_free + pool.num_fenced == NUM_BLOCKS - 1
        assert pool.num_used == len(model.blocks(BlockState.USED))
        assert pool.num_fenced == len(model.blocks(BlockState.FENCED))
        assert pool.num_cached == len(model.owner)
        assert pool.num_evictions == model.num_evictions
        assert pool.references(0) == 0 and not pool.is_hashed(0) and 0 not in pool.runs
        for request in self.running:  # a hit is a true prefix, though it be of one that did not publish
            assert pool.match(request.chain, request.text, most_tokens=99) == model.hit(request, 99)


class CollidingPoolMachine(PoolMachine):
    """The same with digests so short that texts of one identity share them all the time."""

    num_identities = 1

    def __init__(self) -> None:
        super().__init__()
        self._honest = prefix_chain.digest_block
        prefix_chain.digest_block = self._short

    def _short(self, parent: bytes, content: bytes) -> bytes:
        return bytes([self._honest(parent, content)[0] % 4])

    def teardown(self) -> None:
        prefix_chain.digest_block = self._honest


def walk(machine: PoolMachine, seed: int, num_operations: int) -> None:
    """A long random walk: deep states, which short examples seldom reach."""
    draw = random.Random(seed)
    machine.start()
    for _ in range(num_operations):
        request = draw.choice(machine.running) if machine.running else None
        action = draw.choice(["admit", "admit", "grow", "grow", "publish", "publish", "finish", "step", "move", "rare"])
        if action == "admit":
            tail = draw.choices((0, 1), k=draw.randint(0, 5))
            num_shared, room = draw.randint(0, 8), draw.choice([None, draw.randint(1, 8)])
            machine.texts = machine.texts[-8:]
            machine.admit(draw.randrange(3), draw.randrange(8), num_shared, tail, draw.random() < 0.5, room)
        elif action == "step":
            machine.launch()
            machine.retire(draw.randrange(3))
        elif request is None:
            continue
        elif action == "grow":
            machine.grow(request, draw.choices((0, 1), k=draw.randint(1, 3)))
        elif action == "publish":
            machine.publish(request)
        elif action == "finish":
            machine.finish(request, draw.random() < 0.8)
        elif action == "move":
            machine.consolidate(request, draw.randrange(4))
        elif draw.random() < 0.2:
            machine.forget(request, draw.randrange(10))
        elif draw.random() < 0.1:
            machine.clear_cache()
        machine.agrees()
