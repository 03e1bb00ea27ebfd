"""The block pool against a naive model of it: short examples, long walks, and faults that these must find."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test
from tests.unit.engine.pool_machine import CollidingPoolMachine, PoolMachine, walk

from paceline.engine.blocks import BlockPool, BlockState
from paceline.engine.prefix_index import CachedText, PrefixIndex


@pytest.mark.parametrize("machine", [PoolMachine, CollidingPoolMachine])
def test_random_requests_find_pool_and_model_agreed(machine: type[PoolMachine]) -> None:
    run_state_machine_as_test(machine, settings=settings(max_examples=25, stateful_step_count=30, database=None))


@pytest.fixture(params=[PoolMachine, CollidingPoolMachine])
def any_machine(request: pytest.FixtureRequest) -> Iterator[PoolMachine]:
    machine = request.param()
    yield machine
    machine.teardown()


@pytest.mark.parametrize("seed", range(3))
def test_long_walks_find_pool_and_model_agreed(any_machine: PoolMachine, seed: int) -> None:
    walk(any_machine, seed, 1000)
    assert any_machine.pool.num_evictions > 10


def evicts_parents(self: BlockPool, block: int) -> tuple[bool, int, int] | None:
    return (False, self._last_used[block], block) if self.state(block) == BlockState.IDLE else None


def forgets_fences(self: BlockPool, block: int, fence: int) -> None:
    _release(self, block, 0)


def counts_as_use(self: BlockPool, blocks: list[int]) -> None:
    self.free(blocks)


def lets_go_of_copies(self: PrefixIndex, text: CachedText) -> None:
    return None


def any_text_before(self: CachedText, parent: CachedText | None, content: bytes, next_id: int | None) -> bool:
    return self.content == content and self.next_id == next_id


_release = BlockPool._release


@pytest.mark.parametrize(
    ("owner", "name", "fault"),
    [
        (BlockPool, "_eviction_key", evicts_parents),
        (BlockPool, "_release", forgets_fences),
        (BlockPool, "_inherit", lambda *_: None),
        (BlockPool, "_offer", lambda *_: None),
        (BlockPool, "put_back", counts_as_use),
        (BlockPool, "retire", lambda *_: None),
        (PrefixIndex, "best_copy", lets_go_of_copies),
        (PrefixIndex, "has_draft_context", lambda *_: True),
        (CachedText, "equals", lambda *_: True),
        (CachedText, "equals", any_text_before),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_the_walk_finds_planted_faults(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, fault: object) -> None:
    """Some show where texts share digests, others where more of them stay in the cache."""
    monkeypatch.setattr(owner, name, fault)
    with pytest.raises(AssertionError):
        for seed in range(8):
            for machine in (CollidingPoolMachine(), PoolMachine()):
                try:
                    walk(machine, seed, 1000)
                finally:
                    machine.teardown()
