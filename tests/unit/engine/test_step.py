"""One step, index by index: what is run, kept, committed and readable afterwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.caches import bystanders, fixed_tables, make_cache, stored
from tests.tiny import loaded, tiny_prompts

from paceline.checkpoint.contract import DrafterFamily
from paceline.engine import step as step_module
from paceline.engine.attends import AttentionChoice, attend_block
from paceline.engine.draft_stopper import DraftPlan, DraftStopper
from paceline.engine.prefill import PrefillChunk, prefill_chunk
from paceline.engine.proposal import BlockProposer, Rows
from paceline.engine.request import SamplingParameters
from paceline.engine.slots import SamplingFlags, SlotState
from paceline.engine.step import HostStep, StepBatch, StepOutput, decode_step
from paceline.models.drafters.proposal import Proposal
from paceline.models.loading import LoadedDrafter, LoadedTarget
from paceline.ops.native.rows import can_run

CPU = torch.device("cpu")
ROW_INVARIANT = AttentionChoice(is_batched=False, is_row_invariant=True)
BATCHED = AttentionChoice(is_batched=True, is_row_invariant=False)
PAGED = AttentionChoice(is_batched=True, is_row_invariant=False, is_paged=True)
NATIVE = AttentionChoice(is_batched=False, is_row_invariant=False, is_native=True)
GREEDY = SamplingFlags.of([SamplingParameters()])


class Bench:
    """Target, drafter, caches and state of three slots, without an engine."""

    def __init__(self, target: LoadedTarget, drafter: LoadedDrafter, choice: AttentionChoice = ROW_INVARIANT) -> None:
        self.target, self.choice = target, choice
        tables = fixed_tables(3, 64)
        contract, own = target.contract, drafter.contract
        self.cache, context = (
            make_cache(
                tables,
                num_layers=each.num_layers,
                num_kv_heads=each.num_kv_heads,
                head_size=each.head_size,
                dtype=target.model.norm.weight.dtype,
            )
            for each in (contract, own)
        )
        self.proposer = BlockProposer(target.model, drafter.model, context, choice, num_draft_tokens=3, method="greedy")
        self.context = context
        self.state = SlotState(3, num_draft_tokens=3, num_candidates=0, device=CPU)

    def prefill(self, slot: int, prompt: list[int]) -> int:
        self.state.admit(slot, SamplingParameters(), seed=slot)
        chunk = PrefillChunk(slot, prompt, 0, None, GREEDY, self.plan(1))
        output = prefill_chunk(self.target.model, self.proposer, self.cache, self.state, self.choice, chunk)
        assert output is not None
        (first,) = output.to_host()
        (token,) = first.token_ids
        return token

    def plan(self, num_requests: int) -> DraftPlan:
        return DraftPlan((self.proposer.num_draft_tokens,) * num_requests)

    def step(self, slots: list[int], num_rows: int, *, proposes: bool = True) -> list[HostStep]:
        starts = self.state.lengths[slots].tolist()
        rows = Rows(slots, torch.tensor(slots), starts, torch.tensor(starts), num_rows)
        batch = StepBatch(rows, GREEDY, writes_context=True, plan=self.plan(len(slots)) if proposes else None)
        output = decode_step(self.target.model, self.proposer, self.cache, self.state, self.choice, batch)
        return output.to_host()

    def offer(self, slot: int, drafts: list[int]) -> None:
        self.state.store_proposal(torch.tensor([slot]), Proposal(torch.tensor([drafts])))


@torch.inference_mode()
def plain_text(prompt: list[int], num_tokens: int) -> list[int]:
    bench = Bench(*loaded())
    text = [bench.prefill(0, prompt)]
    while len(text) < num_tokens:
        text += bench.step([0], 1)[0].token_ids
    return text


@torch.inference_mode()
def test_every_count_of_accepted_drafts_commits_exactly_the_kept_rows() -> None:
    prompt = tiny_prompts([9])[0]
    text = plain_text(prompt, 12)
    for num_right in range(4):
        bench = Bench(*loaded())
        assert bench.prefill(1, prompt) == text[0]
        drafts = text[1:4]
        if num_right < 3:
            drafts[num_right] = (drafts[num_right] + 1) % 512
        bench.offer(1, drafts)
        (step,) = bench.step([1], 4)
        assert (step.num_accepted, step.token_ids) == (num_right, tuple(text[1 : num_right + 2]))
        assert step.draft_ids == tuple(drafts)
        assert bench.state.lengths[1] == 9 + num_right + 1
        assert bench.state.anchors[1] == text[num_right + 1]
        assert bench.state.steps[1] == 1
        # What follows is plain decoding's text: the refused rows left no trace.
        follows = [token for _ in range(4) for token in bench.step([1], 1, proposes=False)[0].token_ids]
        assert follows == text[num_right + 2 : num_right + 6]


@pytest.mark.parametrize(
    "choice", [ROW_INVARIANT, BATCHED, PAGED, AttentionChoice(is_batched=False, is_row_invariant=False), NATIVE]
)
@torch.inference_mode()
def test_rows_of_a_request_that_has_ended_write_to_block_0_alone(choice: AttentionChoice) -> None:
    """I9, G3: the device may see an end before the host does; the step that is launched meanwhile must not be felt."""
    if choice.is_native and not can_run(torch.empty(1, dtype=torch.bfloat16)):
        pytest.skip("no native operations on this machine")
    prompts = tiny_prompts([9, 12, 6])
    arithmetic: dict[str, Any] = {"linear_mode": "native", "dtype": torch.bfloat16} if choice.is_native else {}
    alone = Bench(*loaded(**arithmetic), choice)
    bench = Bench(*loaded(**arithmetic), choice)
    for slot, prompt in enumerate(prompts):
        bench.prefill(slot, prompt)
        alone.prefill(slot, prompt)
    bench.state.is_alive[1] = 0
    before = [state.clone() for state in (bench.state.lengths, bench.state.anchors, bench.state.draft_ids)]
    first, dead, last = bench.step([0, 1, 2], 4)
    assert dead.position == -1 and (first.position, last.position) == (9, 6)
    for state, old in zip((bench.state.lengths, bench.state.anchors, bench.state.draft_ids), before, strict=True):
        assert torch.equal(state[1], old[1])
    for cache in (bench.cache, bench.context):
        for layer in range(cache.planes.shape[0]):
            keys, values = cache.context(layer, 1, 64)
            length = 12
            assert not keys[:, :, length:].any() and not values[:, :, length:].any()
        assert not cache.planes[:, :, :, 0, 0].any(), "the row of zeros stays"
    others = alone.step([0, 2], 4)
    assert [one.token_ids for one in (first, last)] == [one.token_ids for one in others]


@torch.inference_mode()
def test_a_step_starts_where_the_device_stands_whatever_the_host_last_knew() -> None:
    prompt = tiny_prompts([9])[0]
    text = plain_text(prompt, 6)
    bench = Bench(*loaded())
    bench.prefill(0, prompt)
    for index, behind in enumerate((0, 1, 2, 3)):
        rows = Rows([0], torch.tensor([0]), [9 + index - behind + 8], torch.tensor([9 + index - behind]), 1)
        batch = StepBatch(rows, GREEDY, writes_context=True)
        (step,) = decode_step(
            bench.target.model, bench.proposer, bench.cache, bench.state, bench.choice, batch
        ).to_host()
        assert (step.position, step.token_ids) == (9 + index, (text[index + 1],))


@torch.inference_mode()
def test_both_caches_hold_the_same_bits_as_after_plain_decoding() -> None:
    prompt = tiny_prompts([9])[0]
    text = plain_text(prompt, 12)
    plain, blocks = Bench(*loaded()), Bench(*loaded())
    plain.prefill(2, prompt)
    for _ in range(6):
        plain.step([2], 1)
    blocks.prefill(2, prompt)
    emitted = 1
    for num_right in (3, 0, 1):
        drafts = text[emitted : emitted + 3]
        if num_right < 3:
            drafts[num_right] = (drafts[num_right] + 1) % 512
        blocks.offer(2, drafts)
        (step,) = blocks.step([2], 4)
        emitted += len(step.token_ids)
    length = int(blocks.state.lengths[2])
    assert length == 9 + 4 + 1 + 2
    length = min(length, int(plain.state.lengths[2]))
    assert length >= 15
    for cache in ("cache", "context"):
        kept, expected = (stored(getattr(bench, cache), 2, 0, length) for bench in (blocks, plain))
        assert torch.equal(kept, expected), cache


@pytest.mark.parametrize(
    ("family", "blocks", "lengths"),
    [
        ("dflash", [[5, 6, 7, 8], [7, 8, 9, 10]], [9, 11]),  # the anchor's row predicts nothing
        ("dspark", [[5, 6, 7], [7, 8, 9]], [8, 10]),  # every row predicts the position after its own
    ],
)
@torch.inference_mode()
def test_worked_positions(
    family: DrafterFamily, blocks: list[list[int]], lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt of 5 tokens, 3 drafts, the first of them accepted: which positions are drafted, read and kept.

    The published example also gives page slots. There are no pages here: a position is its own row of the slot.
    """
    prompt = tiny_prompts([5])[0]
    text = plain_text(prompt, 4)
    target, drafter = loaded(drafter_family=family)
    bench, plain = Bench(target, drafter), Bench(target, drafter)
    queries: list[list[int]] = []
    contexts: list[tuple[int, int]] = []
    verified: list[tuple[list[int], list[int]]] = []

    def noted(*arguments: Any, **options: Any) -> Any:
        (length,) = options["lengths_B"].tolist()
        contexts.append((length, length + options["num_rows"]))
        return attend_block(*arguments, **options)

    monkeypatch.setattr("paceline.engine.proposal.attend_block", noted)
    drafter.model.backbone.register_forward_pre_hook(lambda _m, inputs: queries.extend(inputs[1].tolist()))
    target.model.register_forward_pre_hook(
        lambda _m, inputs: verified.append((inputs[0][0].tolist(), inputs[1][0].tolist()))
    )
    assert bench.prefill(1, prompt) == text[0]
    drafts = [text[1], (text[2] + 1) % 512, text[3]]
    bench.offer(1, drafts)
    (step,) = bench.step([1], 4)
    assert step.num_accepted == 1 and bench.state.lengths[1] == 7
    next_drafts = bench.state.draft_ids[1].tolist()
    bench.step([1], 4, proposes=False)

    assert queries == blocks
    assert contexts == [(5, lengths[0]), (7, lengths[1])]
    # a block's drafts are judged at the positions that its predicting rows speak of
    assert verified[1:] == [([text[0], *drafts], [5, 6, 7, 8]), ([text[2], *next_drafts], [7, 8, 9, 10])]
    first, shift = drafter.contract.first_predicted_row, 0 if drafter.contract.layout == "fill_in" else 1
    for block, (_, positions) in zip(queries, verified[1:], strict=True):
        assert [position + shift for position in block[first:]] == positions[1:]

    # context rows 5 and 6 count, those of the two refused drafts do not: they are written again
    plain.prefill(1, prompt)
    for _ in range(2):
        plain.step([1], 1, proposes=False)
    assert plain.state.lengths[1] == 7
    assert torch.equal(stored(bench.context, 1, 0, 7), stored(plain.context, 1, 0, 7))


@torch.inference_mode()
def test_steps_without_drafts_keep_the_context_current() -> None:
    """Pausing must not cost acceptance later: the block drafted after a pause is the one drafted without it."""
    prompt = tiny_prompts([9])[0]
    paused, steady = Bench(*loaded()), Bench(*loaded())
    for bench in (paused, steady):
        bench.prefill(0, prompt)
    for index in range(4):
        paused.step([0], 1, proposes=index == 3)
        steady.step([0], 1)
    assert torch.equal(paused.state.draft_ids[0], steady.state.draft_ids[0])
    assert (paused.state.draft_ids[0] >= 0).all()


@torch.inference_mode()
def test_missing_drafts_are_never_accepted() -> None:
    prompt = tiny_prompts([9])[0]
    text = plain_text(prompt, 6)
    bench = Bench(*loaded())
    bench.prefill(0, prompt)
    bench.offer(0, [text[1], -1, text[3]])
    (step,) = bench.step([0], 4)
    assert (step.num_accepted, step.token_ids, step.draft_ids) == (1, tuple(text[1:3]), (text[1],))


@torch.inference_mode()
def test_a_batch_leaves_other_slots_and_their_order_alone() -> None:
    prompts = tiny_prompts([9, 14, 4])
    texts = [plain_text(prompt, 8) for prompt in prompts]
    bench = Bench(*loaded())
    for slot, prompt in enumerate(prompts):
        bench.prefill(slot, prompt)
    caches = bench.cache, bench.context
    before = [bystanders(cache, [0, 2]) for cache in caches]
    drafts = bench.state.draft_ids[1].clone()
    bench.offer(2, texts[2][1:4])
    steps = bench.step([2, 0], 4)
    assert steps[0].token_ids == tuple(texts[2][1:5])
    assert steps[1].token_ids[0] == texts[0][1]
    assert all(torch.equal(bystanders(cache, [0, 2]), old) for cache, old in zip(caches, before, strict=True))
    assert torch.equal(bench.state.draft_ids[1], drafts)


@torch.inference_mode()
def test_the_forms_that_gpus_use_do_the_same_as_the_exact_one() -> None:
    """Run here: same function, attention by tables or padded."""
    prompts = tiny_prompts([9, 14])
    outcomes = []
    for choice in (BATCHED, PAGED, AttentionChoice(is_batched=False, is_row_invariant=False)):
        bench = Bench(*loaded(linear_mode="plain"), choice)
        tokens = [[bench.prefill(slot, prompt)] for slot, prompt in enumerate(prompts)]
        drafts = []
        for _ in range(6):
            for slot, step in enumerate(bench.step([0, 1], 4)):
                tokens[slot] += step.token_ids
                drafts.append(bench.state.draft_ids[slot].tolist())
        outcomes.append((tokens, drafts))
    assert outcomes[0] == outcomes[1] == outcomes[2]


@torch.inference_mode()
def test_nothing_is_copied_to_the_device_once_a_step_has_queued_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a copy would wait for all that was queued before it, and the device then for the host."""
    bench = Bench(*loaded(), BATCHED)
    for slot, prompt in enumerate(tiny_prompts([9, 14])):
        bench.prefill(slot, prompt)
    starts = bench.state.lengths[[0, 1]].tolist()
    rows = Rows([0, 1], torch.tensor([0, 1]), starts, torch.tensor(starts), 4)
    plan = DraftPlan((3, 1), (0.5, 0.5, 0.5), is_adaptive=(True, False), teaches=(True, True))
    stopper = DraftStopper(3, 3, CPU)
    chances = Proposal(torch.ones(2, 3, dtype=torch.int64), confidence_BK=torch.full((2, 3), 0.6))
    stopper.hold_back(rows.slots_B, chances, plan.on(CPU))
    propose, run_rows, run = bench.proposer.propose, step_module.run_rows, []

    def refuse(*_args: Any, **_options: Any) -> None:
        raise AssertionError("a copy between host and device in the middle of a step")

    def run_and_refuse(*args: Any, **options: Any) -> torch.Tensor:
        run.append(args)
        hidden = run_rows(*args, **options)
        monkeypatch.setattr(torch, "tensor", refuse)
        for name in ("tolist", "item", "cpu"):
            monkeypatch.setattr(torch.Tensor, name, refuse)
        return hidden

    monkeypatch.setattr(step_module, "run_rows", run_and_refuse)
    monkeypatch.setattr(
        bench.proposer,
        "propose",
        lambda *args, **options: propose(*args, **options)._replace(confidence_BK=chances.confidence_BK),
    )
    batch = StepBatch(rows, GREEDY, writes_context=True, plan=plan, stopper=stopper)
    output = decode_step(bench.target.model, bench.proposer, bench.cache, bench.state, BATCHED, batch)
    monkeypatch.undo()
    assert run
    assert output.num_waiting_B.tolist() == [1, 1]


def test_output_reaches_the_host_in_one_piece() -> None:
    output = StepOutput.of(
        accepted_B=torch.tensor([1, 0]),
        tokens_BT=torch.tensor([[5, 6, -1], [-1, -1, -1]]),
        fault_B=torch.tensor([0, 2]),
        draft_ids_BK=torch.tensor([[5, 9], [3, -1]]),
        num_zero_q_B=torch.tensor([0, 2]),
        num_waiting_B=torch.tensor([3, 0]),
        positions_B=torch.tensor([17, -1]),
    )
    first, second = output.to_host()
    assert (first.num_waiting, second.num_waiting) == (3, 0)
    assert (first.position, second.position) == (17, -1)
    assert (first.token_ids, first.draft_ids, first.is_bad, first.num_zero_q) == ((5, 6), (5, 9), False, 0)
    assert (second.token_ids, second.draft_ids, second.fault, second.num_zero_q) == ((), (3,), 2, 2)
    assert first.logprobs == {}
