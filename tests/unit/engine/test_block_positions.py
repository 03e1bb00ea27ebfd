"""The worked example of positions, slots and a rejection: five prompt tokens, three drafts, blocks 7, 3, 9, 5 of four.

The planes hold context keys where the table says, a block's rows stand at the positions behind them, and rows of
refused drafts lie in the cache until the next pass writes over them, unread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from tests.caches import make_cache
from tests.tiny import loaded, tiny_prompts
from torch import Tensor

from paceline.engine import proposal as proposal_module
from paceline.engine.attends import AttentionChoice
from paceline.engine.block_tables import BlockTables
from paceline.engine.proposal import BlockProposer, Rows
from paceline.engine.request import SamplingParameters
from paceline.engine.slots import SlotState
from paceline.models.attends import WholeSequence
from paceline.models.loading import LoadedDrafter, LoadedTarget
from paceline.models.taps import TapCollector

CPU = torch.device("cpu")
NUM_DRAFTS, BLOCK_SIZE, TABLE = 3, 4, [7, 3, 9, 5]
LAYOUTS: dict[str, dict[str, Any]] = {
    "fill_in": {"drafter_family": "dflash", "block_size": NUM_DRAFTS + 1},
    "anchor_sampling": {"drafter_family": "dspark", "block_size": NUM_DRAFTS},
}


class Request:
    """One request whose blocks are those of the example, driven step by step through a proposer."""

    def __init__(self, layout: str, *, is_batched: bool, table: Sequence[int] = TABLE) -> None:
        target, drafter = loaded(linear_mode="plain", **LAYOUTS[layout])
        self.target: LoadedTarget = target
        self.drafter: LoadedDrafter = drafter
        self.tables = BlockTables(1, num_blocks=11, block_size=BLOCK_SIZE, max_blocks=len(table), device=CPU)
        self.tables.assign(0, table)
        self.tables.flush()
        num_kv_heads, head_size = drafter.model.backbone.cache_shape
        self.cache = make_cache(
            self.tables, num_layers=drafter.contract.num_layers, num_kv_heads=num_kv_heads, head_size=head_size
        )
        choice = AttentionChoice(is_batched=is_batched, is_row_invariant=False)
        self.proposer = BlockProposer(
            target.model, drafter.model, self.cache, choice, num_draft_tokens=NUM_DRAFTS, method="greedy"
        )
        self.state = SlotState(1, num_draft_tokens=NUM_DRAFTS, num_candidates=0, device=CPU)
        self.state.admit(0, SamplingParameters(), seed=0)
        (self.text,) = tiny_prompts([20])  # what the target would read at any position
        self.positions: list[list[int]] = []
        backbone = drafter.model.backbone
        honest = backbone.forward

        def noted(embeddings: Tensor, positions_BQ: Tensor, attend: Any) -> Any:
            self.positions.append(positions_BQ[0].tolist())
            return honest(embeddings, positions_BQ, attend)

        backbone.forward = noted

    def write(self, start: int, num_rows: int, refused: dict[int, int] | None = None) -> Rows:
        """A target pass over positions start, start + 1, ...; `refused` are drafts that stood at some of them."""
        ids = self.text[: start + num_rows]
        for position, token in (refused or {}).items():
            ids = [*ids[:position], token, *ids[position + 1 :]]
        positions = torch.arange(start + num_rows).unsqueeze(0)
        taps = TapCollector.of_layers(self.proposer.target_layer_ids)
        self.target.model(torch.tensor([ids]), positions, WholeSequence(), taps)
        rows = Rows([0], torch.tensor([0]), [start], torch.tensor([start]), num_rows)
        self.proposer.write_context(rows, [tap[:, start:] for tap in taps.collected()], positions[:, start:])
        return rows

    def propose(self, rows: Rows, length: int, anchor: int | None = None) -> list[int]:
        """Draft behind the anchor, which stands at `length`."""
        self.state.restore(0, length=length, anchor=self.text[length] if anchor is None else anchor, step=0)
        drafts: list[int] = self.proposer.propose(rows, self.state, all_greedy=True).ids_BK[0].tolist()
        return drafts

    def written(self) -> set[int]:
        """Physical rows that hold keys, the rows of block 0 left out, where padding goes."""
        is_used_R = self.cache.planes.flatten(3, 4).ne(0).transpose(0, 3).flatten(1).any(dim=1)
        return {row for row in is_used_R.nonzero().flatten().tolist() if row >= BLOCK_SIZE}


def slots_of(request: Request, positions: Sequence[int]) -> list[int]:
    found: list[int] = request.tables.rows_of(torch.tensor([0]), torch.tensor([list(positions)]))[0].tolist()
    return found


PROMPT_SLOTS = {28, 29, 30, 31, 12}


def check(layout: str, *, is_batched: bool) -> tuple[list[int], list[int]]:
    """The example from start to end; returns the drafts of both steps."""
    request = Request(layout, is_batched=is_batched)
    contract = request.drafter.contract
    num_rows = request.drafter.model.num_rows(NUM_DRAFTS)

    rows = request.write(0, 5)
    assert request.written() == PROMPT_SLOTS
    first = request.propose(rows, 5)
    assert request.positions[-1] == [5, 6, 7, 8][:num_rows], "the anchor stands behind the last context position"
    assert slots_of(request, [5, 6, 7, 8]) == [13, 14, 15, 36]
    predicted = [position + (1 - contract.first_predicted_row) for position in request.positions[-1]]
    assert predicted[contract.first_predicted_row :] == [6, 7, 8]
    assert request.written() == PROMPT_SLOTS, "a block's own keys never enter the cache"

    # verification: rows 5..8, one draft accepted, two refused
    rows = request.write(5, 4, refused={7: 9, 8: 11})
    assert request.written() == PROMPT_SLOTS | {13, 14, 15, 36}
    for row in (15, 36):  # the refused ones: nothing of them is read
        request.cache.planes.flatten(3, 4)[:, :, :, row] = torch.nan
    second = request.propose(rows, 7)
    assert request.positions[-1] == [7, 8, 9, 10][:num_rows]
    assert slots_of(request, [7, 8, 9, 10]) == [15, 36, 37, 38]
    assert request.positions[-1][-1] + 1 == {"fill_in": 11, "anchor_sampling": 10}[layout], "length of the sequence"

    # the drafts are those of a request that never had a refused row, in blocks that follow each other
    plain = Request(layout, is_batched=is_batched, table=[1, 2, 3, 4])
    assert plain.propose(plain.write(0, 5), 5) == first
    assert plain.propose(plain.write(5, 2), 7) == second
    return first, second


@pytest.mark.parametrize("is_batched", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_worked_example(layout: str, is_batched: bool) -> None:
    check(layout, is_batched=is_batched)


def anchor_on_the_context(patch: pytest.MonkeyPatch) -> None:
    """The anchor is placed on the last context position."""
    propose = Request.propose
    patch.setattr(Request, "propose", lambda self, rows, length, anchor=None: propose(self, rows, length - 1, anchor))


def refused_rows_count(patch: pytest.MonkeyPatch) -> None:
    """The block sees all rows that were ever written."""
    attend = proposal_module.attend_block
    patch.setattr(
        proposal_module,
        "attend_block",
        lambda *a, lengths_B, max_length, **o: attend(
            *a, lengths_B=torch.full_like(lengths_B, max_length), max_length=max_length, **o
        ),
    )


def blocks_in_order(patch: pytest.MonkeyPatch) -> None:
    """A slot's blocks are taken for one run."""
    assign = BlockTables.assign
    patch.setattr(
        BlockTables, "assign", lambda self, slot, blocks: assign(self, slot, range(blocks[0], blocks[0] + len(blocks)))
    )


@pytest.mark.parametrize("plant", [anchor_on_the_context, refused_rows_count, blocks_in_order])
def test_planted_faults_are_found(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        check("fill_in", is_batched=True)
