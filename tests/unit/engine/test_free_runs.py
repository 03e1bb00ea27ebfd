"""Runs of free blocks: they join and split without losing a block, and requests keep out of each other's way."""

from __future__ import annotations

import random

import pytest

from paceline.engine.free_runs import FreeRuns, coldest_window


def runs_of(blocks: set[int]) -> list[tuple[int, int]]:
    starts = sorted(block for block in blocks if block - 1 not in blocks)
    return [(start, next(n for n in range(1, 99) if start + n not in blocks)) for start in starts]


def only(*free: int, num_blocks: int = 32) -> FreeRuns:
    runs = FreeRuns(num_blocks, num_blocks)
    for block in free:
        runs.add(block)
    return runs


@pytest.mark.parametrize("seed", range(5))
def test_no_block_is_lost_or_given_twice(seed: int) -> None:
    draw = random.Random(seed)
    runs, free = FreeRuns(1, 24), set(range(1, 24))
    for _ in range(400):
        used = sorted(set(range(1, 24)) - free)
        action = draw.randrange(4)
        if action == 0 and used:
            block = draw.choice(used)
            runs.unclaim(block)
            runs.add(block)
            free.add(block)
        elif action == 1 and free:
            taken = runs.take_any(draw.randint(1, len(free)))
            assert taken == sorted(taken)
            assert set(taken) <= free
            free -= set(taken)
        elif action == 2:
            count = draw.randint(1, 6)
            taken = runs.take_run(count, room=draw.randint(count, 12)) or []
            assert bool(taken) == any(length >= count for _, length in runs_of(free))
            assert taken == list(range(taken[0], taken[0] + count)) if taken else True
            assert set(taken) <= free
            free -= set(taken)
        elif used:
            block, count = draw.choice(used), draw.randint(1, 3)
            wanted = set(range(block + 1, block + 1 + count))
            taken = runs.take_behind(block, count, room=None) or []
            assert set(taken) == (wanted if wanted <= free else set())
            free -= set(taken)
        assert runs.runs() == runs_of(free)
        assert len(runs) == len(free)
        assert [block for block in range(24) if block in runs] == sorted(free)


def test_the_tightest_run_with_room_is_taken_and_else_the_widest() -> None:
    runs = only(1, 2, 3, 4, 5, 6, 7, 8, 10, 11, 12, 20, 21, 22, 23, 24)
    assert runs.take_run(1, room=3) == [10]
    assert runs.take_run(1, room=5) == [20]
    assert runs.take_run(2, room=30) == [1, 2]
    assert runs.take_run(7, room=7) is None


def test_a_neighbour_leaves_the_room_that_a_request_may_need() -> None:
    runs = FreeRuns(1, 32)
    assert runs.take_run(2, room=10) == [1, 2]
    assert runs.take_run(2, room=10) == [11, 12]
    assert runs.take_behind(2, 1, room=None) == [3]  # the claim moved on with it
    assert runs.take_run(2, room=10) == [21, 22]
    assert runs.take_behind(3, 7, room=None) == [4, 5, 6, 7, 8, 9, 10]
    assert runs.take_behind(10, 1, room=None) is None


def test_a_claim_moves_with_the_end_of_its_request() -> None:
    runs = FreeRuns(1, 32)
    assert runs.take_run(2, room=10) == [1, 2]
    assert runs.take_behind(2, 1, room=None) == [3]
    assert runs.take_run(1, room=3) == [11]
    assert runs.take_behind(3, 1, room=20) == [4]
    assert runs.take_run(3, room=3) == [14, 15, 16]
    runs.unclaim(4)
    runs.add(4)
    runs.add(3)
    assert runs.take_run(3, room=3) == [3, 4, 5]


def test_a_claim_is_no_promise() -> None:
    runs = FreeRuns(1, 11)
    assert runs.take_run(2, room=10) == [1, 2]
    assert runs.take_run(3, room=3) == [8, 9, 10]  # at the far end of the claim
    assert runs.take_any(2) == [6, 7]
    assert runs.take_behind(2, 3, room=None) == [3, 4, 5]


def test_the_longest_claim_gives_way_first() -> None:
    runs = FreeRuns(1, 20)
    assert [runs.take_run(1, room=4), runs.take_run(1, room=10), runs.take_run(5, room=5)] == [
        [1],
        [5],
        [15, 16, 17, 18, 19],
    ]
    assert runs.runs() == [(2, 3), (6, 9)]
    assert runs.take_run(5, room=5) == [10, 11, 12, 13, 14]


def test_a_window_claims_blocks_that_are_not_free_yet() -> None:
    runs = only(4, 5, 9)
    assert runs.take_window(4, 2, room=5) == [4, 5]
    assert (runs.claim(5), runs.claim(4), runs.claimed()) == (3, 0, {6, 7, 8})
    runs.add(6)
    assert runs.take_behind(5, 1, room=None) == [6]
    assert runs.claimed() == {7, 8}
    runs.unclaim(6)
    assert runs.claimed() == set()


def test_a_request_that_left_claims_nothing() -> None:
    runs = FreeRuns(1, 11)
    assert runs.take_run(2, room=10) == [1, 2]
    runs.unclaim(2)
    assert runs.take_run(3, room=3) == [3, 4, 5]


def test_a_block_is_free_once() -> None:
    runs = only(3)
    with pytest.raises(AssertionError, match="free already"):
        runs.add(3)


@pytest.mark.parametrize("seed", range(20))
def test_the_coldest_window_is_the_one_a_search_of_all_finds(seed: int) -> None:
    draw = random.Random(seed)
    ages = [None if draw.random() < 0.2 else draw.randrange(12) for _ in range(30)]
    for count in range(1, 8):
        windows = [
            (max(age for age in ages[first : first + count] if age is not None), first)
            for first in range(30 - count + 1)
            if None not in ages[first : first + count]
        ]
        assert coldest_window(ages, count) == (min(windows)[1] if windows else None)
