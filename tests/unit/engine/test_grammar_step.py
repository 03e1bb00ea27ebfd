"""Masks of a step: one read for the requests that have a grammar, none without, and drafts dropped behind a refusal."""

from __future__ import annotations

import pytest
import torch
from tests.fakes import ByteTokenizer

from paceline.engine.grammar import BlockMasks
from paceline.engine.grammar_step import grammar_masks
from paceline.engine.output import RequestOutput
from paceline.engine.running import RunningRequest
from paceline.engine.sampling import SamplingParameters
from paceline.engine.sampling_flags import SamplingFlags
from paceline.engine.slots import SlotState
from paceline.models.drafters.proposal import Proposal
from paceline.trace.step import RequestTrace


class KeepsSome:
    """A grammar that keeps so many drafts and notes what it was shown."""

    def __init__(self, num_kept: int, error: str | None = None) -> None:
        self.num_kept, self.error, self.seen = num_kept, error, []

    def masks(self, draft_ids: list[int], num_rows: int) -> BlockMasks:
        self.seen.append(list(draft_ids))
        mask = torch.arange(num_rows, dtype=torch.int32).unsqueeze(1).expand(-1, 2)
        return BlockMasks(mask, min(self.num_kept, len(draft_ids)), self.error)


def make_request(slot: int, grammar: KeepsSome | None) -> RunningRequest:
    sampling = SamplingParameters()
    output = RequestOutput(ByteTokenizer(), sampling, max_tokens=9, target_stop_ids=())
    trace, flags = RequestTrace(str(slot), 1), SamplingFlags.of([sampling])
    return RunningRequest(str(slot), (1,), sampling, 0, output, trace, flags, grammar=grammar, slot=slot)


def make_state() -> SlotState:
    state = SlotState(4, num_draft_tokens=3, num_candidates=0, device=torch.device("cpu"))
    drafts = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, -1], [9, 10, 11]])
    state.store_proposal(torch.arange(4), Proposal(drafts))
    return state


def test_masks_stand_at_their_requests_and_refused_tails_are_dropped() -> None:
    state, first, second = make_state(), KeepsSome(2, "dead end"), KeepsSome(9)
    requests = [make_request(3, first), make_request(0, None), make_request(2, second)]
    mask = grammar_masks(requests, state, 4)
    assert mask is not None and mask.shape == (3, 4, 2)
    assert mask[0].tolist() == mask[2].tolist() == [[row, row] for row in range(4)]
    assert (mask[1] == -1).all(), "a request without a grammar may emit everything"
    assert (first.seen, second.seen) == ([[9, 10, 11]], [[7, 8]])
    assert state.draft_ids[:4].tolist() == [[1, 2, 3], [4, 5, 6], [7, 8, -1], [9, 10, -1]]
    assert [request.grammar_error for request in requests] == ["dead end", None, None]


def test_the_prompt_pass_has_one_row_and_no_drafts() -> None:
    grammar = KeepsSome(0)
    mask = grammar_masks([make_request(1, grammar)], make_state(), 1)
    assert mask is not None and mask.tolist() == [[[0, 0]]]
    assert grammar.seen == [[]]


def test_without_a_grammar_the_host_reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    state, requests = make_state(), [make_request(0, None), make_request(2, None)]

    def read(*args: object) -> None:
        raise AssertionError("a tensor was read on the host")

    for name in ("tolist", "item", "__bool__", "__int__"):
        monkeypatch.setattr(torch.Tensor, name, read)
    assert grammar_masks(requests, state, 4) is None
    requests[0].grammar = KeepsSome(1)
    with pytest.raises(AssertionError, match="was read"):
        grammar_masks(requests, state, 4)
