"""What a step leaves in a request's record: verified and kept are two numbers, and the two may differ."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.fakes import ByteTokenizer

from paceline.engine.output import RequestOutput
from paceline.engine.request import SamplingParameters, TokenLogprobs
from paceline.engine.running import RunningRequest
from paceline.engine.slots import SamplingFlags
from paceline.engine.step import HostStep
from paceline.ops.finalise_block import NOT_A_NUMBER, NOTHING_LEFT, SOUND
from paceline.trace.step import RequestTrace


def make_request(sampling: SamplingParameters, prompt: bytes = b"ask") -> RunningRequest:
    output = RequestOutput(ByteTokenizer(), sampling, max_tokens=sampling.max_tokens, target_stop_ids=(0,))
    flags, trace = SamplingFlags.of([sampling]), RequestTrace("r", len(prompt))
    return RunningRequest("r", tuple(prompt), sampling, 1, output, trace, flags, slot=0)


def step_of(tokens: bytes, drafts: bytes, *, fault: int = SOUND) -> HostStep:
    """All drafts but those after the given tokens were kept; the last token is the target's own."""
    num_accepted = len(tokens) - (1 if fault == SOUND else 0)
    return HostStep(num_accepted, fault, 0, tuple(tokens), tuple(drafts))


def test_a_stop_inside_the_block_is_kept_apart_from_verification() -> None:
    request = make_request(SamplingParameters(stop=("d",)))
    assert request.take_first(step_of(b"a", b"")).text == "a"
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
    request.take_first(step_of(b"a", b""))
    record = request.take_step(step_of(b"bcX", b"bcd"), 2.0).step
    assert record is not None
    assert (record.num_accepted, record.bonus_id, record.refused_id) == (2, ord("X"), ord("d"))
    assert request.num_cached == 3 + 3


@pytest.mark.parametrize(("drafts", "reason"), [(b"bcd", None), (b"", "error")])
def test_bad_numbers_end_a_request_only_without_drafts(drafts: bytes, reason: str | None) -> None:
    request = make_request(SamplingParameters())
    request.take_first(step_of(b"a", b""))
    delta = request.take_step(step_of(b"b" if drafts else b"", drafts, fault=NOT_A_NUMBER), 1.0)
    assert delta.finish_reason == reason
    assert delta.token_ids == (tuple(b"b") if drafts else ())
    assert delta.step is not None
    assert delta.step.bonus_id is None


def test_a_stop_before_the_bad_row_is_a_stop() -> None:
    request = make_request(SamplingParameters(stop_token_ids=(ord("b"),)))
    request.take_first(step_of(b"a", b""))
    assert request.take_step(step_of(b"bc", b"bcd", fault=NOT_A_NUMBER), 1.0).finish_reason == "stop"


def test_a_bad_prompt_delivers_nothing() -> None:
    request = make_request(SamplingParameters())
    delta = request.take_first(step_of(b"", b"", fault=NOT_A_NUMBER))
    assert (delta.token_ids, delta.finish_reason, request.trace.first_token_id) == ((), "error", None)
    assert request.result("error").error == "numbers: the target's logits for position 3 hold NaN or infinity"


@pytest.mark.parametrize("drafts", [b"bcd", b""])
def test_rules_that_leave_no_token_end_a_request_with_or_without_drafts(drafts: bytes) -> None:
    """P17: the kept drafts are sound, and running them again would leave nothing again."""
    request = make_request(SamplingParameters(bad_words=("x",), allowed_token_ids=(7,), min_tokens=2, logprobs=0))
    request.take_first(HostStep(0, SOUND, 0, (ord("a"),), (), logged(b"a")))
    kept = drafts[:1]
    step = replace(step_of(kept, drafts, fault=NOTHING_LEFT), logprobs=logged(kept))
    delta = request.take_step(step, 1.0)
    assert (delta.finish_reason, bytes(delta.token_ids)) == ("error", kept)
    result = request.result("error")
    names = "allowed_token_ids, bad_words" if kept else "allowed_token_ids, min_tokens, bad_words"
    assert result.error == f"no token is allowed: {names} left none for position {4 + len(kept)}"
    assert result.logprobs is not None and [entry.token_id for entry in result.logprobs] == list(result.token_ids)


def test_a_stop_before_the_row_without_a_token_is_a_stop() -> None:
    request = make_request(SamplingParameters(stop_token_ids=(ord("b"),)))
    request.take_first(step_of(b"a", b""))
    assert request.take_step(step_of(b"bc", b"bcd", fault=NOTHING_LEFT), 1.0).finish_reason == "stop"
    assert request.result("stop").error is None


class Countdown:
    """A grammar of so many tokens."""

    def __init__(self, num_tokens: int) -> None:
        self.num_left, self.taken = num_tokens, b""

    @property
    def is_finished(self) -> bool:
        return self.num_left <= 0

    def advance(self, token_ids: tuple[int, ...]) -> None:
        self.num_left -= len(token_ids)
        self.taken += bytes(token_ids)


@pytest.mark.parametrize("num_tokens", [2, 3, 4, 6])
def test_a_grammar_ends_the_request_at_the_token_that_completes_it(num_tokens: int) -> None:
    """Wherever blocks end: in a step of their own or in the middle of one, the same tokens are delivered."""
    ends = []
    for blocks in ([b"bcdef"], [b"bc", b"def"], [b"b", b"c", b"d", b"e", b"f"]):
        request = make_request(SamplingParameters(max_tokens=6))
        request.grammar = Countdown(num_tokens)
        request.take_first(step_of(b"a", b""))
        for block in blocks:
            if request.finish_reason is None:
                request.take_step(step_of(block, block[:-1]), 1.0)
        result = request.result(request.finish_reason)
        assert result.trace.token_ids == result.token_ids
        ends.append((bytes(result.token_ids), result.text, result.finish_reason, result.stop_reason))
    expected = b"abcdef"[:num_tokens]
    assert ends == [(expected, expected.decode(), "stop", None)] * 3


def test_a_stop_text_before_the_end_of_the_grammar_wins() -> None:
    request = make_request(SamplingParameters(stop=("c",)))
    request.grammar = Countdown(4)
    request.take_first(step_of(b"a", b""))
    request.take_step(step_of(b"bcdef", b"bcde"), 1.0)
    result = request.result("stop")
    assert (bytes(result.token_ids), result.text, result.stop_reason) == (b"abc", "ab", "c")


def logged(tokens: bytes) -> dict[str, tuple[TokenLogprobs, ...]]:
    best = tuple((rank, -float(rank + 1)) for rank in range(5))
    return {"raw": tuple(TokenLogprobs(token, -0.5, best, "raw") for token in tokens)}


@pytest.mark.parametrize("num_top", [None, 0, 2])
def test_log_probabilities_are_cut_to_what_was_delivered_and_asked_for(num_top: int | None) -> None:
    """The batch computed five best tokens for a neighbour; two tokens of the block lie behind the stop."""
    request = make_request(SamplingParameters(stop_token_ids=(ord("c"),), logprobs=num_top))
    request.take_first(replace(step_of(b"a", b""), logprobs=logged(b"a")))
    delta = request.take_step(replace(step_of(b"bcde", b"bcd"), logprobs=logged(b"bcde")), 1.0)
    result = request.result("stop")
    if num_top is None:
        assert delta.logprobs is None and result.logprobs is None
        return
    assert delta.logprobs is not None and result.logprobs is not None
    assert bytes(entry.token_id for entry in delta.logprobs) == b"bc"
    assert bytes(entry.token_id for entry in result.logprobs) == b"abc" == bytes(result.token_ids)
    assert {len(entry.top) for entry in result.logprobs} == {num_top}


def test_a_result_says_how_it_was_verified() -> None:
    """P46."""
    request = make_request(SamplingParameters())
    request.verify_method, request.sample_index = "block", 3
    result = request.result("abort")
    assert (result.verify_method, result.is_lossless, result.sample_index) == ("block", True, 3)
