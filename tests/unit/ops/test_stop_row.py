"""Masses of all rows and noise of those that stopped: kernels against their references, and what has to differ."""

from __future__ import annotations

import pytest
import torch
from tests.unit.ops.blocks import Block, odd_block

from paceline.ops import stop_row
from paceline.ops.stop_row import (
    row_masses_reference,
    row_masses_triton,
    stop_noise_reference,
    stop_noise_triton,
)

B, K, V, C = 5, 3, 41, 4


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop_row, "MASS_TILE", 16)
    monkeypatch.setattr(stop_row, "NOISE_TILE", 8)


def block_of(dtype: torch.dtype = torch.float32) -> Block:
    block = odd_block(B, K, V, C, seed=3, is_tied=True)
    return block._replace(logits=block.logits.to(dtype), temperature=torch.tensor([0.7, 0.0, 1.0, 1.0, 1e-4]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_tempered", [False, True])
def test_masses_are_those_of_the_reference(kernel_device: torch.device, dtype: torch.dtype, is_tempered: bool) -> None:
    block = block_of(dtype)
    there = block.on(kernel_device)
    expected = row_masses_reference(block.logits, block.temperature, is_tempered=is_tempered)
    found = row_masses_triton(there.logits, there.temperature, is_tempered=is_tempered)
    assert torch.equal(found.best_ids_BLS.cpu(), expected.best_ids_BLS)
    torch.testing.assert_close(found.best_BLS.cpu(), expected.best_BLS, rtol=0, atol=0, equal_nan=True)
    is_sound = expected.best_BLS.isfinite()
    assert is_sound.any()
    torch.testing.assert_close(found.mass_BLS.cpu()[is_sound], expected.mass_BLS[is_sound], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("has_log_q", [False, True])
@pytest.mark.parametrize("is_tempered", [False, True])
def test_noise_is_that_of_the_row_that_stopped(kernel_device: torch.device, has_log_q: bool, is_tempered: bool) -> None:
    block = block_of()
    log_q = block.log_q.masked_fill(torch.arange(C) == 1, -torch.inf) if has_log_q else None
    accepted = torch.tensor([0, 2, 3, 1, 3])  # 3 is the bonus row, which leaves nothing out
    there = block.on(kernel_device)
    arguments = (accepted, block.candidate_ids, log_q, *block.settings[:3])
    expected = stop_noise_reference(block.logits, *arguments, is_tempered=is_tempered)
    moved = [None if each is None else each.to(kernel_device) for each in arguments]
    found = stop_noise_triton(there.logits, *moved, is_tempered=is_tempered)  # type: ignore[arg-type]
    is_left = expected.noisy_BS > -torch.inf
    assert torch.equal(found.noisy_ids_BS.cpu()[is_left], expected.noisy_ids_BS[is_left])
    torch.testing.assert_close(found.noisy_BS.cpu(), expected.noisy_BS, rtol=1e-5, atol=1e-5)
    assert not is_left[1].any() and is_left[2].all(), "greedy requests draw nothing"
    # Planted: another row, and candidates that are not left out.
    for other in ((accepted + 1) % (K + 1), accepted):
        ids = block.candidate_ids if other is not accepted else torch.full_like(block.candidate_ids, -1)
        wrong = stop_noise_reference(block.logits, other, ids, log_q, *block.settings[:3], is_tempered=is_tempered)
        assert not torch.equal(wrong.noisy_BS, expected.noisy_BS)
