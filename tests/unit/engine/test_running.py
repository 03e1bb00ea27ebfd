"""What a step leaves in a request's record: verified and kept are two numbers, and the two may differ."""

from __future__ import annotations

import pytest
from tests.fakes import ByteTokenizer

from paceline.engine.output import RequestOutput
from paceline.engine.request import SamplingParameters
from paceline.engine.running import RunningRequest
from paceline.engine.slots import SamplingFlags
from paceline.engine.step import HostStep
from paceline.trace.step import RequestTrace


def make_request(sampling: SamplingParameters, prompt: bytes = b"ask") -> RunningRequest:
    output = RequestOutput(ByteTokenizer(), sampling, max_tokens=sampling.max_tokens, target_stop_ids=(0,))
    flags, trace = SamplingFlags.of([sampling]), RequestTrace("r", len(prompt))
    return RunningRequest("r", tuple(prompt), sampling, 1, output, trace, flags, slot=0)


def step_of(tokens: bytes, drafts: bytes, *, is_bad: bool = False) -> HostStep:
    """All drafts but those after the given tokens were kept; the last token is the target's own."""
    num_accepted = len(tokens) - (0 if is_bad else 1)
    padded = list(tokens) + [-1] * (len(drafts) + 1 - len(tokens))
    return HostStep(num_accepted, is_bad, 0, padded, list(drafts))


def test_a_stop_inside_the_block_is_kept_apart_from_verification() -> None:
    request = make_request(SamplingParameters(stop=("d",)))
    assert request.take_first(ord("a")).text == "a"
    assert (request.is_decoding, request.num_cached) == (True, 3)
    delta = request.take_step(step_of(b"bcdefgh", b"bcdefg"), 2.0)
    record = delta.step
    assert record is not None
    assert (record.num_verified_accepted, record.num_accepted, record.emitted_ids) == (6, 3, tuple(b"bcd"))
    assert (record.bonus_id, record.anchor_position, record.anchor_id) == (None, 3, ord("a"))
    assert (delta.text, delta.finish_reason, request.stop_reason) == ("bc", "stop", "d")
    result = request.result("stop")
    assert result.text == "abc"
    assert bytes(result.token_ids) == b"abcd"


def test_a_whole_block_with_its_bonus_is_kept() -> None:
    request = make_request(SamplingParameters())
    request.take_first(ord("a"))
    record = request.take_step(step_of(b"bcX", b"bcd"), 2.0).step
    assert record is not None
    assert (record.num_accepted, record.bonus_id, record.refused_id) == (2, ord("X"), ord("d"))
    assert request.num_cached == 3 + 3


@pytest.mark.parametrize(("drafts", "reason"), [(b"bcd", None), (b"", "error")])
def test_bad_numbers_end_a_request_only_without_drafts(drafts: bytes, reason: str | None) -> None:
    request = make_request(SamplingParameters())
    request.take_first(ord("a"))
    delta = request.take_step(step_of(b"b" if drafts else b"", drafts, is_bad=True), 1.0)
    assert delta.finish_reason == reason
    assert delta.token_ids == (tuple(b"b") if drafts else ())
    assert delta.step is not None
    assert delta.step.bonus_id is None


def test_a_stop_before_the_bad_row_is_a_stop() -> None:
    request = make_request(SamplingParameters(stop_token_ids=(ord("b"),)))
    request.take_first(ord("a"))
    assert request.take_step(step_of(b"bc", b"bcd", is_bad=True), 1.0).finish_reason == "stop"


def test_a_bad_prompt_delivers_nothing() -> None:
    request = make_request(SamplingParameters())
    delta = request.take_first(-1)
    assert (delta.token_ids, delta.finish_reason, request.trace.first_token_id) == ((), "error", None)
