"""Trial steps run like real ones, cost something, and leave no trace."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.caches import make_cache
from tests.tiny import loaded, tiny_prompts

from paceline.engine.attends import AttentionChoice
from paceline.engine.block_tables import BlockTables
from paceline.engine.counters import Counters
from paceline.engine.engine import Engine, EngineSettings
from paceline.engine.graphs import StepRunner
from paceline.engine.make_proposer import make_proposer
from paceline.engine.parts import make_parts
from paceline.engine.request import SamplingParameters
from paceline.engine.slots import SlotState
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
    stats = engine.stats()
    found = engine._loop._measure_costs()
    assert engine.stats() == stats
    assert all(torch.equal(one, other) for one, other in zip(before, caches, strict=True))
    changed = [
        name
        for name, value in arrays.items()
        if not torch.equal(value[:-1], getattr(engine._loop.parts.state, name)[:-1])
    ]
    assert not changed
    assert found.step_ms(1, 0) > 0
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
    found = measure_costs(parts, steps, max_num_seqs=2, blocks=lent)
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
    engine._loop._measure_costs()
    assert sizes["verify"] == {(requests, rows) for requests in (1, 2, 4) for rows in (1, 5, 8)}
    assert sizes["draft"] == {(requests, rows) for requests in (1, 2, 4) for rows in (2, 8)}
