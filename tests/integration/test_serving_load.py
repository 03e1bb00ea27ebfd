"""Load: concurrency costs no acceptance, neighbours may draft what they like, and long service leaves nothing behind.

Reports B80, B81, B82 and B87 (`docs/reports.md`) on tiny models in row-invariant arithmetic, so that "the same" means
the same bits; `benchmarks/soak.py` does the like for as long as one wants, on real ones too.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tests.helped_drafts import help_drafts
from tests.tiny import loaded, tiny_prompts

from paceline.engine import loop as loop_module
from paceline.engine.attends import AttentionChoice
from paceline.engine.block_tables import BlockTables
from paceline.engine.draft_length import DraftLengthController
from paceline.engine.engine import Engine, EngineSettings
from paceline.engine.kind_costs import KindCosts
from paceline.engine.request import RequestResult, SamplingParameters
from paceline.engine.slots import SlotState
from paceline.engine.step_cost import StepCosts, StepCostTable
from paceline.trace.acceptance import AcceptanceSummary

FAMILIES = ("dflash", "dflash2", "dspark", "eagle3")
SIZES: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "num_kv_heads": 1,
    "vocab_size": 16,  # so few that a random drafter is right at times
}


def steps(result: RequestResult) -> list[tuple[tuple[int, ...], int, tuple[int, ...]]]:
    records = result.trace.records
    return [(record.proposed_ids, record.num_accepted, record.emitted_ids) for record in records]


def texts(results: Sequence[RequestResult]) -> list[tuple[int, ...]]:
    return [result.token_ids for result in results]


def made_up_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linear ones, so that a test doesn't depend on how busy its machine is."""
    costs = StepCosts(StepCostTable({(1, 1): 10.0, (1, 2): 10.5}), StepCostTable({(1, 1): 0.2, (1, 2): 0.4}))
    monkeypatch.setattr(loop_module, "measure_costs", lambda *_args, **_kwargs: costs)
    monkeypatch.setattr(KindCosts, "observe", lambda *_args: None)


@pytest.mark.parametrize("family", FAMILIES)
def test_b80_acceptance_does_not_depend_on_concurrency(family: str) -> None:
    target, drafter = loaded("qwen3", target_changes=SIZES, drafter_family=family)
    prompts = tiny_prompts([3 + 2 * index for index in range(16)], vocab_size=16)
    sampling = SamplingParameters(max_tokens=14, ignore_eos=True)
    plain = Engine(target, None, EngineSettings(max_num_seqs=16)).generate(prompts, sampling)
    scripts = {str(index): (*one.prompt_ids, *one.token_ids) for index, one in enumerate(plain)}
    found = {}
    for concurrency in (1, 2, 4, 8, 16):
        settings = EngineSettings(max_num_seqs=concurrency, draft_sample_method="greedy")
        engine = help_drafts(Engine(target, drafter, settings), scripts)
        for name, prompt in zip(scripts, prompts, strict=True):
            engine.add_request(prompt, sampling, name)
        while engine.has_unfinished():
            engine.step()
        found[concurrency] = [steps(engine.result(name)) for name in scripts]
        assert found[concurrency] == found[1], concurrency
    accepted = [step[1] for each in found[1] for step in each]
    assert set(accepted) >= set(range(8)), "not every number of drafts was kept once"


def run_with_neighbours(modes: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> list[RequestResult]:
    """Requests side by side, each in a mode; what adapts draws 1, 7, 0, 3, ... drafts in turn."""
    made_up_costs(monkeypatch)
    target, drafter = loaded("qwen3", target_changes=SIZES, drafter_family="dflash2")
    lengths = [1, 7, 0, 3, 6, 0, 2, 5] * 100
    monkeypatch.setattr(DraftLengthController, "next_num_drafts", lambda *_args: lengths.pop())
    prompts = tiny_prompts([5, 11, 7, 9], vocab_size=16)[: len(modes)]
    each = [SamplingParameters(max_tokens=60, ignore_eos=True, draft_length=mode) for mode in modes]
    return Engine(target, drafter, EngineSettings(max_num_seqs=4)).generate(prompts, each)


def test_b81_neighbours_with_other_draft_lengths_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A convolution that runs along the block must not see one that was cut for a neighbour."""
    (alone,) = run_with_neighbours(["fixed"], monkeypatch)
    first, second, *_ = run_with_neighbours(["fixed", "adaptive", "off", "adaptive"], monkeypatch)
    assert steps(first) == steps(alone)
    assert {len(record.proposed_ids) for record in first.trace.records} == {7}
    assert len({len(record.proposed_ids) for record in second.trace.records}) > 3, "the batch was not ragged"


def test_b81_blocks_cut_for_a_neighbour_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: every block of a batch has the length that was chosen for what adapts."""
    (alone,) = run_with_neighbours(["fixed"], monkeypatch)
    cuts = [8, 3, 5] * 200
    monkeypatch.setattr(SlotState, "block_rows", _cut_short(cuts, SlotState.block_rows))
    first, *_ = run_with_neighbours(["fixed", "adaptive"], monkeypatch)
    assert steps(first) != steps(alone)


def _cut_short(cuts: list[int], block_rows: Any) -> Any:
    def cut(self: SlotState, slots_B: torch.Tensor, **options: Any) -> Any:
        block = block_rows(self, slots_B, **options)
        ids_BQ = block.token_ids_BQ.clone()
        ids_BQ[:, cuts.pop() :] = 0  # no longer a mask: what a block that ends here would have behind it
        return block._replace(token_ids_BQ=ids_BQ)

    return cut


def test_b82_a_batch_drains_to_one_and_greedy_text_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    made_up_costs(monkeypatch)
    target, drafter = loaded("qwen3", target_changes=SIZES, drafter_family="dspark")
    prompts = tiny_prompts([2 + index % 23 for index in range(64)], vocab_size=16)
    for lengths in ([1 + index * index % 31 for index in range(64)], [7] * 64):
        each = [SamplingParameters(max_tokens=length, ignore_eos=True) for length in lengths]
        outcomes = []
        for mode in ("fixed", "adaptive"):
            engine = Engine(target, drafter, EngineSettings(max_num_seqs=16, draft_length=mode))
            outcomes.append(texts(engine.generate(prompts, each)))
            assert not engine.has_unfinished()
        assert outcomes[0] == outcomes[1]
        assert [len(text) for text in outcomes[0]] == lengths


def run_beside_waves(monkeypatch: pytest.MonkeyPatch, *, has_waves: bool, is_checked: bool = True) -> RequestResult:
    """A long request in the form of attention that GPUs use; in every other step, 7 short ones are run beside it."""
    paged = AttentionChoice(is_batched=True, is_row_invariant=False, is_paged=True)
    monkeypatch.setattr(AttentionChoice, "for_device", lambda *_args, **_options: paged)
    target, drafter = loaded("qwen3", target_changes=SIZES, drafter_family="dflash2")
    settings = EngineSettings(max_num_seqs=8, max_model_len=160, block_size=8, check_invariants=is_checked)
    engine = Engine(target, drafter, settings)
    lasting, *brief = tiny_prompts([5, 3, 9, 6, 12, 4, 8, 7], vocab_size=16)
    name = engine.add_request(lasting, SamplingParameters(max_tokens=130, ignore_eos=True))
    for step in itertools.count():
        if not engine.has_unfinished():
            return engine.result(name)
        if has_waves and step % 2 and name in engine.running_ids():
            for prompt in brief:
                engine.add_request(prompt, SamplingParameters(max_tokens=2, ignore_eos=True))
        engine.step()
    raise AssertionError("it counts on")


def test_batches_that_grow_and_shrink_leave_nothing_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables, lengths and positions of 8 requests and of 1 in turn, over many blocks: as if it had been 1 all along."""
    alone = run_beside_waves(monkeypatch, has_waves=False)
    found = run_beside_waves(monkeypatch, has_waves=True)
    assert steps(found) == steps(alone)
    assert found.finish_reason == "length" and len(found.trace.records) > 50


def test_a_table_that_stays_as_it_was_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: the device's tables are those of the first passes."""
    alone = run_beside_waves(monkeypatch, has_waves=False)
    flush, num_left = BlockTables.flush, iter(range(3))
    monkeypatch.setattr(BlockTables, "flush", lambda self: flush(self) if next(num_left, None) is not None else None)
    found = run_beside_waves(monkeypatch, has_waves=True, is_checked=False)
    assert steps(found) != steps(alone)


def test_b87_thousands_of_steps_leave_nothing_and_the_last_are_the_first() -> None:
    """Many short sampled requests, four at once; every round is the first one over again."""
    target, drafter = loaded("qwen3", target_changes=SIZES, drafter_family="dflash2")
    settings = EngineSettings(max_num_seqs=4, block_size=8, draft_sample_method="probabilistic")
    engine = Engine(target, drafter, settings)
    prompts = tiny_prompts([1 + index % 19 for index in range(24)], vocab_size=16)
    each = [
        SamplingParameters(max_tokens=1 + index % 11, ignore_eos=True, temperature=1.0, seed=index)
        for index in range(24)
    ]
    start = engine.stats()
    rounds: list[AcceptanceSummary] = []
    expected: list[Any] = []
    num_objects = 0
    while engine.stats().num_request_steps < 800:
        results = engine.generate(prompts, each)
        found = [steps(result) for result in results]
        rounds.append(AcceptanceSummary.from_steps(record for one in results for record in one.trace.records))
        expected = expected or found
        assert found == expected, f"round {len(rounds)}"
        stats = engine.stats()
        assert stats.num_free_blocks == start.num_free_blocks and stats.num_used_blocks == 0
        del results
        if len(rounds) == 3:
            num_objects = count_objects()
    assert rounds[-1] == rounds[0]
    assert count_objects() - num_objects < 100, "objects are left behind"


def count_objects() -> int:
    gc.collect()
    return len(gc.get_objects())
