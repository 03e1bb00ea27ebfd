"""The probe's passes of EAGLE-3 against drafts computed from a whole text."""

from __future__ import annotations

import torch
from tests.tiny import tiny_drafter, tiny_target
from tests.unit.models.probing import PROBE

from paceline.engine.direct_drafts import CausalWindows
from paceline.models.drafters.eagle3 import Eagle3Drafter
from paceline.models.fingerprint import record_fingerprint
from paceline.models.probe.eagle3 import Eagle3Program


def test_both_passes_are_those_of_serving() -> None:
    target = tiny_target()
    drafter = tiny_drafter(target.contract, family="eagle3")
    assert isinstance(drafter, Eagle3Drafter)
    stored = record_fingerprint(target, drafter, PROBE)
    attend = CausalWindows(drafter.contract.layer_windows)
    following, hidden = stored["row_next_ids"].unsqueeze(0), stored["context"].float().unsqueeze(0)
    positions = stored["row_positions"].unsqueeze(0)
    out, recycled = drafter(drafter.embed(following, target), hidden, positions, attend)
    torch.testing.assert_close(out[0, -4:], stored["row_hidden"].float(), rtol=0.02, atol=0.02)
    draft = drafter.vocabulary.to_target_ids(drafter.logits(out[:, -1:], target).argmax(-1))
    assert draft.tolist() == stored["draft_ids"].tolist()
    following = torch.cat((following, draft), dim=1)
    hidden = torch.cat((hidden, recycled[:, -1:]), dim=1)
    positions = torch.cat((positions, positions[:, -1:] + 1), dim=1)
    second, _ = drafter(drafter.embed(following, target), hidden, positions, attend)
    torch.testing.assert_close(second[0, -1:], stored["second_hidden"].float(), rtol=0.03, atol=0.03)


def test_rows_stay_inside_short_tables() -> None:
    for num_positions in (12, 40, 512):
        target = tiny_target(max_position_embeddings=num_positions)
        drafter = tiny_drafter(target.contract, family="eagle3")
        assert isinstance(drafter, Eagle3Drafter)
        plan = Eagle3Program(drafter).plan(PROBE)
        rows = plan["row_positions"].tolist()
        assert rows == sorted(set(rows)) and len(rows) == len(plan["row_next_ids"])
