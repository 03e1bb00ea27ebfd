from __future__ import annotations

import math

import pytest
import torch

from paceline.errors import ShapeError
from paceline.ops import noise
from paceline.ops import sample_tokens as module
from paceline.ops.sample_tokens import (
    NO_TOKEN,
    row_is_bad,
    sample_tokens,
    sample_tokens_reference,
    sample_tokens_triton,
)

P = torch.tensor([0.5, 0.3, 0.15, 0.05])


def draw(
    processed: torch.Tensor,
    *,
    temperature: float | list[float] = 1.0,
    seed: int | list[int] = 1234,
    position: list[int] | None = None,
    **options: object,
) -> list[int]:
    num_rows = processed.shape[0]
    return sample_tokens(
        processed,
        temperature_R=torch.tensor(temperature if isinstance(temperature, list) else [temperature] * num_rows),
        seed_R=torch.tensor(seed if isinstance(seed, list) else [seed] * num_rows),
        position_R=torch.tensor(position or list(range(num_rows))),
        **options,
    ).tolist()


def test_published_token_stream() -> None:
    assert draw(P.log().expand(6, 4)) == [1, 2, 2, 2, 0, 1]


def test_greedy_takes_the_lowest_of_tied_ids() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [2.0, 2.0, 2.0, 2.0]]).bfloat16()
    assert draw(logits, temperature=0.0, all_greedy=True) == [1, 0]
    assert draw(logits, temperature=0.0) == [1, 0]


def test_greedy_and_sampled_rows_in_one_batch_equal_lone_rows() -> None:
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(0))
    temperature, seed, position = [0.0, 1.0, 1.0, 0.0, 1.0, 1.0], [1, 2, 3, 4, 5, -6], [9, 8, 7, 6, 5, 4]
    together = draw(logits, temperature=temperature, seed=seed, position=position)
    alone = [
        draw(logits[i : i + 1], temperature=temperature[i], seed=seed[i], position=[position[i]])[0] for i in range(6)
    ]
    assert together == alone
    assert [together[0], together[3]] == logits.argmax(-1)[[0, 3]].tolist()


def test_seed_position_step_and_domain_all_matter() -> None:
    flat = torch.zeros(64, 1000)
    base = draw(flat)
    assert draw(flat) == base
    assert sum(a == b for a, b in zip(base, draw(flat, seed=1235), strict=True)) < 4
    assert sum(a == b for a, b in zip(base, draw(flat, position=list(range(64, 128))), strict=True)) < 4
    assert sum(a == b for a, b in zip(base, draw(flat, domain=noise.DRAFT), strict=True)) < 4
    step_R = torch.ones(64, dtype=torch.long)
    assert sum(a == b for a, b in zip(base, draw(flat, step_R=step_R), strict=True)) < 4


def test_removed_tokens_are_never_drawn() -> None:
    processed = torch.zeros(5000, 8)
    processed[:, [0, 3, 7]] = -math.inf
    assert set(draw(processed)) == {1, 2, 4, 5, 6}


def test_rare_tokens_are_drawn_as_often_as_they_should() -> None:
    probability = 1e-5
    processed = torch.tensor([math.log(1 - probability), math.log(probability)]).expand(2_000_000, 2)
    num_rare = sum(draw(processed))
    assert abs(num_rare - 20) < 5 * math.sqrt(20)


BAD_ROWS = {
    "one nan": [0.0, math.nan, 5.0, 1.0],
    "all nan": [math.nan] * 4,
    "nan last": [9.0, 1.0, 2.0, math.nan],
    "plus infinity": [0.0, math.inf, 5.0, 1.0],
    "nothing left": [-math.inf] * 4,
}


@pytest.mark.parametrize("bad_row", BAD_ROWS.values(), ids=BAD_ROWS.keys())
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_id_comes_from_a_bad_row_and_neighbours_keep_theirs(
    bad_row: list[float], temperature: float, dtype: torch.dtype
) -> None:
    processed = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).to(dtype)
    clean = draw(processed, temperature=temperature)
    processed[1] = torch.tensor(bad_row)
    ids = draw(processed, temperature=temperature, all_greedy=temperature == 0.0)
    assert ids == [clean[0], NO_TOKEN, clean[2]]
    assert row_is_bad(processed).tolist() == [False, True, False]


def test_settings_need_one_entry_per_row() -> None:
    with pytest.raises(ShapeError, match=r"seed has shape \[1\], expected \[2\]"):
        draw(torch.zeros(2, 4), seed=[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize(("num_rows", "vocab_size"), [(6, 41), (9, 16), (7, 7), (5, 33)])
def test_the_kernel_draws_as_the_reference_does(
    num_rows: int,
    vocab_size: int,
    is_tied: bool,
    dtype: torch.dtype,
    kernel_device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ids are equal: none of these seeds has noisy scores within the rounding of a logarithm."""
    monkeypatch.setattr(module, "_TILE", 16)
    generator = torch.Generator().manual_seed(vocab_size)
    scores = torch.randn(num_rows, vocab_size, generator=generator) * 2
    scores = (scores.round() if is_tied else scores).to(dtype)
    scores[0, vocab_size // 2 :] = -math.inf
    scores[1, 3], scores[2, vocab_size - 1], scores[3] = math.nan, math.inf, -math.inf
    temperature = torch.ones(num_rows)
    temperature[1::2] = 0.0
    seed = torch.randint(-(2**62), 2**62, (num_rows,), generator=generator)
    position = torch.randint(2**32, (num_rows,), generator=generator)
    for domain in (noise.TARGET, noise.DRAFT):
        expected = sample_tokens_reference(scores, temperature, seed, position, domain)
        arguments = (t.to(kernel_device) for t in (scores, temperature, seed, position))
        assert sample_tokens_triton(*arguments, domain).tolist() == expected.tolist()
    assert expected.tolist()[1:4] == [NO_TOKEN] * 3 and (expected[4:] >= 0).all()


def test_the_kernel_gives_ties_across_tiles_to_the_lowest_id(
    kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_TILE", 16)
    scores = torch.zeros(2, 50)
    scores[0, [15, 16, 40]] = scores[1, [16, 31, 32]] = 3.0
    zeros = torch.zeros(2, dtype=torch.long)
    arguments = (t.to(kernel_device) for t in (scores, torch.zeros(2), zeros, zeros))
    assert sample_tokens_triton(*arguments, noise.TARGET).tolist() == [15, 16]
