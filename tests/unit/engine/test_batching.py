"""What a pass runs: chunks that end where they should, and rows for what waits and may be verified."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.fakes import ByteTokenizer

from paceline.engine.batching import StepFlags, next_chunk, step_batch
from paceline.engine.draft_stopper import DraftPlan
from paceline.engine.output import RequestOutput
from paceline.engine.running import RunningRequest
from paceline.engine.sampling import SamplingParameters
from paceline.engine.sampling_flags import SamplingFlags
from paceline.engine.settings import EngineSettings
from paceline.engine.slots import SlotState
from paceline.trace.step import RequestTrace

SETTINGS = EngineSettings(prefill_chunk_size=4, verify_method="match")
KNOWN: dict[str, Any] = {"num_waiting": [2, 0], "rows_ahead": [0, 0]}


def make_request(slot: int, num_prompt_tokens: int = 10, **sampling: object) -> RunningRequest:
    wanted = SamplingParameters(**({"max_tokens": 9} | sampling))
    output = RequestOutput(ByteTokenizer(), wanted, max_tokens=wanted.max_tokens, target_stop_ids=())
    prompt = tuple(range(num_prompt_tokens))
    return RunningRequest(
        str(slot), prompt, wanted, 0, output, RequestTrace("r", 1), SamplingFlags.of([wanted]), slot=slot
    )


def make_state() -> SlotState:
    return SlotState(3, num_draft_tokens=3, num_candidates=0, device=torch.device("cpu"))


@pytest.mark.parametrize("max_tokens", [1, 9])
def test_only_the_last_chunk_plans_a_block(max_tokens: int) -> None:
    request, asked = make_request(2, max_tokens=max_tokens), []

    def plan() -> DraftPlan:
        asked.append(request.num_prefilled)
        return DraftPlan((3,))

    chunks = []
    for end in (4, 8, 10):
        chunk = next_chunk(request, make_state(), SETTINGS, end=end, plan=plan, stopper=None)
        chunks.append((chunk.start, tuple(chunk.token_ids), chunk.next_id, chunk.plan is not None))
        request.num_prefilled = end
        assert (chunk.slot, chunk.verify_method, chunk.resumed_step) == (2, "match", None)
    has_block = max_tokens > 1  # the only token there is needs none behind it
    assert chunks == [(0, (0, 1, 2, 3), 4, False), (4, (4, 5, 6, 7), 8, False), (8, (8, 9), None, has_block)]
    assert asked == [8] * has_block


def test_a_resumed_text_goes_up_to_its_anchor_and_every_token_is_known() -> None:
    """B72: no chunk's end is guessed, and the last one drafts with the request's own step counter."""
    request = make_request(1)
    request.output.extend([50, 51, 52])
    request.trace.records.extend([None] * 2)
    request.prefill_goal, request.num_prefilled, request.held.context_start = 12, 4, 4
    chunks = [next_chunk(request, make_state(), SETTINGS, end=8, plan=lambda: DraftPlan((3,)), stopper=None)]
    request.num_prefilled = 8
    chunks.append(next_chunk(request, make_state(), SETTINGS, end=12, plan=lambda: DraftPlan((3,)), stopper=None))
    assert [tuple(chunk.token_ids) for chunk in chunks] == [(4, 5, 6, 7), (8, 9, 50, 51)]
    assert [chunk.next_id for chunk in chunks] == [8, 52]
    assert [chunk.resumed_step for chunk in chunks] == [None, 2]
    assert [chunk.plan for chunk in chunks] == [None, DraftPlan((3,))]
    assert {chunk.context_start for chunk in chunks} == {4}


def test_a_step_has_rows_for_the_longest_waiting_block_that_it_may_verify() -> None:
    requests = [make_request(1), make_request(0, temperature=1.0)]
    for request, num_tokens in zip(requests, (1, 3), strict=True):
        request.num_prefilled = 10
        request.output.extend([5] * num_tokens)
    requests[0].num_waiting, requests[1].is_drafted = 2, True
    plan, flags = DraftPlan((3, 3)), StepFlags().of(requests)
    for most_drafts, num_rows in ((7, 3), (1, 2), (0, 1)):
        batch = step_batch(
            requests,
            make_state(),
            SETTINGS,
            plan,
            flags=flags,
            most_drafts=most_drafts,
            num_waiting=[request.num_waiting for request in requests],
            rows_ahead=[0, 5],  # the second may be five rows further than the host knows
            stopper=None,
        )
        assert (batch.rows.slots, batch.rows.starts, batch.rows.num_rows) == ([1, 0], [10, 17], num_rows)
        assert batch.rows.starts_B.tolist() == [10, 17]
    assert (batch.flags.all_greedy, batch.writes_context, batch.verify_method, batch.plan) == (
        False,
        True,
        "match",
        plan,
    )
    assert batch.grammar_mask_BTW is None
    assert (batch.rows.context_starts, batch.rows.context_starts_B) == (None, None)
    requests[1].held.context_start = 8
    batch = step_batch(requests, make_state(), SETTINGS, plan, flags=flags, most_drafts=7, stopper=None, **KNOWN)
    assert batch.rows.context_starts == [0, 8] and batch.rows.context_starts_B.tolist() == [0, 8]
    requests[1].is_drafted = False
    batch = step_batch(requests, make_state(), SETTINGS, plan, flags=flags, most_drafts=7, stopper=None, **KNOWN)
    assert not batch.writes_context


def test_flags_follow_the_requests_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    greedy, sampled = make_request(0), make_request(1, temperature=1.0)
    flags = StepFlags()
    assert flags.of([]).all_greedy and flags.of([greedy]).all_greedy
    assert not flags.of([greedy, sampled]).all_greedy
    with monkeypatch.context() as patch:
        patch.setattr(SamplingFlags, "of", None)
        assert not flags.of([greedy, sampled]).all_greedy, "the same requests are not looked over again"
    assert flags.of([greedy]).all_greedy
