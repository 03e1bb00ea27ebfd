"""The gated delta rule of prompts by `fla-core`'s chunked kernels, where that package is installed: an adapter.

Its `chunk_kda` takes what `DeltaInputs` and `DeltaGate` hold: logits of the decay and of beta, heads before channels,
and a float32 state [B, N, K, V]. Between its kernels it keeps normed queries and keys, corrections and the states of
chunks in the rows' dtype, so it agrees with the recurrence to half a per cent in bf16 (`TOLERANCE`). It is never taken
for float32. When it first meets a shape it tries out about a hundred configurations; how long that takes was not timed.
A call takes the host 1.1 to 2.2 ms, whatever its length.

B requests, T rows, N heads, K key and V value channels.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import warnings
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from paceline.ops.delta_rows import DeltaGate, DeltaInputs

# Norm of the difference from the recurrence over its norm, in bf16: outputs, states. On an H200 4.4e-3 and 2.9e-3, at
# any length (docs/results/gpu-recurrent.json).
TOLERANCE: Final = (1e-2, 1e-2)
_MOST_KEYS, _FEWEST_KEYS = 256, 16  # per head
_LEAST_SAFE_BOUND = -5.0  # of gates whose chunks are products of factors that float32 holds, by its account
_log = logging.getLogger(__name__)


@functools.cache
def has_fla() -> bool:
    """Whether the package is installed, usable or not; importing it takes seconds."""
    return importlib.util.find_spec("fla") is not None


@functools.cache
def find_chunk_kda() -> Callable[..., Any] | None:
    """The function, or None where the package is missing or does not go with what is installed beside it."""
    if not has_fla():
        return None
    try:
        with warnings.catch_warnings(record=True) as told:  # no failures, not even where warnings are made errors
            warnings.simplefilter("always")
            function: Callable[..., Any] = importlib.import_module("fla.ops.kda").chunk_kda
        for warning in told:
            _log.info("fla-core says on import: %s", warning.message)
    except Exception as error:  # it compiles and asks devices on import, and any of it may fail
        _log.warning("fla-core is installed and cannot be used: %s: %s", type(error).__name__, error)
        return None
    return function


def may_run_fla(inputs: DeltaInputs, lengths_B: Tensor | None) -> bool:
    """Whether these rows can be given to it if it can be used: all of the same length, in 16 bits, on a GPU."""
    v_BTNV = inputs.v_BTNV
    fits = _FEWEST_KEYS <= inputs.q_BTNK.shape[3] <= _MOST_KEYS and v_BTNV.dtype in (torch.bfloat16, torch.float16)
    return fits and lengths_B is None and v_BTNV.device.type == "cuda" and has_fla()


def delta_chunks_fla(inputs: DeltaInputs, gate: DeltaGate, state_BNKV: Tensor) -> tuple[Tensor, Tensor]:
    """Run whole prompts.

    Args:
        inputs: projections of the rows, of the same number for all requests.
        gate: bounded or not.
        state_BNKV: before the first row; it is not changed.
    Returns:
        The outputs in v's dtype, and the float32 states behind each request's last row.
    """
    chunk_kda = find_chunk_kda()
    assert chunk_kda is not None, "the caller asks"
    bound = gate.lower_bound
    o_BTNV, new_state_BNKV = chunk_kda(
        q=inputs.q_BTNK,
        k=inputs.k_BTNK,
        v=inputs.v_BTNV,
        g=inputs.f_BTNK,
        beta=inputs.b_BTN,
        A_log=gate.a_log_N,
        dt_bias=gate.dt_bias_NK.flatten(),
        lower_bound=bound,
        safe_gate=bound is not None and bound >= _LEAST_SAFE_BOUND,
        initial_state=state_BNKV.float().contiguous(),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
    )
    return o_BTNV, new_state_BNKV
