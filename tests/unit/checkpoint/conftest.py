"""Small contracts, their tensors, and GGUF files made to order."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline.checkpoint.contract import DrafterContract, RopeSettings, TargetContract, TargetLayerId
from paceline.checkpoint.locate import locate_target

TARGET = TargetContract(
    architecture="LlamaForCausalLM",
    name="tiny",
    origin="tiny/config.json",
    num_layers=4,
    hidden_size=32,
    intermediate_size=48,
    num_heads=4,
    num_kv_heads=2,
    head_size=8,
    vocab_size=64,
    rms_norm_eps=1e-5,
    rope=RopeSettings(theta=10000.0),
    max_position_embeddings=128,
    has_qk_norm=False,
    attention_bias=False,
    mlp_bias=False,
    tie_word_embeddings=True,
    stop_token_ids=(2,),
    bos_token_id=1,
    dtype="float32",
)
DRAFTER = DrafterContract(
    family="dflash",
    origin="drafter/config.json",
    target_name="tiny",
    target_num_layers=4,
    target_hidden_size=32,
    target_vocab_size=64,
    target_layer_ids=(TargetLayerId(0), TargetLayerId(2)),
    aux_hidden_stream="prefix",
    has_tap_norm=True,
    block_size=8,
    layout="fill_in",
    mask_token_id=5,
    vocab_size=64,
    draft_vocab_size=64,
    num_layers=2,
    hidden_size=32,
    intermediate_size=40,
    num_heads=4,
    num_kv_heads=2,
    head_size=8,
    rms_norm_eps=1e-6,
    attention_bias=False,
    rope=RopeSettings(theta=100000.0),
    is_neox_style=True,
    max_position_embeddings=128,
    layer_windows=(None, None),
    layer_causal=(False, False),
    input_embedding_scale=1.0,
    output_multiplier=1.0,
    final_logit_softcapping=None,
    draft_sample_method="greedy",
    dtype="bfloat16",
)


@pytest.fixture
def make_target() -> Callable[..., TargetContract]:
    """A small target's contract with some fields changed."""
    return lambda **changes: dataclasses.replace(TARGET, **changes)


@pytest.fixture
def make_drafter() -> Callable[..., DrafterContract]:
    """A small drafter's contract with some fields changed."""
    return lambda **changes: dataclasses.replace(DRAFTER, **changes)


@pytest.fixture
def write_config(tmp_path: Path) -> Callable[[Mapping[str, Any]], Path]:
    """Write an object as config.json of a folder."""

    def write(config: Mapping[str, Any]) -> Path:
        folder = tmp_path / "model"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return write


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The real target in the installed wheel."""
    return locate_target("smollm2-135m-instruct")


def file_order(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """llama.cpp's row order for q and k of the llama architecture, written as a loop over rows."""
    half = rows.shape[0] // num_heads // 2
    stored = np.empty_like(rows)
    for head in range(num_heads):
        start = head * 2 * half
        for j in range(half):
            stored[start + 2 * j] = rows[start + j]
            stored[start + 2 * j + 1] = rows[start + half + j]
    return stored


class TinyGguf:
    """A tiny llama or qwen3 GGUF file: change `values`, `tensors` or `types`, then `write`."""

    def __init__(self, path: Path, architecture: str = "llama") -> None:
        self.path = path
        self.architecture = architecture
        self.values: dict[str, Any] = {
            "block_count": 2,
            "context_length": 128,
            "embedding_length": 32,
            "feed_forward_length": 64,
            "attention.head_count": 4,
            "attention.head_count_kv": 2,
            "attention.layer_norm_rms_epsilon": 1e-5,
            "rope.freq_base": 10000.0,
            "rope.dimension_count": 8,
        }
        self.general: dict[str, Any] = {"tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.bos_token_id": 1}
        self.types: dict[str, str] = {}
        generator = torch.Generator().manual_seed(3)

        def matrix(*shape: int) -> np.ndarray:
            return torch.randn(shape, generator=generator).numpy()

        self.tensors: dict[str, np.ndarray] = {"token_embd.weight": matrix(64, 32), "output_norm.weight": matrix(32)}
        for layer in range(2):
            shapes = {
                "attn_norm": (32,),
                "attn_q": (32, 32),
                "attn_k": (16, 32),
                "attn_v": (16, 32),
                "attn_output": (32, 32),
                "ffn_norm": (32,),
                "ffn_gate": (64, 32),
                "ffn_up": (64, 32),
                "ffn_down": (32, 64),
            }
            if architecture == "qwen3":
                shapes |= {"attn_q_norm": (8,), "attn_k_norm": (8,)}
            for name, shape in shapes.items():
                self.tensors[f"blk.{layer}.{name}.weight"] = matrix(*shape)

    def write(self) -> Path:
        """Write the file and return its path."""
        import gguf

        writer = gguf.GGUFWriter(self.path, self.architecture)
        for key, value in self.values.items():
            self._add(writer, f"{self.architecture}.{key}", value)
        for key, value in self.general.items():
            self._add(writer, key, value)
        for name, tensor in self.tensors.items():
            kind = gguf.GGMLQuantizationType[self.types.get(name, "F32")]
            data = tensor if tensor.dtype == np.uint8 else gguf.quants.quantize(tensor, kind)
            writer.add_tensor(name, data, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return self.path

    @staticmethod
    def _add(writer: Any, key: str, value: Any) -> None:
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)


@pytest.fixture
def tiny_gguf(tmp_path: Path) -> TinyGguf:
    """A llama file to change and write."""
    return TinyGguf(tmp_path / "tiny.gguf")


@pytest.fixture
def tiny_qwen3_gguf(tmp_path: Path) -> TinyGguf:
    """A qwen3 file to change and write."""
    return TinyGguf(tmp_path / "tiny-qwen3.gguf", "qwen3")


@pytest.fixture
def to_file_order() -> Callable[[np.ndarray, int], np.ndarray]:
    """llama.cpp's row order, as a function."""
    return file_order
