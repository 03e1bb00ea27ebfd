"""The canary passes on a sound engine and dies of every fault that verification would hide."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from tests.tiny import loaded, tiny_prompts

import paceline.engine.step as step_module
import paceline.engine.target_cache as target_cache
from paceline.checkpoint.contract import DrafterFamily
from paceline.engine.block_planes import BlockPlanes
from paceline.engine.blocks import BlockPool
from paceline.engine.cache import KeyValueCache
from paceline.engine.engine import Engine, EngineSettings
from paceline.engine.proposal import BlockProposer, Rows
from paceline.engine.request import SamplingParameters
from paceline.engine.request_blocks import RequestBlocks
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
    assert (report.num_near_ties, report.num_steps, report.num_drafts) == (0, 12, 84)
    assert report.num_compared == report.num_equal > 12
    assert report.num_hit_tokens == 64
    assert report.num_compared_warm == report.num_equal_warm >= 8
    assert report.origin == {"target": f"tests/tiny-{family}", "drafter": "tests/tiny-drafter"}
    assert "84 known drafts judged, 0 refused;" in report.summary() and "a hit of 64 tokens" in report.summary()


@pytest.mark.parametrize("drafter_family", ["dflash2", "dspark", "eagle3"])
def test_every_family_passes(drafter_family: DrafterFamily) -> None:
    target, drafter = loaded(drafter_family=drafter_family)
    report = Engine(target, drafter, SETTINGS).canary()
    assert report.has_passed
    assert report.num_compared == report.num_equal > 12
    assert report.num_hit_tokens == 64 and report.num_compared_warm == report.num_equal_warm >= 8


@pytest.mark.parametrize("block_size", [4, 16])
def test_the_hit_is_of_two_blocks_whatever_their_size(block_size: int) -> None:
    target, drafter = loaded()
    report = Engine(target, drafter, replace(SETTINGS, block_size=block_size)).canary()
    assert report.has_passed and report.num_hit_tokens == 2 * block_size


def test_without_a_prefix_cache_there_is_no_third_part() -> None:
    target, drafter = loaded()
    report = Engine(target, drafter, replace(SETTINGS, prefix_cache=False)).canary()
    assert report.has_passed and report.num_compared > 8
    assert (report.num_hit_tokens, report.num_compared_warm) == (None, 0)


def test_a_target_too_short_for_a_hit_is_checked_without() -> None:
    target, drafter = loaded(target_changes={"max_position_embeddings": 64})
    report = Engine(target, drafter, SETTINGS).canary()
    assert report.has_passed and report.num_compared > 8 and report.num_hit_tokens is None


def test_a_running_engine_is_not_disturbed() -> None:
    """The canary makes engines of its own; even its steps may come between those of requests."""
    target, drafter = loaded()
    prompts, sampling = tiny_prompts([9, 4, 17]), SamplingParameters(max_tokens=20, ignore_eos=True)
    undisturbed = Engine(target, drafter, SETTINGS).generate(prompts, sampling)
    engine = Engine(target, drafter, SETTINGS)
    names = [engine.add_request(prompt, sampling) for prompt in prompts]
    pieces, num_pieces = engine.canary_steps(), 0
    while engine.has_unfinished():
        engine.step()
        num_pieces += next(pieces, "done") is None
    while next(pieces, "done") is None:
        num_pieces += 1
    assert num_pieces > 20
    results = [engine.result(name) for name in names]
    assert [result.token_ids for result in results] == [result.token_ids for result in undisturbed]
    accepted = [[record.num_accepted for record in result.trace.records] for result in results]
    assert accepted == [[record.num_accepted for record in result.trace.records] for result in undisturbed]


def test_without_a_drafter_the_oracle_still_runs() -> None:
    target, _ = loaded()
    report = Engine(target).canary()
    assert report.has_passed
    assert (report.num_compared, report.num_steps, report.num_hit_tokens) == (0, 9, None)


def shift_target_positions(patch: pytest.MonkeyPatch) -> None:
    """The anchor is run one position too far, but only in blocks."""
    original = target_cache.write_then_attend

    def shifted(*args, num_rows, starts, starts_B, **kwargs):
        far = 1 if num_rows > 1 and starts[0] > 0 else 0
        starts = [start + far for start in starts]
        return original(*args, num_rows=num_rows, starts=starts, starts_B=starts_B + far, **kwargs)

    patch.setattr(target_cache, "write_then_attend", shifted)


def commit_one_too_many(patch: pytest.MonkeyPatch) -> None:
    """One refused row becomes readable."""
    original = step_module.SlotState.commit

    def greedy_commit(self, rows, verdict):
        return original(self, rows._replace(starts_B=rows.starts_B + 1), verdict)

    patch.setattr(step_module.SlotState, "commit", greedy_commit)


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
        is_served = type(attend).__name__ != "_DirectBlock"  # of canary_drafts.py
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


def hit_context(patch: pytest.MonkeyPatch, spoil: Callable[[KeyValueCache, list[int]], None]) -> None:
    """Do something to the draft context of the blocks of a hit."""
    original = RequestBlocks.admit

    def admit(self, request, slot):
        is_admitted = original(self, request, slot)
        if is_admitted:
            for cache in self._planes.caches[1:]:
                spoil(cache, request.held.blocks[: request.held.num_hit // self.pool.block_size])
        return is_admitted

    patch.setattr(RequestBlocks, "admit", admit)


def hit_without_context(patch: pytest.MonkeyPatch) -> None:
    """A hit restores the target's keys alone."""
    hit_context(patch, lambda cache, blocks: cache.clear_blocks(blocks))


def hit_with_another_context(patch: pytest.MonkeyPatch) -> None:
    """The draft context behind a hit is that of a neighbour."""
    hit_context(patch, lambda cache, blocks: cache.copy_blocks(blocks[1:], blocks[:1]) if blocks else None)


def move_the_target_alone(patch: pytest.MonkeyPatch) -> None:
    """Blocks are copied into one run, but for the drafter's."""
    patch.setattr(BlockPlanes, "copy", lambda self, source, target: self.caches[0].copy_blocks(source, target))


def read_no_context_of_a_hit(patch: pytest.MonkeyPatch) -> None:
    """Blocks are published as if they had no draft context."""
    original = BlockPool.publish

    def publish(self, *args, has_draft_context, **options):
        original(self, *args, has_draft_context=False, **options)

    patch.setattr(BlockPool, "publish", publish)


def never_hit(patch: pytest.MonkeyPatch) -> None:
    """Nothing is ever found."""
    patch.setattr(BlockPool, "match", lambda self, *args, **options: [])


FAULTS_ANYWHERE = [
    shift_target_positions,
    commit_one_too_many,
    shift_context_rows,
    write_context_once,
    skip_prompt_context_of_used_slots,
    shift_block_positions,
    read_a_refused_row,
    draft_from_the_old_anchor,
]
FAULTS_OF_HITS = [
    hit_without_context,
    hit_with_another_context,
    move_the_target_alone,
    read_no_context_of_a_hit,
    never_hit,
]


@pytest.fixture(scope="module")
def sound() -> Engine:
    """One whose canary passes; each canary makes engines of its own, and leaves this one as it is."""
    engine = Engine(*loaded("qwen3"), SETTINGS)
    assert engine.canary().has_passed
    return engine


@pytest.mark.parametrize("plant", FAULTS_ANYWHERE)
def test_every_planted_fault_is_found(plant, sound: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    report = sound.canary()
    assert not report.has_passed, plant.__doc__


@pytest.mark.parametrize("plant", FAULTS_OF_HITS)
def test_faults_of_hits_show_behind_the_hit_alone(plant, monkeypatch: pytest.MonkeyPatch) -> None:
    """So nothing but the third part could find them."""
    target, drafter = loaded("qwen3")
    plant(monkeypatch)
    report = Engine(target, drafter, SETTINGS).canary()
    assert not report.has_passed, plant.__doc__
    assert report.refusals == () and report.num_equal == report.num_compared and report.draft_distance < 1e-3
    assert all("prefix" in fault for fault in report.faults())


def test_a_near_tie_is_not_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ids with the same scores: block and single pass may choose differently, and that proves nothing."""
    target, _ = loaded("qwen3")
    (before,) = Engine(target).generate([[9, 8, 7]], SamplingParameters(max_tokens=12))
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
