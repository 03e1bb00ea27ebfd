"""Recurrent states that are kept in bf16, on a GPU: recorded steps against eager ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests import tiny
from tests.hybrid_runs import GREEDY, VOCAB_SIZE, drafter_for, prompts_of
from tests.tiny_kimi import k3_tiny_config, kimi_target

from paceline.engine.engine import Engine, EngineSettings
from paceline.engine.request import RequestResult
from paceline.models.loading import LoadedDrafter, LoadedTarget

pytestmark = pytest.mark.gpu
LONG = replace(GREEDY, max_tokens=40)


def on_gpu(dtype: torch.dtype) -> tuple[LoadedTarget, LoadedDrafter]:
    model = kimi_target(k3_tiny_config(vocab_size=VOCAB_SIZE), dtype=dtype).to("cuda")
    target = tiny.wrap_target(model, "fused" if dtype == torch.bfloat16 else "plain")  # type: ignore[arg-type]
    drafter = drafter_for(target, "dflash").model.to("cuda", dtype)
    return target, tiny.wrap_drafter(drafter, target.linear_mode)


def answers(target: LoadedTarget, drafter: LoadedDrafter | None, **settings: Any) -> tuple[list[RequestResult], int]:
    """Texts, twice over, so that cached prefixes count; and bytes of a state."""
    engine = Engine(target, drafter, EngineSettings(max_num_seqs=3, max_model_len=160, block_size=16, **settings))
    prompts = prompts_of([70, 9, 33])
    results = engine.generate(prompts, LONG) + engine.generate(prompts, LONG)
    size = engine._loop.parts.recurrent.rows.states_LSNKK.element_size()  # type: ignore[union-attr]
    engine.close()
    return results, size


@pytest.mark.parametrize("is_drafted", [False, True], ids=["plain", "dflash"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_recorded_steps_with_states_in_bf16_write_what_eager_ones_do(dtype: torch.dtype, is_drafted: bool) -> None:
    """How far they lie from states in float32 is judged under a given text, in `test_recurrent_forced.py`."""
    target, drafter = on_gpu(dtype)
    drafts = drafter if is_drafted else None
    _, wide_size = answers(target, drafts)
    narrow, narrow_size = answers(target, drafts, recurrent_state_dtype="bfloat16", cuda_graphs=True)
    eager, _ = answers(target, drafts, recurrent_state_dtype="bfloat16", cuda_graphs=False)
    assert (wide_size, narrow_size) == (4, 2)
    assert [result.token_ids for result in narrow] == [result.token_ids for result in eager]
