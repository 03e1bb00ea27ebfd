"""Trial steps run like real ones, cost something, and leave no trace."""

from __future__ import annotations

import pytest
import torch
from tests.tiny import loaded, tiny_prompts

from paceline.engine.engine import Engine, EngineSettings
from paceline.engine.request import SamplingParameters

GREEDY = SamplingParameters(max_tokens=24, ignore_eos=True)


@pytest.mark.parametrize("family", ["dflash", "dflash2", "dspark", "eagle3"])
def test_measuring_between_two_steps_leaves_nothing_behind(family: str) -> None:
    target, drafter = loaded(drafter_family=family)
    engine = Engine(target, drafter, EngineSettings(max_num_seqs=2))
    prompts = tiny_prompts([9, 4])
    names = [engine.add_request(prompt, GREEDY) for prompt in prompts]
    for _ in range(5):
        engine.step()
    caches = [engine._cache.planes, engine._proposer.cache.planes]
    before = [planes.clone() for planes in caches]
    arrays = {name: value.clone() for name, value in vars(engine._state).items() if isinstance(value, torch.Tensor)}
    stats = engine.stats()
    found = engine._measure_costs()
    assert engine.stats() == stats
    assert all(torch.equal(one, other) for one, other in zip(before, caches, strict=True))
    changed = [name for name, value in arrays.items() if not torch.equal(value[:-1], getattr(engine._state, name)[:-1])]
    assert not changed
    assert found.step_ms(1, 0) > 0
    assert found.step_ms(2, 7) >= found.step_ms(2, 1) >= found.step_ms(1, 0)
    while engine.has_unfinished():
        engine.step()
    plain = Engine(target).generate(prompts, GREEDY)
    assert [engine.result(name).token_ids for name in names] == [result.token_ids for result in plain]


def test_trial_steps_have_the_sizes_that_will_occur() -> None:
    target, drafter = loaded()
    engine = Engine(target, drafter, EngineSettings(max_num_seqs=4))
    sizes: dict[str, set[tuple[int, int]]] = {"verify": set(), "draft": set()}
    target.model.register_forward_pre_hook(lambda _, inputs: sizes["verify"].add(tuple(inputs[0].shape)))
    drafter.model.backbone.register_forward_pre_hook(lambda _, inputs: sizes["draft"].add(tuple(inputs[0].shape[:2])))
    engine._measure_costs()
    assert sizes["verify"] == {(requests, rows) for requests in (1, 2, 4) for rows in (1, 5, 8)}
    assert sizes["draft"] == {(requests, rows) for requests in (1, 2, 4) for rows in (2, 8)}
