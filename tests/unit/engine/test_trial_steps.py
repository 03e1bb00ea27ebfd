"""Trial steps run like real ones, cost something, and leave no trace."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.caches import make_cache
from tests.tiny import loaded, tiny_prompts

from paceline.engine import loop as loop_module
from paceline.engine import trial_steps
from paceline.engine.attends import AttentionChoice
from paceline.engine.block_tables import BlockTables
from paceline.engine.counters import Counters
from paceline.engine.engine import Engine, EngineSettings
from paceline.engine.graphs import StepKey, StepRunner
from paceline.engine.make_proposer import make_proposer
from paceline.engine.parts import make_parts
from paceline.engine.recordings import Repeated
from paceline.engine.request import SamplingParameters
from paceline.engine.slots import SlotState
from paceline.engine.step_kind import GREEDY_STEP, SAMPLED_STEP, TRIED_KINDS, StepKind
from paceline.engine.trial_steps import measure_costs

GREEDY = SamplingParameters(max_tokens=24, ignore_eos=True)


@pytest.mark.parametrize("family", ["dflash", "dflash2", "dspark", "eagle3"])
def test_measuring_between_two_steps_leaves_nothing_behind(family: str) -> None:
    target, drafter = loaded(drafter_family=family)
    engine = Engine(target, drafter, EngineSettings(max_num_seqs=2))
    prompts = tiny_prompts([9, 4])
    names = [engine.add_request(prompt, GREEDY) for prompt in prompts]
    for _ in range(5):
        engine.step()
    caches = [engine._loop.parts.cache.planes, engine._loop.parts.proposer.cache.planes]
    before = [planes.clone() for planes in caches]
    arrays = {
        name: value.clone() for name, value in vars(engine._loop.parts.state).items() if isinstance(value, torch.Tensor)
    }
    columns = [column.clone() for column in engine._loop.parts.state.tensors()[:2]]
    stats = engine.stats()
    kind = SAMPLED_STEP if family == "dflash2" else GREEDY_STEP
    found = engine._loop._measure_costs(kind)
    assert replace(engine.stats(), implementations=stats.implementations) == stats, "sampled steps use other operations"
    assert all(torch.equal(one, other) for one, other in zip(before, caches, strict=True))
    changed = [
        name
        for name, value in arrays.items()
        if not torch.equal(value[:-1], getattr(engine._loop.parts.state, name)[:-1])
    ]
    assert not changed
    assert all(map(torch.equal, columns, engine._loop.parts.state.tensors())), "padding runs in the trash slot"
    assert found.step_ms(1, 0) > 0 and found.plain_ms(1) > 0
    assert found.step_ms(2, 7) >= found.step_ms(2, 1) >= found.step_ms(1, 0)
    while engine.has_unfinished():
        engine.step()
    plain = Engine(target).generate(prompts, GREEDY)
    assert [engine.result(name).token_ids for name in names] == [result.token_ids for result in plain]


@pytest.mark.parametrize("family", ["dflash", "eagle3"])
@pytest.mark.parametrize("num_lent", [0, 1, 9])
def test_few_blocks_or_none_will_do_and_are_left_as_zeros(family: str, num_lent: int) -> None:
    """A pool may have nothing left; and what is lent may hold NaN, as freed blocks do in debug mode."""
    target, drafter = loaded(drafter_family=family)
    tables = BlockTables(2, num_blocks=20, block_size=8, max_blocks=40, device=torch.device("cpu"))
    cache = make_cache(tables, num_layers=4, num_kv_heads=2, head_size=16)
    settings = EngineSettings(max_num_seqs=2)
    choice = AttentionChoice(is_batched=False, is_row_invariant=False)
    proposer = make_proposer(target, drafter, choice, settings, num_draft_tokens=7, tables=tables)
    state = SlotState(2, num_draft_tokens=7, num_candidates=0, device=torch.device("cpu"))
    tables.assign(0, [15, 16])
    caches = (cache, proposer.cache)
    for each in caches:
        each.planes[:, :, :, 1:] = torch.nan
    lent = list(range(3, 3 + num_lent))
    parts = replace(
        make_parts(target, drafter, settings, None),
        proposer=proposer,
        choice=choice,
        tables=tables,
        cache=cache,
        state=state,
    )
    steps = StepRunner(parts, Counters(7), max_num_seqs=2)
    found = measure_costs(parts, steps, settings, GREEDY_STEP, blocks=lent)
    assert found.step_ms(2, 7) > 0
    for each in caches:
        is_zero = [not each.planes[:, :, :, block].any() for block in range(20)]
        assert is_zero == [block in (0, *lent) for block in range(20)]
        assert each.planes[:, :, :, [block for block in range(1, 20) if block not in lent]].isnan().all()
    assert tables.blocks(2) == [] and not tables.table[2].any()


def test_trial_steps_have_the_sizes_that_will_occur() -> None:
    target, drafter = loaded()
    engine = Engine(target, drafter, EngineSettings(max_num_seqs=4))
    sizes: dict[str, set[tuple[int, int]]] = {"verify": set(), "draft": set()}
    target.model.register_forward_pre_hook(lambda _, inputs: sizes["verify"].add(tuple(inputs[0].shape)))
    drafter.model.backbone.register_forward_pre_hook(lambda _, inputs: sizes["draft"].add(tuple(inputs[0].shape[:2])))
    temperatures = set()
    trash_slot = engine._loop.parts.state.trash_slot
    target.model.register_forward_pre_hook(
        lambda *_: temperatures.add(engine._loop.parts.state.temperatures[trash_slot].item())
    )
    engine._loop._measure_costs(SAMPLED_STEP)
    assert temperatures == {1.0}, "rows of greedy requests cost less in sampled steps"
    temperatures.clear()
    engine._loop._measure_costs(GREEDY_STEP)
    assert temperatures == {0.0}
    assert sizes["verify"] == {(requests, rows) for requests in (1, 2, 4) for rows in (1, 2, 4, 8)}
    assert sizes["draft"] == {(requests, rows) for requests in (1, 2, 4) for rows in (2, 5, 8)}


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[StepKey, bool]]]:
    """Engines record, as on a GPU; gives the key of every step that is done, and whether a stopper is in it."""
    paged = AttentionChoice(is_batched=True, is_row_invariant=False, is_paged=True)
    monkeypatch.setattr(AttentionChoice, "for_device", classmethod(lambda *_args, **_options: paged))
    monkeypatch.setattr(loop_module, "make_recorder", lambda *_args, **_options: Repeated)
    done: list[tuple[StepKey, bool]] = []
    find = StepRunner._work_for

    def watched(runner: StepRunner, batch: Any, *, num_rows: int) -> Any:
        work = find(runner, batch, num_rows=num_rows)
        done.append((work._key, work._stopper is not None))
        assert (work._stopper is not None) == (batch.stopper is not None), "a recording of somebody else's steps"
        return work

    monkeypatch.setattr(StepRunner, "_work_for", watched)
    yield done


@pytest.mark.parametrize("kind", TRIED_KINDS)
def test_recordings_of_trial_steps_serve_real_ones(kind: StepKind, recording: list[tuple[StepKey, bool]]) -> None:
    """Whatever lengths are chosen: a step between two of them is done as the larger, and no step needs a new one."""
    target, drafter = loaded(drafter_family="dflash2")
    engine = Engine(target, drafter, EngineSettings(max_num_seqs=2, block_size=16, draft_length="adaptive"))
    in_trials = {key for key, _ in recording}
    lengths = iter([1, 3, 7, 7, 3, 0, 0, 1, 7, 3, 1, 0, 3, 3, 7, 1, 1, 0, 7, 0] * 9)
    engine._loop.drafting.planner.prepare().next_num_drafts = lambda _step: next(lengths)  # type: ignore[method-assign]
    sampling = replace(GREEDY, temperature=1.0 if kind.is_sampled else 0.0, max_tokens=60)
    num_before = len(recording)
    engine.generate(tiny_prompts([9, 5]), sampling)
    used = {key for key, _ in recording[num_before:] if key.num_rows > 0}
    assert used <= in_trials, "steps have shapes that were not tried"
    assert {(key.num_rows, key.num_drafts) for key in used} == {(1, 0), (2, 1), (4, 3), (8, 7)}
    first_blocks = {key.num_drafts for key, _ in recording[num_before:] if key.num_rows == 0}
    assert first_blocks == {7}, "behind a prompt all lengths are drawn as one"


@pytest.mark.usefixtures("recording")
def test_lengths_that_change_in_recorded_steps_change_no_text() -> None:
    target, drafter = loaded(drafter_family="dflash2")
    engine = Engine(target, drafter, EngineSettings(max_num_seqs=2, block_size=16, draft_length="adaptive"))
    lengths = iter([7, 0, 3, 0, 0, 1, 7, 3, 1, 0, 3, 3, 7, 1, 1, 0, 7, 0] * 9)
    engine._loop.drafting.planner.prepare().next_num_drafts = lambda _step: next(lengths)  # type: ignore[method-assign]
    prompts = tiny_prompts([9, 5])
    found = engine.generate(prompts, [GREEDY, replace(GREEDY, draft_length="off")])
    plain = Engine(target).generate(prompts, GREEDY)
    assert [result.token_ids for result in found] == [result.token_ids for result in plain]
    assert not any(record.proposed_ids for record in found[1].trace.records)
    judged = {record.num_draft_tokens for record in found[0].trace.records}
    assert judged == {0, 1, 3, 7}, "a step judges what was planned for it, however many rows it has"


@pytest.mark.usefixtures("recording")
def test_each_kind_costs_what_its_own_steps_take(monkeypatch: pytest.MonkeyPatch) -> None:
    def told(trial: Any, num_requests: int, num_rows: int, num_drafts: int, *, writes_context: bool = True) -> float:
        row_ms = 1.0 if trial._flags.all_greedy else 3.0
        return 1.0 + row_ms * num_requests * num_rows + 10.0 * num_drafts + 0.5 * writes_context

    monkeypatch.setattr(trial_steps._Trial, "_timed", told)
    target, drafter = loaded()
    engine = Engine(target, drafter, EngineSettings(max_num_seqs=2, block_size=16, draft_length="adaptive"))
    costs = engine._loop.drafting.planner.prepare().costs
    for kind, row_ms in ((GREEDY_STEP, 1), (SAMPLED_STEP, 3), (StepKind(is_sampled=True, has_rules=True), 3)):
        assert costs.of(kind).plain_ms(2) == 1.0 + 2 * row_ms
        assert costs.of(kind).step_ms(2, 0) == 1.0 + 2 * row_ms + 0.5
        assert costs.of(kind).step_ms(2, 7) == 1.0 + 2 * 8 * row_ms + 70.0 + 0.5
        assert costs.of(kind).step_ms(2, 5) == costs.of(kind).step_ms(2, 7), "rows are padded"
