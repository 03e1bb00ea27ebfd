"""The gated delta rule one number at a time in float64, and random inputs for it."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.ops.delta_rows import DeltaGate, DeltaInputs


class SlowRun(NamedTuple):
    """Outputs [T][N][V], gates [T][N][K], and the state [N][K][V] behind every row."""

    outputs: Tensor
    gates: Tensor
    states: Tensor


def slow_delta(inputs: DeltaInputs, gate: DeltaGate, state_NKV: Tensor, *, request: int = 0) -> SlowRun:
    """One request, straight from the formulas."""
    q_TNK, k_TNK, v_TNV, f_TNK, b_TN = (values[request].double() for values in inputs)
    num_rows, num_heads, key_size = q_TNK.shape
    value_size = v_TNV.shape[2]
    state = state_NKV.double().clone()
    outputs = torch.zeros(num_rows, num_heads, value_size, dtype=torch.float64)
    gates, states = torch.zeros_like(q_TNK), []
    for t in range(num_rows):
        for n in range(num_heads):
            rate = math.exp(float(gate.a_log_N[n]))
            q_length = math.sqrt(sum(float(x) ** 2 for x in q_TNK[t, n]) + 1e-6) * math.sqrt(key_size)
            k_length = math.sqrt(sum(float(x) ** 2 for x in k_TNK[t, n]) + 1e-6)
            beta = 1 / (1 + math.exp(-float(b_TN[t, n])))
            for i in range(key_size):
                logit = float(f_TNK[t, n, i]) + float(gate.dt_bias_NK[n, i])
                if gate.lower_bound is None:
                    gates[t, n, i] = -rate * (math.log1p(math.exp(logit)) if logit <= 20 else logit)
                else:
                    gates[t, n, i] = gate.lower_bound / (1 + math.exp(-rate * logit))
                state[n, i] *= math.exp(float(gates[t, n, i]))
            for j in range(value_size):
                kept = sum(float(state[n, i, j]) * float(k_TNK[t, n, i]) / k_length for i in range(key_size))
                correction = beta * (float(v_TNV[t, n, j]) - kept)
                for i in range(key_size):
                    state[n, i, j] += float(k_TNK[t, n, i]) / k_length * correction
                    outputs[t, n, j] += float(state[n, i, j]) * float(q_TNK[t, n, i]) / q_length
        states.append(state.clone())
    return SlowRun(outputs, gates, torch.stack(states))


def random_gate(num_heads: int, key_size: int, *, lower_bound: float | None) -> DeltaGate:
    return DeltaGate(torch.rand(num_heads), torch.randn(num_heads, key_size) - 1, lower_bound)


def random_inputs(
    num_requests: int,
    num_rows: int,
    num_heads: int,
    key_size: int,
    value_size: int,
    dtype: torch.dtype = torch.float32,
    *,
    generator: torch.Generator | None = None,
) -> DeltaInputs:
    """q, k and v as parts of one tensor of channels, as the convolution leaves them."""

    def draw(*shape: int) -> Tensor:
        return torch.randn(num_requests, num_rows, *shape, generator=generator).to(dtype)

    channels = draw(num_heads * (2 * key_size + value_size))
    q, k, v = channels.split((num_heads * key_size, num_heads * key_size, num_heads * value_size), dim=-1)
    heads = (num_heads, -1)
    return DeltaInputs(
        q.unflatten(-1, heads),
        k.unflatten(-1, heads),
        v.unflatten(-1, heads),
        draw(num_heads, key_size),
        draw(num_heads),
    )


def rows_of(inputs: DeltaInputs, rows: slice) -> DeltaInputs:
    """Some rows of every request."""
    return DeltaInputs(*(values[:, rows] for values in inputs))


def requests_of(inputs: DeltaInputs, requests: slice | list[int]) -> DeltaInputs:
    """Some requests."""
    return DeltaInputs(*(values[requests] for values in inputs))
