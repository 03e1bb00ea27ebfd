"""Projections that a folder stores fused or quantised come out apart and plain."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.unit.checkpoint.dialects.conftest import load_golden, tiny_tensors
from torch import Tensor

from paceline.checkpoint.contract import DrafterContract
from paceline.checkpoint.dialects import read_drafter, read_drafter_contract
from paceline.errors import CheckpointError

GoldenFolder = Callable[..., Path]
Make = Callable[..., DrafterContract]


def fuse(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same weights as some writers store them: q, k, v and gate, up stacked."""
    fused = dict(tensors)
    for layer in range(2):
        for module, parts in (("self_attn.qkv_proj", "qkv"), ("mlp.gate_up_proj", ("gate", "up"))):
            stem = f"layers.{layer}.{module.split('.')[0]}"
            rows = [fused.pop(f"{stem}.{part}_proj.weight") for part in parts]
            fused[f"layers.{layer}.{module}.weight"] = torch.cat(rows)
    return fused


def test_fused_projections_are_split_by_rows(golden_folder: GoldenFolder) -> None:
    tensors = tiny_tensors("zlab-dflash")
    source = read_drafter(golden_folder("zlab-dflash", tensors=fuse(tensors))).source
    assert set(source.names()) == set(tensors)
    for name, tensor in tensors.items():
        assert source.load(name).equal(tensor), name
    with pytest.raises(CheckpointError, match="stored twice"):
        read_drafter(golden_folder("zlab-dflash", tensors={**fuse(tensors), **tensors}))


@pytest.mark.parametrize("name", ["fused_qkv_a_proj", "fused_qkv_a"])
def test_fused_latent_projections_are_split_by_rows(golden_folder: GoldenFolder, name: str) -> None:
    plain = tiny_tensors("kimi-dspark")
    stored = fuse_latent(plain, name)
    assert stored[f"layers.1.self_attn.{name}.weight"].shape[0] == 24 + 16 + 4, "q_a, and the latent with its position"
    files = read_drafter(golden_folder("kimi-dspark", tensors=stored))
    unfused = read_drafter(golden_folder("kimi-dspark"))
    assert set(files.source.names()) == set(unfused.source.names())
    for tensor in files.source.names():
        assert files.source.load(tensor).equal(unfused.source.load(tensor)), tensor
    short = stored | {f"layers.1.self_attn.{name}.weight": stored[f"layers.1.self_attn.{name}.weight"][:-1].clone()}
    with pytest.raises(CheckpointError, match=r"parts have 44 rows \(.*q_a_proj.weight 24 \+ .*with_mqa.weight 20\)"):
        read_drafter(golden_folder("kimi-dspark", tensors=short))


def fuse_latent(tensors: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    stored = dict(tensors)
    for layer in range(2):
        prefix = f"layers.{layer}.self_attn"
        rows = [stored.pop(f"{prefix}.{part}.weight") for part in ("q_a_proj", "kv_a_proj_with_mqa")]
        stored[f"{prefix}.{name}.weight"] = torch.cat(rows)
    return stored


def test_a_fused_latent_projection_has_a_scale_per_shard(golden_folder: GoldenFolder) -> None:
    """Two scales for one matrix: the first is for the 24 rows of q_a, the second for the latent's 20."""
    scales = torch.tensor([0.25, 0.5])
    rows = torch.cat((scales[0].expand(24), scales[1].expand(20))).unsqueeze(1)
    stored, expected = fuse_latent(tiny_tensors("kimi-dspark"), "fused_qkv_a_proj"), {}
    for layer in range(2):
        fused = f"layers.{layer}.self_attn.fused_qkv_a_proj.weight"
        stored[fused] = (stored[fused] / rows).to(torch.float8_e4m3fn)
        stored[f"{fused}_scale"] = scales.clone()
        expected[layer] = stored[fused].float() * rows
    weights = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
    group = {"targets": [r"re:.*fused_qkv_a_proj$"], "weights": weights}
    config = load_golden("kimi-dspark") | {
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "config_groups": {"group_0": group},
            "ignore": [],
        }
    }
    source = read_drafter(golden_folder("kimi-dspark", config=config, tensors=stored)).source
    for layer, whole in expected.items():
        assert source.load(f"layers.{layer}.self_attn.q_a_proj.weight").equal(whole[:24])
        assert source.load(f"layers.{layer}.self_attn.kv_a_proj_with_mqa.weight").equal(whole[24:])


def per_channel(weight: Tensor) -> tuple[Tensor, Tensor]:
    scale = weight.abs().amax(dim=1, keepdim=True) / 448
    return (weight / scale).to(torch.float8_e4m3fn), scale


@pytest.mark.parametrize("is_fused", [False, True])
def test_quantised_projections_come_out_plain(golden_folder: GoldenFolder, is_fused: bool) -> None:
    """Names are matched with the file's own ones: `encoder.fc` in the ignore list is the context projection."""
    plain = tiny_tensors("assistant-dflash")
    stored: dict[str, Tensor] = {}
    for name, tensor in (fuse(plain) if is_fused else plain).items():
        if tensor.dim() == 2 and name != "encoder.fc.weight":
            stored[name], stored[f"{name}_scale"] = per_channel(tensor)
        else:
            stored[name] = tensor
    weights = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
    config = load_golden("assistant-dflash") | {
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
            "ignore": ["encoder.fc"],
        }
    }
    folder = golden_folder("assistant-dflash", config=config, tensors=stored)
    files = read_drafter(folder)
    assert files.contract.quantization == read_drafter_contract(folder).quantization == "fp8 per channel"
    unquantised = read_drafter(golden_folder("assistant-dflash"))
    assert set(files.source.names()) == set(unquantised.source.names())
    for name in files.source.names():
        close = files.source.load(name).float()
        assert torch.allclose(close, unquantised.source.load(name), rtol=0.07, atol=1e-3), (
            name
        )  # three bits of mantissa
    del config["quantization_config"]["ignore"][0]
    stored["encoder.fc.weight"], stored["encoder.fc.weight_scale"] = per_channel(plain["encoder.fc.weight"])
    assert read_drafter(golden_folder("assistant-dflash", config=config, tensors=stored)).contract.quantization


def test_quantised_weights_without_a_config_and_the_reverse(golden_folder: GoldenFolder) -> None:
    """Report B27: a drafter is read by its own quantisation config and no other."""
    stored = tiny_tensors("zlab-dflash")
    stored["fc.weight"], stored["fc.weight_scale"] = per_channel(stored["fc.weight"])
    with pytest.raises(CheckpointError, match="has no quantization_config"):
        read_drafter(golden_folder("zlab-dflash", tensors=stored))
    config = load_golden("zlab-dflash") | {"quantization_config": {"quant_method": "fp8"}}
    with pytest.raises(CheckpointError, match="no weight has a scale"):
        read_drafter(golden_folder("zlab-dflash", config=config))
    for method in ("gptq", "awq"):
        config["quantization_config"] = {"quant_method": method}
        for read in (read_drafter, read_drafter_contract):
            with pytest.raises(CheckpointError, match=method):
                read(golden_folder("zlab-dflash", config=config))


def test_quantisation_is_stated_at_the_top_alone(golden_folder: GoldenFolder) -> None:
    config = load_golden("speculators-dflash")
    config["transformer_layer_config"]["quantization_config"] = {"quant_method": "fp8"}
    for read in (read_drafter, read_drafter_contract):
        with pytest.raises(CheckpointError, match=r"transformer_layer_config\.quantization_config is"):
            read(golden_folder("speculators-dflash", config=config))
