"""Cost curves: interpolation, monotony, padding to captured sizes, and measuring with a clock of our own."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.engine.step_cost import CostCurve, StepCosts, StepCostTable, measure_step_costs, sizes_to_measure


def test_a_curve_is_linear_between_points_and_goes_on_behind_the_last() -> None:
    curve = CostCurve({1: 10.0, 3: 14.0, 7: 16.0})
    assert [curve.ms(size) for size in (0, 1, 2, 3, 5, 7, 9)] == [10, 10, 12, 14, 15, 16, 17]
    assert CostCurve({4: 5.0}).ms(100) == 5


def test_noise_does_not_make_a_larger_step_cheaper() -> None:
    curve = CostCurve({1: 10.0, 2: 9.0, 4: 11.0})
    assert [curve.ms(size) for size in (1, 2, 3, 4)] == [10, 10, 10.5, 11]


def test_sizes_are_padded_to_captured_ones_as_far_as_there_are_any() -> None:
    curve = CostCurve({2: 10.0, 4: 10.5, 8: 12.0, 16: 20.0}, captured=[2, 4, 8])
    assert [curve.ms(size) for size in (1, 2, 3, 4, 5, 8)] == [10, 10, 10.5, 10.5, 12, 12]
    assert curve.ms(12) == 16
    assert curve.ms(24) == 28


@given(
    st.dictionaries(st.integers(1, 6), st.floats(0.1, 9), min_size=1),
    st.lists(st.integers(1, 3), min_size=1, max_size=3, unique=True),
)
def test_a_table_falls_in_neither_direction(by_rows: dict[int, float], batches: list[int]) -> None:
    table = StepCostTable({(batch, rows): ms * (7 - batch) for batch in batches for rows, ms in by_rows.items()})
    costs = [[table.cost_ms(batch, rows) for rows in range(1, 9)] for batch in range(1, 6)]
    for row in (*costs, *map(list, zip(*costs, strict=True))):
        assert all(after >= before - 1e-9 for before, after in itertools.pairwise(row))


def test_a_table_interpolates_both_ways() -> None:
    table = StepCostTable({(1, 1): 1.0, (1, 5): 5.0, (4, 1): 4.0, (4, 5): 20.0})
    assert table.cost_ms(1, 3) == 3
    assert table.cost_ms(2, 1) == 2
    assert table.cost_ms(2, 3) == 6
    assert table.cost_ms(7, 5) == 35


def test_a_step_without_drafts_draws_nothing() -> None:
    costs = StepCosts(StepCostTable({(1, 1): 3.0, (1, 5): 7.0}), StepCostTable({(1, 1): 1.0, (1, 4): 2.5}))
    assert [costs.step_ms(1, count) for count in (0, 1, 4)] == [3, 5, 9.5]
    assert [costs.verify_ms(1, count) for count in (0, 1, 4)] == [3, 4, 7]


class Machine:
    """Runs steps by moving its clock."""

    def __init__(self, slow_runs: tuple[int, ...] = ()) -> None:
        self.now_s, self.runs, self._slow_runs = 0.0, [], slow_runs

    def run(self, num_requests: int, num_rows: int) -> None:
        slow = 10.0 if len(self.runs) in self._slow_runs else 1.0
        self.runs.append((num_requests, num_rows))
        self.now_s += 0.001 * num_requests * num_rows * slow

    def clock(self) -> float:
        return self.now_s


def test_the_first_run_and_a_single_hiccup_do_not_count() -> None:
    machine = Machine(slow_runs=(0, 2))
    table = measure_step_costs(machine.run, [1], [2, 4], budget_s=9.0, clock=machine.clock)
    assert machine.runs == [(1, 2)] * 4 + [(1, 4)] * 4
    assert (table.cost_ms(1, 2), table.cost_ms(1, 4)) == (pytest.approx(2), pytest.approx(4))


def test_a_slow_machine_is_measured_with_fewer_runs() -> None:
    machine = Machine()
    table = measure_step_costs(machine.run, [1, 2], [1, 100], budget_s=0.15, clock=machine.clock)
    assert machine.runs == [(1, 1)] * 4 + [(1, 100)] * 2 + [(2, 1)] + [(2, 100)]
    assert table.cost_ms(2, 100) == pytest.approx(200)


def test_what_disturbs_a_trial_step_does_not_count() -> None:
    took_ms = iter([99.0, 5.0, 40.0, 30.0, 99.0, 6.0, 6.1, 6.2])  # the first of each size warms up
    table = measure_step_costs(lambda _requests, _rows: next(took_ms), [1], [1, 2])
    assert [table.cost_ms(1, rows) for rows in (1, 2)] == [5.0, 6.0]


def test_sizes_to_measure() -> None:
    assert [sizes_to_measure(largest) for largest in (1, 2, 3, 8, 9)] == [
        [1],
        [1, 2],
        [1, 2, 3],
        [1, 2, 4, 8],
        [1, 2, 4, 8, 9],
    ]
