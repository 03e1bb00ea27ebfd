"""The shard folder: whatever dies, no shard is lost, none is half there, and another plan is refused."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import multiprocessing
import os
import random
import signal
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

import pytest

from paceline.capture import shards
from paceline.capture.shards import MANIFEST_FILE, ShardFolder
from paceline.checkpoint import weights
from paceline.errors import CapacityError, ConfigError, DataError

PLAN = {"target": {"sha256": "ab"}, "seed": 3, "sizes": (1, 2)}


def _content(index: int) -> bytes:
    return random.Random(index).randbytes(3000 + index)


def _fill(index: int, path: Path) -> Mapping[str, int]:
    path.write_bytes(_content(index))
    return {"tokens": 10 * index, "conversations": 1}


def _write_all(folder: Path, num_shards: int = 5) -> None:
    opened = ShardFolder.open(folder, PLAN, num_shards, suffix=".bin")
    for index in opened.missing():
        opened.write(index, lambda path, index=index: _fill(index, path))
    opened.finish({"note": 1})


def _files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".lock"}


def test_a_finished_folder_reads_back_with_totals(tmp_path: Path) -> None:
    _write_all(tmp_path / "out")
    opened = ShardFolder.read(tmp_path / "out")
    assert opened.plan == {"target": {"sha256": "ab"}, "seed": 3, "sizes": [1, 2]}
    assert [opened.path(record.index).read_bytes() for record in opened.records()] == [_content(i) for i in range(5)]
    manifest = json.loads((tmp_path / "out" / MANIFEST_FILE).read_text())
    assert manifest["totals"] == {"tokens": 100, "conversations": 5}
    assert manifest["complete"] is True and manifest["summary"] == {"note": 1}
    assert len(manifest["shards"]) == 5


def test_what_is_there_is_not_written_again(tmp_path: Path) -> None:
    opened = ShardFolder.open(tmp_path, PLAN, 3, suffix=".bin")
    opened.write(1, lambda path: _fill(1, path))
    again = ShardFolder.open(tmp_path, PLAN, 3, suffix=".bin")
    assert again.missing() == [0, 2]
    with pytest.raises(DataError, match="2 of 3 shards are missing"):
        again.finish()
    with pytest.raises(DataError, match=r"not complete: 2 of 3 shards are missing \(0, 2\)"):
        ShardFolder.read(tmp_path)


def test_another_plan_is_refused_with_every_key(tmp_path: Path) -> None:
    ShardFolder.open(tmp_path, PLAN, 3, suffix=".bin")
    with pytest.raises(ConfigError) as caught:
        ShardFolder.open(tmp_path, {"target": {"sha256": "cd"}, "sizes": (1, 2), "new": 1}, 4, suffix=".bin")
    assert caught.value.message.splitlines()[1:] == [
        "  target.sha256: 'ab' there, 'cd' now",
        "  seed: 3 there, absent now",
        "  num_shards: 3 there, 4 now",
        "  new: absent there, 1 now",
    ]


def test_a_folder_of_other_things_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ConfigError, match=r"no manifest.json and is not empty \(found: notes.txt\)"):
        ShardFolder.open(tmp_path, PLAN, 1, suffix=".bin")
    with pytest.raises(ConfigError, match="is a file"):
        ShardFolder.open(tmp_path / "notes.txt", PLAN, 1, suffix=".bin")
    (tmp_path / MANIFEST_FILE).write_text('{"files": []}')
    with pytest.raises(DataError, match="no manifest of a capture"):
        ShardFolder.open(tmp_path, PLAN, 1, suffix=".bin")
    with pytest.raises(DataError, match="holds no capture"):
        ShardFolder.read(tmp_path / "nowhere")


def test_leftovers_are_removed_only_when_nobody_else_writes(tmp_path: Path) -> None:
    first = ShardFolder.open(tmp_path, PLAN, 2, suffix=".bin")
    leftover = tmp_path / ".shard-00000.bin.tmp-0123"
    leftover.touch()
    second = ShardFolder.open(tmp_path, PLAN, 2, suffix=".bin")
    assert leftover.exists(), "it may belong to the first one"
    del first, second
    ShardFolder.open(tmp_path, PLAN, 2, suffix=".bin")
    assert not leftover.exists()


def test_a_start_that_was_killed_before_the_manifest_can_be_repeated(tmp_path: Path) -> None:
    (tmp_path / ".lock").touch()
    (tmp_path / f".{MANIFEST_FILE}.tmp-0123").touch()
    _write_all(tmp_path)
    assert not (tmp_path / f".{MANIFEST_FILE}.tmp-0123").exists()


@pytest.mark.parametrize("damage", ["shorter", "flipped", "gone", "no record", "torn record"])
def test_damage_is_noticed_and_mended(tmp_path: Path, damage: str) -> None:
    _write_all(tmp_path)
    whole = _files(tmp_path)
    path, record = tmp_path / "shard-00002.bin", tmp_path / "shard-00002.json"
    if damage == "shorter":
        path.write_bytes(path.read_bytes()[:-1])
    elif damage == "flipped":
        path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])
    elif damage == "gone":
        path.unlink()
    elif damage == "no record":
        record.unlink()
    else:
        record.write_text(record.read_text()[:20])
    with pytest.raises(DataError, match="differ from their recorded" if damage == "flipped" else "1 of 5 shards"):
        ShardFolder.read(tmp_path)
    if damage == "flipped":
        with pytest.raises(DataError, match="once more"):
            _write_all(tmp_path)
    _write_all(tmp_path)
    assert _files(tmp_path) == whole


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    opened = ShardFolder.open(tmp_path, PLAN, 1, suffix=".bin")
    before = _files(tmp_path)

    def fail(path: Path) -> Mapping[str, int]:
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    with pytest.raises(CapacityError, match=r"shard-00000\.bin"):
        opened.write(0, fail)
    assert _files(tmp_path) == before


def _killed_at(folder: Path, step: int) -> None:
    """Write everything, and die by SIGKILL just before the given call that changes the folder."""
    calls = 0

    def count() -> None:
        nonlocal calls
        calls += 1
        if calls > step:
            os.kill(os.getpid(), signal.SIGKILL)

    real_replace, real_sync, real_digest = Path.replace, weights.sync_to_disk, shards._sha256

    def replace(self: Path, target: Path) -> Path:
        count()
        return real_replace(self, target)

    def sync(path: Path) -> None:
        count()
        real_sync(path)

    def digest(path: Path) -> str:
        count()
        return real_digest(path)

    Path.replace, weights.sync_to_disk, shards._sha256 = replace, sync, digest  # in a process of its own
    _write_all(folder, 2)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("record_first", [False, True])
def test_killed_at_every_step_it_resumes_to_equal_bytes(
    tmp_path: Path, record_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # a kill is no power cut
    if record_first:  # the planted fault: a record that is there before its shard is, and is believed
        monkeypatch.setattr(ShardFolder, "_record", _believed_record)
        monkeypatch.setattr(ShardFolder, "write", _write_record_first)
    _write_all(tmp_path / "whole", 2)
    whole = _files(tmp_path / "whole")
    context = multiprocessing.get_context("fork")
    is_always_equal, num_killed = True, 0
    for step in range(24):
        folder = tmp_path / f"killed-{step}"
        process = context.Process(target=_killed_at, args=(folder, step))
        process.start()
        process.join()
        assert process.exitcode in (0, -signal.SIGKILL)
        num_killed += process.exitcode != 0
        with contextlib.suppress(DataError):
            ShardFolder.read(folder)
            assert _files(folder) == whole, "what reads as complete is complete"
        try:
            _write_all(folder, 2)
        except (DataError, OSError):
            is_always_equal = False
        else:
            is_always_equal &= _files(folder) == whole
    assert num_killed > 10
    assert is_always_equal is not record_first


def _believed_record(self: ShardFolder, index: int) -> shards.ShardRecord | None:
    path = self._record_path(index)
    return shards.ShardRecord(**json.loads(path.read_text())) if path.exists() else None


def _write_record_first(self: ShardFolder, index: int, fill: Callable[[Path], Mapping[str, int]]) -> shards.ShardRecord:
    whole = self.folder / f".whole.tmp-{index}"
    counts = fill(whole)
    record = shards.ShardRecord(
        index, self.path(index).name, whole.stat().st_size, hashlib.sha256(whole.read_bytes()).hexdigest(), counts
    )
    self._record_path(index).write_text(json.dumps(asdict(record), indent=2) + "\n")
    with weights.replacing(self.path(index)) as unfinished:
        unfinished.write_bytes(whole.read_bytes())
    whole.unlink()
    return record
