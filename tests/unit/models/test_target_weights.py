"""Kimi checkpoints into models: every storage gives the same numbers, whole or stage by stage; faults are named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.tiny_kimi import (
    AnyKimi,
    RateStorage,
    k3_tiny_config,
    kimi_target,
    kimi_tensors,
    multimodal_config,
    multimodal_target,
    small_kimi_config,
    write_kimi,
)
from torch import Tensor

from paceline.checkpoint.contract import CaptureId
from paceline.checkpoint.target_config import read_target_contract
from paceline.errors import CheckpointError, CompatibilityError, ConfigError
from paceline.models.attends import WholeSequence
from paceline.models.building import empty_target
from paceline.models.taps import TapCollector
from paceline.models.target_weights import fill_target, load_stage
from paceline.models.targets.kimi_pipeline import KimiPipeline
from paceline.models.targets.kimi_stage import BoundaryScores, KimiStage

CPU = torch.device("cpu")
IDS = torch.arange(12)[None]
MXFP4: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "mxfp4-pack-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["re:.*block_sparse_moe.experts.*"],
            "weights": {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True},
            "input_activations": None,
        }
    },
    "ignore": ["lm_head"],
}
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def load(folder: Path, dtype: torch.dtype = torch.float32) -> AnyKimi:
    contract = read_target_contract(folder, "tiny")
    model = empty_target(contract, dtype, CPU)
    fill_target(model, contract, folder)
    return model  # type: ignore[return-value]


def stage_of(folder: Path, start: int, end: int) -> KimiStage:
    return load_stage(read_target_contract(folder, "tiny"), folder, start, end, dtype=torch.float32, device=CPU)


def logits(model: AnyKimi) -> Tensor:
    return model.logits(model(IDS, IDS, WholeSequence()))


@pytest.mark.parametrize("rates", ["flat", "padded", "four"])
@pytest.mark.parametrize("flat_convolution", [False, True])
def test_every_storage_gives_the_same_model(rates: RateStorage, flat_convolution: bool, tmp_path: Path) -> None:
    target = kimi_target()
    tensors = kimi_tensors(target, rates=rates, flat_convolution=flat_convolution)
    found = load(write_kimi(tmp_path, k3_tiny_config(), tensors))
    assert torch.equal(logits(found), logits(target))
    assert not found.training and not any(parameter.requires_grad for parameter in found.parameters())


def test_loading_in_bfloat16_rounds_what_may_be_rounded(tmp_path: Path) -> None:
    target = kimi_target()
    found = load(write_kimi(tmp_path, k3_tiny_config(), kimi_tensors(target)), torch.bfloat16)
    for name, parameter in found.named_parameters():
        expected = target.get_parameter(name)
        assert torch.equal(parameter, expected.to(parameter.dtype))
        is_exact = any(part in name for part in ("decay", "convolution", "o_norm", "mlp.gate."))
        assert parameter.dtype == (torch.float32 if is_exact else torch.bfloat16), name


@pytest.mark.parametrize("inner", ["model.", ""])
def test_both_prefixes_of_the_multimodal_checkpoint(inner: str, tmp_path: Path) -> None:
    target = multimodal_target()
    tensors = {
        name.replace("language_model.model.", f"language_model.{inner}"): tensor
        for name, tensor in kimi_tensors(target).items()
    }
    found = load(write_kimi(tmp_path, multimodal_config(), tensors))
    assert torch.equal(logits(found), logits(target))
    assert torch.equal(logits(found), logits(kimi_target())), "the text model alone"
    for name, parameter in target.named_parameters():
        assert torch.equal(found.get_parameter(name), parameter)


def test_stages_of_a_multimodal_checkpoint(tmp_path: Path) -> None:
    target = multimodal_target()
    folder = write_kimi(tmp_path, multimodal_config(), kimi_tensors(target))
    pipeline = KimiPipeline([stage_of(folder, 0, 4), stage_of(folder, 4, 8)])
    hidden = pipeline(IDS, WholeSequence())
    assert torch.equal(pipeline.logits(hidden), logits(target))


def pack(weight_OI: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, exponents and the numbers that they stand for, by the nearest code under the largest value's exponent."""
    groups = weight_OI.unflatten(1, (-1, 32))
    exponent = groups.abs().amax(-1).div(6.0).log2().ceil()
    scaled = groups / torch.exp2(exponent).unsqueeze(-1)
    code = (scaled.abs().unsqueeze(-1) - E2M1).abs().argmin(-1) + 8 * (scaled < 0)
    numbers = torch.where(code >= 8, -E2M1[code % 8], E2M1[code % 8]) * torch.exp2(exponent).unsqueeze(-1)
    flat = code.flatten(1).to(torch.uint8)
    return flat[:, 0::2] | (flat[:, 1::2] << 4), (exponent + 127).to(torch.uint8), numbers.flatten(1)


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_packed_experts_are_read_as_the_numbers_that_they_stand_for(is_wrapped: bool, tmp_path: Path) -> None:
    target = multimodal_target() if is_wrapped else kimi_target()
    tensors, plain = kimi_tensors(target), {}
    for name in [name for name in tensors if ".experts." in name]:
        packed, scale, numbers = pack(tensors[name])
        plain[name] = numbers
        stem = name.removesuffix(".weight")
        tensors[f"{stem}.weight_packed"], tensors[f"{stem}.weight_scale"] = packed, scale
        del tensors[name]
    text = k3_tiny_config(quantization_config=MXFP4)
    config = multimodal_config(text) if is_wrapped else text
    found = load(write_kimi(tmp_path / "packed", config, tensors))
    unpacked = kimi_tensors(target) | plain
    text = multimodal_config() if is_wrapped else k3_tiny_config()
    expected = load(write_kimi(tmp_path / "plain", text, unpacked))
    assert torch.equal(logits(found), logits(expected))
    assert not torch.equal(logits(found), logits(target))
    with pytest.raises(CheckpointError, match="the weights are quantised"):
        load(write_kimi(tmp_path / "silent", text, tensors))
    with pytest.raises(CheckpointError, match="no weight has a scale"):
        load(write_kimi(tmp_path / "empty", config, unpacked))


# What does not fit is refused, by name.


def broken(tmp_path: Path, change: Callable[[dict[str, Tensor]], object], **changes: Any) -> Path:
    tensors = kimi_tensors(kimi_target())
    change(tensors)
    return write_kimi(tmp_path, k3_tiny_config(**changes), tensors)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.layers.2.self_attn.A_log"), "1 missing tensors: model.layers.2.self_attn.A_log"),
        (lambda t: t.pop("model.output_attn_res_proj.weight"), "missing tensors: model.output_attn_res_proj.weight"),
        (lambda t: t.pop("model.layers.5.mlp_res_norm.weight"), "missing tensors: model.layers.5.mlp_res_norm.weight"),
        (
            lambda t: t.pop("model.layers.1.block_sparse_moe.gate.e_score_correction_bias"),
            "missing tensors: model.layers.1.block_sparse_moe.gate.e_score_correction_bias",
        ),
        (lambda t: t.update({"model.layers.0.extra": torch.ones(1)}), "1 unused tensors: model.layers.0.extra"),
        (
            lambda t: t.update({"model.layers.8.enorm.weight": torch.ones(128)}),
            "1 unused tensors: model.layers.8.enorm.weight",
        ),
        (
            lambda t: t.update({"model.layers.0.self_attn.A_log": torch.zeros(3)}),
            r"model.layers.0.self_attn.A_log is \[3\], expected \[4\]",
        ),
        (
            lambda t: t.update({"model.layers.0.self_attn.A_log": torch.ones(32)}),
            "those behind the heads' are not zero",
        ),
        (
            lambda t: t.update({"model.layers.3.self_attn.g_proj.weight": torch.ones(64, 128)}),
            r"model.layers.3.self_attn.g_proj.weight is \[64, 128\], expected \[128, 128\]",
        ),
        (lambda t: t["model.norm.weight"].fill_(float("nan")), "1 tensors with NaN or infinity: model.norm.weight"),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    change: Callable[[dict[str, Tensor]], object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=message):
        load(broken(tmp_path, change))


def test_layers_of_multi_token_prediction_are_passed_over(tmp_path: Path) -> None:
    extra = {
        "model.layers.8.enorm.weight": torch.ones(128),
        "model.layers.8.eh_proj.weight": torch.ones(128, 256),
        "model.layers.8.self_attn.q_a_proj.weight": torch.ones(48, 128),
    }
    folder = broken(tmp_path, lambda tensors: tensors.update(extra), num_nextn_predict_layers=1)
    assert torch.equal(logits(load(folder)), logits(kimi_target()))
    stage = stage_of(folder, 4, 8)
    assert stage.is_last
    further = broken(
        tmp_path / "two",
        lambda tensors: tensors.update(extra | {"model.layers.9.enorm.weight": torch.ones(128)}),
        num_nextn_predict_layers=1,
    )
    with pytest.raises(CheckpointError, match=r"1 unused tensors: model\.layers\.9\.enorm\.weight"):
        load(further)


# Stages.


@pytest.fixture
def deep(tmp_path: Path) -> Path:
    config = small_kimi_config(8, 3)
    return write_kimi(tmp_path / "deep", config, kimi_tensors(kimi_target(config)))


@pytest.mark.parametrize("cut", range(1, 8))
def test_loaded_stages_are_the_whole_target(cut: int, deep: Path) -> None:
    whole = load(deep)
    ids = [CaptureId(capture) for capture in range(9)]
    pipeline = KimiPipeline([stage_of(deep, 0, cut), stage_of(deep, cut, 8)])
    for stream in ("prefix", "attn_res"):
        pipeline.prepare_taps(ids, stream)
        found, expected = TapCollector(ids, stream), TapCollector(ids, stream)
        hidden = pipeline(IDS, WholeSequence(), found)
        assert torch.equal(pipeline.logits(hidden), whole.logits(whole(IDS, IDS, WholeSequence(), expected)))
        for one, other in zip(found.collected(), expected.collected(), strict=True):
            assert torch.equal(one, other)


def test_a_stage_holds_its_own_tensors_alone(deep: Path) -> None:
    first, second = stage_of(deep, 0, 3), stage_of(deep, 3, 8)
    names = [set(dict(stage.named_parameters())) for stage in (first, second)]
    assert not names[0] & names[1] and names[0] | names[1] == set(dict(load(deep).named_parameters()))
    assert "embed_tokens.weight" in names[0] and {"norm.weight", "lm_head.weight"} <= names[1]
    assert all(int(name.split(".")[1]) < 3 for name in names[0] if name.startswith("layers."))


def without_boundary(deep: Path, tmp_path: Path, *kinds: str) -> Path:
    config = small_kimi_config(8, 3)
    tensors = kimi_tensors(kimi_target(config))
    for kind in kinds:
        del tensors[f"model.layers.5.self_attention_res_{kind}.weight"]
    return write_kimi(tmp_path / "without", config, tensors)


@pytest.mark.parametrize("kinds", [["norm"], ["proj"], ["norm", "proj"]])
def test_a_checkpoint_without_the_boundary_vectors_fails_at_configuration(
    kinds: list[str], deep: Path, tmp_path: Path
) -> None:
    """Before any forward pass, with their names; ids and streams that do not need them are served."""
    stage = stage_of(without_boundary(deep, tmp_path, *kinds), 0, 5)
    with pytest.raises(CheckpointError) as caught:
        stage.prepare_taps([CaptureId(2), CaptureId(5)], "attn_res")
    assert "capture id 5 is tapped where a stage ends" in caught.value.message
    for kind in ("norm", "proj"):
        assert f"model.layers.5.self_attention_res_{kind}.weight" in caught.value.message
    stage.prepare_taps([CaptureId(2), CaptureId(4), CaptureId(6)], "attn_res")
    stage.prepare_taps([CaptureId(5)], "prefix")
    with pytest.raises(CheckpointError, match=r"missing tensors: model.layers.5.self_attention_res"):
        stage_of(tmp_path / "without", 5, 8)  # whose own they are


def test_taps_that_were_not_prepared_are_not_run(deep: Path) -> None:
    stage = stage_of(deep, 0, 5)
    stage.prepare_taps([CaptureId(2)], "attn_res")
    stream = stage.begin(torch.randn(1, 3, 32))
    with pytest.raises(AssertionError, match="taps that were not prepared"):
        stage.run(stream, WholeSequence(), TapCollector([CaptureId(5)], "attn_res"))


def test_without_the_sentinel_the_missing_vectors_would_pass(
    deep: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: memory that was only allocated holds numbers, and the check finds nothing wrong."""
    monkeypatch.setattr(BoundaryScores, "is_set", lambda self: True)
    stage = stage_of(without_boundary(deep, tmp_path, "norm"), 0, 5)
    with pytest.raises(pytest.fail.Exception), pytest.raises(CheckpointError):
        stage.prepare_taps([CaptureId(5)], "attn_res")


def test_what_a_stage_refuses(deep: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a stage of layers 5 to 8 was asked for"):
        stage_of(deep, 5, 9)
    stage = stage_of(deep, 0, 5)
    with pytest.raises(ConfigError, match="legal are 0"):
        stage.prepare_taps([CaptureId(9)], "prefix")
    config = small_kimi_config(8, None)
    plain = stage_of(write_kimi(tmp_path / "plain", config, kimi_tensors(kimi_target(config))), 0, 5)
    with pytest.raises(CompatibilityError, match="the stream 'attn_res' was asked for"):
        plain.prepare_taps([CaptureId(5)], "attn_res")
