"""Recurrent states under one given text: states in bf16 move logits as far as both roundings, the model's and the
states', explain together, and prompts by any kernel no farther than the model's own rounding does.

What an engine writes is no judge: in bf16 a tie falls anywhere, and kernels sum in another order for narrow states.
Here every row's token is given: a prompt in chunks, then blocks of which one row to all are kept.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tests import tiny
from tests.hybrid_runs import VOCAB_SIZE
from tests.tiny_kimi import k3_tiny_config, kimi_target
from torch import Tensor

import paceline.engine.recurrent_state as recurrent_state
from paceline.engine.attends import AttentionChoice
from paceline.engine.block_tables import BlockTables
from paceline.engine.proposal import Rows
from paceline.engine.step import run_rows
from paceline.engine.target_cache import begin_text, commit_rows, make_target_cache
from paceline.ops.delta_fla import find_chunk_kda, has_fla
from paceline.ops.delta_prompts import CHUNKS_FROM, PromptKernel

BLOCK, NUM_ROWS, NUM_TOKENS = 16, 4, 90
CHUNKS, KEPT = (40, 7), (1, 4, 2, 3)
_MARGIN = 1.25  # of one text's roundings over what is expected of them
TEXT = tiny.tiny_prompts([NUM_TOKENS], seed=4, vocab_size=VOCAB_SIZE)[0]


@torch.inference_mode()
def logits_of(
    device: torch.device,
    dtype: torch.dtype,
    state_dtype: torch.dtype,
    *,
    chunks: Sequence[int] = CHUNKS,
    prompt_kernel: PromptKernel = "auto",
) -> Tensor:
    """Float32 [T, V], of every kept row."""
    model = kimi_target(k3_tiny_config(vocab_size=VOCAB_SIZE), dtype=dtype).to(device)
    target = tiny.wrap_target(model, "plain")  # type: ignore[arg-type]
    tables = BlockTables(2, num_blocks=20, block_size=BLOCK, max_blocks=8, device=device)
    cache = make_target_cache(target, tables, max_rows=NUM_ROWS, state_dtype=state_dtype)
    tables.assign(0, range(1, 9))
    tables.flush()
    begin_text(cache, 0)
    choice = AttentionChoice.for_device(device, is_row_invariant=False, prompt_kernel=prompt_kernel)
    slots_B, start, found = torch.tensor([0], device=device), 0, []

    def run(num_rows: int, *, all_count: bool) -> tuple[Rows, Tensor]:
        rows = Rows([0], slots_B, [start], torch.tensor([start], device=device), num_rows)
        ids_1T = torch.tensor([TEXT[start : start + num_rows]], device=device)
        hidden_1TD = run_rows(target.model, None, cache, choice, rows, ids_1T, all_count=all_count)
        return rows, target.model.logits(hidden_1TD)[0].float().cpu()

    for size in chunks:
        found.append(run(size, all_count=True)[1])
        start += size
    for count in itertools.cycle(KEPT):
        if start + NUM_ROWS > NUM_TOKENS:
            return torch.cat(found)
        rows, logits_TV = run(NUM_ROWS, all_count=False)
        commit_rows(cache, rows, torch.tensor([count], device=device))
        found.append(logits_TV[:count])
        start += count
    raise AssertionError("a cycle has no end")


def distance(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("device_name", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_narrow_states_cost_what_their_rounding_does(device_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    device, wide, narrow = torch.device(device_name), torch.float32, torch.bfloat16
    exact = logits_of(device, wide, wide)
    of_model, of_states = (distance(logits_of(device, *both), exact) for both in ((narrow, wide), (wide, narrow)))
    assert 0 < of_states < of_model
    # Roundings that know nothing of each other add in squares.
    allowed = _MARGIN * math.hypot(of_model, of_states)
    assert distance(logits_of(device, narrow, narrow), exact) < allowed
    commit = recurrent_state.commit_delta

    def one_too_many(states: Any, histories: Any, slots: Any, records: Any, counts: Tensor, **into: Any) -> None:
        commit(states, histories, slots, records, (counts + 1).clamp(max=NUM_ROWS), **into)

    monkeypatch.setattr(recurrent_state, "commit_delta", one_too_many)
    assert distance(logits_of(device, narrow, narrow), exact) > 2 * allowed, "a row too many would be seen"


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")  # what fla-core warns of is not ours
@pytest.mark.parametrize("kernel", ["recurrent", "chunks", "fla", "auto"])
def test_prompts_by_every_kernel_follow_the_model_in_float32(kernel: PromptKernel) -> None:
    """No kernel adds to what the model's own rounding in bf16 does with the recurrent one."""
    if kernel == "fla":
        if not has_fla():
            pytest.skip("fla-core is not installed")
        assert find_chunk_kda() is not None, "it is installed and cannot be used"
    device, wide, narrow, chunks = torch.device("cuda"), torch.float32, torch.bfloat16, (CHUNKS_FROM + 6, 7)
    exact = logits_of(device, wide, wide, chunks=chunks, prompt_kernel="recurrent")
    by_recurrence = distance(logits_of(device, narrow, wide, chunks=chunks, prompt_kernel="recurrent"), exact)
    found = distance(logits_of(device, narrow, wide, chunks=chunks, prompt_kernel=kernel), exact)
    assert 0 < found < _MARGIN * by_recurrence
