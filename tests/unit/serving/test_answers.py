"""What the engine gave is told whole: log-probabilities of shown tokens, usage, statistics that add up, calls."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.byte_level import byte_level_tokenizer
from tests.tiny import EOS_ID
from tokenizers import Tokenizer, models

from paceline.checkpoint.answer_parts import PlainText
from paceline.checkpoint.think_tags import ThinkTags
from paceline.checkpoint.tokenizer import TextTokenizer
from paceline.engine.request import RequestResult, TokenLogprobs
from paceline.serving.answers import (
    chat_choice,
    chat_logprobs,
    completion_choice,
    completion_logprobs,
    drafting_metrics,
    shown_entries,
    usage_of,
)
from paceline.serving.call_forms import HERMES_TAGS, KIMI_TAGS
from paceline.serving.call_reader import CallReader
from paceline.serving.token_texts import TokenTexts
from paceline.trace.step import RequestTrace, StepRecord

TOKENIZER = byte_level_tokenizer()
TEXTS = TokenTexts(TOKENIZER)
HIDDEN = frozenset({EOS_ID})
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


def entry(token_id: int, logprob: float = -0.5, top: Any = ()) -> TokenLogprobs:
    return TokenLogprobs(token_id, logprob, tuple(top), "raw")


def result(text: str = "", reason: Any = "stop", **fields: Any) -> RequestResult:
    ids = (*TOKENIZER.encode(text), EOS_ID)
    values = {"request_id": "r-0", "prompt_ids": (5, 6), "token_ids": ids, "trace": RequestTrace("r-0", 2)}
    return RequestResult(**{**values, "text": text, "finish_reason": reason, "stop_reason": EOS_ID, **fields})


# Log-probabilities


@pytest.mark.parametrize(
    ("ids", "reason", "num_shown"),
    [
        ((9, EOS_ID), "stop", 1),
        ((EOS_ID,), "stop", 0),
        ((9, EOS_ID), None, 2),  # within the text, which it did not end
        ((9, EOS_ID), "length", 2),
        ((EOS_ID, 9), "stop", 2),  # a stop text ended it
        ((), "stop", 0),
        ((), None, 0),
    ],
)
def test_only_a_stop_token_that_ended_the_text_is_hidden(ids: Any, reason: str | None, num_shown: int) -> None:
    entries = [entry(token) for token in ids]
    assert list(shown_entries(entries, reason, HIDDEN)) == entries[:num_shown]
    assert list(shown_entries(entries, reason, frozenset())) == entries


def test_log_probabilities_of_a_chat() -> None:
    first, second = TOKENIZER.encode("é")
    content = chat_logprobs([entry(first, -1.0, [(first, -1.0), (second, -2.0)]), entry(second, -0.25)], TEXTS).content
    assert [one.bytes for one in content] == [[0xC3], [0xA9]]
    assert [one.logprob for one in content] == [-1.0, -0.25]
    assert [(one.token, one.bytes, one.logprob) for one in content[0].top_logprobs] == [
        ("\ufffd", [0xC3], -1.0),
        ("\ufffd", [0xA9], -2.0),
    ]
    assert content[1].top_logprobs == []


def test_log_probabilities_of_a_completion() -> None:
    (a,), (b,) = TOKENIZER.encode("a"), TOKENIZER.encode("b")
    found = completion_logprobs([entry(a, -1.0, [(b, -0.5), (a, -1.0)]), entry(b)], TEXTS, num_top=2, offset=3)
    assert (found.tokens, found.token_logprobs, found.text_offset) == (["a", "b"], [-1.0, -0.5], [3, 4])
    assert found.top_logprobs == [{"a": -1.0, "b": -0.5}, {"b": -0.5}]
    assert completion_logprobs([entry(a)], TEXTS, num_top=0).top_logprobs is None


def test_tokens_that_are_parts_of_characters_do_not_hide_each_other() -> None:
    (z,), (one, other, *_) = TOKENIZER.encode("z"), TOKENIZER.encode("\N{GRINNING FACE}")
    (top,) = completion_logprobs([entry(z, -3.0, [(one, -1.0), (other, -2.0)])], TEXTS, num_top=2).top_logprobs or ()
    assert top == {"z": -3.0, r"bytes:\xf0": -1.0, r"bytes:\x9f": -2.0}


def test_tokens_of_one_spelling_do_not_hide_the_chosen_one() -> None:
    vocabulary = {"<0x41>": 0, "A": 1}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    texts = TokenTexts(TextTokenizer(backend, chat_template=None, special_tokens={}, origin="t"))
    (top,) = completion_logprobs([entry(1, -0.5, [(1, -0.5), (0, -9.0)])], texts, num_top=2).top_logprobs or ()
    assert top == {"A": -0.5}


def test_special_tokens_take_no_room_in_the_text() -> None:
    ids = TOKENIZER.encode("a<|end|>b")
    assert completion_logprobs([entry(token) for token in ids], TEXTS, num_top=0).text_offset == [0, 1, 1]


@given(st.text("etaé世🙂 ", max_size=20), st.data())
def test_offsets_count_characters_of_the_text(text: str, data: st.DataObject) -> None:
    ids = TOKENIZER.encode(text)
    offsets = completion_logprobs([entry(token) for token in ids], TEXTS, num_top=0).text_offset
    begins = 0
    for token, offset in zip(ids, offsets, strict=True):
        whole = TEXTS.bytes_of(token).decode("utf-8", "ignore")
        if whole.encode() == TEXTS.bytes_of(token):
            assert text[offset : offset + len(whole)] == whole
        assert offset >= begins
        begins = offset
    assert all(offset <= len(text) for offset in offsets)


# Usage


@given(st.integers(1, 4), st.integers(1, 3), st.data())
def test_usage_counts_each_prompt_once(num_prompts: int, n: int, data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 9), min_size=num_prompts, max_size=num_prompts))
    news = data.draw(st.lists(st.integers(0, 9), min_size=num_prompts * n, max_size=num_prompts * n))
    results = [
        result(
            prompt_ids=(5,) * lengths[index // n],
            token_ids=(7,) * num_new,
            num_cached_tokens=lengths[index // n] - 1 if index % n == 0 else 100,
        )
        for index, num_new in enumerate(news)
    ]
    usage = usage_of(results, n)
    assert usage.prompt_tokens == sum(lengths)
    assert usage.completion_tokens == sum(news)
    assert usage.total_tokens == sum(lengths) + sum(news)
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == sum(lengths) - num_prompts


# Statistics of drafting


def drafted(pairs: list[tuple[int, int]]) -> RequestResult:
    """An answer whose steps drafted and accepted so many."""
    records = [
        StepRecord(
            request_id="r-0",
            step_index=index,
            anchor_position=9,
            anchor_id=5,
            proposed_ids=(5,) * num_drafted,
            num_verified_accepted=num_accepted,
            num_accepted=num_accepted,
            emitted_ids=(5,) * num_accepted + (6,),
            bonus_id=6,
            step_ms=1.0,
        )
        for index, (num_drafted, num_accepted) in enumerate(pairs)
    ]
    return result(trace=RequestTrace("r-0", 2, records=records))


PAIRS = st.lists(st.integers(0, 7).flatmap(lambda size: st.tuples(st.just(size), st.integers(0, size))), max_size=12)


@given(PAIRS)
def test_statistics_add_up(pairs: list[tuple[int, int]]) -> None:
    told = drafting_metrics([drafted(pairs)], 7, "detailed")
    judged = [(size, accepted) for size, accepted in pairs if size > 0]
    if not judged:
        assert told is None
        return
    assert told is not None
    found = told.speculative_decoding
    assert sum(found.acceptance_histogram) == found.num_spec_steps == len(judged)
    assert len(found.acceptance_histogram) == found.num_spec_tokens + 1 == 8
    weighted = sum(depth * count for depth, count in enumerate(found.acceptance_histogram))
    assert weighted == found.num_accepted_draft_tokens == sum(accepted for _, accepted in judged)
    assert found.num_draft_tokens == sum(size for size, _ in judged)
    assert found.per_step_accepted == [accepted for _, accepted in judged]
    assert found.per_step_drafted == [size for size, _ in judged]
    assert found.mean_acceptance_length == pytest.approx(1 + weighted / len(judged))
    assert found.draft_acceptance_rate == pytest.approx(weighted / found.num_draft_tokens)
    summary = drafting_metrics([drafted(pairs)], 7, "summary")
    assert summary is not None
    assert summary.model_dump(exclude_none=True)["speculative_decoding"] == {
        name: value for name, value in found.model_dump().items() if not name.startswith("per_step")
    }


def test_statistics_are_told_where_asked_for_and_of_one_answer() -> None:
    one = drafted([(7, 3)])
    assert drafting_metrics([one], 7, "none") is None
    assert drafting_metrics([one, one], 7, "detailed") is None
    assert drafting_metrics([result()], 0, "detailed") is None


# Choices


def test_a_plain_answer() -> None:
    choice = chat_choice(3, result("hello"), TEXTS, HIDDEN, PlainText())
    assert (choice.index, choice.finish_reason, choice.stop_reason) == (3, "stop", EOS_ID)
    assert (choice.message.content, choice.message.tool_calls, choice.logprobs) == ("hello", None, None)
    assert chat_choice(0, result(CALL), TEXTS, HIDDEN, PlainText()).message.content == CALL  # nobody asked for calls
    assert chat_choice(0, result(""), TEXTS, HIDDEN, CallReader(HERMES_TAGS)).message.content == ""


@pytest.mark.parametrize(("reason", "told"), [("stop", "tool_calls"), ("length", "length"), ("abort", "abort")])
def test_an_answer_with_calls(reason: str, told: str) -> None:
    choice = chat_choice(0, result(CALL + "\n" + CALL, reason), TEXTS, HIDDEN, CallReader(HERMES_TAGS))
    assert choice.finish_reason == told
    assert choice.message.content is None
    calls = choice.message.tool_calls or []
    assert [call.function for call in calls] == [{"name": "f", "arguments": '{"a": 1}'}] * 2
    assert len({call.id for call in calls}) == 2


def test_text_beside_calls_stays() -> None:
    choice = chat_choice(0, result("Let me see.\n" + CALL), TEXTS, HIDDEN, CallReader(HERMES_TAGS))
    assert choice.message.content == "Let me see.\n"
    assert chat_choice(0, result("no call"), TEXTS, HIDDEN, CallReader(HERMES_TAGS)).finish_reason == "stop"


def test_a_thought_is_told_apart_and_the_targets_own_name_of_a_call_is_kept() -> None:
    reader = ThinkTags(CallReader(KIMI_TAGS), begins_inside=True)
    call = "<|tool_call_begin|>functions.f:3<|tool_call_argument_begin|>{}<|tool_call_end|>"
    choice = chat_choice(0, result(f"hm</think>{call}", "stop"), TEXTS, HIDDEN, reader)
    assert (choice.message.reasoning_content, choice.message.content) == ("hm", None)
    assert choice.message.tool_calls is not None and choice.message.tool_calls[0].id == "functions.f:3"
    assert choice.finish_reason == "tool_calls"
    assert chat_choice(0, result("hi"), TEXTS, HIDDEN, PlainText()).message.reasoning_content is None


def test_log_probabilities_of_choices_are_those_of_shown_tokens() -> None:
    answer = result("ab", token_ids=(104, 105, EOS_ID), logprobs=(entry(104), entry(105), entry(EOS_ID)))
    chat = chat_choice(0, answer, TEXTS, HIDDEN, PlainText()).logprobs
    text = completion_choice(0, answer, TEXTS, HIDDEN, 0).logprobs
    assert chat is not None and text is not None
    assert [one.token for one in chat.content] == text.tokens == ["a", "b"]
    shown = completion_choice(0, answer, TEXTS, frozenset(), 0).logprobs
    assert shown is not None and shown.tokens == ["a", "b", "<|end|>"]
    assert completion_choice(0, result("ab"), TEXTS, HIDDEN, 0).logprobs is None
