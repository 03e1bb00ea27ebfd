"""The engine with an EAGLE-3 drafter: output, ends, interruptions, the canary, and an acceptance that can be lost."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.caches import store, stored
from tests.fakes import table_target
from tests.tiny import Family, loaded, tiny_drafter, tiny_prompts, wrap_drafter
from tests.unit.engine.test_engine_sampling import SAMPLING, TABLE, VOCAB, p_value
from torch import Tensor

import paceline.engine.loop as loop_module
import paceline.engine.sequential_proposal as sequential_module
from paceline.checkpoint.contract import DraftSampleMethod, Eagle3Settings, TargetLayerId
from paceline.engine.attends import AttentionChoice
from paceline.engine.canary_drafts import count_equal_drafts
from paceline.engine.direct_drafts import CausalWindows
from paceline.engine.engine import Engine, EngineSettings
from paceline.engine.proposal import Proposer, Rows
from paceline.engine.request import SamplingParameters
from paceline.engine.sequential_proposal import SequentialProposer
from paceline.engine.slots import SlotState
from paceline.engine.step import SentOutput
from paceline.models.attends import WholeSequence
from paceline.models.drafters.eagle3 import Eagle3Drafter
from paceline.models.drafters.proposal import Proposal
from paceline.models.loading import LoadedDrafter, LoadedTarget
from paceline.models.taps import TapCollector

NUM_REQUESTS = 96  # of the tests of the distribution
LONG = SamplingParameters(max_tokens=24, ignore_eos=True)
SAMPLED = SamplingParameters(max_tokens=20, ignore_eos=True, temperature=1.0, top_p=0.95, seed=11)
SWITCHED = Eagle3Settings(norm_before_residual=False, norm_before_fc=True, norm_output=True, doubles_every_layer=True)
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "windows": {"num_layers": 2, "layer_windows": (6, None)},
    "switches": {"num_layers": 2, "eagle3": SWITCHED, "has_qk_norm": True},
    "own ends": {"has_own_embedding": True, "has_own_head": True, "draft_vocab_size": 100, "has_tap_norm": True},
}


def eagle3(family: Family = "llama", **changes: Any) -> tuple[LoadedTarget, LoadedDrafter]:
    return loaded(family, drafter_family="eagle3", **changes)


# --- the output is the target's ---


@pytest.mark.parametrize(("name", "num_draft_tokens"), [("plain", 1), ("windows", 9), ("switches", 3), ("own ends", 3)])
def test_greedy_output_is_that_of_plain_decoding(name: str, num_draft_tokens: int) -> None:
    """Nine is more than it was trained for, which is 7."""
    target, drafter = eagle3("qwen3", **VARIANTS[name])
    prompts = tiny_prompts([5, 23, 1])
    plain = Engine(target).generate(prompts, LONG)
    settings = EngineSettings(max_num_seqs=2, num_draft_tokens=num_draft_tokens, prefill_chunk_size=9)
    engine = Engine(target, drafter, settings)
    found = engine.generate(prompts, LONG)
    assert [result.token_ids for result in found] == [result.token_ids for result in plain]
    assert {record.num_draft_tokens for result in found for record in result.trace.records} == {num_draft_tokens}
    assert engine.stats().method == "eagle3/greedy"


@pytest.mark.parametrize("method", ["greedy", "probabilistic"])
def test_a_request_has_the_same_bits_alone_and_in_company(method: DraftSampleMethod) -> None:
    target, drafter = eagle3("qwen3", **VARIANTS["windows"])
    prompts = tiny_prompts([5, 31, 12])
    each = [SAMPLED, replace(SAMPLED, seed=12, temperature=0.7, top_k=30), replace(LONG, max_tokens=20)]
    settings = EngineSettings(draft_sample_method=method, num_draft_tokens=3)
    alone = [
        Engine(target, drafter, settings).generate([prompt], parameters)[0]
        for prompt, parameters in zip(prompts, each, strict=True)
    ]
    engine = Engine(target, drafter, replace(settings, max_num_seqs=3))
    names = []
    for index in (2, 0, 1):  # admitted one by one, while the others are in mid-flight
        names.append(engine.add_request(prompts[index], each[index]))
        engine.step()
        engine.step()
    while engine.has_unfinished():
        engine.step()
    for name, index in zip(names, (2, 0, 1), strict=True):
        found, expected = engine.result(name), alone[index]
        assert found.token_ids == expected.token_ids
        assert [record.proposed_ids for record in found.trace.records] == [
            record.proposed_ids for record in expected.trace.records
        ]


def table_engine(patch: pytest.MonkeyPatch) -> Engine:
    """A random EAGLE-3 drafter, drawn at the request's temperature, on a target whose distribution is known.

    Attention is of the form that GPUs use: one call for all requests.
    """
    paged = AttentionChoice(is_batched=True, is_row_invariant=False, is_paged=True)
    patch.setattr(AttentionChoice, "for_device", lambda *_args, **_options: paged)
    target = table_target(TABLE)
    changes = {"target_layer_ids": (TargetLayerId(-1), TargetLayerId(0)), "hidden_size": VOCAB, "head_size": 4}
    drafter = tiny_drafter(target.contract, family="eagle3", **changes)
    settings = EngineSettings(
        max_num_seqs=NUM_REQUESTS, max_model_len=130, num_draft_tokens=3, draft_sample_method="probabilistic"
    )
    return Engine(target, wrap_drafter(drafter, "plain"), settings)


def sampled_p_value(engine: Engine) -> float:
    prompts = [[index % VOCAB] for index in range(NUM_REQUESTS)]
    each = [SamplingParameters(max_tokens=120, seed=500 + index, **SAMPLING) for index in range(NUM_REQUESTS)]
    return p_value(engine.generate(prompts, each))


def test_sampled_output_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = table_engine(monkeypatch)
    assert sampled_p_value(engine) > 0.01
    assert engine.stats().num_accepted > 1000, "the drafts were of some use, or nothing was tried"
    assert engine.stats().num_impossible_drafts == 0


def test_a_q_that_was_not_drawn_from_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """P29: the drafts after the first are reported as if every token had been as likely."""
    joined = sequential_module.join_rows

    def flat(drafts: list[Proposal]) -> Proposal:
        even = [draft._replace(log_q_BKC=torch.full((NUM_REQUESTS, 1, VOCAB), -math.log(VOCAB))) for draft in drafts]
        return joined([drafts[0], *even[1:]]) if len(even[0].ids_BK) == NUM_REQUESTS else joined(drafts)

    monkeypatch.setattr(sequential_module, "join_rows", flat)
    assert sampled_p_value(table_engine(monkeypatch)) < 1e-4


# --- limits and interruptions ---


def test_a_request_longer_than_the_drafters_positions_goes_on_without_drafts() -> None:
    target, drafter = eagle3(max_position_embeddings=64)
    prompts, sampling = tiny_prompts([40, 70, 5]), replace(LONG, max_tokens=30)
    plain = Engine(target).generate(prompts, sampling)
    engine = Engine(target, drafter)
    found = engine.generate(prompts, sampling)
    assert [result.token_ids for result in found] == [result.token_ids for result in plain]
    assert engine.stats().num_undrafted == 2
    crossing, beyond, short = ([r.num_draft_tokens for r in result.trace.records] for result in found)
    assert set(beyond) == {0} and set(short) == {7}
    assert crossing.count(7) > 0 and crossing.count(0) > 0


@pytest.mark.parametrize("num_draft_tokens", [1, 9])
def test_the_last_position_of_the_context_can_be_reached(num_draft_tokens: int) -> None:
    """Drafting goes on from the last row of a block, so the drafter's own cache is longer than the target's."""
    target, drafter = eagle3(target_changes={"max_position_embeddings": 40}, max_position_embeddings=80)
    prompt = tiny_prompts([20])[0]
    (plain,) = Engine(target).generate([prompt], replace(LONG, max_tokens=100))
    for is_always_right in (False, True):
        engine = Engine(target, drafter, EngineSettings(num_draft_tokens=num_draft_tokens))
        if is_always_right:
            engine.wrap_proposer(lambda inner: Insisting(inner, prompt + list(plain.token_ids)))
        (result,) = engine.generate([prompt], replace(LONG, max_tokens=100))
        assert result.token_ids == plain.token_ids
        assert (len(plain.token_ids), engine.stats().num_undrafted) == (20, 0)


class Insisting:
    """Runs the drafter as served and then proposes a known text, so that every block is accepted in full."""

    def __init__(self, inner: SequentialProposer, text: list[int]) -> None:
        self._inner, self._text = inner, text
        for name in (*Proposer.__annotations__, "cache"):
            setattr(self, name, getattr(inner, name))
        self.write_context, self.settle = inner.write_context, inner.settle

    def propose(self, rows: Rows, state: SlotState, *, all_greedy: bool, num_drafts: int | None = None) -> Proposal:
        count = self._inner.propose(rows, state, all_greedy=all_greedy, num_drafts=num_drafts).ids_BK.shape[1]
        padded = self._text + [5] * 50
        return Proposal(torch.tensor([padded[n + 1 : n + 1 + count] for n in state.lengths[rows.slots_B].tolist()]))


@pytest.mark.parametrize("where", ["features", "settle", "propose", "before the host", "after the host"])
def test_an_interrupted_step_is_done_again(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """Texts stay right, and so do the drafts of every later step: nothing stale is left in the drafter's cache."""
    target, drafter = eagle3("qwen3", **VARIANTS["windows"])
    prompts = tiny_prompts([7, 3])
    plain = Engine(target).generate(prompts, LONG)
    engine = Engine(target, drafter, EngineSettings(max_num_seqs=2, num_draft_tokens=3))
    names = [engine.add_request(prompt, LONG) for prompt in prompts]
    for _ in range(3):
        engine.step()

    def interrupt(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if where == "features":
            patch.setattr(drafter.model, "features", interrupt, raising=True)
        elif where == "settle":
            patch.setattr(SequentialProposer, "settle", interrupt)
        elif where == "propose":  # after the step's own rows were written
            patch.setattr(SequentialProposer, "propose", interrupt)
        elif where == "before the host":
            patch.setattr(SentOutput, "read", interrupt)
        else:
            patch.setattr(loop_module.EngineLoop, "_deliver", interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    while engine.has_unfinished():
        engine.step()
    for name, right in zip(names, plain, strict=True):
        result = engine.result(name)
        assert result.token_ids == right.token_ids
        text = result.prompt_ids + result.token_ids
        blocks = [(r.anchor_position, r.proposed_ids) for r in result.trace.records if r.proposed_ids]
        assert len(blocks) > 10
        assert count_equal_drafts(target.model, drafter, text, blocks) == sum(len(ids) for _, ids in blocks)


# --- the canary ---


@pytest.mark.parametrize(
    ("name", "linear_mode"),
    [("plain", "row_invariant"), ("windows", "plain"), ("switches", "row_invariant"), ("own ends", "plain")],
)
def test_the_canary_of_a_sound_engine_passes(name: str, linear_mode: str) -> None:
    target, drafter = eagle3("qwen3", linear_mode=linear_mode, **VARIANTS[name])
    report = Engine(target, drafter, EngineSettings(max_num_seqs=2)).canary()
    assert report.has_passed
    assert report.num_compared == report.num_equal > 12  # blocks


def keep_the_first_owners_keys(patch: pytest.MonkeyPatch) -> None:
    """A slot's second owner drafts from the first owner's keys, but for the last prompt token's."""
    settle, seen = SequentialProposer.settle, set()

    def stale(self: SequentialProposer, rows: Rows, ids: Tensor, ends_B: Tensor, next_ids_B: Tensor) -> None:
        key = (id(self), rows.slots[0])
        slot = rows.slots[0]
        before = stored(self.cache, slot) if rows.starts[0] == 0 and key in seen else None
        if rows.starts[0] == 0:
            seen.add(key)
        settle(self, rows, ids, ends_B, next_ids_B)
        if before is not None:
            store(self.cache, slot, before[..., : int(ends_B) - 1, :])

    patch.setattr(SequentialProposer, "settle", stale)


def feed_the_rows_own_token(patch: pytest.MonkeyPatch) -> None:
    """Row p reads token p instead of token p + 1."""
    settle = SequentialProposer.settle

    def late(self: SequentialProposer, rows: Rows, ids: Tensor, ends_B: Tensor, next_ids_B: Tensor) -> None:
        own_ids_B = ids.gather(1, (ends_B - rows.starts_B - 1).unsqueeze(1)).squeeze(1)
        settle(self, rows, torch.cat((ids[:, :1], ids[:, :-1]), dim=1), ends_B, own_ids_B)

    patch.setattr(SequentialProposer, "settle", late)


def settle_refused_rows(patch: pytest.MonkeyPatch) -> None:
    """The last row of a step counts as accepted."""
    settle = SequentialProposer.settle

    def whole(self: SequentialProposer, rows: Rows, ids: Tensor, ends_B: Tensor, next_ids_B: Tensor) -> None:
        settle(self, rows, ids, rows.starts_B + rows.num_rows, next_ids_B)

    patch.setattr(SequentialProposer, "settle", whole)


def recycle_the_first_state(patch: pytest.MonkeyPatch) -> None:
    """Every further draft starts from the state behind the last settled row."""
    run = SequentialProposer._run

    def stuck(self: SequentialProposer, rows: Rows, ids: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        out, recycled = run(self, rows, ids, hidden)
        is_draft = rows.num_rows == 1 and self._features_BTD is None
        return out, hidden if is_draft else recycled

    patch.setattr(SequentialProposer, "_run", stuck)


def draft_at_one_position(patch: pytest.MonkeyPatch) -> None:
    """Further drafts stay where the first one was scored, and overwrite its keys."""
    run = SequentialProposer._run

    def still(self: SequentialProposer, rows: Rows, ids: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        if rows.num_rows == 1 and self._features_BTD is None and rows.starts[0] > 5:
            rows = replace(rows, starts=[start - 1 for start in rows.starts], starts_B=rows.starts_B - 1)
        return run(self, rows, ids, hidden)

    patch.setattr(SequentialProposer, "_run", still)


@pytest.mark.parametrize(
    "plant",
    [
        keep_the_first_owners_keys,
        feed_the_rows_own_token,
        settle_refused_rows,
        recycle_the_first_state,
        draft_at_one_position,
    ],
)
def test_the_canary_finds_every_planted_fault(plant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    target, drafter = eagle3("qwen3")
    engine = Engine(target, drafter, EngineSettings(max_num_seqs=2))
    plant(monkeypatch)
    assert not engine.canary().has_passed, plant.__doc__


# --- a drafter that is accepted, and what takes that from it ---


@pytest.fixture(scope="module")
def fitted() -> tuple[LoadedTarget, LoadedDrafter, list[list[int]]]:
    """A head that has learned six texts of its target by heart: the first draft of every block is right."""
    target, drafter = eagle3("qwen3", linear_mode="plain")
    prompts, model = tiny_prompts([8] * 6), drafter.model
    assert isinstance(model, Eagle3Drafter)
    results = Engine(target).generate(prompts, replace(LONG, max_tokens=40))
    texts = torch.tensor([result.prompt_ids + result.token_ids for result in results])
    taps = TapCollector.of_layers(drafter.contract.target_layer_ids)
    positions = torch.arange(texts.shape[1]).expand(texts.shape)
    with torch.no_grad():
        target.model(texts, positions, WholeSequence(), taps)
    rows = [tap[:, :-2] for tap in taps.collected()]
    optimizer = torch.optim.Adam(model.requires_grad_(True).parameters(), lr=3e-3)
    for _ in range(60):
        embeddings = model.embed(texts[:, 1:-1], target.model)
        out, _ = model(embeddings, model.features(rows), positions[:, :-2], CausalWindows((None,)))
        logits = model.logits(out, target.model).flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, texts[:, 2:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.requires_grad_(False)
    return target, drafter, prompts


def acceptance_length(target: LoadedTarget, drafter: LoadedDrafter, prompts: list[list[int]]) -> float:
    engine = Engine(target, drafter, EngineSettings(num_draft_tokens=3))
    engine.generate(prompts, replace(LONG, max_tokens=40))
    stats = engine.stats()
    return 1 + stats.num_accepted / stats.num_request_steps


def test_a_fitted_head_is_accepted(fitted) -> None:
    assert acceptance_length(*fitted) > 1.9


@pytest.mark.parametrize("offset", [-1, 1])
def test_taps_one_layer_off_cost_acceptance(fitted, offset: int) -> None:
    """B01, B02."""
    target, drafter, prompts = fitted
    layers = tuple(TargetLayerId(layer + offset) for layer in drafter.contract.target_layer_ids)
    shifted = replace(drafter.contract, target_layer_ids=layers)
    model = Eagle3Drafter(shifted)
    model.load_state_dict(drafter.model.state_dict())
    model.requires_grad_(False)
    assert acceptance_length(target, LoadedDrafter(model, shifted, 7), prompts) < 1.6


def test_the_rows_own_token_in_place_of_the_next_costs_acceptance(fitted, monkeypatch: pytest.MonkeyPatch) -> None:
    feed_the_rows_own_token(monkeypatch)
    assert acceptance_length(*fitted) < 1.4


@pytest.mark.parametrize("switch", ["norm_before_residual", "norm_output"])
def test_a_flipped_switch_changes_the_drafts(fitted, switch: str) -> None:
    """P39; `norm_output` leaves the first draft alone, which is all that this head has learned."""
    target, drafter, prompts = fitted
    settings = drafter.contract.eagle3
    assert settings is not None
    flipped = replace(settings, **{switch: not getattr(settings, switch)})
    model = Eagle3Drafter(replace(drafter.contract, eagle3=flipped))
    model.load_state_dict(drafter.model.state_dict())
    model.requires_grad_(False)
    wrong = LoadedDrafter(model, model.contract, 7)
    texts = [Engine(target, each).generate(prompts, LONG) for each in (drafter, wrong)]
    right_ids, wrong_ids = ([[r.proposed_ids for r in result.trace.records] for result in text] for text in texts)
    assert right_ids != wrong_ids
