"""The adapter to fla-core: every argument as its documentation has it, and on a GPU its kernels against the recurrence.

Without the package, a function written from the same documentation takes its place.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.unit.ops.delta_twin import random_gate, random_inputs, slow_delta
from torch import Tensor

from paceline.ops import delta_fla
from paceline.ops.delta_attention import delta_attention_reference
from paceline.ops.delta_fla import TOLERANCE, delta_chunks_fla, find_chunk_kda, has_fla, may_run_fla
from paceline.ops.delta_rows import DeltaGate, DeltaInputs


def documented_chunk_kda(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float | None,
    safe_gate: bool,
    initial_state: Tensor,
    **switches: bool,
) -> tuple[Tensor, Tensor]:
    """Raw logits in, [B, T, H, K] and [B, T, H]; A_log [H], dt_bias [H * K]; float32 states [N, H, K, V]."""
    names = ("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "output_final_state")
    assert switches == dict.fromkeys(names, True)
    assert safe_gate == (lower_bound is not None and -5 <= lower_bound < 0)
    batch, _, heads, keys = q.shape
    assert A_log.shape == (heads,) and dt_bias.shape == (heads * keys,) and beta.shape == q.shape[:3]
    assert initial_state.dtype == torch.float32 and initial_state.shape == (batch, heads, keys, v.shape[3])
    inputs, gate = DeltaInputs(q, k, v, g, beta), DeltaGate(A_log, dt_bias.view(heads, keys), lower_bound)
    runs = [slow_delta(inputs, gate, initial_state[request], request=request) for request in range(batch)]
    return torch.stack([run.outputs for run in runs]).to(v), torch.stack([run.states[-1] for run in runs]).float()


def difference(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("lower_bound", [-5.0, -9.0, None])
def test_arguments_mean_what_its_documentation_says(lower_bound: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta_fla, "find_chunk_kda", lambda: documented_chunk_kda)
    inputs, gate = random_inputs(2, 5, 2, 4, 6), random_gate(2, 4, lower_bound=lower_bound)
    state = torch.randn(2, 2, 4, 6)
    expected = delta_attention_reference(inputs, gate, state, None, "recurrent")
    for found, wanted in zip(delta_chunks_fla(inputs, gate, state), expected, strict=True):
        assert found.dtype == wanted.dtype
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_states_in_bf16_are_widened_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta_fla, "find_chunk_kda", lambda: documented_chunk_kda)
    inputs, gate = random_inputs(1, 2, 1, 4, 4), random_gate(1, 4, lower_bound=-5.0)
    assert delta_chunks_fla(inputs, gate, torch.randn(1, 1, 4, 4).bfloat16())[1].dtype == torch.float32


def test_it_is_offered_only_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta_fla, "has_fla", lambda: True)
    narrow = random_inputs(1, 3, 1, 16, 16, torch.bfloat16)
    assert not may_run_fla(narrow, None), "on a CPU there is nothing to run it"

    class OnGpu:
        """A tensor's shape and dtype, elsewhere."""

        def __init__(self, like: Tensor) -> None:
            self.shape, self.dtype, self.device = like.shape, like.dtype, torch.device("cuda")

    def there(inputs: DeltaInputs) -> Any:
        return DeltaInputs(*(OnGpu(values) for values in inputs))  # type: ignore[arg-type]

    assert may_run_fla(there(narrow), None)
    assert not may_run_fla(there(narrow), torch.tensor([3]))
    assert not may_run_fla(there(random_inputs(1, 3, 1, 16, 16)), None)
    assert not may_run_fla(there(random_inputs(1, 3, 1, 8, 16, torch.bfloat16)), None)
    monkeypatch.setattr(delta_fla, "has_fla", lambda: False)
    assert not may_run_fla(there(narrow), None)


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Callable[[str], Any]], None]]:
    """Puts a package in fla-core's place, given what importing it does."""

    def forget() -> None:
        find_chunk_kda.cache_clear()
        delta_fla.has_fla.cache_clear()

    def put(import_module: Callable[[str], Any]) -> None:
        monkeypatch.setattr(delta_fla.importlib.util, "find_spec", lambda _name: object())
        monkeypatch.setattr(delta_fla.importlib, "import_module", import_module)

    forget()
    yield put
    forget()


def test_a_package_that_is_missing_or_fails_on_import_is_none(
    install: Callable[[Callable[[str], Any]], None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(delta_fla.importlib.util, "find_spec", lambda _name: None)
    assert find_chunk_kda() is None and caplog.text == ""
    find_chunk_kda.cache_clear()
    delta_fla.has_fla.cache_clear()

    def broken(name: str) -> Any:
        raise RuntimeError(f"{name} wants another Triton")

    install(broken)
    with caplog.at_level("WARNING", logger="paceline.ops.delta_fla"):
        assert find_chunk_kda() is None
    assert "wants another Triton" in caplog.text


def test_a_package_that_warns_on_import_is_used(
    install: Callable[[Callable[[str], Any]], None], caplog: pytest.LogCaptureFixture
) -> None:
    """Warnings are errors in these tests, and may be so in a user's process."""

    def loud(_name: str) -> Any:
        warnings.warn("nothing to worry about", stacklevel=1)
        return SimpleNamespace(chunk_kda=documented_chunk_kda)

    install(loud)
    with caplog.at_level("INFO", logger="paceline.ops.delta_fla"):
        assert find_chunk_kda() is documented_chunk_kda
    assert "nothing to worry about" in caplog.text


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")  # what the package warns of is not ours
@pytest.mark.parametrize("lower_bound", [-5.0, -8.0, None])
@torch.inference_mode()
def test_its_kernels_agree_with_the_recurrence(lower_bound: float | None) -> None:
    """Around the edges of its chunks of 64, in one pass and in two; states read or written transposed would be seen."""
    if not has_fla():
        pytest.skip("fla-core is not installed")
    assert find_chunk_kda() is not None, "it is installed and cannot be used"
    device, generator = torch.device("cuda"), torch.Generator().manual_seed(3)
    gate = random_gate(2, 64, lower_bound=lower_bound)
    gate = DeltaGate(gate.a_log_N.to(device), gate.dt_bias_NK.to(device), lower_bound)
    for num_rows in (1, 63, 64, 65, 200):
        made = random_inputs(2, num_rows, 2, 64, 64, torch.bfloat16, generator=generator)
        inputs = DeltaInputs(*(values.to(device) for values in made))
        state = torch.randn(2, 2, 64, 64, generator=generator).to(device)
        before = state.clone()
        expected = delta_attention_reference(inputs, gate, state, None, "recurrent")
        found = delta_chunks_fla(inputs, gate, state)
        assert torch.equal(state, before)
        for one, other, most in zip(found, expected, TOLERANCE, strict=True):
            assert difference(one, other) < most, num_rows
        if num_rows == 1:
            assert difference(delta_chunks_fla(inputs, gate, state.mT)[1], expected[1]) > 2 * TOLERANCE[1]
            assert difference(found[1].mT, expected[1]) > 2 * TOLERANCE[1]
            moved = gate._replace(dt_bias_NK=gate.dt_bias_NK + 1.0)
            assert difference(delta_chunks_fla(inputs, moved, state)[1], expected[1]) > 2 * TOLERANCE[1]
        if num_rows == 200:
            first, between = delta_chunks_fla(DeltaInputs(*(part[:, :90] for part in inputs)), gate, state)
            second, last = delta_chunks_fla(DeltaInputs(*(part[:, 90:] for part in inputs)), gate, between)
            assert difference(torch.cat((first, second), 1), expected[0]) < TOLERANCE[0]
            assert difference(last, expected[1]) < TOLERANCE[1]
