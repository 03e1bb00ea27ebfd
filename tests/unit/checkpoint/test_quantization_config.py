"""What a `quantization_config` says of stored weights; whatever is not known to be without effect is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from paceline.checkpoint.quantization_config import QuantizationPlan, read_quantization_config
from paceline.errors import CheckpointError

# as a community FP8 export of a DFlash2 drafter has it
DRAFT_EXPORT: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "quantization_status": "compressed",
    "kv_cache_scheme": None,
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False},
            "input_activations": None,
        }
    },
    "ignore": ["lm_head", "re:.*embed_tokens.*", "re:.*\\.fc$", "fc", "re:head", "layers.*.self_attn.?_proj"],
}


def read(config: dict[str, Any]) -> QuantizationPlan:
    return read_quantization_config(config, origin="config.json")


def changed(path: str, value: object) -> dict[str, Any]:
    config = copy.deepcopy(DRAFT_EXPORT)
    *places, last = path.split("/")
    inner = config
    for place in places:
        inner = inner[place]
    inner[last] = value
    return config


WEIGHTS = "config_groups/group_0/weights"


@pytest.mark.parametrize(
    ("config", "shown"),
    [
        (DRAFT_EXPORT, "fp8 per channel"),
        (changed(f"{WEIGHTS}/strategy", "tensor"), "fp8 per tensor"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"}, "fp8 per block of 128x128"),
        ({"quant_method": "fp8", "activation_scheme": "dynamic"}, "fp8 per tensor or channel"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "fp8 per tensor"),
        ({"quant_method": "modelopt", "quant_algo": "fp8_pb_wo", "group_size": 128}, "fp8 per block of 128x128"),
        ({"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4", "group_size": 16}, "nvfp4"),
    ],
)
def test_schemes(config: dict[str, Any], shown: str) -> None:
    plan = read(config)
    assert str(plan) == shown
    assert str(plan.scheme_of(["layers.0.mlp.up_proj"])) == shown


@pytest.mark.parametrize(
    ("module", "is_ignored"),
    [
        ("lm_head", True),
        ("model.lm_head", False),
        ("headless", True),
        ("model.head", False),
        ("embed_tokens", True),
        ("model.embed_tokens", True),
        ("fc", True),
        ("encoder.fc", True),
        ("encoder.fc.0", False),
        ("layers.3.self_attn.q_proj", True),
        ("layers.3.self_attn.qkv_proj", False),
        ("layers.1.mlp.up_proj", False),
    ],
)
def test_lists_of_plain_modules(module: str, is_ignored: bool) -> None:
    assert read(DRAFT_EXPORT).ignores(module) is is_ignored


@pytest.mark.parametrize("key", ["ignored_layers", "modules_to_not_convert"])
def test_lists_of_plain_modules_by_other_writers(key: str) -> None:
    assert read({"quant_method": "fp8", key: ["fc"]}).ignores("fc")


def test_targets_may_be_patterns() -> None:
    plan = read(changed("config_groups/group_0/targets", ["re:.*mlp\\.(gate|up)_proj$", "fc"]))
    assert plan.scheme_of(["layers.0.mlp.gate_up_proj", "layers.0.mlp.gate_proj"]) is not None
    assert plan.scheme_of(["fc"]) is not None
    assert plan.scheme_of(["layers.0.mlp.down_proj"]) is None
    group = {"targets": ["fc"], "weights": {}}
    plan = read({"quant_method": "modelopt", "quant_algo": "FP8", "config_groups": {"group_0": group}})
    assert plan.scheme_of(["fc"]) is not None
    assert plan.scheme_of(["lm_head"]) is None


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "quant_method is missing"),
        ({"quant_method": "torchao"}, "quant_method 'torchao' is not supported; supported are fp8, compressed-tensors"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt is 'e5m2'"),
        ({"quant_method": "fp8", "swizzled": True}, "unknown keys swizzled"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"weight_block_size is \[128\]"),
        ({"quant_method": "fp8", "weight_block_size": [128, 0]}, "expected two positive numbers"),
        ({"quant_method": "fp8", "ignored_layers": "fc"}, "ignored_layers is 'fc', expected a list"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo 'W4A8_AWQ' is not supported"),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, "quant_algo 'MIXED_PRECISION'"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32}, "group_size is 32; NVFP4 has 16"),
        ({"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}, "group_size is missing"),
        (
            {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"},
            "kv_cache_quant_algo is 'FP8'",
        ),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "config_groups": []}, "supported is one group"),
        (changed("kv_cache_scheme", {"num_bits": 8}), "kv_cache_scheme is"),
        (changed("format", "pack-quantized"), "in the format 'pack-quantized' is not supported"),
        (changed("format", "int-quantized"), "fp8 per channel in the format 'int-quantized'"),
        (changed("quantization_status", "frozen"), "quantization_status is 'frozen'"),
        (changed("transform_config", {"config_groups": {"R1": {}}}), "rotations"),
        (changed("sparsity_config", {"format": "sparse-24-bitmask"}), "sparsity_config is"),
        (changed("config_groups", {}), "at least one group"),
        (changed("config_groups/group_0", {"targets": ["Linear"]}), "expected an object with `weights`"),
        (changed("config_groups/group_0/targets", None), "config_groups.group_0.targets is missing"),
        (changed("config_groups/group_0/targets", ["re:("]), "is no regular expression"),
        (changed("config_groups/group_0/extra", 1), "config_groups.group_0 has unknown keys extra"),
        (changed(f"{WEIGHTS}/symmetric", False), "weights.symmetric is False; supported is True"),
        (changed(f"{WEIGHTS}/dynamic", True), "weights.dynamic is True; supported is False"),
        (changed(f"{WEIGHTS}/actorder", "group"), "weights.actorder is 'group'"),
        (changed(f"{WEIGHTS}/strategy", "group"), "by 'group', group size None; supported are"),
        (changed(f"{WEIGHTS}/num_bits", 4), "stores weights as 'float' of 4 bits by 'channel'"),
        (changed(f"{WEIGHTS}/rotation", 1), "weights has unknown keys rotation"),
    ],
)
def test_what_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as refusal:
        read(config)
    assert refusal.value.origin == {"config": "config.json"}


@pytest.mark.parametrize("sparsity", [None, {}, {"format": "dense"}])
def test_dense_files_may_say_so(sparsity: object) -> None:
    assert str(read(changed("sparsity_config", sparsity))) == "fp8 per channel"
