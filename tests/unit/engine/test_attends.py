"""Cached attention in its three forms against a plain formula. Every form has to read exactly what exists."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paceline.engine.attends import AttentionChoice, attend_block, write_then_attend
from paceline.engine.cache import KeyValueCache
from paceline.ops.attention import attention_reference

PER_REQUEST = AttentionChoice(is_batched=False, is_row_invariant=False)
BATCHED = AttentionChoice(is_batched=True, is_row_invariant=False)
ROW_INVARIANT = AttentionChoice(is_batched=False, is_row_invariant=True)
CHOICES = [PER_REQUEST, BATCHED, ROW_INVARIANT]
SLOTS = [2, 0]
HEADS, KV_HEADS, SIZE = 4, 2, 8


def filled_cache(capacity: int = 24, num_layers: int = 1) -> KeyValueCache:
    cache = KeyValueCache(
        num_layers=num_layers,
        num_slots=3,
        num_kv_heads=KV_HEADS,
        capacity=capacity,
        head_size=SIZE,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    cache.planes.copy_(torch.randn(cache.planes.shape))
    return cache


def new_rows(num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.randn(2, num_rows, HEADS, SIZE),
        torch.randn(2, num_rows, KV_HEADS, SIZE),
        torch.randn(2, num_rows, KV_HEADS, SIZE),
    )


@pytest.mark.parametrize("choice", CHOICES, ids=["per-request", "batched", "row-invariant"])
@pytest.mark.parametrize(("starts", "num_rows"), [([0, 0], 5), ([7, 3], 1), ([7, 3], 4), ([0, 9], 3), ([12, 12], 8)])
def test_rows_are_stored_and_see_what_came_before(choice: AttentionChoice, starts: list[int], num_rows: int) -> None:
    cache = filled_cache()
    before = cache.planes.clone()
    q, k, v = new_rows(num_rows)
    attend = write_then_attend(
        cache,
        choice,
        slots=SLOTS,
        slots_B=torch.tensor(SLOTS),
        starts=starts,
        starts_B=torch.tensor(starts),
        num_rows=num_rows,
    )
    mixed = attend(0, q, k, v)
    assert mixed.shape == q.shape
    for index, (slot, start) in enumerate(zip(SLOTS, starts, strict=True)):
        old_k, old_v = before[0, :, slot, :, :start]
        keys = torch.cat((old_k, k[index].transpose(0, 1)), dim=1)
        values = torch.cat((old_v, v[index].transpose(0, 1)), dim=1)
        visible = torch.ones(num_rows, start + num_rows).tril(start).bool()
        expected = attention_reference(q[index].transpose(0, 1)[None], keys[None], values[None], visible)
        torch.testing.assert_close(mixed[index], expected[0].transpose(0, 1))
        assert torch.equal(cache.planes[0, 0, slot, :, : start + num_rows], keys)
        # Nothing else of the slot changed, nor any other slot.
        assert torch.equal(cache.planes[0, :, slot, :, start + num_rows :], before[0, :, slot, :, start + num_rows :])
    assert torch.equal(cache.planes[0, :, [1, 3]], before[0, :, [1, 3]])


@pytest.mark.parametrize("choice", CHOICES, ids=["per-request", "batched", "row-invariant"])
@pytest.mark.parametrize(("starts", "num_rows"), [([0, 0], 5), ([7, 3], 1), ([7, 3], 4)])
@pytest.mark.parametrize("window", [None, 1, 4, 8, 100])
def test_a_window_counts_the_row_itself(
    choice: AttentionChoice, starts: list[int], num_rows: int, window: int | None
) -> None:
    cache = filled_cache(num_layers=2)
    before = cache.planes.clone()
    q, k, v = new_rows(num_rows)
    attend = write_then_attend(
        cache,
        choice,
        slots=SLOTS,
        slots_B=torch.tensor(SLOTS),
        starts=[max(starts) + 2] * 2 if choice.is_batched else starts,  # there only a bound is asked for
        starts_B=torch.tensor(starts),
        num_rows=num_rows,
        windows=(2, window),
    )
    first, mixed = attend(0, q, k, v), attend(1, q, k, v)
    assert torch.equal(first, mixed) == (window == 2)
    for index, (slot, start) in enumerate(zip(SLOTS, starts, strict=True)):
        keys = torch.cat((before[1, 0, slot, :, :start], k[index].transpose(0, 1)), dim=1)
        values = torch.cat((before[1, 1, slot, :, :start], v[index].transpose(0, 1)), dim=1)
        seen = [
            [j <= start + i and (window is None or start + i - j < window) for j in range(start + num_rows)]
            for i in range(num_rows)
        ]
        expected = attention_reference(q[index].transpose(0, 1)[None], keys[None], values[None], torch.tensor(seen))
        torch.testing.assert_close(mixed[index], expected[0].transpose(0, 1))


@pytest.mark.parametrize("choice", CHOICES, ids=["per-request", "batched", "row-invariant"])
@pytest.mark.parametrize("window", [None, 1, 4, 9, 100])
@pytest.mark.parametrize("is_causal", [False, True])
def test_a_block_sees_its_context_and_itself(choice: AttentionChoice, window: int | None, is_causal: bool) -> None:
    cache = filled_cache()
    before = cache.planes.clone()
    lengths, num_rows = [11, 6], 4
    q, k, v = new_rows(num_rows)
    attend = attend_block(
        cache,
        choice,
        slots=SLOTS,
        slots_B=torch.tensor(SLOTS),
        lengths_B=torch.tensor(lengths),
        max_length=15,
        num_rows=num_rows,
        windows=(window,),
        causal=(is_causal,),
    )
    mixed = attend(0, q, k, v)
    for index, (slot, length) in enumerate(zip(SLOTS, lengths, strict=True)):
        old_k, old_v = before[0, :, slot, :, :length]
        keys = torch.cat((old_k, k[index].transpose(0, 1)), dim=1)
        values = torch.cat((old_v, v[index].transpose(0, 1)), dim=1)
        visible = torch.tensor(
            [
                [
                    (not is_causal or j <= length + i) and (window is None or abs(length + i - j) < window)
                    for j in range(length + num_rows)
                ]
                for i in range(num_rows)
            ]
        )
        expected = attention_reference(q[index].transpose(0, 1)[None], keys[None], values[None], visible)
        torch.testing.assert_close(mixed[index], expected[0].transpose(0, 1))
    assert torch.equal(cache.planes, before), "the block's own rows never enter the cache"


def test_row_invariant_attention_has_the_same_bits_row_by_row() -> None:
    q, k, v = new_rows(6)

    def run(pieces: list[int]) -> Tensor:
        torch.manual_seed(3)
        cache, outputs, start = filled_cache(), [], 5
        for size in pieces:
            rows = slice(start - 5, start - 5 + size)
            attend = write_then_attend(
                cache,
                ROW_INVARIANT,
                slots=[1],
                slots_B=torch.tensor([1]),
                starts=[start],
                starts_B=torch.tensor([start]),
                num_rows=size,
            )
            outputs.append(attend(0, q[:1, rows], k[:1, rows], v[:1, rows]))
            start += size
        return torch.cat(outputs, dim=1)

    assert torch.equal(run([6]), run([1] * 6))
    assert torch.equal(run([6]), run([4, 2]))


def test_a_padded_batch_is_not_spoiled_by_stale_rows_of_refused_drafts() -> None:
    cache = filled_cache()
    q, k, v = new_rows(3)
    options = {"slots": SLOTS, "slots_B": torch.tensor(SLOTS), "starts": [4, 9], "starts_B": torch.tensor([4, 9])}
    clean = write_then_attend(cache, BATCHED, **options, num_rows=3)(0, q, k, v)
    cache.planes[0, :, 2, :, 7:] = 1e30
    assert torch.equal(clean, write_then_attend(cache, BATCHED, **options, num_rows=3)(0, q, k, v))


def test_the_form_follows_the_device() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert AttentionChoice.for_device(cpu, is_row_invariant=False) == PER_REQUEST
    assert AttentionChoice.for_device(cuda, is_row_invariant=False) == BATCHED
    assert AttentionChoice.for_device(cuda, is_row_invariant=True) == ROW_INVARIANT
