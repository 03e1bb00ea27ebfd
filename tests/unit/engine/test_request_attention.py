"""Masks on absolute positions, and attention of several requests over keys of their own."""

from __future__ import annotations

import pytest
import torch
from tests.unit.engine.attend_cases import HEADS, KV_HEADS, SIZE, expected_rows, new_rows

from paceline.engine.request_attention import Masks, attend_each, attend_row_invariant, visible_keys


def seen(start: int, first: int, num_rows: int, window: int | None, is_causal: bool) -> list[list[bool]]:
    return [
        [
            (j <= start + i or not is_causal) and (window is None or abs(start + i - j) < window)
            for j in range(first, start + num_rows)
        ]
        for i in range(num_rows)
    ]


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("window", [None, 1, 3, 6, 7, 50])
@pytest.mark.parametrize(("start", "first", "num_rows"), [(4, 0, 3), (4, 2, 3), (4, 4, 3), (6, 0, 1), (0, 0, 7)])
def test_a_mask_hides_what_the_rule_hides_and_is_none_where_that_is_nothing(
    start: int, first: int, num_rows: int, window: int | None, is_causal: bool
) -> None:
    rule = torch.tensor(seen(start, first, num_rows, window, is_causal))
    assert torch.equal(
        visible_keys(
            torch.arange(start, start + num_rows), torch.arange(first, start + num_rows), window, is_causal=is_causal
        ),
        rule,
    )
    q = torch.randn(1, num_rows, HEADS, SIZE)
    visible = Masks(num_rows, KV_HEADS, is_bool=True).of(start, first, window, q, is_causal=is_causal)
    bias = Masks(num_rows, KV_HEADS, is_bool=False).of(start, first, window, q, is_causal=is_causal)
    if rule.all():
        assert visible is None or visible.all()
        assert bias is None or not bias.any()
    else:
        assert torch.equal(visible, rule)
        assert torch.equal(bias == 0, rule.repeat(HEADS // KV_HEADS, 1)[None, None])
        assert bias[bias != 0].eq(-torch.inf).all()


def test_a_mask_is_made_once_for_each_of_its_kinds() -> None:
    masks, q = Masks(3, KV_HEADS, is_bool=False), torch.randn(1, 3, HEADS, SIZE)
    kinds = [(4, 0, None, True), (5, 0, None, True), (5, 1, None, True), (5, 0, 2, True), (5, 0, 2, False)]
    made = [masks.of(start, first, window, q, is_causal=causal) for start, first, window, causal in kinds]
    assert len({id(mask) for mask in made}) == len(kinds)
    again = [masks.of(start, first, window, q, is_causal=causal) for start, first, window, causal in kinds]
    assert all(one is other for one, other in zip(made, again, strict=True))
    cut = [masks.tiles_of(start, first, window, q, is_causal=causal) for start, first, window, causal in kinds]
    again = [masks.tiles_of(start, first, window, q, is_causal=causal) for start, first, window, causal in kinds]
    assert all(one is other for one, other in zip(cut, again, strict=True))
    for tiles, (start, first, window, causal) in zip(cut, kinds, strict=True):
        assert torch.equal(tiles.visible_TS, torch.tensor(seen(start, first, 3, window, causal)))


@pytest.mark.parametrize("num_rows", [1, 4])
@pytest.mark.parametrize("num_requests", [1, 3])
def test_each_request_attends_over_keys_of_its_own(num_requests: int, num_rows: int) -> None:
    q, _, _ = new_rows(num_rows, num_requests)
    starts = [5, 0, 9][:num_requests]
    contexts = [tuple(torch.randn(2, 1, KV_HEADS, start + num_rows, SIZE)) for start in starts]
    for is_row_invariant in (False, True):
        masks = Masks(num_rows, KV_HEADS, is_bool=False)
        if is_row_invariant:
            rows = [masks.tiles_of(start, 0, None, q, is_causal=True) for start in starts]
            mixed = attend_row_invariant(q, iter(contexts), rows)
        else:
            each = [masks.of(start, 0, None, q, is_causal=True) for start in starts]
            mixed = attend_each(q, iter(contexts), each, KV_HEADS)
        assert mixed.shape == q.shape
        for index, (start, (keys, values)) in enumerate(zip(starts, contexts, strict=True)):
            rule = seen(start, 0, num_rows, None, True)
            torch.testing.assert_close(mixed[index], expected_rows(q[index], keys[0], values[0], rule))


def test_a_request_without_keys_of_its_own_is_noticed() -> None:
    q, k, v = new_rows(2)
    with pytest.raises(ValueError, match="zip"):
        attend_each(q, [(k[:1].transpose(1, 2), v[:1].transpose(1, 2))], [None, None], KV_HEADS)
