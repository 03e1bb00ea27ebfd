"""Each invariant that the host can see is broken once on purpose, and a sound run breaks none."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.engine import invariants
from paceline.engine.block_tables import BlockTables
from paceline.engine.blocks import BlockPool, BlockState
from paceline.engine.cache import KeyValueCache
from paceline.engine.invariants import CheckedRequest, InvariantChecks
from paceline.engine.prefix_chain import PrefixChain, PrefixIdentity

BLOCK = 4
LOOKAHEAD = 6
CPU = torch.device("cpu")


class SmallEngine:
    """The bookkeeping of an engine around two caches, without models: rows are random numbers."""

    def __init__(self, num_blocks: int = 24, num_slots: int = 3) -> None:
        self.pool = BlockPool(num_blocks, BLOCK)
        self.tables = BlockTables(num_slots, num_blocks=num_blocks, block_size=BLOCK, max_blocks=8, device=CPU)
        self.caches = [
            KeyValueCache(self.tables, num_layers=layers, num_kv_heads=2, head_size=3, dtype=dtype, device=CPU)
            for layers, dtype in ((2, torch.float32), (1, torch.bfloat16))
        ]
        self.lengths = torch.zeros(num_slots + 1, dtype=torch.int64)
        self.checks = InvariantChecks(
            self.pool, self.tables, caches=self.caches, lengths=self.lengths, lookahead=LOOKAHEAD
        )
        self.running: dict[int, CheckedRequest] = {}
        self.texts: dict[int, list[int]] = {}
        self.num_published: dict[int, int] = {}
        self.step = 0

    def admit(self, slot: int, text: list[int], *, is_decoding: bool = True) -> CheckedRequest:
        chain = PrefixChain(PrefixIdentity("target", "drafter"), BLOCK)
        hit = [cached.block for cached in self.pool.match(chain, text, most_tokens=len(text) - 1)]
        self.pool.take(hit)
        blocks = hit + (self.pool.allocate(-(-(len(text) + LOOKAHEAD) // BLOCK) - len(hit)) or [])
        self.tables.assign(slot, blocks)
        self.running[slot] = CheckedRequest(f"request {slot}", slot, blocks, len(hit) * BLOCK, False)
        self.texts[slot], self.num_published[slot] = text, len(hit)
        self.checks.on_admission(self.running[slot])
        self.run_pass({slot: len(text) - len(hit) * BLOCK})  # the prompt
        self.running[slot] = replace(self.running[slot], is_decoding=is_decoding)
        self.lengths[slot] = len(text)
        return self.running[slot]

    def launch(self, num_rows: dict[int, int]) -> None:
        self.step += 1
        self.tables.flush()
        held = [replace(one, num_rows=num_rows.get(slot, 0)) for slot, one in self.running.items()]
        self.checks.before_step(self.step, held)
        for one in held:
            for cache in self.caches if one.num_rows else ():
                shape = (one.num_rows, 2, 3)
                for layer in range(cache.planes.shape[0]):
                    keys, values = torch.rand(2, *shape).to(cache.planes.dtype)
                    cache.write_rows(layer, one.slot, one.num_final, keys, values)

    def finish(self, grown: dict[int, int]) -> None:
        for slot, count in grown.items():
            one = self.running[slot]
            self.running[slot] = replace(one, num_final=one.num_final + count)
            if one.is_decoding:
                self.lengths[slot] += count
                self.texts[slot] = self.texts[slot] + [7] * count
        self.checks.after_step(self.step, list(self.running.values()))
        self.pool.retire(self.step)

    def run_pass(self, num_rows: dict[int, int], grown: dict[int, int] | None = None) -> None:
        self.launch(num_rows)
        self.finish(num_rows if grown is None else grown)

    def grow(self, slot: int) -> None:
        one = self.running[slot]
        missing = -(-(one.num_final + LOOKAHEAD) // BLOCK) - len(one.blocks)
        if missing > 0:
            fresh = self.pool.allocate(missing, behind=one.blocks[-1])
            assert fresh is not None
            self.tables.append(slot, fresh)
            self.running[slot] = replace(one, blocks=[*one.blocks, *fresh])

    def publish(self, slot: int, num_blocks: int | None = None) -> None:
        one, text = self.running[slot], self.texts[slot]
        num_full = one.num_final // BLOCK if num_blocks is None else num_blocks
        digests = PrefixChain(PrefixIdentity("target", "drafter"), BLOCK).digests(text, num_full)
        for index in range(self.num_published[slot], num_full):
            self.checks.on_publish(one, index)
            parent = one.blocks[index - 1] if index else None
            tokens = text[index * BLOCK : (index + 1) * BLOCK]
            self.pool.publish(one.blocks[index], digests[index], parent, tokens, next_id=None, has_draft_context=True)
        self.num_published[slot] = num_full

    def end(self, slot: int, fence: int | None = None) -> None:
        one = self.running.pop(slot)
        self.tables.clear(slot)
        fence = self.step if fence is None else fence
        self.checks.on_free(one.blocks, fence=fence)
        self.pool.free(one.blocks, fence=fence)

    def move(self, slot: int) -> None:
        """To other blocks, as a consolidation does."""
        one, num_published = self.running[slot], self.num_published[slot]
        run = self.pool.allocate_run(len(one.blocks))
        assert run is not None
        for cache in self.caches:
            cache.copy_blocks(one.blocks, run)
        self.tables.assign(slot, run)
        self.running[slot] = replace(one, blocks=run)
        self.num_published[slot] = 0
        self.checks.on_admission(self.running[slot])
        self.publish(slot, num_published)
        self.checks.on_free(one.blocks, fence=self.step)
        self.pool.free(one.blocks, fence=self.step)


@pytest.fixture
def engine() -> SmallEngine:
    """Two requests that decode and share a prefix of two blocks."""
    engine = SmallEngine()
    engine.admit(0, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    engine.publish(0)
    engine.admit(2, [1, 2, 3, 4, 5, 6, 7, 8, 1, 2])
    assert engine.running[2].blocks[:2] == engine.running[0].blocks[:2]
    return engine


def test_a_sound_run_passes(engine: SmallEngine) -> None:
    torch.manual_seed(1)
    for turn in range(12):
        for slot in engine.running:
            engine.grow(slot)
        engine.run_pass(dict.fromkeys(engine.running, 3), dict.fromkeys(engine.running, 1 + turn % 3))
        for slot in engine.running:
            engine.publish(slot)
        if turn == 2:
            engine.end(0)
        if turn == 3:
            engine.admit(0, [1, 2, 3, 4, 5, 6, 7, 8, 1])
        if turn == 4:
            engine.move(0)
        if turn == 5:
            engine.end(2)
            engine.admit(2, [3] * 11)
        if turn == 6:
            engine.end(0)
            engine.admit(1, [1, 2, 3, 4, 5, 6, 7, 8])
    free = [block for block in range(1, 24) if engine.pool.state(block) == BlockState.FREE]
    for cache in engine.caches:
        assert cache.planes[:, :, :, free].isnan().all()


def overtakes_the_host(engine: SmallEngine) -> None:
    engine.lengths[2] += 1
    engine.launch({2: 3})


def falls_back(engine: SmallEngine) -> None:
    engine.run_pass({2: 3}, {2: -1})


def keeps_a_token_too_many(engine: SmallEngine) -> None:
    engine.run_pass({2: 3}, {2: 4})


def keeps_nothing(engine: SmallEngine) -> None:
    engine.run_pass({2: 3}, {2: 0})


def grows_without_a_pass(engine: SmallEngine) -> None:
    engine.run_pass({0: 3}, {0: 1, 2: 1})


def rewrites_what_is_final(engine: SmallEngine) -> None:
    engine.run_pass({2: 3}, {2: 3})  # to 13: its third block is full, and unpublished
    engine.grow(2)
    row = torch.ones(1, 2, 3, dtype=torch.bfloat16)
    engine.caches[1].write_rows(0, 2, 9, row, row)
    engine.run_pass({0: 3}, {0: 1})


def loses_a_block_as_it_moves(engine: SmallEngine) -> None:
    engine.caches[1].copy_blocks = lambda source, target: None  # type: ignore[method-assign]
    engine.move(0)
    engine.run_pass({0: 3}, {0: 1})


def does_not_grow(engine: SmallEngine) -> None:
    for _ in range(3):
        engine.run_pass({0: 2}, {0: 2})


def runs_a_longer_pass_than_its_blocks(engine: SmallEngine) -> None:
    engine.launch({0: 9})


def writes_to_a_shared_block(engine: SmallEngine) -> None:
    engine.running[2] = replace(engine.running[2], num_final=7)
    engine.lengths[2] = 7
    engine.launch({2: 1})


def writes_to_a_published_block(engine: SmallEngine) -> None:
    engine.run_pass({0: 3}, {0: 3})
    engine.publish(0)
    engine.running[0] = replace(engine.running[0], num_final=11)
    engine.lengths[0] = 11
    engine.launch({0: 1})


def changes_a_published_block(engine: SmallEngine) -> None:
    block = engine.running[0].blocks[0]
    engine.end(0)
    engine.end(2)
    engine.caches[0].planes[0, 0, 0, block, 1] = 5.0
    engine.run_pass({})


def counts_a_reference_too_many(engine: SmallEngine) -> None:
    engine.pool.take(engine.running[0].blocks[:1])
    engine.launch({})


def leaves_a_table_behind(engine: SmallEngine) -> None:
    engine.tables.clear(2)
    engine.launch({})


def forgets_to_flush(engine: SmallEngine) -> None:
    engine.tables.flush = lambda: None  # type: ignore[method-assign]
    engine.move(2)
    engine.launch({})


def has_no_table(engine: SmallEngine) -> None:
    engine.tables.clear(2)
    engine.checks.on_admission(engine.running[2])


def holds_blocks_that_are_free(engine: SmallEngine) -> None:
    engine.pool.free(engine.running[0].blocks, fence=0)
    engine.checks.on_admission(engine.running[0])


def holds_a_hit_that_nobody_took(engine: SmallEngine) -> None:
    for _ in range(2):
        engine.pool.free(engine.running[0].blocks[:1], fence=0)
    engine.checks.on_admission(engine.running[0])


def shares_its_last_block(engine: SmallEngine) -> None:
    engine.pool.take(engine.running[0].blocks[-1:])
    engine.checks.on_admission(engine.running[0])


def publishes_too_early(engine: SmallEngine) -> None:
    engine.texts[0] = [*engine.texts[0], 7, 7, 7]
    engine.publish(0, 3)


def publishes_twice(engine: SmallEngine) -> None:
    engine.num_published[0] = 0
    engine.publish(0)


def frees_before_the_fence(engine: SmallEngine) -> None:
    engine.launch({0: 3})
    engine.end(0, fence=engine.step - 1)


def loses_its_fences(engine: SmallEngine) -> None:
    engine.launch({0: 3})
    engine.pool.free(engine.running[0].blocks, fence=0)  # the checks were told otherwise
    one = engine.running.pop(0)
    engine.tables.clear(0)
    engine.checks.on_free(one.blocks, fence=engine.step)
    engine.admit(1, [9, 9, 9])


def frees_a_block_that_a_step_reads(engine: SmallEngine) -> None:
    """After the checks were asked, the pool forgets when the block was used last."""
    engine.launch({0: 3})
    engine.end(0)
    engine.pool._fences = [0] * engine.pool.num_blocks
    engine.pool._waiting = [(0, block) for _, block in engine.pool._waiting]
    engine.pool.retire(engine.step - 1)
    engine.checks.after_step(engine.step - 1, list(engine.running.values()))


def moves_a_buffer(engine: SmallEngine) -> None:
    engine.lengths.set_(engine.lengths.clone())  # type: ignore[call-overload]
    engine.run_pass({0: 3}, {0: 1})


def writes_where_nobody_is(engine: SmallEngine) -> None:
    free = next(block for block in range(1, 24) if engine.pool.state(block) == BlockState.FREE)
    engine.launch({0: 3})
    engine.caches[1].planes[0, 1, 1, free, 3, 2] = 0.0
    engine.finish({0: 1})


def writes_to_the_row_of_zeros(engine: SmallEngine) -> None:
    engine.launch({0: 3})
    engine.caches[0].planes[1, 0, 0, 0, 0, 1] = torch.nan
    engine.finish({0: 1})


def gives_padding_a_block(engine: SmallEngine) -> None:
    engine.tables.assign(3, [20])
    engine.launch({0: 3})


def gives_block_zero_away(engine: SmallEngine) -> None:
    one = engine.running[0]
    engine.running[0] = replace(one, blocks=[*one.blocks[:-1], 0])
    engine.tables.assign(0, engine.running[0].blocks)
    engine.checks.on_admission(engine.running[0])


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("I1", overtakes_the_host),
        ("I1", falls_back),
        ("I1", keeps_a_token_too_many),
        ("I1", keeps_nothing),
        ("I1", grows_without_a_pass),
        ("I1", rewrites_what_is_final),
        ("I2", does_not_grow),
        ("I2", runs_a_longer_pass_than_its_blocks),
        ("I3", writes_to_a_shared_block),
        ("I3", writes_to_a_published_block),
        ("I3", changes_a_published_block),
        ("I3", counts_a_reference_too_many),
        ("I3", leaves_a_table_behind),
        ("I3", forgets_to_flush),
        ("I3", has_no_table),
        ("I3", holds_blocks_that_are_free),
        ("I3", holds_a_hit_that_nobody_took),
        ("I3", shares_its_last_block),
        ("I4", publishes_too_early),
        ("I3", publishes_twice),
        ("I5", frees_before_the_fence),
        ("I5", loses_its_fences),
        ("I5", frees_a_block_that_a_step_reads),
        ("I7", moves_a_buffer),
        ("I9", writes_where_nobody_is),
        ("I9", writes_to_the_row_of_zeros),
        ("I9", gives_padding_a_block),
        ("I9", gives_block_zero_away),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_planted_faults_are_named(engine: SmallEngine, name: str, fault: Callable[[SmallEngine], None]) -> None:
    with pytest.raises(AssertionError, match=f"^{name}: "):
        fault(engine)


def test_a_move_that_loses_a_block_is_found(engine: SmallEngine) -> None:
    with pytest.raises(AssertionError, match=r"^I1: .* changed below"):
        loses_a_block_as_it_moves(engine)


def test_a_request_that_comes_again_may_have_other_bits(engine: SmallEngine) -> None:
    engine.end(2)
    engine.pool.clear_cache()
    engine.admit(2, [3] * 11)


def test_zeroed_blocks_may_change(engine: SmallEngine) -> None:
    one = engine.running[0]
    for block in one.blocks:
        engine.pool.forget(block)
    for cache in engine.caches:
        cache.clear_blocks(one.blocks)
    engine.checks.on_clear(one.blocks)
    engine.run_pass({0: 3}, {0: 1})


def test_a_passes_repetition_is_no_fault(engine: SmallEngine) -> None:
    engine.launch({0: 3})
    engine.step -= 1
    engine.run_pass({0: 3}, {0: 2})


def noting(seen: list[int], look: Callable[..., Any]) -> Callable[..., Any]:
    def noted(cache: KeyValueCache, blocks: Sequence[int]) -> Any:
        seen.extend(blocks)
        return look(cache, blocks)

    return noted


def test_large_pools_are_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(invariants, "_SMALL_POOL", 8)
    monkeypatch.setattr(invariants, "_SAMPLE", 2)
    engine = SmallEngine()
    engine.admit(0, list(range(16)))
    seen: list[int] = []
    for name in ("checksums", "are_poisoned"):
        monkeypatch.setattr(KeyValueCache, name, noting(seen, getattr(KeyValueCache, name)))
    engine.run_pass({0: 3}, {0: 1})
    assert len(seen) <= 2 * 2 * len(engine.caches)
    engine.caches[0].planes[:, :, :, engine.running[0].blocks[1]] = 1.0
    with pytest.raises(AssertionError, match="I1"):
        for _ in range(50):
            engine.run_pass({})


def test_the_tests_that_stand_in_for_the_others_exist() -> None:
    assert invariants.__doc__ is not None
    named = set(re.findall(r"`(test_\w+)`", invariants.__doc__))
    assert len(named) == 5
    folder = Path(__file__).parents[1]
    defined = {
        name
        for path in folder.rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert named <= defined
    assert re.findall(r"^(I\d+) ", invariants.__doc__, re.MULTILINE) == [f"I{number}" for number in range(1, 11)]
