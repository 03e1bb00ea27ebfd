"""Requests come to prompts and parameters; what is wrong with them is found before anything runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.byte_level import byte_level_tokenizer
from tests.tiny import EOS_ID, VOCAB_SIZE
from tokenizers import processors

from paceline.checkpoint.answer_parts import PlainText, read_whole
from paceline.checkpoint.generation_defaults import SamplingDefaults
from paceline.checkpoint.think_tags import ThinkTags
from paceline.errors import RequestError
from paceline.serving.call_reader import CallReader
from paceline.serving.fields import FieldError
from paceline.serving.model import ServedModel
from paceline.serving.prepare import DEFAULT_MAX_TOKENS, MOST_SAMPLES, PreparedChat, prepare_chat, prepare_completion
from paceline.serving.protocol import ChatCompletionRequest, CompletionRequest
from paceline.serving.samples import Asked

MAX_MODEL_LEN = 256
MODEL = ServedModel(
    name="tiny",
    root="tests/tiny",
    draft_name=None,
    tokenizer=byte_level_tokenizer(),
    stop_token_ids=(EOS_ID,),
    vocab_size=VOCAB_SIZE,
    max_model_len=MAX_MODEL_LEN,
    num_draft_tokens=0,
    defaults=SamplingDefaults(temperature=0.5),
    facts={},
)
MESSAGES = [{"role": "user", "content": "q"}]
CALLS = [{"type": "function", "function": {"name": "f"}}]


def chat(**fields: Any) -> PreparedChat:
    body = ChatCompletionRequest.model_validate({"messages": MESSAGES} | fields)
    return prepare_chat(body, MODEL, timeout_s=7.0)


def completion(**fields: Any) -> Asked:
    return prepare_completion(CompletionRequest.model_validate({"prompt": "a"} | fields), MODEL, timeout_s=7.0)


def text_of(prompt: tuple[int, ...]) -> str:
    return MODEL.tokenizer.decode(prompt, skip_special_tokens=False)


# Chats


def test_a_chat_has_the_room_that_there_is() -> None:
    asked = chat().asked
    assert text_of(asked.prompts[0]) == "<|user|>q<|end|><|assistant|>"
    assert asked.sampling.max_tokens == MAX_MODEL_LEN
    assert (asked.sampling.temperature, asked.sampling.logprobs) == (0.5, None)
    assert (asked.priority, asked.timeout_s, asked.cache_salt, asked.num_samples) == (0, 7.0, None, 1)


def test_the_newer_name_of_the_budget_wins() -> None:
    assert chat(max_tokens=5).asked.sampling.max_tokens == 5
    assert chat(max_completion_tokens=6).asked.sampling.max_tokens == 6
    assert chat(max_tokens=5, max_completion_tokens=6).asked.sampling.max_tokens == 6


@pytest.mark.parametrize(
    ("fields", "logprobs"),
    [
        ({}, None),
        ({"logprobs": False}, None),
        ({"logprobs": False, "top_logprobs": 0}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 0}, 0),
        ({"logprobs": True, "top_logprobs": 20}, 20),
    ],
)
def test_log_probabilities_of_a_chat(fields: dict[str, Any], logprobs: int | None) -> None:
    assert chat(**fields).asked.sampling.logprobs == logprobs


def test_variables_of_the_template() -> None:
    assert "(calm)" in text_of(chat(chat_template_kwargs={"mood": "calm"}).asked.prompts[0])
    with pytest.raises(RequestError, match="'messages'"):
        chat(chat_template_kwargs={"messages": []})


def test_effort_is_a_variable_that_the_others_may_set() -> None:
    def prompt(**fields: Any) -> str:
        tokenizer = byte_level_tokenizer("{{ messages[0].content }}{{ reasoning_effort }}")
        model = replace(MODEL, tokenizer=tokenizer)
        body = ChatCompletionRequest.model_validate({"messages": MESSAGES} | fields)
        return text_of(prepare_chat(body, model, None).asked.prompts[0])

    assert prompt() == "q"
    assert prompt(reasoning_effort="low") == "qlow"
    assert prompt(reasoning_effort="low", chat_template_kwargs={"reasoning_effort": "high"}) == "qhigh"


def test_turns_that_go_on_or_do_not_begin() -> None:
    told = [*MESSAGES, {"role": "assistant", "content": "yes"}]
    assert text_of(chat(add_generation_prompt=False).asked.prompts[0]) == "<|user|>q<|end|>"
    goes_on = chat(messages=told, continue_final_message=True).asked.prompts[0]
    assert text_of(goes_on) == "<|user|>q<|end|><|assistant|>yes"
    assert chat(messages=told, continue_final_message=True, add_generation_prompt=False).asked.prompts[0] == goes_on


def test_a_chat_that_is_too_long_is_never_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(MODEL.tokenizer), "encode", lambda *_, **__: pytest.fail("it was encoded"))
    with pytest.raises(FieldError, match="leaves no room for a new one") as caught:
        chat(messages=[{"role": "user", "content": "a" * 100_000}])
    assert caught.value.param == "messages"


THINKS = byte_level_tokenizer("{% for m in messages %}{{ m.content }}{% endfor %}<|assistant|><think>\n{# </think> #}")


def test_where_the_target_thinks_first_a_form_begins_behind_that() -> None:
    def prepared(model: ServedModel = MODEL, **fields: Any) -> PreparedChat:
        body = ChatCompletionRequest.model_validate({"messages": MESSAGES, **fields})
        return prepare_chat(body, model, timeout_s=None)

    form = {"response_format": {"type": "json_object"}}
    thinks = replace(MODEL, tokenizer=THINKS)
    structure = prepared(thinks, **form).asked.sampling.structured_output
    assert structure is not None and (structure.kind, structure.begins_after) == ("json_object", "</think>")
    assert isinstance(prepared(thinks).form.make_reader(), ThinkTags)
    quiet = prepared(replace(thinks, tells_reasoning=False), **form)
    structure = quiet.asked.sampling.structured_output
    assert structure is not None and structure.begins_after is None
    assert isinstance(quiet.form.make_reader(), PlainText)


def test_a_thought_that_goes_on_is_still_one() -> None:
    thinks = replace(MODEL, tokenizer=byte_level_tokenizer("{{ messages[-1].content }}{# </think> #}"))
    told = [*MESSAGES, {"role": "assistant", "content": [{"type": "text", "text": "<think>fir"}]}]
    body = ChatCompletionRequest.model_validate({"messages": told, "continue_final_message": True})
    form = prepare_chat(body, thinks, timeout_s=None).form
    assert read_whole(form.make_reader(), "st</think>Yes.") == ("st", "Yes.", [])


def test_tools_reach_template_and_grammar() -> None:
    prepared = chat(tools=CALLS, tool_choice="required")
    assert '"name": "f"' in text_of(prepared.asked.prompts[0])
    structure = prepared.asked.sampling.structured_output
    assert structure is not None and structure.kind == "grammar" and structure.begins_after is None
    assert isinstance(prepared.form.make_reader(), CallReader)
    hidden = chat(tools=CALLS, tool_choice="none")
    assert hidden.asked.prompts == chat().asked.prompts and isinstance(hidden.form.make_reader(), PlainText)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "q" * MAX_MODEL_LEN}]}, "messages"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"top_logprobs": -1, "logprobs": True}, "top_logprobs"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 5, "max_completion_tokens": -(10**5000)}, "max_completion_tokens"),
        ({"max_tokens": 5, "min_tokens": 6}, "min_tokens"),
        ({"n": 65}, "n"),
        ({"temperature": -1}, "temperature"),
        ({"tools": CALLS, "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "add_generation_prompt"),
        ({"messages": [{"role": "user", "content": ""}], "continue_final_message": True}, "continue_final_message"),
    ],
)
def test_impossible_chats(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(FieldError) as caught:
        chat(**fields)
    assert caught.value.param == param


# Completions


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [("ab", ["ab"]), (["ab", "c"], ["ab", "c"]), ([[104, 105], [106]], ["ab", "c"]), ([104, 105], ["ab"])],
)
def test_prompts_of_all_four_kinds(prompt: Any, texts: list[str]) -> None:
    assert [text_of(ids) for ids in completion(prompt=prompt).prompts] == texts


def test_a_completion_is_short_by_default() -> None:
    assert completion().sampling.max_tokens == DEFAULT_MAX_TOKENS == 16
    assert completion(max_tokens=3).sampling.max_tokens == 3
    assert completion(logprobs=2).sampling.logprobs == 2
    assert completion(logprobs=0).sampling.logprobs == 0


def test_queueing_is_passed_on() -> None:
    asked = completion(prompt=["a", "b", "c"], n=2, priority=-3, cache_salt="s")
    assert (asked.priority, asked.timeout_s, asked.cache_salt, asked.num_samples) == (-3, 7.0, "s", 6)


def test_special_tokens_around_a_prompt() -> None:
    tokenizer = byte_level_tokenizer.__wrapped__()
    tokenizer.backend.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", 0)]
    )
    model = replace(MODEL, tokenizer=tokenizer)

    def first_id(**fields: Any) -> int:
        body = CompletionRequest.model_validate({"prompt": "a"} | fields)
        return prepare_completion(body, model, None).prompts[0][0]

    assert first_id() == first_id(add_special_tokens=True) == 0
    assert first_id(add_special_tokens=False) == 104


def test_fields_that_change_nothing_are_no_fault() -> None:
    assert completion(echo=False, suffix="", best_of=1) == completion()
    assert completion(best_of=3, n=3) == completion(n=3)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [VOCAB_SIZE]}, "prompt"),
        ({"prompt": [[5], [10**5000]]}, "prompt"),
        ({"prompt": [5] * MAX_MODEL_LEN}, "prompt"),
        ({"prompt": ["a"] * (MOST_SAMPLES + 1)}, "prompt"),
        ({"prompt": ["a"] * 17, "n": 64}, "n"),
        ({"echo": True}, "echo"),
        ({"suffix": "b"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"logprobs": 33}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop": list("abcde")}, "stop"),
    ],
)
def test_impossible_completions(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(FieldError) as caught:
        completion(**fields)
    assert caught.value.param == param


def test_the_longest_prompt_and_the_most_answers() -> None:
    assert len(completion(prompt=[5] * (MAX_MODEL_LEN - 1)).prompts[0]) == MAX_MODEL_LEN - 1
    assert completion(prompt=["a"] * 16, n=64).num_samples == MOST_SAMPLES
