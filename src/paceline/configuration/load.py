"""Reads a file of settings, puts `section.key=value` overrides on top and validates the whole, with origins.

Every complaint names the key, what is wrong with it and where it came from: the file or the command line. TOML is the
first choice; YAML is read because the field writes it. Later sources win: file, then `key=value`, then flags.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from paceline.configuration.fields import UNSET_WORD
from paceline.errors import ConfigError

Model = TypeVar("Model", bound=BaseModel)

COMMAND_LINE = "command line"


def load_settings(
    model: type[Model],
    file: Path | None = None,
    overrides: Sequence[str] = (),
    flags: Mapping[str, object] | None = None,
) -> Model:
    """Read, merge and validate one set of settings.

    Args:
        model: the pydantic model of the settings.
        file: a `.toml`, `.yaml` or `.yml` file; None starts from the defaults.
        overrides: `section.key=value` texts, applied in order.
        flags: values of command-line flags by dotted key; a value of None means that the flag was not given.

    Returns:
        The validated settings.

    Raises:
        ConfigError: missing or malformed file, unknown key, wrong type or value, or a contradiction.
    """
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    if file is not None:
        values = read_settings_file(file)
        origins[""] = str(file)
    for text in overrides:
        key, value = parse_override(text)
        _put(values, key, value, text)
        origins[key] = f"{COMMAND_LINE} ({text})"
    for key, value in (flags or {}).items():
        if value is not None:
            _put(values, key, value, key)
            origins[key] = COMMAND_LINE
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise _as_config_error(error, model, origins) from error


def read_settings_file(path: Path) -> dict[str, Any]:
    """Read a TOML or YAML file into nested tables.

    Raises:
        ConfigError: the file is missing, unreadable, of another kind, malformed or not a table.
    """
    kind = path.suffix.lower()
    if kind not in (".toml", ".yaml", ".yml"):
        raise ConfigError(
            f"settings are read from .toml, .yaml or .yml files, not {kind or 'a name without a suffix'}",
            origin={"file": path},
        )
    try:
        text = path.read_text(encoding="utf-8-sig")  # some editors begin a file with a byte order mark
    except FileNotFoundError:
        raise ConfigError("this file of settings does not exist", origin={"file": path}) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"this file of settings cannot be read: {error}", origin={"file": path}) from error
    try:
        values = tomllib.loads(text) if kind == ".toml" else yaml.load(text, _UniqueKeyLoader)
    # Of a date that does not exist, of thousands of digits or brackets neither reader says that it is no TOML or YAML.
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"this file is not valid {kind[1:].upper()}: {error}", origin={"file": path}) from error
    if values is None:
        return {}
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ConfigError(f"settings are a table of named keys, found {type(values).__name__}", origin={"file": path})
    return values


class _UniqueKeyLoader(yaml.SafeLoader):
    """The safe loader, which refuses a key that stands twice in a table instead of keeping the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[object] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, str) and key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} stands twice", key_node.start_mark)
            seen.add(str(key))
        return super().construct_mapping(node, deep)


def parse_override(text: str) -> tuple[str, object]:
    """Split `section.key=value`; the value is TOML, and what is not TOML is taken as bare text.

    Raises:
        ConfigError: no `=`, an empty key part, or a value that starts like TOML (quote, bracket, brace) and is not.
    """
    key, equals, raw = text.partition("=")
    key, raw = key.strip(), raw.strip()
    if not equals or not all(key.split(".")):
        raise ConfigError(f"{text!r} is not of the form section.key=value", origin={"override": COMMAND_LINE})
    try:
        table = tomllib.loads(f"value = {raw}")
    except (ValueError, RecursionError) as error:
        if raw[:1] in ("'", '"', "[", "{"):
            raise ConfigError(f"the value of {key} is not valid TOML: {raw}", origin={key: COMMAND_LINE}) from error
        return key, raw
    return key, table["value"] if set(table) == {"value"} else raw


def _put(values: dict[str, Any], key: str, value: object, text: str) -> None:
    *sections, last = key.split(".")
    table = values
    for depth, section in enumerate(sections):
        inner = table.setdefault(section, {})
        if not isinstance(inner, dict):
            outer = ".".join(sections[: depth + 1])
            raise ConfigError(f"{text}: {outer} is already {inner!r} and cannot hold {key}", origin={key: COMMAND_LINE})
        table = inner
    table[last] = value


def _as_config_error(error: ValidationError, model: type[BaseModel], origins: Mapping[str, str]) -> ConfigError:
    """Turn pydantic's report into one error that lists every complaint and where each value came from."""
    complaints: dict[str, str] = {}
    places: dict[str, str] = {}
    hints: list[str] = []
    for detail in error.errors(include_url=False):
        key = _dotted_key(detail["loc"])
        text, hint = _complaint(detail, key, model)
        complaints.setdefault(key, text)  # a union reports once per member; the first says enough
        if hint and hint not in hints:
            hints.append(hint)
        place = _origin_of(key, origins)
        if place is not None:
            places[key or "settings"] = place
    lines = [f"{key}: {text}" if key else text for key, text in complaints.items()]
    origin = {"file": next(iter(places.values()))} if set(places.values()) == {origins.get("")} else places
    return ConfigError("\n  ".join(lines), origin=origin, hint="; ".join(hints) or None)


def _complaint(detail: ErrorDetails, key: str, model: type[BaseModel]) -> tuple[str, str | None]:
    kind, value = detail["type"], detail["input"]
    if kind == "extra_forbidden":
        *sections, last = key.split(".")
        known = _fields_at(model, sections)
        close = difflib.get_close_matches(last, known, n=1, cutoff=0.6)
        hint = ".".join([*sections, close[0]]) if close else f"one of {', '.join(known)}" if known else None
        return "no setting has this name", hint
    if kind == "missing":
        return "must be set", None
    message = detail["msg"].removeprefix("Value error, ")
    message = message[:1].lower() + message[1:]
    if kind == "value_error":
        return message, None
    hint = None
    if kind == "float_type" and isinstance(value, str) and _is_number(value):
        hint = f"{key} without quotes (in YAML, write 1.0e-3 rather than 1e-3)"
    return f"{message}, found {value!r}", hint


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _dotted_key(location: Sequence[int | str]) -> str:
    """A dotted key without the names of union members, which pydantic puts among the keys."""
    parts: list[str] = []
    for part in location:
        if isinstance(part, int):
            parts[-1:] = [f"{parts[-1]}[{part}]"] if parts else [f"[{part}]"]
        elif part.isidentifier() and part not in ("int", "float", "bool", "str", "literal"):
            parts.append(part)
    return ".".join(parts)


def _origin_of(key: str, origins: Mapping[str, str]) -> str | None:
    """Where the value of a key, or of the nearest table around it, was last set."""
    inside = [origin for name, origin in origins.items() if name and (name == key or name.startswith(f"{key}."))]
    if inside and key:
        return inside[-1]
    parts = key.split("[")[0].split(".")
    for length in range(len(parts), 0, -1):
        prefix = ".".join(parts[:length])
        if prefix in origins:
            return origins[prefix]
    return origins.get("")


def _fields_at(model: type[BaseModel], sections: Sequence[str]) -> list[str]:
    """Names that are known inside a section; empty when the section is not a group of settings."""
    current: type[BaseModel] | None = model
    for section in sections:
        field = current.model_fields.get(section) if current is not None else None
        current = _model_of(field.annotation) if field is not None else None
    return list(current.model_fields) if current is not None else []


def _model_of(annotation: Any) -> type[BaseModel] | None:
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def to_toml(settings: BaseModel) -> str:
    """Write settings as a TOML file that `load_settings` reads back to an equal object.

    An unset value is written as the word "none", since TOML has no null.
    """
    lines: list[str] = []
    _write_table(settings.model_dump(), (), lines)
    return "\n".join(lines).strip() + "\n"


def _write_table(table: Mapping[str, Any], path: tuple[str, ...], lines: list[str]) -> None:
    if path:
        lines += ["", f"[{'.'.join(path)}]"]
    inner = {key: value for key, value in table.items() if isinstance(value, Mapping)}
    lines += [f"{key} = {_toml_value(value)}" for key, value in table.items() if key not in inner]
    for key, value in inner.items():
        _write_table(value, (*path, key), lines)


def _toml_value(value: object) -> str:
    if value is None:
        return json.dumps(UNSET_WORD)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_toml_value(item) for item in value) + "]"
    text = value.value if isinstance(value, Enum) else value
    return json.dumps(str(text), ensure_ascii=False).replace("\x7f", "\\u007f")
