"""What comes after a step's products, measured: verification over a vocabulary, and the recurrence of delta attention.

Vocabulary rows are bf16 logits, blocks of 16 rows per request with 16 candidates each. Delta attention has the sizes of
a Kimi layer: 32 heads of 128, float32 states; verification runs one layer after the other, the commit all at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from benchmarks.gpu_micro_clock import FLOAT32_FLOPS, Bench, Call, MicroCase, Row, relative_error
from torch import Tensor

from paceline.ops.acceptance import candidate_rows
from paceline.ops.delta_attention import (
    DeltaGate,
    DeltaInputs,
    DeltaRecords,
    delta_attention,
    delta_attention_reference,
    verify_delta,
    verify_delta_reference,
)
from paceline.ops.delta_chunks import TOLERANCE, delta_chunks_triton
from paceline.ops.delta_commit import commit_delta, commit_delta_reference
from paceline.ops.delta_kernel import NO_STATE, DeltaTile, launch_delta
from paceline.ops.finalise_block import finalise_block_triton
from paceline.ops.top_k_tokens import top_k_tokens, top_k_tokens_reference
from paceline.ops.verify_block import verify_block, verify_block_reference, verify_greedily_reference
from paceline.ops.vocab_statistics import vocab_statistics_triton

VOCABULARY, DELTA = "vocabulary", "delta"
VOCABULARIES = (49_152, 151_936)
_BLOCK, _CANDIDATES = 16, 16
TILES = tuple(DeltaTile(values, warps) for values, warps in ((8, 1), (16, 1), (32, 1), (16, 2), (32, 2), (64, 4)))
CHUNK_TILES = tuple(DeltaTile(values, warps) for values, warps in ((16, 4), (32, 4), (32, 8), (64, 8)))
_KEPT = 5  # rows that a commit takes in
_OPERATIONS = 7  # per row and cell of a state: decay, read, correct, write, read again


def vocabulary_cases(is_real: bool) -> Iterator[MicroCase]:
    """Statistics, verdicts and candidates at both vocabularies, for one request and for 32."""
    for vocab_size in VOCABULARIES if is_real else (96,):
        for batch in (1, 32) if is_real else (2,):
            block = _Blocks(batch, vocab_size)
            runs = {"greedy verification": partial(_verification, is_greedy=True), "verification": _verification}
            for name, run in {**runs, "statistics": _statistics, "verdict": _verdict}.items():
                if is_real or name in runs:  # the other two are kernels
                    yield MicroCase(VOCABULARY, f"{name}, V {vocab_size}", batch * _BLOCK, partial(run, block))
            yield MicroCase(VOCABULARY, f"best {_CANDIDATES}, V {vocab_size}", batch * _BLOCK, partial(_best, block))


class _Blocks:
    """Blocks to be verified, made when the first case asks for them."""

    def __init__(self, batch: int, vocab_size: int) -> None:
        self.batch, self.vocab_size = batch, vocab_size
        self._logits: Tensor | None = None
        self._settings: tuple[Tensor, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Of the logits of one block per request."""
        return self.batch * _BLOCK * self.vocab_size * 2

    def on(self, bench: Bench) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Logits [copies, B, L, V]; drafts, candidates, log q, temperature, seed, position, step."""
        if self._logits is None:
            device, batch = bench.device, self.batch
            shape = (bench.clock.copies(self.num_bytes), batch, _BLOCK, self.vocab_size)
            logits = torch.empty(shape, dtype=torch.bfloat16, device=device).normal_().mul_(2.0)
            # Far above the others, and apart: among equal bf16 logits a reference may choose otherwise.
            place = torch.arange(_CANDIDATES, device=device)
            best = (torch.randint(self.vocab_size, (batch, _BLOCK, 1), device=device) + 5 * place) % self.vocab_size
            logits.scatter_(-1, best.expand(shape[0], -1, -1, -1), (14.0 - place / 4).bfloat16().expand(*shape[:3], -1))
            candidates = best[:, :-1].contiguous()
            log_q = torch.randn(candidates.shape, device=device).log_softmax(-1)
            chosen = torch.randint(_CANDIDATES, (batch, _BLOCK - 1, 1), device=device)
            drafts = candidates.gather(2, chosen).squeeze(2)
            keys = torch.arange(batch, device=device)
            self._logits = logits
            self._settings = (drafts, candidates, log_q, torch.ones(batch, device=device), keys * 7919, keys + 9, keys)
        return self._logits, self._settings


def _verification(blocks: _Blocks, bench: Bench, *, is_greedy: bool = False) -> Row:
    logits, (drafts, candidates, log_q, temperature, seed, position, step) = blocks.on(bench)

    def verify(rows: Tensor) -> object:
        return verify_block(
            drafts,
            rows,
            temperature_B=temperature,
            seed_B=seed,
            anchor_position_B=position,
            step_B=step,
            candidate_ids_BKC=candidates,
            log_q_BKC=log_q,
            all_greedy=is_greedy,
        )

    row = bench.measure([partial(verify, rows) for rows in logits], num_bytes=blocks.num_bytes)
    found = verify(logits[-1])
    settings = (temperature, seed, position, step)
    if is_greedy:
        expected = verify_greedily_reference(drafts, logits[-1], *settings)
    else:
        expected = verify_block_reference(drafts, logits[-1], candidates, log_q, *settings, "standard")
    differs = torch.zeros(blocks.batch, dtype=torch.bool, device=bench.device)
    for name in ("accepted_B", "bonus_ids_B", "fault_B", "num_zero_q_B"):
        differs |= getattr(found, name) != getattr(expected, name)
    return {**row, "error": float(differs.float().mean()), "allowed": 1 / 32}  # a near tie may fall either way


def _statistics(blocks: _Blocks, bench: Bench) -> Row:
    logits, (_, candidates, _, temperature, seed, position, _) = blocks.on(bench)
    calls = [partial(vocab_statistics_triton, rows, candidates, temperature, seed, position) for rows in logits]
    return bench.measure(calls, num_bytes=blocks.num_bytes)


def _verdict(blocks: _Blocks, bench: Bench) -> Row:
    logits, (drafts, candidates, log_q, temperature, seed, position, step) = blocks.on(bench)
    tiles = vocab_statistics_triton(logits[-1], candidates, temperature, seed, position)
    rows = candidate_rows(drafts, candidates, log_q)
    settings = (temperature, seed, position, step)
    calls: list[Call] = [
        partial(finalise_block_triton, tiles, drafts, logits[-1], rows, *settings, "standard") for _ in range(50)
    ]
    num_bytes = sum(part.numel() * part.element_size() for part in tiles) + candidates.numel() * 14
    return bench.measure(calls, num_bytes=num_bytes)


def _best(blocks: _Blocks, bench: Bench) -> Row:
    logits = blocks.on(bench)[0]
    calls = [partial(top_k_tokens, rows, _CANDIDATES) for rows in logits]
    row = bench.measure(calls, num_bytes=blocks.num_bytes)
    found, expected = (run(logits[-1], _CANDIDATES) for run in (top_k_tokens, top_k_tokens_reference))
    return {**row, "error": float((found[1] != expected[1]).sum()), "allowed": 0.0}


@dataclass(frozen=True)
class DeltaSizes:
    """Sizes of a target's delta layers."""

    num_layers: int
    num_heads: int = 32
    head_size: int = 128

    @property
    def state_bytes(self) -> int:
        """Of one request in one layer."""
        return self.num_heads * self.head_size**2 * 4

    @property
    def width(self) -> int:
        """Channels of queries, of keys, and of values."""
        return self.num_heads * self.head_size


def delta_cases(is_real: bool) -> Iterator[MicroCase]:
    """Verification and commit for one request and for 32, then whole prompts."""
    for batch in (1, 32) if is_real else (2,):
        # Enough layers that states are not found in the cache.
        sizes = DeltaSizes(96 if batch == 1 else 24) if is_real else DeltaSizes(2, 2, 8)
        step = _DeltaStep(sizes, batch)
        yield MicroCase(DELTA, f"verify a layer, batch {batch}", batch * _BLOCK, partial(_verify, step))
        yield MicroCase(
            DELTA, f"commit {sizes.num_layers} layers, batch {batch}", batch * _BLOCK, partial(_commit, step)
        )
        for tile in TILES if is_real else ():
            name = f"verify a layer, batch {batch}, {tile.values} values, {tile.warps} warps"
            yield MicroCase(DELTA, name, batch * _BLOCK, partial(_verify_with, step, tile))
    sizes = DeltaSizes(4) if is_real else DeltaSizes(1, 2, 8)
    runs: dict[str, object] = {"row by row": _row_by_row}
    for tile in CHUNK_TILES if is_real else ():
        runs[f"chunks, {tile.values} values, {tile.warps} warps"] = partial(_chunk_kernel, tile)
    runs["chunks in torch"] = _in_chunks
    for name, run in runs.items():
        for rows in (512, 2048) if is_real else (40,):
            yield MicroCase(DELTA, f"prompt, {name}", rows, partial(_prompt, sizes, rows, run))


def _gate(sizes: DeltaSizes, device: torch.device) -> DeltaGate:
    dt_bias = torch.randn(sizes.num_heads, sizes.head_size, device=device) * 0.5
    return DeltaGate(torch.randn(sizes.num_heads, device=device) * 0.5, dt_bias, -5.0)


def _inputs(sizes: DeltaSizes, batch: int, num_rows: int, device: torch.device) -> DeltaInputs:
    """Projections as a layer has them: q, k and v side by side."""
    joint, heads = (batch, num_rows, 4 * sizes.width), (sizes.num_heads, sizes.head_size)
    all_rows = torch.randn(joint, dtype=torch.bfloat16, device=device)
    q, k, v, f = (part.unflatten(-1, heads) for part in all_rows.split(sizes.width, -1))
    return DeltaInputs(q, k, v, f, torch.randn(batch, num_rows, sizes.num_heads, dtype=torch.bfloat16, device=device))


class _DeltaStep:
    """States, records and projections of all layers, made when the first case asks for them."""

    def __init__(self, sizes: DeltaSizes, batch: int) -> None:
        self.sizes, self.batch = sizes, batch
        self._made: tuple[DeltaInputs, DeltaGate, Tensor, Tensor, DeltaRecords, Tensor] | None = None

    def on(self, bench: Bench) -> tuple[DeltaInputs, DeltaGate, Tensor, Tensor, DeltaRecords, Tensor]:
        """Projections, gate, states, histories, records, slots."""
        if self._made is None:
            sizes, device = self.sizes, bench.device
            places = (sizes.num_layers, self.batch + 1)
            states = torch.randn(*places, sizes.num_heads, sizes.head_size, sizes.head_size, device=device)
            channels = 3 * sizes.width
            histories = torch.randn(*places, 3, channels, device=device).bfloat16()
            records = DeltaRecords.allocate(
                sizes.num_layers,
                self.batch,
                _BLOCK,
                sizes.num_heads,
                sizes.head_size,
                sizes.head_size,
                num_channels=channels,
                dtype=torch.bfloat16,
                device=device,
            )
            records.inputs_BTC.normal_()
            slots = torch.randperm(self.batch, device=device)
            gate = _gate(sizes, device)
            self._made = (_inputs(sizes, self.batch, _BLOCK, device), gate, states, histories, records, slots)
        return self._made


def _verify(step: _DeltaStep, bench: Bench) -> Row:
    inputs, gate, states, _, records, slots = step.on(bench)
    sizes, cells = step.sizes, step.batch * _BLOCK * step.sizes.width
    calls = [
        partial(verify_delta, inputs, gate, states[layer], slots, records.layer(layer))
        for layer in range(sizes.num_layers)
    ]
    row = bench.measure(
        calls,
        num_bytes=step.batch * sizes.state_bytes + cells * (5 * 2 + 3 * 4),
        num_flops=_OPERATIONS * cells * sizes.head_size,
        flops=FLOAT32_FLOPS,
    )
    own = records.layer(0)
    expected = DeltaRecords(*(torch.empty_like(part) for part in own))
    found_o = calls[0]()
    expected_o = verify_delta_reference(inputs, gate, states[0], slots, expected, "recurrent")
    assert isinstance(found_o, Tensor)
    errors = [relative_error(*pair) / 1e-4 for pair in zip(own[:3], expected[:3], strict=True)]
    errors.append(relative_error(found_o, expected_o) / 5e-3)  # rounded to bf16
    return {**row, "error": max(errors), "allowed": 1.0}


def _verify_with(step: _DeltaStep, tile: DeltaTile, bench: Bench) -> Row:
    """Another cut of the heads than the library's own."""
    inputs, gate, states, _, records, slots = step.on(bench)
    sizes, cells = step.sizes, step.batch * _BLOCK * step.sizes.width
    calls: list[Call] = [
        partial(launch_delta, inputs, gate, states[layer], slots, None, records.layer(layer), NO_STATE, tile)
        for layer in range(sizes.num_layers)
    ]
    row = bench.measure(
        calls,
        num_bytes=step.batch * sizes.state_bytes + cells * (5 * 2 + 3 * 4),
        num_flops=_OPERATIONS * cells * sizes.head_size,
        flops=FLOAT32_FLOPS,
    )
    found, expected = records.layer(0), DeltaRecords(*(torch.empty_like(part) for part in records.layer(0)))
    verify_delta_reference(inputs, gate, states[0], slots, expected, "recurrent")
    return {**row, "error": relative_error(found.correction_BTNV, expected.correction_BTNV), "allowed": 1e-4}


def _commit(step: _DeltaStep, bench: Bench) -> Row:
    inputs, gate, states, histories, records, slots = step.on(bench)
    sizes, batch = step.sizes, step.batch
    for layer in range(sizes.num_layers):
        verify_delta(inputs, gate, states[layer], slots, records.layer(layer))
    counts = torch.full((batch,), _KEPT, device=bench.device)
    few = (states[:1].clone(), histories[:1].clone())
    expected = [part.clone() for part in few]
    first = DeltaRecords(*(part[:1] for part in records))
    commit_delta(*few, slots, first, counts)
    commit_delta_reference(expected[0], expected[1], slots, first, counts)
    error = max(relative_error(found, wanted) for found, wanted in zip(few, expected, strict=True))
    num_bytes = sizes.num_layers * batch * (2 * sizes.state_bytes + _KEPT * sizes.width * 12 + 3 * sizes.width * 12)
    row = bench.measure(
        [partial(commit_delta, states, histories, slots, records, counts)], num_bytes=num_bytes, num_replays=5
    )
    return {**row, "error": error, "allowed": 1e-5}


def _row_by_row(inputs: DeltaInputs, gate: DeltaGate, state: Tensor) -> tuple[Tensor, Tensor]:
    return delta_attention(inputs, gate, state, form="recurrent")


def _chunk_kernel(tile: DeltaTile, inputs: DeltaInputs, gate: DeltaGate, state: Tensor) -> tuple[Tensor, Tensor]:
    return delta_chunks_triton(inputs, gate, state, None, tile=tile)


def _in_chunks(inputs: DeltaInputs, gate: DeltaGate, state: Tensor) -> tuple[Tensor, Tensor]:
    return delta_attention_reference(inputs, gate, state, None, "chunked")


def _prompt(sizes: DeltaSizes, num_rows: int, run: object, bench: Bench) -> Row:
    """The floor counts rows and states once; operations are those of chunks of 64, on matrix units."""
    assert callable(run)
    gate = _gate(sizes, bench.device)
    state = torch.randn(1, sizes.num_heads, sizes.head_size, sizes.head_size, device=bench.device)
    all_inputs = [_inputs(sizes, 1, num_rows, bench.device) for _ in range(sizes.num_layers)]
    row = bench.measure(
        [partial(run, inputs, gate, state) for inputs in all_inputs],
        num_bytes=2 * sizes.state_bytes + num_rows * sizes.width * 5 * 2,
        num_flops=num_rows * sizes.width * (6 * sizes.head_size + 8 * 64),
        num_replays=5,
    )
    found, expected = run(all_inputs[0], gate, state), _in_chunks(all_inputs[0], gate, state)
    return {**row, "error": relative_error(found[1], expected[1]), "allowed": TOLERANCE[1]}
