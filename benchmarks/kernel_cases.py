"""What the kernel benchmark runs: inputs of real sizes, the bytes that an operation cannot avoid, and what is right."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.ops import candidate_walk, context_kv, grouped_convolution, noise, sample_tokens, verify_block
from paceline.ops.rotary import rotary_table

Arguments = tuple[object, ...]


@dataclass(frozen=True)
class Sizes:
    """A drafter and its block.

    Attributes:
        name: for tables.
        width: of the drafter.
        block_rows: Q, anchor included.
        num_layers: of the drafter.
        num_kv_heads: of its attention.
        head_size: of its attention.
        vocab_size: of the target.
        num_positions: capacity of a cache slot.
        num_taps: of the convolution.
        group_size: of the convolution.
        rank: of the selector's codebooks.
        top_k: candidates per position.
    """

    name: str
    width: int
    block_rows: int
    num_layers: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    num_positions: int = 1024
    num_taps: int = 2
    group_size: int = 16
    rank: int = 256
    top_k: int = 16


SMOLLM2 = Sizes("smollm2-135m", 576, 8, 4, 3, 64, 49_152)
EIGHT_B = Sizes("8b", 4096, 16, 5, 8, 128, 151_936)
TINY = Sizes("tiny", 24, 3, 2, 2, 10, 50, num_positions=9, group_size=6, rank=20, top_k=5)


@dataclass(frozen=True)
class Case:
    """One operation at one size.

    Attributes:
        operation: its name.
        sizes: of the drafter.
        batch: requests.
        reference: the definition.
        kernel: the launcher, called the same way.
        arguments: of both, 16-bit where serving has 16 bits.
        num_bytes: least traffic: every input that counts read once, every result written once.
        errors: kernel against the definition in float32, as (found, allowed), for float32 and for 16-bit inputs.
    """

    operation: str
    sizes: Sizes
    batch: int
    reference: Callable[..., object]
    kernel: Callable[..., object]
    arguments: Arguments
    num_bytes: int
    errors: Callable[[], list[tuple[float, float]]]


def make_cases(all_sizes: Sequence[Sizes], batches: Sequence[int], device: torch.device) -> Iterator[Case]:
    """Every operation at every size, one at a time: the largest inputs fill a good part of a small GPU."""
    for sizes in all_sizes:
        for batch in batches:
            for make in (_convolution, _walk, _context, _verification, _sampling):
                torch.manual_seed(batch)
                yield make(sizes, batch, device)


def _widened(arguments: Arguments) -> Arguments:
    return tuple(a.float() if isinstance(a, Tensor) and a.is_floating_point() else a for a in arguments)


def _bytes_of(*tensors: Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _unit(allowed_units: float, wide: float) -> list[float]:
    """Allowed errors relative to the largest value: float32 sums in another order, then 16-bit roundings."""
    return [wide, allowed_units * 2.0**-8]


def _relative(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected.float()).abs().max() / expected.float().abs().max().clamp(min=1e-6))


def _convolution(sizes: Sizes, batch: int, device: torch.device) -> Case:
    rows, width, taps = batch * sizes.block_rows, sizes.width, sizes.num_taps
    groups = width // sizes.group_size
    x, base = torch.randn(rows, width), torch.randn(taps, width)
    projected = torch.randn(rows, 2, taps, groups)
    offset = torch.arange(sizes.block_rows, device=device).repeat(batch)
    low = [t.to(device, torch.bfloat16) for t in (x, base, projected)]
    arguments = (low[0], low[1], low[2][:, 0], offset)
    reference, kernel = (
        grouped_convolution.grouped_convolution_reference,
        grouped_convolution.grouped_convolution_triton,
    )

    def errors() -> list[tuple[float, float]]:
        wide = _widened(arguments)
        expected = reference(*wide)
        found = [kernel(*wide), kernel(*arguments)]
        return list(zip([_relative(y, expected) for y in found], _unit(2, 1e-5), strict=True))

    num_bytes = 2 * _bytes_of(low[0]) + _bytes_of(low[1], arguments[2], offset)
    return Case("grouped_convolution", sizes, batch, reference, kernel, arguments, num_bytes, errors)


def _walk(sizes: Sizes, batch: int, device: torch.device) -> Case:
    shape = (batch, sizes.block_rows - 1, sizes.top_k)
    candidates = torch.randint(sizes.vocab_size, shape)
    candidates[..., :] += torch.arange(sizes.top_k)  # distinct within a position, more or less evenly spread
    candidates = (candidates.sort(-1).values + torch.arange(sizes.top_k)) % sizes.vocab_size
    codebooks = [torch.randn(sizes.vocab_size, sizes.rank, dtype=torch.bfloat16, device=device) for _ in range(2)]
    projected = torch.randn(*shape[:2], sizes.rank) * sizes.rank**-0.5
    unary, candidates = torch.randn(shape).to(device, torch.bfloat16), candidates.to(device)
    anchors = torch.randint(sizes.vocab_size, (batch,), device=device)
    positions = torch.arange(shape[1], device=device)[:, None]
    seeds = torch.arange(batch, device=device)[:, None, None]
    gumbel = noise.gumbel_from_hash(noise.hash32(seeds, positions, candidates, noise.DRAFT))
    temperature = torch.full((batch,), 0.8, device=device)
    projected = projected.to(device, torch.bfloat16)
    arguments = (unary, candidates, projected, *codebooks, anchors, temperature, gumbel)
    reference, kernel = candidate_walk.candidate_walk_reference, candidate_walk.candidate_walk_triton

    def errors() -> list[tuple[float, float]]:
        wide = _widened(arguments)
        expected = reference(*wide)
        return [(_walk_error(kernel(*a), expected, temperature, gumbel), 1e-4) for a in (wide, arguments)]

    rows = (batch * shape[1] * (1 + sizes.top_k)) * sizes.rank * 2  # of the codebooks, as many as are looked at
    num_bytes = rows + _bytes_of(unary, candidates, projected, gumbel) + batch * shape[1] * (8 + 4 * sizes.top_k)
    return Case("candidate_walk", sizes, batch, reference, kernel, arguments, num_bytes, errors)


def _walk_error(
    found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], temperature_B: Tensor, gumbel_BKC: Tensor
) -> float:
    """Largest difference of scores up to where the paths part; infinite if they part at anything but a near tie."""
    weights_BKC = expected[1] / temperature_B[:, None, None] + gumbel_BKC
    best_BK2 = weights_BKC.topk(2).values
    is_near_tie_BK = best_BK2[..., 0] - best_BK2[..., 1] < 1e-3
    differs_BK = found[0] != expected[0]
    parted_BK = differs_BK.long().cumsum(1) - differs_BK.long() > 0  # rows after the first difference
    if bool((differs_BK & ~parted_BK & ~is_near_tie_BK).any()):
        return float("inf")
    difference_BK = (found[1] - expected[1]).abs().amax(-1)
    return float(difference_BK.masked_fill(parted_BK, 0.0).max())


def _context(sizes: Sizes, batch: int, device: torch.device) -> Case:
    rows, head_size = batch * sizes.block_rows, sizes.head_size
    kv = torch.randn(rows, sizes.num_layers, 2 * sizes.num_kv_heads * head_size).to(device, torch.bfloat16)
    gain = torch.randn(sizes.num_layers, head_size, device=device) * 0.2 + 1
    frequencies = 1e-4 ** (torch.arange(head_size // 2, device=device) * 2 / head_size)
    table = rotary_table(frequencies, sizes.num_positions)
    starts = torch.randint(sizes.num_positions - sizes.block_rows, (batch, 1), device=device)
    positions = (starts + torch.arange(sizes.block_rows, device=device)).flatten()
    # A request's rows lie together, each request's somewhere else; where in the planes makes no difference here.
    owner = torch.randperm(batch, device=device).repeat_interleave(sizes.block_rows)
    stored_at = owner * sizes.num_positions + positions
    shape = (sizes.num_layers, 2, sizes.num_kv_heads, batch, sizes.num_positions, head_size)
    planes = torch.zeros(shape, dtype=torch.bfloat16, device=device)
    arguments = (kv, gain, table, positions, stored_at, planes, 1e-6, True, 1.0)
    reference, kernel = context_kv.write_context_kv_reference, context_kv.write_context_kv_triton

    def errors() -> list[tuple[float, float]]:
        wide = _widened(arguments)
        expected, found_wide, found = wide[5], torch.zeros_like(wide[5]), torch.zeros_like(planes)
        reference(*wide)
        kernel(*wide[:5], found_wide, *wide[6:])
        kernel(*arguments[:5], found, *arguments[6:])
        return list(zip([_relative(y, expected) for y in (found_wide, found)], _unit(4, 1e-5), strict=True))

    num_bytes = 2 * _bytes_of(kv) + _bytes_of(gain, positions, stored_at) + rows * head_size * 4
    return Case("write_context_kv", sizes, batch, reference, kernel, arguments, num_bytes, errors)


def _verification(sizes: Sizes, batch: int, device: torch.device) -> Case:
    """Sampled requests with a full q: both kernels, one read of float32 logits."""
    num_drafts, top_k = sizes.block_rows - 1, sizes.top_k
    logits = torch.randn(batch, num_drafts + 1, sizes.vocab_size, device=device) * 2
    candidates = logits[:, :-1].topk(top_k, dim=-1).indices
    log_q = torch.randn(candidates.shape, device=device).log_softmax(-1)
    drafts = candidates.gather(2, torch.randint(top_k, (batch, num_drafts, 1), device=device)).squeeze(2)
    temperature, keys = torch.ones(batch, device=device), torch.arange(batch, device=device)
    arguments = (drafts, logits, candidates, log_q, temperature, keys * 7919, keys + 100, keys, "standard")
    reference, kernel = verify_block.verify_block_reference, verify_block.verify_block_triton

    def errors() -> list[tuple[float, float]]:
        return [(_share_that_differs(reference, kernel, arguments, method), 1e-2) for method in ("standard", "block")]

    num_bytes = _bytes_of(logits, drafts, candidates, log_q) + batch * 5 * 8
    return Case("verify_block", sizes, batch, reference, kernel, arguments, num_bytes, errors)


def _share_that_differs(
    reference: Callable[..., object], kernel: Callable[..., object], arguments: Arguments, method: str
) -> float:
    """Part of the verdicts that differ: none, but for weights that tie within the rounding of a logarithm."""
    verdicts = [run(*arguments[:-1], method) for run in (reference, kernel)]
    differs = torch.zeros_like(verdicts[0].accepted_B, dtype=torch.bool)
    for name in ("accepted_B", "bonus_ids_B", "fault_B", "num_zero_q_B"):
        differs |= getattr(verdicts[0], name) != getattr(verdicts[1], name)
    return float(differs.float().mean())


def _sampling(sizes: Sizes, batch: int, device: torch.device) -> Case:
    scores = torch.randn(batch, sizes.vocab_size, device=device) * 2
    keys = torch.arange(batch, device=device)
    arguments = (scores, torch.ones(batch, device=device), keys * 7919, keys + 100, noise.TARGET)
    reference, kernel = sample_tokens.sample_tokens_reference, sample_tokens.sample_tokens_triton

    def errors() -> list[tuple[float, float]]:
        found = []
        for rows in (scores, scores.bfloat16()):
            ids = [run(rows, *arguments[1:]) for run in (reference, kernel)]
            found.append((float((ids[0] != ids[1]).float().mean()), 1e-2))
        return found

    return Case("sample_tokens", sizes, batch, reference, kernel, arguments, _bytes_of(scores) + batch * 28, errors)
