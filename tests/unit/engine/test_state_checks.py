"""Each of the rules R1 to R5 is broken once, and named."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.hybrid_runs import GREEDY, checked, prompts_of, small_target

from paceline.engine.engine import Engine
from paceline.engine.recurrent_state import RecurrentState, StateRows
from paceline.engine.snapshots import SnapshotPool

_PROMPTS = prompts_of([17, 11], seed=9)
Break = Callable[[RecurrentState, StateRows, SnapshotPool], None]


def running_engine() -> Engine:
    """One request decodes in slot 0, slot 1 is free, and two states are kept."""
    engine = checked(small_target(), max_num_seqs=2)
    for prompt in _PROMPTS:
        engine.generate([prompt], GREEDY)
    engine.add_request(_PROMPTS[1], GREEDY)
    engine.step()
    return engine


def move_a_state(recurrent: RecurrentState, kept: StateRows, pool: SnapshotPool) -> None:
    recurrent.ends_S[0] += 1


def write_to_a_free_slot(recurrent: RecurrentState, kept: StateRows, pool: SnapshotPool) -> None:
    recurrent.rows.histories_LSHC[0, 1] = 0.0


def write_to_a_free_row(recurrent: RecurrentState, kept: StateRows, pool: SnapshotPool) -> None:
    kept.clear(min(pool.free_rows()))


def change_a_kept_state(recurrent: RecurrentState, kept: StateRows, pool: SnapshotPool) -> None:
    kept.states_LSNKK[0, min(pool.published_rows()), 0, 0, 0] += 1.0


def replace_a_store(recurrent: RecurrentState, kept: StateRows, pool: SnapshotPool) -> None:
    recurrent.rows = StateRows(*(part.clone() for part in recurrent.rows))


@pytest.mark.parametrize(
    ("name", "break_rule"),
    [
        ("R1", move_a_state),
        ("R2", write_to_a_free_slot),
        ("R2", write_to_a_free_row),
        ("R3", change_a_kept_state),
        ("R5", replace_a_store),
    ],
)
def test_a_broken_rule_is_named(name: str, break_rule: Break) -> None:
    engine = running_engine()
    loop = engine._loop
    recurrent, kept, store = loop.parts.recurrent, loop.parts.snapshots, loop.blocks.states
    assert recurrent is not None and kept is not None and store is not None
    engine.step()
    break_rule(recurrent, kept, store.pool)
    with pytest.raises(AssertionError, match=name):
        engine.step()


def test_records_of_an_earlier_step_would_be_met_as_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """R4: a commit of rows that this step did not record."""
    commit = RecurrentState.commit

    def stale(self: RecurrentState, slots_B: torch.Tensor, counts_B: torch.Tensor, *rest: object) -> None:
        self.poison_records()  # as if nothing had been recorded since the last commit
        commit(self, slots_B, counts_B, *rest)  # type: ignore[arg-type]

    engine = running_engine()
    monkeypatch.setattr(RecurrentState, "commit", stale)
    while engine.has_unfinished():
        engine.step()
    assert engine.stats().num_numeric_errors == 1
