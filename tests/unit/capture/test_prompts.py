"""A capture as a whole: what the folder holds, that it resumes, and what is refused."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.unit.capture.chatting import capture_run, chat_target, chat_target_folder

from paceline.capture import sampling
from paceline.capture.prompts import PromptCapture, read_captured
from paceline.capture.shards import MANIFEST_FILE, ShardFolder
from paceline.capture.token_file import read_token_file
from paceline.errors import CapacityError, CompatibilityError, ConfigError, DataError
from paceline.models.loading import LoadedTarget, load_target


@pytest.fixture(scope="module")
def target() -> LoadedTarget:
    return chat_target(num_layers=1)


def capture(target: LoadedTarget, folder: Path, **changes: Any) -> dict[str, object]:
    return PromptCapture(capture_run(folder, backend="lockstep", **changes), target).run_all()


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".lock"}


def test_a_folder_holds_every_prompt_once(target: LoadedTarget, tmp_path: Path) -> None:
    figures = capture(target, tmp_path / "out", max_user_tokens=2, self_chat=1200, shard_size=400, batch_size=200)
    shards = ShardFolder.read(tmp_path / "out")
    rows = [(shards.path(index), read_token_file(shards.path(index))) for index in range(3)]
    whole = read_captured(tmp_path / "out")
    prompts = [tuple(whole.prompt_ids(index)) for index in range(len(whole))]
    all_prompts = [tuple(file.prompt_ids(index)) for _, file in rows for index in range(len(file))]
    assert len(set(prompts)) == len(prompts) == figures["conversations"]
    assert figures["repeated_across_shards"] == len(all_prompts) - len(prompts) > 0
    assert prompts == list(dict.fromkeys(all_prompts)), "the lower shard keeps a prompt"
    assert figures["tokens"] == whole.tokens.size
    manifest = json.loads((tmp_path / "out" / MANIFEST_FILE).read_text())
    assert manifest["complete"] and manifest["summary"]["conversations"] == len(prompts)
    assert manifest["plan"]["sampling"]["temperature"] == 0.8
    with np.load(shards.path(0)) as arrays:
        assert set(arrays["end"].tolist()) <= {"stop", "length", "loop"}
        assert len(arrays["id"]) == len(arrays["seed"]) == len(arrays["temperature"]) == len(rows[0][1])
        assert len(arrays["id"]) + len(arrays["dropped_id"]) == 400


def test_both_back_ends_capture_the_same(target: LoadedTarget, tmp_path: Path) -> None:
    engine = PromptCapture(capture_run(tmp_path / "e", self_chat=24, backend="engine"), target)
    engine.run_all()
    capture(target, tmp_path / "l", self_chat=24)
    for name in ("shard-00000.npz", "shard-00001.npz"):
        assert (tmp_path / "e" / name).read_bytes() == (tmp_path / "l" / name).read_bytes()


@pytest.mark.parametrize("stateful", [False, True])
def test_a_stopped_capture_ends_in_the_same_bytes(
    target: LoadedTarget, tmp_path: Path, stateful: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if stateful:  # the planted fault: draws that go on from the last ones instead of following from the row
        state = iter(range(10**6))
        monkeypatch.setattr(sampling, "key_number", lambda *key: next(state))
    capture(target, tmp_path / "whole", greedy_share=0.0)
    real, num_written = ShardFolder.write, 0

    def stop_after_two(self: ShardFolder, index: int, fill: Any) -> Any:
        nonlocal num_written
        num_written += 1
        if num_written == 3:
            raise KeyboardInterrupt
        return real(self, index, fill)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(ShardFolder, "write", stop_after_two)
        capture(target, tmp_path / "out", greedy_share=0.0)
    with pytest.raises(DataError, match="4 of 6 shards are missing"):
        read_captured(tmp_path / "out")
    figures = capture(target, tmp_path / "out", greedy_share=0.0)
    assert (files(tmp_path / "out") == files(tmp_path / "whole")) is not stateful
    assert capture(target, tmp_path / "out", greedy_share=0.0) == figures, "a finished one has nothing to do"


def test_a_damaged_shard_is_mended(target: LoadedTarget, tmp_path: Path) -> None:
    capture(target, tmp_path, self_chat=32)
    whole = files(tmp_path)
    damaged = bytearray(whole["shard-00001.npz"])
    damaged[40] ^= 255
    (tmp_path / "shard-00001.npz").write_bytes(damaged)
    with pytest.raises(DataError, match="differ from their recorded SHA-256"):
        read_captured(tmp_path)
    with pytest.raises(DataError, match="once more"):
        capture(target, tmp_path, self_chat=32)
    capture(target, tmp_path, self_chat=32)
    assert files(tmp_path) == whole


def test_another_capture_is_refused(target: LoadedTarget, tmp_path: Path) -> None:
    capture(target, tmp_path, self_chat=8)
    before = files(tmp_path)
    with pytest.raises(ConfigError, match=r"source.rows: 8 there, 9 now\n  sampling.temperature: 0.8 there, 0.7 now"):
        capture(target, tmp_path, self_chat=9, temperature=0.7)
    with pytest.raises(ConfigError, match="sha256_of_weights"):
        capture(chat_target(num_layers=1, seed=3), tmp_path, self_chat=8)
    assert files(tmp_path) == before


def test_given_prompts(tmp_path: Path) -> None:
    folder = chat_target_folder(tmp_path / "target", num_layers=1)
    target = load_target(str(folder), device="cpu", dtype="float32")
    rows = [{"prompt": f"w{index} w9 w{index}"} for index in range(8, 20)]
    rows += [{"prompt": "w10 w9 w10"}, {"id": "long", "prompt": "w9 " * 600}, {"prompt": "w11 w12 w13 w14 w15"}]
    chat = [{"role": "user", "content": "w7 w8"}, {"role": "assistant", "content": "w9"}]
    rows.append({"id": "multi", "messages": [*chat, {"role": "user", "content": "w9 w8"}]})
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "eval.txt").write_text("W10, w11 w12 W13 w14 again\n")
    changes: dict[str, Any] = {
        "prompts": str(tmp_path / "prompts.jsonl"),
        "exclude": [str(tmp_path / "eval.txt")],
        "exclude_ngram": 4,
        "shard_size": 5,
    }
    with pytest.raises(DataError, match="room for 500"):
        capture(target, tmp_path / "out", **changes)
    assert not (tmp_path / "out").exists()
    figures = capture(target, tmp_path / "out", max_prompt_tokens=100, **changes)
    assert figures["prompts_left_out"] == 3  # repeated, too long, excluded
    whole = read_captured(tmp_path / "out")
    assert len(whole) in (13, 14)
    manifest = json.loads((tmp_path / "out" / MANIFEST_FILE).read_text())
    assert manifest["num_shards"] == 3 and manifest["plan"]["chat_template_sha256"] is not None
    assert manifest["plan"]["default_system_prompt"] is False


def test_an_estimate_writes_nothing(target: LoadedTarget, tmp_path: Path) -> None:
    run = capture_run(tmp_path / "out", self_chat=100)
    found = PromptCapture(run, target).estimate()
    assert found.num_answer_tokens == 100 * (20 + 12) and found.num_shards == 7
    assert found.disk_bytes == 100 * (3 + 20 + 3 + 12) * 2
    assert found.tokens_per_s > 0 and found.time_s == pytest.approx(3200 / found.tokens_per_s)
    assert not (tmp_path / "out").exists()
    capture(target, tmp_path / "out", self_chat=100)
    assert sum(path.stat().st_size for path in (tmp_path / "out").glob("*.npz")) < found.disk_bytes + 7 * 4096


def test_a_full_disk(target: LoadedTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    ShardFolder.open(tmp_path / "out", PromptCapture(capture_run(tmp_path / "out"), target).plan(), 6, suffix=".npz")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CapacityError):
        PromptCapture(capture_run(tmp_path / "out"), target).run_all()
    assert sorted(files(tmp_path / "out")) == [MANIFEST_FILE]


def test_what_cannot_fit(target: LoadedTarget, tmp_path: Path) -> None:
    with pytest.raises(CompatibilityError, match="max_answer_tokens is 512; the target has positions for 512"):
        capture(target, tmp_path, max_answer_tokens=512)


def test_a_folder_of_something_else(tmp_path: Path) -> None:
    shards = ShardFolder.open(tmp_path, {"content": "features"}, 1, suffix=".bin")
    shards.write(0, lambda path: {"bytes": path.write_bytes(b"x")})
    shards.finish()
    with pytest.raises(DataError, match="holds no conversations"):
        read_captured(tmp_path)
