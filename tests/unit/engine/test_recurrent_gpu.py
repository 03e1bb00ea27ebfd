"""Recurrent states on a GPU: kept in bf16, in recorded steps and eager ones; and prompts by every kernel."""

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
from paceline.ops.delta_fla import find_chunk_kda

pytestmark = pytest.mark.gpu
SCORED = replace(GREEDY, max_tokens=40, logprobs=0)


def on_gpu(dtype: torch.dtype) -> tuple[LoadedTarget, LoadedDrafter]:
    model = kimi_target(k3_tiny_config(vocab_size=VOCAB_SIZE), dtype=dtype).to("cuda")
    target = tiny.wrap_target(model, "fused" if dtype == torch.bfloat16 else "plain")  # type: ignore[arg-type]
    drafter = drafter_for(target, "dflash").model.to("cuda", dtype)
    return target, tiny.wrap_drafter(drafter, target.linear_mode)


def answers(target: LoadedTarget, drafter: LoadedDrafter | None, **settings: Any) -> tuple[list[RequestResult], int]:
    """Texts with their log-probabilities, twice over, so that cached prefixes count; and bytes of a state."""
    engine = Engine(target, drafter, EngineSettings(max_num_seqs=3, max_model_len=160, block_size=16, **settings))
    prompts = prompts_of([70, 9, 33])
    results = engine.generate(prompts, SCORED) + engine.generate(prompts, SCORED)
    size = engine._loop.parts.recurrent.rows.states_LSNKK.element_size()  # type: ignore[union-attr]
    engine.close()
    return results, size


def farthest(results: list[RequestResult], others: list[RequestResult], *, at_least: int) -> float:
    """The largest distance of log-probabilities while texts are the same, which they are for so many tokens."""
    largest = 0.0
    for one, other in zip(results, others, strict=True):
        pairs = list(zip(one.token_ids, other.token_ids, strict=True))
        num_same = next((index for index, (left, right) in enumerate(pairs) if left != right), len(pairs))
        assert num_same >= at_least
        for left, right in list(zip(one.logprobs or (), other.logprobs or (), strict=True))[:num_same]:
            largest = max(largest, abs(left.logprob - right.logprob))
    return largest


@pytest.mark.parametrize("is_drafted", [False, True], ids=["plain", "dflash"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_in_bf16_follow_those_in_float32_and_recorded_steps_eager_ones(
    dtype: torch.dtype, is_drafted: bool
) -> None:
    target, drafter = on_gpu(dtype)
    drafts = drafter if is_drafted else None
    wide, wide_size = answers(target, drafts)
    narrow, narrow_size = answers(target, drafts, recurrent_state_dtype="bfloat16", cuda_graphs=True)
    eager, _ = answers(target, drafts, recurrent_state_dtype="bfloat16", cuda_graphs=False)
    assert (wide_size, narrow_size) == (4, 2)
    assert [result.token_ids for result in narrow] == [result.token_ids for result in eager]
    if dtype == torch.float32:
        assert 0 < farthest(wide, narrow, at_least=5) < 0.03
    else:  # another order of summation alone moves log-probabilities by a tenth, and near ties with them
        assert 0 < farthest(wide, narrow, at_least=1) < 0.3


@pytest.mark.parametrize("kernel", ["chunks", "fla", "auto"])
def test_prompts_by_every_kernel_follow_the_recurrence(kernel: str) -> None:
    if kernel == "fla" and find_chunk_kda() is None:
        pytest.skip("fla-core is not installed")
    target, _ = on_gpu(torch.bfloat16)
    expected, _ = answers(target, None, prompt_kernel="recurrent")
    found, _ = answers(target, None, prompt_kernel=kernel)
    assert farthest(expected, found, at_least=3) < 0.3
