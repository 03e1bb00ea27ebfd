"""A hub repository fetched whole: what it takes is known first, and a model that cannot be read is refused early.

A plan is made from the hub's listing alone: names, sizes, digests, and what is here already. Space is asked for before
the first byte is written. Everything but the weights comes first, so that a config of a foreign model, or an index that
names shards which the repository does not have, is told before gigabytes of it are fetched.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from paceline.checkpoint.dialects import contract_from_config, is_drafter_config
from paceline.checkpoint.hub import (
    DRAFTER_FILES,
    STATE_FILES,
    HubName,
    cache_folder,
    fetch,
    hub_errors,
    index_shards,
)
from paceline.checkpoint.locate import read_json
from paceline.checkpoint.target_config import read_target_contract
from paceline.checkpoint.weights import INDEX_FILE, write_text_atomic
from paceline.errors import CapacityError, CheckFailedError, CheckpointError, ConfigError
from paceline.log import get_logger

RECORD_FILE = ".paceline-download.json"  # in a folder of the user's own: where it comes from
_WEIGHTS = (".safetensors", ".gguf", ".bin", ".pt", ".pth")
_PIECE = 2**22
_log = get_logger(__name__)


@dataclass(frozen=True)
class HubFile:
    """A file of a repository, as the hub lists it."""

    name: str
    size: int  # bytes
    digest: str  # "sha256:..." of large files, "git:..." (SHA-1 of a git blob) of small ones
    is_present: bool  # here already, whole

    @property
    def is_weights(self) -> bool:
        """Whether it is fetched last."""
        return self.name.endswith(_WEIGHTS)


@dataclass(frozen=True)
class DownloadPlan:
    """What fetching one repository takes."""

    name: HubName
    commit: str  # that the revision stands for
    patterns: tuple[str, ...]
    files: tuple[HubFile, ...]
    folder: Path | None  # where they go; None is the cache

    @property
    def num_bytes(self) -> int:
        """Of all files."""
        return sum(file.size for file in self.files)

    @property
    def num_missing_bytes(self) -> int:
        """Of those that have to be fetched."""
        return sum(file.size for file in self.files if not file.is_present)

    @property
    def place(self) -> Path:
        """The folder on whose disk the files will lie; it may not exist yet."""
        return self.folder or cache_folder()

    @property
    def pinned(self) -> HubName:
        """The name at the commit, whatever becomes of the branch."""
        return HubName(self.name.repository, self.commit)


def plan_download(name: HubName, *, include: Sequence[str] = (), folder: Path | None = None) -> DownloadPlan:
    """Ask the hub which files a model has; nothing is written.

    Args:
        name: of the repository.
        include: patterns of files beyond those that a target or drafter needs.
        folder: where they would go; None is the cache.
    Raises:
        CheckpointError: there is no such repository or revision, it may not be read, or it holds no model.
        OfflineError: the hub cannot be asked.
        ConfigError: a pattern fits no file, or the folder holds something else.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

    with hub_errors(name):
        api = HfApi()
        commit = str(api.model_info(name.repository, revision=name.revision).sha)
        listed = [
            entry
            for entry in api.list_repo_tree(name.repository, revision=commit, recursive=True)
            if isinstance(entry, RepoFile)
        ]
    names = sorted(entry.path for entry in listed)
    patterns = _patterns(name, names, include)
    chosen = [entry for entry in listed if any(fnmatch(entry.path, pattern) for pattern in patterns)]
    _require_model(name, commit, names, {entry.path for entry in chosen})
    if folder is not None:
        _require_own(folder, name, commit)
    files = []
    for entry in sorted(chosen, key=lambda entry: entry.path):
        digest = f"git:{entry.blob_id}" if entry.lfs is None else f"sha256:{entry.lfs.sha256}"
        is_present = _is_present(name, commit, entry.path, entry.size, digest, folder)
        files.append(HubFile(entry.path, entry.size, digest, is_present))
    return DownloadPlan(name, commit, patterns, tuple(files), folder)


def require_space(plans: Iterable[DownloadPlan]) -> None:
    """Refuse downloads that do not fit on their disks together.

    Raises:
        CapacityError: says what is needed and what is free.
    """
    needed: dict[int, int] = {}
    for plan in plans:
        place = _existing(plan.place)
        device = place.stat().st_dev
        needed[device] = needed.get(device, 0) + plan.num_missing_bytes
        free = free_bytes(plan)
        if needed[device] > free:
            raise CapacityError(
                f"{plan.name} does not fit: {needed[device]:,} bytes are to be fetched "
                f"({needed[device] / 2**30:.1f} GiB), and the disk has {free:,} free ({free / 2**30:.1f} GiB)",
                origin={"folder": plan.place},
                hint="freeing space, another cache by HF_HOME, or --to a folder on another disk",
            )


def free_bytes(plan: DownloadPlan) -> int:
    """Of the disk that the files go to."""
    return shutil.disk_usage(_existing(plan.place)).free


def download(plan: DownloadPlan) -> Path:
    """Fetch what a plan lists and is not here yet. What is complete stays whatever happens; the next call goes on.

    Args:
        plan: from `plan_download`; `require_space` is asked by the caller, who may have several.
    Returns:
        What other verbs take: the folder, or the `.gguf` file where there is one and no other weights.
    Raises:
        CheckpointError: the config or the index says that this is no model that is read here; or the branch moved.
        OfflineError: the connection broke, and did not come back.
        CapacityError: the disk filled up all the same.
    """
    if plan.folder is not None:
        plan.folder.mkdir(parents=True, exist_ok=True)
        _write_record(plan)
    small = [_literal(file.name) for file in plan.files if not file.is_weights]
    folder = fetch(plan.pinned, small, offline=False, folder=plan.folder, shows_progress=False) if small else None
    weights = [file for file in plan.files if file.is_weights]
    if folder is not None:
        _refuse_foreign(plan, folder, [file.name for file in weights])
    for file in weights:  # one after another, in this thread: Ctrl-C ends it at once, and takes its half away
        _fetch_file(plan, file)
    if plan.folder is None:
        # nothing is left to fetch: this writes down which commit the branch stands for, so that its name is found
        folder = fetch(plan.name, plan.patterns, offline=False, shows_progress=False)
        if folder.name != plan.commit:
            raise CheckpointError(
                f"{plan.name} moved from commit {plan.commit} to {folder.name} while it was downloaded", hint="again"
            )
    return usable_path(folder if plan.folder is None else plan.folder)  # type: ignore[arg-type]


def usable_path(folder: Path) -> Path:
    """What other verbs take: the folder, or the one `.gguf` file where there are no safetensors."""
    files = sorted(folder.glob("*.gguf"))
    return files[0] if len(files) == 1 and next(folder.glob("*.safetensors"), None) is None else folder


def require_digests(plan: DownloadPlan, folder: Path) -> None:
    """Read every file and compare it with what the hub says of it.

    Raises:
        CheckFailedError: a file is damaged; all that are, are named.
    """
    damaged = [file.name for file in plan.files if _digest(folder / file.name, file.digest) != file.digest]
    if damaged:
        raise CheckFailedError(
            f"{len(damaged)} of {len(plan.files)} files of {plan.name} are not what the hub lists: {_listed(damaged)}",
            origin={"folder": folder},
            hint="removing them, then the same command",
        )


def _patterns(name: HubName, names: Sequence[str], include: Sequence[str]) -> tuple[str, ...]:
    """What `locate.py` would ask for of this repository, and what was asked for besides."""
    for pattern in include:
        if not any(fnmatch(file, pattern) for file in names):
            raise ConfigError(f"--include {pattern!r} fits no file of {name}", hint=_listed(names))
    is_safetensors = any(fnmatch(file, "*.safetensors") for file in names)
    states = () if is_safetensors or any(file.endswith(".gguf") for file in names) else STATE_FILES
    return (*DRAFTER_FILES, *states, *include)


def _require_model(name: HubName, commit: str, names: Sequence[str], chosen: set[str]) -> None:
    origin = {"hub": f"{name.repository} at {commit}"}
    if any(file.endswith(".gguf") for file in chosen):
        return
    ggufs = [file for file in names if file.endswith(".gguf")]
    if ggufs and not any(file.endswith(".safetensors") for file in chosen):
        raise CheckpointError(
            f"{name} holds {len(ggufs)} GGUF files and no safetensors; one of them has to be named",
            origin=origin,
            hint=f"--include with one of {_listed(ggufs)}",
        )
    if "config.json" not in chosen:
        raise CheckpointError(
            f"{name} is no model: config.json is missing (it holds {_listed(names) or 'nothing'})", origin=origin
        )
    if not any(file.endswith(_WEIGHTS) and "/" not in file for file in chosen - set(DRAFTER_FILES)):
        raise CheckpointError(f"{name} holds no weights: model.safetensors is missing", origin=origin)


def _refuse_foreign(plan: DownloadPlan, folder: Path, weights: Sequence[str]) -> None:
    """Read the config as strictly as loading will, before the weights are there."""
    file = folder / "config.json"
    if any(name.endswith(".gguf") for name in weights) or not file.is_file():
        return
    config = read_json(file)
    if is_drafter_config(config):
        contract_from_config(config, str(file))
    else:
        if not any(name.endswith(".safetensors") for name in weights):
            raise CheckpointError(
                f"{plan.name} is a target whose weights are {_listed(weights)}; targets are read from safetensors",
                origin={"config": file},
            )
        if _states_dtype(config):  # else its reader looks at the weights, and all is checked once they are there
            read_target_contract(folder, str(plan.name))
    missing = [shard for shard in index_shards(folder / INDEX_FILE) if shard not in weights]
    if missing:
        raise CheckpointError(
            f"{plan.name} is incomplete: its index names files that the repository does not have: {_listed(missing)}",
            origin={"index": folder / INDEX_FILE},
            hint="another revision",
        )


def _states_dtype(config: Mapping[str, object]) -> bool:
    inner = config.get("text_config")
    places = [config, inner] if isinstance(inner, dict) else [config]
    return any(place.get(key) not in (None, "auto") for place in places for key in ("dtype", "torch_dtype"))


def _fetch_file(plan: DownloadPlan, file: HubFile) -> None:
    from huggingface_hub import hf_hub_download

    with hub_errors(plan.name):
        hf_hub_download(plan.name.repository, file.name, revision=plan.commit, local_dir=plan.folder)
    if not file.is_present:
        _log.info("%s: %s", file.name, shown_size(file.size))


def shown_size(num_bytes: int) -> str:
    """A size for people, in the largest unit that leaves a digit before the point."""
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if num_bytes >= 1024**power:
            return f"{num_bytes / 1024**power:.1f} {unit}"
    return f"{num_bytes} B"


def _is_present(name: HubName, commit: str, file: str, size: int, digest: str, folder: Path | None) -> bool:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.file_download import repo_folder_name

    if folder is not None:
        path = folder / file
        return path.is_file() and path.stat().st_size == size
    if isinstance(try_to_load_from_cache(name.repository, file, revision=commit), str):
        return True
    # the same content under another revision is linked, not fetched
    storage = cache_folder() / repo_folder_name(repo_id=name.repository, repo_type="model")
    return (storage / "blobs" / digest.partition(":")[2]).is_file()


def _require_own(folder: Path, name: HubName, commit: str) -> None:
    """A folder of the user's own is new, or holds an earlier part of this very download."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--to {folder} is a file", hint="a new folder")
    if not folder.is_dir() or not any(folder.iterdir()):
        return
    record = read_json(folder / RECORD_FILE) if (folder / RECORD_FILE).is_file() else {}
    if (record.get("repository"), record.get("commit")) != (name.repository, commit):
        held = f"{record.get('repository')} at {record.get('commit')}" if record else "other files"
        raise ConfigError(
            f"--to {folder} holds {held}; {name.repository} at {commit} was asked for", hint="a new or empty folder"
        )


def _write_record(plan: DownloadPlan) -> None:
    record = {
        "repository": plan.name.repository,
        "revision": plan.name.revision,
        "commit": plan.commit,
        "files": {file.name: {"size": file.size, "digest": file.digest} for file in plan.files},
    }
    write_text_atomic(plan.place / RECORD_FILE, json.dumps(record, indent=2) + "\n")


def _digest(path: Path, like: str) -> str:
    kind = like.partition(":")[0]
    try:
        size = path.stat().st_size
        hashed = hashlib.sha256() if kind == "sha256" else hashlib.sha1(f"blob {size}\0".encode())
        with path.open("rb") as file:
            while piece := file.read(_PIECE):
                hashed.update(piece)
    except OSError:
        return "unreadable"
    return f"{kind}:{hashed.hexdigest()}"


def _existing(path: Path) -> Path:
    """The nearest folder above that exists."""
    path = Path(os.path.abspath(path))
    return next(place for place in (path, *path.parents) if place.exists())


def _literal(name: str) -> str:
    """A pattern that fits one name alone."""
    return name.replace("[", "[[]").replace("*", "[*]").replace("?", "[?]")


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
