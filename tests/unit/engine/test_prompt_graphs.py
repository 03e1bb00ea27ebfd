"""Recorded passes of prompts give what unrecorded ones do, whoever pads them."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tests.tiny import loaded, tiny_prompts
from tests.unit.engine.step_benches import KINDS, Kind, StepBench
from tests.unit.engine.step_calls import recorded, refusals, take_kernels
from tests.unit.ops.conftest import let_the_interpreter_count

from paceline.engine import loop as loop_module
from paceline.engine import prompt_graphs
from paceline.engine.attends import AttentionChoice
from paceline.engine.engine import Engine, EngineSettings
from paceline.engine.prefill import PrefillChunk, prompt_numbers, run_prompts
from paceline.engine.recordings import Repeated
from paceline.engine.request import RequestResult, SamplingParameters
from paceline.engine.sampling_flags import SamplingFlags
from paceline.engine.slots import SlotState
from paceline.engine.step import StepOutput

GREEDY = SamplingParameters(max_tokens=9, ignore_eos=True)
SAMPLED = SamplingParameters(max_tokens=9, ignore_eos=True, temperature=0.9, top_k=30, seed=5)
PROMPTS = tiny_prompts([9, 30, 4, 17, 12, 40, 5])


@pytest.fixture(autouse=True)
def _recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    paged = AttentionChoice(is_batched=True, is_row_invariant=False, is_paged=True)
    monkeypatch.setattr(AttentionChoice, "for_device", classmethod(lambda *_args, **_options: paged))
    monkeypatch.setattr(loop_module, "make_recorder", lambda *_args, **_options: Repeated)


def serve(
    family: str, sampling: SamplingParameters, *, record_prompts: bool, max_num_seqs: int = 3
) -> tuple[list[RequestResult], Engine]:
    target, drafter = loaded(drafter_family="dflash" if family == "plain" else family)
    settings = EngineSettings(
        max_num_seqs=max_num_seqs, block_size=16, run_ahead=True, check_invariants=True, record_prompts=record_prompts
    )
    engine = Engine(target, None if family == "plain" else drafter, settings)
    return engine.generate(PROMPTS, sampling), engine


def passes(engine: Engine) -> int:
    return len(engine._loop._prompt_runner._works)


@pytest.mark.parametrize("family", ["plain", "dflash", "dflash2", "eagle3"])
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_recorded_passes_give_the_same_first_tokens_and_drafts(family: str, sampling: SamplingParameters) -> None:
    expected, unrecorded = serve(family, sampling, record_prompts=False)
    found, engine = serve(family, sampling, record_prompts=True)
    assert [result.token_ids for result in found] == [result.token_ids for result in expected]
    assert [result.trace.records for result in found] != [] and passes(unrecorded) == 0
    # What goes token by token is left as it is.
    assert (passes(engine) > 0) == (family != "eagle3")


def test_a_lone_prompt_is_recorded_too() -> None:
    _, engine = serve("dflash", GREEDY, record_prompts=True, max_num_seqs=1)
    assert {(key.num_requests, key.num_rows) for key in engine._loop._prompt_runner._works} == {
        (1, 16),
        (1, 32),
        (1, 64),
    }


def test_long_passes_are_left_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_graphs, "_MOST_TOKENS", 32)
    _, engine = serve("plain", GREEDY, record_prompts=True, max_num_seqs=1)
    assert {key.num_rows for key in engine._loop._prompt_runner._works} == {16, 32}


def test_passes_are_no_larger_than_what_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four prompts of 32 rows would be one pass; half of them are recorded at a time."""
    prompts = tiny_prompts([20, 21, 22, 23])
    target, _ = loaded()
    found = []
    for most, sizes in ((4096, {(4, 32)}), (64, {(2, 32)})):
        monkeypatch.setattr(prompt_graphs, "_MOST_TOKENS", most)
        engine = Engine(target, None, EngineSettings(max_num_seqs=4, block_size=16, record_prompts=True))
        found.append([result.token_ids for result in engine.generate(prompts, GREEDY)])
        assert {(key.num_requests, key.num_rows) for key in engine._loop._prompt_runner._works} == sizes
    assert found[0] == found[1]


def test_numbers_of_a_larger_pass_do_not_stay() -> None:
    flags = SamplingFlags.of([])
    chunks = [PrefillChunk(slot, (7, 8, 9), 0, None, flags) for slot in (2, 5)]
    assert prompt_numbers(chunks, 2, 4, 9).tolist() == [[2, 0, 0, 3, 7, 8, 9, 0], [5, 0, 0, 3, 7, 8, 9, 0]]
    assert prompt_numbers(chunks[:1], 2, 4, 9).tolist() == [[2, 0, 0, 3, 7, 8, 9, 0], [9, 0, 0, 1, 0, 0, 0, 0]]


def test_a_chunk_that_needs_the_host_is_no_part_of_a_pass() -> None:
    flags = SamplingFlags.of([])
    with pytest.raises(AssertionError):
        prompt_numbers([PrefillChunk(0, (7,), 0, 8, flags)], 1, 1, 9)
    masked = PrefillChunk(0, (7,), 0, None, flags, grammar_mask_BLW=torch.zeros(1, 1, 1, dtype=torch.int32))
    with pytest.raises(AssertionError):
        prompt_numbers([masked], 1, 1, 9)


def test_passes_are_recorded_where_steps_are_unless_it_is_refused() -> None:
    target, _ = loaded()
    for wanted, is_recorded in ((None, True), (True, True), (False, False)):
        engine = Engine(target, None, EngineSettings(max_num_seqs=1, block_size=16, record_prompts=wanted))
        assert engine._loop._prompt_runner.is_recording is is_recorded
    steps_alone = Engine(target, None, EngineSettings(max_num_seqs=1, block_size=16))
    steps_alone.generate([PROMPTS[0]] * 2, GREEDY)
    assert steps_alone.stats().num_replayed_prompts == 1


def test_what_is_played_back_is_counted() -> None:
    _, unrecorded = serve("dflash", GREEDY, record_prompts=False)
    stats = unrecorded.stats()
    assert (stats.num_replayed_prompts, stats.num_unrecorded_prompts, stats.num_failed_recordings) == (0, 0, 0)
    target, drafter = loaded()
    engine = Engine(target, drafter, EngineSettings(max_num_seqs=1, block_size=16, record_prompts=True))
    engine.generate([PROMPTS[0]] * 3, GREEDY)
    stats = engine.stats()
    assert (stats.num_replayed_prompts, stats.num_unrecorded_prompts, stats.num_failed_recordings) == (2, 1, 0)


def test_a_pass_that_cannot_be_recorded_is_run_and_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected, _ = serve("dflash2", SAMPLED, record_prompts=False)

    def refuse(_body: object) -> Repeated:
        raise RuntimeError("this operation is not permitted while a stream is capturing")

    monkeypatch.setattr(loop_module, "make_recorder", lambda *_args, **_options: refuse)
    with caplog.at_level(logging.ERROR):
        found, engine = serve("dflash2", SAMPLED, record_prompts=True)
    assert [result.token_ids for result in found] == [result.token_ids for result in expected]
    stats = engine.stats()
    assert stats.num_replayed_prompts == 0 < stats.num_unrecorded_prompts
    named = {record.message for record in caplog.records if "cannot be recorded" in record.message}
    assert len(named) == stats.num_failed_recordings > 0
    assert any("prompts" in message for message in named)


# What a recording would refuse, or hold on to

RECORDED_KINDS = [kind for kind in KINDS if kind.name in ("plain sampled", "plain with rules", "dflash2 sampled")]


def calls_of_two_passes(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], list[str]]:
    """What two passes of one shape launch: two prompts, then one, which begins behind a prefix, and padding."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("Triton compiles here")
    let_the_interpreter_count(monkeypatch)
    bench = StepBench(kind, AttentionChoice(is_batched=True, is_row_invariant=False, is_paged=True))
    take_kernels(monkeypatch)
    both = []
    for chunks in (
        [PrefillChunk(slot, (7, 8, 9, 5), 0, None, bench.flags) for slot in (2, 0)],
        [PrefillChunk(1, (3,), 32, None, bench.flags)],
    ):
        numbers_BX = torch.from_numpy(prompt_numbers(chunks, 2, 4, bench.state.trash_slot))
        with torch.inference_mode(), recorded(bench.target, bench.drafter) as calls:
            run_pass(bench, numbers_BX)
        both.append(calls.calls)
    return both[0], both[1]


def run_pass(bench: StepBench, numbers_BX: torch.Tensor, slots: Sequence[int] = ()) -> StepOutput:
    return run_prompts(
        bench.target,
        bench.proposer,
        bench.cache,
        bench.state,
        bench.choice,
        numbers_BX,
        bench.flags,
        lacks_context=False,
        method=bench.kind.verify_method,
        slots=slots,
    )


@pytest.mark.parametrize("kind", RECORDED_KINDS, ids=lambda kind: kind.name)
def test_a_pass_launches_the_same_whatever_its_prompts_are(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    assert refusals(*calls_of_two_passes(kind, monkeypatch)) == []


@pytest.mark.parametrize("plant", ["asks", "writes a number"])
def test_a_pass_that_asks_the_device_is_found(plant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    retire = SlotState.retire

    def planted(self: SlotState, slots_B: torch.Tensor, *rest: Any) -> None:
        if plant == "asks":
            assert int(self.lengths.max()) >= 0
        else:
            self.anchors[slots_B] = 3
        retire(self, slots_B, *rest)

    monkeypatch.setattr(SlotState, "retire", planted)
    assert refusals(*calls_of_two_passes(RECORDED_KINDS[0], monkeypatch))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", RECORDED_KINDS, ids=lambda kind: kind.name)
@torch.inference_mode()
def test_a_captured_pass_does_what_a_pass_does(kind: Kind) -> None:
    """Replayed for other prompts than those it was captured with, to the bit."""
    paged = AttentionChoice(is_batched=True, is_row_invariant=False, is_paged=True)
    eager, bench = StepBench(kind, paged, "cuda"), StepBench(kind, paged, "cuda")
    first = [PrefillChunk(slot, tuple(range(7, 27)), 0, None, bench.flags) for slot in (2, 0)]
    other = [PrefillChunk(1, (3, 9, 4), 0, None, bench.flags)]
    numbers = [torch.from_numpy(prompt_numbers(each, 2, 32, bench.state.trash_slot)).cuda() for each in (first, other)]
    expected = [run_pass(eager, each).report_BX.clone() for each in (numbers[0], *numbers)]
    numbers_BX = numbers[0].clone()
    found = [run_pass(bench, numbers_BX).report_BX.clone()]
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        output = run_pass(bench, numbers_BX)
    for each in numbers:
        numbers_BX.copy_(each)
        graph.replay()
        found.append(output.report_BX.clone())
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
    assert torch.equal(found[2][0], expected[2][0])
    for one, another in zip(eager.state.tensors(), bench.state.tensors(), strict=True):
        assert torch.equal(one[:3], another[:3])
