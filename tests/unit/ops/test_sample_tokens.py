from __future__ import annotations

import math

import pytest
import torch

from paceline.errors import ShapeError
from paceline.ops import noise
from paceline.ops.sample_tokens import NO_TOKEN, row_is_bad, sample_tokens

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
