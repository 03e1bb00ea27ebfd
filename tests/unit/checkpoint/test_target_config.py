"""Target folders: what transformers writes is read; what would change the network is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.checkpoint.contract import RopeSettings
from paceline.checkpoint.target_config import read_target_contract
from paceline.checkpoint.weights import save_safetensors
from paceline.errors import CheckpointError

WriteConfig = Callable[[dict[str, Any]], Path]
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 256,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
    "eos_token_id": 2,
}
QWEN3 = LLAMA | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 32,
    "sliding_window": None,
    "use_sliding_window": False,
    "max_window_layers": 28,
    "tie_word_embeddings": True,
}


def test_llama_folder(write_config: WriteConfig) -> None:
    folder = write_config(LLAMA)
    contract = read_target_contract(folder, "mine")
    assert contract.architecture == "LlamaForCausalLM" and contract.name == "mine"
    assert contract.origin == str(folder / "config.json")
    assert contract.head_size == 16 and contract.num_kv_heads == 2
    assert not (contract.has_qk_norm or contract.attention_bias or contract.mlp_bias or contract.tie_word_embeddings)
    assert contract.rope == RopeSettings(theta=10000.0)
    assert contract.dtype == "bfloat16" and contract.stop_token_ids == (2,) and contract.bos_token_id is None


def test_qwen3_folder(write_config: WriteConfig) -> None:
    contract = read_target_contract(write_config(QWEN3), "q")
    assert contract.architecture == "Qwen3ForCausalLM" and contract.has_qk_norm
    assert contract.head_size == 32 and contract.tie_word_embeddings


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("kind", ["default", "llama3", "yarn"])
def test_what_transformers_saves_is_read(tmp_path: Path, family: str, kind: str) -> None:
    import transformers

    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": 5e5}
    if kind != "default":
        rope |= {"factor": 8.0, "original_max_position_embeddings": 64}
    if kind == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    make = transformers.LlamaConfig if family == "llama" else transformers.Qwen3Config
    config = make(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16, dtype="float32",
        vocab_size=128, max_position_embeddings=512, rope_parameters=rope, eos_token_id=[5, 6],
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    contract = read_target_contract(tmp_path, "saved")
    assert contract.rope.kind == kind and contract.rope.theta == 5e5
    assert contract.stop_token_ids == (5, 6) and contract.dtype == "float32"


@pytest.mark.parametrize(
    ("config_ids", "generation_ids", "expected"),
    [
        (2, None, (2,)),
        (128001, [128001, 128008, 128009], (128001, 128008, 128009)),
        (151645, [151643, 151645], (151643, 151645)),
        ([7, 8], 9, (9, 7, 8)),
        (None, None, ()),
        (None, 4, (4,)),
    ],
)
def test_stop_ids_are_those_of_both_files(
    write_config: WriteConfig, config_ids: object, generation_ids: object, expected: tuple[int, ...]
) -> None:
    folder = write_config(LLAMA | {"eos_token_id": config_ids})
    if generation_ids is not None:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation_ids, "top_p": 0.9}))
    assert read_target_contract(folder, "t").stop_token_ids == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gemma3", "architectures": ["Gemma3ForCausalLM"]}, "'gemma3' .*supported are LlamaForCausalLM"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"model_type": None}, "model_type is missing"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config is 'gptq'"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope type 'dynamic' is not supported"),
        ({"rope_theta": None}, "names no rope_theta"),
        ({"sliding_window": 4096}, "uses a sliding window of 4096"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "supported is full_attention in every layer"),
        ({"layer_types": [1, "full_attention", 1]}, "layer_types has 1, 'full_attention'; supported"),
        ({"layer_types": 3}, "layer_types has 3; supported"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"rope_interleaved": True}, "rope_interleaved is True"),
        ({"attention_multiplier": 0.1}, "attention_multiplier is 0.1"),
        ({"brand_new_switch": True}, "unknown config key brand_new_switch=True"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "64"}, "hidden_size is '64'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_key_value_heads": 3}, "is not a multiple of num_key_value_heads 3"),
        ({"rms_norm_eps": None}, "rms_norm_eps is missing"),
        ({"head_dim": 15}, "needs? an even one"),
        ({"attention_bias": "yes"}, "attention_bias is 'yes'"),
        ({"torch_dtype": "float8_e4m3fn"}, "dtype is 'float8_e4m3fn'"),
        ({"dtype": "float16"}, "dtype is 'float16' and torch_dtype is 'bfloat16'"),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'"),
        ({"bos_token_id": [1]}, r"bos_token_id is \[1\]"),
    ],
)
def test_refusals_name_the_value(write_config: WriteConfig, change: dict[str, Any], message: str) -> None:
    folder = write_config(LLAMA | change)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_target_contract(folder, "t")
    assert "config.json" in str(caught.value)


@pytest.mark.parametrize("change", [{"use_sliding_window": True, "sliding_window": 64}, {"head_dim": None}])
def test_qwen3_refusals(write_config: WriteConfig, change: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=r"sliding window of 64|head_dim is missing"):
        read_target_contract(write_config(QWEN3 | change), "t")


def test_qwen3_window_that_is_switched_off_is_accepted(write_config: WriteConfig) -> None:
    assert read_target_contract(write_config(QWEN3 | {"sliding_window": 4096}), "t").num_layers == 2


@pytest.mark.parametrize("sign", [{"dflash_config": {}}, {"architectures": ["DFlashDraftModel"]}])
def test_drafter_folder_as_target_is_said(write_config: WriteConfig, sign: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="is a drafter, not a target"):
        read_target_contract(write_config(QWEN3 | sign), "t")


def test_dtype_comes_from_the_weights_when_the_config_is_silent(write_config: WriteConfig) -> None:
    folder = write_config({key: value for key, value in LLAMA.items() if key != "torch_dtype"})
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors"):
        read_target_contract(folder, "t")
    save_safetensors(folder / "model.safetensors", {"model.norm.weight": torch.ones(4).half()}, {})
    assert read_target_contract(folder, "t").dtype == "float16"


def test_missing_and_damaged_files_are_named(tmp_path: Path, write_config: WriteConfig) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        read_target_contract(tmp_path / "nowhere", "t")
    with pytest.raises(CheckpointError, match=r"config\.json does not exist"):
        read_target_contract(tmp_path, "t")
    folder = write_config(LLAMA)
    (folder / "generation_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"generation_config\.json is not valid JSON"):
        read_target_contract(folder, "t")
    (folder / "config.json").write_text('{"model_type": "ll')
    with pytest.raises(CheckpointError, match=r"config\.json is not valid JSON"):
        read_target_contract(folder, "t")


def test_gguf_file_keeps_the_users_name(smollm2: Path) -> None:
    contract = read_target_contract(smollm2, "smollm2-135m-instruct")
    assert contract.name == "smollm2-135m-instruct" and contract.origin == str(smollm2)
