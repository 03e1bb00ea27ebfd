"""Hybrid targets in the engine: whatever is drafted, and whoever shares a step, it is the contiguous reference's text.

All comparisons are of bits. Behind each property stands a planted fault that breaks it.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests import tiny
from tests.hybrid_runs import (
    FAMILIES,
    GREEDY,
    SAMPLED,
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
from tests.tiny_kimi import kimi_target, small_kimi_config
from tests.unit.engine.serving_runs import same_run

import paceline.engine.hybrid_attends as hybrid_attends
import paceline.engine.recurrent_state as recurrent_state
from paceline.engine.attends import AttentionChoice
from paceline.engine.engine import Engine
from paceline.engine.proposal import Rows
from paceline.engine.recurrent_state import RecurrentState, StateRows
from paceline.engine.sampling_flags import SamplingFlags
from paceline.engine.step import StepBatch, decode_step

PROMPTS = dict(zip("abcd", prompts_of([9, 21, 5, 14]), strict=True))
NAN_ID = 39  # in nobody's text
Plant = Callable[[pytest.MonkeyPatch], None]


@pytest.mark.parametrize("family", [None, *FAMILIES])
def test_greedy_text_is_the_references_with_every_drafter_on_the_tiny_k3(family: str | None) -> None:
    target = k3_target()
    if family is None:
        engine = checked(target, max_num_seqs=3)
    else:
        engine = helped(target, drafter_for(target, family), PROMPTS, max_num_seqs=3)
    names = [engine.add_request(prompt, GREEDY, name) for name, prompt in PROMPTS.items()]
    for name, result in zip(names, run(engine, names), strict=True):
        assert result.token_ids == stepwise_text(target, PROMPTS[name], GREEDY.max_tokens)
    if family is not None:
        kept = {record.num_verified_accepted for name in names for record in engine.result(name).trace.records}
        assert kept >= {0, 1, 2, 4}  # drafts
    require_empty(engine)


def text_is_right(**settings: Any) -> bool:
    """Four requests through two slots, so that slots are used again and steps hold rows of several."""
    target = small_target()
    engine = helped(target, drafter_for(target, "dflash"), PROMPTS, **({"max_num_seqs": 2} | settings))
    names = [engine.add_request(prompt, GREEDY, name) for name, prompt in PROMPTS.items()]
    results = run(engine, names)
    return all(
        result.token_ids == stepwise_text(target, PROMPTS[name], GREEDY.max_tokens)
        for name, result in zip(names, results, strict=True)
    )


def test_states_in_bf16_give_nearly_the_same_distribution_at_half_the_memory() -> None:
    """Drafted and plain, in a prefix that is resent: the log-probabilities of one text, with states of either kind."""
    target, settings = small_target(), replace(GREEDY, logprobs=0)
    found, sizes = {}, {}
    for dtype in ("float32", "bfloat16"):
        for family in (None, "dflash"):
            options: dict[str, Any] = {"max_num_seqs": 2, "recurrent_state_dtype": dtype}
            if family is None:
                engine = checked(target, **options)
            else:
                engine = helped(target, drafter_for(target, family), PROMPTS, **options)
            for turn in ("first", "again"):
                names = [engine.add_request(PROMPTS[name], settings, name) for name in "ab"]
                found[dtype, family, turn] = run(engine, names)
            stats = engine.stats()
            sizes[dtype] = engine._loop.parts.recurrent.rows.states_LSNKK.nbytes
            assert stats.num_hit_tokens > 0
            require_empty(engine)
    assert sizes["float32"] == 2 * sizes["bfloat16"]
    largest = 0.0
    for (dtype, family, turn), results in found.items():
        for wide, result in zip(found["float32", family, turn], results, strict=True):
            pairs = list(zip(wide.token_ids, result.token_ids, strict=True))
            num_same = next((index for index, (one, other) in enumerate(pairs) if one != other), len(pairs))
            assert num_same >= 10, "near ties may fall the other way, and a short text has few"
            for one, other in list(zip(wide.logprobs or (), result.logprobs or (), strict=True))[:num_same]:
                largest = max(largest, abs(one.logprob - other.logprob))
            assert dtype == "bfloat16" or wide.token_ids == result.token_ids
    assert 0 < largest < 0.02


def test_what_runs_prompts_reaches_every_prompt_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    run_prompt = hybrid_attends.delta_attention

    def noted(*arguments: Any, kernel: str, **options: Any) -> Any:
        asked.append(kernel)
        return run_prompt(*arguments, kernel=kernel, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(hybrid_attends, "delta_attention", noted)
    for kernel in ("auto", "recurrent"):
        asked.clear()
        engine = checked(small_target(), prompt_kernel=kernel)
        run(engine, [engine.add_request(PROMPTS["a"], replace(GREEDY, max_tokens=2), "a")])
        assert set(asked) == {kernel}


def keep_the_old_state(patch: pytest.MonkeyPatch) -> None:
    """A slot is not emptied when it changes hands."""
    patch.setattr(RecurrentState, "begin", lambda self, slot, *_args, **_options: self.ends_S.__setitem__(slot, 0))


def keep_the_old_history(patch: pytest.MonkeyPatch) -> None:
    """The state is emptied, the convolution's rows are not."""
    patch.setattr(StateRows, "clear", lambda self, place: self.states_LSNKK[:, place].zero_())


def commit_changed(patch: pytest.MonkeyPatch, change: Callable[[torch.Tensor, int], torch.Tensor]) -> None:
    commit = recurrent_state.commit_delta

    def changed(states: Any, histories: Any, slots: Any, records: Any, counts: torch.Tensor, **into: Any) -> None:
        commit(states, histories, slots, records, change(counts, records.key_BTNK.shape[2]), **into)

    patch.setattr(recurrent_state, "commit_delta", changed)


def commit_a_row_too_many(patch: pytest.MonkeyPatch) -> None:
    """The first refused draft is taken in."""
    commit_changed(patch, lambda counts, num_rows: (counts + 1).clamp(max=num_rows))


def commit_a_row_too_few(patch: pytest.MonkeyPatch) -> None:
    """The anchor is left out."""
    commit_changed(patch, lambda counts, _: (counts - 1).clamp(min=0))


def commit_every_row(patch: pytest.MonkeyPatch) -> None:
    """Refused drafts are taken in, too."""
    commit_changed(patch, torch.full_like)


def commit_to_the_neighbour(patch: pytest.MonkeyPatch) -> None:
    """Counts are read in another order than slots."""
    commit_changed(patch, lambda counts, _: counts.flip(0))


def lose_the_history(patch: pytest.MonkeyPatch) -> None:
    """A chunk leaves the convolution's rows as they were before it."""
    patch.setattr(hybrid_attends, "next_history", lambda _rows, history_BHC: history_BHC)


def run_a_step_in_place(patch: pytest.MonkeyPatch) -> None:
    """Rows that may be refused move the state on at once, and the commit does it again."""
    step_delta = hybrid_attends.StepDelta

    def in_place(recurrent: RecurrentState, slots_B: torch.Tensor, num_rows: int) -> Any:
        prompt = hybrid_attends.PromptDelta(recurrent, slots_B, num_rows, "recurrent")
        recorded = step_delta(recurrent, slots_B, num_rows)

        def both(place: int, rows: Any, weights: Any) -> torch.Tensor:
            recorded(place, rows, weights)
            return prompt(place, rows, weights)

        return both

    patch.setattr(hybrid_attends, "StepDelta", in_place)


FAULTS: tuple[Plant, ...] = (
    keep_the_old_state,
    keep_the_old_history,
    commit_a_row_too_many,
    commit_a_row_too_few,
    commit_every_row,
    commit_to_the_neighbour,
    lose_the_history,
    run_a_step_in_place,
)


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_text_is_right_where_slots_are_shared_and_used_again(runs_ahead: bool) -> None:
    assert text_is_right(run_ahead=runs_ahead)


@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
def test_a_planted_fault_changes_the_text(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    assert not text_is_right(check_invariants=False, prefill_chunk_size=8)


@pytest.mark.parametrize("chunk_size", [1, 3, 8, 512])
def test_chunk_sizes_make_no_difference(chunk_size: int) -> None:
    assert text_is_right(prefill_chunk_size=chunk_size)


@pytest.mark.parametrize("num_draft_tokens", [1, 3])
def test_numbers_of_drafts_make_no_difference(num_draft_tokens: int) -> None:
    assert text_is_right(num_draft_tokens=num_draft_tokens)


def test_survivors_of_an_abort_and_of_a_step_back_go_on_as_alone() -> None:
    """B47: one request ends right behind its step, another steps back, and a new one takes a slot."""
    target = small_target()
    engine = helped(target, drafter_for(target, "dflash"), PROMPTS, max_num_seqs=3)
    for name in "abc":
        engine.add_request(PROMPTS[name], GREEDY, name)
    engine.step()
    engine.step()
    engine.abort("a")
    assert engine.preempt("b")
    engine.add_request(PROMPTS["d"], GREEDY, "d")
    for name, result in zip("bcd", run(engine, "bcd"), strict=True):
        assert result.token_ids == stepwise_text(target, PROMPTS[name], GREEDY.max_tokens)
        for record in result.trace.records:
            assert 0 <= record.num_verified_accepted <= len(record.proposed_ids)
    require_empty(engine)


def test_any_order_of_admission_and_company_gives_the_same_runs() -> None:
    """Drafted and undrafted requests, greedy and sampled, in one step or another."""
    target = small_target()
    drafter = drafter_for(target, "dflash2")
    wanted = dict(zip("abcd", [GREEDY, UNDRAFTED, SAMPLED, GREEDY], strict=True))
    options = {"verify_method": "match"}  # so that the sampled one's text is its own
    alone = {}
    for name, sampling in wanted.items():
        engine = helped(target, drafter, PROMPTS, max_num_seqs=1, **options)
        engine.add_request(PROMPTS[name], sampling, name)
        (alone[name],) = run(engine, [name])
    for index, order in enumerate(list(itertools.permutations("abcd"))[::5]):
        engine = helped(target, drafter, PROMPTS, max_num_seqs=3, run_ahead=index % 2 == 1, **options)
        for name in order:
            engine.add_request(PROMPTS[name], wanted[name], name)
            engine.step()
        for name, result in zip(order, run(engine, order), strict=True):
            assert same_run(result, alone[name]), (order, name)
        require_empty(engine)
    assert alone["a"].token_ids == stepwise_text(target, PROMPTS["a"], GREEDY.max_tokens)
    assert alone["b"].token_ids == stepwise_text(target, PROMPTS["b"], GREEDY.max_tokens)


@pytest.mark.parametrize("family", ["dflash", "eagle3"])
def test_stepping_back_at_random_leaves_tokens_and_drafts_alone(family: str) -> None:
    target = small_target()
    drafter = drafter_for(target, family)
    wanted = dict(zip("abcd", [GREEDY, SAMPLED, UNDRAFTED, GREEDY], strict=True))
    alone = {}
    for name, sampling in wanted.items():
        engine = helped(target, drafter, PROMPTS, max_num_seqs=1)
        engine.add_request(PROMPTS[name], sampling, name)
        (alone[name],) = run(engine, [name])
    chance = random.Random(family)
    engine = helped(target, drafter, PROMPTS, max_num_seqs=3, prefill_chunk_size=8)
    for name, sampling in wanted.items():
        engine.add_request(PROMPTS[name], sampling, name)
    while engine.has_unfinished():
        engine.step()
        for name in engine.running_ids():
            if chance.random() < 0.2:
                assert engine.preempt(name)
    assert engine.stats().num_preemptions > 5
    for name, right in alone.items():
        assert same_run(engine.result(name), right)
    require_empty(engine)


def test_states_are_those_of_the_text_after_every_step() -> None:
    """What is kept by slot equals a fresh run over the committed text: states and convolution rows, bit for bit."""
    target = small_target()
    engine = helped(target, drafter_for(target, "dspark"), PROMPTS, max_num_seqs=2)
    for name in "ab":
        engine.add_request(PROMPTS[name], replace(GREEDY, max_tokens=40), name)
    recurrent = engine._loop.parts.recurrent
    assert recurrent is not None
    delivered = {name: list(PROMPTS[name]) for name in "ab"}
    slots = {}
    for _ in range(6):
        for delta in engine.step():
            delivered[delta.request_id] += delta.token_ids
        slots |= {engine.request_in_slot(slot): slot for slot in range(2)}
        for name, text in delivered.items():
            found = [part[:, slots[name]] for part in recurrent.rows]
            for own, expected in zip(found, stepwise_state(target, text[:-1]), strict=True):
                assert torch.equal(own, expected)
            assert int(recurrent.ends_S[slots[name]]) == len(text) - 1


def test_an_interruption_costs_nothing_but_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of a chunk and of a step, when some layers have moved on and others have not."""
    target = small_target()
    for name_of_pass in ("PromptDelta", "StepDelta"):
        engine = helped(target, drafter_for(target, "dflash"), PROMPTS, max_num_seqs=2)
        for name in "ab":
            engine.add_request(PROMPTS[name], GREEDY, name)
        if name_of_pass == "StepDelta":
            engine.step()
        delta, calls = getattr(hybrid_attends, name_of_pass), [0]

        def interrupted(*args: Any, delta: Any = delta, calls: list[int] = calls) -> Any:
            form = delta(*args)

            def run_layer(place: int, *rest: Any) -> torch.Tensor:
                calls[0] += 1
                if calls[0] == 3:
                    raise KeyboardInterrupt
                answers: torch.Tensor = form(place, *rest)
                return answers

            return run_layer

        with monkeypatch.context() as patch:
            patch.setattr(hybrid_attends, name_of_pass, interrupted)
            with pytest.raises(KeyboardInterrupt):
                engine.step()
        for name, result in zip("ab", run(engine, "ab"), strict=True):
            assert result.token_ids == stepwise_text(target, PROMPTS[name], GREEDY.max_tokens)
        require_empty(engine)


def test_memory_is_counted() -> None:
    target = small_target()
    engine = checked(target, drafter_for(target, "dflash"), max_num_seqs=2)
    stats = engine.stats()
    num_rows = (stats.num_blocks + 1) * 8
    assert stats.target_cache_bytes == num_rows * 1 * 20 * 4  # one latent layer, rows of 16 + 4 channels
    states = 3 * 5 * 4 * (2 * 8 * 8 + 3 * 48)  # slots and padding, delta layers, state and history
    records = 2 * 5 * 5 * 4 * (3 * 2 * 8 + 48)  # requests, layers, rows of a step
    assert stats.recurrent_state_bytes == states + records


def nan_draft(engine: Engine, at: int) -> Engine:
    """The last draft of the blocks at some positions is a token whose embedding is NaN."""

    class Spoiling:
        def __init__(self, inner: Any) -> None:
            self._inner = inner

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)

        def propose(self, rows: Any, state: Any, **options: Any) -> Any:
            proposal = self._inner.propose(rows, state, **options)
            ids_BK = proposal.ids_BK.clone()
            spoiled = state.lengths[rows.slots_B] % at == 0
            ids_BK[spoiled, 2] = NAN_ID
            return proposal._replace(ids_BK=ids_BK)

    engine.wrap_proposer(Spoiling)
    return engine


@pytest.mark.parametrize("runs_ahead", [False, True])
@pytest.mark.parametrize("is_exact", [True, False], ids=["row by row", "in one sum"])
def test_a_draft_that_overflows_leaves_no_trace(is_exact: bool, runs_ahead: bool) -> None:
    """Its row is never taken in; where it spoils rows before it, the anchor is run again from the state as it was."""
    target = tiny.wrap_target(
        kimi_target(small_kimi_config(6, 3, max_position_embeddings=256)), "row_invariant" if is_exact else "plain"
    )
    engine = helped(target, drafter_for(target, "dflash"), PROMPTS, max_num_seqs=2)
    names = [engine.add_request(prompt, UNDRAFTED, name) for name, prompt in PROMPTS.items()]
    right = {result.request_id: result.token_ids for result in run(engine, names)}
    assert all(NAN_ID not in (*PROMPTS[name], *tokens) for name, tokens in right.items())
    target.model.embed_tokens.weight[NAN_ID] = torch.nan
    spoilt = helped(target, drafter_for(target, "dflash"), PROMPTS, max_num_seqs=2, run_ahead=runs_ahead)
    engine = nan_draft(spoilt, 3)
    names = [engine.add_request(prompt, GREEDY, name) for name, prompt in PROMPTS.items()]
    for result in run(engine, names):
        assert (result.finish_reason, result.token_ids) == ("length", right[result.request_id])
    assert engine.stats().num_numeric_errors == 0
    assert (engine.stats().num_spoiled_blocks > 0) == (not is_exact)
    require_empty(engine)


def test_a_step_on_an_anchor_that_is_not_there_takes_nothing_in() -> None:
    """A step may be launched before the host knows that the one before it gave no token."""
    target = small_target()
    engine = helped(target, drafter_for(target, "dflash"), PROMPTS, max_num_seqs=1)
    engine.add_request(PROMPTS["a"], GREEDY, "a")
    for _ in range(3):
        engine.step()
    loop = engine._loop
    recurrent, state = loop.parts.recurrent, loop.parts.state
    assert recurrent is not None
    before, end = recurrent.rows.checksum(0), int(recurrent.ends_S[0])
    (request,) = loop.requests.values()
    with torch.inference_mode():
        for anchor, is_same in ((-1, True), (7, False)):
            state.restore(0, length=end, anchor=anchor, step=1)
            rows = Rows([0], torch.tensor([0]), [end], torch.tensor([end]), 1)
            batch = StepBatch(rows, SamplingFlags.of([request.sampling]), writes_context=True)
            decode_step(loop.parts.target.model, loop.parts.proposer, loop.parts.cache, state, loop.parts.choice, batch)
            assert (recurrent.rows.checksum(0) == before) == is_same
            assert int(recurrent.ends_S[0]) == end + (not is_same)


@pytest.mark.parametrize("is_paged", [False, True])
@pytest.mark.parametrize("family", ["dflash", "eagle3"])
def test_the_batched_forms_serve_too(family: str, is_paged: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU runs, on the references of its kernels; the best two logits lie far enough apart."""
    target = tiny.wrap_target(kimi_target(small_kimi_config(6, 3, max_position_embeddings=256)), "plain")
    monkeypatch.setattr(
        AttentionChoice,
        "for_device",
        lambda *_args, **_options: AttentionChoice(is_batched=True, is_row_invariant=False, is_paged=is_paged),
    )
    engine = helped(target, drafter_for(target, family), PROMPTS, max_num_seqs=3, prefill_chunk_size=8)
    assert engine.stats().attention == ("paged" if is_paged else "batched")
    names = [engine.add_request(prompt, GREEDY, name) for name, prompt in PROMPTS.items()]
    engine.step()
    engine.preempt("a")
    for name, result in zip(names, run(engine, names), strict=True):
        assert result.token_ids == stepwise_text(small_target(), PROMPTS[name], GREEDY.max_tokens)
    require_empty(engine)


def test_a_hybrid_target_passes_its_canary_and_measures_its_steps() -> None:
    target = small_target()
    engine = checked(target, drafter_for(target, "dflash"), max_num_seqs=2, canary="start", draft_length="adaptive")
    names = [engine.add_request(PROMPTS[name], GREEDY, name) for name in "ab"]
    for name, result in zip("ab", run(engine, names), strict=True):
        assert result.token_ids == stepwise_text(target, PROMPTS[name], GREEDY.max_tokens)
    require_empty(engine)
