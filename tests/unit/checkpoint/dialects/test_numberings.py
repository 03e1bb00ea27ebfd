"""Taps are numbered as layer outputs or as captured states, by the format and never by the value."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.unit.checkpoint.dialects.conftest import (
    full_contract,
)

from paceline.checkpoint.dialects import (
    contract_from_config,
    read_drafter,
    read_drafter_contract,
    write_drafter_config,
)

FIVE = (1, 9, 17, 25, 33)


def test_the_same_taps_in_every_numbering() -> None:
    """Section 6.4: one set of taps, written as layer outputs or as hidden states, by format and never by value."""
    base = dataclasses.replace(full_contract("zlab-dflash"), target_num_layers=36)
    zlab = write_drafter_config(base)
    assert zlab["dflash_config"]["target_layer_ids"] == [1, 9, 17, 25, 33]
    speculators = write_drafter_config(base, "speculators")
    assert speculators["aux_hidden_state_layer_ids"] == [2, 10, 18, 26, 34]
    assert write_drafter_config(base, "assistant")["target_layer_ids"] == [1, 9, 17, 25, 33]
    assert write_drafter_config(base, "torchspec")["target_layer_ids"] == [1, 9, 17, 25, 33]
    for dialect in ("zlab", "speculators", "assistant", "torchspec"):
        assert contract_from_config(write_drafter_config(base, dialect), "c").target_layer_ids == FIVE
    # the planted fault: one numbering read as the other is another drafter
    speculators["aux_hidden_state_layer_ids"] = [1, 9, 17, 25, 33]
    assert contract_from_config(speculators, "c").target_layer_ids == (0, 8, 16, 24, 32)


def test_taps_are_logged_in_both_numberings_once_for_each_load(
    golden_folder: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    folder = golden_folder("zlab-dflash")
    with caplog.at_level(logging.INFO, logger="paceline"):
        contract = read_drafter_contract(folder)
        contract_from_config(write_drafter_config(contract), "c")  # as an export reads back what it writes
        assert not caplog.records
        read_drafter(folder)
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert "after layers [1, 9, 17, 25, 33] (capture ids [2, 10, 18, 26, 34])" in record.getMessage()
    assert str(folder / "config.json") in record.getMessage()
