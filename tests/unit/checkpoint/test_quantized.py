"""Dequantised weights against a slow reference in float64, and the many ways in which a file can contradict itself."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.checkpoint.test_sources import MemorySource
from torch import Tensor

from paceline.checkpoint import quantized
from paceline.checkpoint.quantized import open_dequantized
from paceline.checkpoint.sources import SplitRowsSource
from paceline.checkpoint.weights import Destination, load_strict, open_safetensors, save_safetensors
from paceline.errors import CheckpointError

FP8 = torch.float8_e4m3fn
QKV, Q, K, V = (f"layers.0.self_attn.{part}_proj" for part in ("qkv", "q", "k", "v"))
PARTS = {f"{QKV}.weight": [(f"{Q}.weight", 4), (f"{K}.weight", 2), (f"{V}.weight", 2)]}
FP8_TENSOR: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "static"}
FP8_BLOCK: dict[str, Any] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [4, 3]}
NVFP4: dict[str, Any] = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}


def compressed(kind: str, bits: int, strategy: str, storage: str, **changes: Any) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": True, "dynamic": False, **changes}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": storage,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*selector.*"],
    }


def codes(rows: int, columns: int, dtype: torch.dtype = FP8, *, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype == FP8:
        return (torch.randn(rows, columns, generator=generator) * 40).to(FP8)
    low, high = (-127, 128) if dtype == torch.int8 else (0, 256)
    return torch.randint(low, high, (rows, columns), generator=generator).to(dtype)


def factors(*shape: int, seed: int = 1) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) + 0.01


def e2m1(code: int) -> float:
    """A 4-bit float from its fields: sign, two exponent bits with bias 1, one mantissa bit."""
    sign, exponent, mantissa = code >> 3, (code >> 1) & 3, code & 1
    size = mantissa * 0.5 if exponent == 0 else 2.0 ** (exponent - 1) * (1 + mantissa / 2)
    return -size if sign else size


def reference(code: Tensor, scale_at: Callable[[int, int], float]) -> np.ndarray:
    """Every number by itself, in float64."""
    is_packed = code.dtype == torch.uint8
    rows, columns = code.shape[0], code.shape[1] * (2 if is_packed else 1)
    numbers = np.empty((rows, columns))
    for row in range(rows):
        for column in range(columns):
            if is_packed:
                byte = int(code[row, column // 2])
                value = e2m1(byte >> 4 if column % 2 else byte & 15)
            else:
                value = float(code[row, column].float())
            numbers[row, column] = value * scale_at(row, column)
    return numbers


def deviation(tensors: dict[str, Tensor], config: dict[str, Any], expected: np.ndarray, **options: Any) -> float:
    """Largest deviation of the one weight from the reference, relative to the largest number."""
    source, _ = open_dequantized(MemorySource(tensors), config, origin="config.json", **options)
    (name,) = source.names()
    numbers = source.load(name)
    assert numbers.dtype == torch.float32
    assert source.shape(name) == tuple(numbers.shape) == expected.shape
    return float(np.abs(numbers.double().numpy() - expected).max() / np.abs(expected).max())


CLOSE = 3e-7  # two float32 products


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize(
    ("dtype", "config", "label"),
    [
        (FP8, FP8_TENSOR, "fp8 per tensor or channel"),
        (FP8, {"quant_method": "modelopt", "quant_algo": "FP8", "producer": {"name": "modelopt"}}, "fp8 per tensor"),
        (FP8, compressed("float", 8, "tensor", "float-quantized"), "fp8 per tensor"),
        (torch.int8, compressed("int", 8, "tensor", "int-quantized"), "int8 per tensor"),
    ],
)
def test_per_tensor(shape: tuple[int, ...], dtype: torch.dtype, config: dict[str, Any], label: str) -> None:
    code, scale = codes(5, 6, dtype), factors(*shape)
    tensors = {f"{Q}.weight": code, f"{Q}.weight_scale": scale, f"{Q}.input_scale": torch.ones(1)}
    assert deviation(tensors, config, reference(code, lambda row, column: float(scale))) <= CLOSE
    assert open_dequantized(MemorySource(tensors), config, origin="c")[1] == label


@pytest.mark.parametrize(
    ("dtype", "config"),
    [
        (FP8, FP8_TENSOR),
        (FP8, {"quant_method": "modelopt", "quant_algo": "fp8_per_channel_per_token"}),
        (FP8, compressed("float", 8, "channel", "float-quantized")),
        (torch.int8, compressed("int", 8, "channel", "int-quantized")),
    ],
)
def test_per_channel(dtype: torch.dtype, config: dict[str, Any]) -> None:
    code, scale = codes(7, 5, dtype), factors(7, 1)
    tensors = {"fc.weight": code, "fc.weight_scale": scale}
    assert deviation(tensors, config, reference(code, lambda row, column: float(scale[row, 0]))) <= CLOSE


@pytest.mark.parametrize(("rows", "columns"), [(8, 6), (9, 7), (3, 2), (4, 10)])
@pytest.mark.parametrize(
    ("key", "config"),
    [
        ("weight_scale_inv", FP8_BLOCK),
        ("weight_scale", compressed("float", 8, "block", "float-quantized", block_structure=[4, 3])),
    ],
)
def test_per_block_with_ragged_edges(rows: int, columns: int, key: str, config: dict[str, Any]) -> None:
    code, scale = codes(rows, columns), factors(math.ceil(rows / 4), math.ceil(columns / 3))
    tensors = {"fc.weight": code, f"fc.{key}": scale}
    assert deviation(tensors, config, reference(code, lambda r, c: float(scale[r // 4, c // 3]))) <= CLOSE


def test_block_scales_may_be_powers_of_two_in_their_own_dtype() -> None:
    code, scale = codes(4, 3), torch.tensor([[0.25]]).to(torch.float8_e8m0fnu)
    expected = reference(code, lambda row, column: 0.25)
    assert deviation({"fc.weight": code, "fc.weight_scale_inv": scale}, FP8_BLOCK, expected) == 0.0


@pytest.mark.parametrize(
    ("weight", "key", "config"),
    [
        ("weight", "weight_scale_2", NVFP4),
        ("weight_packed", "weight_scale_2", NVFP4),
        (
            "weight_packed",
            "weight_global_scale",
            compressed("float", 4, "tensor_group", "nvfp4-pack-quantized", group_size=16),
        ),
    ],
)
def test_nvfp4(weight: str, key: str, config: dict[str, Any]) -> None:
    """`weight_scale_2` multiplies, `weight_global_scale` divides."""
    code, group, factor = codes(3, 16, torch.uint8), factors(3, 2).to(FP8), torch.tensor([0.003])
    tensors = {f"fc.{weight}": code, "fc.weight_scale": group, f"fc.{key}": factor, "fc.input_global_scale": factor}
    global_factor = float(factor) if key == "weight_scale_2" else 1 / float(factor)
    expected = reference(code, lambda row, column: float(group[row, column // 16].float()) * global_factor)
    assert deviation(tensors, config, expected) <= CLOSE
    source, scheme = open_dequantized(MemorySource(tensors), config, origin="c")
    assert (source.names(), source.shape("fc.weight"), scheme) == (["fc.weight"], (3, 32), "nvfp4")


MXFP4 = compressed("float", 4, "group", "mxfp4-pack-quantized", group_size=32, scale_dtype="torch.uint8")


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu])
def test_mxfp4(dtype: torch.dtype) -> None:
    """Scales are exponents: 127 is 1."""
    code = codes(3, 32, torch.uint8)
    exponent = torch.tensor([[127, 120], [130, 127], [126, 0]], dtype=torch.uint8)
    expected = reference(code, lambda row, column: 2.0 ** (int(exponent[row, column // 32]) - 127))
    tensors = {"fc.weight_packed": code, "fc.weight_scale": exponent.view(dtype)}
    assert deviation(tensors, MXFP4, expected) == 0.0
    source, scheme = open_dequantized(MemorySource(tensors), MXFP4, origin="c")
    assert (source.names(), source.shape("fc.weight"), scheme) == (["fc.weight"], (3, 64), "mxfp4")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight_scale": torch.ones(2, 2, dtype=torch.uint8)}, r"is \[2, 2\]; mxfp4 of \[2, 32\] has \[2, 1\]"),
        ({"weight_scale": torch.full((2, 1), 255, dtype=torch.uint8)}, "holds a value that is no scale"),
        ({"weight_scale": torch.ones(2, 1)}, "fc.weight_scale is torch.float32, expected torch.uint8"),
        ({"weight_packed": codes(2, 17, torch.uint8)}, "fc has 34 inputs; MXFP4 groups have 32"),
        ({"weight_scale_2": torch.ones(1)}, "mxfp4 needs weight_scale"),
    ],
)
def test_mxfp4_files_that_are_wrong(changes: dict[str, Tensor], message: str) -> None:
    tensors = {"weight_packed": codes(2, 16, torch.uint8), "weight_scale": torch.ones(2, 1, dtype=torch.uint8)}
    named = {f"fc.{kind}": tensor for kind, tensor in {**tensors, **changes}.items()}
    with pytest.raises(CheckpointError, match=message):
        open_dequantized(MemorySource(named), MXFP4, origin="c")[0].load("fc.weight")


def test_low_nibble_comes_first() -> None:
    byte = torch.tensor([[0x21] + [0] * 7], dtype=torch.uint8)  # 0x1 is 0.5, 0x2 is 1.0
    tensors = {"fc.weight": byte, "fc.weight_scale": torch.ones(1, 1).to(FP8), "fc.weight_scale_2": torch.ones(())}
    source, _ = open_dequantized(MemorySource(tensors), NVFP4, origin="c")
    assert source.load("fc.weight")[0, :3].tolist() == [0.5, 1.0, 0.0]


def fused_of(scale: list[float], code: Tensor) -> dict[str, Tensor]:
    return {f"{QKV}.weight": code, f"{QKV}.weight_scale": torch.tensor(scale), f"{QKV}.input_scale": torch.ones(3)}


def test_worked_example_of_scales_per_shard() -> None:
    """Rows q=4, k=2, v=2 and scales .1, .2, .4 give row scales .1 x4, .2, .2, .4, .4; codes 100, 50, 25 all give 10."""
    tensors = fused_of([0.1, 0.2, 0.4], torch.ones(8, 1).to(FP8))
    source, _ = open_dequantized(MemorySource(tensors), FP8_TENSOR, origin="c", fused=PARTS)
    split = SplitRowsSource(source, PARTS)
    rows = torch.cat([split.load(f"{name}.weight") for name in (Q, K, V)]).flatten()
    assert rows.tolist() == torch.tensor([0.1, 0.1, 0.1, 0.1, 0.2, 0.2, 0.4, 0.4]).tolist()
    context = torch.cat([split.load(f"{name}.weight") for name in (K, V)]).flatten()
    assert context.tolist() == torch.tensor([0.2, 0.2, 0.4, 0.4]).tolist()
    tens = torch.tensor([100] * 4 + [50] * 2 + [25] * 2, dtype=torch.int8).unsqueeze(1)
    config = compressed("int", 8, "tensor", "int-quantized")
    source, _ = open_dequantized(MemorySource(fused_of([0.1, 0.2, 0.4], tens)), config, origin="c", fused=PARTS)
    torch.testing.assert_close(source.load(f"{QKV}.weight"), torch.full((8, 1), 10.0))


def test_worked_example_of_requantising_to_the_largest_scale() -> None:
    """Codes 100, 50 and 25 at .1, .2 and .4 are 25, 25, 25 at .4: one scale or three, the numbers are the same."""
    code = torch.tensor([100] * 4 + [50] * 2 + [25] * 2, dtype=torch.int8).unsqueeze(1)
    config = compressed("int", 8, "tensor", "int-quantized")
    largest = 0.4
    per_shard = open_dequantized(MemorySource(fused_of([0.1, 0.2, largest], code)), config, origin="c", fused=PARTS)[0]
    requantised = (per_shard.load(f"{QKV}.weight") / largest).round().to(torch.int8)
    assert requantised.flatten().tolist() == [25] * 8
    single = open_dequantized(MemorySource(fused_of([largest], requantised)), config, origin="c", fused=PARTS)[0]
    torch.testing.assert_close(single.load(f"{QKV}.weight"), per_shard.load(f"{QKV}.weight"))
    assert not torch.allclose(code * largest, per_shard.load(f"{QKV}.weight")), "old codes at the new scale"


def test_a_fused_tensor_may_have_a_single_scale() -> None:
    code = codes(8, 3)
    tensors = {f"{QKV}.weight": code, f"{QKV}.weight_scale": torch.tensor([0.5])}
    assert deviation(tensors, FP8_TENSOR, reference(code, lambda row, column: 0.5), fused=PARTS) == 0.0


@pytest.mark.parametrize("key", ["weight_scale_2", "weight_global_scale"])
def test_a_fused_nvfp4_tensor_may_have_a_factor_per_shard(key: str) -> None:
    code, group, factor = codes(8, 8, torch.uint8), factors(8, 1).to(FP8), torch.tensor([0.5, 4.0, 8.0])
    tensors = {f"{QKV}.weight": code, f"{QKV}.weight_scale": group, f"{QKV}.{key}": factor}
    of_row = [0, 0, 0, 0, 1, 1, 2, 2]

    def scale_at(row: int, column: int) -> float:
        part = float(factor[of_row[row]])
        return float(group[row, 0].float()) * (part if key == "weight_scale_2" else 1 / part)

    assert deviation(tensors, NVFP4, reference(code, scale_at), fused=PARTS) <= CLOSE


@pytest.mark.parametrize(
    "broken",
    [
        lambda scale, rows: scale.reshape(-1)[:1].reshape(1, 1),  # the first part's scale on all rows
        lambda scale, rows: scale.reshape(-1).flip(0).repeat_interleave(torch.tensor(rows[::-1])).unsqueeze(1),
        lambda scale, rows: scale.reshape(-1).repeat_interleave(torch.tensor([2, 2, 4])).unsqueeze(1),  # v, k, q rows
        lambda scale, rows: scale.max().reshape(1, 1),
    ],
)
def test_scales_on_the_wrong_rows_are_noticed(
    monkeypatch: pytest.MonkeyPatch, broken: Callable[[Tensor, tuple[int, ...]], Tensor]
) -> None:
    scales, of_row, code = [0.1, 0.2, 0.4], [0, 0, 0, 0, 1, 1, 2, 2], codes(8, 3)
    expected = reference(code, lambda row, column: scales[of_row[row]])
    assert deviation(fused_of(scales, code), FP8_TENSOR, expected, fused=PARTS) <= CLOSE
    monkeypatch.setattr(quantized, "_by_row", broken)
    assert deviation(fused_of(scales, code), FP8_TENSOR, expected, fused=PARTS) > 0.01


def test_a_file_is_read_lazily_and_strictly(tmp_path: Path) -> None:
    """A mixed file through the strict loader: every tensor is used, and plain ones pass through as they are."""
    code, scale = codes(8, 6), factors(8, 1)
    tensors = {
        f"{QKV}.weight": code,
        f"{QKV}.weight_scale": scale,
        "norm.weight": torch.ones(6, dtype=torch.bfloat16),
        "lm_head.weight": torch.full((4, 6), 2.0),
        "d2t": torch.arange(4),
        "t2d": torch.ones(4, dtype=torch.bool),
    }
    save_safetensors(tmp_path / "model.safetensors", tensors, {})
    source, scheme = open_dequantized(
        open_safetensors(tmp_path), compressed("float", 8, "channel", "float-quantized"), origin="c", fused=PARTS
    )
    assert scheme == "fp8 per channel"
    assert source.load("d2t").tolist() == [0, 1, 2, 3]
    assert source.load("t2d").dtype == torch.bool
    parameters = {"qkv": torch.zeros(8, 6), "norm": torch.zeros(6), "head": torch.zeros(4, 6)}
    places = {f"{name}.weight": Destination("qkv", rows) for name, rows in ((Q, (0, 4)), (K, (4, 6)), (V, (6, 8)))} | {
        "norm.weight": Destination("norm"),
        "lm_head.weight": Destination("head"),
    }
    load_strict(parameters, SplitRowsSource(source, PARTS), places, ignored={"d2t", "t2d"})
    assert torch.equal(parameters["qkv"], code.float() * scale)
    assert torch.equal(parameters["head"], tensors["lm_head.weight"])


def test_a_plain_file_passes_unchanged() -> None:
    file = MemorySource({"fc.weight": torch.ones(2, 2, dtype=torch.bfloat16)})
    source, scheme = open_dequantized(file, None, origin="c")
    assert scheme is None
    assert file.loads == []
    assert source.load("fc.weight") is file.tensors["fc.weight"]
    with pytest.raises(CheckpointError, match="has no tensor other"):
        source.load("other")
    with pytest.raises(CheckpointError, match="has no tensor other"):
        source.shape("other")


SCALED = {"fc.weight": codes(4, 4), "fc.weight_scale": torch.ones(1)}


@pytest.mark.parametrize(
    ("tensors", "config", "message"),
    [
        (SCALED, None, "the weights are quantised .fc.weight_scale., and the config has no quantization_config"),
        ({"fc.weight": torch.ones(4, 4)}, FP8_TENSOR, "says fp8 per tensor or channel, and no weight has a scale"),
        ({**SCALED, "fc.k_scale": torch.ones(1)}, FP8_TENSOR, "scales of no quantised weight: fc.k_scale"),
        ({**SCALED, "o.input_scale": torch.ones(1)}, FP8_TENSOR, "scales of no quantised weight: o.input_scale"),
        ({"o.input_scale": torch.ones(1)}, None, "scales of no quantised weight: o.input_scale"),
        ({"fc.weight_scale": torch.ones(1)}, FP8_TENSOR, "fc holds no weight beside weight_scale"),
        ({**SCALED, "fc.weight_packed": codes(4, 2, torch.uint8)}, FP8_TENSOR, "holds weight and weight_packed"),
        ({**SCALED, "fc.weight_scale": torch.ones(4)}, FP8_TENSOR, r"fc.weight_scale is \[4\]; .* \[4, 4\] has \[\]"),
        ({**SCALED, "fc.weight_scale": torch.ones(1, 4)}, FP8_TENSOR, r"fc.weight_scale is \[1, 4\]"),
        ({**SCALED, "fc.weight_scale_2": torch.ones(1)}, FP8_TENSOR, "fc has weight_scale, weight_scale_2; fp8"),
        (SCALED, FP8_BLOCK, r"fc.weight_scale is \[1\]; fp8 per block of 4x3 of \[4, 4\] has \[1, 2\]"),
        (SCALED, NVFP4, "fc has weight_scale; nvfp4 needs weight_scale and weight_scale_2 or weight_global_scale"),
        ({**SCALED, "fc.weight": torch.ones(4).to(FP8)}, FP8_TENSOR, r"fc is quantised and \[4\]; only matrices"),
        (SCALED, {**FP8_TENSOR, "ignored_layers": ["fc"]}, "lists fc as stored plainly"),
        (SCALED, {**FP8_TENSOR, "modules_to_not_convert": ["f*"]}, "lists fc as stored plainly"),
        (
            {"norm.weight": torch.ones(4).to(FP8), "norm.weight_scale": torch.ones(1)},
            FP8_TENSOR,
            "only matrices may be",
        ),
        ({"a.qweight": torch.ones(1)}, None, "quantised as GPTQ or AWQ .tensor a.qweight."),
        ({"a.weight.absmax": torch.ones(1)}, None, "quantised as bitsandbytes"),
        ({"a.weight.quant_state.bitsandbytes__nf4": torch.ones(1)}, None, "quantised as bitsandbytes"),
        ({**SCALED, "fc.weight_zero_point": torch.ones(1)}, FP8_TENSOR, "quantised as asymmetric integers"),
        ({"a.weight_packed": torch.ones(1), "a.weight_shape": torch.ones(2)}, None, "packed integers of compressed"),
        (SCALED, {"quant_method": "gptq", "bits": 4}, "quant_method 'gptq' is not supported"),
        (SCALED, {"quant_method": "awq"}, "quant_method 'awq' is not supported"),
        (SCALED, {"quant_method": "bitsandbytes"}, "quant_method 'bitsandbytes' is not supported"),
        (SCALED, {"quant_method": "gguf"}, "quant_method 'gguf' is not supported"),
    ],
)
def test_contradictions_are_refused_at_opening(
    tensors: dict[str, Tensor], config: dict[str, Any] | None, message: str
) -> None:
    file = MemorySource(tensors)
    with pytest.raises(CheckpointError, match=message):
        open_dequantized(file, config, origin="config.json")
    assert file.loads == []


@pytest.mark.parametrize(
    "module",
    [
        "candidate_selector.hidden_projection",
        "candidate_selector.predecessor_codebook",
        "candidate_selector.successor_codebook",
        "layers.0.attention_conv.base_kernel",
        "markov_head.markov_w1",
    ],
)
def test_parts_that_must_stay_plain(module: str) -> None:
    tensors = {f"{module}.weight": codes(4, 4), f"{module}.weight_scale": torch.ones(1)}
    with pytest.raises(CheckpointError, match=f"{module} is quantised; .* must be stored in the model's dtype"):
        open_dequantized(MemorySource(tensors), FP8_TENSOR, origin="c")


@pytest.mark.parametrize("module", ["fc", "layers.0.mlp_conv.kernel_projection", "markov_head.markov_w2", "lm_head"])
def test_parts_that_may_be_quantised(module: str) -> None:
    tensors = {f"{module}.weight": codes(4, 4), f"{module}.weight_scale": torch.ones(1)}
    source, _ = open_dequantized(MemorySource(tensors), FP8_TENSOR, origin="c")
    assert source.load(f"{module}.weight").dtype == torch.float32


@pytest.mark.parametrize(
    ("tensors", "config", "message"),
    [
        ({"fc.weight": codes(4, 4)}, None, "fc.weight is stored as torch.float8_e4m3fn and has no scale"),
        ({"fc.weight": codes(4, 4, torch.int8)}, None, "fc.weight is stored as torch.int8 and has no scale"),
        ({**SCALED, "fc.weight": codes(4, 4).to(torch.float8_e5m2)}, FP8_TENSOR, "fc.weight is torch.float8_e5m2; fp8"),
        ({**SCALED, "fc.weight": codes(4, 4, torch.int8)}, FP8_TENSOR, "fc.weight is torch.int8; fp8 is torch.float8"),
        ({**SCALED, "fc.weight_scale": torch.ones(1).long()}, FP8_TENSOR, "fc.weight_scale is torch.int64, expected"),
        (
            {**SCALED, "fc.weight_scale": torch.tensor(-1.0)},
            FP8_TENSOR,
            "fc.weight_scale holds a value that is no scale",
        ),
        ({**SCALED, "fc.weight_scale": torch.tensor(float("nan"))}, FP8_TENSOR, "holds a value that is no scale"),
        ({**SCALED, "fc.weight_scale": torch.tensor(float("inf"))}, FP8_TENSOR, "holds a value that is no scale"),
    ],
)
def test_contradictions_that_show_when_a_tensor_is_read(
    tensors: dict[str, Tensor], config: dict[str, Any] | None, message: str
) -> None:
    source, _ = open_dequantized(MemorySource(tensors), config, origin="c")
    with pytest.raises(CheckpointError, match=message):
        source.load("fc.weight")


def nvfp4(**changes: Tensor) -> dict[str, Tensor]:
    tensors = {
        "weight": codes(2, 8, torch.uint8),
        "weight_scale": torch.ones(2, 1).to(FP8),
        "weight_scale_2": torch.ones(1),
    }
    return {f"fc.{kind}": tensor for kind, tensor in {**tensors, **changes}.items()}


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (nvfp4(weight_global_scale=torch.ones(1)), "needs weight_scale and weight_scale_2 or weight_global_scale"),
        (nvfp4(weight_scale=torch.ones(2, 2).to(FP8)), r"is \[2, 2\]; nvfp4 of \[2, 16\] has \[2, 1\]"),
        (nvfp4(weight_scale_2=torch.ones(3)), r"fc.weight_scale_2 is \[3\]"),
        (nvfp4(weight=codes(2, 9, torch.uint8)), "fc has 18 inputs; NVFP4 groups have 16"),
        (nvfp4(weight_scale=torch.ones(2, 1)), "fc.weight_scale is torch.float32, expected torch.float8_e4m3fn"),
        (nvfp4(weight_scale_2=torch.zeros(1)), "fc.weight_scale_2 holds a value that is no scale"),
        (nvfp4(weight=codes(2, 8, torch.int8)), "fc.weight is torch.int8; nvfp4 is torch.uint8"),
    ],
)
def test_nvfp4_files_that_are_wrong(tensors: dict[str, Tensor], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        open_dequantized(MemorySource(tensors), NVFP4, origin="c")[0].load("fc.weight")


@pytest.mark.parametrize(
    ("parts", "config", "scale", "message"),
    [
        ([("q.weight", 4), ("k.weight", 2)], FP8_TENSOR, torch.ones(2), r"has 8 rows; its parts have 6, \[4, 2\]"),
        ([("q.weight", 6), ("k.weight", 2)], FP8_BLOCK, torch.ones(2, 1), "a block would reach across two parts"),
        ([("q.weight", 4), ("k.weight", 4)], FP8_TENSOR, torch.ones(3), r"weight_scale is \[3\]; .* has \[\] or \[1\]"),
        ([("q.weight", 4), ("k.weight", 4)], {**FP8_TENSOR, "ignored_layers": ["k"]}, torch.ones(2), "lists k as"),
    ],
)
def test_fused_tensors_that_are_wrong(
    parts: list[tuple[str, int]], config: dict[str, Any], scale: Tensor, message: str
) -> None:
    key = "weight_scale_inv" if config is FP8_BLOCK else "weight_scale"
    file = MemorySource({"qk.weight": codes(8, 3), f"qk.{key}": scale})
    with pytest.raises(CheckpointError, match=message):
        open_dequantized(file, config, origin="c", fused={"qk.weight": parts})


def test_fused_blocks_that_end_with_a_part() -> None:
    code, scale = codes(7, 3), factors(2, 1)
    file = {"qk.weight": code, "qk.weight_scale_inv": scale}
    parts = {"qk.weight": [("q.weight", 4), ("k.weight", 3)]}
    assert deviation(file, FP8_BLOCK, reference(code, lambda r, c: float(scale[r // 4, 0])), fused=parts) <= CLOSE


def test_groups_of_different_schemes() -> None:
    config = compressed("float", 8, "channel", "mixed-precision")
    config["config_groups"]["group_0"]["targets"] = ["re:.*self_attn.*"]
    second = compressed("float", 4, "tensor_group", "", group_size=16)["config_groups"]["group_0"]
    config["config_groups"]["group_1"] = {**second, "targets": ["layers.*.mlp.*"], "format": "nvfp4-pack-quantized"}
    down = "layers.0.mlp.down_proj"
    file = {f"{Q}.weight": codes(4, 4), f"{Q}.weight_scale": torch.ones(4, 1)}
    file |= {name.replace("fc", down): tensor for name, tensor in nvfp4().items()}
    source, scheme = open_dequantized(MemorySource(file), config, origin="c")
    assert (source.names(), scheme) == ([f"{Q}.weight", f"{down}.weight"], "fp8 per channel, nvfp4")
    with pytest.raises(CheckpointError, match="fc has scales, and no group of the quantization_config names it"):
        open_dequantized(MemorySource({**file, **SCALED}), config, origin="c")
