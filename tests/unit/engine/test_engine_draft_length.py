"""Draft lengths in the engine: the text is the same in every mode, and the number of drafts goes where it pays."""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tests.fakes import TableProposer, table_target
from tests.tiny import loaded, tiny_drafter_contract, tiny_prompts

from paceline.checkpoint.contract import ConfidenceSettings
from paceline.engine import graphs as graphs_module
from paceline.engine import loop as loop_module
from paceline.engine.canary import ReplayProposer
from paceline.engine.draft_stopper import DraftPlan, DraftStopper
from paceline.engine.engine import Engine, EngineSettings
from paceline.engine.kind_costs import KindCosts
from paceline.engine.proposal import BlockProposer
from paceline.engine.request import RequestResult, SamplingParameters
from paceline.engine.step import SentOutput
from paceline.engine.step_cost import StepCosts, StepCostTable
from paceline.engine.step_kind import GREEDY_STEP, StepKind, StepSize
from paceline.errors import ConfigError, RequestError

GREEDY = SamplingParameters(max_tokens=40, ignore_eos=True)
FAMILIES: dict[str, dict[str, Any]] = {
    "dflash": {},
    "dflash2": {},
    "dspark": {"confidence": ConfidenceSettings(with_markov=True)},
    "eagle3": {},
}


def costs(*, row_ms: float, draft_ms: float, plain_ms: float = 10.0) -> StepCosts:
    """Made up, linear: so that a test doesn't depend on how busy its machine is."""
    return StepCosts(
        StepCostTable({(1, 1): plain_ms, (1, 2): plain_ms + row_ms}),
        StepCostTable({(1, 1): draft_ms, (1, 2): 2 * draft_ms}),
    )


def made_up(monkeypatch: pytest.MonkeyPatch, **parts: float) -> None:
    monkeypatch.setattr(loop_module, "measure_costs", lambda *_args, **_kwargs: costs(**parts))
    monkeypatch.setattr(KindCosts, "observe", lambda *_args: None)


def with_mode(mode: str | None, **changes: Any) -> SamplingParameters:
    return SamplingParameters(**({"max_tokens": 40, "ignore_eos": True, "draft_length": mode} | changes))


def texts(results: list[RequestResult]) -> list[tuple[int, ...]]:
    return [result.token_ids for result in results]


# The text


@functools.cache
def plain_texts() -> tuple[list[list[int]], list[tuple[int, ...]]]:
    """Prompts, and what the target alone writes behind them; it is the same one whatever drafts."""
    prompts = tiny_prompts([5, 17, 9])
    return prompts, texts(Engine(loaded()[0]).generate(prompts, GREEDY))


@pytest.mark.parametrize("family", list(FAMILIES))
@pytest.mark.parametrize("method", ["greedy", "probabilistic"])
def test_greedy_text_is_the_same_in_every_mode(family: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made_up(monkeypatch, row_ms=0.5, draft_ms=0.2)
    target, drafter = loaded(drafter_family=family, **FAMILIES[family])
    prompts, plain = plain_texts()
    settings = {"max_num_seqs": 2, "draft_sample_method": method}
    for mode in ("off", "fixed", "adaptive"):
        engine = Engine(target, drafter, EngineSettings(draft_length=mode, **settings))
        assert texts(engine.generate(prompts, GREEDY)) == plain, mode
        assert (engine.stats().num_draft_tokens == 0) == (mode == "off")
    mixed = Engine(target, drafter, EngineSettings(max_num_seqs=3, draft_sample_method=method))
    each = [with_mode(mode) for mode in ("adaptive", "off", "fixed")]
    results = mixed.generate(prompts, each)
    assert texts(results) == plain
    assert [any(record.proposed_ids for record in result.trace.records) for result in results] == [True, False, True]


def test_lengths_that_change_all_the_time_change_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every number of drafts follows every other, whatever was accepted."""
    made_up(monkeypatch, row_ms=0.5, draft_ms=0.2)
    for family, changes in FAMILIES.items():
        target, drafter = loaded(drafter_family=family, **changes)
        prompts = tiny_prompts([6, 11, 3])
        plain = texts(Engine(target).generate(prompts, GREEDY))
        engine = Engine(target, drafter, EngineSettings(draft_length="adaptive"))
        sequence = iter([3, 0, 7, 1, 0, 0, 5, 2, 7, 7, 4, 0, 6] * 40)
        engine._loop.drafting.planner.prepare().next_num_drafts = lambda _size, sequence=sequence: next(sequence)
        assert texts(engine.generate(prompts, GREEDY)) == plain, family


@pytest.mark.parametrize("verify_method", ["match", "coupled"])
def test_sampled_text_is_the_same_where_drafts_are_judged_by_equality(
    verify_method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_up(monkeypatch, row_ms=0.5, draft_ms=0.2)
    target, drafter = loaded(drafter_family="dflash2")
    prompts = tiny_prompts([5, 17])
    outcomes = []
    for mode in ("off", "fixed", "adaptive"):
        engine = Engine(target, drafter, EngineSettings(verify_method=verify_method, draft_length=mode))
        outcomes.append(texts(engine.generate(prompts, with_mode(None, temperature=1.0, seed=4))))
    assert outcomes[0] == outcomes[1] == outcomes[2]


# The number of drafts


def test_an_untrained_drafter_ends_near_none_and_costs_next_to_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    made_up(monkeypatch, row_ms=1.0, draft_ms=0.5)
    target, drafter = loaded()
    engine = Engine(target, drafter, EngineSettings(draft_length="adaptive", max_num_seqs=1))
    sampling = with_mode(None, max_tokens=250)
    (result,) = engine.generate(tiny_prompts([4]), sampling)
    lengths = [record.num_draft_tokens for record in result.trace.records]
    stats = engine.stats()
    assert sum(lengths[50:]) / len(lengths[50:]) < 0.3
    assert (stats.num_drafts, stats.num_switched_off) == (0, 1)
    assert stats.num_probes > 0
    fixed = Engine(target, drafter, EngineSettings(max_num_seqs=1))
    assert fixed.generate(tiny_prompts([4]), sampling)[0].token_ids == result.token_ids
    assert fixed.stats().num_probes == 0


def test_a_useless_drafter_costs_nothing_once_it_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """No taps, no context, no blocks; only now and then a new request starts with a block."""
    made_up(monkeypatch, row_ms=0.1, draft_ms=0.1)
    target, drafter = loaded()
    engine = Engine(target, drafter, EngineSettings(draft_length="adaptive", max_num_seqs=2))
    prompts = tiny_prompts([4] * 12)
    engine.generate(prompts[:2], with_mode(None, max_tokens=200))
    assert engine._loop.drafting.planner.has_given_up(GREEDY_STEP)
    written: list[int] = []
    write = BlockProposer.write_context
    monkeypatch.setattr(BlockProposer, "write_context", lambda *args: written.append(args[1].num_rows) or write(*args))
    results = engine.generate(prompts, GREEDY)
    num_steps = sum(len(result.trace.records) for result in results)
    assert len(written) < 0.1 * num_steps
    assert len(written) == 0 or 8 in written  # a block was judged with its context
    assert texts(results) == texts(Engine(target).generate(prompts, GREEDY))


def test_whether_a_request_is_drafted_for_is_asked_for_all_that_come_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of a burst is alone in the engine for a moment; what pays for one need not pay for four."""
    made_up(monkeypatch, row_ms=0.1, draft_ms=0.1)
    target, drafter = loaded()
    engine = Engine(target, drafter, EngineSettings(draft_length="adaptive", max_num_seqs=4))
    asked: list[int] = []
    controller = engine._loop.drafting.planner.prepare()
    controller.wants_another_request = lambda step: asked.append(step.num_requests) or True  # type: ignore[func-returns-value]
    engine.generate(tiny_prompts([4] * 6), with_mode(None, max_tokens=3))
    assert asked[:4] == [4] * 4
    assert len(asked) == 6


def test_a_given_up_drafter_is_found_good_by_a_new_request(monkeypatch: pytest.MonkeyPatch) -> None:
    made_up(monkeypatch, row_ms=0.1, draft_ms=0.1)
    target, _ = loaded()
    (prompt,) = tiny_prompts([4])
    right = (*prompt, *Engine(target).generate([prompt], GREEDY)[0].token_ids)
    wrong = tuple((token + 1) % 512 for token in right)
    scripts = [wrong]
    engine = Engine(
        target,
        None,
        EngineSettings(draft_length="adaptive", max_num_seqs=1),
        proposer=ReplayProposer(lambda _slot: scripts[-1], 7),
    )
    for _ in range(8):
        engine.generate([prompt], GREEDY)
    assert engine._loop.drafting.planner.has_given_up(GREEDY_STEP)
    scripts.append(right)
    lengths: list[int] = []
    for _ in range(12):
        (result,) = engine.generate([prompt], GREEDY)
        lengths += [record.num_draft_tokens for record in result.trace.records]
    assert lengths[-2] == 7
    assert engine.stats().num_drafts == 7


def test_perfect_drafts_are_drawn_in_full_and_a_flawed_text_costs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    made_up(monkeypatch, row_ms=0.5, draft_ms=0.2)
    target, _ = loaded()
    prompt = tiny_prompts([4])[0]
    sampling = with_mode(None, max_tokens=300)
    right = (*prompt, *Engine(target).generate([prompt], sampling)[0].token_ids)
    wrong = tuple((token + 1) % 512 for token in right)
    for script, is_right in ((right, True), (wrong, False)):
        replay = ReplayProposer(lambda _slot, script=script: script, 7)
        engine = Engine(target, None, EngineSettings(draft_length="adaptive", max_num_seqs=1), proposer=replay)
        (result,) = engine.generate([prompt], sampling)
        lengths = [record.num_draft_tokens for record in result.trace.records[:-1]]
        assert engine.stats().num_drafts == (7 if is_right else 0)
        assert set(lengths[:-1]) == {7} if is_right else sum(lengths[30:]) < 0.1 * 7 * len(lengths)
        assert (*prompt, *result.token_ids) == right


def test_a_step_has_as_many_rows_as_its_longest_block(monkeypatch: pytest.MonkeyPatch) -> None:
    made_up(monkeypatch, row_ms=0.5, draft_ms=0.2)
    target, drafter = loaded()
    engine = Engine(target, drafter, EngineSettings(max_num_seqs=2))
    chosen = iter([2, 2, 0, 1, 3, *[0] * 100])
    engine._loop.drafting.planner.prepare().next_num_drafts = lambda _size: next(chosen)
    rows, decode = [], graphs_module.decode_step

    def watched(*args: Any) -> Any:
        rows.append(args[-1].rows.num_rows)
        return decode(*args)

    monkeypatch.setattr(graphs_module, "decode_step", watched)
    engine.generate(tiny_prompts([4, 4]), [with_mode("adaptive"), with_mode("off")])
    assert rows[:6] == [3, 3, 1, 2, 4, 1]
    rows.clear()
    engine.generate(tiny_prompts([4, 4]), [with_mode("adaptive"), with_mode("fixed", max_tokens=5)])
    assert 8 in rows
    assert rows[-1] == 1


def test_the_schedule_limits_drafts_by_the_number_of_requests() -> None:
    target, drafter = loaded()
    settings = EngineSettings(max_num_seqs=3, num_drafts_by_batch_size=((1, 1, 7), (2, 2, 3), (3, 3, 0)))
    for count, limit in ((1, 7), (2, 3), (3, 0)):
        engine = Engine(target, drafter, settings)
        results = engine.generate(tiny_prompts([4] * count), GREEDY)
        assert texts(results) == texts(Engine(target).generate(tiny_prompts([4] * count), GREEDY))
        lengths = {record.num_draft_tokens for result in results for record in result.trace.records[2:]}
        assert lengths == {limit}
    with pytest.raises(ConfigError, match="schedule"):
        EngineSettings(num_drafts_by_batch_size=((2, 3, 1),))


def test_the_schedule_holds_in_the_step_in_which_a_request_joins() -> None:
    target, drafter = loaded()
    engine = Engine(target, drafter, EngineSettings(num_drafts_by_batch_size=((1, 1, 7), (2, 2, 3), (3, 8, 0))))
    names = [engine.add_request(prompt, GREEDY) for prompt in tiny_prompts([4])]
    engine.step()
    waiting: list[list[int]] = []
    for prompts in (tiny_prompts([5]), tiny_prompts([6, 7])):
        names += [engine.add_request(prompt, GREEDY) for prompt in prompts]
        deltas = engine.step()
        waiting.append([delta.step.num_draft_tokens for delta in deltas if delta.step is not None])
    assert waiting == [[3, 3], [0, 0, 0, 0]]
    while engine.has_unfinished():
        engine.step()
    plain = Engine(target).generate([*tiny_prompts([4]), *tiny_prompts([5]), *tiny_prompts([6, 7])], GREEDY)
    assert texts([engine.result(name) for name in names]) == texts(plain)


# Holding drafts back


def test_unlikely_drafts_are_held_back_and_the_trials_judge_whole_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    made_up(monkeypatch, row_ms=2.0, draft_ms=0.0)
    target, drafter = loaded(drafter_family="dspark", confidence=ConfidenceSettings(with_markov=True))
    engine = Engine(target, drafter, EngineSettings(draft_length="adaptive", max_num_seqs=1))
    engine._loop.drafting.planner.prepare().next_num_drafts = lambda _size: 7
    plain = texts(Engine(target).generate(tiny_prompts([4]), GREEDY))
    results = engine.generate(tiny_prompts([4]), GREEDY)
    lengths = [record.num_draft_tokens for record in results[0].trace.records]
    assert texts(results) == plain
    assert min(lengths) < 7
    assert max(lengths) == 7
    assert engine.stats().num_held_back > 0
    assert engine.stats().num_draft_tokens == sum(lengths)


def test_the_estimator_learns_from_blocks_without_rules_only(monkeypatch: pytest.MonkeyPatch) -> None:
    made_up(monkeypatch, row_ms=0.0, draft_ms=0.0)
    target, drafter = loaded(drafter_family="dflash2")
    for changes, teaches in (({}, True), ({"repetition_penalty": 1.5}, False)):
        engine = Engine(target, drafter, EngineSettings(draft_length="adaptive", draft_sample_method="probabilistic"))
        engine.generate(tiny_prompts([4]), with_mode(None, temperature=1.0, seed=1, **changes))
        stoppers = engine._loop.drafting._stoppers
        assert stoppers[True].estimator is not None and stoppers[False].estimator is None, "the request was sampled"
        assert (stoppers[True].estimator.sums_6K[5].sum().item() > 0) == teaches


TABLE = torch.randn(8, 8, generator=torch.Generator().manual_seed(3)).mul(1.5).log_softmax(-1)


def transitions_of(verify_method: str) -> torch.Tensor:
    """Counts of each token after each, in long texts whose drafts are drawn from another table."""
    target = table_target(TABLE)
    drafts = TABLE.unsqueeze(1) + torch.randn(8, 3, 8, generator=torch.Generator().manual_seed(5))
    proposer = TableProposer(drafts, tiny_drafter_contract(target.contract), method="probabilistic")
    settings = EngineSettings(max_num_seqs=32, draft_length="adaptive", verify_method=verify_method)
    engine = Engine(target, None, settings, proposer=proposer)
    planner = engine._loop.drafting.planner

    def plan(modes: Sequence[Any], teaches: Sequence[bool], _step: Any) -> DraftPlan:
        """As for a lone request, for 32 at once."""
        everybody = (True,) * len(modes)
        return DraftPlan((3,) * len(modes), (0.45, 0.2, 0.1), is_adaptive=everybody, teaches=tuple(teaches))

    planner.plan = plan  # type: ignore[method-assign]
    counts = torch.zeros(8, 8)
    sampled = [with_mode(None, max_tokens=300, temperature=1.0, seed=seed) for seed in range(32)]
    for result in engine.generate([[1]] * 32, sampled):
        for before, after in itertools.pairwise(result.token_ids):
            counts[before, after] += 1
    assert engine.stats().num_held_back > 500
    return counts


def chi_square(counts: torch.Tensor) -> float:
    expected = TABLE.exp() * counts.sum(dim=1, keepdim=True)
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("verify_method", ["standard", "block"])
def test_holding_back_keeps_the_distribution_and_peeking_at_the_drawn_token_does_not(
    verify_method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_up(monkeypatch, row_ms=1.0, draft_ms=0.1)
    assert chi_square(transitions_of(verify_method)) < 121  # 56 degrees of freedom: 121 at 1e-6
    hold_back = DraftStopper.hold_back

    def peeking(self: DraftStopper, slots_B: Any, proposal: Any, plan: Any) -> Any:
        own = (proposal.candidate_ids_BKC == proposal.ids_BK.unsqueeze(2)).float()
        drawn = (own * proposal.log_q_BKC.exp()).sum(-1)
        return hold_back(self, slots_B, proposal._replace(confidence_BK=drawn.clamp(0.01, 0.99)), plan)

    monkeypatch.setattr(DraftStopper, "hold_back", peeking)
    assert chi_square(transitions_of(verify_method)) > 200


# Costs, warnings, errors


def test_costs_are_measured_once_and_only_for_who_adapts(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(loop_module, "measure_costs", lambda *_a, **_k: calls.append(1) or costs(row_ms=1, draft_ms=1))
    target, drafter = loaded()
    engine = Engine(target, drafter)
    engine.generate(tiny_prompts([4]), GREEDY)
    assert not calls
    for _ in range(2):
        engine.generate(tiny_prompts([4, 4]), with_mode("adaptive"))
    assert len(calls) == 2, "greedy steps and sampled ones"
    Engine(target, drafter, EngineSettings(draft_length="adaptive"))
    assert len(calls) == 4, "an engine that adapts measures when it is made, not while a request waits"
    plain = Engine(target, None, EngineSettings(draft_length="adaptive"))
    plain.generate(tiny_prompts([4]), with_mode("adaptive"))
    assert len(calls) == 4


@pytest.mark.parametrize("is_planted", [False, True])
def test_sampled_requests_go_by_what_sampled_steps_cost(is_planted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: every step is taken to be greedy, as it once was."""

    def measured(_parts: Any, _steps: Any, _settings: Any, kind: StepKind, **_options: Any) -> StepCosts:
        return costs(row_ms=100.0 if kind.is_sampled and not is_planted else 0.1, draft_ms=0.1)

    made_up(monkeypatch, row_ms=0.0, draft_ms=0.0)
    monkeypatch.setattr(loop_module, "measure_costs", measured)
    target, drafter = loaded()
    engine = Engine(target, drafter, EngineSettings(draft_length="adaptive"))
    few = {"max_tokens": 4}
    sampled, greedy = (
        engine.generate(tiny_prompts([4]), with_mode(None, temperature=temperature, seed=1, **few))[0]
        for temperature in (1.0, 0.0)
    )
    assert greedy.trace.records[0].num_draft_tokens == 7
    assert sampled.trace.records[0].num_draft_tokens == (7 if is_planted else 0)
    mixed = engine.generate(
        tiny_prompts([4, 4]), [with_mode(None, **few), with_mode(None, temperature=1.0, seed=1, **few)]
    )
    assert (mixed[0].trace.records[-1].num_draft_tokens > 0) == is_planted, "the batch is sampled"


def test_steps_that_came_right_behind_others_tell_what_steps_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    made_up(monkeypatch, row_ms=0.5, draft_ms=0.2)
    seen: list[tuple[StepSize, float]] = []
    monkeypatch.setattr(KindCosts, "observe", lambda _costs, size, ms, _host_ms: seen.append((size, ms)))
    target, drafter = loaded()
    engine = Engine(target, drafter, EngineSettings(max_num_seqs=2, draft_length="adaptive"))
    chosen = iter([3, 3, 3, 3, 5, 5, 0, 0, 0, *[0] * 100])
    engine._loop.drafting.planner.prepare().next_num_drafts = lambda _step: next(chosen)
    (result,) = engine.generate(tiny_prompts([4]), GREEDY)
    records = result.trace.records
    # The first block is drawn behind the prompt, and the first step comes behind its pass; a step between two lengths
    # judges other drafts than it draws.
    assert [size.num_drafts for size, _ in seen[:6]] == [3, 3, 5, 0, 0, 0]
    assert seen[0] == (StepSize(GREEDY_STEP, 1, 3, writes_context=True), records[1].step_ms)
    num_seen, first = len(seen), engine.add_request(tiny_prompts([4])[0], GREEDY)
    for _ in range(4):
        engine.step()
    engine.add_request(tiny_prompts([5])[0], GREEDY)
    engine.step()
    assert [size.num_requests for size, _ in seen[num_seen:]] == [1, 1, 1], "not behind a prompt's pass"
    engine.step()
    assert seen[-1][0].num_requests == 2 and len(seen) == num_seen + 4
    engine.abort(first)


def test_a_useless_drafter_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    target, drafter = loaded()
    engine = Engine(target, drafter)
    with caplog.at_level(logging.WARNING, logger="paceline"):
        engine.generate(tiny_prompts([4] * 3), with_mode(None, max_tokens=300))
    said = [record for record in caplog.records if "acceptance length" in record.message]
    assert [record.levelname for record in said] == ["ERROR"]


def test_an_unknown_mode_is_refused_with_the_known_ones() -> None:
    with pytest.raises(RequestError, match="'off', 'fixed', 'adaptive'"):
        SamplingParameters(draft_length="sometimes")
    with pytest.raises(ConfigError, match="'adaptive'"):
        EngineSettings(draft_length="sometimes")


@pytest.mark.parametrize("step", [2, 5])
def test_an_interrupted_step_leaves_adaptive_drafting_usable(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made_up(monkeypatch, row_ms=0.5, draft_ms=0.2)
    target, drafter = loaded(drafter_family="eagle3")
    plain = texts(Engine(target).generate(tiny_prompts([7, 5]), GREEDY))
    engine = Engine(target, drafter, EngineSettings(draft_length="adaptive", num_draft_tokens=3))
    names = [engine.add_request(prompt, GREEDY) for prompt in tiny_prompts([7, 5])]
    for _ in range(step):
        engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(SentOutput, "read", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    while engine.has_unfinished():
        engine.step()
    assert [engine.result(name).token_ids for name in names] == plain


def _interrupt(*_args: Any) -> None:
    raise KeyboardInterrupt
