"""Features from disk: the same training step as with the target at hand, bit for bit, and nothing else accepted."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.tiny import tiny_prompts, tiny_target, wrap_target
from tests.tiny_run import tiny_settings, write_token_file
from torch import Tensor

from paceline.capture.feature_plan import CaptureSettings
from paceline.capture.feature_record import COMPARED, conversation_key, cut_texts, data_sha256, feature_record
from paceline.capture.features import FeatureCapture, finish_capture
from paceline.capture.shards import MANIFEST_FILE
from paceline.checkpoint.contract import TargetLayerId
from paceline.configuration.run import TrainRun
from paceline.errors import CompatibilityError, DataError
from paceline.models.loading import LoadedTarget
from paceline.training.contract import drafter_contract
from paceline.training.data import Batch, Conversations, join, read_conversations, split_held_out
from paceline.training.feature_source import StoredFeatures, needs_last_hidden, open_stored_features, texts_of
from paceline.training.features import TargetFeatures
from paceline.training.objective import Objective
from paceline.training.packing import PackedOrder
from paceline.training.starting import starting_drafter
from paceline.training.step import StepResult, StepSettings, train_step

MAX_LENGTH = 24
LONG = 300  # more than one tile of any fused kernel


def _target(seed: int = 0, mode: Any = "row_invariant", dtype: torch.dtype = torch.float32) -> LoadedTarget:
    model = tiny_target(seed=seed, hidden_size=32, intermediate_size=48, head_size=8)
    return wrap_target(model.to(dtype), mode)


def _run(folder: Path, **changes: Any) -> TrainRun:
    data = folder / "data.npz"
    if not data.exists():
        folder.mkdir(parents=True, exist_ok=True)
        lengths = np.random.default_rng(0).integers(8, 40, 24).tolist()
        lengths[3], lengths[9] = LONG, LONG - 60
        write_token_file(data, tiny_prompts(lengths), num_prompt_tokens=4)
    features = folder / "features"
    return tiny_settings(folder / "out", data, **{"data_max_length": MAX_LENGTH, "data_features": features, **changes})


def _conversations(run: TrainRun) -> Conversations:
    return read_conversations(run.data.files[0], vocab_size=512)


def _capture(run: TrainRun, target: LoadedTarget, *, layer_ids: Sequence[int] | None = None) -> None:
    """What the verb does; `layer_ids` are those that are really tapped, whatever the record says."""
    contract = drafter_contract(run, target.contract)
    texts = texts_of(_conversations(run), run.data.max_length)
    settings = CaptureSettings(
        layer_ids=contract.target_layer_ids, keeps_hidden=needs_last_hidden(run), batch_tokens=600, shard_bytes=40_000
    )
    record = feature_record(
        target,
        [texts],
        layer_ids=settings.layer_ids,
        stream=settings.stream,
        keeps_hidden=settings.keeps_hidden,
        max_length=run.data.max_length,
    )
    if layer_ids is not None:
        settings = replace(settings, layer_ids=tuple(TargetLayerId(layer) for layer in layer_ids))
    assert run.data.features is not None
    capture = FeatureCapture(target, texts, settings, record)
    shards = capture.open(run.data.features)
    capture.run(shards)
    finish_capture(shards)


def _open(run: TrainRun, target: LoadedTarget) -> StoredFeatures:
    split = split_held_out(_conversations(run), run.data.hold_out)
    return open_stored_features(run, target, drafter_contract(run, target.contract), split)


def _online(run: TrainRun, target: LoadedTarget) -> TargetFeatures:
    contract = drafter_contract(run, target.contract)
    return TargetFeatures(target.model, contract.target_layer_ids, contract.aux_hidden_stream)


def _step(run: TrainRun, target: LoadedTarget, features: TargetFeatures, batches: list[Batch]) -> tuple[Any, ...]:
    """Loss, gradient norm, and every parameter after one optimizer step."""
    contract = drafter_contract(run, target.contract)
    drafter = starting_drafter(run, contract, target, _conversations(run), torch.device("cpu"))
    weights = run.objective.loss_weights
    objective = Objective(kl=weights.get("kl", 0.0), ce=weights.get("ce", 0.0), gamma=4.0, chunk_rows=64)
    result: StepResult = train_step(
        drafter,
        features,
        torch.optim.SGD(drafter.parameters(), lr=0.0),
        batches,
        lambda part: torch.Generator().manual_seed(part),
        0.5,
        StepSettings(objective=objective, num_anchors=6, clip_norm=1e9, mixed_precision=False),
    )
    assert bool(result.is_finite)
    return result.loss, result.gradient_norm, *(p.detach() for p in drafter.parameters())


def _equal(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def _batches(run: TrainRun, *, packed: bool) -> list[Batch]:
    conversations = _conversations(run)
    if packed:
        lengths = np.diff(conversations.starts)
        rows = PackedOrder(lengths, run.data.max_length, 2, seed=0)
        return [conversations.packed_batch(rows(part), run.data.max_length) for part in range(2)]
    return [conversations.batch([3, 1, 7], run.data.max_length), conversations.batch([2, 9, 5], run.data.max_length)]


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("max_length", [MAX_LENGTH, LONG])
@pytest.mark.parametrize("family", ["dflash", "dflash2", "dspark", "eagle3"])
def test_a_training_step_is_bitwise_the_same_from_disk(
    tmp_path: Path, family: str, max_length: int, packed: bool
) -> None:
    changes: dict[str, Any] = {"drafter_family": family, "data_max_length": max_length}
    if family == "eagle3":
        changes["drafter_mask_token_id"] = None
    run, target = _run(tmp_path, **changes), _target()
    _capture(run, target)
    batches = _batches(run, packed=packed)
    online = _step(run, target, _online(run, target), batches)
    assert _equal(online, _step(run, target, _open(run, target), batches))


def test_a_step_on_cross_entropy_alone_needs_no_last_state(tmp_path: Path) -> None:
    """None is stored, and whatever read one would see NaN."""
    run, target = _run(tmp_path, objective_loss="ce"), _target()
    assert not needs_last_hidden(run)
    _capture(run, target)
    stored, batches = _open(run, target), _batches(run, packed=False)
    assert bool(stored(batches[0]).hidden_BSD.isnan().all())
    online = _step(run, target, _online(run, target), batches)
    assert _equal(online, _step(run, target, stored, batches))


def test_which_runs_read_the_last_state(tmp_path: Path) -> None:
    assert needs_last_hidden(_run(tmp_path, objective_loss="kl"))
    assert needs_last_hidden(_run(tmp_path, objective_loss={"ce": 0.9, "l1": 0.1}))
    assert needs_last_hidden(_run(tmp_path, objective_loss="ce", drafter_family="dspark"))
    assert not needs_last_hidden(
        _run(tmp_path, objective_loss="ce", drafter_family="dspark", drafter_confidence_head=False)
    )


@pytest.mark.parametrize("mode", ["plain", "row_invariant"])
def test_in_other_arithmetic_both_agree_to_rounding(tmp_path: Path, mode: str) -> None:
    run, target = _run(tmp_path, data_max_length=LONG), _target(mode=mode)
    _capture(run, target)
    batch = _batches(run, packed=False)[0]
    stored, online = _open(run, target)(batch), _online(run, target)(batch)
    for row, length in enumerate(batch.lengths_B.tolist()):
        for left, right in zip([*stored.taps, stored.hidden_BSD], [*online.taps, online.hidden_BSD], strict=True):
            torch.testing.assert_close(left[row, :length], right[row, :length], rtol=0, atol=5e-5)
            assert mode == "plain" or torch.equal(left[row, :length], right[row, :length])


def test_bf16_is_bitwise_too(tmp_path: Path) -> None:
    run = _run(tmp_path, data_max_length=LONG, target_dtype="bfloat16")
    target = _target(dtype=torch.bfloat16)
    _capture(run, target)
    batch = _batches(run, packed=False)[1]
    stored, online = _open(run, target)(batch), _online(run, target)(batch)
    assert stored.hidden_BSD.dtype == torch.bfloat16
    for row, length in enumerate(batch.lengths_B.tolist()):
        for left, right in zip([*stored.taps, stored.hidden_BSD], [*online.taps, online.hidden_BSD], strict=True):
            assert torch.equal(left[row, :length], right[row, :length])


def test_a_tap_one_layer_off_is_refused_and_with_a_forged_record_changes_the_step(tmp_path: Path) -> None:
    """The planted fault of the tests above: what the record protects from, and that it would have been seen."""
    target = _target()
    run = _run(tmp_path / "honest")
    _capture(_run(tmp_path / "honest", drafter_target_layer_ids=[0, 1]), target)
    with pytest.raises(CompatibilityError, match=r"tap_ids: stored \[0, 1\], needed \[0, 2\]"):
        _open(run, target)
    forged = _run(tmp_path / "forged")
    _capture(forged, target, layer_ids=[0, 1])
    batches = _batches(forged, packed=False)
    online = _step(forged, target, _online(forged, target), batches)
    assert not _equal(online, _step(forged, target, _open(forged, target), batches))


def _edited(key: str, value: object) -> Callable[[dict[str, Any]], None]:
    def edit(record: dict[str, Any]) -> None:
        *path, last = key.split(".")
        for part in path:
            record = record[part]
        record[last] = value

    return edit


CHANGED: Mapping[str, object] = {
    "schema_version": 0,
    "target.sha256_of_weights": "ab" * 32,
    "target.architecture": "Qwen3ForCausalLM",
    "target.num_layers": 5,
    "target.hidden_size": 64,
    "target.vocab_size": 500,
    "target.dtype": "bfloat16",
    "tokenizer_sha256": "cd" * 32,
    "chat_template_sha256": "ef" * 32,
    "tap_ids": [1, 2],
    "tap_id_scheme": "engine",
    "tap_point": "layer_input",
    "aux_hidden_stream": "attn_res",
    "tap_dtype": "float16",
    "tap_norm": "fc_norm",
    "last_hidden_norm": "pre",
    "logit_softcap": 30.0,
    "logit_multiplier": 0.5,
    "data.max_length": 64,
    "data.num_conversations": 23,
    "data.sha256": "01" * 32,
}


def test_every_compared_key_is_refused_by_its_name(tmp_path: Path) -> None:
    assert CHANGED.keys() == COMPARED.keys()
    run, target = _run(tmp_path), _target()
    _capture(run, target)
    assert run.data.features is not None
    manifest = run.data.features / MANIFEST_FILE
    honest = json.loads(manifest.read_text())
    for key, value in CHANGED.items():
        changed = json.loads(json.dumps(honest))
        _edited(key, value)(changed["plan"]["capture"])
        manifest.write_text(json.dumps(changed))
        with pytest.raises(CompatibilityError, match=rf"\n  {key}: stored .*, needed .*") as caught:
            _open(run, target)
        assert caught.value.message.count("stored") == 2, "that key alone, beside the headline"
    manifest.write_text(json.dumps(honest))
    _open(run, target)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"drafter_target_layer_ids": [1, 2]}, "tap_ids"),
        ({"data_max_length": 20}, "data.max_length"),
    ],
)
def test_another_run_is_refused(tmp_path: Path, change: dict[str, Any], key: str) -> None:
    _capture(_run(tmp_path), _target())
    with pytest.raises(CompatibilityError, match=key):
        _open(_run(tmp_path, **change), _target())


def test_another_target_or_other_data_is_refused(tmp_path: Path) -> None:
    run = _run(tmp_path)
    _capture(run, _target())
    with pytest.raises(CompatibilityError, match=r"target\.sha256_of_weights"):
        _open(run, _target(seed=1))
    with pytest.raises(CompatibilityError, match=r"target\.dtype: stored 'float32', needed 'bfloat16'"):
        _open(run, _target(dtype=torch.bfloat16))
    write_token_file(run.data.files[0], tiny_prompts([20] * 24, seed=5), num_prompt_tokens=4)
    with pytest.raises(CompatibilityError, match=r"data\.sha256"):
        _open(run, _target())


def test_a_last_state_that_is_missing_is_refused_and_one_too_many_is_not(tmp_path: Path) -> None:
    _capture(_run(tmp_path / "ce", objective_loss="ce"), _target())
    with pytest.raises(CompatibilityError, match="last_hidden_norm: stored 'absent', needed 'post'"):
        _open(_run(tmp_path / "ce", objective_loss="kl"), _target())
    _capture(_run(tmp_path / "kl", objective_loss="kl"), _target())
    _open(_run(tmp_path / "kl", objective_loss="ce"), _target())


def test_how_much_is_held_out_and_the_order_of_files_make_no_difference(tmp_path: Path) -> None:
    run, target = _run(tmp_path), _target()
    _capture(run, target)
    _open(_run(tmp_path, data_hold_out=10), target)
    conversations = texts_of(_conversations(run), MAX_LENGTH)
    train, held_out = (texts_of(part, MAX_LENGTH) for part in split_held_out(_conversations(run), 4))
    assert data_sha256([conversations]) == data_sha256([held_out, train])
    unmarked = replace(conversations, supervised=~conversations.supervised)
    assert data_sha256([conversations]) != data_sha256([unmarked])


def test_an_incomplete_folder_is_refused(tmp_path: Path) -> None:
    run, target = _run(tmp_path), _target()
    _capture(run, target)
    assert run.data.features is not None
    (run.data.features / "shard-00001.json").unlink()
    with pytest.raises(DataError, match=r"1 of \d+ shards are missing"):
        _open(run, target)


def test_a_conversation_that_is_not_stored_is_named(tmp_path: Path) -> None:
    run, target = _run(tmp_path), _target()
    _capture(run, target)
    stranger = Batch.of_rows(torch.arange(100, 124).view(1, -1))
    with pytest.raises(DataError, match=r"24 tokens that begins \[100, 101"):
        _open(run, target)(stranger)


def test_texts_are_cut_as_training_cuts_them() -> None:
    tokens = np.arange(12)
    texts = cut_texts(tokens, tokens > 2, np.array([0, 5, 5, 12]), 4)
    assert texts.tokens.tolist() == [0, 1, 2, 3, 5, 6, 7, 8]
    assert texts.starts.tolist() == [0, 4, 4, 8] and texts.lengths.tolist() == [4, 0, 4]
    assert texts.supervised.tolist() == [False, False, False, True, True, True, True, True]
    assert conversation_key(texts.tokens[:4]) == conversation_key(np.arange(4, dtype=np.int64))
    joined = join([Conversations(tokens, tokens > 2, np.array([0, 5, 12]))])
    assert texts_of(joined, 4).tokens.tolist() == texts.tokens.tolist()
