"""Names of hub repositories, which of their files a model needs, and the hub's refusals as errors of ours.

A hub name is `owner/name`, or `owner/name@REVISION` with a branch, a tag or a commit. huggingface_hub fetches, and its
variables hold: `HF_HOME`, `HF_HUB_CACHE`, `HF_ENDPOINT`, `HF_TOKEN`, `HF_HUB_OFFLINE`. Nothing is imported of it before
a name has to be looked up.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.errors import CapacityError, CheckpointError, ConfigError, OfflineError, PacelineError

MODEL_FILES = ("*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer.model", "tiktoken.model")
# of drafters alone: the mask token's row may lie beside the weights, and without the file another row would be read
DRAFTER_FILES = (*MODEL_FILES, "mask_embedding.pt")
STATE_FILES = ("*.bin", "*.pt", "*.pth")  # weights of a drafter that has no safetensors

_HUB_NAME = re.compile(r"(?P<repository>[A-Za-z0-9][\w.-]*/[\w.-]+)(?:@(?P<revision>\w[\w./+-]*))?")
_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class HubName:
    """A repository of the hub, at a revision: a branch, a tag or a commit; None is the main branch."""

    repository: str
    revision: str | None = None

    def __str__(self) -> str:
        return self.repository if self.revision is None else f"{self.repository}@{self.revision}"


def parse_hub_name(name: str) -> HubName | None:
    """A name as the hub's, or None if it has another form. Whether the hub has it is not asked."""
    found = _HUB_NAME.fullmatch(name)
    if found is None or name.lower().endswith(".gguf"):
        return None
    return HubName(found["repository"], found["revision"])


def at_revision(name: HubName, revision: str | None) -> HubName:
    """A name with the revision that was asked for beside it.

    Raises:
        ConfigError: the name has another one of its own.
    """
    if revision is None or revision == name.revision:
        return name
    if name.revision is not None:
        raise ConfigError(f"{name} names a revision of its own; --revision asks for {revision!r}")
    return replace(name, revision=revision)


def is_offline(asked: bool) -> bool:
    """Whether nothing may be fetched: it was asked for, or huggingface_hub itself was told so."""
    from huggingface_hub import constants

    return asked or bool(constants.HF_HUB_OFFLINE)


def cache_folder() -> Path:
    """Where huggingface_hub keeps what it fetched."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def fetch(
    name: HubName, files: Sequence[str], *, offline: bool, folder: Path | None = None, shows_progress: bool = True
) -> Path:
    """Fetch files of a repository that are not there yet, several at a time.

    Args:
        name: of the repository.
        files: patterns of file names.
        offline: fetch nothing, and be content with what the cache holds.
        folder: where they go; None is the cache.
        shows_progress: on stderr, unless huggingface_hub was told otherwise.
    Returns:
        The folder that holds them.
    Raises:
        CheckpointError: there is no such repository or revision, or it may not be read, or the files cannot be written.
        OfflineError: they would have to be fetched, and cannot be.
        CapacityError: the disk filled up.
    """
    from huggingface_hub import snapshot_download

    with hub_errors(name, offline=offline):
        return Path(
            snapshot_download(
                name.repository,
                revision=name.revision,
                allow_patterns=list(files),
                local_files_only=offline,
                local_dir=folder,
                tqdm_class=None if shows_progress else _silent_bar(),
            )
        )


def _silent_bar() -> type[Any]:
    from huggingface_hub.utils.tqdm import tqdm

    class Silent(tqdm):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **{**options, "disable": True})  # type: ignore[no-untyped-call]

    return Silent


def missing_files(folder: Path) -> list[str]:
    """What a folder lacks of a model: its config, shards that its index names, or weights at all.

    Args:
        folder: as fetched; it need not exist.
    """
    if any(folder.glob("*.gguf")):
        return []
    missing = [] if (folder / "config.json").is_file() else ["config.json"]
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return missing + [shard for shard in index_shards(index) if not (folder / shard).is_file()]
    states = (file for kind in STATE_FILES for file in folder.glob(kind) if file.name not in DRAFTER_FILES)
    if not (folder / "model.safetensors").is_file() and next(states, None) is None:
        missing.append("model.safetensors")
    return missing


def index_shards(index: Path) -> list[str]:
    """Files that an index of weights names, each once; none where it cannot be read, which its reader will tell."""
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return sorted({str(shard) for shard in weight_map.values()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return []


@contextlib.contextmanager
def hub_errors(name: HubName, *, offline: bool = False) -> Iterator[None]:
    """Turn what huggingface_hub raises into errors of ours that say what to try.

    Args:
        name: what was asked for.
        offline: whether nothing was to be fetched.
    """
    try:
        yield
    except PacelineError:
        raise
    except Exception as error:  # the HTTP client, the transfer library and the disk share no base class
        raise _ours(error, name, offline=offline) from error


def _ours(error: Exception, name: HubName, *, offline: bool) -> PacelineError:
    from huggingface_hub import constants, errors

    if isinstance(error, errors.LocalEntryNotFoundError):
        return _not_in_cache(error, name, offline=offline)
    if isinstance(error, errors.OfflineModeIsEnabled):
        return OfflineError(f"asking the hub about {name} needs the network, and this run is offline")
    refusal = _refusal(error, name)
    if refusal is not None:
        return refusal
    if isinstance(error, OSError) and error.errno in _FULL:
        return CapacityError(f"the disk is full while downloading {name}", origin={"cache": constants.HF_HUB_CACHE})
    if isinstance(error, OSError) and error.errno is not None and error.filename is not None:
        return CheckpointError(
            f"{error.filename} cannot be written: {os.strerror(error.errno)}",
            hint="another cache by HF_HOME, or a folder of your own by `paceline download --to`",
        )
    is_transport = any(base.__name__ == "TransportError" for base in type(error).__mro__)  # of either HTTP client
    what = f"the hub cannot be reached for {name}" if is_transport else f"downloading {name} failed"
    return OfflineError(
        f"{what}: {_first_line(error)}",
        origin={"hub": constants.ENDPOINT, "cache": constants.HF_HUB_CACHE},
        hint="again later; files that are complete stay",
    )


def _refusal(error: Exception, name: HubName) -> PacelineError | None:
    """What the hub itself said no to; None where it was not the hub."""
    from huggingface_hub import constants, errors, get_token

    origin = {"hub": constants.ENDPOINT}
    if isinstance(error, errors.GatedRepoError):
        token = (
            "the account of the token" if get_token() else "an account, and its token in HF_TOKEN or `hf auth login`"
        )
        return CheckpointError(
            f"the hub repository {name} asks for an agreement before it can be downloaded",
            origin=origin,
            hint=f"accept its terms on the hub with {token}",
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return CheckpointError(
            f"the hub repository {name.repository} has no revision {name.revision or 'main'!r}",
            origin=origin,
            hint="a branch, a tag or a commit that its page lists",
        )
    if isinstance(error, (errors.RepositoryNotFoundError, errors.HFValidationError)):
        return CheckpointError(
            f"{name.repository!r} is no folder here, and the hub has no repository of that name that you may read",
            origin=origin,
            hint="check the spelling; for a private repository, a token in HF_TOKEN or `hf auth login`",
        )
    if not isinstance(error, errors.HfHubHTTPError):
        return None
    status = error.response.status_code
    if status in (401, 403):
        return CheckpointError(
            f"the hub does not let you read {name} (status {status}: {error.server_message or 'no reason given'})",
            origin=origin,
            hint="a valid token in HF_TOKEN or by `hf auth login`, of an account that may read it",
        )
    if status == 429:
        return OfflineError(f"the hub answers too many requests for now, {name} among them", hint="again later")
    return OfflineError(f"the hub answers {name} with status {status}", origin=origin, hint="again later")


def _not_in_cache(error: Exception, name: HubName, *, offline: bool) -> OfflineError:
    from huggingface_hub import constants

    place = getattr(error, "snapshot_path", None)  # of a snapshot that is known to be incomplete
    missing = missing_files(Path(place)) if place is not None else ["config.json"]
    named = f" (missing: {', '.join(missing[:8])}{' and more' if len(missing) > 8 else ''})" if missing else ""
    why = "this run is offline" if offline else "the hub cannot be reached"
    return OfflineError(
        f"{str(name)!r} is no folder here and not (completely) in the local hub cache{named}, and {why}",
        origin={"cache": constants.HF_HUB_CACHE, **({} if offline else {"hub": constants.ENDPOINT})},
        hint=f"with a network, `paceline download {name}`; or the path of a local folder",
    )


def _first_line(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
