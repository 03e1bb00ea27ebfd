"""Fields reach the engine as they were meant, and what is impossible is refused with its name."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from paceline.checkpoint.generation_defaults import SamplingDefaults
from paceline.engine.sampling import SamplingParameters
from paceline.engine.structured import StructuredOutput
from paceline.errors import CompatibilityError, RequestError
from paceline.serving.fields import FieldError, UnknownFields, named, sampling_of
from paceline.serving.protocol import ChatCompletionRequest, CompletionRequest, SamplingFields, TokenizeRequest

DEFAULTS = SamplingDefaults(temperature=0.7, top_p=0.9, top_k=20, min_p=0.1, repetition_penalty=1.1)
SAME_VALUES: dict[str, Any] = {
    "min_tokens": 3,
    "temperature": 0.3,
    "top_p": 0.5,
    "top_k": 7,
    "min_p": 0.2,
    "seed": -4,
    "n": 2,
    "include_stop_str_in_output": True,
    "ignore_eos": True,
    "frequency_penalty": 0.5,
    "presence_penalty": -0.5,
    "repetition_penalty": 1.5,
    "draft_length": "off",
}
HALF_A_PAIR = "\ud800"


def sampling(logprobs: int | None = None, structure: StructuredOutput | None = None, **fields: Any) -> Any:
    body = SamplingFields.model_validate(fields)
    return sampling_of(body, DEFAULTS, max_tokens=fields.get("max_tokens", 9), logprobs=logprobs, structure=structure)


def test_what_a_request_leaves_open_is_the_models() -> None:
    assert sampling() == SamplingParameters(
        max_tokens=9, temperature=0.7, top_p=0.9, top_k=20, min_p=0.1, repetition_penalty=1.1
    )


@pytest.mark.parametrize("name", SAME_VALUES)
def test_fields_of_the_same_name(name: str) -> None:
    assert getattr(sampling(**{name: SAME_VALUES[name]}), name) == SAME_VALUES[name]
    assert sampling(**{name: None}) == sampling()


def test_falsy_values_are_values() -> None:
    found = sampling(temperature=0, top_k=0, min_p=0.0, seed=0)
    assert (found.temperature, found.top_k, found.min_p, found.seed) == (0.0, 0, 0.0, 0)
    assert sampling(top_k=-1).top_k == 0  # for "all"


def test_null_is_the_same_as_absent() -> None:
    for model, needed in (
        (ChatCompletionRequest, {"messages": [{"role": "user", "content": "a"}]}),
        (CompletionRequest, {"prompt": "a"}),
        (TokenizeRequest, {}),
    ):
        names = set(model.model_fields) - set(needed)
        body = model.model_validate(needed | dict.fromkeys(names))
        assert body == model.model_validate(needed)
        assert body.unknown_fields == ()


def test_null_in_calls_of_a_message() -> None:
    call = {"function": {"name": "f", "arguments": None}, "id": None, "type": None}
    message = {"role": "assistant", "content": None, "tool_call_id": None, "tool_calls": [call]}
    (found,) = ChatCompletionRequest.model_validate({"messages": [message]}).messages
    assert found.tool_calls is not None and found.tool_calls[0].function.arguments is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", "0.5"),
        ("temperature", True),
        ("temperature", 10**400),
        ("top_k", 1.5),
        ("top_k", True),
        ("n", "1"),
        ("stream", "true"),
        ("stream", 1),
        ("ignore_eos", 0),
        ("stop", 5),
        ("stop", [5]),
        ("stop", {"a": 1}),
        ("stop_token_ids", ["5"]),
        ("stop_token_ids", [5.0]),
        ("logit_bias", [1]),
        ("logit_bias", {"5": "1"}),
        ("user", 5),
        ("draft_length", "long"),
        ("draft_length", 4),
        ("response_format", "json_object"),
        ("response_format", {"type": "xml"}),
        ("response_format", {}),
        ("structured_outputs", {"choice": "a"}),
        ("stream_options", {"include_usage": "yes"}),
        ("metadata", "m"),
    ],
)
def test_wrong_types_are_refused(name: str, value: object) -> None:
    with pytest.raises(ValidationError) as caught:
        SamplingFields.model_validate({name: value})
    assert {error["loc"][0] for error in caught.value.errors()} == {name}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("prompt", [5] * 9 + ["x"] * 9),
        ("prompt", ["x"] * 9 + [5] * 9),
        ("prompt", [["x"] * 9] * 9),
        ("stop", [5] * 9),
        ("stop_token_ids", ["x"] * 9),
        ("allowed_token_ids", [1.5] * 9),
        ("bad_words", [None] * 9),
    ],
)
def test_one_fault_of_a_list_is_told(name: str, value: object) -> None:
    """A list of millions would come to as many messages."""
    with pytest.raises(ValidationError) as caught:
        CompletionRequest.model_validate({"prompt": "a", name: value})
    assert len(caught.value.errors()) <= 4  # one for each kind that it might have been


def test_one_fault_of_messages_and_tools_is_told() -> None:
    for body in ({"messages": [5] * 9}, {"messages": [], "tools": [{}] * 9}):
        with pytest.raises(ValidationError) as caught:
            ChatCompletionRequest.model_validate(body)
        assert len(caught.value.errors()) <= 2


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 2**63}, "top_k"),
        ({"min_p": -1}, "min_p"),
        ({"min_p": 2}, "min_p"),
        ({"seed": 2**63}, "seed"),
        ({"seed": -(10**5000)}, "seed"),
        ({"n": 0}, "n"),
        ({"n": 65}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 10}, "min_tokens"),
        ({"frequency_penalty": 2.1}, "frequency_penalty"),
        ({"presence_penalty": -2.1}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop"),
        ({"stop": list("abcde")}, "stop"),
        ({"stop": HALF_A_PAIR}, "stop"),
        ({"bad_words": [""]}, "bad_words"),
        ({"bad_words": ["a"] * 1025}, "bad_words"),
        ({"bad_words": [HALF_A_PAIR]}, "bad_words"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"logit_bias": {"1": float("nan")}}, "logit_bias"),
        ({"logit_bias": {str(token): 1 for token in range(1025)}}, "logit_bias"),
        ({"logprobs": 33}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": False}}}, "response_format"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": "5"}}, "structured_outputs.json"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": HALF_A_PAIR}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": [""]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"grammar": ""}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice"),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "structured_outputs.regex",
        ),
    ],
)
def test_impossible_values_are_refused_with_their_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(FieldError) as caught:
        sampling(fields.pop("logprobs", None), **fields)
    assert caught.value.param == param
    assert caught.value.http_status == 400


def test_schemas_that_are_nested_too_deeply_are_refused() -> None:
    deep: dict[str, Any] = {}
    for _ in range(100_000):
        deep = {"not": deep}
    for fields, param in (
        ({"structured_outputs": {"json": deep}}, "structured_outputs.json"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": deep}}}, "response_format"),
    ):
        with pytest.raises(FieldError, match="too deeply") as caught:
            sampling(**fields)
        assert caught.value.param == param
    while deep:  # from outside in, since freeing it all at once would recurse
        deep = deep.pop("not")


def test_stop_texts() -> None:
    assert sampling(stop="ab").stop == ("ab",)
    assert sampling(stop=["a", "b", "c", "d"]).stop == ("a", "b", "c", "d")
    assert sampling(stop=[]).stop == sampling(stop=None).stop == ()
    assert sampling(stop="\n\n").stop == ("\n\n",)


@given(st.dictionaries(st.integers(0, 10**18 - 1), st.floats(-100, 100), min_size=1, max_size=20))
def test_biases(biases: dict[int, float]) -> None:
    found = sampling(logit_bias={str(token): bias for token, bias in biases.items()})
    assert dict(found.bias_pairs) == biases


@pytest.mark.parametrize("key", ["", "a", "-1", "1.0", " 1", "1_0", "+1", "٣", "9" * 19, "1" * 5000, HALF_A_PAIR])
def test_keys_of_biases_are_token_ids(key: str) -> None:
    with pytest.raises(FieldError, match="no token id") as caught:
        sampling(logit_bias={key: 1.0})
    assert caught.value.param == "logit_bias"


def test_biases_name_a_token_once() -> None:
    with pytest.raises(FieldError, match="twice"):
        sampling(logit_bias={"7": 1.0, "07": 2.0})
    assert sampling(logit_bias={}) == sampling()


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, StructuredOutput("json_object")),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "null"}}}},
            StructuredOutput("json_schema", '{"type": "null"}'),
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": True}}},
            StructuredOutput("json_schema", "true"),
        ),
        ({"structured_outputs": {"json": {"const": 'é"'}}}, StructuredOutput("json_schema", '{"const": "\\u00e9\\""}')),
        ({"structured_outputs": {"json": "{}"}}, StructuredOutput("json_schema", "{}")),
        ({"structured_outputs": {"json_object": True}}, StructuredOutput("json_object")),
        ({"structured_outputs": {"regex": "a+"}}, StructuredOutput("regex", "a+")),
        ({"structured_outputs": {"choice": ["a", "b"]}}, StructuredOutput("choice", ("a", "b"))),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, StructuredOutput("grammar", 'start: "a"')),
        (
            {"response_format": {"type": "text"}, "structured_outputs": {"regex": "a", "choice": None}},
            StructuredOutput("regex", "a"),
        ),
    ],
)
def test_forms_of_the_text(fields: dict[str, Any], wanted: StructuredOutput | None) -> None:
    assert sampling(**fields).structured_output == wanted


def test_a_form_that_follows_from_other_fields_wins() -> None:
    structure = StructuredOutput("regex", "a")
    assert sampling(structure=structure).structured_output is structure


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("stop_token_ids holds 512; the vocabulary has 512 ids", "stop_token_ids"),
        ("an entry of stop_token_ids is -1; it has to be at least 0", "stop_token_ids"),
        ("logit_bias: something", "logit_bias"),
        ("the prompt is empty", None),
        ("", None),
        ("an entry of ", None),
    ],
)
def test_errors_of_the_engine_get_the_field_they_begin_with(message: str, param: str | None) -> None:
    found = named(RequestError(message, hint="h"))
    assert getattr(found, "param", None) == param
    assert (found.message, found.hint) == (message, "h")
    own = FieldError("n is 0", param="something.else")
    assert named(own) is own
    assert not isinstance(CompatibilityError("n is 0"), RequestError)


# Fields that nobody knows


def test_unknown_fields_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    unknown = UnknownFields()
    fields = {"top_q": 1, "stream_options": {"other": 2}, "response_format": {"type": "text", "json_schema": {"x": 1}}}
    with caplog.at_level(logging.WARNING, logger="paceline"):
        for _ in range(3):
            unknown.note(SamplingFields.model_validate(fields))
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 3
    for name in ("'top_q'", "'stream_options.other'", "'response_format.json_schema.x'"):
        assert sum(name in text for text in said) == 1


def test_what_the_template_gets_is_not_unknown() -> None:
    body = {
        "messages": [{"role": "user", "content": "a", "name": "b"}],
        "tools": [{"type": "function", "function": {"name": "f", "x": 1}, "y": 2}],
    }
    assert ChatCompletionRequest.model_validate(body).unknown_fields == ()


def test_unknown_names_neither_fill_the_log_nor_the_memory(caplog: pytest.LogCaptureFixture) -> None:
    unknown = UnknownFields()
    with caplog.at_level(logging.WARNING, logger="paceline"):
        unknown.note(SamplingFields.model_validate({f"{index:05d}{'x' * 10_000}": 1 for index in range(1500)}))
        unknown.note(SamplingFields.model_validate({"one\nmore": 1}))
    assert len(caplog.records) == 1000
    assert max(len(record.getMessage()) for record in caplog.records) < 400
    assert sum(map(len, unknown._said)) < 1000 * 250
