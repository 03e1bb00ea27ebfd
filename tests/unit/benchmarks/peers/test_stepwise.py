from __future__ import annotations

from benchmarks.peers.stepwise import Agreement, DraftStep, agreement_row, compare_steps, our_steps, steps_of_drafts
from tests import tiny

from paceline.engine.engine import Engine, EngineSettings
from paceline.engine.request import SamplingParameters

STEPS = [DraftStep(4, (7, 8), 1), DraftStep(6, (9, 9), 0), DraftStep(7, (1, 2), 2)]


def test_the_next_anchor_says_what_was_accepted() -> None:
    drafts = [(4, (7, 8)), (6, (9, 9)), (7, (1, 2)), (10, (3,)), (11, (5, 5))]
    assert steps_of_drafts(drafts, 2) == STEPS  # neither the short block nor the last one
    assert steps_of_drafts(drafts[:1], 2) == []


def test_equal_steps_agree() -> None:
    found = compare_steps([*STEPS, DraftStep(10, (0, 0), 0)], STEPS)
    assert found == Agreement(1, 3, 3, 3, 3, 3, 3) and found.is_complete
    assert (found + found).num_steps == 6 and (found + found).is_complete


def test_a_difference_is_counted_where_it_is() -> None:
    other_draft = [STEPS[0], DraftStep(6, (9, 8), 0), STEPS[2]]
    assert compare_steps(other_draft, STEPS) == Agreement(1, 3, 2, 3, 3, 3, 3)
    other_count = [DraftStep(4, (7, 8), 0), *STEPS[1:]]
    assert compare_steps(other_count, STEPS) == Agreement(1, 3, 3, 2, 3, 2, 3)
    missing = compare_steps(STEPS[1:], STEPS)
    assert missing == Agreement(1, 3, 2, 2, 2, 2, 3) and not missing.is_complete
    assert not compare_steps(STEPS, []).is_complete  # nothing to compare is no agreement


def test_row() -> None:
    row = agreement_row(Agreement(1, 3, 2, 3, 3, 3, 3), peer="p", version="1", drafter="d", target="t")
    assert row == {
        "peer": "p",
        "version": "1",
        "drafter": "d",
        "target": "t",
        "num_prompts": 1,
        "num_steps": 3,
        "num_same_proposals": 2,
        "same_proposals": False,
        "same_accepted": True,
        "acceptance_ours": 2.0,
        "acceptance_peer": 2.0,
        "as_expected": False,
    }


def test_our_steps_are_those_of_the_trace() -> None:
    target, drafter = tiny.loaded()
    engine = Engine(target, drafter, EngineSettings(max_num_seqs=1))
    result = engine.generate(tiny.tiny_prompts([6]), SamplingParameters(max_tokens=9, ignore_eos=True))[0]
    steps = our_steps(result)
    assert steps[0].anchor_position == 6
    assert all(len(step.proposed_ids) == 7 for step in steps)  # whole blocks to the end of the budget
    assert [step.num_accepted for step in steps] == [record.num_verified_accepted for record in result.trace.records]
