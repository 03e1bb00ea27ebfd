"""The candidate walk: worked examples of the spec, a slow float64 twin, exact distributions, the kernel."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare
from torch import Tensor

from paceline.errors import ShapeError
from paceline.ops import noise
from paceline.ops.candidate_walk import candidate_walk, candidate_walk_reference, candidate_walk_triton


@dataclass(frozen=True)
class Walk:
    """The tensors of a walk; B requests, K positions, C candidates, R rank, V tokens."""

    unary: Tensor
    candidates: Tensor
    projected: Tensor
    predecessor: Tensor
    successor: Tensor
    anchors: Tensor

    def run(self, temperature: Tensor | None = None, gumbel: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return candidate_walk(*self.__dict__.values(), temperature_B=temperature, gumbel_BKC=gumbel)

    def repeated(self, count: int) -> Walk:
        """The same request `count` times."""
        several = {name: getattr(self, name).repeat_interleave(count, 0) for name in ("unary", "candidates", "anchors")}
        return replace(self, projected=self.projected.repeat_interleave(count, 0), **several)


# Spec 8.3 (a)
EXAMPLE = Walk(
    unary=torch.tensor([[[1.0, 0.9], [0.7, 0.6]]]),
    candidates=torch.tensor([[[2, 5], [1, 3]]]),
    projected=torch.tensor([[[1.0, 0.5], [2.0, -1.0]]]),
    predecessor=torch.tensor([[0.0, 0], [1, 0], [0, 1], [1, 1], [2, -1], [-1, 1]]),
    successor=torch.tensor([[0.0, 0], [0, 1], [1, 0], [1, -1], [-1, 2], [0.5, 0.5]]),
    anchors=torch.tensor([4]),
)
# Spec 8.3 (b)
GREEDY_IS_NOT_VITERBI = Walk(
    unary=torch.tensor([[[1.0, 0.9], [0.0, 0.1]]]),
    candidates=torch.tensor([[[1, 2], [3, 0]]]),
    projected=torch.ones(1, 2, 1),
    predecessor=torch.tensor([1.0, 0, 1, 0, 0]).unsqueeze(1),
    successor=torch.tensor([0.0, 0, 0, 2, 0]).unsqueeze(1),
    anchors=torch.tensor([4]),
)
PATHS = {(2, 1): 0.103323, (2, 3): 0.690807, (5, 1): 0.108078, (5, 3): 0.097793}


def edge(walk: Walk, request: int, k: int, before: int, after: int) -> float:
    parts = (walk.predecessor[before], walk.projected[request, k], walk.successor[after])
    a, w, s = (part.double() for part in parts)
    return float((a * w * s).sum())


def row_after(walk: Walk, request: int, k: int, before: int) -> list[float]:
    candidates = walk.candidates[request, k].tolist()
    return [
        float(walk.unary[request, k, c]) + edge(walk, request, k, before, token) for c, token in enumerate(candidates)
    ]


def slow_walk(walk: Walk, temperature: Tensor | None = None, gumbel: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """One request, position and candidate at a time, in float64."""
    ids, scores = torch.zeros(walk.unary.shape[:2], dtype=torch.long), torch.zeros(walk.unary.shape).double()
    for request in range(walk.unary.shape[0]):
        before = int(walk.anchors[request])
        for k in range(walk.unary.shape[1]):
            row = row_after(walk, request, k, before)
            t = float(temperature[request]) if temperature is not None and gumbel is not None else 0.0
            noisy = row if t <= 0 else [s / t + float(gumbel[request, k, c]) for c, s in enumerate(row)]
            before = min(zip(noisy, walk.candidates[request, k].tolist(), strict=True), key=lambda p: (-p[0], p[1]))[1]
            ids[request, k], scores[request, k] = before, torch.tensor(row)
    return ids, scores


def max_sum_path(walk: Walk) -> list[int]:
    """What the walk must not be: the best path as a whole."""
    totals = {}
    for path in itertools.product(*walk.candidates[0].tolist()):
        total, before = 0.0, int(walk.anchors[0])
        for k, token in enumerate(path):
            total += row_after(walk, 0, k, before)[walk.candidates[0, k].tolist().index(token)]
            before = token
        totals[path] = total
    return list(max(totals, key=lambda path: totals[path]))


def token_noise(seeds_B: Tensor, candidate_ids_BKC: Tensor) -> Tensor:
    positions_K1 = torch.arange(candidate_ids_BKC.shape[1])[:, None]
    return noise.gumbel_from_hash(noise.hash32(seeds_B[:, None, None], positions_K1, candidate_ids_BKC, noise.DRAFT))


def random_walk(
    B: int, K: int, C: int, R: int, V: int, *, dtype: torch.dtype = torch.float32, seed: int = 0
) -> tuple[Walk, Tensor, Tensor]:
    """A walk, temperatures (some greedy) and noise."""
    generator = torch.Generator().manual_seed(seed)
    candidates = torch.rand(B, K, V, generator=generator).topk(C, dim=-1).indices
    codebooks = [torch.randn(V, R, generator=generator).to(dtype) for _ in range(2)]
    projected = (torch.randn(B, K, R, generator=generator) * R**-0.5 * 3).to(dtype)
    walk = Walk(
        unary=torch.randn(B, K, C, generator=generator).to(dtype),
        candidates=candidates,
        projected=projected,
        predecessor=codebooks[0],
        successor=codebooks[1],
        anchors=torch.randint(V, (B,), generator=generator),
    )
    temperature = torch.rand(B, generator=generator) * 1.5
    temperature[::3] = 0.0
    return walk, temperature, token_noise(torch.arange(B) * 77 + seed, candidates)


def test_the_worked_example() -> None:
    ids, scores = EXAMPLE.run()
    assert ids.tolist() == [[2, 3]]
    torch.testing.assert_close(scores, torch.tensor([[[3.0, 1.65], [-0.3, 1.6]]]))
    assert EXAMPLE.unary.argmax(-1).flatten().tolist() == [0, 0], "each on its own would be 2, 1"
    for temperature, first, after_2 in (
        (1.0, [0.79413, 0.20587], [0.130108, 0.869892]),
        (0.5, [0.937027, 0.062973], [0.021881, 0.978119]),
    ):
        q = (scores[0] / temperature).softmax(-1)
        torch.testing.assert_close(q, torch.tensor([first, after_2]), rtol=0, atol=1e-6)
    after_5 = torch.tensor(row_after(EXAMPLE, 0, 1, 5))
    torch.testing.assert_close((after_5 / 0.5).softmax(-1), torch.tensor([0.549834, 0.450166]), rtol=0, atol=1e-6)


def test_the_walk_is_not_viterbi() -> None:
    ids, scores = GREEDY_IS_NOT_VITERBI.run()
    assert ids.tolist() == [[1, 0]]
    torch.testing.assert_close(scores, torch.tensor([[[1.0, 0.9], [0.0, 0.1]]]))
    assert max_sum_path(GREEDY_IS_NOT_VITERBI) == [2, 3]


def test_sampled_paths_have_their_exact_probabilities() -> None:
    count = 40_000
    walk = EXAMPLE.repeated(count)
    gumbel = token_noise(torch.arange(count) * 7919 + 3, walk.candidates)
    ids, scores = walk.run(torch.ones(count), gumbel)
    code = ids[:, 0] * 10 + ids[:, 1]
    counts = [int((code == a * 10 + b).sum()) for a, b in PATHS]
    assert sum(counts) == count
    expected = [p * count for p in PATHS.values()]
    assert chisquare(counts, [e * count / sum(expected) for e in expected]).pvalue > 1e-3
    # Scores are those of the path really taken: the row after 2 where 2 was drawn, the row after 5 elsewhere.
    torch.testing.assert_close(scores[ids[:, 0] == 5][0, 1], torch.tensor([-0.3, -0.4]))
    unary_path = {
        (a, b): 0.79413 * p if a == 2 else 0.20587 * p for a, b in PATHS for p in [{1: 0.130108, 3: 0.869892}[b]]
    }
    wrong = [unary_path[path] * count for path in PATHS]  # as if 2 had always come before
    assert chisquare(counts, [e * count / sum(wrong) for e in wrong]).pvalue < 1e-6


@given(
    B=st.integers(1, 4),
    K=st.integers(1, 5),
    C=st.integers(1, 7),
    R=st.integers(1, 9),
    seed=st.integers(0, 1000),
    is_sampled=st.booleans(),
)
def test_the_reference_agrees_with_a_slow_float64_twin(
    B: int, K: int, C: int, R: int, seed: int, is_sampled: bool
) -> None:
    walk, temperature, gumbel = random_walk(B, K, C, R, 23, seed=seed)
    options = (temperature, gumbel) if is_sampled else (None, None)
    ids, scores = walk.run(*options)
    slow_ids, slow_scores = slow_walk(walk, *options)
    assert torch.equal(ids, slow_ids)
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores.double(), slow_scores, rtol=1e-5, atol=1e-5)


def test_ties_go_to_the_lowest_token_id_in_any_order_of_candidates() -> None:
    for order in itertools.permutations(range(3)):
        candidates = torch.tensor([[[40, 9, 23]]])[..., order]
        walk = Walk(
            torch.ones(1, 1, 3), candidates, *(torch.zeros(s) for s in ((1, 1, 2), (50, 2), (50, 2))), torch.tensor([0])
        )
        assert walk.run()[0].tolist() == [[9]]


def test_the_order_of_candidates_makes_no_difference() -> None:
    walk, temperature, gumbel = random_walk(6, 4, 8, 5, 40)
    order = torch.rand(6, 4, 8).argsort(-1)
    shuffled = replace(walk, unary=walk.unary.gather(-1, order), candidates=walk.candidates.gather(-1, order))
    ids, scores = walk.run(temperature, gumbel)
    again, scores_again = shuffled.run(temperature, gumbel.gather(-1, order))
    assert torch.equal(ids, again)
    assert torch.equal(scores.gather(-1, order), scores_again)


def test_a_request_has_the_same_bits_alone_and_in_company() -> None:
    walk, temperature, gumbel = random_walk(5, 4, 6, 16, 40)
    ids, scores = walk.run(temperature, gumbel)
    for b in range(5):
        one = slice(b, b + 1)
        alone = Walk(
            walk.unary[one],
            walk.candidates[one],
            walk.projected[one],
            walk.predecessor,
            walk.successor,
            walk.anchors[one],
        )
        found = alone.run(temperature[one], gumbel[one])
        assert torch.equal(found[0], ids[one]) and torch.equal(found[1], scores[one])


def test_an_id_is_never_picked_from_a_nan() -> None:
    unary = EXAMPLE.unary.clone()
    unary[0, 0] = torch.tensor([torch.nan, 0.9])
    ids, scores = replace(EXAMPLE, unary=unary).run()
    assert ids[0, 0] == 5 and scores[0, 0, 0].isnan()
    unary[0] = torch.nan
    assert replace(EXAMPLE, unary=unary).run()[0].tolist() == [[2, 1]], (
        "some candidate, so that it can index a codebook"
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"candidates": torch.zeros(1, 2, 3).long()}, "candidate_ids has shape"),
        ({"projected": torch.zeros(1, 2, 5)}, r"projected has shape \[1, 2, 5\], expected \[1, 2, 2\]"),
        ({"successor": torch.zeros(6, 3)}, "successor has shape"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(change: dict[str, Tensor], message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        replace(EXAMPLE, **change).run()
    with pytest.raises(ShapeError, match="gumbel"):
        EXAMPLE.run(torch.ones(1), torch.zeros(1, 2, 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("B", "K", "C", "R", "V"),
    [(1, 1, 1, 1, 3), (3, 7, 16, 256, 97), (5, 4, 6, 20, 41), (2, 32, 32, 512, 64), (4, 3, 17, 130, 33)],
)
def test_the_kernel_agrees_with_the_reference(
    kernel_device: torch.device, dtype: torch.dtype, B: int, K: int, C: int, R: int, V: int
) -> None:
    walk, temperature, gumbel = random_walk(B, K, C, R, V, dtype=dtype, seed=B)
    # Rows of the codebooks that no candidate or anchor names must not be read.
    named = torch.zeros(V, dtype=torch.bool)
    named[walk.candidates.flatten()], named[walk.anchors] = True, True
    predecessor, successor = (t.masked_fill(~named[:, None], torch.nan) for t in (walk.predecessor, walk.successor))
    arguments = (walk.unary, walk.candidates, walk.projected, predecessor, successor, walk.anchors)
    there = [t.to(kernel_device) for t in arguments]
    for noise_BKC in (None, gumbel):
        expected = candidate_walk_reference(*arguments, temperature, noise_BKC)
        noise_there = None if noise_BKC is None else noise_BKC.to(kernel_device)
        found = candidate_walk_triton(*there, temperature.to(kernel_device), noise_there)
        assert torch.equal(found[0].cpu(), expected[0])
        torch.testing.assert_close(found[1].cpu(), expected[1], rtol=1e-5, atol=2e-5)
    greedy = temperature <= 0
    plain = candidate_walk_reference(*arguments, torch.zeros(B), None)[0]
    assert torch.equal(expected[0][greedy], plain[greedy])


def test_the_kernel_breaks_ties_and_skips_nans_as_the_reference_does(kernel_device: torch.device) -> None:
    unary = torch.tensor([[[1.0, 1, torch.nan, 1, 0]], [[torch.nan] * 5]])
    candidates = torch.tensor([[[8, 5, 1, 7, 0]], [[8, 5, 1, 7, 0]]])
    zeros = [torch.zeros(shape) for shape in ((2, 1, 3), (9, 3), (9, 3))]
    arguments = (unary, candidates, *zeros, torch.tensor([0, 0]), torch.zeros(2), None)
    assert candidate_walk_reference(*arguments)[0].tolist() == [[5], [0]]
    there = [t if t is None else t.to(kernel_device) for t in arguments]
    assert candidate_walk_triton(*there)[0].tolist() == [[5], [0]]
