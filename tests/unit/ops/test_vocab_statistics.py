"""One pass over logits: tiles against whole rows, and the kernel against its reference."""

from __future__ import annotations

import pytest
import torch
from tests.unit.ops.blocks import odd_block

from paceline.ops import noise, vocab_statistics
from paceline.ops.vocab_statistics import (
    VocabStatistics,
    join_tiles,
    vocab_statistics_reference,
    vocab_statistics_triton,
)

SHAPES = [(4, 2, 41, 5), (2, 0, 16, 3), (3, 1, 64, 1), (2, 3, 7, 7), (5, 1, 33, 2)]


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tiles in a small vocabulary, the last of them not full."""
    monkeypatch.setattr(vocab_statistics, "TILE", 16)


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize(("B", "K", "V", "C"), SHAPES)
def test_joined_tiles_are_the_rows_own_numbers(B: int, K: int, V: int, C: int, is_tied: bool) -> None:
    block = odd_block(B, K, V, C, seed=V, is_tied=is_tied)
    rows = join_tiles(vocab_statistics_reference(block.logits, block.candidate_ids, *block.settings[:3]))
    best, best_ids = block.logits.max(-1)
    sound = best.isfinite()
    assert torch.equal(rows.best_BL.isfinite(), sound)
    assert torch.equal(rows.best_BL.isnan(), best.isnan())
    assert torch.equal(rows.best_ids_BL[sound], best_ids[sound])
    torch.testing.assert_close(rows.log_mass_BL[sound], block.logits.logsumexp(-1)[sound])
    for b in range(B):
        for i in range(K + 1):
            if not sound[b, i]:
                continue
            outside = torch.ones(V, dtype=torch.bool)
            if i < K:
                outside[[v for v in block.candidate_ids[b, i].tolist() if v >= 0]] = False
            p = block.logits[b, i].softmax(-1)
            torch.testing.assert_close(rows.outside_BL[b, i], p[outside].sum(), atol=1e-6, rtol=1e-5)
            noisy = block.logits[b, i].masked_fill(~outside, -torch.inf)
            if block.temperature[b] > 0:
                key = block.seed[b : b + 1], block.position[b : b + 1] + i
                noisy = noisy + noise.gumbel_noise(*key, V, domain=noise.TARGET)[0]
            assert rows.noisy_BL[b, i] == noisy.max()
            if noisy.max() > -torch.inf:
                assert rows.noisy_ids_BL[b, i] == noisy.argmax()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize(("B", "K", "V", "C"), SHAPES)
def test_the_kernel_agrees_with_the_reference(
    kernel_device: torch.device, B: int, K: int, V: int, C: int, is_tied: bool, dtype: torch.dtype
) -> None:
    block = odd_block(B, K, V, C, seed=V + 1, is_tied=is_tied)
    logits, candidates = block.logits.to(dtype), block.candidate_ids
    if B == 5:  # as for methods that leave no id out
        candidates = candidates[..., :0]
    arguments = (logits, candidates, *block.settings[:3])
    expected = vocab_statistics_reference(*arguments)
    found = VocabStatistics(*(t.cpu() for t in vocab_statistics_triton(*(t.to(kernel_device) for t in arguments))))
    assert torch.equal(found.best_BLS.nan_to_num(7.0), expected.best_BLS.nan_to_num(7.0))
    assert torch.equal(found.best_ids_BLS, expected.best_ids_BLS)
    # Logarithms of another library: noise differs by a few units in the last place, so nearly tied ids may swap.
    torch.testing.assert_close(found.noisy_BLS, expected.noisy_BLS, rtol=0, atol=1e-5)
    is_any = expected.noisy_BLS > -torch.inf
    assert torch.equal(found.noisy_ids_BLS[is_any], expected.noisy_ids_BLS[is_any])
    for name in ("mass_BLS", "outside_mass_BLS"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=1e-5, atol=1e-6)


def test_ties_across_the_border_of_tiles_go_to_the_lowest_id(kernel_device: torch.device) -> None:
    logits = torch.zeros(1, 1, 50)
    logits[..., [15, 16, 40]] = 3.0
    zeros = torch.zeros(1, dtype=torch.long)
    arguments = (logits, zeros.new_zeros(1, 0, 1), torch.zeros(1), zeros, zeros)
    for tiles in (
        vocab_statistics_reference(*arguments),
        vocab_statistics_triton(*(t.to(kernel_device) for t in arguments)),
    ):
        rows = join_tiles(tiles)
        assert rows.best_ids_BL.item() == rows.noisy_ids_BL.item() == 15
