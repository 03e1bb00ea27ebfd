"""Cached prefixes of hybrid targets: a request begins where a state was kept, and nothing else shows that it did.

Blocks have 8 positions. All comparisons are of bits; behind them stand planted faults.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.hybrid_runs import (
    FAMILIES,
    GREEDY,
    UNDRAFTED,
    checked,
    drafter_for,
    helped,
    k3_target,
    prompts_of,
    require_empty,
    run,
    small_target,
    stepwise_state,
    stepwise_text,
)
from tests.unit.engine.serving_runs import same_run

from paceline.engine.engine import Engine
from paceline.engine.recurrent_state import RecurrentState, StateRows
from paceline.engine.request import RequestResult
from paceline.engine.slot_states import SlotStates
from paceline.engine.snapshots import SnapshotHit, SnapshotPool
from paceline.errors import ConfigError
from paceline.models.loading import LoadedTarget

Plant = Callable[[pytest.MonkeyPatch], None]
(_HEAD,) = prompts_of([24], seed=1)
SHARED = {name: _HEAD + rest for name, rest in zip("abcd", prompts_of([9, 3, 17, 0], seed=2), strict=True)}
FEW = replace(GREEDY, max_tokens=4)


def serve(engine: Engine, prompts: dict[str, list[int]], sampling: Any = GREEDY) -> list[RequestResult]:
    """One request after the other, so that each finds what those before it left."""
    return [served_one(engine, name, prompt, sampling) for name, prompt in prompts.items()]


def served_one(engine: Engine, name: str, prompt: Sequence[int], sampling: Any = GREEDY) -> RequestResult:
    engine.add_request(prompt, sampling, name)
    (result,) = run(engine, [name])
    return result


def hit_of(engine: Engine, prompt: Sequence[int], sampling: Any = FEW, **options: Any) -> int:
    """Tokens of a prompt that were found cached; its text is the reference's."""
    name = engine.add_request(list(prompt), sampling, **options)
    (result,) = run(engine, [name])
    assert result.token_ids == stepwise_text(small_target(), prompt, sampling.max_tokens)
    return result.num_cached_tokens


def gain_on_equals_gain_off(target: LoadedTarget, family: str, **settings: Any) -> bool:
    """T7.1: the same prompts with the cache off, cold and warm give the same blocks and the same acceptance."""
    drafter = drafter_for(target, family)
    off = helped(target, drafter, SHARED, max_num_seqs=2, prefix_cache=False, **settings)
    on = helped(target, drafter, SHARED, max_num_seqs=2, **settings)
    without, cold, warm = (serve(engine, SHARED) for engine in (off, on, on))
    assert [result.num_cached_tokens for result in without] == [0, 0, 0, 0]
    assert [result.num_cached_tokens for result in warm] == [32, 24, 40, 16]
    return all(same_run(*pair) for found in (cold, warm) for pair in zip(without, found, strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_gain_is_the_same_with_the_cache_off_cold_and_warm(family: str) -> None:
    assert gain_on_equals_gain_off(small_target(), family, run_ahead=family in ("dflash2", "eagle3"))


@pytest.mark.parametrize("family", ["dflash", "dspark-latent"])
def test_the_gain_is_the_same_on_the_tiny_k3(family: str) -> None:
    assert gain_on_equals_gain_off(k3_target(), family)


@pytest.mark.parametrize(
    ("length", "resent", "extended", "diverged"), [(23, 16, 16, 16), (24, 16, 24, 16), (25, 24, 24, 0)]
)
def test_hits_end_at_a_kept_state(length: int, resent: int, extended: int, diverged: int) -> None:
    """T7.3 and B48: cached blocks behind a state, or between two, are worth nothing."""
    (prompt,) = prompts_of([length], seed=3)
    for text, expected in (
        (prompt, resent),
        ([*prompt, 7, 8, 9], extended),
        ([*prompt[:20], 63 - prompt[20], *prompt[21:]], diverged),
    ):
        engine = checked(small_target(), max_num_seqs=1)
        assert hit_of(engine, prompt) == 0
        assert hit_of(engine, text) == expected
        assert engine.stats().num_hit_tokens == expected


def test_a_second_turn_begins_behind_the_last_full_block_of_the_first() -> None:
    """The state behind an answer is kept as it grows, whatever a step accepts."""
    target = small_target()
    (prompt,) = prompts_of([13], seed=4)
    answer = stepwise_text(target, prompt, GREEDY.max_tokens)
    for family, runs_ahead in ((None, False), (None, True), ("dflash", False), ("dflash", True)):
        settings = {"max_num_seqs": 1, "run_ahead": runs_ahead}
        if family is None:
            engine = checked(target, **settings)
        else:
            engine = helped(target, drafter_for(target, family), {"first": prompt}, **settings)
        engine.add_request(prompt, GREEDY, "first")
        assert run(engine, ["first"])[0].token_ids == answer
        # 13 + 20 tokens, of which the last was not run; the request keeps the latest state of its answer alone
        assert engine.stats().num_cached_snapshots == 2
        if family is None:
            assert hit_of(engine, [*prompt, *answer, 5, 6]) == 32


def test_a_restored_state_is_the_recomputed_one() -> None:
    """T7.5, and the positions that a long text keeps states at."""
    target = small_target()
    (prompt,) = prompts_of([45], seed=5)
    engine = checked(target, max_num_seqs=1, snapshot_spacing=16)
    assert hit_of(engine, prompt) == 0
    assert engine.stats().num_cached_snapshots == 4  # 16, 32, 40, and 48 with its answer
    for num_shared, expected in ((47, 40), (39, 32), (31, 16), (17, 16), (15, 0)):
        text = [*prompt[:num_shared], *([9, 11, 13] if num_shared < 45 else [9])]
        engine.add_request(text, replace(FEW, max_tokens=2), "again")
        engine.step()
        loop = engine._loop
        assert loop.parts.recurrent is not None
        found = [part[:, 0] for part in loop.parts.recurrent.rows]
        delivered = [*text, *engine.result("again").token_ids] if not engine.has_unfinished() else None
        assert delivered is not None
        for own, right in zip(found, stepwise_state(target, delivered[:-1]), strict=True):
            assert torch.isnan(own).all() or torch.equal(own, right)
        assert engine.result("again").num_cached_tokens == expected


def test_where_a_state_was_given_up_the_next_one_down_serves() -> None:
    (prompt,), (other,) = prompts_of([45], seed=5), prompts_of([12], seed=6)
    one = replace(GREEDY, max_tokens=1)  # no answer that would keep states of its own
    engine = checked(small_target(), max_num_seqs=1, snapshot_spacing=16, num_snapshots=3)
    assert hit_of(engine, prompt, one) == 0
    assert hit_of(engine, prompt[:33], one) == 32 and hit_of(engine, prompt[:17], one) == 16
    assert hit_of(engine, other, one) == 0  # takes the place of the one at 40, which was of less use
    assert engine.stats().num_snapshot_evictions == 1
    assert hit_of(engine, prompt, one) == 32


def test_requests_that_share_a_prefix_and_run_together_are_as_alone() -> None:
    """T7.4: admitted one step after the other, some drafted for and some not."""
    target = small_target()
    drafter = drafter_for(target, "dflash")
    wanted = {name: GREEDY if name != "b" else UNDRAFTED for name in SHARED}
    alone = {}
    for name, sampling in wanted.items():
        engine = helped(target, drafter, SHARED, max_num_seqs=1, prefix_cache=False)
        alone.update(zip([name], run(engine, [engine.add_request(SHARED[name], sampling, name)]), strict=True))
    engine = helped(target, drafter, SHARED, max_num_seqs=3)
    for name, sampling in wanted.items():
        engine.add_request(SHARED[name], sampling, name)
        engine.step()
    for name, result in zip(wanted, run(engine, list(wanted)), strict=True):
        assert same_run(result, alone[name])
    assert engine.stats().num_hit_tokens > 0
    require_empty(engine)


@pytest.mark.parametrize("family", ["dflash", "eagle3"])
def test_who_steps_back_goes_on_behind_its_last_full_block(family: str) -> None:
    target = small_target()
    drafter = drafter_for(target, family)
    alone = serve(helped(target, drafter, SHARED, max_num_seqs=1, prefix_cache=False), SHARED)
    engine = helped(target, drafter, SHARED, max_num_seqs=3, prefill_chunk_size=8)
    for name, prompt in SHARED.items():
        engine.add_request(prompt, GREEDY, name)
    chance = random.Random(7)
    while engine.has_unfinished():
        engine.step()
        for name in engine.running_ids():
            if chance.random() < 0.2:
                assert engine.preempt(name)
    for right in alone:
        assert same_run(engine.result(right.request_id), right)
    stats = engine.stats()
    assert stats.num_preemptions > 5 and stats.num_resumed_tokens > 24 * 3
    require_empty(engine)


def test_a_text_is_found_by_its_own_alone() -> None:
    """Salts part texts, and so does clearing; what is cleared takes its states along."""
    (prompt,) = prompts_of([25], seed=8)
    engine = checked(small_target(), max_num_seqs=1)
    assert hit_of(engine, prompt, cache_salt="one") == 0
    assert hit_of(engine, prompt, cache_salt="two") == 0
    assert hit_of(engine, prompt, cache_salt="one") == 24
    assert engine.stats().num_cached_snapshots > 0
    engine.clear_prefix_cache()
    assert engine.stats().num_cached_snapshots == 0
    assert hit_of(engine, prompt, cache_salt="one") == 0


def test_without_a_cache_no_state_is_kept() -> None:
    engine = checked(small_target(), max_num_seqs=1, prefix_cache=False)
    assert engine.stats().snapshot_bytes == 0
    assert hit_of(engine, SHARED["a"]) == hit_of(engine, SHARED["a"]) == 0
    kept = checked(small_target(), max_num_seqs=1, num_snapshots=3).stats().snapshot_bytes
    assert kept == 3 * 5 * 4 * (2 * 8 * 8 + 3 * 48)  # rows, layers, bytes, state and history


def test_states_lie_behind_blocks() -> None:
    with pytest.raises(ConfigError, match="snapshot_spacing is 12"):
        checked(small_target(), snapshot_spacing=12)


# Faults


def keep_the_state_of_another_position(patch: pytest.MonkeyPatch) -> None:
    """A chunk's state is said to stand a block earlier than it does."""
    keep = SlotStates.keep_after_chunk

    def mislabelled(self: SlotStates, request: Any, end: int) -> None:
        keep(self, request, end)
        if end in request.held.states and end > 8:
            request.held.states[end - 8] = request.held.states.pop(end)

    patch.setattr(SlotStates, "keep_after_chunk", mislabelled)


def keep_the_state_before_the_chunk(patch: pytest.MonkeyPatch) -> None:
    """The copy is made one chunk too early: all but the first hold the state of the boundary before."""
    copy = StateRows.copy_from
    before: dict[int, list[torch.Tensor]] = {}

    def late(self: StateRows, source: StateRows, place: int, *, to: int) -> None:
        copy(self, source, place, to=to)
        now = [part[:, to].clone() for part in self]
        for part, old in zip(self, before.get(place, now), strict=True):
            part[:, to] = old
        before[place] = now

    patch.setattr(StateRows, "copy_from", late)


def begin_with_nothing(patch: pytest.MonkeyPatch) -> None:
    """A hit skips the cached rows and begins with an empty state."""

    def begin(self: RecurrentState, slot: int, *_args: Any, position: int = 0) -> None:
        self.rows.clear(slot)
        self.ends_S[slot] = position

    patch.setattr(RecurrentState, "begin", begin)


def begin_without_history(patch: pytest.MonkeyPatch) -> None:
    """The convolution's rows are not kept."""

    def copy(self: StateRows, source: StateRows, place: int, *, to: int) -> None:
        self.states_LSNKK[:, to] = source.states_LSNKK[:, place]
        self.histories_LSHC[:, to] = 0.0

    patch.setattr(StateRows, "copy_from", copy)


def hit_blocks_behind_the_state(patch: pytest.MonkeyPatch) -> None:
    """Keys are reused as far as they go, whatever the state's position."""
    match = SnapshotPool.match

    def deeper(self: SnapshotPool, hit: Sequence[Any]) -> SnapshotHit | None:
        found = match(self, hit)
        return found and SnapshotHit(len(hit), found.row)

    patch.setattr(SnapshotPool, "match", deeper)


def keep_every_row_of_a_step(patch: pytest.MonkeyPatch) -> None:
    """A step that crosses a boundary leaves the state behind all that it kept."""
    commit = RecurrentState.commit

    def whole(self: RecurrentState, slots_B: torch.Tensor, counts_B: torch.Tensor, num_rows: int, copies: Any) -> None:
        commit(self, slots_B, counts_B, num_rows, None)
        for slot, row in zip(slots_B.tolist(), [] if copies is None else copies.rows_B.tolist(), strict=False):
            if row >= 0:
                copies.rows.copy_from(self.rows, slot, to=row)

    patch.setattr(RecurrentState, "commit", whole)


def keep_a_steps_state_of_another_position(patch: pytest.MonkeyPatch) -> None:
    """What a step left is said to stand a block earlier than it does."""
    take = SlotStates.take_step

    def mislabelled(self: SlotStates, number: int, request: Any, start: int, step: Any) -> None:
        before = dict(request.held.states)
        take(self, number, request, start, step)
        for position in [position for position in request.held.states if position not in before]:
            request.held.states[position - 8] = request.held.states.pop(position)

    patch.setattr(SlotStates, "take_step", mislabelled)


def answers_are_right(**settings: Any) -> bool:
    """Prompts that begin alike, each with a second turn behind its answer."""
    target = small_target()
    prompts = SHARED | {"e": [*SHARED["c"][:36], 1, 3]}  # cached up to 32, with states at 24 and 40
    turns = {
        name + "2": [*prompt, *stepwise_text(target, prompt, GREEDY.max_tokens), 5] for name, prompt in prompts.items()
    }
    asked = prompts | turns
    engine = helped(target, drafter_for(target, "dflash"), asked, max_num_seqs=2, **settings)
    are_right = all(  # up to the first that is not
        served_one(engine, name, prompt).token_ids == stepwise_text(target, prompt, GREEDY.max_tokens)
        for name, prompt in asked.items()
    )
    assert engine.stats().num_hit_tokens > 0
    return are_right


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_answers_over_two_turns_are_right(runs_ahead: bool) -> None:
    assert answers_are_right(run_ahead=runs_ahead)


@pytest.mark.parametrize(
    "plant",
    [
        keep_the_state_of_another_position,
        keep_the_state_before_the_chunk,
        begin_with_nothing,
        begin_without_history,
        hit_blocks_behind_the_state,
        keep_every_row_of_a_step,
        keep_a_steps_state_of_another_position,
    ],
    ids=lambda plant: plant.__name__,
)
def test_a_planted_fault_changes_an_answer(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    assert not answers_are_right(check_invariants=False)
