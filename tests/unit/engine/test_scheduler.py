"""Who runs, who waits, who steps back: on the host alone, over a pool of a few blocks."""

from __future__ import annotations

import pytest
from tests.unit.engine.block_fakes import Bench

import paceline.engine.scheduler as scheduler_module
from paceline.errors import QueueFullError


def admitted(bench: Bench) -> list[str]:
    names = []
    while (request := bench.scheduler.admit()) is not None:
        names.append(request.request_id)
    return names


def test_requests_come_in_the_order_of_priority_then_arrival() -> None:
    bench = Bench(100, num_slots=10)
    for name, priority in (("a", 0), ("b", 1), ("c", -1), ("d", 0), ("e", -1)):
        bench.add(name, [1, 2, 3], priority=priority)
    assert admitted(bench) == ["c", "e", "a", "d", "b"]
    bench.check()


def test_nobody_overtakes_a_request_that_does_not_fit() -> None:
    """The long one needs 7 blocks and 6 are free; the short one behind it would fit, and waits all the same."""
    bench = Bench(9)
    running = bench.start("first", range(8))
    assert bench.pool.num_free == 6
    long = bench.add("long", range(50, 50 + 24))
    bench.add("short", [1])
    assert admitted(bench) == []
    bench.check()
    bench.finish(running)
    assert admitted(bench) == ["long", "short"]
    assert len(long.held.blocks) == 7
    bench.check()


def test_a_request_is_looked_for_again_only_when_something_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(9)
    running = bench.start("first", range(8))
    bench.add("long", range(50, 50 + 24))
    asked = []
    admit = bench.blocks.admit
    monkeypatch.setattr(bench.blocks, "admit", lambda *args: asked.append(args) or admit(*args))
    for _ in range(3):
        assert bench.scheduler.admit() is None
    assert len(asked) == 1
    bench.extend(running, 3)
    bench.finish(running)
    assert bench.scheduler.admit() is not None


def test_admission_needs_slots_too() -> None:
    bench = Bench(100, num_slots=2)
    for name in "abc":
        bench.add(name, [1, 2])
    assert admitted(bench) == ["a", "b"]
    assert (bench.scheduler.num_free_slots, len(bench.scheduler.waiting)) == (0, 1)
    bench.finish(bench.scheduler.running[0])
    assert admitted(bench) == ["c"]


def test_a_hit_counts_as_blocks_that_are_there() -> None:
    """T7.3 on the host: 5 blocks for the text, 1 for what is drafted; where 4 of them are there, 2 are enough."""
    bench = Bench(8)
    bench.start("first", range(20))
    assert bench.pool.num_free == 2
    second = bench.add("second", range(20))
    assert bench.scheduler.admit() is second
    assert second.held.blocks[:4] == bench.scheduler.running[0].held.blocks[:4]
    assert (second.num_prefilled, second.num_cached_tokens, second.prefill_goal) == (16, 16, 20)
    bench.check()
    without = Bench(8, prefix_cache=False)
    without.start("first", range(20))
    without.add("second", range(20))
    assert without.scheduler.admit() is None
    without.check()


def test_the_victim_is_the_latest_of_the_least_important() -> None:
    bench = Bench(100)
    a, b, c = (bench.start(name, [1, 2, 3]) for name in "abc")
    assert bench.scheduler.victim() is c
    a.priority = 5
    assert bench.scheduler.victim() is a
    a.priority, b.priority = 0, 1
    assert bench.scheduler.victim() is b


def test_a_request_that_steps_back_is_first_again_and_finds_its_blocks() -> None:
    """T7.6 on the host: everything full is published, so that only the rest is run again."""
    bench = Bench(100, num_slots=1)
    request = bench.start("a", range(10), max_tokens=20)
    bench.add("b", [1])
    bench.extend(request, 9)  # text of 20 tokens, of which 19 have keys
    blocks = list(request.held.blocks)
    bench.scheduler.preempt(request)
    bench.check()
    assert (request.slot, request.num_preemptions, request.epoch) == (None, 1, 1)
    assert bench.scheduler.admit() is request
    assert (request.prefill_goal, request.num_prefilled) == (19, 16)
    assert request.held.blocks[:4] == blocks[:4]
    assert bench.blocks.num_resumed_tokens == 16
    assert request.num_cached_tokens == 0, "that was at its first admission"
    bench.check()


def test_a_preempted_request_is_the_first_of_its_own_priority_only() -> None:
    bench = Bench(100, num_slots=1)
    request = bench.start("a", range(10))
    bench.add("more urgent", [1], priority=-1)
    bench.add("as urgent", [1])
    bench.scheduler.preempt(request)
    assert [waiting.request_id for waiting in bench.scheduler.waiting] == ["more urgent", "a", "as urgent"]


@pytest.mark.parametrize("is_bad", [False, True])
def test_half_a_prompt_is_published_only_if_its_numbers_are_sound(is_bad: bool) -> None:
    bench = Bench(100, num_slots=1)
    request = bench.add("a", range(30))
    assert bench.scheduler.admit() is request
    request.num_prefilled = 18
    if is_bad:
        bench.planes.bad.add(request.held.blocks[2])
    bench.scheduler.preempt(request)
    assert bench.scheduler.admit() is request
    assert request.num_prefilled == (0 if is_bad else 16)
    bench.check()


def test_deadlines_end_requests_wherever_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(scheduler_module, "now_s", lambda: clock[0])
    bench = Bench(100, num_slots=1)
    running = bench.start("running", [1, 2], timeout_s=5.0)
    waiting = bench.add("waiting", [1, 2], timeout_s=3.0)
    ended = bench.add("ended", [1], timeout_s=1.0)
    patient = bench.add("patient", [1])
    bench.finish(ended)
    clock[0] = 102.9
    assert bench.scheduler.pop_expired() == []
    clock[0] = 103.0
    assert bench.scheduler.pop_expired() == [waiting]
    bench.finish(waiting)
    clock[0] = 200.0
    assert bench.scheduler.pop_expired() == [running]
    bench.finish(running)
    assert bench.scheduler.pop_expired() == []
    assert bench.scheduler.num_deadlines_passed == 2
    assert bench.scheduler.waiting == [patient]
    assert not bench.scheduler._timed and not bench.scheduler._deadlines, "nothing is kept of those that ended"


def test_the_queue_holds_what_it_may_beyond_the_free_slots() -> None:
    bench = Bench(100, num_slots=2, max_num_waiting=1)
    for name in "abc":
        bench.scheduler.require_room(1)
        bench.add(name, [1])
    with pytest.raises(QueueFullError, match=r"3 requests wait and 2 slots are free; max_num_waiting is 1"):
        bench.scheduler.require_room(1)
    admitted(bench)
    with pytest.raises(QueueFullError):
        bench.scheduler.require_room(2)
    assert bench.scheduler.num_queue_refusals == 3
    bench.finish(bench.scheduler.waiting[0])
    bench.scheduler.require_room(1)
    Bench(10).scheduler.require_room(10_000)


def test_removal_from_a_long_queue_takes_out_that_one() -> None:
    bench = Bench(100, num_slots=1)
    requests = [bench.add(str(index), [1], priority=index % 3) for index in range(30)]
    for request in requests[::2]:
        bench.finish(request)
    assert sorted(int(request.request_id) for request in bench.scheduler.waiting) == list(range(1, 30, 2))
    bench.finish(requests[0])  # not there any more


class Interrupted(Exception):
    """Ctrl-C, in a test."""


@pytest.mark.parametrize("where", ["releasing", "publishing", "taking", "moving", "between two lists", "between slots"])
def test_an_interruption_anywhere_leaks_neither_blocks_nor_slots(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(40, num_slots=2, wants_runs=where == "moving")
    first = bench.start("first", range(20))
    second = bench.add("second", range(20))

    def interrupt(*args: object, **options: object) -> None:
        raise Interrupted

    if where == "between two lists":
        assert bench.scheduler.admit() is second
        bench.scheduler.waiting.append(second)
    elif where == "between slots":
        assert bench.blocks.admit(second, bench.scheduler._free_slots.pop())
    else:
        with monkeypatch.context() as patch, pytest.raises(Interrupted):
            if where == "releasing":
                patch.setattr(bench.pool, "free", interrupt)
                bench.scheduler.preempt(first)
            elif where == "publishing":
                patch.setattr(bench.pool, "publish", interrupt)
                bench.extend(first, 7)
            elif where == "taking":
                patch.setattr(bench.tables, "assign", interrupt)
                bench.scheduler.admit()
            else:
                patch.setattr(bench.planes, "copy", interrupt)
                bench.scheduler.admit()
    bench.scheduler.rebuild([first, second])
    bench.check()
    assert len(bench.scheduler.running) + len(bench.scheduler.waiting) == 2
    assert bench.scheduler.num_free_slots == 2 - len(bench.scheduler.running)
    while (request := bench.scheduler.admit()) is not None:
        bench.prefill(request)
    for request in (first, second):
        bench.finish(request)
    assert bench.pool.num_free == 40
