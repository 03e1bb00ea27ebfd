"""The choice of a kernel for prompts: by rows, by what can be had, or as asked; the report says which."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.unit.ops.delta_twin import random_gate, random_inputs

from paceline.ops import delta_prompts, dispatch
from paceline.ops.delta_prompts import described, prompt_kernels, run_prompt_kernel


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was run, all kernels replaced; with fla-core, and thresholds of 16 and 64 rows."""
    names: list[str] = []
    for function, name in (
        ("launch_delta", "recurrent"),
        ("delta_chunks_triton", "chunks"),
        ("delta_chunks_fla", "fla"),
    ):
        monkeypatch.setattr(delta_prompts, function, lambda *_args, name=name: names.append(name))
    monkeypatch.setattr(delta_prompts, "find_chunk_kda", lambda: print)
    monkeypatch.setattr(delta_prompts, "may_run_fla", lambda _inputs, lengths_B: lengths_B is None)
    monkeypatch.setattr(delta_prompts, "CHUNKS_FROM", 16)
    monkeypatch.setattr(delta_prompts, "FLA_FROM", 64)
    monkeypatch.setattr(dispatch, "_chosen", {})
    return names


def given(num_rows: int, lower_bound: float | None = -5.0) -> Any:
    return random_inputs(1, num_rows, 1, 4, 4), random_gate(1, 4, lower_bound=lower_bound), torch.zeros(1, 1, 4, 4)


def test_rows_decide(ran: list[str]) -> None:
    for num_rows in (1, 15, 16, 63, 64, 100):
        run_prompt_kernel(*given(num_rows), None, "auto")
    assert ran == ["recurrent", "recurrent", "chunks", "chunks", "fla", "fla"]
    rule = "fla from 64 rows, chunks from 16 rows, recurrent"
    assert dispatch.implementations() == {"delta_attention of prompts on cpu": rule}


def test_what_cannot_be_had_is_not_chosen(ran: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    run_prompt_kernel(*given(100), torch.tensor([100]), "auto")
    run_prompt_kernel(*given(100, None), None, "auto")
    run_prompt_kernel(*given(100, None), torch.tensor([100]), "auto")
    run_prompt_kernel(*given(100, -20.0), torch.tensor([3]), "auto")
    assert ran == ["chunks", "fla", "recurrent", "recurrent"]
    monkeypatch.setattr(delta_prompts, "find_chunk_kda", lambda: None)
    run_prompt_kernel(*given(100), None, "auto")
    assert ran[4:] == ["chunks"], "installed, and it cannot be used"
    monkeypatch.setattr(delta_prompts, "may_run_fla", lambda *_arguments: False)
    inputs, gate, _ = given(100)
    assert described(prompt_kernels(inputs, gate, None)) == "chunks from 16 rows, recurrent"


def test_short_prompts_do_not_wait_for_an_import(ran: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta_prompts, "find_chunk_kda", lambda: pytest.fail("it takes seconds"))
    run_prompt_kernel(*given(63), None, "auto")
    assert ran == ["chunks"]


def test_what_is_asked_for_is_run(ran: list[str]) -> None:
    for kernel in ("fla", "chunks", "recurrent"):
        run_prompt_kernel(*given(32), None, kernel)
        assert dispatch.implementations() == {"delta_attention of prompts on cpu": kernel}
    assert ran == ["fla", "chunks", "recurrent"]
