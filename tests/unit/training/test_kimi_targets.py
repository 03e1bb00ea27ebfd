"""Drafters of Kimi targets in both streams: trained beside the target and on stored features, exported, loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.tiny import wrap_target
from tests.tiny_kimi import kimi_target, multimodal_config, multimodal_target, small_kimi_config
from tests.tiny_run import ChatByteTokenizer, random_rows, tiny_settings, write_token_file
from tests.unit.capture.feature_runs import make_capture, random_texts, write_all
from tests.unit.training.runs import exported

from paceline.capture.feature_file import StoredConversations
from paceline.capture.feature_plan import CaptureSettings
from paceline.capture.feature_record import feature_record
from paceline.capture.features import FeatureCapture, finish_capture
from paceline.checkpoint.contract import AuxHiddenStream, TargetLayerId, capture_id
from paceline.configuration.run import TrainRun
from paceline.errors import CompatibilityError
from paceline.models.loading import LoadedTarget, load_drafter
from paceline.models.sequence_attend import sequence_attend
from paceline.models.taps import TapCollector
from paceline.training.contract import drafter_contract
from paceline.training.data import read_conversations
from paceline.training.feature_source import needs_last_hidden, texts_of
from paceline.training.features import TargetFeatures
from paceline.training.loop import train

FAMILIES: dict[str, dict[str, Any]] = {
    "dflash": {},
    "dflash2": {"drafter_selector_rank": 8, "drafter_selector_top_k": 4, "drafter_conv_group_size": 8},
    "dspark": {"drafter_markov_rank": 8},
    "dspark-latent": {
        "drafter_family": "dspark",
        "drafter_layout": "anchor_sampling",
        "drafter_markov_rank": 8,
        "drafter_kv_lora_rank": 16,
        "drafter_q_lora_rank": 24,
        "drafter_qk_nope_head_size": 8,
        "drafter_qk_rope_head_size": 8,
        "drafter_v_head_size": 12,
    },
    "eagle3": {"drafter_mask_token_id": None},
}


def loaded(*, is_wrapped: bool = False, moved: float = 0.0) -> LoadedTarget:
    """A target of four layers; `moved` changes what layer 1 reads."""
    config = small_kimi_config(4, 2, vocab_size=512)
    model: Any = multimodal_target(multimodal_config(config)) if is_wrapped else kimi_target(config)
    model.layers[1].self_attention_res.proj += moved
    return wrap_target(model, "row_invariant", ChatByteTokenizer())


@pytest.fixture
def data(tmp_path: Path) -> Path:
    rows = [row[: 10 + index % 8] for index, row in enumerate(random_rows(24, 20, vocab_size=400))]
    return write_token_file(tmp_path / "data.npz", rows, num_prompt_tokens=4)


def settings(folder: Path, data: Path, family: str, **changes: Any) -> TrainRun:
    steps = {"schedule_num_steps": 6, "checkpoint_every": 6}
    return tiny_settings(folder, data, **{"drafter_family": family, **FAMILIES[family], **steps, **changes})


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_trains_on_the_mixtures_and_is_served_by_its_fingerprint(
    family: str, data: Path, tmp_path: Path
) -> None:
    target = loaded(is_wrapped=family == "dflash")
    outcome = train(settings(tmp_path / "run", data, family, drafter_aux_hidden_stream="attn_res"), target)
    assert outcome.is_finished and outcome.drafter is not None
    assert load_drafter(str(outcome.drafter), target).contract.aux_hidden_stream == "attn_res"
    with pytest.raises(CompatibilityError):
        load_drafter(str(outcome.drafter), loaded(moved=1.0))


@pytest.mark.parametrize("stream", ["prefix", "attn_res"])
def test_a_run_on_stored_features_is_the_run_beside_the_target(
    stream: AuxHiddenStream, data: Path, tmp_path: Path
) -> None:
    target = loaded()
    online = settings(tmp_path / "online", data, "dflash", drafter_aux_hidden_stream=stream)
    stored = settings(
        tmp_path / "stored", data, "dflash", drafter_aux_hidden_stream=stream, data_features=str(tmp_path / "features")
    )
    texts = texts_of(read_conversations(data, vocab_size=512), online.data.max_length)
    layers = drafter_contract(online, target.contract).target_layer_ids
    plan = CaptureSettings(layer_ids=layers, stream=stream, keeps_hidden=needs_last_hidden(online), batch_tokens=200)
    record = feature_record(
        target,
        [texts],
        layer_ids=layers,
        stream=stream,
        keeps_hidden=plan.keeps_hidden,
        max_length=online.data.max_length,
    )
    made = FeatureCapture(target, texts, plan, record)
    shards = made.open(tmp_path / "features")
    made.run(shards)
    finish_capture(shards)
    for run in (online, stored):
        train(run, target)
    assert exported(online)["model.safetensors"] == exported(stored)["model.safetensors"]
    other: AuxHiddenStream = "attn_res" if stream == "prefix" else "prefix"
    wrong = settings(
        tmp_path / "wrong", data, "dflash", drafter_aux_hidden_stream=other, data_features=str(tmp_path / "features")
    )
    with pytest.raises(CompatibilityError, match="stream"):
        train(wrong, target)


def test_mixed_precision_is_the_drafters_alone(data: Path) -> None:
    """What a target in bf16 computes in float32 it computes so beside a drafter, too."""
    target = kimi_target(small_kimi_config(4, 2, vocab_size=512), dtype=torch.bfloat16)
    batch = read_conversations(data, vocab_size=512).batch(range(4), 24)
    features = TargetFeatures(target, (TargetLayerId(0), TargetLayerId(1)), "attn_res")
    expected = features(batch)
    with torch.autocast("cpu", torch.bfloat16):
        found = features(batch)
        taken_along = target(batch.token_ids_BS, batch.positions_BS, sequence_attend(target))
    assert torch.equal(found.hidden_BSD, expected.hidden_BSD)
    assert all(torch.equal(one, other) for one, other in zip(found.taps, expected.taps, strict=True))
    assert not torch.equal(taken_along, expected.hidden_BSD), "or this target shows nothing"


def test_features_of_a_batch_are_those_of_each_text_alone(tmp_path: Path) -> None:
    """Of any neighbours, in any order: recurrent state of one text never reaches another."""
    target, texts = loaded(), random_texts(6, longest=30)
    layers = (TargetLayerId(0), TargetLayerId(1))
    capture = make_capture(target, texts, layer_ids=layers, stream="attn_res", batch_tokens=64)
    shards = write_all(tmp_path / "features", capture)
    finish_capture(shards)
    stored = StoredConversations(shards)
    for index in range(len(texts)):
        tokens = texts.tokens[texts.span(index)]
        ids = torch.from_numpy(tokens.astype(np.int64))[None]
        taps = TapCollector([capture_id(layer) for layer in layers], "attn_res")
        target.model(ids, ids, sequence_attend(target.model), taps)
        found, _ = stored.find(tokens)
        assert torch.equal(found.float(), taps.concatenated()[0])
