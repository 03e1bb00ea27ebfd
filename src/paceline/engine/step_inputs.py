"""What changes from one recorded step to the next: numbers whose addresses stay, which the host fills in.

B requests of a bucket, K draft tokens.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from paceline.engine.draft_stopper import DraftPlan
from paceline.engine.step import StepBatch
from paceline.engine.transfers import write_to

_COLUMNS = (
    "slots_B",
    "starts_B",
    "context_starts_B",
    "num_drafts_B",
    "is_adaptive_B",
    "teaches_B",
    "copy_rows_B",
)


class StepInputs:
    """The numbers of a bucket that the host fills in, in one transfer from pinned memory.

    Args:
        num_requests: B.
        num_draft_tokens: K.
        trash_slot: of the padding rows.
        device: where a step reads them.
    """

    def __init__(self, num_requests: int, num_draft_tokens: int, trash_slot: int, device: torch.device) -> None:
        self._num_requests, self._trash_slot = num_requests, trash_slot
        self._num_columns = len(_COLUMNS) * num_requests
        self._numbers = torch.zeros(self._num_columns + num_draft_tokens, dtype=torch.int64, device=device)
        self._by_name = self._numbers[: self._num_columns].view(len(_COLUMNS), num_requests)
        self.thresholds_K = self._numbers[self._num_columns :].view(torch.float64)
        self._numbers[:num_requests] = trash_slot

    def __getattr__(self, name: str) -> Tensor:
        if name not in _COLUMNS:
            raise AttributeError(name)
        return self._by_name[_COLUMNS.index(name)]

    def fill(self, batch: StepBatch) -> None:
        """Write the numbers of a step; padding is the trash slot at its beginning, without drafts.

        Args:
            batch: as the host put it together.
        """
        rows, plan = batch.rows, batch.plan
        numbers = np.zeros(self._numbers.shape[0], dtype=np.int64)
        columns = numbers[: self._num_columns].reshape(len(_COLUMNS), self._num_requests)
        count = len(rows.slots)
        columns[0] = self._trash_slot
        columns[0, :count], columns[1, :count] = rows.slots, rows.starts
        if rows.context_starts is not None:
            columns[2, :count] = rows.context_starts
        if isinstance(plan, DraftPlan):
            columns[3, :count] = plan.num_drafts
            if plan.is_adaptive:
                columns[4, :count] = plan.is_adaptive
            if plan.teaches:
                columns[5, :count] = plan.teaches
            if plan.thresholds is not None:
                thresholds = np.asarray(plan.thresholds, dtype=np.float64)
                numbers[self._num_columns : self._num_columns + len(thresholds)] = thresholds.view(np.int64)
        columns[6] = -1
        if batch.state_copies is not None:
            columns[6, :count] = batch.state_copies.rows_B.numpy()
        write_to(self._numbers, torch.from_numpy(numbers))
