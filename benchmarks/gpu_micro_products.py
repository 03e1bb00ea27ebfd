"""The two ceilings of a device, and the library's matrix products of two targets beside the floor that follows."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from benchmarks.gpu_micro_clock import Bench, MicroCase, Row, relative_error

CEILINGS, PART = "ceilings", "products"
ROWS = (1, 8, 16, 17, 32, 64, 128, 256, 512)
# name of a target: products by name, as (outputs, inputs)
PRODUCTS: dict[str, dict[str, tuple[int, int]]] = {
    "smollm2-135m": {
        "qkv": (960, 576),
        "o": (576, 576),
        "gate-up": (3072, 576),
        "down": (576, 1536),
        "head": (49_152, 576),
    },
    "qwen3-8b": {
        "qkv": (6144, 4096),
        "o": (4096, 4096),
        "gate-up": (24_576, 4096),
        "down": (4096, 12_288),
        "head": (151_936, 4096),
    },
}
TINY_PRODUCTS = {"tiny": {"o": (24, 16)}}
_COPY_BYTES, _SQUARE = 2**31, 8192
_NUM_CHECKED = 128  # outputs of a product that are compared


def ceiling_cases() -> Iterator[MicroCase]:
    """The two ceilings; later parts take their floors from them."""
    yield MicroCase(CEILINGS, "copy on the device", None, _copy)
    yield MicroCase(CEILINGS, f"bf16 product, {_SQUARE} cubed", _SQUARE, _square)


def product_cases(is_real: bool) -> Iterator[MicroCase]:
    """Every product at every number of rows; the weights of one product are made once."""
    for target, products in (PRODUCTS if is_real else TINY_PRODUCTS).items():
        for name, shape in products.items():
            weights = _Weights(*shape)
            for rows in ROWS if is_real else (2,):
                yield MicroCase(PART, f"{target} {name}", rows, partial(_product, weights, rows))


def _copy(bench: Bench) -> Row:
    size = _COPY_BYTES // 4 if bench.is_real else 2**10
    source = torch.randn(size, device=bench.device)
    target = torch.full_like(source, torch.nan)
    row = bench.row(bench.clock.time_alone(lambda: target.copy_(source)), num_bytes=8 * size)
    if bench.is_real:
        bench.ceilings.bytes_per_s = 8 * size / _microseconds(row) * 1e6
    return {**row, "floor_us": None, "ratio": None, "error": float((target != source).sum()), "allowed": 0.0}


def _square(bench: Bench) -> Row:
    size = _SQUARE if bench.is_real else 8
    left, right = (torch.randn(size, size, dtype=torch.bfloat16, device=bench.device) for _ in range(2))
    out = torch.full_like(left, torch.nan)
    row = bench.measure(
        [lambda: torch.mm(left, right, out=out)], num_bytes=6 * size**2, num_flops=2 * size**3, num_replays=10
    )
    if bench.is_real:
        bench.ceilings.flops = 2 * size**3 / _microseconds(row) * 1e6
    expected = left[:16].float() @ right.float()
    return {**row, "floor_us": None, "ratio": None, "error": relative_error(out[:16], expected), "allowed": 1e-2}


def _microseconds(row: Row) -> float:
    us = row["us"]
    assert isinstance(us, float)
    return us


class _Weights:
    """Copies of one product's weight, made when the first case asks for them."""

    def __init__(self, num_outputs: int, num_inputs: int) -> None:
        self.shape = (num_outputs, num_inputs)
        self._made: torch.Tensor | None = None

    def on(self, bench: Bench) -> torch.Tensor:
        """[copies, outputs, inputs], random, more than the cache holds."""
        if self._made is None:
            copies = bench.clock.copies(2 * self.shape[0] * self.shape[1])
            self._made = torch.empty(copies, *self.shape, dtype=torch.bfloat16, device=bench.device).normal_()
            self._made *= self.shape[1] ** -0.5
        return self._made


def _product(weights: _Weights, num_rows: int, bench: Bench) -> Row:
    num_outputs, num_inputs = weights.shape
    all_weights = weights.on(bench)
    x = torch.randn(num_rows, num_inputs, dtype=torch.bfloat16, device=bench.device)
    y = torch.full((num_rows, num_outputs), torch.nan, dtype=torch.bfloat16, device=bench.device)
    row = bench.measure(
        [partial(torch.mm, x, weight.t(), out=y) for weight in all_weights],
        num_bytes=2 * (num_outputs * num_inputs + num_rows * (num_inputs + num_outputs)),
        num_flops=2 * num_rows * num_outputs * num_inputs,
    )
    some = torch.randint(num_outputs, (_NUM_CHECKED,), device=bench.device)
    expected = x.double() @ all_weights[-1][some].double().t()
    is_whole = bool(y.isfinite().all())
    error = relative_error(y[:, some], expected) if is_whole else float("nan")
    return {**row, "error": error, "allowed": 1e-2}
