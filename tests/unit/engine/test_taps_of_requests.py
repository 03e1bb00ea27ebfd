"""Whose states a drafter reads: a row per token of each request, the very row that plain decoding computes there.

Rows of refused drafts pass the same way and must not count, and requests of a batch must not get each other's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from tests.tiny import loaded, tiny_prompts
from torch import Tensor

from paceline.engine.engine import Engine, EngineSettings
from paceline.engine.proposal import Proposer, Rows
from paceline.engine.request import RequestResult, SamplingParameters
from paceline.engine.slots import SlotState
from paceline.models.attends import WholeSequence
from paceline.models.drafters.proposal import Proposal
from paceline.models.loading import LoadedTarget
from paceline.models.taps import TapCollector

LENGTHS, NUM_NEW = (5, 33, 12, 20), 32


class Recorder:
    """A proposer that keeps, per slot and position, the taps of the row that counts there."""

    def __init__(self, inner: Proposer) -> None:
        self.inner = inner
        self.rows: dict[int, dict[int, Tensor]] = {}
        self.written: list[tuple[int, int, Tensor]] = []
        self.num_refused = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def write_context(self, rows: Rows, taps: Sequence[Tensor], positions_BT: Tensor) -> None:
        """Keep what comes; what of it counts is known later."""
        states = torch.cat(list(taps), dim=-1)
        self.written = [
            (slot, int(positions_BT[index, row]), states[index, row].clone())
            for index, slot in enumerate(rows.slots)
            for row in range(rows.num_rows)
        ]
        self.inner.write_context(rows, taps, positions_BT)

    def settle(self, rows: Rows, token_ids_BT: Tensor, ends_B: Tensor, next_ids_B: Tensor) -> None:
        """Rows below the end are final."""
        ends = dict(zip(rows.slots, ends_B.tolist(), strict=True))
        for slot, position, state in self.written:
            if position < ends[slot]:
                self.rows.setdefault(slot, {})[position] = state
            else:
                self.num_refused += 1
        self.inner.settle(rows, token_ids_BT, ends_B, next_ids_B)

    def propose(self, rows: Rows, state: SlotState, **options: Any) -> Proposal:
        """As the drafter does."""
        return self.inner.propose(rows, state, **options)


def expected_rows(target: LoadedTarget, layers: Sequence[Any], text: Sequence[int]) -> Tensor:
    """The states of a text from one pass over the whole of it, without a cache and without a drafter."""
    taps = TapCollector.of_layers(layers)
    with torch.no_grad():
        target.model(torch.tensor([text]), torch.arange(len(text))[None], WholeSequence(), taps)
    return torch.cat(taps.collected(), dim=-1)[0]


def run(plant: Callable[[Recorder], object] = lambda recorder: None, **family: Any) -> None:
    """Serve four requests at once and compare every row."""
    target, drafter = loaded(linear_mode="plain", **family)
    engine = Engine(target, drafter, EngineSettings(max_num_seqs=len(LENGTHS)))
    recorders: list[Recorder] = []

    def wrap(proposer: Proposer) -> Any:
        recorders.append(Recorder(proposer))
        plant(recorders[0])
        return recorders[0]

    engine.wrap_proposer(wrap)
    prompts = tiny_prompts(list(LENGTHS))
    sampling = SamplingParameters(max_tokens=NUM_NEW, ignore_eos=True)
    results: list[RequestResult] = engine.generate(prompts, sampling)
    (recorder,) = recorders
    assert recorder.num_refused > 0, "the case is about refused rows, too"
    for slot, (prompt, result) in enumerate(zip(prompts, results, strict=True)):
        # the last token was delivered and never run: a state per token before it
        text = [*prompt, *result.token_ids][:-1]
        found = recorder.rows[slot]
        assert sorted(found)[: len(text)] == list(range(len(text))), "no position is missing"
        assert len(found) <= len(text) + 8, "a block may run past the budget, and no further"
        states = torch.stack([found[position] for position in range(len(text))])
        expected = expected_rows(target, recorder.target_layer_ids, text)
        torch.testing.assert_close(states, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["dflash", "dflash2", "dspark", "eagle3"])
def test_every_request_has_a_row_per_token_and_its_own(family: str) -> None:
    run(drafter_family=family)


def rows_per_step(recorder: Recorder) -> None:
    """Every row of a step counts, as if all drafts had been kept."""
    honest = recorder.settle

    def all_count(rows: Rows, token_ids_BT: Tensor, ends_B: Tensor, next_ids_B: Tensor) -> None:
        for slot, position, state in recorder.written:
            recorder.rows.setdefault(slot, {}).setdefault(position, state)
        recorder.written = []
        honest(rows, token_ids_BT, ends_B, next_ids_B)
        recorder.num_refused += 1

    recorder.settle = all_count  # type: ignore[method-assign]


def rows_of_the_neighbour(recorder: Recorder) -> None:
    """Rows of a batch are given out by where they stand in it, from its end."""
    honest = recorder.write_context

    def mixed(rows: Rows, taps: Sequence[Tensor], positions_BT: Tensor) -> None:
        honest(rows, taps, positions_BT)
        states = torch.cat(list(taps), dim=-1).flip(0)
        recorder.written = [
            (slot, int(positions_BT[index, row]), states[index, row])
            for index, slot in enumerate(rows.slots)
            for row in range(rows.num_rows)
        ]

    recorder.write_context = mixed  # type: ignore[method-assign]


@pytest.mark.parametrize("plant", [rows_per_step, rows_of_the_neighbour])
def test_planted_faults_are_found(plant: Callable[[Recorder], object]) -> None:
    with pytest.raises(AssertionError):
        run(plant, drafter_family="dflash")
