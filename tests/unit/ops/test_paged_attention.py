"""Attention over blocks: the definition against a formula in float64, row by row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.unit.ops.paged_cases import make_case
from torch import Tensor

from paceline.errors import ShapeError
from paceline.ops.paged_attention import PagedAttend, paged_attention, paged_attention_reference

FORMS: list[dict[str, Any]] = [
    {},
    {"window": 5},
    {"firsts": [0, 7]},
    {"firsts": [0, 9], "window": 30},
    {"has_tail": True},
    {"has_tail": True, "is_causal": False},
    {"has_tail": True, "is_causal": False, "window": 3},
    {"has_tail": True, "window": 17, "firsts": [0, 20]},
    {"has_tail": True, "is_causal": False, "has_sink": True},
    {"has_sink": True, "window": 2},
]


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("num_rows", [1, 5])
def test_the_definition_agrees_with_the_formula(form: dict[str, Any], num_rows: int) -> None:
    case = make_case([0, 37], num_rows, dtype=torch.float64, **form)
    found = paged_attention_reference(*case.arguments())
    torch.testing.assert_close(found, case.expected())


def test_arguments_by_name_reach_the_definition() -> None:
    case = make_case([4, 37], 3, has_tail=True, is_causal=False, window=9, firsts=[1, 3], has_sink=True)
    q, planes, table, slots, starts, tail, firsts, window, is_causal, sink, _ = case.arguments()
    found = paged_attention(
        q,
        planes,
        table,
        slots,
        starts,
        tail=tail,
        firsts_B=firsts,
        window=window,
        is_causal=is_causal,
        sink_N=sink,
    )
    torch.testing.assert_close(found, case.expected().float())
    empty = paged_attention(q[:0], planes, table, slots[:0], starts[:0])
    assert empty.shape == (0, *q.shape[1:])


def test_what_does_not_fit_is_refused() -> None:
    case = make_case([4, 37], 3, has_tail=True)
    q, planes, table, slots, starts, tail = case.arguments()[:6]
    for arguments, options, message in (
        ((q, planes[..., :8], table, slots, starts), {}, "planes has shape"),
        ((q[:, :, :5], planes, table, slots, starts), {}, "a divisor of 5"),
        ((q, planes, table[0], slots, starts), {}, "table has shape"),
        ((q, planes, table, slots[:1], starts), {}, "slots has shape"),
        ((q, planes, table, slots, starts[:1]), {}, "starts has shape"),
        ((q, planes, table, slots, starts), {"firsts_B": starts[:1]}, "firsts has shape"),
        ((q, planes, table, slots, starts), {"tail": tail[:, :, :, :-1]}, "tail has shape"),
        ((q, planes, table, slots, starts), {"sink_N": torch.zeros(2)}, "sink has shape"),
    ):
        with pytest.raises(ShapeError, match=message):
            paged_attention(*arguments, **options)


class Stored(PagedAttend):
    """Remembers where rows went."""

    def __init__(self, planes: Tensor, rows_T: Tensor) -> None:
        self.planes, self.rows_T = planes, rows_T

    def cells(self, layer: int) -> tuple[Tensor, Tensor]:
        return self.planes[layer], self.rows_T

    def stored(self, layer: int, q_BTNH: Tensor, *, sink_N: Tensor | None = None) -> Tensor:
        return q_BTNH + layer if sink_N is None else q_BTNH + sink_N[:, None]


def test_an_attend_that_is_called_stores_its_rows_first() -> None:
    planes = torch.zeros(2, 2, 3, 4, 8, 5)
    attend = Stored(planes, torch.tensor([9, 2, 31, 30]))
    q, k, v = torch.randn(2, 2, 6, 5), torch.randn(2, 2, 3, 5), torch.randn(2, 2, 3, 5)
    assert torch.equal(attend(1, q, k, v), q + 1)
    assert torch.equal(attend(1, q, k, v, sink_N=torch.ones(6)), q + 1)
    by_row = planes.flatten(3, 4)
    assert torch.equal(by_row[1, 0][:, [9, 2, 31, 30]], k.flatten(0, 1).transpose(0, 1))
    assert torch.equal(by_row[1, 1][:, [9, 2, 31, 30]], v.flatten(0, 1).transpose(0, 1))
    assert int((by_row != 0).any(-1).sum()) == 2 * 3 * 4, "nothing else is touched"
