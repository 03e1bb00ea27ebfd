"""Features on disk: the right numbers, a function of the plan alone, whole whatever dies, checked before they count."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.capture.feature_runs import (
    LAYERS,
    TinyJob,
    files_of,
    make_capture,
    random_texts,
    shard_files,
    small_target,
    write_all,
)

from paceline.capture import feature_plan, features
from paceline.capture.feature_checks import ScaleWatch, check_sample
from paceline.capture.feature_file import StoredConversations
from paceline.capture.feature_plan import bytes_per_token, require_disk, shard_borders, shard_bytes
from paceline.capture.feature_record import Texts
from paceline.capture.features import FEWEST_AGREEING, FeatureCapture, finish_capture
from paceline.capture.shards import MANIFEST_FILE, ShardFolder
from paceline.checkpoint.contract import TargetLayerId
from paceline.checkpoint.weights import open_safetensors_file, read_safetensors_metadata
from paceline.errors import CapacityError, ConfigError, DataError, NumericError
from paceline.models.attends import WholeSequence
from paceline.models.loading import LoadedTarget


def _finished(folder: Path, capture: FeatureCapture) -> ShardFolder:
    finish_capture(write_all(folder, capture))
    return ShardFolder.read(folder)


def _hooked(target: LoadedTarget, token_ids: np.ndarray) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Outputs of the tapped layers, taken by hooks, and the state after the final norm."""
    found: list[torch.Tensor] = []
    handles = [
        target.model.layers[layer].register_forward_hook(lambda *arguments: found.append(arguments[2][0]))
        for layer in LAYERS
    ]
    ids = torch.from_numpy(token_ids.astype(np.int64))[None]
    with torch.no_grad():
        hidden = target.model(ids, torch.arange(ids.shape[1])[None], WholeSequence())
    for handle in handles:
        handle.remove()
    return found, hidden[0]


def _worst_error(target: LoadedTarget, stored: StoredConversations, texts: Texts) -> float:
    """Largest difference between what is stored and what hooks on the tapped layers see."""
    worst = 0.0
    for index in range(len(texts)):
        token_ids = texts.tokens[texts.span(index)]
        taps, hidden = _hooked(target, token_ids)
        stored_taps, stored_hidden = stored.find(token_ids)
        assert stored_hidden is not None
        worst = max(worst, float((stored_taps - torch.cat(taps, -1)).abs().max()))
        worst = max(worst, float((stored_hidden - hidden).abs().max()))
    return worst


def test_what_is_stored_is_what_hooks_on_the_layers_see(tmp_path: Path) -> None:
    target, texts = small_target(), random_texts()
    capture = make_capture(target, texts)
    assert capture.num_shards > 4
    stored = StoredConversations(_finished(tmp_path / "out", capture))
    assert len(stored) == len(texts)
    assert _worst_error(target, stored, texts) < 2e-5


def test_a_tap_one_layer_off_would_be_seen(tmp_path: Path) -> None:
    target, texts = small_target(), random_texts(8)
    shifted = make_capture(target, texts, layer_ids=(TargetLayerId(0), TargetLayerId(1)))
    stored = StoredConversations(_finished(tmp_path / "out", shifted))
    assert _worst_error(target, stored, texts) > 0.1


def test_a_shard_tells_by_itself_where_it_belongs(tmp_path: Path) -> None:
    capture = make_capture(small_target(), random_texts(8))
    folder = _finished(tmp_path / "out", capture)
    header = read_safetensors_metadata(folder.path(0))
    assert json.loads(header["capture_ids"]) == [1, 3], "hidden states count from the embedding"
    assert (header["tap_id_scheme"], header["dtype"], header["last_hidden_norm"]) == ("output", "float32", "post")
    assert header["run_id"] == folder.plan["run_id"]
    assert header["target_sha256"] == folder.plan["capture"]["target"]["sha256_of_weights"]


def test_states_that_nothing_reads_are_left_out(tmp_path: Path) -> None:
    capture = make_capture(small_target(), random_texts(8), keeps_hidden=False)
    folder = _finished(tmp_path / "out", capture)
    assert "last_hidden" not in open_safetensors_file(folder.path(0)).names()
    assert folder.plan["capture"]["last_hidden_norm"] == "absent"
    assert StoredConversations(folder).find(random_texts(8).tokens[random_texts(8).span(3)])[1] is None


def test_bf16_states_stay_bf16(tmp_path: Path) -> None:
    target = small_target()
    target.model.to(torch.bfloat16)
    target.model.position_table = target.model.position_table.float()
    folder = _finished(tmp_path / "out", make_capture(target, random_texts(8)))
    assert open_safetensors_file(folder.path(0)).load("taps").dtype == torch.bfloat16
    assert folder.plan["capture"]["tap_dtype"] == "bfloat16"


def test_the_bytes_do_not_depend_on_threads_or_on_the_order_of_writing(tmp_path: Path) -> None:
    target, texts = small_target(), random_texts()
    finish_capture(write_all(tmp_path / "a", make_capture(target, texts)))
    capture = make_capture(target, texts)
    shards = capture.open(tmp_path / "b")
    for index in reversed(range(capture.num_shards)):
        capture.write(shards, index)
    finish_capture(shards)
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b")


def test_golden_sizes() -> None:
    assert bytes_per_token(576, 5, 2, keeps_hidden=True) == 6912
    assert bytes_per_token(576, 3, 2, keeps_hidden=True) == 4608
    assert bytes_per_token(2560, 5, 2, keeps_hidden=True) == 30_720
    assert round(shard_bytes(10_000_000, 0, 6912, 0) / 1e9) == 69
    assert shard_borders(np.array([5, 5, 20, 1, 1]), 10, 100).tolist() == [0, 2, 3, 5]


def test_the_estimate_is_what_lands_on_the_disk(tmp_path: Path) -> None:
    capture = make_capture(small_target(), random_texts(200), shard_bytes=200_000)
    _finished(tmp_path / "out", capture)
    real = sum(len(content) for name, content in files_of(tmp_path / "out").items() if name.startswith("shard"))
    assert 0.9 < real / capture.num_bytes(range(capture.num_shards)) < 1.1


def test_a_disk_that_is_too_small_is_refused_with_both_numbers_before_a_byte_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feature_plan.shutil, "disk_usage", lambda path: SimpleNamespace(free=68_000_000))
    capture = make_capture(small_target(), random_texts(200), shard_bytes=10**6)
    needed = capture.num_bytes(range(capture.num_shards))
    assert needed > 68_000_000 - 64 * 2**20 > 0
    with pytest.raises(CapacityError) as caught:
        capture.open(tmp_path / "out")
    assert f"{needed:,} bytes" in caught.value.message and "68,000,000 free" in caught.value.message
    assert not (tmp_path / "out").exists()
    require_disk(tmp_path / "out", 1000)


def test_only_what_is_missing_has_to_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    capture = make_capture(small_target(), random_texts())
    shards = write_all(tmp_path / "out", capture)
    shards.path(0).unlink()
    asked: list[int] = []
    monkeypatch.setattr(features, "require_disk", lambda folder, num_bytes: asked.append(num_bytes))
    capture.open(tmp_path / "out")
    assert asked == [capture.num_bytes([0])]


def test_another_plan_does_not_go_into_the_same_folder(tmp_path: Path) -> None:
    write_all(tmp_path / "out", make_capture(small_target(), random_texts()))
    before = files_of(tmp_path / "out")
    with pytest.raises(ConfigError, match="sha256_of_weights"):
        make_capture(small_target(seed=1), random_texts()).open(tmp_path / "out")
    assert files_of(tmp_path / "out") == before


def _predictable(target: LoadedTarget, count: int, length: int) -> Texts:
    """Text that the target itself would write greedily."""
    rows = []
    for start in range(count):
        ids = torch.tensor([[10 + start, 20 + start]])
        while ids.shape[1] < length:
            with torch.no_grad():
                hidden = target.model(ids, torch.arange(ids.shape[1])[None], WholeSequence())
            ids = torch.cat([ids, target.model.logits(hidden[:, -1:]).argmax(-1)], dim=1)
        rows.append(ids[0].numpy().astype(np.int32))
    supervised = np.tile(np.arange(length) >= 2, count)
    return Texts(np.concatenate(rows), supervised, np.arange(count + 1, dtype=np.int64) * length)


def test_the_last_state_predicts_the_text_that_the_target_wrote(tmp_path: Path) -> None:
    target = small_target()
    texts = _predictable(target, 12, 14)
    summary = finish_capture(write_all(tmp_path / "out", make_capture(target, texts)))
    assert summary["teacher_checked"] == 12 * 12
    agreement = summary["teacher_agreement"]
    assert isinstance(agreement, float) and agreement >= FEWEST_AGREEING


def test_logits_rebuilt_from_stored_states_are_the_target_s(tmp_path: Path) -> None:
    target, texts = small_target(), random_texts(8)
    folder = write_all(tmp_path / "out", make_capture(target, texts))
    token_ids = texts.tokens[texts.span(5)]
    _, hidden = StoredConversations(folder).find(token_ids)
    assert hidden is not None
    ids = torch.from_numpy(token_ids.astype(np.int64))[None]
    with torch.no_grad():
        logits = target.model.logits(target.model(ids, torch.arange(ids.shape[1])[None], WholeSequence()))[0]
        torch.testing.assert_close(target.model.logits(hidden), logits, rtol=0, atol=2e-4)


@pytest.mark.parametrize("fault", ["no norm", "shifted"])
def test_a_teacher_of_another_norm_or_place_would_be_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    target = small_target()
    texts = _predictable(target, 12, 14)
    if fault == "no norm":  # gains that differ, so that leaving them out turns the state
        monkeypatch.setattr(target.model.norm, "forward", lambda x: x.roll(1, -1))
    else:
        texts = Texts(np.roll(texts.tokens, 1), texts.supervised, texts.starts)
    summary = finish_capture(write_all(tmp_path / "out", make_capture(target, texts)))
    agreement = summary["teacher_agreement"]
    assert isinstance(agreement, float) and agreement < 0.6


def test_scales_are_reported_per_tap_and_apart_for_the_first_position(tmp_path: Path) -> None:
    """The first token of a text carries a massive activation in many targets."""
    target, texts = small_target(), random_texts(12)
    folder = write_all(tmp_path / "out", make_capture(target, texts))
    summary = finish_capture(folder)
    stored = StoredConversations(folder)
    taps = [stored.find(texts.tokens[texts.span(index)])[0].view(-1, 2, 32) for index in range(len(texts))]
    later = torch.cat([tap[1:] for tap in taps]).square().mean((0, 2)).sqrt()
    first = torch.cat([tap[:1] for tap in taps]).square().mean((0, 2)).sqrt()
    assert summary["tap_rms"] == pytest.approx(later.tolist(), rel=1e-5)
    assert summary["tap_rms_at_first_position"] == pytest.approx(first.tolist(), rel=1e-5)


def test_a_conversation_of_another_scale_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    watch = ScaleWatch(2)
    with caplog.at_level(logging.WARNING, logger="paceline"):
        for conversation in range(20):
            check_sample(conversation, torch.ones(5, 8), None, (3, 7), watch)
        assert watch.num_warnings == 0
        taps = torch.ones(5, 8)
        taps[1:, 4:] = 3.5
        check_sample(20, taps, None, (3, 7), watch)
    assert watch.num_warnings == 1
    assert "conversation 20: layer 7 has RMS 3.5, the conversations before it 1" in caplog.text


@pytest.mark.parametrize("place", ["taps", "hidden"])
def test_a_state_that_is_not_finite_ends_the_capture_and_names_the_conversation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    target, texts = small_target(), random_texts()
    layer: Any = target.model.norm if place == "hidden" else target.model.layers[2]
    original = layer.forward

    def overflow(x: torch.Tensor, *arguments: Any) -> torch.Tensor:
        y: torch.Tensor = original(x, *arguments)
        y[0, 1, 5] = float("nan")
        return y

    monkeypatch.setattr(layer, "forward", overflow)
    capture = make_capture(target, texts)
    shards = capture.open(tmp_path / "out")
    with pytest.raises(NumericError, match=r"conversation \d+: the (output of layer 2|last state) is not finite"):
        capture.run(shards)
    assert shards.missing() == list(range(capture.num_shards)), "nothing of it was written"


def test_a_full_disk_ends_the_capture_and_what_was_written_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undisturbed: Mapping[str, bytes]
) -> None:
    capture = make_capture(small_target(), random_texts())
    shards = capture.open(tmp_path / "out")
    original = features.write_feature_file
    calls = [0]

    def full(*arguments: Any) -> dict[str, int]:
        calls[0] += 1
        if calls[0] == 3:
            raise OSError(28, "No space left on device")
        return original(*arguments)

    monkeypatch.setattr(features, "write_feature_file", full)
    with pytest.raises(CapacityError):
        capture.run(shards)
    assert shards.missing() == list(range(2, capture.num_shards))
    capture.run(shards)
    finish_capture(shards)
    assert files_of(tmp_path / "out") == undisturbed


def test_long_captures_hold_no_more_than_the_buffer_and_a_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thousand conversations through a buffer of a few, with a disk that is slower than the target."""
    capture = make_capture(
        small_target(),
        random_texts(1000, longest=16),
        high_bytes=30_000,
        low_bytes=5_000,
        shard_bytes=400_000,
        batch_tokens=64,
    )
    buffers: list[Any] = []
    original = features.FeatureBuffer

    def remembered(*arguments: Any) -> Any:
        buffers.append(original(*arguments))
        return buffers[-1]

    monkeypatch.setattr(features, "FeatureBuffer", remembered)
    monkeypatch.setattr(features, "write_feature_file", lambda path, content, header: path.touch() or {})
    capture.run(capture.open(tmp_path / "out"))
    largest = 64 * 32 * 3 * 4  # a batch of 64 tokens
    assert buffers[0].peak_bytes <= 30_000 + largest


def test_a_shard_cut_at_any_byte_is_missing_and_is_written_again(tmp_path: Path) -> None:
    capture = make_capture(small_target(), random_texts(8))
    folder = _finished(tmp_path / "out", capture)
    whole = files_of(tmp_path / "out")
    shard, record = folder.path(0), folder.path(0).with_suffix(".json")
    sizes = {shard: [0, 1, 7, 8, 9, *range(100, len(whole[shard.name]), 997), len(whole[shard.name]) - 1]}
    sizes[record] = list(range(len(whole[record.name]) - 2))  # without its last bytes it still says all
    for path, cuts in sizes.items():
        for size in cuts:
            path.write_bytes(whole[path.name][:size])
            assert folder.missing() == [0]
            with pytest.raises(DataError, match="not complete"):
                ShardFolder.read(tmp_path / "out")
            path.write_bytes(whole[path.name])
    shard.write_bytes(whole[shard.name][:100])
    finish_capture(write_all(tmp_path / "out", capture))
    assert files_of(tmp_path / "out") == whole


def test_a_flipped_byte_is_found(tmp_path: Path) -> None:
    folder = _finished(tmp_path / "out", make_capture(small_target(), random_texts(8)))
    content = bytearray(folder.path(1).read_bytes())
    content[-1] ^= 1
    folder.path(1).write_bytes(content)
    with pytest.raises(DataError, match=r"shard\(s\) 1 differ"):
        ShardFolder.read(tmp_path / "out")


def test_a_shard_of_another_capture_is_found(tmp_path: Path) -> None:
    """Somebody who copied shards together gets an error, not another target's states."""
    ours = _finished(tmp_path / "ours", make_capture(small_target(), random_texts(8)))
    theirs = _finished(tmp_path / "theirs", make_capture(small_target(seed=1), random_texts(8)))
    for path in (ours.path(0), ours.path(0).with_suffix(".json")):
        path.write_bytes((tmp_path / "theirs" / path.name).read_bytes())
    with pytest.raises(DataError, match=f"written by capture {theirs.plan['run_id']}"):
        StoredConversations(ShardFolder.read(tmp_path / "ours"))


def _run_and_wait(folder: Path, begun: Any, slow_s: float) -> None:
    """Body of a process that is killed: a whole capture, slowed down so that the kill comes in the middle."""
    torch.set_num_threads(1)
    capture = make_capture(small_target(), random_texts())
    original = features.write_feature_file

    def slowly(path: Path, content: Any, header: Mapping[str, str]) -> dict[str, int]:
        begun.set()
        counts = original(path, content, header)
        time.sleep(slow_s)
        return counts

    features.write_feature_file = slowly
    write_all(folder, capture)
    os._exit(0)


@pytest.fixture(scope="module")
def fork() -> Callable[..., Any]:
    """Processes that start in no time, with everything imported."""
    return multiprocessing.get_context("fork").Process


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, bytes]:
    """What a finished capture holds."""
    folder = tmp_path_factory.mktemp("features") / "whole"
    finish_capture(write_all(folder, make_capture(small_target(), random_texts())))
    return files_of(folder)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("seed", range(7))
def test_killed_at_a_random_moment_and_resumed_the_bytes_are_those_of_an_undisturbed_capture(
    tmp_path: Path, fork: Callable[..., Any], undisturbed: Mapping[str, bytes], seed: int
) -> None:
    moment, folder = random.Random(seed), tmp_path / "out"
    num_kills = 0
    for _ in range(3):
        begun = multiprocessing.get_context("fork").Event()
        process = fork(target=_run_and_wait, args=(folder, begun, 0.03))
        process.start()
        while not begun.wait(0.05) and process.is_alive():
            pass
        time.sleep(moment.uniform(0.0, 0.05))
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        num_kills += process.exitcode == -signal.SIGKILL
    assert num_kills >= 1
    finish_capture(write_all(folder, make_capture(small_target(), random_texts())))
    assert files_of(folder) == undisturbed
    assert not [path for path in folder.iterdir() if ".tmp-" in path.name]


def test_a_capture_that_trusts_half_a_shard_would_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault of the test above: what a kill left under its final name counts as written."""
    capture = make_capture(small_target(), random_texts())
    shards = write_all(tmp_path / "out", capture)
    shards.path(2).write_bytes(b"half a shard")
    monkeypatch.setattr(ShardFolder, "missing", lambda self: [])
    write_all(tmp_path / "out", make_capture(small_target(), random_texts()))
    write_all(tmp_path / "whole", make_capture(small_target(), random_texts()))
    assert shard_files(tmp_path / "out") != shard_files(tmp_path / "whole")


def test_a_job_writes_what_a_capture_writes(tmp_path: Path) -> None:
    write = TinyJob(tmp_path / "job").open()
    capture = make_capture(small_target(), random_texts())
    for index in range(capture.num_shards):
        write(index)
    write_all(tmp_path / "whole", capture)
    assert shard_files(tmp_path / "job") == shard_files(tmp_path / "whole")
    assert (tmp_path / "job" / MANIFEST_FILE).is_file()
