"""EAGLE-3 served step by step drafts what the whole text says it should, whatever was accepted and refused before."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.caches import bystanders, fixed_tables, make_cache, store, stored
from tests.tiny import loaded, tiny_prompts
from torch import Tensor

from paceline.checkpoint.contract import Eagle3Settings
from paceline.engine import sequential_proposal
from paceline.engine.attends import AttentionChoice
from paceline.engine.direct_drafts import CausalWindows, direct_sequential_drafts
from paceline.engine.draft_stopper import DraftPlan
from paceline.engine.engine import Engine, EngineSettings
from paceline.engine.prefill import PrefillChunk, prefill_chunk
from paceline.engine.proposal import Rows
from paceline.engine.request import SamplingParameters
from paceline.engine.sequential_proposal import SequentialProposer, spare_positions
from paceline.engine.slots import SamplingFlags, SlotState
from paceline.engine.step import HostStep, StepBatch, decode_step
from paceline.models.attends import WholeSequence
from paceline.models.drafters.eagle3 import Eagle3Drafter
from paceline.models.drafters.proposal import Proposal
from paceline.models.loading import LoadedDrafter, LoadedTarget
from paceline.models.taps import TapCollector

CPU = torch.device("cpu")
ROW_INVARIANT = AttentionChoice(is_batched=False, is_row_invariant=True)
EXACT = AttentionChoice(is_batched=False, is_row_invariant=False)
BATCHED = AttentionChoice(is_batched=True, is_row_invariant=False)
PAGED = AttentionChoice(is_batched=True, is_row_invariant=False, is_paged=True)
each_choice = pytest.mark.parametrize(
    "choice", [BATCHED, PAGED, EXACT, ROW_INVARIANT], ids=["batched", "paged", "exact", "row-invariant"]
)
DEEP: dict[str, Any] = {"num_layers": 2, "layer_windows": (5, None)}
SWITCHED: dict[str, Any] = {"eagle3": Eagle3Settings(False, True, True, False), "has_qk_norm": True}


def eagle3(**changes: Any) -> tuple[LoadedTarget, LoadedDrafter]:
    return loaded(drafter_family="eagle3", **changes)


class Bench:
    """Target, EAGLE-3 drafter, caches and state of three slots, without an engine."""

    def __init__(
        self,
        models: tuple[LoadedTarget, LoadedDrafter],
        choice: AttentionChoice = ROW_INVARIANT,
        *,
        num_draft_tokens: int = 3,
        method: str = "greedy",
        sampling: SamplingParameters | None = None,
    ) -> None:
        self.target, drafter = models
        assert isinstance(drafter.model, Eagle3Drafter)
        self.drafter, self.choice, self.sampling = drafter.model, choice, sampling or SamplingParameters()
        self.flags = SamplingFlags.of([self.sampling])
        tables = fixed_tables(3, 64 + spare_positions(num_draft_tokens))
        contract, own = self.target.contract, drafter.contract
        self.cache, self.own_cache = (
            make_cache(tables, num_layers=each.num_layers, num_kv_heads=each.num_kv_heads, head_size=each.head_size)
            for each in (contract, own)
        )
        self.proposer = SequentialProposer(
            self.target.model, self.drafter, self.own_cache, choice, num_draft_tokens=num_draft_tokens, method=method
        )
        self.state = SlotState(
            3, num_draft_tokens=num_draft_tokens, num_candidates=self.proposer.num_candidates, device=CPU
        )

    def prefill(self, slot: int, prompt: Sequence[int], chunk_size: int = 512, seed: int = 0) -> int:
        self.state.admit(slot, self.sampling, seed=seed)
        first = None
        for start in range(0, len(prompt), chunk_size):
            end = min(start + chunk_size, len(prompt))
            next_id = prompt[end] if end < len(prompt) else None
            chunk = PrefillChunk(slot, prompt[start:end], start, next_id, self.flags, self.plan(1))
            output = prefill_chunk(self.target.model, self.proposer, self.cache, self.state, self.choice, chunk)
        assert output is not None
        (first,) = output.to_host()
        return first.token_ids[0]

    def plan(self, num_requests: int) -> DraftPlan:
        return DraftPlan((self.proposer.num_draft_tokens,) * num_requests)

    def step(self, slots: list[int], num_rows: int, *, proposes: bool = True) -> list[HostStep]:
        starts = self.state.lengths[slots].tolist()
        rows = Rows(slots, torch.tensor(slots), starts, torch.tensor(starts), num_rows)
        batch = StepBatch(rows, self.flags, writes_context=True, plan=self.plan(len(slots)) if proposes else None)
        output = decode_step(self.target.model, self.proposer, self.cache, self.state, self.choice, batch)
        return output.to_host()

    def offer(self, slot: int, drafts: list[int]) -> None:
        self.state.store_proposal(torch.tensor([slot]), Proposal(torch.tensor([drafts])))

    def waiting(self, slot: int) -> list[int]:
        drafts: list[int] = self.state.draft_ids[slot].tolist()
        return drafts

    def direct(self, text: Sequence[int], num_drafts: int | None = None) -> list[int]:
        """Drafts behind the last token of a text, in one go."""
        ids = torch.tensor([text])
        taps = TapCollector.of_layers(self.drafter.contract.target_layer_ids)
        self.target.model(ids, torch.arange(len(text))[None], WholeSequence(), taps)
        features = self.drafter.features(taps.collected())
        count = num_drafts or self.proposer.num_draft_tokens
        return direct_sequential_drafts(self.target.model, self.drafter, ids, features, len(text) - 1, count)


@torch.inference_mode()
def plain_text(models: tuple[LoadedTarget, LoadedDrafter], prompt: Sequence[int], num_tokens: int) -> list[int]:
    bench = Bench(models)
    text = [bench.prefill(0, prompt)]
    while len(text) < num_tokens:
        text += bench.step([0], 1, proposes=False)[0].token_ids
    return text


def flawed(right: list[int], num_right: int) -> list[int]:
    """Drafts of which the first `num_right` are right and the next is not."""
    return [
        *right[:num_right],
        *[(token + 1) % 512 for token in right[num_right : num_right + 1]],
        *right[num_right + 1 :],
    ]


# --- incremental equals one-shot ---


@pytest.mark.parametrize("changes", [{}, DEEP, SWITCHED], ids=["plain", "deep", "switched"])
@pytest.mark.parametrize("seed", [0, 1])
@torch.inference_mode()
def test_drafts_after_random_acceptance_equal_those_of_the_whole_text(changes: dict[str, Any], seed: int) -> None:
    models, chance = eagle3(**changes), random.Random(seed)
    prompt = tiny_prompts([7], seed)[0]
    text = prompt + plain_text(models, prompt, 34)
    bench = Bench(models)
    bench.prefill(1, prompt)
    assert bench.waiting(1) == bench.direct(text[:8])
    length, counts = 7, set()
    while length < 34:
        num_rows = chance.choice([1, 2, 4, 4])
        num_right = chance.randrange(num_rows)
        bench.offer(1, flawed(text[length + 1 : length + 4], num_right))
        proposes = chance.random() < 0.7
        (step,) = bench.step([1], num_rows, proposes=proposes)
        assert step.num_accepted == num_right
        length += num_right + 1
        counts.add(num_right)
        assert int(bench.state.lengths[1]) == length
        if proposes:
            assert bench.waiting(1) == bench.direct(text[: length + 1])
    assert {0, 3} < counts


@torch.inference_mode()
def test_keys_and_values_hold_the_same_bits_as_after_one_pass_over_the_text() -> None:
    """Refused rows and the drafter's own rows leave no trace below the committed length."""
    models = eagle3(**DEEP)
    prompt = tiny_prompts([9])[0]
    text = prompt + plain_text(models, prompt, 20)
    bench = Bench(models)
    bench.prefill(2, prompt)
    for num_right in (3, 0, 1, 2, 0):
        length = int(bench.state.lengths[2])
        bench.offer(2, flawed(text[length + 1 : length + 4], num_right))
        bench.step([2], 4)
    length = int(bench.state.lengths[2])
    assert length == 9 + 5 + 6
    fresh = Bench(models)
    assert fresh.prefill(2, text[:length]) == text[length]
    for cache in ("cache", "own_cache"):
        kept, expected = (stored(getattr(each, cache), 2, 0, length) for each in (bench, fresh))
        assert torch.equal(kept, expected), cache
    assert bench.waiting(2) == fresh.waiting(2)


@pytest.mark.parametrize("fault", ["no anchor", "the token of the row itself", "the old state", "no settling"])
@torch.inference_mode()
def test_planted_faults_show(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    models = eagle3()
    prompt = tiny_prompts([9])[0]
    text = prompt + plain_text(models, prompt, 16)
    settle = SequentialProposer.settle

    def wrong(self: SequentialProposer, rows: Rows, ids: Tensor, ends_B: Tensor, next_ids_B: Tensor) -> None:
        if fault == "no anchor":
            next_ids_B = torch.zeros_like(next_ids_B)
        elif fault == "the token of the row itself":
            ids, next_ids_B = ids.roll(1, dims=1), ids[:, -1]
        elif fault == "the old state":
            ends_B = torch.maximum(rows.starts_B + 1, ends_B - 1)
        elif rows.num_rows == 1:  # a step without drafts
            self._features_BTD = None
            return
        settle(self, rows, ids, ends_B, next_ids_B)

    monkeypatch.setattr(SequentialProposer, "settle", wrong)
    bench = Bench(models)
    bench.prefill(0, prompt)
    bench.step([0], 1, proposes=False)
    bench.offer(0, text[11:14])
    bench.step([0], 4)
    assert bench.waiting(0) != bench.direct(text[:15])


# --- prompts in chunks ---


def first_block(chunk_size: int, prompt: list[int]) -> tuple[list[int], Tensor, Tensor]:
    """First drafts, the drafter's keys and values, and the logits behind the first draft."""
    bench = Bench(eagle3(**DEEP))
    bench.prefill(0, prompt, chunk_size)
    settled = bench.proposer._settled
    assert settled is not None
    logits = bench.drafter.logits(settled.out_B1D, bench.target.model)
    return bench.waiting(0), stored(bench.own_cache, 0, 0, len(prompt)), logits


@pytest.mark.parametrize("chunk_size", [1, 7, 13, 25, 26])
@torch.inference_mode()
def test_chunks_of_any_size_give_the_same_first_block(chunk_size: int) -> None:
    """B72."""
    prompt = tiny_prompts([26])[0]
    (drafts, planes, logits), (expected, whole, first) = first_block(chunk_size, prompt), first_block(512, prompt)
    assert drafts == expected
    assert torch.equal(planes, whole)
    assert torch.equal(logits, first)


@pytest.mark.parametrize("chunk_size", [1, 7, 13, 25])
@torch.inference_mode()
def test_the_targets_guess_at_a_chunks_edge_is_not_the_next_prompt_token(
    chunk_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B72 planted: the same comparison as above notices."""
    prompt = tiny_prompts([26])[0]
    _, whole, first = first_block(512, prompt)
    settle = SequentialProposer.settle

    def guess(self: SequentialProposer, rows: Rows, ids: Tensor, ends_B: Tensor, next_ids_B: Tensor) -> None:
        if (end := int(ends_B)) < len(prompt):
            hidden = self._target(torch.tensor([prompt[:end]]), torch.arange(end)[None], WholeSequence())
            next_ids_B = self._target.logits(hidden[:, -1]).argmax(-1)
        settle(self, rows, ids, ends_B, next_ids_B)

    monkeypatch.setattr(SequentialProposer, "settle", guess)
    _, planes, logits = first_block(chunk_size, prompt)
    assert not torch.equal(planes, whole)
    assert (logits - first).abs().max() > 1e-3


@torch.inference_mode()
def test_the_engine_hands_over_the_next_prompt_token() -> None:
    models, prompt, found = eagle3(), tiny_prompts([20])[0], []
    for size in (1, 6, 19, 512):
        engine = Engine(*models, EngineSettings(max_num_seqs=1, prefill_chunk_size=size))
        name = engine.add_request(prompt, SamplingParameters(max_tokens=8, ignore_eos=True))
        while not engine._loop.scheduler.running or not engine._loop.scheduler.running[0].is_decoding:
            engine.step()
        assert engine._loop.parts.proposer is not None and engine._loop.parts.proposer.cache is not None
        found.append(
            (stored(engine._loop.parts.proposer.cache, 0, 0, 20), engine._loop.parts.state.draft_ids[0].tolist())
        )
        engine.abort(name)
    assert all(torch.equal(planes, found[0][0]) and drafts == found[0][1] for planes, drafts in found)


# --- several requests ---


@each_choice
@pytest.mark.parametrize("changes", [{}, DEEP], ids=["plain", "deep"])
@torch.inference_mode()
def test_ragged_batches_draft_what_single_requests_do(choice: AttentionChoice, changes: dict[str, Any]) -> None:
    mode = "row_invariant" if choice.is_row_invariant else "plain"
    models = eagle3(linear_mode=mode, **changes)
    prompts = tiny_prompts([9, 14, 4])
    texts = [prompt + plain_text(models, prompt, 24) for prompt in prompts]
    bench = Bench(models, choice)
    for slot, prompt in enumerate(prompts):
        bench.prefill(slot, prompt)
    for index in range(4):
        for slot in range(3):
            length = int(bench.state.lengths[slot])
            bench.offer(slot, flawed(texts[slot][length + 1 : length + 4], (index + 2 * slot) % 4))
        slots = [[0, 1, 2], [2, 0], [1, 2, 0], [1, 0]][index]
        before = bystanders(bench.own_cache, slots)
        bench.step(slots, 4)
        for slot in slots:
            length = int(bench.state.lengths[slot])
            assert bench.waiting(slot) == bench.direct(texts[slot][: length + 1])
        assert torch.equal(bystanders(bench.own_cache, slots), before)


@each_choice
@torch.inference_mode()
def test_refused_rows_may_hold_anything(choice: AttentionChoice) -> None:
    """A draft whose hidden state overflowed: its row is refused, and NaN times zero is NaN."""
    models = eagle3(linear_mode="plain", **DEEP)
    text = tiny_prompts([12])[0]
    found = []
    for junk in (1.0, torch.nan):
        bench = Bench(models, choice)
        bench.prefill(1, text[:8])
        rows = Rows([1], torch.tensor([1]), [8], torch.tensor([8]), 4)
        taps = [torch.randn(1, 4, 64, generator=torch.Generator().manual_seed(t)) for t in range(3)]
        for tap in taps:
            tap[:, 2:] = junk
        bench.state.restore(1, length=10, anchor=text[10], step=1)
        bench.proposer.write_context(rows, taps, torch.arange(8, 12)[None])
        bench.proposer.settle(rows, torch.tensor([text[8:12]]), torch.tensor([10]), torch.tensor([text[10]]))
        found.append(bench.proposer.propose(rows, bench.state, all_greedy=True).ids_BK.tolist())
        assert bench.own_cache.planes.isfinite().all()
    assert found[0] == found[1]


@each_choice
@torch.inference_mode()
def test_keys_below_the_context_start_do_not_exist(choice: AttentionChoice, monkeypatch: pytest.MonkeyPatch) -> None:
    """T7.7: in the pass over the settled rows and in those behind it; and both faults planted."""
    models, text = eagle3(linear_mode="plain", **DEEP), tiny_prompts([12])[0]
    taps = [torch.randn(1, 4, 64, generator=torch.Generator().manual_seed(t)) for t in range(3)]

    def drafts(junk: float) -> list[list[int]]:
        bench = Bench(models, choice)
        bench.prefill(1, text[:8])
        store(bench.own_cache, 1, torch.full_like(stored(bench.own_cache, 1, 0, 5), junk))
        starts_B = torch.tensor([8])
        rows = Rows([1], torch.tensor([1]), [8], starts_B, 4, context_starts=[5], context_starts_B=torch.tensor([5]))
        bench.state.restore(1, length=10, anchor=text[10], step=1)
        bench.proposer.write_context(rows, taps, torch.arange(8, 12)[None])
        bench.proposer.settle(rows, torch.tensor([text[8:12]]), torch.tensor([10]), torch.tensor([text[10]]))
        return bench.proposer.propose(rows, bench.state, all_greedy=True).ids_BK.tolist()

    honest = drafts(0.0)
    assert drafts(torch.nan) == honest
    attend = sequential_proposal.write_then_attend
    for num_rows in (4, 1):  # of the pass that forgets

        def forgetful(*arguments: Any, num_rows_hit: int = num_rows, **options: Any) -> Any:
            if options["num_rows"] == num_rows_hit:
                options |= {"context_starts": None, "context_starts_B": None}
            return attend(*arguments, **options)

        with monkeypatch.context() as patch:
            patch.setattr(sequential_proposal, "write_then_attend", forgetful)
            assert drafts(torch.nan) != honest


# --- how many, how far, how drawn ---


@torch.inference_mode()
def test_fewer_drafts_are_the_first_ones_and_take_fewer_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    models = eagle3(**DEEP)
    text = tiny_prompts([9])[0]
    bench = Bench(models)
    text.append(bench.prefill(0, text))
    settled = bench.proposer._settled
    assert settled is not None
    num_passes, run = [], SequentialProposer._run
    monkeypatch.setattr(SequentialProposer, "_run", lambda *args: num_passes.append(1) or run(*args))
    for count in (1, 2, 3):
        num_passes.clear()
        drafts = bench.proposer.propose(settled.rows, bench.state, all_greedy=True, num_drafts=count).ids_BK
        assert drafts[0].tolist() == bench.direct(text)[:count]
        assert len(num_passes) == count - 1


@pytest.mark.parametrize("num_draft_tokens", [1, 2, 11])
@torch.inference_mode()
def test_any_number_of_drafts(num_draft_tokens: int) -> None:
    models = eagle3(**SWITCHED)
    prompt = tiny_prompts([9])[0]
    bench = Bench(models, num_draft_tokens=num_draft_tokens)
    first = bench.prefill(0, prompt)
    assert bench.waiting(0) == bench.direct([*prompt, first])
    assert len(bench.waiting(0)) == num_draft_tokens


@torch.inference_mode()
def test_beyond_the_drafters_positions_there_are_no_drafts() -> None:
    for limit, has_drafts in ((12, False), (13, True)):  # the engine's limit: anchor at 9, drafts at 10..12
        models = eagle3(max_position_embeddings=limit)
        bench = Bench(models)
        prompt = tiny_prompts([9])[0]
        text = [*prompt, bench.prefill(0, prompt)]
        assert bench.waiting(0) == (bench.direct(text) if has_drafts else [-1] * 3)


@torch.inference_mode()
def test_the_reported_distribution_is_the_one_drawn_from() -> None:
    """q of draft k is conditioned on the drafts before it, at the request's temperature, over the best 32."""
    sampling = SamplingParameters(temperature=0.7, seed=4)
    models = eagle3(draft_vocab_size=100, has_own_head=True)
    bench = Bench(models, method="probabilistic", sampling=sampling)
    assert (bench.proposer.name, bench.proposer.num_candidates) == ("eagle3/probabilistic", 32)
    prompt = tiny_prompts([9])[0]
    text = [*prompt, bench.prefill(0, prompt)]
    drafts, kept = bench.waiting(0), bench.state.proposal(torch.tensor([0]), 3, with_q=True)
    assert kept.candidate_ids_BKC is not None and kept.log_q_BKC is not None
    assert bench.drafter.vocabulary.target_ids_V is not None

    ids = torch.tensor([text])
    taps = TapCollector.of_layers(bench.drafter.contract.target_layer_ids)
    bench.target.model(ids, torch.arange(10)[None], WholeSequence(), taps)
    hidden = bench.drafter.features(taps.collected())[:, :9]
    following = ids[:, 1:]
    for k in range(3):
        embeddings = bench.drafter.embed(following, bench.target.model)
        positions = torch.arange(following.shape[1])[None]
        out, recycled = bench.drafter(embeddings, hidden, positions, CausalWindows((None,)))
        best = (bench.drafter.logits(out[0, -1], bench.target.model) / 0.7).topk(32)
        expected = dict(
            zip(bench.drafter.vocabulary.target_ids_V[best.indices].tolist(), best.values.log_softmax(-1), strict=True)
        )
        reported = dict(zip(kept.candidate_ids_BKC[0, k].tolist(), kept.log_q_BKC[0, k], strict=True))
        assert set(reported) == set(expected)
        assert drafts[k] in reported
        for token, log_q in reported.items():
            assert float(log_q) == pytest.approx(float(expected[token]), abs=1e-3)
        following = torch.cat((following, torch.tensor([[drafts[k]]])), dim=1)
        hidden = torch.cat((hidden, recycled[:, -1:]), dim=1)


@torch.inference_mode()
def test_draws_depend_on_the_seed_and_not_on_the_slot() -> None:
    models, prompt, blocks = eagle3(), tiny_prompts([9])[0], []
    for slot, seed in ((0, 0), (2, 0), (1, 1)):
        bench = Bench(models, method="probabilistic", sampling=SamplingParameters(temperature=5.0), num_draft_tokens=6)
        bench.prefill(slot, prompt, seed=seed)
        blocks.append(bench.waiting(slot))
    assert blocks[0] == blocks[1] != blocks[2]


def test_greedy_proposals_store_no_candidates() -> None:
    bench = Bench(eagle3())
    assert (bench.proposer.name, bench.proposer.num_candidates) == ("eagle3/greedy", 0)
    assert bench.proposer.cache is bench.own_cache


@torch.inference_mode()
def test_halves_out_of_order_are_a_bug_of_ours() -> None:
    bench = Bench(eagle3())
    rows = Rows([0], torch.tensor([0]), [0], torch.tensor([0]), 1)
    one = torch.tensor([1])
    with pytest.raises(AssertionError, match="settle follows"):
        bench.proposer.settle(rows, one[None], one, one)
    bench.prefill(0, [5, 6])
    with pytest.raises(AssertionError, match="propose follows"):
        bench.proposer.propose(replace(rows, slots=[1]), bench.state, all_greedy=True)
