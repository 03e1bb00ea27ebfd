"""GGUF targets: tensors under Hugging Face names in Hugging Face order, and the contract they imply."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.checkpoint.contract import RopeSettings
from paceline.checkpoint.gguf import hugging_face_name, llama3_divisors, open_gguf, read_gguf_config, split_halves
from paceline.checkpoint.names import dense_target_slots
from paceline.errors import CheckpointError

ToFileOrder = Callable[[np.ndarray, int], np.ndarray]


def llama3_factors() -> tuple[RopeSettings, np.ndarray]:
    settings = RopeSettings(
        theta=500000.0,
        kind="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )
    return settings, llama3_divisors(settings, 8).astype(np.float32)


@given(num_heads=st.integers(1, 6), half=st.integers(1, 5), width=st.integers(0, 3))
def test_row_order_is_undone_for_any_head_count(num_heads: int, half: int, width: int) -> None:
    rows = num_heads * 2 * half
    original = torch.arange(rows * max(1, width)).reshape((rows, width) if width else (rows,))
    head, j, side = torch.meshgrid(torch.arange(num_heads), torch.arange(half), torch.arange(2), indexing="ij")
    stored = original[(head * 2 * half + side * half + j).flatten()]  # file row 2j + side holds row side * half + j
    assert torch.equal(split_halves(stored, num_heads), original)


def test_llama_rows_are_restored_with_each_projections_own_head_count(
    tiny_gguf: Any, to_file_order: ToFileOrder
) -> None:
    query, key = np.random.default_rng(0).normal(size=(2, 32, 32)).astype(np.float32)
    key = key[:16]
    tiny_gguf.tensors["blk.1.attn_q.weight"] = to_file_order(query, 4)
    tiny_gguf.tensors["blk.1.attn_k.weight"] = to_file_order(key, 2)
    source = open_gguf(tiny_gguf.write())
    assert torch.equal(source.load("model.layers.1.self_attn.q_proj.weight"), torch.from_numpy(query))
    assert torch.equal(source.load("model.layers.1.self_attn.k_proj.weight"), torch.from_numpy(key))
    # the fault that grouped heads invite: the query's head count for k
    assert not torch.equal(split_halves(torch.from_numpy(to_file_order(key, 2)), 4), torch.from_numpy(key))
    # v is never reordered
    value = torch.from_numpy(tiny_gguf.tensors["blk.1.attn_v.weight"])
    assert torch.equal(source.load("model.layers.1.self_attn.v_proj.weight"), value)


def test_llama_biases_are_restored_too(tiny_gguf: Any, to_file_order: ToFileOrder) -> None:
    bias = np.arange(32, dtype=np.float32)
    for layer in range(2):
        for name, size in (("attn_q", 32), ("attn_k", 16), ("attn_v", 16), ("attn_output", 32)):
            tiny_gguf.tensors[f"blk.{layer}.{name}.bias"] = bias[:size].copy()
        tiny_gguf.tensors[f"blk.{layer}.attn_q.bias"] = to_file_order(bias, 4)
    path = tiny_gguf.write()
    assert read_gguf_config(path).attention_bias
    assert torch.equal(open_gguf(path).load("model.layers.0.self_attn.q_proj.bias"), torch.from_numpy(bias))


def test_qwen3_rows_stay_as_they_are(tiny_qwen3_gguf: Any) -> None:
    path = tiny_qwen3_gguf.write()
    source, contract = open_gguf(path), read_gguf_config(path)
    for part in "qk":
        stored = torch.from_numpy(tiny_qwen3_gguf.tensors[f"blk.0.attn_{part}.weight"])
        assert torch.equal(source.load(f"model.layers.0.self_attn.{part}_proj.weight"), stored)
    assert contract.architecture == "Qwen3ForCausalLM" and contract.has_qk_norm
    assert source.shape("model.layers.1.self_attn.q_norm.weight") == (8,)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_names_and_shapes_are_what_the_contract_calls_for(
    request: pytest.FixtureRequest, family: str, tied: bool
) -> None:
    tiny = request.getfixturevalue("tiny_gguf" if family == "llama" else "tiny_qwen3_gguf")
    if not tied:
        tiny.tensors["output.weight"] = np.ones((64, 32), dtype=np.float32)
    path = tiny.write()
    contract, source = read_gguf_config(path), open_gguf(path)
    assert contract.tie_word_embeddings is tied
    assert {slot.name: slot.shape for slot in dense_target_slots(contract)} == {
        name: source.shape(name) for name in source.names()
    }


@pytest.mark.parametrize(
    ("kind", "dtype", "tolerance"),
    [
        ("F32", torch.float32, 0.0),
        ("F16", torch.float16, 0.0),
        ("BF16", torch.bfloat16, 0.0),
        ("Q8_0", torch.float32, 1 / 127),
        ("Q4_0", torch.float32, 1 / 7),
        ("Q4_1", torch.float32, 1 / 7),
        ("Q5_0", torch.float32, 1 / 15),
    ],
)
def test_stored_types_are_read_back(tiny_gguf: Any, kind: str, dtype: torch.dtype, tolerance: float) -> None:
    tiny_gguf.types = {name: kind for name, tensor in tiny_gguf.tensors.items() if tensor.ndim == 2}
    source = open_gguf(tiny_gguf.write())
    for name, module in (("ffn_down", "mlp.down_proj"), ("attn_v", "self_attn.v_proj")):
        found = source.load(f"model.layers.1.{module}.weight")
        expected = torch.from_numpy(tiny_gguf.tensors[f"blk.1.{name}.weight"]).to(dtype)
        assert found.dtype == dtype
        assert (
            found - expected
        ).abs().max() <= tolerance * expected.abs().max()  # at most a step of the coarsest block
    expected_dtype = str(dtype).removeprefix("torch.")
    assert read_gguf_config(tiny_gguf.path).dtype == expected_dtype


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"])
def test_k_quants_go_through_the_dequantiser(tiny_gguf: Any, kind: str) -> None:
    import gguf

    quantisation = gguf.GGMLQuantizationType[kind]
    _, block_bytes = gguf.GGML_QUANT_SIZES[quantisation]
    blocks = np.zeros((64, block_bytes), dtype=np.uint8)
    blocks[:, : block_bytes // 4] = 17  # scales in the middle of the block stay zero or tiny: all values finite
    tiny_gguf.tensors["blk.0.ffn_gate.weight"] = blocks  # 64 rows of one block: width 256
    tiny_gguf.types["blk.0.ffn_gate.weight"] = kind
    found = open_gguf(tiny_gguf.write()).load("model.layers.0.mlp.gate_proj.weight")
    assert found.shape == (64, 256) and found.dtype == torch.float32
    assert torch.equal(found, torch.from_numpy(gguf.quants.dequantize(blocks, quantisation)))


def test_q6_k_block_by_its_formula(tiny_gguf: Any) -> None:
    rng = np.random.default_rng(5)
    low, high = rng.integers(0, 256, 128, dtype=np.uint8), rng.integers(0, 256, 64, dtype=np.uint8)
    scales, scale = rng.integers(-20, 20, 16).astype(np.int8), np.float16(0.125)
    block = np.concatenate([low, high, scales.view(np.uint8), np.array([scale]).view(np.uint8)])
    expected = np.empty(256, dtype=np.float64)
    for index in range(256):
        half, inside = divmod(index, 128)
        quarter, position = divmod(inside, 32)
        nibble = low[half * 64 + (quarter % 2) * 32 + position] >> (4 * (quarter // 2)) & 15
        top = high[half * 32 + position] >> (2 * quarter) & 3
        expected[index] = float(scale) * scales[index // 16] * ((int(top) << 4 | int(nibble)) - 32)
    tiny_gguf.tensors["blk.0.ffn_up.weight"] = np.tile(block, (2, 1))
    tiny_gguf.types["blk.0.ffn_up.weight"] = "Q6_K"
    found = open_gguf(tiny_gguf.write()).load("model.layers.0.mlp.up_proj.weight")
    torch.testing.assert_close(found[1].double(), torch.from_numpy(expected))


def test_contract_of_the_tiny_file(tiny_gguf: Any) -> None:
    tiny_gguf.general |= {"tokenizer.ggml.eot_token_id": 9, "tokenizer.ggml.eom_token_id": 2}
    contract = read_gguf_config(tiny_gguf.write())
    assert (contract.num_layers, contract.hidden_size, contract.intermediate_size) == (2, 32, 64)
    assert (contract.num_heads, contract.num_kv_heads, contract.head_size, contract.vocab_size) == (4, 2, 8, 64)
    assert contract.rms_norm_eps == 1e-5  # not the float32 neighbour 9.99999974e-06
    assert contract.rope == RopeSettings(theta=10000.0)
    assert contract.stop_token_ids == (2, 9)
    assert contract.bos_token_id == 1
    assert contract.name == "tiny" and contract.origin == str(tiny_gguf.path)


def test_real_file_is_read_in_time(smollm2: Path) -> None:
    start = time.process_time()
    contract, source = read_gguf_config(smollm2), open_gguf(smollm2)
    names = set(source.names())
    embedding = source.load("model.embed_tokens.weight")
    layer = source.load("model.layers.29.mlp.down_proj.weight")
    assert time.process_time() - start < 3.0
    assert (contract.num_layers, contract.hidden_size, contract.num_heads, contract.num_kv_heads) == (30, 576, 9, 3)
    assert (contract.vocab_size, contract.max_position_embeddings, contract.head_size) == (49152, 8192, 64)
    assert contract.rope == RopeSettings(theta=100000.0)
    assert contract.tie_word_embeddings and contract.stop_token_ids == (2,)
    assert contract.architecture == "LlamaForCausalLM"
    assert names == {slot.name for slot in dense_target_slots(contract)}
    assert embedding.shape == (49152, 576) and bool(torch.isfinite(embedding).all())
    assert layer.shape == (576, 1536) and 0.01 < float(layer.std()) < 1.0


def test_linear_and_yarn_scaling(tiny_gguf: Any) -> None:
    tiny_gguf.values |= {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}
    assert read_gguf_config(tiny_gguf.write()).rope == RopeSettings(theta=10000.0, kind="linear", factor=2.0)
    tiny_gguf.values |= {"rope.scaling.type": "yarn", "rope.scaling.original_context_length": 64}
    tiny_gguf.values["rope.scaling.yarn_beta_fast"] = 16.0
    rope = read_gguf_config(tiny_gguf.write()).rope
    assert rope.kind == "yarn" and rope.original_max_position_embeddings == 64 and rope.beta_fast == 16.0


def test_llama3_scaling_is_recovered_from_its_divisors(tiny_gguf: Any) -> None:
    settings, divisors = llama3_factors()
    tiny_gguf.values["rope.freq_base"] = 500000.0
    tiny_gguf.tensors["rope_freqs.weight"] = divisors
    path = tiny_gguf.write()
    assert read_gguf_config(path).rope == settings
    assert "rope_freqs.weight" not in open_gguf(path).names()
    assert not any("rope" in name for name in open_gguf(path).names())


def test_divisors_that_no_llama3_setting_gives_are_refused(tiny_gguf: Any) -> None:
    _, divisors = llama3_factors()
    tiny_gguf.values["rope.freq_base"] = 500000.0
    tiny_gguf.tensors["rope_freqs.weight"] = divisors[::-1].copy()
    with pytest.raises(CheckpointError, match="is not the llama3 scaling"):
        read_gguf_config(tiny_gguf.write())


def test_neutral_divisors_mean_no_scaling(tiny_gguf: Any) -> None:
    tiny_gguf.tensors["rope_freqs.weight"] = np.ones(4, dtype=np.float32)
    assert read_gguf_config(tiny_gguf.write()).rope == RopeSettings(theta=10000.0)


def test_llama3_divisors_follow_transformers() -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    settings, _ = llama3_factors()
    config = LlamaConfig(
        hidden_size=256,
        num_attention_heads=4,
        max_position_embeddings=131072,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    )
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 500000.0 ** (-np.arange(0, 64, 2) / 64)
    np.testing.assert_allclose(plain / llama3_divisors(settings, 64), frequencies.double().numpy(), rtol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"rope.scaling.type": "longrope", "rope.scaling.factor": 2.0},
            "rope scaling type 'longrope' is not supported",
        ),
        ({"rope.scaling.attn_factor": 0.5}, "attn_factor is 0.5"),
        ({"rope.dimension_count": 4}, "rope.dimension_count is 4, the head size is 8"),
        ({"attention.value_length": 16}, "attention.value_length is 16, the head size is 8"),
        ({"expert_count": 8}, "expert_count is 8"),
        ({"attention.sliding_window": 64}, "sliding_window is 64"),
        ({"logit_scale": 0.5}, r"metadata key llama\.logit_scale \(0\.5\) is not known"),
        ({"vocab_size": 65}, "vocab_size is 65, token_embd.weight has 64"),
        ({"attention.head_count": "four"}, "attention.head_count is 'four'"),
        ({"rope.freq_base": None}, "rope.freq_base is missing"),
        ({"attention.layer_norm_rms_epsilon": None}, "layer_norm_rms_epsilon is missing"),
        ({"block_count": None}, "block_count is missing"),
    ],
)
def test_what_is_not_supported_is_named(tiny_gguf: Any, change: dict[str, Any], message: str) -> None:
    tiny_gguf.values = {key: value for key, value in (tiny_gguf.values | change).items() if value is not None}
    with pytest.raises(CheckpointError, match=message):
        read_gguf_config(tiny_gguf.write())


def test_qwen2_is_refused_by_name(tiny_gguf: Any) -> None:
    tiny_gguf.architecture = "qwen2"
    path = tiny_gguf.write()
    for read in (read_gguf_config, open_gguf):
        with pytest.raises(CheckpointError, match="has the architecture qwen2; supported are llama, qwen3"):
            read(path)


def test_biases_of_only_some_projections_are_refused(tiny_gguf: Any) -> None:
    tiny_gguf.tensors["blk.0.attn_q.bias"] = np.zeros(32, dtype=np.float32)
    with pytest.raises(CheckpointError, match="has biases for attn_q only"):
        read_gguf_config(tiny_gguf.write())


def test_unknown_tensor_and_type_are_named(tiny_gguf: Any) -> None:
    tiny_gguf.tensors["blk.0.attn_sinks.weight"] = np.zeros(4, dtype=np.float32)
    with pytest.raises(CheckpointError, match=r"tensor blk\.0\.attn_sinks\.weight is none of"):
        open_gguf(tiny_gguf.write())
    del tiny_gguf.tensors["blk.0.attn_sinks.weight"]
    tiny_gguf.tensors["blk.0.ffn_up.weight"] = np.zeros((64, 17), dtype=np.uint8)
    tiny_gguf.types["blk.0.ffn_up.weight"] = "MXFP4"
    with pytest.raises(CheckpointError, match=r"ffn_up\.weight is of type MXFP4"):
        open_gguf(tiny_gguf.write())


@pytest.mark.parametrize("lost", [1, 4000, 20000])
def test_truncated_tensor_data_is_noticed_at_opening(tiny_gguf: Any, lost: int) -> None:
    path = tiny_gguf.write()
    source = open_gguf(path)
    end = max(source._find(name)[0].offset + source._find(name)[2] for name in source.names())
    path.write_bytes(path.read_bytes()[: end - lost])
    with pytest.raises(CheckpointError, match=r"tiny\.gguf is truncated: tensor .* ends at byte"):
        open_gguf(path)


def test_vocabulary_only_file_is_refused(tiny_gguf: Any) -> None:
    tiny_gguf.tensors = {"output_norm.weight": np.zeros(32, dtype=np.float32)}
    with pytest.raises(CheckpointError, match=r"no token_embd\.weight"):
        read_gguf_config(tiny_gguf.write())


def test_unknown_tensor_name_lookup() -> None:
    assert hugging_face_name("blk.12.ffn_down.weight", Path("x")) == "model.layers.12.mlp.down_proj.weight"
    assert hugging_face_name("output.weight", Path("x")) == "lm_head.weight"
    for name in ("blk.x.ffn_down.weight", "blk.1.ffn_down.scale", "ffn_down.weight", "token_embd", ""):
        with pytest.raises(CheckpointError):
            hugging_face_name(name, Path("x"))
