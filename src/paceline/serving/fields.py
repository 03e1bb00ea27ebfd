"""What a request's fields ask for, as the engine takes it: sampling parameters, with the field that is wrong named."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.checkpoint.generation_defaults import SamplingDefaults
from paceline.engine.sampling import SamplingParameters
from paceline.engine.structured import StructuredOutput
from paceline.errors import RequestError, shown
from paceline.serving.protocol import Body, ResponseFormat, SamplingFields, StructuredOutputs

MAX_STOP_TEXTS = 4  # the rule of the OpenAI API
_SAME_NAME = (
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "n",
    "include_stop_str_in_output",
    "ignore_eos",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "draft_length",
)
_MOST_UNKNOWN_FIELDS = 1000  # that are remembered
_log = logging.getLogger(__name__)


class FieldError(RequestError):
    """A field of a request asks for something impossible.

    Args:
        message: as for any error.
        param: the field.
        hint: what to try.
    """

    def __init__(self, message: str, *, param: str, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.param = param


class UnknownFields:
    """Says once of each field that clients send and nobody knows that it changes nothing."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def note(self, body: Body) -> None:
        """Look at one body."""
        for name in map(shown, body.unknown_fields):  # cut, as the names are the clients' and may be of any length
            if name not in self._said and len(self._said) < _MOST_UNKNOWN_FIELDS:
                self._said.add(name)
                _log.warning("requests have the field %s, which is not known here and changes nothing", name)


def sampling_of(
    body: SamplingFields,
    defaults: SamplingDefaults,
    *,
    max_tokens: int,
    logprobs: int | None,
    structure: StructuredOutput | None = None,
) -> SamplingParameters:
    """Sampling parameters of a request.

    Args:
        body: of either kind.
        defaults: for what it leaves open.
        max_tokens: of an answer.
        logprobs: as `SamplingParameters` takes it.
        structure: a form of the text that follows from other fields; the body's own otherwise.
    Raises:
        FieldError: a value is impossible.
    """
    values: dict[str, Any] = dataclasses.asdict(defaults)
    values |= {name: value for name in _SAME_NAME if (value := getattr(body, name)) is not None}
    values |= {
        "max_tokens": max_tokens,
        "stop": _stop_texts(body.stop),
        "stop_token_ids": tuple(body.stop_token_ids or ()),
        "bad_words": tuple(body.bad_words or ()),
        "logprobs": logprobs,
        "structured_output": structure or structured_output(body.response_format, body.structured_outputs),
    }
    if values.get("top_k") == -1:  # what many clients send for "all"
        values["top_k"] = 0
    if body.allowed_token_ids is not None:
        values["allowed_token_ids"] = tuple(body.allowed_token_ids)
    if body.logit_bias:
        values["logit_bias"] = _biases(body.logit_bias)
    try:
        return SamplingParameters(**values)
    except RequestError as error:
        raise named(error) from error


def named(error: RequestError) -> RequestError:
    """The same error with the field that its message begins with, if it is one."""
    words = error.message.removeprefix("an entry of ").split(maxsplit=1)
    name = words[0].rstrip(":;,") if words else ""
    if isinstance(error, FieldError) or name not in SamplingParameters.__dataclass_fields__:
        return error
    return FieldError(error.message, param=name, hint=error.hint)


def structured_output(form: ResponseFormat | None, wider: StructuredOutputs | None) -> StructuredOutput | None:
    """The form that the text must have.

    Raises:
        FieldError: two forms at once, or one that says nothing.
    """
    asked = [*_response_format(form), *_structured_outputs(wider)]
    if len(asked) > 1:
        first, second = (param for param, _, _ in asked[:2])
        raise FieldError(f"{first} and {second} both say what the text must look like; give one", param=second)
    for param, kind, value in asked:
        try:
            return StructuredOutput(kind, value)
        except RequestError as error:
            raise FieldError(error.message, param=param, hint=error.hint) from error
    return None


def as_json(value: object, what: str, param: str) -> str:
    """JSON text of a value that came as JSON.

    Args:
        value: of a request.
        what: it is, for the message.
        param: the field that holds it.
    Raises:
        FieldError: it is nested too deeply.
    """
    try:
        return json.dumps(value)
    except RecursionError as error:
        raise FieldError(f"{what} cannot be written as JSON: it is nested too deeply", param=param) from error


def _response_format(form: ResponseFormat | None) -> list[tuple[str, Any, Any]]:
    if form is None or form.type == "text":
        return []
    if form.type == "json_object":
        return [("response_format", "json_object", "")]
    if form.json_schema is None or form.json_schema.schema_ is None:
        raise FieldError(
            "response_format is of type json_schema and has no schema",
            param="response_format.json_schema.schema",
            hint='{"type": "json_schema", "json_schema": {"name": "answer", "schema": {}}}',
        )
    return [("response_format", "json_schema", _schema_text(form.json_schema.schema_, "response_format"))]


def _structured_outputs(wider: StructuredOutputs | None) -> list[tuple[str, Any, Any]]:
    if wider is None:
        return []
    schema = wider.json_
    if schema is not None and not isinstance(schema, str):
        schema = _schema_text(schema, "structured_outputs.json")
    asked: Sequence[tuple[str, str, object]] = (
        ("json", "json_schema", schema),
        ("json_object", "json_object", "" if wider.json_object else None),
        ("regex", "regex", wider.regex),
        ("choice", "choice", None if wider.choice is None else tuple(wider.choice)),
        ("grammar", "grammar", wider.grammar),
    )
    found = [(f"structured_outputs.{name}", kind, value) for name, kind, value in asked if value is not None]
    if not found:
        known = ", ".join(name for name, _, _ in asked)
        raise FieldError(
            "structured_outputs says nothing of the text", param="structured_outputs", hint=f"one of {known}"
        )
    return found


def _schema_text(schema: object, param: str) -> str:
    return as_json(schema, "the JSON schema", param)


def _stop_texts(stop: str | list[str] | None) -> tuple[str, ...]:
    texts = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(texts) > MAX_STOP_TEXTS:
        raise FieldError(f"stop has {len(texts)} texts; at most {MAX_STOP_TEXTS} are possible", param="stop")
    return texts


def _biases(biases: Mapping[str, float]) -> dict[int, float]:
    found: dict[int, float] = {}
    for token, bias in biases.items():
        if not (token.isascii() and token.isdecimal() and len(token) < 19):
            raise FieldError(f"logit_bias has the key {shown(token)}, which is no token id", param="logit_bias")
        if int(token) in found:
            raise FieldError(f"logit_bias names token {int(token)} twice", param="logit_bias")
        found[int(token)] = bias
    return found
