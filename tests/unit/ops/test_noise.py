from __future__ import annotations

import math
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.ops import noise

# seed, position, token, hash32, uniform, Gumbel; from the specification of the random streams.
VECTORS = [
    (0, 0, 0, 0x8134CDF8, 0.5047120, 0.352945),
    (1234, 17, 5, 0xD4DB824A, 0.8314744, -0.576988),
    (1234, 17 + 2**30, 5, 0xEC8EFFF1, 0.9240570, -0.946926),
    (1234 ^ (3 << 32), 17 + 2**30, 5, 0xB6EC8093, 0.7145463, -0.226080),
    (-1, 100, 151935, 0xB70EB7EB, 0.7150683, -0.227539),
]


def murmur3(message: bytes, state: int) -> int:
    """MurmurHash3 x86-32 over whole four-byte blocks, in plain integers."""
    for (block,) in struct.iter_unpack("<I", message):
        block = block * 0xCC9E2D51 % 2**32
        block = ((block << 15) | (block >> 17)) % 2**32
        state ^= block * 0x1B873593 % 2**32
        state = ((state << 13) | (state >> 19)) % 2**32
        state = (state * 5 + 0xE6546B64) % 2**32
    state ^= len(message)
    state ^= state >> 16
    state = state * 0x85EBCA6B % 2**32
    state ^= state >> 13
    state = state * 0xC2B2AE35 % 2**32
    return state ^ (state >> 16)


def tensors(*values: int) -> list[torch.Tensor]:
    return [torch.tensor([value]) for value in values]


@pytest.mark.parametrize(("seed", "position", "token", "word", "uniform", "gumbel"), VECTORS)
def test_vectors(seed: int, position: int, token: int, word: int, uniform: float, gumbel: float) -> None:
    hashed = noise.hash32(*tensors(seed, position, token))
    assert hashed.item() == word
    assert noise.uniform_from_hash(hashed).dtype is torch.float32
    assert noise.uniform_from_hash(hashed).item() == pytest.approx(uniform, abs=1e-7)
    assert noise.gumbel_from_hash(hashed).item() == pytest.approx(gumbel, abs=1e-6)


def test_the_reference_of_this_test_knows_a_published_vector() -> None:
    assert murmur3(b"aaaa", 0x9747B28C) == 0x5A97808A
    assert murmur3(b"test", 0) == 0xBA6BD213


int64s = st.integers(-(2**63), 2**63 - 1)


@given(
    seed=int64s, position=st.integers(0, 2**32 - 1), token=st.integers(0, 2**32 - 1), domain=st.integers(0, 2**32 - 1)
)
def test_hash_is_generic_murmur3_of_the_packed_key(seed: int, position: int, token: int, domain: int) -> None:
    message = struct.pack("<qII", seed, position, token)
    assert noise.hash32(*tensors(seed, position, token), domain).item() == murmur3(message, domain)


def test_arguments_broadcast_and_no_draw_depends_on_its_neighbours() -> None:
    seed_R = torch.tensor([7, -9, 2**62])
    position_R = torch.tensor([0, 5, 2**31])
    step_R = torch.tensor([0, 1, 7])
    together = noise.gumbel_noise(seed_R, position_R, 4099, domain=noise.DRAFT, step_R=step_R)
    for row in range(3):
        one = slice(row, row + 1)
        alone = noise.gumbel_noise(seed_R[one], position_R[one], 4099, domain=noise.DRAFT, step_R=step_R[one])
        assert torch.equal(together[row], alone[0])
    narrow = noise.gumbel_noise(seed_R, position_R, 37, domain=noise.DRAFT, step_R=step_R)
    assert torch.equal(together[:, :37], narrow)


def test_uniform_stays_inside_the_open_interval() -> None:
    ends = torch.tensor([0, 1, 2**32 - 1])
    uniform = noise.uniform_from_hash(ends)
    assert uniform[0].item() == 2.0**-33
    assert uniform.min().item() > 0.0 and uniform.max().item() < 1.0


def test_gumbel_range_has_the_long_tail_where_it_wins() -> None:
    gumbel = noise.gumbel_from_hash(torch.tensor([0, 2**32 - 1]))
    assert gumbel[0].item() == pytest.approx(22.874, abs=1e-3)
    assert gumbel[1].item() == pytest.approx(-2.812, abs=1e-3)


@given(word=st.integers(0, 2**32 - 1))
def test_gumbel_follows_the_float64_formula(word: int) -> None:
    uniform = min((word + 0.5) * 2.0**-32, 1.0 - 2.0**-24)
    exact = -math.log(-math.log1p(-uniform))
    # Near u = 1 the float32 grid of u itself is coarse; there the noise is small and never wins.
    slope = 1.0 / ((1.0 - uniform) * -math.log1p(-uniform))
    assert noise.gumbel_from_hash(torch.tensor([word])).item() == pytest.approx(exact, abs=2e-6 + 6e-8 * slope)


def test_gumbel_max_reproduces_the_published_token_streams() -> None:
    log_p = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    seed_R, position_R = torch.full((6,), 1234), torch.arange(6)
    target = (log_p + noise.gumbel_noise(seed_R, position_R, 4, domain=0)).argmax(-1)
    salted = (log_p + noise.gumbel_noise(seed_R, position_R + 2**30, 4, domain=0)).argmax(-1)
    assert target.tolist() == [1, 2, 2, 2, 0, 1]
    assert salted.tolist() == [0, 1, 0, 0, 1, 1]


def test_noise_is_gumbel_distributed_over_positions() -> None:
    log_p = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    position_R = torch.arange(2_000_000)
    seed_R = torch.full_like(position_R, 7)
    counts = torch.bincount((log_p + noise.gumbel_noise(seed_R, position_R, 4, domain=0)).argmax(-1), minlength=4)
    expected = torch.tensor([0.5, 0.3, 0.15, 0.05]).double() * len(position_R)
    chi_square = ((counts.double() - expected) ** 2 / expected).sum().item()
    assert chi_square == pytest.approx(2.59, abs=0.02)  # the figure of the specification, same seed and positions


@pytest.mark.parametrize("pair", [("TARGET", "DRAFT"), ("TARGET", "ACCEPT"), ("DRAFT", "ACCEPT")])
def test_domains_are_separate_streams(pair: tuple[str, str]) -> None:
    position_R = torch.arange(200_000)
    seed_R = torch.full_like(position_R, 7)
    first, second = (noise.gumbel_noise(seed_R, position_R, 4, domain=getattr(noise, name)) for name in pair)
    correlation = torch.corrcoef(torch.stack([first.flatten(), second.flatten()]).double())[0, 1].item()
    assert abs(correlation) < 5 / math.sqrt(first.numel())


def test_a_step_index_changes_the_draw_and_step_zero_does_not() -> None:
    seed = torch.tensor([99, 99])
    assert noise.mix_step(seed, torch.tensor([0, 3])).tolist() == [99, 99 ^ (3 << 32)]
    assert noise.mix_step(torch.tensor([-1]), torch.tensor([1])).item() == -1 ^ (1 << 32)
