"""The probe's own attention and blocks against those of training."""

from __future__ import annotations

import pytest
import torch
from tests.tiny import tiny_drafter, tiny_target
from tests.unit.models.probing import PROBE

from paceline.checkpoint.contract import DrafterFamily
from paceline.models.drafters.block_drafter import BlockDrafter
from paceline.models.fingerprint import record_fingerprint
from paceline.models.probe.block import BlockProgram, visible_keys
from paceline.training.anchors import Blocks, block_visibility
from paceline.training.objective import draft_blocks


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 4])
def test_what_rows_see_is_what_they_see_in_training(window: int | None, causal: bool) -> None:
    anchors = torch.tensor([[3], [7]])
    keys = torch.arange(9).expand(2, -1)
    rows = anchors + torch.arange(4)
    found = visible_keys(keys, keys < anchors, rows, window=window, causal=causal)
    assert torch.equal(found, block_visibility(anchors, 4, 9, window=window, causal=causal))


@pytest.mark.parametrize("family", ["dflash", "dflash2", "dspark"])
def test_the_first_block_is_what_training_computes(family: DrafterFamily) -> None:
    """Same context rows, same positions, same anchor, in training's layout of one row with one block."""
    target = tiny_target()
    drafter = tiny_drafter(target.contract, family=family)
    assert isinstance(drafter, BlockDrafter)
    stored = record_fingerprint(target, drafter, PROBE)
    size = drafter.contract.block_size
    # Training's context starts at position 0: rotations are relative, so the block may be moved there as a whole.
    count = stored["context"].shape[0]
    anchor = torch.tensor([[count]])
    positions = anchor.unsqueeze(-1) + torch.arange(size)
    nothing = torch.zeros(1, 1, size, dtype=torch.long)
    blocks = Blocks(anchor, anchor > 0, positions, nothing, nothing.bool())
    ids = drafter.block_ids(torch.tensor([[PROBE[-1]]]), drafter.contract.num_draft_tokens)
    taps = [stored[f"tap.{tap}"].float().unsqueeze(0) for tap in range(3)]
    hidden = draft_blocks(drafter, taps, drafter.embed(ids, target), blocks)[0, 0]
    error = (hidden - stored["block_hidden"][0].float()).norm() / hidden.norm()
    assert float(error) < 0.02


def test_the_plan_reaches_far_and_stays_inside_the_table() -> None:
    for num_positions in (64, 512, 8192):
        target = tiny_target(max_position_embeddings=num_positions)
        drafter = tiny_drafter(target.contract)
        assert isinstance(drafter, BlockDrafter)
        plan = BlockProgram(drafter).plan(PROBE)
        last = int(plan["block_anchor_positions"].max()) + drafter.contract.block_size
        assert last < num_positions and last >= min(num_positions, 4096) - 2
        length = int(plan["block_lengths"][1])
        far = plan["block_context_positions"][1, :length]
        assert far.tolist() == sorted(set(far.tolist())) and int(far[0]) == 0
        assert int(far[-1]) == int(plan["block_anchor_positions"][1]) - 1


def test_together_and_alone_are_both_kept() -> None:
    target = tiny_target()
    stored = record_fingerprint(target, tiny_drafter(target.contract, family="dflash2"), PROBE)
    difference = (stored["block_hidden"].float() - stored["block_hidden_alone"].float()).abs().max()
    assert float(difference) < 0.02
    assert int(stored["block_lengths"][0]) != int(stored["block_lengths"][1])
