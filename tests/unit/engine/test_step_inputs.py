"""The numbers of a bucket: each fill leaves nothing of the one before."""

from __future__ import annotations

import pytest
import torch

from paceline.engine.draft_stopper import DraftPlan
from paceline.engine.proposal import Rows
from paceline.engine.sampling_flags import SamplingFlags
from paceline.engine.step import StepBatch
from paceline.engine.step_inputs import StepInputs


def test_inputs_are_filled_whole() -> None:
    inputs = StepInputs(4, 3, 9, torch.device("cpu"))
    for slots, starts in (([2, 5, 1], [10, 20, 30]), ([7], [3])):
        rows = Rows(slots, torch.tensor(slots), starts, torch.tensor(starts), 1)
        inputs.fill(StepBatch(rows, SamplingFlags.of([]), writes_context=False))
    assert inputs.slots_B.tolist() == [7, 9, 9, 9]
    assert inputs.starts_B.tolist() == [3, 0, 0, 0]
    assert inputs.copy_rows_B.tolist() == [-1] * 4


def test_what_a_plan_says_of_a_request_stands_in_its_row() -> None:
    inputs = StepInputs(4, 3, 9, torch.device("cpu"))
    full = DraftPlan((3, 1), thresholds=(0.5, 0.25, 0.125), is_adaptive=(True, False), teaches=(False, True))
    for plan in (full, DraftPlan((2, 2))):
        rows = Rows([2, 5], torch.tensor([2, 5]), [10, 20], torch.tensor([10, 20]), 1, [4, 6], torch.tensor([4, 6]))
        inputs.fill(StepBatch(rows, SamplingFlags.of([]), writes_context=False, plan=plan))
        assert inputs.num_drafts_B.tolist() == [*plan.num_drafts, 0, 0]
        assert inputs.context_starts_B.tolist() == [4, 6, 0, 0]
        assert inputs.thresholds_K.tolist() == list(plan.thresholds or (0, 0, 0))
        assert inputs.is_adaptive_B.tolist() == [*(plan.is_adaptive or (0, 0)), 0, 0]
        assert inputs.teaches_B.tolist() == [*(plan.teaches or (0, 0)), 0, 0]


def test_a_column_that_does_not_exist_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="lengths_B"):
        _ = StepInputs(1, 1, 0, torch.device("cpu")).lengths_B
