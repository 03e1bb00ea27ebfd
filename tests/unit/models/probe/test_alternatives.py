"""Readings are complete, distinct, and leave the declared one out."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from tests.tiny import tiny_drafter, tiny_target
from tests.unit.models.probing import PROBE

from paceline.checkpoint.contract import DrafterFamily
from paceline.errors import PacelineError
from paceline.models.drafters.block_drafter import BlockDrafter
from paceline.models.fingerprint import record_fingerprint
from paceline.models.probe.alternatives import alternatives_of, with_convolution_length
from paceline.models.probe.programs import program_of
from paceline.models.probe.stages import Stage


@pytest.mark.parametrize("family", ["dflash", "dflash2", "dspark", "eagle3"])
def test_no_reading_is_the_declared_one(family: DrafterFamily) -> None:
    target = tiny_target()
    drafter = tiny_drafter(target.contract, family=family)
    stored = record_fingerprint(target, drafter, PROBE)
    stages: tuple[Stage, ...] = ("context", "keys", "rows", "logits")
    for stage in stages:
        alternatives = list(alternatives_of(stage, drafter, stored, {}))
        assert len({alternative.text for alternative in alternatives}) == len(alternatives)
        for alternative in alternatives:
            assert alternative.fix
            try:
                made = alternative.make()
            except (PacelineError, ValueError):
                continue
            is_same = dataclasses.asdict(made.contract) == dataclasses.asdict(drafter.contract)
            assert not is_same or made is not drafter or alternative.stored is not stored


def test_a_convolution_told_of_its_own_block_is_the_same() -> None:
    target = tiny_target()
    drafter = tiny_drafter(target.contract, family="dflash2")
    assert isinstance(drafter, BlockDrafter)
    stored = record_fingerprint(target, drafter, PROBE)
    same = with_convolution_length(drafter, drafter.contract.block_size)
    declared, told = (program_of(d).run("rows", target, stored) for d in (drafter, same))
    assert all(torch.equal(declared[name], told[name]) for name in declared)
