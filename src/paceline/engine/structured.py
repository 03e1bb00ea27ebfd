"""What a caller may ask a request's text to match."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Literal, get_args

from paceline.errors import RequestError, shown

StructuredKind = Literal["json_schema", "json_object", "regex", "choice", "grammar"]


@dataclass(frozen=True)
class StructuredOutput:
    """The form that a request's text has to have; checked on construction, compiled when the request is added.

    Attributes:
        kind: "json_schema" (a value that the schema accepts), "json_object" (any JSON object), "regex" (the whole text
            matches), "choice" (one of several texts) or "grammar" (Lark, as llguidance reads it).
        value: the schema as JSON text, "" for "json_object", the regular expression, the texts, or the Lark text.
        begins_after: text after which the form begins, such as the end of a reasoning part; before it, text is free and
            may not stop. None begins at once.
    Raises:
        RequestError: a value that can't be right whatever the tokenizer; the message names it.
    """

    kind: StructuredKind
    value: str | tuple[str, ...] = ""
    begins_after: str | None = None

    def __post_init__(self) -> None:
        if self.kind not in get_args(StructuredKind):
            known = ", ".join(get_args(StructuredKind))
            raise RequestError(f"structured output has the kind {shown(self.kind)}; supported are {known}")
        if self.kind == "choice":
            object.__setattr__(self, "value", _checked_choices(self.value))
        elif not isinstance(self.value, str):
            raise RequestError(
                f"structured output of kind {self.kind} has the value {shown(self.value)}, expected a text"
            )
        elif self.kind == "json_object":
            if self.value:
                raise RequestError(
                    f"structured output of kind json_object has the value {shown(self.value)}, which it takes none of",
                    hint='kind="json_schema" for a schema',
                )
        elif not self.value:
            raise RequestError(f"structured output of kind {self.kind} has an empty value")
        else:
            require_encodable("the value", self.value)
            if self.kind == "json_schema":
                _check_schema_text(self.value)
        _check_marker(self.begins_after)


def _check_marker(marker: object) -> None:
    if marker is None:
        return
    if not isinstance(marker, str) or not marker:
        raise RequestError(f"begins_after is {shown(marker)}; it has to be a text, not an empty one")
    require_encodable("begins_after", marker)


def _checked_choices(value: object) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, tuple | list):
        raise RequestError(
            f"the choices are {shown(value)}; they have to be a sequence of texts", hint='value=("yes", "no")'
        )
    if not value:
        raise RequestError("the choices are empty; at least one text is needed")
    for index, text in enumerate(value):
        if not isinstance(text, str) or not text:
            raise RequestError(f"choice {index} is {shown(text)}; it has to be a text of at least one character")
        require_encodable(f"choice {index}", text)
    return tuple(value)


def _check_schema_text(text: str) -> None:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the JSON schema is not JSON: {error}") from error
    if schema is False:
        raise RequestError("the JSON schema is false, which no value satisfies")
    if schema is not True and not isinstance(schema, dict):
        raise RequestError(f"the JSON schema is {text[:80]!r}; a schema is an object, true or false")


def require_encodable(name: str, text: str) -> None:
    """Refuse a text that no tokenizer can read.

    Args:
        name: what it is, for the message.
        text: from a caller.
    Raises:
        RequestError: it holds half a surrogate pair.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"{name} is {shown(text)}; half a surrogate pair cannot be written as UTF-8") from error
