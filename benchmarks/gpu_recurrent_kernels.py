"""Kernels of a prompt's recurrence, one layer at a time: checked against the definition, then timed."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial

import torch
from benchmarks.gpu_micro_clock import GraphClock, Row, relative_error
from benchmarks.gpu_recurrent import SIZES
from torch import Tensor

from paceline.ops.delta_attention import DeltaGate, DeltaInputs, delta_attention_reference
from paceline.ops.delta_chunks import TOLERANCE, delta_chunks_triton
from paceline.ops.delta_fla import TOLERANCE as FLA_TOLERANCE
from paceline.ops.delta_fla import delta_chunks_fla, find_chunk_kda
from paceline.ops.delta_kernel import LAST_STATE, DeltaTile, launch_delta

Run = Callable[[DeltaInputs, DeltaGate, Tensor], tuple[Tensor, Tensor]]
Case = tuple[tuple[str, str, str, int], Callable[[], Row]]
_MOST_DEFINED = 1024  # rows that the definition runs, one after the other
_EXACT = (5e-3, 1e-4)  # outputs in bf16; float32 states of kernels that keep float32 throughout
# Tile, precision, and whether a chunk's system is solved by products: what else our chunks could be.
_VARIANTS = (
    (DeltaTile(16, 4), "tf32", True),
    (DeltaTile(32, 4), "tf32", True),
    (DeltaTile(64, 8), "tf32", True),
    (DeltaTile(32, 8), "tf32", False),
    (DeltaTile(16, 4), "tf32x3", True),
    (DeltaTile(32, 8), "tf32x3", False),
)


def kernel_cases(options: argparse.Namespace, device: torch.device) -> Iterator[Case]:
    """Every kernel at every size and length."""
    clock = GraphClock(device, options.num_replays)
    runs: dict[str, Run] = {"recurrent": recurrent, "chunks, tf32": delta_chunks}
    runs["chunks, tf32x3"] = partial(_chunks, DeltaTile(32, 8), "tf32x3", True)
    for tile, precision, by_products in _VARIANTS if options.variants else ():
        solved = "products" if by_products else "rows"
        name = f"chunks, {precision}, {tile.values} values, {tile.warps} warps, by {solved}"
        runs[name] = partial(_chunks, tile, precision, by_products)
    if find_chunk_kda() is not None and device.type == "cuda":
        runs["fla"] = delta_chunks_fla
    for size in options.sizes:
        for length in options.lengths:
            prompt = _Prompt(*SIZES[size], options.batch, length, clock)
            for name, run in runs.items():
                yield ("kernels", size, name, length), partial(prompt.measure, name, run)


class _Prompt:
    """Rows of one length, made when the first case asks for them, and what the recurrent kernel makes of them."""

    def __init__(self, num_heads: int, head_size: int, batch: int, length: int, clock: GraphClock) -> None:
        self._sizes, self._clock = (batch, length, num_heads, head_size), clock
        self._made: tuple[DeltaInputs, DeltaGate, Tensor] | None = None
        self._expected: tuple[Tensor, Tensor] | None = None
        self._recurrent_us: tuple[float, float] | None = None

    def measure(self, name: str, run: Run) -> Row:
        """Check, then time."""
        given = self._given()
        if self._expected is None:
            self._expected = recurrent(*given)
        is_own = name == "recurrent"
        row = self._checked(run(*given), allowed=_allowed(name), against_definition=is_own)
        calls = [partial(run, *given)] * (1 if self._sizes[1] >= 4096 else 4)
        us, eager_us = self._clock.time(calls).us, self._clock.time_alone(calls[0], 5).us
        if is_own:
            self._recurrent_us = (us, eager_us)
        row |= {"us": us, "eager_us": eager_us}
        if self._recurrent_us is not None:
            row |= {
                "over_recurrent": self._recurrent_us[0] / us,
                "eager_over_recurrent": self._recurrent_us[1] / eager_us,
            }
        return row

    def _given(self) -> tuple[DeltaInputs, DeltaGate, Tensor]:
        if self._made is None:
            (batch, length, num_heads, size), device = self._sizes, self._clock.device
            joint = torch.randn(batch, length, 4 * num_heads * size, dtype=torch.bfloat16, device=device)
            q, k, v, f = (part.unflatten(-1, (num_heads, size)) for part in joint.split(num_heads * size, -1))
            b = torch.randn(batch, length, num_heads, dtype=torch.bfloat16, device=device)
            gate = DeltaGate(
                torch.randn(num_heads, device=device) * 0.5, torch.randn(num_heads, size, device=device) * 0.5, -5.0
            )
            state = torch.randn(batch, num_heads, size, size, device=device)
            self._made = DeltaInputs(q, k, v, f, b), gate, state
        return self._made

    def _checked(self, found: tuple[Tensor, Tensor], *, allowed: tuple[float, float], against_definition: bool) -> Row:
        """The largest error as a share of what is allowed."""
        expected = self._expected
        assert expected is not None, "the caller made it"
        if against_definition and self._sizes[1] <= _MOST_DEFINED:
            expected = delta_attention_reference(*self._given(), None, "recurrent")
        errors = [relative_error(*pair) for pair in zip(found, expected, strict=True)]
        worst = max(error / most for error, most in zip(errors, allowed, strict=True))
        return {"error": worst, "allowed": 1.0, "output_error": errors[0], "state_error": errors[1]}


def _allowed(name: str) -> tuple[float, float]:
    if name == "fla":
        return FLA_TOLERANCE
    return TOLERANCE if "tf32," in f"{name}," else _EXACT


def recurrent(inputs: DeltaInputs, gate: DeltaGate, state: Tensor) -> tuple[Tensor, Tensor]:
    """The kernel of decoding, as an engine runs it."""
    return launch_delta(inputs, gate, state, None, None, None, LAST_STATE)


def delta_chunks(inputs: DeltaInputs, gate: DeltaGate, state: Tensor) -> tuple[Tensor, Tensor]:
    """As an engine runs it: one product of tensor cores each, for rows in bf16."""
    return delta_chunks_triton(inputs, gate, state, None)


def _chunks(
    tile: DeltaTile, precision: str, by_products: bool, inputs: DeltaInputs, gate: DeltaGate, state: Tensor
) -> tuple[Tensor, Tensor]:
    return delta_chunks_triton(inputs, gate, state, None, tile=tile, precision=precision, by_products=by_products)
