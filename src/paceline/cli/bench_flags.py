"""Flags of `paceline bench` that hold several things: lists with commas, `KEY=VALUE`, `METRIC:MS`, JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from paceline.errors import ConfigError

_STRAY = re.compile(r"(ttft|tpot|itl|e2el):\d|\w+=|https?://")


def one_model(positional: str | None, flag: str | None) -> str | None:
    """The model, however it was given.

    Raises:
        ConfigError: it was given twice; or what stands in its place belongs to a flag that takes one value.
    """
    if positional is not None and _STRAY.match(positional):
        raise ConfigError(
            f"{positional!r} stands where the model is expected",
            hint="a flag once per value (--base-url A --base-url B), or with a comma (--goodput ttft:200,tpot:50)",
        )
    if positional is not None and flag is not None and positional != flag:
        raise ConfigError(f"the model is {positional!r}, and {flag!r} by --model; give one")
    return positional if positional is not None else flag


def at_most_two(drafters: Sequence[str] | None) -> tuple[str | None, str | None]:
    """The first drafter and the second."""
    given = list(drafters or ())
    if len(given) > 2:
        raise ConfigError(f"--draft-model is given {len(given)} times; two drafters can be compared")
    first, second, *_ = [*given, None, None]
    return first, second


def parts(texts: Sequence[str] | None) -> tuple[str, ...] | None:
    """A repeatable flag whose values may hold several, with commas or spaces; None where it was not given."""
    if not texts:
        return None
    return tuple(part for text in texts for part in re.split(r"[,\s]+", text.strip()) if part)


def whole_numbers(flag: str, texts: Sequence[str] | None) -> tuple[int, ...] | None:
    """The same, of whole numbers.

    Raises:
        ConfigError: one is none.
    """
    found = parts(texts)
    if found is None:
        return None
    for part in found:
        if not part.isdecimal():
            raise ConfigError(f"{flag} has {part!r}, which is no whole number", hint=f"{flag} 1,4,16")
    return tuple(int(part) for part in found)


def numbers(flag: str, texts: Sequence[str] | None) -> tuple[float, ...] | None:
    """The same, of numbers.

    Raises:
        ConfigError: one is none.
    """
    found = parts(texts)
    try:
        return None if found is None else tuple(map(float, found))
    except ValueError as error:
        raise ConfigError(f"{flag} has a value that is no number: {error}", hint=f"{flag} 50,90,99") from error


def limits(texts: Sequence[str] | None) -> dict[str, float] | None:
    """`METRIC:MS` as a table.

    Raises:
        ConfigError: another form, or a metric given twice.
    """
    found: dict[str, float] = {}
    for part in parts(texts) or ():
        name, separator, text = part.partition(":")
        try:
            value = float(text)
        except ValueError:
            separator = ""
            value = 0.0
        if not separator or name not in ("ttft", "tpot", "e2el"):
            raise ConfigError(f"--goodput has {part!r}, which is not of the form METRIC:MS", hint="ttft:200,tpot:50")
        if name in found:
            raise ConfigError(f"--goodput names {name} twice")
        found[name] = value
    return found or None


def pairs(flag: str, texts: Sequence[str] | None) -> dict[str, str] | None:
    """`KEY=VALUE` as a table.

    Raises:
        ConfigError: another form, or a key given twice.
    """
    found: dict[str, str] = {}
    for text in texts or ():
        key, separator, value = text.partition("=")
        if not separator or not key.strip():
            raise ConfigError(f"{flag} {text!r} is not of the form KEY=VALUE")
        if key.strip() in found:
            raise ConfigError(f"{flag} names {key.strip()} twice")
        found[key.strip()] = value
    return found or None


def json_object(flag: str, text: str | None) -> dict[str, object] | None:
    """A JSON object.

    Raises:
        ConfigError: it is none.
    """
    if text is None:
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{flag} is not JSON: {error}", hint=f"{flag} '{{\"top_k\": 5}}'") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{flag} is {type(found).__name__}, not an object", hint=f"{flag} '{{\"top_k\": 5}}'")
    return found
