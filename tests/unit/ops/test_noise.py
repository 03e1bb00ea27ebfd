from __future__ import annotations

import math
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.ops import noise
from paceline.ops.dispatch import kernel, tl

# seed, position, token, hash32, uniform, Gumbel; from the specification of the random streams.
VECTORS = [
    (0, 0, 0, 0x8134CDF8, 0.5047120, 0.352945),
    (1234, 17, 5, 0xD4DB824A, 0.8314744, -0.576988),
    (1234, 17 + 2**30, 5, 0xEC8EFFF1, 0.9240570, -0.946926),
    (1234 ^ (3 << 32), 17 + 2**30, 5, 0xB6EC8093, 0.7145463, -0.226080),
    (-1, 100, 151935, 0xB70EB7EB, 0.7150683, -0.227539),
]
# The same keys in the specification's 64-bit stream: a second word from another domain, and the other tail.
WIDE_DOMAIN = 0x9E3779B9
WIDE_VECTORS = [
    (0.8224311700, 1.632244),
    (0.8756947659, 2.019380),
    (0.6567862408, 0.866557),
    (0.2069671323, -0.454379),
    (0.7258127503, 1.137988),
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


@pytest.mark.parametrize(("key", "wide"), list(zip(VECTORS, WIDE_VECTORS, strict=True)))
def test_vectors_of_the_64_bit_stream(key: tuple[int, int, int, int, float, float], wide: tuple[float, float]) -> None:
    """Nothing here draws from it; it pins down the hash in a second domain."""
    high, low = (noise.hash32(*tensors(*key[:3]), domain).item() for domain in (WIDE_DOMAIN, 0))
    uniform = (((high << 32 | low) >> 11) + 0.5) * 2.0**-53
    assert uniform == pytest.approx(wide[0], abs=1e-10)
    assert -math.log(-math.log(uniform)) == pytest.approx(wide[1], abs=1e-6)


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
    # The usual form ends where float32 ends below 1: a token 17 nats down could never win.
    usual = -torch.log(-torch.log(noise.uniform_from_hash(torch.tensor([0, 2**32 - 1]))))
    assert usual.max().item() == pytest.approx(16.636, abs=1e-3)
    assert gumbel.isfinite().all()  # no word gives an infinite value, which would win or lose against everything


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


def test_streams_of_target_and_draft_do_not_know_each_other() -> None:
    position_R = torch.arange(1_000_000)
    seed_R = torch.full_like(position_R, 7)
    target, salted = (noise.gumbel_noise(seed_R, position_R + salt, 4, domain=0).flatten() for salt in (0, 2**30))
    assert abs(torch.corrcoef(torch.stack([target, salted]).double())[0, 1].item()) < 5e-4
    assert torch.corrcoef(torch.stack([target, target]).double())[0, 1].item() > 0.99  # one stream for both is found


@pytest.mark.parametrize("domain", [noise.TARGET, noise.DRAFT])
def test_acceptance_uniforms_do_not_know_the_rank_of_the_draft(domain: int) -> None:
    """u beside the noise of the token that won: independent in the domain ACCEPT, tied where u is a draft's word."""
    position_R = torch.arange(200_000)
    seed_R = torch.full_like(position_R, 11)
    gumbel_RV = noise.gumbel_noise(seed_R, position_R, 8, domain=domain)
    for source, is_independent in ((noise.ACCEPT, True), (domain, False)):
        uniform_R = noise.uniform_from_hash(noise.hash32(seed_R, position_R, torch.zeros_like(position_R), source))
        rank_R = (gumbel_RV > gumbel_RV[:, :1]).sum(-1)
        correlation = torch.corrcoef(torch.stack([uniform_R, rank_R]).double())[0, 1].item()
        assert (abs(correlation) < 5 / math.sqrt(len(position_R))) == is_independent


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


@kernel
def _noise_kernel(
    seed_ptr: tl.tensor,
    position_ptr: tl.tensor,
    token_ptr: tl.tensor,
    uniform_ptr: tl.tensor,
    gumbel_ptr: tl.tensor,
    DOMAIN: tl.constexpr,
    TOKENS: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    tokens = tl.load(token_ptr + tl.arange(0, TOKENS))
    state = noise.key_state(tl.load(seed_ptr + row), tl.load(position_ptr + row), DOMAIN)
    at = row * TOKENS + tl.arange(0, TOKENS)
    tl.store(uniform_ptr + at, noise.uniform_of_token(state, tokens))
    tl.store(gumbel_ptr + at, noise.gumbel_of_token(state, tokens))


@pytest.mark.parametrize("domain", [noise.TARGET, noise.ACCEPT, noise.DRAFT])
def test_kernels_draw_the_same_numbers(domain: int, kernel_device: torch.device) -> None:
    """Uniforms to the bit, so the words are equal; Gumbel values up to the rounding of two logarithms."""
    generator = torch.Generator().manual_seed(domain)
    seed_R = torch.tensor([0, 1234, 1234 ^ (3 << 32), -1, -(2**63), 2**63 - 1])
    position_R = torch.tensor([0, 17, 17 + 2**30, 100, 2**32 - 1, 2**31])
    token_V = torch.randint(2**31, (1024,), generator=generator)
    token_V[:6] = torch.tensor([0, 5, 151935, 2**31 - 1, 1, 2])
    uniform_RV, gumbel_RV = (torch.empty(6, 1024, device=kernel_device) for _ in range(2))
    keys = (t.to(kernel_device) for t in (seed_R, position_R, token_V))
    _noise_kernel[(6,)](*keys, uniform_RV, gumbel_RV, DOMAIN=domain, TOKENS=1024)
    word_RV = noise.hash32(seed_R.unsqueeze(1), position_R.unsqueeze(1), token_V, domain)
    assert torch.equal(uniform_RV.cpu(), noise.uniform_from_hash(word_RV))
    torch.testing.assert_close(gumbel_RV.cpu(), noise.gumbel_from_hash(word_RV), rtol=0, atol=4e-6)


@pytest.mark.parametrize(("num_rows", "vocab_size"), [(7, 37), (3, 4099), (1, 400)])
def test_rows_made_in_chunks_have_the_bits_of_rows_made_together(
    num_rows: int, vocab_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed_R, position_R = torch.arange(num_rows) * 10**12 - 5, torch.arange(num_rows) + 3
    together = noise.gumbel_noise(seed_R, position_R, vocab_size, domain=noise.TARGET)
    for chunk in (1, 100, 5000):
        monkeypatch.setattr(noise, "_CPU_CHUNK", chunk)
        assert torch.equal(noise.gumbel_noise(seed_R, position_R, vocab_size, domain=noise.TARGET), together)


@pytest.mark.parametrize("has_step", [False, True])
@pytest.mark.parametrize(("B", "K", "C"), [(1, 1, 1), (3, 4, 5), (2, 3, 32)])
def test_noise_of_candidates_is_the_vocabularys_at_their_positions(
    kernel_device: torch.device, B: int, K: int, C: int, has_step: bool
) -> None:
    seed, step = torch.randint(-(2**62), 2**62, (B,)), torch.randint(0, 2**20, (B,)) if has_step else None
    position, ids = torch.randint(0, 2**20, (B,)), torch.rand(B, K, 60).topk(C, dim=-1).indices
    found = noise.candidate_gumbel(seed, step, position, ids, first=2, domain=noise.DRAFT)
    for k in range(K):
        row = noise.gumbel_noise(seed, position + 2 + k, 60, domain=noise.DRAFT, step_R=step)
        assert torch.equal(found[:, k], row.gather(1, ids[:, k]))
    there = [None if part is None else part.to(kernel_device) for part in (seed, step, position, ids)]
    kernels = noise.candidate_gumbel_triton(*there, 2, noise.DRAFT).cpu()
    # the logarithms of another library
    torch.testing.assert_close(kernels, found, rtol=0, atol=1e-5)
    assert (noise.candidate_gumbel_triton(*there, 3, noise.DRAFT).cpu() - found).abs().max() > 1e-3
