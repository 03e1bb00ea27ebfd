from __future__ import annotations

from typing import Any

import pytest

from paceline.engine.structured import StructuredOutput
from paceline.errors import RequestError


def test_a_form_is_a_value_that_can_be_compared_and_hashed() -> None:
    choices: Any = ["yes", "no"]
    assert StructuredOutput("choice", choices) == StructuredOutput("choice", ("yes", "no"))
    assert len({StructuredOutput("choice", choices), StructuredOutput("choice", ("yes", "no"))}) == 1


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("json_schema", '{"type": "integer"}'),
        ("json_schema", "true"),
        ("json_object", ""),
        ("regex", "[0-9]+"),
        ("choice", ("é", "no")),
        ("grammar", 'start: "a"'),
    ],
)
def test_every_kind_takes_a_sound_value(kind: Any, value: Any) -> None:
    assert StructuredOutput(kind, value, begins_after="</think>").value == value


@pytest.mark.parametrize(
    ("kind", "value", "names"),
    [
        ("xml", "<a/>", "'xml'.*json_schema, json_object, regex, choice, grammar"),
        ("json_schema", "", "empty value"),
        ("json_schema", "{", "not JSON"),
        ("json_schema", "[" * 100_000, "not JSON"),
        ("json_schema", "[1]", "object, true or false"),
        ("json_schema", "false", "no value satisfies"),
        ("json_schema", {"type": "integer"}, "expected a text"),
        ("json_schema", '{"const": "\ud800"}', "surrogate"),
        ("json_object", "{}", "takes none"),
        ("regex", "", "empty value"),
        ("regex", 3, "expected a text"),
        ("regex", "\udfff", "surrogate"),
        ("choice", (), "empty"),
        ("choice", "yes", "several texts|sequence of texts"),
        ("choice", ("yes", ""), "choice 1"),
        ("choice", ("yes", 3), "choice 1"),
        ("choice", ("yes", "\ud800"), "choice 1.*surrogate"),
        ("grammar", "", "empty value"),
    ],
)
def test_impossible_values_are_refused_by_name(kind: Any, value: Any, names: str) -> None:
    with pytest.raises(RequestError, match=names):
        StructuredOutput(kind, value)


@pytest.mark.parametrize("begins_after", ["", 3, "\ud800"])
def test_the_marker_is_a_text(begins_after: Any) -> None:
    with pytest.raises(RequestError, match="begins_after"):
        StructuredOutput("regex", "a", begins_after=begins_after)
