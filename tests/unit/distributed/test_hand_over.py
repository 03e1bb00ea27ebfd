"""The message between stages: its size, and that it brings what was put in."""

from __future__ import annotations

import pytest
import torch
from tests.tiny_kimi import kimi_contract, small_kimi_config

from paceline.checkpoint.contract import CaptureId
from paceline.distributed.hand_over import num_bank_rows, pack, unpack
from paceline.models.targets.stage import HandOver


@pytest.mark.parametrize(("border", "num_rows"), [(1, 1), (8, 1), (9, 2), (16, 2), (31, 4)])
def test_closed_blocks_cross(border: int, num_rows: int) -> None:
    assert num_bank_rows(kimi_contract(small_kimi_config(32, 8)), border) == num_rows
    assert num_bank_rows(kimi_contract(small_kimi_config(32, None)), border) == 0


@pytest.mark.parametrize("has_bank", [True, False])
@pytest.mark.parametrize("ids", [(), (0, 3, 7)])
def test_a_message_brings_what_was_put_in(has_bank: bool, ids: tuple[int, ...]) -> None:
    values = iter(torch.randn(6, 2, 3, 16).bfloat16())
    bank = torch.randn(2, 3, 2, 16).bfloat16() if has_bank else None
    taps = {CaptureId(capture): next(values) for capture in reversed(ids)}
    handed = HandOver(next(values), bank, taps)
    message = pack(handed)
    assert message.shape == (2, 3, 1 + 2 * has_bank + len(ids), 16) and message.dtype == torch.bfloat16
    found = unpack(message, 2 * has_bank, [CaptureId(capture) for capture in ids], has_bank=has_bank)
    assert torch.equal(found.prefix_BTD, handed.prefix_BTD)
    assert (found.bank_BTJD is None) == (bank is None)
    assert bank is None or (found.bank_BTJD is not None and torch.equal(found.bank_BTJD, bank))
    assert found.taps.keys() == taps.keys() and all(torch.equal(found.taps[at], taps[at]) for at in taps)
