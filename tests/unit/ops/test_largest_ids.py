"""Largest scores of rows: the kernel against torch, however a row is cut, with ties, NaN and rows of -inf."""

from __future__ import annotations

import pytest
import torch
from tests.unit.ops.products import DTYPES

from paceline.ops import largest_ids as module
from paceline.ops.largest_ids import largest_ids, largest_ids_triton, largest_of_runs, runs_of


@pytest.fixture(autouse=True)
def _small_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_TURN", 16)


def tied(rows: int, vocab: int, dtype: torch.dtype) -> torch.Tensor:
    """Few different scores, so that most rows have several largest ones."""
    return torch.randint(-3, 3, (rows, vocab)).to(dtype)


def test_the_definition_takes_the_lowest_id_of_equal_scores() -> None:
    scores = torch.zeros(2, 3, 7)
    scores[..., 4:6] = 1.0
    assert largest_ids(scores).tolist() == [[4] * 3] * 2
    assert largest_ids(scores[:0]).shape == (0, 3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("filling", [1, 8, 1000])
@pytest.mark.parametrize(("rows", "vocab"), [(1, 1), (3, 16), (4, 83), (2, 130)])
def test_the_kernel_finds_what_torch_finds(
    kernel_device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    filling: int,
    rows: int,
    vocab: int,
) -> None:
    monkeypatch.setattr(module, "_FILLING", filling)
    for scores in (tied(rows, vocab, dtype), torch.randn(rows, vocab).to(dtype), torch.full((rows, vocab), -torch.inf)):
        assert torch.equal(largest_ids_triton(scores.to(kernel_device)).cpu(), scores.max(-1).indices)


@pytest.mark.parametrize("filling", [1, 1000])
def test_a_nan_is_told_and_never_wins(
    kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch, filling: int
) -> None:
    monkeypatch.setattr(module, "_FILLING", filling)
    scores = torch.zeros(2, 50)
    scores[:, 37] = 1.0
    scores[1, 36] = torch.nan
    best, ids = (found.cpu() for found in largest_of_runs(scores.to(kernel_device)))
    is_mute = best.isnan().any(1)
    assert is_mute.tolist() == [False, True]
    assert ids[0, best[0].argmax()] == 37 and bool((ids < 50).all())
    unsaid, _ = largest_of_runs(scores.to(kernel_device), tells_nan=False)
    assert torch.equal(unsaid[1], unsaid[0])
    assert largest_ids_triton(scores.to(kernel_device)).tolist() == [37, 37]


def test_runs_cover_a_row_and_fill_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_TURN", 2048)
    assert runs_of(2048, 151_936) == (75, 1)
    assert runs_of(15, 151_936) == (1, 75)
    for rows in (1, 100, 480, 512, 1000, 5000):
        num_turns, num_runs = runs_of(rows, 151_936)
        assert num_turns * num_runs * 2048 >= 151_936 > (num_runs - 1) * num_turns * 2048
        assert rows * num_runs <= max(rows, module._FILLING)
