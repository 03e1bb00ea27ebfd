"""Which keys a draft block sees under a window, here and in other programs: spec 8.8, and docs/peers.md.

Values are unit vectors, so that the mixture of a row names the positions that it saw.
"""

from __future__ import annotations

import pytest
import torch
from tests.caches import fixed_tables, make_cache

from paceline.engine.attends import AttentionChoice, attend_block

WINDOW, ANCHOR, NUM_ROWS = 4, 10, 4
LENGTH = ANCHOR + NUM_ROWS
CHOICES = {
    "per-request": AttentionChoice(is_batched=False, is_row_invariant=False),
    "batched": AttentionChoice(is_batched=True, is_row_invariant=False),
    "paged": AttentionChoice(is_batched=True, is_row_invariant=False, is_paged=True),
    "row-invariant": AttentionChoice(is_batched=False, is_row_invariant=True),
}
# (first, last) position that each row of the block sees
OURS = {False: [(7, 13), (8, 13), (9, 13), (10, 13)], True: [(7, 10), (8, 11), (9, 12), (10, 13)]}
TRAINERS = {False: [(6, 13)] * 4, True: [(6, 10), (6, 11), (6, 12), (6, 13)]}  # speculators: context from the anchor on
TRANSFORMERS = [(6, 13), (7, 13), (8, 13), (9, 13)]  # the distance is inclusive


def seen(choice: AttentionChoice, window: int, *, is_causal: bool) -> list[tuple[int, int]]:
    cache = make_cache(fixed_tables(1, LENGTH + 2), num_kv_heads=1, head_size=16)
    values = torch.eye(16)[:LENGTH]
    cache.write_rows(0, 0, 0, torch.zeros(ANCHOR, 1, 16), values[:ANCHOR, None])
    attend = attend_block(
        cache,
        choice,
        slots=[0],
        slots_B=torch.tensor([0]),
        lengths_B=torch.tensor([ANCHOR]),
        max_length=ANCHOR,
        num_rows=NUM_ROWS,
        windows=[window],
        causal=[is_causal],
    )
    zeros = torch.zeros(1, NUM_ROWS, 1, 16)
    mixed_QS = attend(0, zeros, zeros, values[None, ANCHOR:, None])[0, :, 0]
    found = []
    for row in mixed_QS:
        positions = row.nonzero()[:, 0].tolist()
        assert positions == list(range(positions[0], positions[-1] + 1))  # a window has no holes
        found.append((positions[0], positions[-1]))
    return found


@pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES)
@pytest.mark.parametrize("is_causal", [False, True])
def test_a_row_sees_less_than_the_window_on_either_side(choice: AttentionChoice, is_causal: bool) -> None:
    assert seen(choice, WINDOW, is_causal=is_causal) == OURS[is_causal]


@pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES)
def test_the_same_number_means_other_keys_elsewhere(choice: AttentionChoice) -> None:
    assert seen(choice, WINDOW, is_causal=False) not in (TRAINERS[False], TRANSFORMERS)
    assert seen(choice, WINDOW, is_causal=True) != TRAINERS[True]
    # one more token is exactly what assisted generation of transformers sees
    assert seen(choice, WINDOW + 1, is_causal=False) == TRANSFORMERS


def test_far_rows_of_a_block_longer_than_the_window_are_lost() -> None:
    assert seen(CHOICES["per-request"], 3, is_causal=False) == [(8, 12), (9, 13), (10, 13), (11, 13)]
