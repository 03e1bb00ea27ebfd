"""Mild faults within a stage's tolerance are still found; rounding never is."""

from __future__ import annotations

import pytest
import torch
from tests.tiny import tiny_drafter, tiny_target, wrap_drafter, wrap_target
from tests.unit.models.probing import PROBE, without_hints

from paceline.checkpoint.contract import DrafterFamily
from paceline.models.drafters.table import Drafter
from paceline.models.fingerprint import record_fingerprint, replay_fingerprint
from paceline.models.probe import search
from paceline.models.probe.programs import program_of
from paceline.models.probe.search import is_beaten, search_stage
from paceline.models.probe.stages import StageResult, compare_stage
from paceline.models.readings import reread
from paceline.models.targets.dense import DenseTarget


def logits_result(target: DenseTarget, drafter: Drafter, stored: dict[str, torch.Tensor]) -> StageResult:
    return compare_stage("logits", program_of(drafter).run("logits", target, stored), stored)


def test_a_soft_cap_that_hardly_bends_is_found() -> None:
    """Its error is one that a quantised head could have; only the other reading shows that it is not."""
    target = tiny_target()
    drafter = tiny_drafter(target.contract)
    stored = without_hints(record_fingerprint(target, drafter, PROBE))
    highest = float(stored["logit_values"].abs().max())
    capped = reread(drafter, final_logit_softcapping=1.6 * highest)
    result = logits_result(target, capped, stored)
    assert result.is_ok and 0.3 < result.error < 1.0
    assert is_beaten(target, capped, stored, result)
    assert not is_beaten(target, drafter, stored, logits_result(target, drafter, stored))
    assert [failed.stage for failed in replay_fingerprint(target, capped, stored).failed] == ["logits"]


@pytest.mark.parametrize("family", ["dflash", "dflash2", "dspark", "eagle3"])
def test_rounding_beats_nothing(family: DrafterFamily, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if every stage were asked about, however small its error."""
    monkeypatch.setattr(search, "_DOUBTFUL", 0.0)
    plain = tiny_target()
    stored = record_fingerprint(plain, tiny_drafter(plain.contract, family=family), PROBE)
    target = wrap_target(tiny_target().to(torch.bfloat16), "packed").model
    drafter = wrap_drafter(tiny_drafter(plain.contract, family=family).to(torch.bfloat16), "packed").model
    for result in replay_fingerprint(target, drafter, stored).results[1:]:
        assert result.is_ok
        assert result.error == 0 or not is_beaten(target, drafter, stored, result)


def test_a_reading_that_is_no_closer_is_not_taken() -> None:
    """Weights are to blame where every reading is about as far off."""
    target = tiny_target()
    stored = without_hints(record_fingerprint(target, tiny_drafter(target.contract), PROBE))
    other = tiny_drafter(target.contract, seed=4)
    result = compare_stage("keys", program_of(other).run("keys", target, stored), stored)
    found = search_stage(target, other, stored, result)
    assert not found.is_named and "its weights begin to differ here, in k_proj" in found.cause
