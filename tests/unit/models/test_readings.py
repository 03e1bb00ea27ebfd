"""The same weights under another contract: shared, complete, and with the tables that the contract calls for."""

from __future__ import annotations

import pytest
import torch
from tests.tiny import tiny_drafter, tiny_target, wrap_drafter

from paceline.checkpoint.contract import DrafterFamily, RopeSettings
from paceline.errors import CheckpointError
from paceline.models.positions import position_table
from paceline.models.readings import gains_plus_one, positions_of, reread

CONTRACT = tiny_target().contract


@pytest.mark.parametrize("family", ["dflash", "dflash2", "dspark", "eagle3"])
def test_nothing_is_copied_and_nothing_is_lost(family: DrafterFamily) -> None:
    drafter = wrap_drafter(tiny_drafter(CONTRACT, family=family)).model
    other = reread(drafter)
    held = dict(drafter.named_parameters())
    assert {name for name in held if "_stacked" not in name} == {name for name, _ in other.named_parameters()}
    for name, parameter in other.named_parameters():
        assert parameter.data_ptr() == held[name].data_ptr() and not parameter.is_meta
    assert not any(buffer.is_meta for buffer in other.buffers())
    assert positions_of(other).position_table is positions_of(drafter).position_table


def test_a_new_rope_gets_a_new_table() -> None:
    drafter = tiny_drafter(CONTRACT)
    rope = RopeSettings(theta=77.0)
    other = reread(drafter, rope=rope, max_position_embeddings=900)
    assert torch.equal(positions_of(other).position_table, position_table(rope, 16, 900))
    longer = reread(drafter, max_position_embeddings=900)
    assert torch.equal(positions_of(longer).position_table[:512], positions_of(drafter).position_table)


def test_norms_that_only_the_new_contract_has_get_gains_of_one() -> None:
    without = reread(tiny_drafter(CONTRACT), has_tap_norm=False)
    assert not [name for name, _ in without.named_parameters() if "fc_norm" in name]
    again = reread(without, has_tap_norm=True)
    assert torch.equal(again.get_parameter("backbone.fc_norm.1.weight"), torch.ones(64))


def test_tables_travel_and_dropped_copies_stay_dropped() -> None:
    drafter = tiny_drafter(CONTRACT, draft_vocab_size=256, has_own_head=True, has_own_embedding=True)
    drafter.vocabulary.embed_tokens = None  # equal to the target's, so a load dropped it
    other = reread(drafter)
    assert other.vocabulary.embed_tokens is None and other.vocabulary.lm_head is not None
    assert other.vocabulary.target_ids_V is drafter.vocabulary.target_ids_V


def test_what_is_not_there_or_not_drafted_is_refused() -> None:
    drafter = tiny_drafter(CONTRACT)
    with pytest.raises(ValueError, match="lm_head"):
        reread(drafter, has_own_head=True)
    with pytest.raises(ValueError, match="no tensor of shape"):
        reread(drafter, intermediate_size=128)
    with pytest.raises(CheckpointError, match="anchor_sampling"):
        reread(drafter, layout="anchor_sampling")


def test_gains_plus_one_touch_norms_alone() -> None:
    drafter = tiny_drafter(CONTRACT)
    other = gains_plus_one(drafter)
    for name, parameter in drafter.named_parameters():
        difference = other.get_parameter(name) - parameter
        assert torch.all(difference == 0) or ("norm" in name and torch.allclose(difference, torch.ones(())))
