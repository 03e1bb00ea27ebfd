"""The cases of `sanitize`: small inputs with odd sizes, unused rows full of NaN, and slots of nobody."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from benchmarks.kernel_cases import TINY
from benchmarks.kernel_cases import make_cases as benchmark_cases
from benchmarks.sanitize_comparing import WIDE, Case, Found, compared, dtypes, random
from torch import Tensor

from paceline.ops import attention_residual as residual
from paceline.ops import causal_convolution as convolution
from paceline.ops import delta_attention as delta
from paceline.ops import grouped_convolution as grouped
from paceline.ops import mixture_of_experts as experts
from paceline.ops.convolved_residual import convolved_residual_reference, convolved_residual_triton
from paceline.ops.delta_chunks import can_chunk, delta_chunks_triton
from paceline.ops.delta_commit import CommitInto, DeltaRecords, commit_delta_reference, commit_delta_triton
from paceline.ops.gated_activation import Activation, gated_activation_reference, gated_activation_triton
from paceline.ops.gated_rms_norm import (
    gate_by_sigmoid_reference,
    gate_by_sigmoid_triton,
    gated_rms_norm_reference,
    gated_rms_norm_triton,
)
from paceline.ops.paged_latent_attention import paged_latent_attention_reference, paged_latent_attention_triton

SITU = Activation("situ", 4.0, 25.0)


def make_cases(device: torch.device) -> Iterator[Case]:
    """All cases, each of which runs when it is called."""
    torch.manual_seed(0)
    for case in benchmark_cases([TINY], [2], device):
        yield case.operation, partial(_of_benchmark, case.errors)
    from benchmarks.sanitize_layers import layer_cases
    from benchmarks.sanitize_steps import step_cases

    for make in (
        layer_cases,
        step_cases,
        _gradients,
        _activations,
        _norms,
        _mixtures,
        _convolutions,
        _delta,
        _commits,
        _experts,
        _latent,
    ):
        yield from make(device)


def _of_benchmark(errors: Callable[[], list[tuple[float, float]]]) -> Found:
    return [(f"variant {index}", *pair) for index, pair in enumerate(errors())]


def _gradients(device: torch.device) -> Iterator[Case]:
    rows, width, taps, groups = 11, 24, 3, 4
    offset = torch.tensor([0, 1, 2, 3, 0, 0, 1, 2, 3, 4, 5], device=device)

    def reference(x: Tensor, base: Tensor, change: Tensor, offset: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
        leaves = [part.detach().requires_grad_() for part in (x, base, change)]
        grouped.grouped_convolution_reference(*leaves, offset).backward(dy)
        gradients = [leaf.grad for leaf in leaves if leaf.grad is not None]
        for leaf in leaves:
            leaf.grad = None
        return tuple(gradients)

    sizes = ((rows, width), (taps, width), (rows, taps, groups), (rows, width))
    x, base, change, dy = (random(device, *size) for size in sizes)
    arguments = (x, base, change, offset, dy)
    yield (
        "grouped_convolution, gradients",
        partial(compared, reference, grouped.grouped_convolution_gradients_triton, arguments, WIDE),
    )
    for dtype, allowed in dtypes(device):
        for name, gain in (("norm", random(device, width)), ("sum", None)):
            z, own_base, own_change, stream = (part.to(dtype) for part in (x, base, change, dy))
            both = (convolved_residual_reference, convolved_residual_triton)
            arguments = (z, own_base, own_change, offset, stream, gain, 1e-5)
            yield f"convolved_residual, {name}, {dtype}", partial(compared, *both, arguments, 2 * allowed)


def _activations(device: torch.device) -> Iterator[Case]:
    for dtype, allowed in dtypes(device):
        joint = random(device, 3, 2, 26, dtype=dtype)
        gate, up = joint.split(13, dim=-1)
        for activation in (Activation("silu"), Activation("situ", 4.0), SITU):
            both = (gated_activation_reference, gated_activation_triton)
            yield (
                f"gated_activation, {activation.kind}, {dtype}",
                partial(compared, *both, (gate, up, activation), allowed),
            )


def _norms(device: torch.device) -> Iterator[Case]:
    for dtype, allowed in dtypes(device):
        x, weight = random(device, 5, 3, 10), random(device, 10)
        gate = random(device, 5, 3, 21, dtype=dtype)[..., :10]
        both = (gated_rms_norm_reference, gated_rms_norm_triton)
        yield f"gated_rms_norm, {dtype}", partial(compared, *both, (x, gate, weight, 1e-5), allowed)
        rows = (random(device, 3, 37, dtype=dtype), random(device, 3, 37, dtype=dtype))
        yield (
            f"gate_by_sigmoid, {dtype}",
            partial(compared, gate_by_sigmoid_reference, gate_by_sigmoid_triton, rows, allowed),
        )


def _mixtures(device: torch.device) -> Iterator[Case]:
    for dtype, allowed in dtypes(device):
        prefix, change = random(device, 4, 20, dtype=dtype), random(device, 4, 20, dtype=dtype)
        bank = random(device, 4, 3, 20, dtype=dtype)
        bank[:, 2] = torch.nan  # was never written
        norm = residual.OutputNorm(random(device, 20), 1e-5)
        score = random(device, 20)
        both = (residual.attention_residual_reference, residual.attention_residual_triton)
        for name, more in (
            ("plain", (None, None, None)),
            ("delta and norm", (change, None, norm)),
            ("delta and write", (change, 2, None)),
        ):
            yield (
                f"attention_residual, {name}, {dtype}",
                partial(compared, *both, (prefix, bank, 2, score, 1e-5, *more), allowed),
            )


def _convolutions(device: torch.device) -> Iterator[Case]:
    for dtype, allowed in dtypes(device):
        x = random(device, 3, 5, 40, dtype=dtype)[..., :21]
        weight, histories = random(device, 21, 4), random(device, 6, 3, 21, dtype=dtype)
        histories[5] = torch.nan
        both = (convolution.causal_convolution_reference, convolution.causal_convolution_triton)
        slots = torch.tensor([4, -1, 0], device=device)
        yield f"causal_convolution, slots, {dtype}", partial(compared, *both, (x, weight, histories, slots), allowed)
        yield f"causal_convolution, {dtype}", partial(compared, *both, (x, weight, histories[:3], None), allowed)


def _delta_inputs(device: torch.device, dtype: torch.dtype, batch: int, rows: int) -> delta.DeltaInputs:
    heads, keys, values = 2, 5, 7
    joint = random(device, batch, rows, heads * (2 * keys + values), dtype=dtype)
    q, k, v = joint.split((heads * keys, heads * keys, heads * values), dim=-1)
    f = random(device, batch, rows, heads, keys, dtype=dtype)
    b = random(device, batch, rows, heads, dtype=dtype)
    split = (heads, -1)
    return delta.DeltaInputs(q.unflatten(-1, split), k.unflatten(-1, split), v.unflatten(-1, split), f, b)


def _delta(device: torch.device) -> Iterator[Case]:
    slots = torch.tensor([3, -1, 0], device=device)
    for dtype, allowed in dtypes(device):
        for lower_bound in (None,) if dtype == torch.float32 else (-5.0,):
            gate = delta.DeltaGate(random(device, 2) * 0.5, random(device, 2, 5) * 0.5, lower_bound)
            # States in the rows' dtype: float32, or the engine's narrow ones.
            inputs, states = _delta_inputs(device, dtype, 3, 4), random(device, 5, 2, 5, 7, dtype=dtype)
            states[1] = torch.nan
            records = DeltaRecords.allocate(1, 3, 4, 2, 5, 7, num_channels=2, dtype=dtype, device=device).layer(0)
            name = f"{'bounded' if lower_bound else 'unbounded'}, {dtype}"
            verify = (delta.verify_delta_reference, delta.verify_delta_triton)
            yield (
                f"delta, verify, {name}",
                partial(compared, *verify, (inputs, gate, states, slots, records, "recurrent"), allowed),
            )
            prompt = (delta.delta_attention_reference, delta.delta_attention_triton)
            lengths = torch.tensor([4, 0, 2], device=device)
            own = random(device, 3, 2, 5, 7)
            yield (
                f"delta, prompt, {name}",
                partial(compared, *prompt, (inputs, gate, own, lengths, "recurrent"), allowed),
            )
            if can_chunk(gate):
                chunked = (partial(delta.delta_attention_reference, form="chunked"), delta_chunks_triton)
                yield (
                    f"delta, chunks, {name}",
                    partial(compared, *chunked, (inputs, gate, own, lengths), max(allowed, 1e-4)),
                )
            every = (delta.delta_snapshots_reference, delta.delta_snapshots_triton)
            yield f"delta, snapshots, {name}", partial(compared, *every, (inputs, gate, states, slots), allowed)


def _commits(device: torch.device) -> Iterator[Case]:
    layers, heads, keys, values, channels = 2, 2, 5, 40, 21
    counts, slots = torch.tensor([3, 0, 2, 1], device=device), torch.tensor([2, 0, -1, 4], device=device)
    for dtype, allowed in dtypes(device):
        for kept in (3, 0) if dtype == torch.float32 else (1,):
            records = DeltaRecords.allocate(
                layers, 5, 4, heads, keys, values, num_channels=channels, dtype=dtype, device=device
            )
            for field in records:
                field.normal_()
            part = records.rows(4, 3)
            for request, count in enumerate(counts.tolist()):
                for field in part:
                    field[:, request, count:] = torch.nan  # refused drafts
            states = random(device, layers, 6, heads, keys, values, dtype=dtype)
            histories = random(device, layers, 6, kept, channels, dtype=dtype)
            both = (commit_delta_reference, commit_delta_triton)
            arguments = (states, histories, slots, part, counts)
            yield f"commit_delta, history {kept}, {dtype}", partial(compared, *both, arguments, allowed)
            places = torch.tensor([1, 0, 3, -1], device=device)
            store = (torch.full_like(states, torch.nan), torch.full_like(histories, torch.nan), places)
            into = (*arguments, CommitInto(*store))
            yield f"commit_delta, into a store, history {kept}, {dtype}", partial(compared, *both, into, allowed)


def _experts(device: torch.device) -> Iterator[Case]:
    for dtype, allowed in dtypes(device, multiplies=True):
        for rows, num_experts, chosen in ((7, 4, 2), (70, 2, 1)):  # both forms
            width, inside = 24, 70
            gate_up = (random(device, num_experts, 2 * inside, width) / width**0.5).to(dtype)
            down = (random(device, num_experts, width, inside) / inside**0.5).to(dtype)
            ids = torch.rand(rows, num_experts, device=device).argsort(dim=1)[:, :chosen]
            ids[0, 0], ids[-1, -1] = -1, num_experts  # held by other ranks
            x, weights = random(device, rows, width, dtype=dtype), torch.rand(rows, chosen, device=device)
            arguments = (x, experts.Routing(ids, weights), experts.ExpertWeights(gate_up, down), SITU, "plain")
            both = (experts._mix_grouped, experts._mix_by_kernels)
            yield f"mix_experts, {rows} rows, {dtype}", partial(compared, *both, arguments, allowed)
    for scores in ("sigmoid", "softmax"):
        rule = experts.RoutingRule(6, scores=scores)
        both = (experts.route_reference, experts._route_kernel)
        arguments = (random(device, 5, 37), random(device, 37) * 0.2, rule)
        yield f"route, {scores}", partial(compared, *both, arguments, WIDE)


def _latent(device: torch.device) -> Iterator[Case]:
    block_size, width, value_size = 16, 20, 12
    starts = torch.tensor([70, 0, 33], device=device)
    order = torch.randperm(15, device=device)
    slots = torch.tensor([2, 0, 3], device=device)
    for dtype, allowed in dtypes(device, multiplies=True):
        planes = torch.full((16, block_size, 1, width), torch.nan, dtype=dtype, device=device)
        table = torch.zeros(4, 5, dtype=torch.int32, device=device)
        for request, start in enumerate(starts.tolist()):
            for index in range(-(-(start + 3) // block_size)):
                block = 1 + int(order[5 * request + index])
                table[slots[request], index] = block
                planes[block] = random(device, block_size, 1, width, dtype=dtype)
        q = random(device, 3, 3, 2, width, dtype=dtype)
        for parts in (1, 4):

            def launch(*arguments: Any, num_parts: int = parts) -> Tensor:
                return paged_latent_attention_triton(*arguments, num_parts=num_parts)

            arguments = (q, planes, table, slots, starts, value_size, 0.3)
            yield (
                f"paged_latent_attention, {parts} parts, {dtype}",
                partial(compared, paged_latent_attention_reference, launch, arguments, allowed),
            )
