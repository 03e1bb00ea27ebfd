"""First blocks in "adaptive" mode: behind their prompts where that pays for everybody, else in the first step."""

from __future__ import annotations

import pytest
from tests.tiny import loaded, tiny_prompts

from paceline.engine import loop as loop_module
from paceline.engine.attends import AttentionChoice
from paceline.engine.canary import ReplayProposer
from paceline.engine.draft_length import DraftLengthMode
from paceline.engine.engine import Engine, EngineSettings
from paceline.engine.kind_costs import KindCosts
from paceline.engine.request import SamplingParameters
from paceline.engine.step_cost import StepCosts, StepCostTable


def flat_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step takes 10 ms and drawing drafts 4 more, at any size."""
    flat = {(requests, count): 10.0 for requests in (1, 8) for count in (1, 8)}
    drawn = {size: 4.0 for size in flat}
    monkeypatch.setattr(
        loop_module, "measure_costs", lambda *_args, **_kwargs: StepCosts(StepCostTable(flat), StepCostTable(drawn))
    )
    monkeypatch.setattr(KindCosts, "observe", lambda *_args: None)


@pytest.mark.parametrize("mode", ["adaptive", "fixed"])
def test_a_newcomer_among_many_gets_its_first_block_with_everybody_else(
    mode: DraftLengthMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps and draft passes cost the same at any size, so a pass for one is time that four lose."""
    flat_costs(monkeypatch)
    target, _ = loaded()
    prompt, sampling = tiny_prompts([4])[0], SamplingParameters(max_tokens=60, ignore_eos=True, draft_length=mode)
    right = (*prompt, *Engine(target).generate([prompt], sampling)[0].token_ids)
    replay = ReplayProposer(lambda _slot: right, 7)
    engine = Engine(target, None, EngineSettings(max_num_seqs=5), proposer=replay)
    names = []
    for _ in range(5):
        names.append(engine.add_request(prompt, sampling))
        engine.step()
    while engine.has_unfinished():
        engine.step()
    results = [engine.take_result(name) for name in names]
    firsts = [result.trace.records[0].num_draft_tokens for result in results]
    assert firsts == ([7, 7, 7, 0, 0] if mode == "adaptive" else [7] * 5)
    for result in results:
        assert {record.num_draft_tokens for record in result.trace.records[1:-1]} == {7}
        assert (*prompt, *result.token_ids) == right


@pytest.mark.parametrize(("num_first", "num_drafts"), [(5, 7), (6, 0)])
def test_newcomers_that_share_a_pass_are_worth_it_together(
    num_first: int, num_drafts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By hand, of 8 in the end: 4 ms are worth 4 * 64 / 14 = 18.3 tokens; three first blocks give 21, two 14."""
    flat_costs(monkeypatch)
    paged = AttentionChoice(is_batched=True, is_row_invariant=False, is_paged=True)
    monkeypatch.setattr(AttentionChoice, "for_device", lambda *_arguments, **_options: paged)
    target, _ = loaded(linear_mode="plain")
    sampling = SamplingParameters(max_tokens=60, ignore_eos=True, draft_length="adaptive")
    prompts = [[10 + index, *tiny_prompts([5])[0]] for index in range(8)]
    plain = Engine(target, None, EngineSettings(max_num_seqs=8, prefix_cache=False)).generate(prompts, sampling)
    rights = {tuple(prompt): (*prompt, *result.token_ids) for prompt, result in zip(prompts, plain, strict=True)}
    engine: Engine

    def script(slot: int) -> tuple[int, ...]:
        return next(rights[each.prompt_ids] for each in engine._loop.requests.values() if each.slot == slot)

    settings = EngineSettings(max_num_seqs=8, prefix_cache=False)
    engine = Engine(target, None, settings, proposer=ReplayProposer(script, 7))
    names = []
    for count in (num_first, 8 - num_first):
        names += [engine.add_request(prompt, sampling) for prompt in prompts[len(names) : len(names) + count]]
        engine.step()
    while engine.has_unfinished():
        engine.step()
    records = [engine.take_result(name).trace.records for name in names]
    firsts = [each[0].num_draft_tokens for each in records]
    assert firsts == [7] * num_first + [num_drafts] * (8 - num_first)
