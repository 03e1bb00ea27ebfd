"""The canary passes on a sound engine and dies of every fault that verification would hide."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.tiny import loaded

import paceline.engine.engine as engine_module
import paceline.engine.step as step_module
from paceline.engine.engine import Engine, EngineSettings
from paceline.engine.proposal import BlockProposer, Rows
from paceline.engine.slots import SlotState
from paceline.models.drafters.backbone import DrafterBackbone

SETTINGS = EngineSettings(max_num_seqs=2)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("linear_mode", ["row_invariant", "plain"])
def test_a_sound_engine_passes(family: str, linear_mode: str) -> None:
    target, drafter = loaded(family, linear_mode=linear_mode, layer_windows=(6, None), layer_causal=(True, False))
    report = Engine(target, drafter, SETTINGS).canary()
    assert report.has_passed
    assert report.refusals == ()
    assert (report.num_near_ties, report.num_steps, report.num_drafts) == (0, 9, 63)
    assert report.num_compared == report.num_equal > 50


def test_without_a_drafter_the_oracle_still_runs() -> None:
    target, _ = loaded()
    report = Engine(target).canary()
    assert report.has_passed
    assert (report.num_compared, report.num_steps) == (0, 9)


def shift_target_positions(patch: pytest.MonkeyPatch) -> None:
    """The anchor is run one position too far, but only in blocks."""
    original = step_module.write_then_attend

    def shifted(*args, num_rows, starts, starts_B, **kwargs):
        far = 1 if num_rows > 1 and starts[0] > 0 else 0
        starts = [start + far for start in starts]
        return original(*args, num_rows=num_rows, starts=starts, starts_B=starts_B + far, **kwargs)

    patch.setattr(step_module, "write_then_attend", shifted)


def commit_one_too_many(patch: pytest.MonkeyPatch) -> None:
    """One refused row becomes readable."""
    original = step_module.commit

    def greedy_commit(state, slots_B, lengths_B, anchors_B):
        original(state, slots_B, lengths_B + 1, anchors_B)

    patch.setattr(step_module, "commit", greedy_commit)


def shift_context_rows(patch: pytest.MonkeyPatch) -> None:
    """Context rows of decode steps land one position late."""
    original = BlockProposer.write_context

    def late(self, rows: Rows, taps, positions_BT):
        if rows.starts[0] == 0:
            return original(self, rows, taps, positions_BT)
        return original(self, replace(rows, starts=[start + 1 for start in rows.starts]), taps, positions_BT + 1)

    patch.setattr(BlockProposer, "write_context", late)


def write_context_once(patch: pytest.MonkeyPatch) -> None:
    """Rows of a block are written only as far as its anchor, as if every draft were refused."""
    original = BlockProposer.write_context

    def anchor_only(self, rows: Rows, taps, positions_BT):
        if rows.starts[0] == 0:
            return original(self, rows, taps, positions_BT)
        return original(self, replace(rows, num_rows=1), [tap[:, :1] for tap in taps], positions_BT[:, :1])

    patch.setattr(BlockProposer, "write_context", anchor_only)


def skip_prompt_context_of_used_slots(patch: pytest.MonkeyPatch) -> None:
    """A slot's second owner drafts from the first owner's context."""
    original, seen = BlockProposer.write_context, set()

    def stale(self, rows: Rows, taps, positions_BT):
        if rows.starts[0] == 0:
            if (id(self), rows.slots[0]) in seen:
                return
            seen.add((id(self), rows.slots[0]))
        original(self, rows, taps, positions_BT)

    patch.setattr(BlockProposer, "write_context", stale)


def shift_block_positions(patch: pytest.MonkeyPatch) -> None:
    """The draft block sits one position too far."""
    original = DrafterBackbone.forward

    def shifted(self, embeddings_BQD, positions_BQ, attend):
        is_served = type(attend).__name__ != "_DirectBlock"
        return original(self, embeddings_BQD, positions_BQ + is_served, attend)

    patch.setattr(DrafterBackbone, "forward", shifted)


def read_a_refused_row(patch: pytest.MonkeyPatch) -> None:
    """The block's context is one row too long."""
    import paceline.engine.proposal as proposal_module

    original = proposal_module.attend_block

    def longer(*args, lengths_B, **kwargs):
        return original(*args, lengths_B=lengths_B + 1, **kwargs)

    patch.setattr(proposal_module, "attend_block", longer)


def draft_from_the_old_anchor(patch: pytest.MonkeyPatch) -> None:
    """The block opens with the token before the anchor."""
    original = BlockProposer.propose

    def old(self, rows: Rows, state: SlotState, *, all_greedy, num_drafts=None):
        anchors = state.anchors.clone()
        state.anchors[rows.slots_B] = (state.anchors[rows.slots_B] + 1) % 512
        proposal = original(self, rows, state, all_greedy=all_greedy, num_drafts=num_drafts)
        state.anchors.copy_(anchors)
        return proposal

    patch.setattr(BlockProposer, "propose", old)


@pytest.mark.parametrize(
    "plant",
    [
        shift_target_positions,
        commit_one_too_many,
        shift_context_rows,
        write_context_once,
        skip_prompt_context_of_used_slots,
        shift_block_positions,
        read_a_refused_row,
        draft_from_the_old_anchor,
    ],
)
def test_every_planted_fault_is_found(plant, monkeypatch: pytest.MonkeyPatch) -> None:
    target, drafter = loaded("qwen3")
    engine = Engine(target, drafter, SETTINGS)
    assert engine.canary().has_passed
    plant(monkeypatch)
    report = engine.canary()
    assert not report.has_passed, plant.__doc__


def test_a_near_tie_is_not_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ids with the same scores: block and single pass may choose differently, and that proves nothing."""
    target, _ = loaded("qwen3")
    (before,) = Engine(target).generate([[9, 8, 7]], engine_module.SamplingParameters(max_tokens=12))
    common = max(set(before.token_ids), key=before.token_ids.count)
    with torch.no_grad():
        target.model.lm_head.weight[500] = target.model.lm_head.weight[common]
    original = step_module.judge

    def other_choice(logits_BLV, proposal, *args, **options):
        if proposal.ids_BK.shape[1] > 0:  # only blocks prefer id 500
            logits_BLV = logits_BLV.clone()
            logits_BLV[..., 500] += 1e-6
        return original(logits_BLV, proposal, *args, **options)

    monkeypatch.setattr(step_module, "judge", other_choice)
    report = Engine(target).canary()
    assert report.has_passed
