"""GGUF files: metadata, tensors under their Hugging Face names, and the target contract they imply.

Dequantising is left to the package `gguf`.

llama.cpp stores the q and k projections of the `llama` architecture with the two halves of each head interleaved,
because its rotary kernel rotates neighbouring pairs; `open_gguf` restores the split-half order of Hugging Face. The
`qwen3` architecture keeps split halves in the file.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.checkpoint.contract import RopeSettings, TargetContract
from paceline.checkpoint.gguf_codes import BlockCodes, has_codes, read_codes
from paceline.checkpoint.gguf_header import GgufHeader, GgufTensor, read_gguf_header
from paceline.checkpoint.weights import TensorSource
from paceline.errors import CheckpointError, MissingExtraError

_ARCHITECTURES: Mapping[str, str] = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_TENSOR_TYPES = frozenset(
    {"F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"}
)
_GLOBAL_NAMES: Mapping[str, str] = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES: Mapping[str, str] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FACTORS = "rope_freqs.weight"  # llama3 scaling, folded into one divisor per frequency
# keys under `{architecture}.` that `read_gguf_config` reads; any other could change the network and is refused
_READ_KEYS = frozenset(
    {
        "block_count",
        "context_length",
        "embedding_length",
        "feed_forward_length",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        "attention.layer_norm_rms_epsilon",
        "rope.dimension_count",
        "rope.freq_base",
        "rope.scaling.type",
        "rope.scaling.factor",
        "rope.scaling.original_context_length",
        "rope.scaling.finetuned",  # a note of YaRN's authors, of no effect
        "rope.scaling.yarn_beta_fast",
        "rope.scaling.yarn_beta_slow",
        "vocab_size",
    }
)
# keys that are allowed at the one value that changes nothing
_NEUTRAL_KEYS: Mapping[str, object] = {
    "expert_count": 0,
    "expert_used_count": 0,
    "rope.scaling.attn_factor": 1.0,
    "rope.scaling.yarn_attn_factor": 1.0,
    "rope.scaling.yarn_log_multiplier": 0.0,
    "rope.scale_linear": 1.0,
    "attention.sliding_window": 0,
}


class _GgufSource:
    """Tensors of a GGUF file under Hugging Face names, dequantised when loaded."""

    def __init__(self, header: GgufHeader) -> None:
        gguf = _gguf()
        self.origin = str(header.path)
        self._architecture = header.architecture
        self._num_heads = _whole_number(header, "attention.head_count")
        self._num_kv_heads = _whole_number(header, "attention.head_count_kv", default=self._num_heads)
        self._tensors: dict[str, tuple[GgufTensor, str, int]] = {}
        self._data = np.memmap(header.path, dtype=np.uint8, mode="r")
        for name, tensor in header.tensors.items():
            if name == _ROPE_FACTORS:
                continue  # read by `read_gguf_config`: it belongs to the settings, not to the weights
            kind = gguf.GGMLQuantizationType(tensor.type_id).name if tensor.type_id in _type_ids(gguf) else "unknown"
            if kind not in _TENSOR_TYPES:
                raise CheckpointError(
                    f"{header.path}: tensor {name} is of type {kind} ({tensor.type_id}); "
                    f"supported are {', '.join(sorted(_TENSOR_TYPES))}"
                )
            block_size, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
            if tensor.shape and tensor.shape[-1] % block_size:
                raise CheckpointError(
                    f"{header.path} is damaged: tensor {name} has rows of {tensor.shape[-1]} values, "
                    f"not a multiple of {kind}'s block of {block_size}"
                )
            num_bytes = math.prod(tensor.shape) // block_size * block_bytes
            end = header.data_offset + tensor.offset + num_bytes
            if end > self._data.size:
                raise CheckpointError(
                    f"{header.path} is truncated: tensor {name} ends at byte {end}, the file has {self._data.size}",
                    hint="a fresh copy of the file",
                )
            place = GgufTensor(tensor.shape, tensor.type_id, header.data_offset + tensor.offset)
            self._tensors[hugging_face_name(name, header.path)] = (place, kind, num_bytes)

    def names(self) -> list[str]:
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._find(name)[0].shape

    def load(self, name: str) -> Tensor:
        place, kind, num_bytes = self._find(name)
        raw = self._data[place.offset : place.offset + num_bytes]
        if kind == "BF16":
            tensor = torch.from_numpy(np.array(raw).view(np.int16)).view(torch.bfloat16).reshape(place.shape)
        elif kind in ("F32", "F16"):
            dtype = np.float32 if kind == "F32" else np.float16
            tensor = torch.from_numpy(np.array(raw).view(dtype).reshape(place.shape))
        else:
            gguf = _gguf()
            rows = raw.reshape(-1, num_bytes // max(1, math.prod(place.shape[:-1])))
            values = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[kind])
            tensor = torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32).reshape(place.shape))
        return self._in_split_halves(name, tensor)

    def code_kind(self, name: str) -> str | None:
        place, kind, _num_bytes = self._find(name)
        return kind if has_codes(kind) and len(place.shape) == 2 else None

    def codes(self, name: str) -> BlockCodes:
        place, kind, num_bytes = self._find(name)
        raw = torch.from_numpy(np.array(self._data[place.offset : place.offset + num_bytes]))
        num_blocks = place.shape[1] // _gguf().GGML_QUANT_SIZES[_gguf().GGMLQuantizationType[kind]][0]
        return read_codes(self._in_split_halves(name, raw.view(place.shape[0], num_blocks, -1)), kind)

    def _in_split_halves(self, name: str, rows: Tensor) -> Tensor:
        if self._architecture == "llama" and ".self_attn." in name:
            if ".q_proj." in name:
                return split_halves(rows, self._num_heads)
            if ".k_proj." in name:
                return split_halves(rows, self._num_kv_heads)
        return rows

    def _find(self, name: str) -> tuple[GgufTensor, str, int]:
        if name not in self._tensors:
            raise CheckpointError(f"{self.origin} has no tensor {name}")
        return self._tensors[name]


def open_gguf(path: Path) -> TensorSource:
    """Open a GGUF file as a source of Hugging Face tensors.

    Args:
        path: the file; architecture `llama` or `qwen3`.
    Returns:
        A lazy source. F32, F16 and BF16 come as stored, quantised types as float32; q and k rows are in split-half
        order.
    Raises:
        CheckpointError: not a usable GGUF file, an unsupported architecture or tensor type, an unknown tensor, or
            tensor data past the end of the file.
        MissingExtraError: the package `gguf` is not installed.
    """
    header = read_gguf_header(path)
    _require_supported(header)
    return _GgufSource(header)


def split_halves(rows: Tensor, num_heads: int) -> Tensor:
    """Undo llama.cpp's row order of a q or k projection.

    In the file, rows 2j and 2j + 1 of a head hold what Hugging Face keeps in rows j and j + half.

    Args:
        rows: weight `[heads * head size, in]` or bias `[heads * head size]`.
        num_heads: heads of this projection: query heads for q, key/value heads for k.
    Returns:
        The same values in split-half order.
    """
    if rows.shape[0] % (2 * num_heads):
        raise CheckpointError(f"a projection of {rows.shape[0]} rows is not {num_heads} heads of even size")
    half = rows.shape[0] // num_heads // 2
    return rows.reshape(num_heads, half, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def hugging_face_name(name: str, path: Path) -> str:
    """The Hugging Face name of a GGUF tensor.

    Args:
        name: such as `blk.0.attn_q.weight`.
        path: the file, for messages.
    Returns:
        Such as `model.layers.0.self_attn.q_proj.weight`.
    Raises:
        CheckpointError: the name is not one of a dense Llama or Qwen3 model.
    """
    stem, _, kind = name.rpartition(".")
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if kind in ("weight", "bias"):
        if stem in _GLOBAL_NAMES:
            return f"{_GLOBAL_NAMES[stem]}.{kind}"
        if layer is not None and layer[2] in _LAYER_NAMES:
            return f"model.layers.{layer[1]}.{_LAYER_NAMES[layer[2]]}.{kind}"
    raise CheckpointError(f"{path}: tensor {name} is none of a dense Llama or Qwen3 model")


def read_gguf_config(path: Path) -> TargetContract:
    """Read what a GGUF target promises.

    Args:
        path: the file; architecture `llama` or `qwen3`.
    Returns:
        The contract, named for the file. `dtype` is the stored one, float32 for quantised files; a missing
        `output.weight` means tied embeddings; the end-of-text, -turn and -message ids are the stop ids.
    Raises:
        CheckpointError: not a usable GGUF file, or something in it that is not supported, by name.
    """
    header = read_gguf_header(path)
    _require_supported(header)
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(f"{path} has no token_embd.weight: it holds a vocabulary only, or another kind of model")
    vocab_size, hidden_size = embedding.shape
    for key, found in (("vocab_size", vocab_size), ("embedding_length", hidden_size)):
        promised = _whole_number(header, key, default=found)
        if promised != found:
            raise CheckpointError(f"{path}: {key} is {promised}, token_embd.weight has {found}")
    num_heads = _whole_number(header, "attention.head_count")
    head_size = _head_size(header, hidden_size, num_heads)
    architecture = header.architecture
    return TargetContract(
        architecture=_ARCHITECTURES[architecture],
        name=path.stem,
        origin=str(path),
        num_layers=_whole_number(header, "block_count"),
        hidden_size=hidden_size,
        intermediate_size=_whole_number(header, "feed_forward_length"),
        num_heads=num_heads,
        num_kv_heads=_whole_number(header, "attention.head_count_kv", default=num_heads),
        head_size=head_size,
        vocab_size=vocab_size,
        rms_norm_eps=_shortest_float(_number(header, "attention.layer_norm_rms_epsilon")),
        rope=_rope(header, head_size),
        max_position_embeddings=_whole_number(header, "context_length"),
        has_qk_norm=architecture == "qwen3",
        attention_bias=_has_bias(header, ("attn_q", "attn_k", "attn_v", "attn_output")),
        mlp_bias=_has_bias(header, ("ffn_gate", "ffn_up", "ffn_down")),
        tie_word_embeddings="output.weight" not in header.tensors,
        stop_token_ids=gguf_stop_token_ids(header),
        bos_token_id=header.metadata.get("tokenizer.ggml.bos_token_id"),
        dtype=_stored_dtype(header),
    )


def gguf_stop_token_ids(header: GgufHeader) -> tuple[int, ...]:
    """The ids that end a generation: end of text, of turn, of message; each once, in this order."""
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    ids = [header.metadata.get(f"tokenizer.ggml.{key}") for key in keys]
    return tuple(dict.fromkeys(int(token_id) for token_id in ids if token_id is not None))


def _require_supported(header: GgufHeader) -> None:
    architecture = header.architecture
    if architecture not in _ARCHITECTURES:
        raise CheckpointError(
            f"{header.path} has the architecture {architecture}; supported are {', '.join(_ARCHITECTURES)}"
        )
    prefix = f"{architecture}."
    for key, value in header.metadata.items():
        name = key.removeprefix(prefix)
        if name == key or name in _READ_KEYS:
            continue
        if name not in _NEUTRAL_KEYS:
            raise CheckpointError(f"{header.path}: metadata key {key} ({value!r}) is not known")
        if value != _NEUTRAL_KEYS[name]:
            raise CheckpointError(f"{header.path}: {key} is {value!r}; only {_NEUTRAL_KEYS[name]!r} is supported")


def _number(header: GgufHeader, key: str, *, default: float | None = None) -> float:
    value = header.metadata.get(f"{header.architecture}.{key}", default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        found = "missing" if value is None else repr(value)
        raise CheckpointError(f"{header.path}: {header.architecture}.{key} is {found}, expected a positive number")
    return value


def _whole_number(header: GgufHeader, key: str, *, default: int | None = None) -> int:
    value = header.metadata.get(f"{header.architecture}.{key}", default)
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        found = "missing" if value is None else repr(value)
        raise CheckpointError(f"{header.path}: {header.architecture}.{key} is {found}, expected a positive integer")
    return value


def _head_size(header: GgufHeader, hidden_size: int, num_heads: int) -> int:
    if f"{header.architecture}.attention.key_length" not in header.metadata and hidden_size % num_heads:
        raise CheckpointError(f"{header.path}: width {hidden_size} is not a multiple of {num_heads} heads")
    head_size = _whole_number(header, "attention.key_length", default=hidden_size // num_heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        found = _whole_number(header, key, default=head_size)
        if found != head_size:
            raise CheckpointError(f"{header.path}: {key} is {found}, the head size is {head_size}; they must be equal")
    return head_size


def _has_bias(header: GgufHeader, modules: tuple[str, ...]) -> bool:
    present = [module for module in modules if f"blk.0.{module}.bias" in header.tensors]
    if present and len(present) != len(modules):
        raise CheckpointError(
            f"{header.path} has biases for {', '.join(present)} only; supported: all of {', '.join(modules)}, or none"
        )
    return bool(present)


def _stored_dtype(header: GgufHeader) -> str:
    """The dtype of the block matrices: norms are float32 in every GGUF file and say nothing."""
    gguf_types = {0: "float32", 1: "float16", 30: "bfloat16"}
    found = {gguf_types.get(tensor.type_id, "float32") for tensor in header.tensors.values() if len(tensor.shape) == 2}
    return found.pop() if len(found) == 1 else "float32"


def _shortest_float(value: float) -> float:
    """The shortest decimal that rounds to the same float32: 1e-05, where the file's float32 reads 9.99999974738e-06."""
    return float(str(np.float32(value)))


def _rope(header: GgufHeader, head_size: int) -> RopeSettings:
    theta = _shortest_float(_number(header, "rope.freq_base"))
    prefix = f"{header.architecture}.rope.scaling"
    kind = header.metadata.get(f"{prefix}.type", "none")
    if _ROPE_FACTORS in header.tensors:
        if kind != "none":
            raise CheckpointError(f"{header.path} has both {_ROPE_FACTORS} and rope scaling {kind!r}")
        return _llama3_rope(header, theta, head_size)
    if kind == "none":
        factor = header.metadata.get(f"{prefix}.factor", 1.0)
        if factor not in (0.0, 1.0):
            raise CheckpointError(f"{header.path}: rope scaling factor {factor} without a rope scaling type")
        return RopeSettings(theta=theta)
    factor = _number(header, "rope.scaling.factor")
    if kind == "linear":
        return RopeSettings(theta=theta, kind="linear", factor=factor)
    if kind == "yarn":
        original = _whole_number(header, "rope.scaling.original_context_length")
        return RopeSettings(
            theta=theta,
            kind="yarn",
            factor=factor,
            original_max_position_embeddings=original,
            beta_fast=_number(header, "rope.scaling.yarn_beta_fast", default=32.0),
            beta_slow=_number(header, "rope.scaling.yarn_beta_slow", default=1.0),
        )
    raise CheckpointError(
        f"{header.path}: rope scaling type {kind!r} is not supported; supported are none, linear, yarn, and llama3 "
        f"through {_ROPE_FACTORS}"
    )


def _llama3_rope(header: GgufHeader, theta: float, head_size: int) -> RopeSettings:
    """Recover llama3 scaling from its divisors, and refuse divisors that the recovered settings do not reproduce."""
    place = header.tensors[_ROPE_FACTORS]
    count = head_size // 2
    start = header.data_offset + place.offset
    with header.path.open("rb") as file:
        file.seek(start)
        raw = file.read(4 * count)
    if place.shape != (count,) or place.type_id != 0 or len(raw) != 4 * count:
        raise CheckpointError(f"{header.path}: {_ROPE_FACTORS} has shape {place.shape}, expected float32 [{count}]")
    divisors = np.frombuffer(raw, dtype="<f4").astype(np.float64)
    if np.all(divisors == 1.0):
        return RopeSettings(theta=theta)
    # every published llama3 model scales from 8192 positions with these two bounds; checked right below
    settings = RopeSettings(
        theta=theta,
        kind="llama3",
        factor=_shortest_float(float(divisors.max())),
        original_max_position_embeddings=8192,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
    )
    if not np.allclose(llama3_divisors(settings, head_size), divisors, rtol=1e-3):
        raise CheckpointError(f"{header.path}: {_ROPE_FACTORS} is not the llama3 scaling of 8192 positions, 1 and 4")
    return settings


def llama3_divisors(rope: RopeSettings, head_size: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """What each rotary frequency is divided by under llama3 scaling.

    Args:
        rope: settings of kind `llama3`.
        head_size: rotated channels per head.
    Returns:
        float64 `[head_size / 2]`, from 1 (high frequencies) to `rope.factor` (low ones).
    Source: Llama 3.1 reference code, `apply_scaling`.
    """
    assert rope.original_max_position_embeddings is not None
    wavelengths = 2 * math.pi * rope.theta ** (np.arange(0, head_size, 2, dtype=np.float64) / head_size)
    turns = rope.original_max_position_embeddings / wavelengths
    kept = np.clip((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor), 0.0, 1.0)
    result: np.ndarray[Any, np.dtype[np.float64]] = 1.0 / ((1.0 - kept) / rope.factor + kept)
    return result


def _gguf() -> Any:
    try:
        import gguf
    except ImportError as error:
        raise MissingExtraError(
            "reading GGUF files needs the package gguf, which is not installed", hint='`pip install "paceline[gguf]"`'
        ) from error
    return gguf


def _type_ids(gguf: Any) -> set[int]:
    return {int(member) for member in gguf.GGMLQuantizationType}
