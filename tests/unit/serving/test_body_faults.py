"""Each fault of a body in one sentence, at the place that its sender knows."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, Field, ValidationError, field_validator

from paceline.serving.body_faults import say_faults


class Part(BaseModel):
    type: Literal["text", "image"]
    text: str


class Message(BaseModel):
    role: str
    content: str | list[Part] | None = None


class Named(BaseModel):
    type: Literal["function"]
    name: str


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int


class Dog(BaseModel):
    kind: Literal["dog"]
    name: str


class Question(BaseModel, extra="forbid", strict=True):
    messages: list[Message] = Field(default_factory=list, max_length=3)
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] = 1.0
    top_p: Annotated[float, Field(gt=0, lt=9)] = 1.0
    n: int = 1
    stream: bool = False
    user: str = Field("u", min_length=1, pattern="^[a-z]*$")
    stop: str | list[str] | None = None
    prompt: str | list[str] | list[int] | list[list[int]] = ""
    tool_choice: Literal["none", "auto"] | Named | None = None
    bias: dict[str, float] = Field(default_factory=dict)
    pet: Annotated[Cat | Dog, Field(discriminator="kind")] | None = None
    checked: int = 0
    nothing: None = None

    @field_validator("checked")
    @classmethod
    def _is_even(cls, value: int) -> int:
        if value % 2:
            raise ValueError(f"checked is {value}, which is odd" + "!" * 1000)
        return value


def said(body: object) -> tuple[str, str | None]:
    """As FastAPI hands it over: "body" before each place."""
    with pytest.raises(ValidationError) as caught:
        Question.model_validate(body)
    details = [{**detail, "loc": ("body", *detail["loc"])} for detail in caught.value.errors(include_url=False)]
    return say_faults(details, body)


CASES: list[tuple[dict[str, Any], str, str]] = [
    ({"temperature": "hot"}, "temperature", 'temperature is "hot"; it has to be a number'),
    ({"temperature": -1}, "temperature", "temperature is -1; it has to be at least 0.0"),
    ({"temperature": 3.5}, "temperature", "temperature is 3.5; it has to be at most 2.0"),
    ({"temperature": float("nan")}, "temperature", "temperature is nan; it has to be a finite number"),
    ({"top_p": 0}, "top_p", "top_p is 0; it has to be above 0.0"),
    ({"top_p": 9}, "top_p", "top_p is 9; it has to be below 9.0"),
    ({"n": 1.5}, "n", "n is 1.5; it has to be an integer"),
    ({"n": None}, "n", "n is null; it has to be an integer"),
    ({"n": {"a": "secret"}}, "n", "n is an object; it has to be an integer"),
    ({"stream": "yes"}, "stream", 'stream is "yes"; it has to be true or false'),
    ({"user": 5}, "user", "user is 5; it has to be a string"),
    ({"user": ""}, "user", 'user is ""; it has to be a string of at least 1 characters'),
    ({"user": "A"}, "user", 'user is "A"; it has to be a string that matches ^[a-z]*$'),
    ({"nothing": 1}, "nothing", "nothing is 1; it has to be null"),
    ({"messages": {}}, "messages", "messages is an object; it has to be an array"),
    ({"messages": [1]}, "messages[0]", "messages[0] is 1; it has to be an object"),
    ({"messages": [{}]}, "messages[0].role", "messages[0].role is missing; it has to be given"),
    (
        {"messages": [{"role": "a"}] * 4},
        "messages",
        "messages is an array; it has to be an array of at most 3 entries",
    ),
    ({"unknown": 1}, "unknown", "unknown is no field of this request"),
    ({"bias": {"50": "a"}}, "bias.50", 'bias.50 is "a"; it has to be a number'),
    # Of unions
    ({"stop": 5}, "stop", "stop is 5; it has to be a string or an array"),
    ({"stop": ["a", 5]}, "stop[1]", "stop[1] is 5; it has to be a string"),
    ({"prompt": [*range(50), "a"]}, "prompt[50]", 'prompt[50] is "a"; it has to be an integer'),
    ({"prompt": [[1, 2], [3, True]]}, "prompt[1][1]", "prompt[1][1] is true; it has to be an integer"),
    (
        {"tool_choice": "some"},
        "tool_choice",
        "tool_choice is \"some\"; it has to be one of 'none' or 'auto' or an object",
    ),
    ({"tool_choice": {"type": "function"}}, "tool_choice.name", "tool_choice.name is missing; it has to be given"),
    (
        {"tool_choice": {"type": "x", "name": "f"}},
        "tool_choice.type",
        "tool_choice.type is \"x\"; it has to be 'function'",
    ),
    (
        {"messages": [{"role": "a", "content": [{"type": "text", "text": 1}]}]},
        "messages[0].content[0].text",
        "messages[0].content[0].text is 1; it has to be a string",
    ),
    (
        {"messages": [{"role": "a", "content": [{"type": "text"}]}]},
        "messages[0].content[0].text",
        "messages[0].content[0].text is missing; it has to be given",
    ),
    ({"pet": {"kind": "cat"}}, "pet.lives", "pet.lives is missing; it has to be given"),
    ({"pet": {"kind": "cow"}}, "pet", "pet.kind is \"cow\"; it has to be one of 'cat', 'dog'"),
    ({"pet": {}}, "pet", "pet.kind is missing; it has to be given"),
]


@pytest.mark.parametrize(("body", "param", "message"), CASES)
def test_a_fault_is_one_sentence_at_its_place(body: dict[str, Any], param: str, message: str) -> None:
    assert said(body) == (message, param)


def test_several_faults_are_told_in_order() -> None:
    message, param = said({"n": "a", "stream": 1, "stop": 5})
    assert param == "n"
    assert message.split(". ") == [
        'n is "a"; it has to be an integer',
        "stream is 1; it has to be true or false",
        "stop is 5; it has to be a string or an array",
    ]


def test_many_faults_are_counted() -> None:
    message, param = said({"stop": list(range(1000))})
    assert param == "stop[0]"
    assert message.endswith(". 995 more faults are like these")
    assert message.count("it has to be") == 5


@pytest.mark.parametrize(
    "body",
    [
        {"n": "x" * 100_000},
        {"n": "\u00e9" * 100_000},
        {"n": '"\\' * 100_000},
        {"n": "\ud800" * 100_000},
        {"n": ["x" * 100_000]},
        {"x" * 100_000: 1},
        {"bias": {"x" * 100_000: "y" * 100_000}},
        {"pet": {"kind": "x" * 100_000}},
        {"stop": {"x" * 100_000: 1}},
        {"user": "X" * 100_000},
        {"checked": 3},
        {"n": {"x": "y" * 100_000}},
    ],
)
def test_no_value_is_echoed_at_length(body: dict[str, Any]) -> None:
    message, param = said(body)
    assert len(message) < 500
    assert param is not None and len(param) <= 200


def test_a_long_text_is_cut_and_says_so() -> None:
    message, _ = said({"n": "x" * 201})
    assert message == 'n is "' + "x" * 189 + " and so on; it has to be an integer"
    message, _ = said({"n": "x" * 198})
    assert message == 'n is "' + "x" * 198 + '"; it has to be an integer'


def test_a_number_of_thousands_of_digits_can_be_told() -> None:
    message, _ = said({"user": 10**5000})
    assert message.startswith("user is a value of type int that cannot be shown")


def test_what_a_validator_says_is_passed_on_in_short() -> None:
    message, param = said({"checked": 3})
    assert param == "checked"
    assert message.startswith("checked: checked is 3, which is odd!!!")
    assert message.endswith("!!! and so on")


@pytest.mark.parametrize("body", [[], 5, "text", None, True])
def test_a_body_of_another_kind_has_no_field(body: object) -> None:
    message, param = said(body)
    assert param is None
    assert message.startswith("the body is ") and message.endswith("; it has to be an object")


def test_a_parameter_of_the_address_is_named_without_its_part() -> None:
    detail = {"type": "int_parsing", "loc": ("query", "limit"), "msg": "", "input": "a"}
    assert say_faults([detail], None) == ('limit is "a"; it has to be an integer', "limit")


def test_a_list_without_faults_is_no_fault_of_ours() -> None:
    assert say_faults(RequestValidationError([]).errors(), None) == ("the request is not valid", None)
