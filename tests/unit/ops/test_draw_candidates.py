"""Draws from a few candidates: a slow float64 twin, what the noise is keyed by, and the kernels."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from paceline.ops import noise
from paceline.ops.draw_candidates import (
    candidate_log_q,
    candidate_log_q_triton,
    draw_candidates,
    draw_candidates_reference,
    draw_candidates_triton,
)


class Case(NamedTuple):
    """Arguments of a draw; every third request is greedy."""

    scores: Tensor
    ids: Tensor
    temperature: Tensor
    seed: Tensor
    step: Tensor | None
    position: Tensor


def case(B: int, K: int, C: int, *, has_step: bool = True) -> Case:
    temperature = torch.rand(B) + 0.3
    temperature[2::3] = 0.0
    return Case(
        (torch.randn(B, K, C) * 2).sort(dim=-1, descending=True).values,
        torch.rand(B, K, 90).topk(C, dim=-1).indices,
        temperature,
        torch.randint(-(2**62), 2**62, (B,)),
        torch.randint(0, 99, (B,)) if has_step else None,
        torch.randint(0, 500, (B,)),
    )


@pytest.mark.parametrize("has_step", [False, True])
def test_draws_are_those_of_a_slow_twin(has_step: bool) -> None:
    B, K, C = 6, 3, 5
    one = case(B, K, C, has_step=has_step)
    found, log_q = draw_candidates(
        one.scores,
        one.ids,
        temperature_B=one.temperature,
        seed_B=one.seed,
        step_B=one.step,
        position_B=one.position,
        first=2,
        domain=noise.DRAFT,
    )
    assert torch.equal(log_q, candidate_log_q(one.scores, one.temperature))
    for b in range(B):
        t = float(one.temperature[b])
        for k in range(K):
            tempered = [float(score) / (t or 1.0) for score in one.scores[b, k]]
            total = math.log(sum(math.exp(value) for value in tempered))
            assert log_q[b, k].tolist() == pytest.approx([value - total for value in tempered], abs=1e-5)
            step = None if one.step is None else one.step[b : b + 1]
            keys = one.seed[b : b + 1], one.position[b : b + 1] + 2 + k
            gumbel = noise.gumbel_noise(*keys, 90, domain=noise.DRAFT, step_R=step)[0]
            ids = one.ids[b, k].tolist()
            noisy = [value - total + float(gumbel[token]) for value, token in zip(tempered, ids, strict=True)]
            assert found[b, k] == (ids[noisy.index(max(noisy))] if t > 0 else ids[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_step", [False, True])
@pytest.mark.parametrize(("B", "K", "C"), [(1, 1, 1), (3, 4, 5), (4, 2, 32)])
def test_the_kernels_agree_with_the_reference(
    kernel_device: torch.device, B: int, K: int, C: int, has_step: bool, dtype: torch.dtype
) -> None:
    one = case(B, K, C, has_step=has_step)
    one = one._replace(scores=one.scores.to(dtype))
    expected_ids, expected_log_q = draw_candidates_reference(*one, 1, noise.DRAFT)
    there = [None if part is None else part.to(kernel_device) for part in one]
    ids, log_q = draw_candidates_triton(*there, 1, noise.DRAFT)  # type: ignore[arg-type]
    torch.testing.assert_close(log_q.cpu(), expected_log_q, rtol=1e-5, atol=1e-5)
    assert torch.equal(ids.cpu(), expected_ids)
    alone = candidate_log_q_triton(one.scores.to(kernel_device), one.temperature.to(kernel_device))
    assert torch.equal(alone, log_q)


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # the interpreter, of inf - inf
def test_numbers_that_say_nothing_still_give_a_candidate(kernel_device: torch.device) -> None:
    one = case(2, 1, 4)
    scores = torch.tensor([[[torch.nan] * 4], [[torch.inf, 1.0, 0.0, -torch.inf]]])
    one = one._replace(scores=scores)
    expected, _ = draw_candidates_reference(*one, 0, noise.DRAFT)
    there = [None if part is None else part.to(kernel_device) for part in one]
    found, _ = draw_candidates_triton(*there, 0, noise.DRAFT)  # type: ignore[arg-type]
    for drawn in (found.cpu(), expected):
        assert all(int(token) in one.ids[b, 0] for b, (token,) in enumerate(drawn.tolist()))
