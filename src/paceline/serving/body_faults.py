"""What is wrong with a body, in sentences: from the faults that pydantic lists to what a client can mend.

A place is known by walking down the body itself, since pydantic puts the names of union members, which no client knows,
between the keys. Of a union, the member that fits best speaks: one that found its faults further inside, and fewest.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.errors import shown

MOST_TOLD = 5  # faults
_LONGEST = 300  # characters of what pydantic or a validator says

_KINDS = {
    "string": "a string",
    "int": "an integer",
    "float": "a number",
    "finite": "a finite number",
    "bool": "true or false",
    "list": "an array",
    "tuple": "an array",
    "dict": "an object",
    "mapping": "an object",
    "model": "an object",
    "none": "null",
}
_BOUNDS = {
    "greater_than": ("above", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("below", "lt"),
    "less_than_equal": ("at most", "le"),
}
_LENGTHS = {
    "too_short": ("an array of at least", "min_length", "entries"),
    "too_long": ("an array of at most", "max_length", "entries"),
    "string_too_short": ("a string of at least", "min_length", "characters"),
    "string_too_long": ("a string of at most", "max_length", "characters"),
}


@dataclass(frozen=True)
class _Fault:
    """One entry of pydantic's list.

    Attributes:
        place: keys and indices that are in the body, or would be.
        member: how many of them lie before the first name of a union member, and that name; None outside of unions.
        detail: the entry.
    """

    place: tuple[str | int, ...]
    member: tuple[int, str] | None
    detail: Mapping[str, Any]

    @property
    def is_inside(self) -> bool:
        """Whether it lies further inside than the union itself."""
        return self.member is not None and len(self.place) > self.member[0]


def say_faults(details: Sequence[Mapping[str, Any]], body: object) -> tuple[str, str | None]:
    """Sentences for a list of faults.

    Args:
        details: as pydantic lists them, with the part of the request ("body", "query", "path") before each place.
        body: the JSON value that was read, or what came instead of one.

    Returns:
        The message, and the field of the first fault; None where it is the whole body.
    """
    by_place: dict[tuple[str | int, ...], list[_Fault]] = {}
    for fault in _best_members([_located(detail, body) for detail in details]):
        by_place.setdefault(fault.place, []).append(fault)
    if not by_place:
        return "the request is not valid", None
    sentences = [_sentence(_dotted(place), faults) for place, faults in list(by_place.items())[:MOST_TOLD]]
    if len(by_place) > MOST_TOLD:
        sentences.append(f"{len(by_place) - MOST_TOLD} more faults are like these")
    return ". ".join(sentences), _dotted(next(iter(by_place))) or None


def _located(detail: Mapping[str, Any], body: object) -> _Fault:
    part, *location = detail["loc"] or ("",)
    if detail["type"] == "json_invalid":
        return _Fault((), None, detail)
    if part != "body":
        return _Fault(tuple(location), None, detail)
    place: list[str | int] = []
    member: tuple[int, str] | None = None
    inside: Any = body
    for index, key in enumerate(location):
        is_last = index == len(location) - 1
        if _holds(inside, key):
            inside = inside[key]
        elif not (is_last and detail["type"] == "missing"):
            member = member or (len(place), str(key))
            continue
        place.append(key)
    return _Fault(tuple(place), member, detail)


def _holds(value: object, key: str | int) -> bool:
    if isinstance(value, Mapping):
        return key in value
    return isinstance(value, list) and isinstance(key, int) and key < len(value)


def _best_members(faults: Sequence[_Fault]) -> list[_Fault]:
    """Leave out what other members of a union say where one of them fits better."""
    counts: dict[tuple[str | int, ...], dict[str, int]] = {}
    for fault in faults:
        if fault.member is not None and fault.is_inside:
            of_union = counts.setdefault(fault.place[: fault.member[0]], {})
            of_union[fault.member[1]] = of_union.get(fault.member[1], 0) + 1
    best = {union: min(members, key=members.__getitem__) for union, members in counts.items()}
    return [
        fault
        for fault in faults
        if fault.member is None or best.get(fault.place[: fault.member[0]], fault.member[1]) == fault.member[1]
    ]


def _sentence(name: str, faults: Sequence[_Fault]) -> str:
    """What is wrong at one place; several members of a union may each have expected something there."""
    detail = faults[0].detail
    kind, context = detail["type"], detail.get("ctx") or {}
    if kind == "json_invalid":
        return f"the body is not valid JSON: {str(context.get('error', '')).lower()} at character {detail['loc'][-1]}"
    if kind == "missing":
        return f"{name} is missing; it has to be given" if name else "the request has no body; send a JSON object"
    if kind == "extra_forbidden":
        return f"{name} is no field of this request"
    if kind == "union_tag_invalid":
        tag = _as_json(context.get("tag"))
        return f"{_tagged(name, context)} is {tag}; it has to be one of {context.get('expected_tags')}"
    if kind == "union_tag_not_found":
        return f"{_tagged(name, context)} is missing; it has to be given"
    value = detail.get("input")
    if not name and isinstance(value, bytes):
        return "the body is not sent as JSON; its Content-Type has to be application/json"
    wanted = [_wanted(fault.detail["type"], fault.detail.get("ctx") or {}) for fault in faults]
    known = list(dict.fromkeys(text for text in wanted if text is not None))
    subject = name or "the body"
    if known:
        return f"{subject} is {_as_json(value)}; it has to be {' or '.join(known)}"
    message = str(detail.get("msg", "")).removeprefix("Value error, ").removeprefix("Assertion failed, ")
    return f"{subject}: {_cut(message[:1].lower() + message[1:], _LONGEST)}"


def _wanted(kind: str, context: Mapping[str, Any]) -> str | None:
    """How "it has to be" goes on; None for faults that have their own words."""
    if kind in _BOUNDS:
        words, key = _BOUNDS[kind]
        return f"{words} {context[key]}"
    if kind in _LENGTHS:
        words, key, things = _LENGTHS[kind]
        return f"{words} {context[key]} {things}"
    if kind in ("literal_error", "enum"):
        expected = str(context["expected"])
        return f"one of {expected}" if " or " in expected else expected
    if kind == "string_pattern_mismatch":
        return f"a string that matches {context['pattern']}"
    first, _, rest = kind.partition("_")
    if rest in ("type", "parsing", "attributes_type", "from_float", "number", "required", "parsing_size"):
        return _KINDS.get(first)
    return None


def _tagged(name: str, context: Mapping[str, Any]) -> str:
    tag = str(context.get("discriminator", "its kind")).strip("'")
    return f"{name}.{tag}" if name else tag


def _dotted(place: Sequence[str | int]) -> str:
    text = ""
    for key in place:
        if isinstance(key, int):
            text += f"[{key}]"
        else:
            text += ("." if text else "") + key
    return _cut(text, 200)


def _as_json(value: object) -> str:
    """A value as its sender wrote it, as far as it is short: what is inside of arrays and objects stays out."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, str):  # two quotes make one of 200 characters too long
        text = json.dumps(value[:200], ensure_ascii=False).encode("utf-8", "backslashreplace").decode("utf-8")
        return _cut(text, 200)
    if isinstance(value, list | tuple):
        return "an array"
    if isinstance(value, Mapping):
        return "an object"
    return shown(value)


def _cut(text: str, length: int) -> str:
    """At most so many characters; where there were more, that is said."""
    return text if len(text) <= length else text[: length - 10] + " and so on"
