"""How long prompt chunks are: whole ones at fixed places, and shorter ones where requests that decode would wait."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.engine.test_batching import make_request

from paceline.engine.chunk_pace import ChunkPace, ChunkTimes


def paced(max_itl_ms: float | None = None, *, size: int = 64, block: int = 8) -> ChunkPace:
    return ChunkPace(prefill_chunk_size=size, block_size=block, max_itl_ms=max_itl_ms)


def ends(pace: ChunkPace, goal: int, budgets: list[int], start: int = 0) -> list[int]:
    found = []
    for budget in budgets:
        if start < goal:
            start = pace.chunk_end(start, goal, budget)
            found.append(start)
    return found


def test_whole_chunks_end_at_multiples_wherever_they_begin() -> None:
    assert ends(paced(), 200, [64] * 9) == [64, 128, 192, 200]
    assert ends(paced(), 200, [64] * 9, start=40) == [64, 128, 192, 200]
    assert ends(paced(), 200, [5] * 9) == [64, 128, 192, 200], "without a limit, neighbours change no chunk"
    assert ends(paced(size=17), 40, [17] * 9) == [17, 34, 40]


def test_short_chunks_end_at_block_borders() -> None:
    pace = paced(10.0)
    assert ends(pace, 60, [20, 20, 3, 64]) == [16, 32, 40, 60]
    assert ends(pace, 60, [20] * 5, start=5) == [24, 40, 60]
    assert ends(pace, 60, [1] * 3) == [8, 16, 24]


@given(
    start=st.integers(0, 300), rest=st.integers(1, 300), budget=st.integers(1, 100), size=st.sampled_from([8, 17, 64])
)
def test_a_chunk_gets_on_and_never_passes_a_border(start: int, rest: int, budget: int, size: int) -> None:
    for limit in (None, 5.0):
        end = paced(limit, size=size).chunk_end(start, start + rest, budget)
        assert start < end <= start + rest
        assert (end - 1) // size == start // size


def test_the_budget_is_what_fits_beside_a_decode_step() -> None:
    pace = paced(50.0)
    assert pace.budget(is_alone=False) == 8, "one block finds out"
    assert pace.budget(is_alone=True) == 64
    pace.observe_chunk(8, 8.0)
    pace.observe_step(20.0)
    assert pace.budget(is_alone=False) == 30
    for _ in range(20):
        pace.observe_chunk(30, 60.0)
    assert pace.budget(is_alone=False) == pytest.approx(15, abs=1)
    pace.observe_chunk(1, 1e6)
    assert pace.budget(is_alone=False) == 8, "prompts get on, if slowly"
    for _ in range(40):
        pace.observe_chunk(64, 0.064)
    assert pace.budget(is_alone=False) == 64
    assert paced().budget(is_alone=False) == 64


def test_a_chunk_counts_once_a_later_pass_is_done() -> None:
    """On a GPU: launching a chunk takes no time, whatever it does; asked before it is done, a timer would wait."""

    class Timer:
        def __init__(self, ms: float) -> None:
            self.ms = ms

        def milliseconds(self) -> float:
            assert self.ms in done, "asked too early"
            return self.ms

    done: set[float] = set()
    pace = ChunkPace(prefill_chunk_size=512, block_size=4, max_itl_ms=20.0)
    times, request = ChunkTimes(pace), make_request(0)
    for number, ms in ((1, 8.0), (2, 16.0), (4, 64.0)):
        times.launched(number, [request], 8, Timer(ms))
    done.update((8.0, 16.0))
    times.finished(3)
    assert request.trace.prefill_ms == 24.0
    known = pace.budget(is_alone=False)
    done.add(64.0)
    times.finished(4)
    assert request.trace.prefill_ms == 88.0 and pace.budget(is_alone=False) < known < 20
    times.launched(5, [request], 8, Timer(1.0))
    times.clear()
    times.finished(9)
