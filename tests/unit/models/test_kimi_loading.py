"""A Kimi folder and drafters for it, from their names: streams are chosen by the drafter, checked, and overridden."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.tiny_kimi import (
    k3_tiny_config,
    kimi_target,
    kimi_tensors,
    multimodal_config,
    multimodal_target,
    small_kimi_config,
    write_kimi,
)
from tests.tiny_run import write_drafter, write_tokenizer

from paceline.checkpoint.contract import AuxHiddenStream, TargetLayerId
from paceline.errors import CompatibilityError
from paceline.models import loading
from paceline.models.loading import LoadedTarget, load_drafter, load_target
from paceline.models.sequence_attend import sequence_attend

TAPS: dict[str, Any] = {
    "target_layer_ids": tuple(TargetLayerId(layer) for layer in (1, 3, 5)),
    "rope": kimi_target(small_kimi_config(4, 2)).contract.rope,
    "num_kv_heads": 4,
    "head_size": 16,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_kimi(tmp_path_factory.mktemp("k") / "target", k3_tiny_config(), kimi_tensors(kimi_target()))
    write_tokenizer(folder, 512)
    return folder


def load(folder: Path, **options: Any) -> LoadedTarget:
    return load_target(str(folder), dtype="float32", device="cpu", **{"linear_mode": "row_invariant", **options})


def test_a_kimi_folder_loads_by_name(folder: Path) -> None:
    target, ids = load(folder, linear_mode="plain"), torch.arange(5)[None]
    assert target.contract.architecture == "KimiLinearForCausalLM" and target.linear_mode == "plain"
    expected = kimi_target()
    logits = target.model.logits(target.model(ids, ids, sequence_attend(target.model)))
    assert torch.equal(logits, expected.logits(expected(ids, ids, sequence_attend(expected))))


def test_a_multimodal_folder_loads_by_name(tmp_path: Path) -> None:
    whole = multimodal_target()
    write_kimi(tmp_path, multimodal_config(), kimi_tensors(whole))
    write_tokenizer(tmp_path, 512)
    target, ids = load(tmp_path), torch.arange(5)[None]
    assert target.model.lm_head.mode == "row_invariant"
    logits = target.model.logits(target.model(ids, ids, sequence_attend(target.model)))
    torch.testing.assert_close(logits, whole.logits(whole(ids, ids, sequence_attend(whole))), rtol=0, atol=1e-3)


@pytest.mark.parametrize("stream", ["prefix", "attn_res"])
def test_the_drafter_chooses_the_stream_and_its_fingerprint_knows_it(
    stream: AuxHiddenStream, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target = load(folder)
    drafter = write_drafter(tmp_path / "drafter", target, aux_hidden_stream=stream, **TAPS)
    with caplog.at_level(logging.INFO, logger="paceline.models.loading"):
        loaded = load_drafter(str(drafter), target)
    assert loaded.contract.aux_hidden_stream == stream
    said = [record.message for record in caplog.records if "taps [2, 4, 6]" in record.message]
    assert said == [f"drafter drafter: taps [2, 4, 6] of the stream {stream!r}"], "once, at set-up"
    other = "attn_res" if stream == "prefix" else "prefix"
    config = json.loads((drafter / "config.json").read_text())
    text = json.dumps(config).replace(f'"aux_hidden_stream": "{stream}"', f'"aux_hidden_stream": "{other}"')
    (drafter / "config.json").write_text(text)
    with pytest.raises(CompatibilityError, match=f"trained on the stream {stream}, the config says {other}"):
        load_drafter(str(drafter), target)


def test_another_stream_than_its_own_for_comparisons(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target = load(folder)
    drafter = write_drafter(tmp_path / "drafter", target, aux_hidden_stream="attn_res", **TAPS)
    loaded = load_drafter(str(drafter), target, aux_hidden_stream="prefix")
    assert loaded.contract.aux_hidden_stream == loaded.model.contract.aux_hidden_stream == "prefix"
    assert "it was trained on the stream 'attn_res' and is fed another" in caplog.text
    caplog.clear()
    load_drafter(str(drafter), target, aux_hidden_stream="attn_res")
    assert "is fed another" not in caplog.text


def test_a_stream_that_the_target_does_not_have_is_refused_before_weights_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = k3_tiny_config(attn_res_block_size=None)
    plain = write_kimi(tmp_path / "plain", config, kimi_tensors(kimi_target(config)))
    write_tokenizer(plain, 512)
    target = load(plain)
    drafter = write_drafter(tmp_path / "drafter", target, fingerprint=False, aux_hidden_stream="attn_res", **TAPS)
    other = write_drafter(tmp_path / "other", target, fingerprint=False, **TAPS)
    monkeypatch.setattr(loading, "load_strict", lambda *_, **__: pytest.fail("weights were loaded"))
    with pytest.raises(CompatibilityError, match="reads the stream 'attn_res'; this KimiLinearForCausalLM has only"):
        load_drafter(str(drafter), target)
    with pytest.raises(CompatibilityError, match=r"'attn_res' stream; KimiTarget offers \['prefix'\]"):
        load_drafter(str(other), target, aux_hidden_stream="attn_res")


def test_fused_arithmetic_can_be_asked_for_and_reaches_the_drafter(folder: Path, tmp_path: Path) -> None:
    target = load_target(str(folder), dtype="float32", device="cpu", linear_mode="fused")
    assert target.linear_mode == "fused"
    drafter = load_drafter(
        str(write_drafter(tmp_path / "drafter", target, aux_hidden_stream="attn_res", **TAPS)), target
    )
    layers = drafter.model.backbone.layers
    assert layers and all(layer.fused is not None for layer in layers)
