"""Factors and gains that are solved for."""

from __future__ import annotations

import pytest
import torch
from tests.tiny import tiny_drafter, tiny_target
from tests.unit.models.probing import PROBE

from paceline.models.fingerprint import record_fingerprint
from paceline.models.probe.fits import fit_embeddings, fit_fc_input, fit_logits, fit_values, scale_between
from paceline.models.probe.programs import program_of
from paceline.models.readings import reread


def test_the_factor_between_two_tensors() -> None:
    found = torch.tensor([1.0, -2.0, 3.0])
    assert scale_between(found, found * 2.5) == pytest.approx(2.5)
    assert scale_between(found, torch.tensor([3.0, 0.0, -1.0])) == pytest.approx(0.0)
    assert scale_between(torch.zeros(3), found) == 0.0


def test_a_scale_on_values_alone() -> None:
    target = tiny_target()
    drafter = tiny_drafter(target.contract)
    stored = record_fingerprint(target, reread(drafter, attention_value_scale=0.7), PROBE)
    found = fit_values(drafter, program_of(drafter).run("keys", target, stored), stored)
    assert found is not None and "attention_value_scale 0.7; the config says 1" in found.cause
    interleaved = reread(drafter, is_neox_style=False)
    assert fit_values(interleaved, program_of(interleaved).run("keys", target, stored), stored) is None


def test_nothing_is_solved_for_where_nothing_is_wrong() -> None:
    target = tiny_target()
    drafter = tiny_drafter(target.contract)
    stored = record_fingerprint(target, drafter, PROBE)
    program = program_of(drafter)
    assert fit_embeddings(target, drafter, stored) is None
    assert fit_fc_input(drafter, stored) is None
    assert fit_logits(drafter, program.run("logits", target, stored), stored) is None
    without = reread(drafter, has_tap_norm=False)
    assert fit_fc_input(without, record_fingerprint(target, without, PROBE)) is None


def test_an_embedding_of_ones_own() -> None:
    target = tiny_target()
    own = tiny_drafter(target.contract, has_own_embedding=True)
    stored = record_fingerprint(target, own, PROBE)
    borrowed = tiny_drafter(target.contract)
    found = fit_embeddings(target, borrowed, stored)
    assert found is not None and "an embedding of its own" in found.cause
