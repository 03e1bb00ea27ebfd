"""Recorded passes of prompts give what unrecorded ones do, whoever pads them."""

from __future__ import annotations

import pytest
import torch
from tests.tiny import loaded, tiny_prompts

from paceline.engine import loop as loop_module
from paceline.engine import prompt_graphs
from paceline.engine.attends import AttentionChoice
from paceline.engine.engine import Engine, EngineSettings
from paceline.engine.graphs import Repeated
from paceline.engine.prefill import PrefillChunk, prompt_numbers
from paceline.engine.request import RequestResult, SamplingParameters
from paceline.engine.sampling_flags import SamplingFlags

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
