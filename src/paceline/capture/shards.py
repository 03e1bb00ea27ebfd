"""A folder of shards that survives a kill at any moment and is written by one process or by many.

`manifest.json` holds the plan: everything that the shards' content follows from. A shard's content is a function of
plan and index alone, so whoever writes it, and however often, writes the same bytes. `shard-00012.npz` appears by a
rename, and its record `shard-00012.json` after it: a shard without a record does not exist yet. Needs no torch.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.checkpoint.weights import disk_full_as_capacity_error, replacing, write_text_atomic
from paceline.errors import ConfigError, DataError, shown

MANIFEST_FILE = "manifest.json"
_LOCK_FILE = ".lock"
_UNFINISHED = ".*.tmp-*"  # what `replacing` calls a file that is not complete


@dataclass(frozen=True)
class ShardRecord:
    """One complete shard.

    Attributes:
        index: from 0.
        file: name inside the folder.
        num_bytes: size of the file.
        sha256: of the file.
        counts: what it holds, such as conversations and tokens; summed up over shards in the manifest.
    """

    index: int
    file: str
    num_bytes: int
    sha256: str
    counts: Mapping[str, int]


class ShardFolder:
    """A folder with a plan, and the shards that are there; made by `open` to write and by `read` to read.

    Attributes:
        folder: where.
        plan: as JSON gives it back, so tuples are lists.
        num_shards: how many the whole has.
        suffix: of the shards' files.
    """

    def __init__(self, folder: Path, plan: Mapping[str, object], num_shards: int, suffix: str) -> None:
        self.folder, self.plan, self.num_shards, self.suffix = folder, plan, num_shards, suffix

    @staticmethod
    def open(folder: Path, plan: Mapping[str, object], num_shards: int, *, suffix: str) -> ShardFolder:
        """Start a folder, or go on with one of an equal plan.

        What an earlier process left half-written is removed, unless another process has the folder open: several may
        write at once, each with a `ShardFolder` of its own.

        Args:
            folder: made if it does not exist.
            plan: everything that the content follows from, as JSON can hold it.
            num_shards: at least 1.
            suffix: of the shards' files, such as ".npz".
        Raises:
            ConfigError: the folder holds something else or shards of another plan; names every key that differs.
            CapacityError: the disk is full.
        """
        assert num_shards > 0 and suffix.startswith(".") and suffix != ".json", "a plan has shards, records are .json"
        wanted = json.loads(json.dumps({"plan": plan, "num_shards": num_shards, "suffix": suffix}, allow_nan=False))
        opened = ShardFolder(folder, wanted["plan"], num_shards, suffix)
        if folder.exists() and not folder.is_dir():
            raise ConfigError(f"{folder} is a file; shards need a folder", hint="another output folder")
        found = _read_manifest(folder) if (folder / MANIFEST_FILE).exists() else None
        if found is not None:
            _refuse_another_plan(folder, found, wanted)
        elif folder.is_dir() and (others := _other_files(folder)):
            raise ConfigError(
                f"{folder} has no {MANIFEST_FILE} and is not empty (found: {', '.join(others[:4])})",
                hint="a new or an empty output folder",
            )
        with disk_full_as_capacity_error(folder):
            folder.mkdir(parents=True, exist_ok=True)
            opened._share_folder()
        if found is None:
            write_text_atomic(folder / MANIFEST_FILE, _manifest_text({**wanted, "complete": False}))
        return opened

    @staticmethod
    def read(folder: Path, *, verify: bool = True) -> ShardFolder:
        """Open a complete folder for reading.

        Args:
            folder: of a capture that was finished.
            verify: compare hashes, which reads every byte; sizes are compared in any case.
        Raises:
            DataError: no such folder, not complete, or a shard is damaged.
        """
        if not (folder / MANIFEST_FILE).is_file():
            raise DataError(f"{folder} holds no capture: {MANIFEST_FILE} is missing")
        manifest = _read_manifest(folder)
        opened = ShardFolder(folder, manifest["plan"], manifest["num_shards"], manifest["suffix"])
        missing = opened.missing()
        if missing or not manifest.get("complete"):
            raise DataError(
                f"{folder} is not complete: {len(missing)} of {opened.num_shards} shards are missing"
                + (f" ({_listed(missing)})" if missing else ", its last step is"),
                hint="the command that made it, once more: it writes what is missing",
            )
        if verify and (damaged := opened._damaged()):
            raise DataError(
                f"{folder}: shard(s) {_listed(damaged)} differ from their recorded SHA-256",
                hint="the command that made the folder, once more: it replaces them",
            )
        return opened

    def path(self, index: int) -> Path:
        """Where a shard lies, or will lie."""
        return self.folder / f"{_name(index)}{self.suffix}"

    def missing(self) -> list[int]:
        """Shards without a record, or whose file is missing or of another size than recorded."""
        present = {record.index for record in self.records()}
        return [index for index in range(self.num_shards) if index not in present]

    def records(self) -> list[ShardRecord]:
        """Complete shards, by index."""
        found = (self._record(index) for index in range(self.num_shards))
        return [record for record in found if record is not None]

    def totals(self) -> dict[str, int]:
        """Counts of all complete shards, summed up."""
        totals: Counter[str] = Counter()
        for record in self.records():
            totals.update(record.counts)
        return dict(totals)

    def write(self, index: int, fill: Callable[[Path], Mapping[str, int]]) -> ShardRecord:
        """Write one shard; it exists once its record does, whatever happens in between.

        Args:
            index: which.
            fill: writes the file that it is given, and returns what to count.
        Raises:
            CapacityError: the disk is full; nothing is left behind.
        """
        assert 0 <= index < self.num_shards, "no such shard in the plan"
        path = self.path(index)
        with replacing(path) as unfinished:
            counts = dict(fill(unfinished))
            record = ShardRecord(index, path.name, unfinished.stat().st_size, _sha256(unfinished), counts)
        write_text_atomic(self._record_path(index), json.dumps(asdict(record), indent=2) + "\n")
        return record

    def check(self) -> None:
        """See that every shard is there and agrees with its hash.

        Raises:
            DataError: shards are missing, or one differs from its record; its record is then removed, so that it
                counts as missing from there on.
        """
        missing = self.missing()
        if missing:
            raise DataError(f"{self.folder}: {len(missing)} of {self.num_shards} shards are missing")
        damaged = self._damaged()
        for index in damaged:
            self._record_path(index).unlink(missing_ok=True)
        if damaged:
            raise DataError(
                f"{self.folder}: shard(s) {_listed(damaged)} differ from their recorded SHA-256",
                hint="the same command once more: it writes them anew; if it happens again, the disk is to blame",
            )

    def finish(self, summary: Mapping[str, object] | None = None) -> None:
        """Check every shard, then write totals and records into the manifest and mark it complete.

        Args:
            summary: further figures of the whole, for the manifest.
        Raises:
            DataError: as for `check`.
            CapacityError: the disk is full.
        """
        self.check()
        manifest = {
            "plan": self.plan,
            "num_shards": self.num_shards,
            "suffix": self.suffix,
            "complete": True,
            "totals": self.totals(),
            "summary": dict(summary or {}),
            "shards": [asdict(record) for record in self.records()],
        }
        write_text_atomic(self.folder / MANIFEST_FILE, _manifest_text(manifest))

    def _record_path(self, index: int) -> Path:
        return self.folder / f"{_name(index)}.json"

    def _record(self, index: int) -> ShardRecord | None:
        """A record that its file agrees with; one that cannot be read is as good as none."""
        try:
            record = ShardRecord(**json.loads(self._record_path(index).read_text(encoding="utf-8")))
            is_whole = record.index == index and self.path(index).stat().st_size == record.num_bytes
        except (OSError, ValueError, TypeError):
            return None
        return record if is_whole else None

    def _damaged(self) -> list[int]:
        return [record.index for record in self.records() if _sha256(self.path(record.index)) != record.sha256]

    def _share_folder(self) -> None:
        """Hold a shared lock for as long as this object lives; alone in the folder, remove leftovers first.

        The system drops the lock with its process, so what a killed one left is told apart from what another writes.
        """
        descriptor = os.open(self.folder / _LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o666)
        weakref.finalize(self, os.close, descriptor)
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for leftover in self.folder.glob(_UNFINISHED):
                leftover.unlink(missing_ok=True)
        fcntl.flock(descriptor, fcntl.LOCK_SH)


def _name(index: int) -> str:
    return f"shard-{index:05d}"


def _listed(indices: list[int]) -> str:
    return ", ".join(map(str, indices[:8])) + (f" and {len(indices) - 8} more" if len(indices) > 8 else "")


def _other_files(folder: Path) -> list[str]:
    """What keeps a folder without a manifest from being taken; a killed start leaves a lock and temporaries."""
    leftovers = {_LOCK_FILE, *(path.name for path in folder.glob(_UNFINISHED))}
    return sorted(path.name for path in folder.iterdir() if path.name not in leftovers)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _manifest_text(manifest: Mapping[str, object]) -> str:
    return json.dumps(manifest, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST_FILE
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read {path}: {error}", hint="another output folder") from error
    kinds = {"plan": dict, "num_shards": int, "suffix": str}
    if not isinstance(manifest, dict) or not all(isinstance(manifest.get(key), kind) for key, kind in kinds.items()):
        raise DataError(f"{path} is no manifest of a capture: it lacks {', '.join(kinds)}", hint="another folder")
    return manifest


def _refuse_another_plan(folder: Path, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    old, new = dict(_flat(found["plan"])), dict(_flat(wanted["plan"]))
    for key in ("num_shards", "suffix"):
        old[key], new[key] = found[key], wanted[key]
    absent = object()
    differing = [
        f"{key}: {'absent' if key not in old else shown(old[key])} there, "
        f"{'absent' if key not in new else shown(new[key])} now"
        for key in {**old, **new}
        if old.get(key, absent) != new.get(key, absent)
    ]
    if differing:
        raise ConfigError(
            "the folder holds another capture:\n  " + "\n  ".join(differing),
            origin={"folder": folder},
            hint="another output folder, or the settings that the folder was begun with",
        )


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, object]]:
    for key, value in table.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
