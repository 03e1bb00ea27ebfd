"""Counter-based noise: every random number is a pure function of (seed, position, step, token id, domain).

    hash32  = MurmurHash3 x86-32 of the little-endian words [seed low, seed high, position, token], seeded with domain
    uniform = hi16 * 2^-16 + (lo16 + 1/2) * 2^-32       float32, inside the open interval (0, 1)
    gumbel  = -ln(-ln(1 - uniform))                     float32, in [-2.812, 22.874]

No generator holds state, so a draw does not know in which batch, slot or lane it was made, and a CUDA graph replays it
with new keys. The three domains are separate streams by construction: verification is lossless only if the draft
draw, the acceptance draw and the residual draw of one position are independent. (Coupled drafts share the target's
domain on purpose: they are judged by equality alone, which draws nothing more.) Noise is keyed by token id: a token
draws the same noise wherever it stands in a candidate list or a vocabulary shard.

torch has no arithmetic on uint32; the words live in int64 and are cut back to 32 bits after every step that can grow
them. A product of two 32-bit words may wrap int64, which leaves its low 32 bits right. The functions at the end are the
same for kernels, in uint32: equal words, and Gumbel values that differ by the rounding of a logarithm.

Source: MurmurHash3 x86-32 by Austin Appleby; the key layout and the winning tail follow the samplers of vLLM 0.33.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.ops.dispatch import choose, kernel, tl, triton

TARGET = 0
ACCEPT = 0x4143_4350
DRAFT = 0x4452_4654

_WORD = 0xFFFF_FFFF
_LARGEST_BELOW_ONE = 1.0 - 2.0**-24
_CPU_CHUNK = 2**18  # draws at a time: temporaries that fit a CPU's cache take less than half the time of whole batches


# What is multiplied next needs the low 32 bits alone, so a rotation leaves the others in. All but the first operation
# on a word work in place: without temporaries, draws for few rows take a fifth less time and those for many a third.
def _rotate_left(word: Tensor, count: int) -> Tensor:
    return (word << count).bitwise_or_(word >> (32 - count))


def _scramble(word: Tensor) -> Tensor:
    word = (word * 0xCC9E_2D51).bitwise_and_(_WORD)
    return _rotate_left(word, 15).mul_(0x1B87_3593).bitwise_and_(_WORD)


def _absorb(state: Tensor, scrambled: Tensor) -> Tensor:
    return _rotate_left(state ^ scrambled, 13).mul_(5).add_(0xE654_6B64).bitwise_and_(_WORD)


def _finish(state: Tensor) -> Tensor:
    state = state ^ 16  # the message is always 16 bytes long
    state = (state >> 16).bitwise_xor_(state).mul_(0x85EB_CA6B).bitwise_and_(_WORD)
    state = (state >> 13).bitwise_xor_(state).mul_(0xC2B2_AE35).bitwise_and_(_WORD)
    return (state >> 16).bitwise_xor_(state)


def hash32(seed: Tensor, position: Tensor, token: Tensor, domain: int = TARGET) -> Tensor:
    """Hash a key to 32 bits; the arguments broadcast against each other.

    Args:
        seed: int64, all 64 bits count, negative values included.
        position: int64, its low 32 bits count.
        token: int64, its low 32 bits count.
        domain: initial state of the hash: TARGET, ACCEPT or DRAFT.

    Returns:
        int64 tensor of values in [0, 2^32).
    """
    # Only the last word differs along a vocabulary; the three before it are hashed once per row, before broadcasting.
    state = _absorb(torch.full_like(seed, domain), _scramble(seed & _WORD))
    state = _absorb(state, _scramble((seed >> 32) & _WORD))
    state = _absorb(state, _scramble(position & _WORD))
    return _finish(_absorb(state, _scramble(token & _WORD)))


def uniform_from_hash(word: Tensor) -> Tensor:
    """Map 32-bit words to float32 inside (0, 1), finely resolved near 0.

    Args:
        word: int64 values in [0, 2^32) from `hash32`.

    Returns:
        float32 in [2^-33, 1 - 2^-24]; the topmost words would round to 1.0 and are held below it.
    """
    low = (word & 0xFFFF).float().add_(0.5).mul_(2.0**-32)
    return (word >> 16).float().mul_(2.0**-16).add_(low).clamp_(max=_LARGEST_BELOW_ONE)


def gumbel_from_hash(word: Tensor) -> Tensor:
    """Map 32-bit words to Gumbel(0, 1) noise, float32.

    The large values, which win an argmax, come from uniforms near 0, where float32 is finely resolved. The usual form
    -ln(-ln u) tops out at 16.6 and can never pick a token 17 nats down.

    Args:
        word: int64 values in [0, 2^32) from `hash32`.
    """
    return uniform_from_hash(word).neg_().log1p_().neg_().log_().neg_()


def mix_step(seed: Tensor, step: Tensor) -> Tensor:
    """Xor the step index into the high word of a seed, so that a position drafted again draws afresh.

    Args:
        seed: int64.
        step: int64, a request's own step counter, never a batch-wide one.
    """
    return seed ^ (step << 32)


def gumbel_noise(
    seed_R: Tensor, position_R: Tensor, vocab_size: int, *, domain: int, step_R: Tensor | None = None
) -> Tensor:
    """Draw one Gumbel value per row and token id.

    Args:
        seed_R: int64 request seeds.
        position_R: int64 absolute position just before the token that is drawn.
        vocab_size: number of token ids, V.
        domain: TARGET, ACCEPT or DRAFT.
        step_R: int64 step index to mix into the seed; None leaves the seed alone.

    Returns:
        float32 [R, V].
    """
    if step_R is not None:
        seed_R = mix_step(seed_R, step_R)
    token_V = torch.arange(vocab_size, device=seed_R.device)
    num_rows = seed_R.shape[0]
    if seed_R.device.type != "cpu" or num_rows * vocab_size <= _CPU_CHUNK:
        return gumbel_from_hash(hash32(seed_R.unsqueeze(-1), position_R.unsqueeze(-1), token_V, domain))
    gumbel_RV = torch.empty(num_rows, vocab_size)
    size = max(1, _CPU_CHUNK // vocab_size)
    for start in range(0, num_rows, size):
        rows = slice(start, start + size)
        word_RV = hash32(seed_R[rows].unsqueeze(-1), position_R[rows].unsqueeze(-1), token_V, domain)
        gumbel_RV[rows] = gumbel_from_hash(word_RV)
    return gumbel_RV


@kernel
def _absorb_word(state: tl.tensor, word: tl.tensor) -> tl.tensor:
    word *= 0xCC9E_2D51
    word = ((word << 15) | (word >> 17)) * 0x1B87_3593
    state ^= word
    return ((state << 13) | (state >> 19)) * 5 + 0xE654_6B64


@kernel
def key_state(seed: tl.tensor, position: tl.tensor, DOMAIN: tl.constexpr) -> tl.tensor:
    """In a kernel: the hash of a key up to its token, uint32, from an int64 seed and position."""
    state = _absorb_word(tl.cast(DOMAIN, tl.uint32), seed.to(tl.uint32))
    state = _absorb_word(state, (seed >> 32).to(tl.uint32))
    return _absorb_word(state, position.to(tl.uint32))


@kernel
def uniform_of_token(state: tl.tensor, token: tl.tensor) -> tl.tensor:
    """In a kernel: the float32 uniform of tokens (any integer), from a `key_state`."""
    word = _absorb_word(state, tl.cast(token, tl.uint32))
    word ^= 16
    word = (word ^ (word >> 16)) * 0x85EB_CA6B
    word = (word ^ (word >> 13)) * 0xC2B2_AE35
    word ^= word >> 16
    # Halves become floats by way of 2^23 + half, whose last 16 bits are the half's: exact, and not a slow conversion.
    high = ((word >> 16) | 0x4B00_0000).to(tl.float32, bitcast=True) - 8388608.0
    low = ((word & 0xFFFF) | 0x4B00_0000).to(tl.float32, bitcast=True) - 8388608.0
    # The products are exact, so a fused multiply-add gives the same bits. The bound is the largest float32 below 1.
    return tl.minimum(high * 1.52587890625e-05 + (low + 0.5) * 2.3283064365386963e-10, 0.999999940395355224609375)


@kernel
def gumbel_of_token(state: tl.tensor, token: tl.tensor) -> tl.tensor:
    """In a kernel: float32 Gumbel noise of tokens, from a `key_state`."""
    uniform = uniform_of_token(state, token)
    # ln(1 - u) without a library's log1p: the rounding of w = 1 - u leaves ln w / (w - 1) right where w is near 1.
    w = 1.0 - uniform
    slope = tl.log(w) / tl.where(w < 1.0, w - 1.0, 1.0)
    return -tl.log(tl.where(w < 1.0, slope, 1.0) * uniform)


def candidate_gumbel_reference(
    seed_B: Tensor, step_B: Tensor | None, position_B: Tensor, ids_BKC: Tensor, first: int, domain: int
) -> Tensor:
    """The definition; arguments as for `candidate_gumbel`."""
    keys_B = seed_B if step_B is None else mix_step(seed_B, step_B)
    offsets_K = torch.arange(first, first + ids_BKC.shape[1], device=ids_BKC.device)
    positions_BK1 = (position_B[:, None] + offsets_K)[:, :, None]
    return gumbel_from_hash(hash32(keys_B[:, None, None], positions_BK1, ids_BKC, domain))


@kernel
def key_of_draft(
    seed_ptr: tl.tensor,
    step_ptr: tl.tensor,
    position_ptr: tl.tensor,
    request: tl.tensor,
    first: tl.tensor,
    k: tl.tensor,
    HAS_STEP: tl.constexpr,
    DOMAIN: tl.constexpr,
) -> tl.tensor:
    """In a kernel: the `key_state` of draft `first + k` of a request; steps are mixed in as `mix_step` does."""
    seed = tl.load(seed_ptr + request)
    if HAS_STEP:
        seed ^= tl.load(step_ptr + request) << 32
    return key_state(seed, tl.load(position_ptr + request) + first + k, DOMAIN)


@kernel
def _candidate_gumbel_kernel(
    seed_ptr: tl.tensor,
    step_ptr: tl.tensor,
    position_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    noise_ptr: tl.tensor,
    num_drafts: tl.tensor,
    first: tl.tensor,
    num_candidates: tl.tensor,
    HAS_STEP: tl.constexpr,
    DOMAIN: tl.constexpr,
    CANDIDATES: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    request, k = row // num_drafts, row % num_drafts
    state = key_of_draft(seed_ptr, step_ptr, position_ptr, request, first, k, HAS_STEP, DOMAIN)
    lane = tl.arange(0, CANDIDATES)
    is_lane = lane < num_candidates
    ids = tl.load(ids_ptr + row * num_candidates + lane, mask=is_lane, other=0)
    tl.store(noise_ptr + row * num_candidates + lane, gumbel_of_token(state, ids), mask=is_lane)


def candidate_gumbel_triton(
    seed_B: Tensor, step_B: Tensor | None, position_B: Tensor, ids_BKC: Tensor, first: int, domain: int
) -> Tensor:
    """Launch one program per position."""
    num_requests, num_drafts, num_candidates = ids_BKC.shape
    noise_BKC = torch.empty(ids_BKC.shape, dtype=torch.float32, device=ids_BKC.device)
    with torch.cuda.device_of(ids_BKC):
        _candidate_gumbel_kernel[(num_requests * num_drafts,)](
            seed_B.contiguous(),
            seed_B if step_B is None else step_B.contiguous(),
            position_B.contiguous(),
            ids_BKC.contiguous(),
            noise_BKC,
            num_drafts,
            first,
            num_candidates,
            HAS_STEP=step_B is not None,
            DOMAIN=domain,
            CANDIDATES=triton.next_power_of_2(num_candidates),
            num_warps=1,
        )
    return noise_BKC


def candidate_gumbel(
    seed_B: Tensor, step_B: Tensor | None, position_B: Tensor, ids_BKC: Tensor, *, first: int = 0, domain: int
) -> Tensor:
    """Draw noise for a few ids at each position of a block, float32 [B, K, C], keyed by token id.

    Args:
        seed_B: int64.
        step_B: int64, mixed into the seeds; None leaves them alone.
        position_B: int64, the position before that of draft 0.
        ids_BKC: int64 target ids.
        first: which draft of the block the first of these K positions is, from 0.
        domain: TARGET, ACCEPT or DRAFT.
    """
    run = choose("candidate_gumbel", ids_BKC, candidate_gumbel_reference, candidate_gumbel_triton)
    return run(seed_B, step_B, position_B, ids_BKC, first, domain)
