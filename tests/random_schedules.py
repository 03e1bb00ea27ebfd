"""Random schedules, drawn by hypothesis.

python -m tests.random_schedules --num-schedules 5000 --seed 7
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from tests.schedules import MAX_TOKENS, PROMPTS, SAMPLINGS, EngineKind, RequestPlan, Schedule, faults, prepare, run


def request_plans() -> st.SearchStrategy[RequestPlan]:
    """One request."""
    steps = st.integers(0, 40)
    return st.builds(
        RequestPlan,
        prompt=st.integers(0, len(PROMPTS) - 1),
        max_tokens=st.integers(1, MAX_TOKENS),
        sampling=st.sampled_from(list(SAMPLINGS)),
        is_drafted=st.sampled_from([True, True, False]),
        arrives=st.integers(0, 24),
        priority=st.sampled_from([0, 0, 0, -1, 2]),
        timeout_s=st.sampled_from([None] * 17 + [0.5, 8.0, 1e9]),
        aborted=st.sampled_from([None] * 5 + [True]).flatmap(lambda value: st.none() if value is None else steps),
        preempted=st.sampled_from([False, False, True]).flatmap(
            lambda value: st.frozensets(steps, min_size=1, max_size=3) if value else st.just(frozenset())
        ),
    )


# Not every method with every family: what a request does alone is computed once for each pair.
_KINDS = (
    EngineKind(None, "standard", False),
    EngineKind("dflash", "standard", True),
    EngineKind("dflash", "match", False),
    EngineKind("dflash2", "standard", False),
    EngineKind("dflash2", "block", True),
    EngineKind("dspark", "match", True),
    EngineKind("dspark", "coupled", False),
    EngineKind("eagle3", "standard", True),
    EngineKind("eagle3", "block", False),
)


_HYBRID_KINDS = (
    EngineKind(None, "standard", False, True),
    EngineKind("dflash", "standard", True, True),
    EngineKind("dspark", "match", True, True),
    EngineKind("eagle3", "standard", True, True),
)


@st.composite
def schedules(draw: st.DrawFn, kinds: Sequence[EngineKind] = _KINDS) -> Schedule:
    """An engine and one to eight requests, most of which share a beginning with another."""
    kind = draw(st.sampled_from(kinds))
    return Schedule(
        family=kind.family,
        method=kind.method,
        is_helped=kind.is_helped,
        num_slots=draw(st.integers(1, 4)),
        block_size=draw(st.sampled_from([4, 8])),
        num_spare_blocks=draw(st.sampled_from([0, 0, 1, 3, 12])),
        chunk_size=draw(st.sampled_from([1, 4, 6, 16, 512])),
        has_cache=draw(st.sampled_from([True, True, True, False])),
        requests=tuple(draw(request_plans()) for _ in range(draw(st.integers(1, 8)))),
        cache_cleared=draw(st.sampled_from([frozenset(), frozenset(), frozenset({7, 19})])),
        interrupted=draw(st.sampled_from([False] * 5 + [True]).flatmap(_interruptions)),
        runs_ahead=draw(st.booleans()),
        is_hybrid=kind.is_hybrid,
        num_snapshots=draw(st.sampled_from([1, 3, 8, 32])) if kind.is_hybrid else 1,
        spacing=draw(st.sampled_from([1, 2, 8])) if kind.is_hybrid else 1,
    )


def _interruptions(is_wanted: bool) -> st.SearchStrategy[tuple[tuple[int, str], ...]]:
    if not is_wanted:
        return st.just(())
    one = st.tuples(st.integers(0, 30), st.sampled_from(["before", "after"]))
    return st.lists(one, min_size=1, max_size=3, unique_by=lambda pair: pair[0]).map(tuple)


def check_schedules(
    num_schedules: int,
    seed_number: int,
    *,
    shrinks: bool = False,
    is_checked: bool = True,
    is_hybrid: bool = False,
    plant: Callable[[pytest.MonkeyPatch], None] | None = None,
) -> None:
    """Run so many random schedules; the same ones for the same number.

    Args:
        num_schedules: how many.
        seed_number: of the random draws.
        shrinks: looks for a smaller schedule with the fault, which takes its time.
        is_checked: as for `run`.
        is_hybrid: of targets with recurrent and latent layers, instead of dense ones.
        plant: a fault to run them with; what requests do alone is found without it.

    Raises:
        AssertionError: one of them has a fault; hypothesis adds the schedule.
    """
    phases = [Phase.generate, Phase.shrink] if shrinks else [Phase.generate]

    @seed(seed_number)
    @settings(
        max_examples=num_schedules,
        database=None,
        deadline=None,
        phases=phases,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    @given(schedules(_HYBRID_KINDS if is_hybrid else _KINDS))
    def check(schedule: Schedule) -> None:
        with pytest.MonkeyPatch.context() as patch:
            if plant is not None:
                prepare(schedule)
                plant(patch)
            outcome = run(schedule, is_checked=is_checked)
        assert faults(schedule, outcome) == []

    check()


def main(arguments: Sequence[str]) -> int:
    """More of them than the tests run, in portions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-schedules", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0, help="of the first portion of 50")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    for portion in range(-(-options.num_schedules // 50)):
        check_schedules(50, options.seed + portion, shrinks=True)
        print(f"{50 * (portion + 1)} schedules without a fault", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
