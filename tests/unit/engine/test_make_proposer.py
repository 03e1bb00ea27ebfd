"""A drafter as it is served: its own cache, its own way of drawing unless verification needs another."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.caches import fixed_tables
from tests.tiny import loaded

from paceline.engine.attends import AttentionChoice
from paceline.engine.make_proposer import make_proposer, refuse_another_target, spare_positions_of
from paceline.engine.proposal import BlockProposer
from paceline.engine.sequential_proposal import SequentialProposer
from paceline.engine.settings import EngineSettings
from paceline.errors import CompatibilityError

CHOICE = AttentionChoice(is_batched=False, is_row_invariant=True)


@pytest.mark.parametrize(("family", "spare"), [("dflash", 0), ("dflash2", 0), ("dspark", 0), ("eagle3", 4)])
def test_each_family_gets_its_proposer_and_a_cache_over_the_engines_blocks(family: Any, spare: int) -> None:
    target, drafter = loaded(drafter_family=family)
    settings = EngineSettings(max_num_seqs=3)
    proposer = make_proposer(target, drafter, CHOICE, settings, num_draft_tokens=4, tables=fixed_tables(3, 50))
    assert isinstance(proposer, SequentialProposer if family == "eagle3" else BlockProposer)
    assert proposer.num_draft_tokens == 4
    assert proposer.cache is not None
    assert spare_positions_of(drafter, 4) == spare
    assert proposer.cache.planes.shape[3:5] == (1 + 3 * 7, 8), "seven blocks for each slot, and the trash"


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        (EngineSettings(), "dflash/greedy"),
        (EngineSettings(draft_sample_method="probabilistic"), "dflash/probabilistic"),
        (EngineSettings(verify_method="match"), "dflash/greedy"),
        (EngineSettings(verify_method="coupled"), "dflash/probabilistic"),
    ],
)
def test_how_drafts_are_drawn(settings: EngineSettings, name: str) -> None:
    target, drafter = loaded()
    assert make_proposer(target, drafter, CHOICE, settings, num_draft_tokens=4, tables=fixed_tables(3, 50)).name == name


def test_a_drafter_of_another_target_is_refused() -> None:
    target, drafter = loaded()
    other, _ = loaded(seed=3)
    refuse_another_target(target, None)
    refuse_another_target(target, drafter)
    with pytest.raises(CompatibilityError, match="another target"):
        refuse_another_target(other, replace(drafter, checked_on=target.model))
