"""What requests take from the pool, publish and give back; on the host, over a pool of a few blocks of 4 positions."""

from __future__ import annotations

import pytest
from tests.unit.engine.block_fakes import LOOKAHEAD, SIZE, Bench

from paceline.engine.held_blocks import HeldBlocks
from paceline.engine.request_blocks import is_one_run

TEXT = list(range(1, 100))


@pytest.mark.parametrize("length", [7, 8, 9, 12, 13])
def test_a_hit_is_whole_blocks_and_leaves_a_row_to_run(length: int) -> None:
    """T7.3: resent, extended, and diverging inside a block."""
    bench = Bench(60, num_slots=9)
    bench.finish(bench.start("first", TEXT[:length], max_tokens=1))
    for name, prompt, hit in (
        ("resent", TEXT[:length], (length - 1) // SIZE * SIZE),
        ("extended", TEXT[: length + 3], length // SIZE * SIZE),
        ("diverging", [*TEXT[: length - 1], 999, 999, 999], (length - 1) // SIZE * SIZE),
        ("diverging in the first", [999, *TEXT[1:length]], 0),
        ("another identity", TEXT[:length], 0),
    ):
        request = bench.start(name, prompt, cache_salt="mine" if name == "another identity" else None)
        assert request.num_cached_tokens == hit, name
        assert len(request.held.blocks) * SIZE >= len(prompt) + LOOKAHEAD
        bench.check()
    assert bench.pool.num_hit_tokens == sum(request.held.num_hit for request in bench.scheduler.running)


def test_a_drafter_that_reads_ahead_needs_the_token_behind_a_block() -> None:
    """EAGLE-3: the last key of a block was made with the token after it."""
    bench = Bench(60, reads_ahead=True)
    bench.finish(bench.start("first", TEXT[:9], max_tokens=1))
    for name, prompt, hit in (("same", TEXT[:12], 8), ("other behind", [*TEXT[:8], 999, 999], 4)):
        assert bench.start(name, prompt).num_cached_tokens == hit, name


def test_growth_keeps_room_for_what_is_being_drafted() -> None:
    """I2, from the first step on; nothing is asked of the pool within a block."""
    bench = Bench(60)
    request = bench.start("a", TEXT[:6], max_tokens=40)
    for _ in range(12):
        assert bench.blocks.grow(request)
        assert len(request.held.blocks) * SIZE >= request.num_cached + LOOKAHEAD
        assert (len(request.held.blocks) - 1) * SIZE < request.num_cached + LOOKAHEAD
        bench.check()
        bench.extend(request, 3)


def test_growth_that_finds_no_block_changes_nothing() -> None:
    bench = Bench(6)
    one, two = bench.start("a", TEXT[:6], max_tokens=40), bench.start("b", TEXT[10:16], max_tokens=40)
    bench.extend(one, 3)
    assert bench.pool.num_free == 0
    before = list(one.held.blocks)
    assert not bench.blocks.grow(one)
    assert one.held.blocks == before
    bench.check()
    bench.scheduler.preempt(two)
    assert bench.blocks.grow(one)
    bench.check()


def test_blocks_are_published_once_full_final_and_sound() -> None:
    bench = Bench(60)
    request = bench.add("a", TEXT[:10], max_tokens=40)
    bench.scheduler.admit()
    bench.blocks.publish(request)
    assert bench.pool.num_cached == 0, "nobody has seen logits behind it"
    bench.prefill(request)
    assert [bench.pool.is_hashed(block) for block in request.held.blocks] == [True, True, False, False]
    bench.extend(request, 1)
    assert bench.pool.num_cached == 2, "12 tokens are there, of which the last was not run"
    bench.extend(request, 1)
    assert bench.pool.num_cached == 3
    bench.finish(request)
    assert (bench.pool.num_cached, bench.pool.num_free) == (3, 60)


def test_a_spoiled_request_publishes_what_was_sound_and_clears_the_rest() -> None:
    """A block behind which sound logits were seen is sound for good; those behind it may hold NaN."""
    bench = Bench(60)
    request = bench.start("a", TEXT[:10])
    blocks = list(request.held.blocks)
    bench.finish(request, is_spoiled=True)
    assert bench.planes.cleared == blocks[2:]
    assert bench.pool.num_cached == 2
    bad_prompt = bench.add("b", TEXT[20:30])
    bench.scheduler.admit()
    blocks = list(bad_prompt.held.blocks)
    bad_prompt.num_prefilled = 10  # and no token came of it
    bench.finish(bad_prompt, is_spoiled=True)
    assert bench.planes.cleared[-len(blocks) :] == blocks
    assert bench.pool.num_cached == 2
    bench.check()


def test_freed_blocks_wait_for_the_last_step_that_was_launched() -> None:
    """I5, G12."""
    bench = Bench(20)
    request = bench.start("a", TEXT[:10], max_tokens=1)
    bench.last_step = 7
    bench.finish(request)
    assert (bench.pool.num_fenced, bench.pool.num_free) == (4, 16)
    bench.pool.retire(6)
    assert bench.pool.num_fenced == 4
    bench.pool.retire(7)
    assert (bench.pool.num_fenced, bench.pool.num_free) == (0, 20)


# Draft context


def test_a_hit_without_draft_context_moves_the_contexts_start() -> None:
    """T7.7: blocks 0 and 1 come from a request without drafts, block 2 from one that was drafted for."""
    bench = Bench(60)
    bench.finish(bench.start("undrafted", TEXT[:9], is_drafted=False))
    drafted = bench.start("drafted", TEXT[:14])
    assert (drafted.num_cached_tokens, drafted.held.context_start) == (8, 8)
    bench.finish(drafted)
    again = bench.start("again", TEXT[:14])
    assert (again.num_cached_tokens, again.held.context_start) == (12, 8)
    undrafted = bench.start("undrafted too", TEXT[:14], is_drafted=False)
    assert (undrafted.num_cached_tokens, undrafted.held.context_start) == (12, 0)
    assert again.held.hit_contexts == [False, False, True]


def test_context_that_is_not_written_any_more_is_not_promised() -> None:
    bench = Bench(60)
    request = bench.start("a", TEXT[:10], max_tokens=40)
    bench.extend(request, 3)
    request.is_drafted = False
    request.held.end_context(request.num_cached)
    for _ in range(4):
        assert bench.blocks.grow(request)
        bench.extend(request, 3)
    text = request.text_ids
    bench.finish(request)
    hit = bench.start("b", text).held.hit_contexts
    assert hit == [True, True, True, False, False, False]


def test_context_is_promised_between_its_start_and_its_end() -> None:
    held = HeldBlocks()
    held.begin([True, False], 4, context_end=None)
    assert (held.num_hit, held.context_start) == (8, 8)
    assert [held.has_draft_context(index, 4) for index in range(5)] == [True, False, True, True, True]
    held.end_context(15)
    held.end_context(99)
    assert [held.has_draft_context(index, 4) for index in range(5)] == [True, False, True, False, False]
    held.begin([], 4, context_end=0)
    assert not held.has_draft_context(0, 4)


def test_prompts_get_context_whoever_sends_them() -> None:
    """A drafter that would be fed later, or a text beyond its positions, leaves no promise behind."""
    held = HeldBlocks()
    held.begin([], 4, context_end=9)
    assert [held.wants_context(position) for position in (0, 8, 9)] == [True, True, False]
    assert [held.has_draft_context(index, 4) for index in range(3)] == [True, True, False]
    for limit, contexts in ((0, [False, False]), (9, [False, False]), (10, [True, True])):
        bench = Bench(60, context_limit=limit)
        bench.finish(bench.start("undrafted", TEXT[:9], is_drafted=False))
        assert bench.start("drafted", TEXT[:14]).held.hit_contexts == contexts


# Runs, for attention without a gather


def test_a_request_gets_one_run_and_grows_in_it() -> None:
    bench = Bench(60, wants_runs=True)
    requests = [bench.start(name, TEXT[at : at + 6], max_tokens=30) for name, at in (("a", 0), ("b", 20), ("c", 40))]
    for _ in range(9):
        for request in requests:
            bench.extend(request, 3)
            assert bench.blocks.grow(request)
            assert is_one_run(request.held.blocks)
        bench.check()
    assert (bench.blocks.num_consolidations, bench.blocks.num_fragmented) == (0, 0)


def test_a_hit_goes_on_where_it_ends() -> None:
    """The next turn of a conversation: nothing is copied."""
    bench = Bench(60, wants_runs=True)
    first = bench.start("a", TEXT[:10], max_tokens=12)
    bench.extend(first, 6)
    text = first.text_ids
    bench.finish(first)
    second = bench.start("b", [*text, 7, 7, 7, 7])
    assert second.num_cached_tokens == 16
    assert is_one_run(second.held.blocks)
    assert bench.planes.copies == []


def test_a_hit_that_cannot_go_on_is_copied_into_a_run_once() -> None:
    bench = Bench(60, wants_runs=True)
    first = bench.start("a", TEXT[:10])
    second = bench.start("b", TEXT[:10])
    assert second.num_cached_tokens == 8
    assert is_one_run(second.held.blocks)
    assert set(second.held.blocks).isdisjoint(first.held.blocks)
    assert bench.planes.copies == [(first.held.blocks[:2], second.held.blocks[:2])]
    assert bench.blocks.num_consolidations == 1
    bench.check()
    for request in (first, second):
        bench.finish(request)
    assert bench.pool.num_free == 60
    assert bench.pool.num_cached == 2, "one copy of each text"


def test_without_room_for_copies_requests_share_what_there_is() -> None:
    bench = Bench(7, wants_runs=True)
    first = bench.start("a", TEXT[:10], max_tokens=4)
    second = bench.start("b", TEXT[:10], max_tokens=4)
    assert first.held.blocks[:2] == second.held.blocks[:2]
    assert bench.planes.copies == []
    assert bench.blocks.num_fragmented == 1
    bench.check()


def test_growth_beyond_a_taken_neighbour_moves_the_request() -> None:
    bench = Bench(40, wants_runs=True)
    request = bench.start("a", TEXT[:10], max_tokens=4)
    last = request.held.blocks[-1]
    wall = bench.pool.allocate(1, behind=last)
    assert wall == [last + 1]
    request.output.max_tokens = 40
    before = list(request.held.blocks)
    bench.extend(request, 6)
    assert bench.blocks.grow(request)
    assert is_one_run(request.held.blocks) and set(before).isdisjoint(request.held.blocks)
    assert bench.planes.copies == [(before, request.held.blocks[: len(before)])]
    assert [bench.pool.is_hashed(block) for block in request.held.blocks[:4]] == [True] * 4, "the index moved along"
    assert [bench.pool.references(block) for block in before] == [0] * len(before)
    bench.pool.free(wall)
    bench.check()
    bench.extend(request, 1)
    bench.finish(request)
    assert bench.pool.num_free == 40


def test_on_a_gpu_nothing_is_copied_for_the_sake_of_a_run() -> None:
    bench = Bench(40)
    first, second = bench.start("a", TEXT[:10]), bench.start("b", TEXT[:10])
    assert first.held.blocks[:2] == second.held.blocks[:2]
    assert (bench.planes.copies, bench.blocks.num_fragmented) == ([], 0)
