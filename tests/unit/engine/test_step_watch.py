"""A trace with details: the same text, the models' own numbers at the right rows, and times that add up."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.tiny import loaded, tiny_prompts
from tests.unit.engine.test_engine_families import FAMILIES

from paceline.checkpoint.contract import ConfidenceSettings
from paceline.engine.engine import Engine, EngineSettings
from paceline.engine.request import RequestResult, SamplingParameters
from paceline.engine.step_watch import LOWEST, StepWatch
from paceline.errors import ConfigError
from paceline.models.attends import WholeSequence
from paceline.models.drafters.proposal import Proposal
from paceline.models.loading import LoadedTarget
from paceline.trace.answer import TracedAnswer
from paceline.trace.reader import line_from_json
from paceline.trace.step import StepDetails, StepRecord
from paceline.trace.writer import trace_to_json

LONG = SamplingParameters(max_tokens=16, ignore_eos=True)
SAMPLED = SamplingParameters(max_tokens=16, ignore_eos=True, temperature=1.0, seed=5)


def details_of(record: StepRecord) -> StepDetails:
    assert record.details is not None
    return record.details


@torch.inference_mode()
def target_logprobs(target: LoadedTarget, result: RequestResult, record: StepRecord) -> torch.Tensor:
    """Rows of a step in one pass over the text before it and its drafts, [d + 1, V]."""
    text = [*result.prompt_ids, *result.token_ids][: record.anchor_position + 1] + list(record.proposed_ids)
    ids = torch.tensor([text])
    logits = target.model.logits(target.model(ids, torch.arange(len(text))[None], WholeSequence()))
    return logits[0, record.anchor_position :].float().log_softmax(-1)


def same(found: tuple[float, ...], expected: torch.Tensor) -> bool:
    return len(found) == len(expected) and torch.allclose(torch.tensor(found), expected.cpu(), atol=2e-3)


@pytest.mark.parametrize("name", ["dflash", "dflash2", "dspark", "eagle3"])
@pytest.mark.parametrize("sampling", [LONG, SAMPLED], ids=["greedy", "sampled"])
def test_the_text_is_the_same_and_the_numbers_are_the_models(name: str, sampling: SamplingParameters) -> None:
    target, drafter = loaded("qwen3", **FAMILIES[name])
    prompts = tiny_prompts([5, 31, 12])
    method = "greedy" if sampling is LONG else "probabilistic"
    settings: dict[str, Any] = {"max_num_seqs": 2, "num_draft_tokens": 3, "draft_sample_method": method}
    plain = Engine(target, drafter, EngineSettings(**settings)).generate(prompts, sampling)
    found = Engine(target, drafter, EngineSettings(**settings, trace_details=True)).generate(prompts, sampling)
    assert [each.token_ids for each in found] == [each.token_ids for each in plain]
    assert all(record.details is None for each in plain for record in each.trace.records)
    num_refusals = 0
    for result in found:
        for record in result.trace.records:
            details, kept = details_of(record), record.num_verified_accepted
            rows = target_logprobs(target, result, record)
            judged = min(kept + 1, record.num_draft_tokens)
            drafts = torch.tensor(record.proposed_ids[:judged], dtype=torch.int64)
            assert same(details.target_logprobs, rows[:judged].gather(1, drafts[:, None])[:, 0])
            assert same(details.target_entropies, -(rows.exp() * rows).sum(-1)[: kept + 1])
            assert [row[0][0] for row in details.target_top] == rows.argmax(-1)[: kept + 1].tolist()
            assert all(len(row) == 5 for row in details.target_top)
            if record.bonus_id is not None:
                assert details.bonus_logprob == pytest.approx(float(rows[kept, record.bonus_id]), abs=2e-3)
            assert len(details.draft_logprobs) == len(details.draft_entropies) == record.num_draft_tokens
            assert all(LOWEST < value <= 0 for value in details.draft_logprobs)
            times = (details.verify_ms, details.sampling_ms, details.draft_ms, details.host_ms)
            assert all(value >= 0 for value in times) and details.verify_ms > 0 and details.draft_ms > 0
            assert sum(times) == pytest.approx(record.step_ms, abs=0.01)
            num_refusals += record.refused_id is not None
        written = line_from_json(trace_to_json(result.trace), place="here")
        assert isinstance(written, TracedAnswer) and written.trace == result.trace, "nothing is lost in a file"
    assert num_refusals > 0


@pytest.mark.parametrize("name", ["dflash", "eagle3"])
def test_greedy_drafts_are_the_likeliest_of_the_drafter(name: str) -> None:
    """So none is less likely than the others of its row: its entropy bounds how unlikely it may be."""
    target, drafter = loaded("qwen3", **FAMILIES[name])
    (result,) = Engine(target, drafter, EngineSettings(trace_details=True)).generate(tiny_prompts([9]), LONG)
    for record in result.trace.records:
        details = details_of(record)
        for logprob, entropy in zip(details.draft_logprobs, details.draft_entropies, strict=True):
            assert -logprob <= entropy + 1e-3


def test_confidences_are_those_of_the_head() -> None:
    target, drafter = loaded("qwen3", drafter_family="dspark", confidence=ConfidenceSettings(True))
    (result,) = Engine(target, drafter, EngineSettings(trace_details=True)).generate(tiny_prompts([9]), LONG)
    for record in result.trace.records:
        assert len(details_of(record).confidences) == record.num_draft_tokens
        assert all(0 <= value <= 1 for value in details_of(record).confidences)
    target, drafter = loaded("qwen3", drafter_family="dflash")
    (result,) = Engine(target, drafter, EngineSettings(trace_details=True)).generate(tiny_prompts([9]), LONG)
    assert all(details_of(record).confidences == () for record in result.trace.records)


def test_plain_decoding_has_details_too() -> None:
    target, _ = loaded("qwen3")
    (result,) = Engine(target, None, EngineSettings(trace_details=True)).generate(tiny_prompts([9]), LONG)
    details = details_of(result.trace.records[0])
    assert details.draft_logprobs == details.target_logprobs == () and len(details.target_top) == 1
    assert details.bonus_logprob == pytest.approx(details.target_top[0][0][1])


@pytest.mark.parametrize("draft_length", ["adaptive", "off"])
def test_other_draft_lengths_keep_drafts_and_numbers_together(draft_length: Any) -> None:
    target, drafter = loaded("qwen3", drafter_family="dflash")
    settings = EngineSettings(trace_details=True, draft_length=draft_length)
    (result,) = Engine(target, drafter, settings).generate(tiny_prompts([9]), LONG)
    for record in result.trace.records:
        assert len(details_of(record).draft_logprobs) in (0, record.num_draft_tokens)


def test_settings_that_leave_no_room_to_look_are_refused() -> None:
    for other in ({"run_ahead": True}, {"cuda_graphs": True}):
        with pytest.raises(ConfigError, match="trace_details looks into each step"):
            EngineSettings(trace_details=True, **other)  # type: ignore[arg-type]


def test_drafts_of_a_short_list_are_found_by_their_ids() -> None:
    watch = StepWatch(torch.device("cpu"))
    logits = torch.tensor([[[0.0, math.log(3.0)], [1.0, -torch.inf]]])
    proposal = Proposal(torch.tensor([[40, 7]]))
    watch.drafted([0], proposal, logits, torch.tensor([7, 40]))
    watch.begin([0])
    watch.judged(torch.zeros(1, 3, 50), torch.tensor([[40, 7]]), torch.tensor([[40, 7, 1]]))
    record = StepRecord("r", 0, 4, 1, (40, 7), 2, 2, (40, 7, 1), 1, 1.0)
    details = watch.details_of(0, record)
    assert details.draft_logprobs == pytest.approx((math.log(0.75), 0.0), abs=1e-4)
    assert details.draft_entropies == pytest.approx((0.5623, 0.0), abs=1e-4)
    assert details.target_logprobs == pytest.approx((-math.log(50),) * 2, abs=1e-4)


def test_numbers_that_are_none_are_written_as_the_lowest() -> None:
    watch = StepWatch(torch.device("cpu"))
    watch.drafted([0], Proposal(torch.tensor([[1]])), torch.full((1, 1, 4), torch.nan), None)
    watch.begin([0])
    record = StepRecord("r", 0, 4, 1, (1,), 0, 0, (2,), 2, 1.0)
    assert watch.details_of(0, record).draft_logprobs == (LOWEST,)
