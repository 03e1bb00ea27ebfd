"""Recurrent state of a hybrid target: a matrix per head and the rows before a convolution, per layer and place.

Unlike keys, a state cannot be cut back and is read whatever its length. So a place is emptied before it changes hands,
a step only records what its rows would do, and the rows that were kept are replayed once the verdict is known.

L delta layers, B requests, T rows, S places (slots with the one for padding, or snapshots), N heads, K channels of keys
and values, H rows of history, C convolved channels.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.checkpoint.kimi_contract import DeltaAttentionSettings
from paceline.errors import CapacityError
from paceline.ops.delta_commit import CommitInto, DeltaRecords, clear_slots, commit_delta


class StateRows(NamedTuple):
    """States of all layers, one place beside the other."""

    states_LSNKK: Tensor
    histories_LSHC: Tensor

    @classmethod
    def allocate(
        cls,
        settings: DeltaAttentionSettings,
        num_places: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        state_dtype: torch.dtype = torch.float32,
    ) -> StateRows:
        """Places at the start of a text.

        Args:
            settings: of the target.
            num_places: S.
            dtype: the model's, in which histories are kept.
            device: the model's.
            state_dtype: that states are kept in, whatever the model's is: float32, or bf16.

        Raises:
            CapacityError: the memory is not there.
        """
        places, size = (len(settings.layers), num_places), settings.head_size
        history = (settings.convolution_size - 1, 3 * settings.projection_size)
        try:
            return cls(
                torch.zeros(*places, settings.num_heads, size, size, dtype=state_dtype, device=device),
                torch.zeros(*places, *history, dtype=dtype, device=device),
            )
        except RuntimeError as error:  # torch has one class for a full GPU and another for a full host
            raise CapacityError(
                f"{device} has no memory for {num_places} recurrent states",
                hint="a smaller max_num_seqs or num_snapshots",
            ) from error

    @property
    def num_bytes(self) -> int:
        """Memory of all places."""
        return sum(part.numel() * part.element_size() for part in self)

    def clear(self, place: int) -> None:
        """The start of a text, whatever was there, NaN included."""
        clear_slots(self.states_LSNKK, self.histories_LSHC, place)

    def poison(self, place: int) -> None:
        """Fill a place that nobody should read with NaN, for whoever looks for a reader."""
        for part in self:
            part[:, place] = torch.nan

    def copy_from(self, source: StateRows, place: int, *, to: int) -> None:
        """Copy one place of another store to one of this."""
        for own, other in zip(self, source, strict=True):
            own[:, to].copy_(other[:, place])

    def is_poisoned(self, place: int) -> bool:
        """Whether a place still holds nothing but NaN; waits for the device."""
        return all(bool(part[:, place].isnan().all()) for part in self)

    def is_finite(self, place: int) -> bool:
        """Whether there is neither NaN nor infinity in a place; waits for the device."""
        return all(bool(part[:, place].isfinite().all()) for part in self)

    def checksum(self, place: int) -> bytes:
        """A digest of a place, for debug mode and tests."""
        digest = hashlib.blake2b(digest_size=16)
        for part in self:
            digest.update(part[:, place].contiguous().view(torch.uint8).cpu().numpy().tobytes())
        return digest.digest()


class StateCopies(NamedTuple):
    """Where a step leaves the state behind the last block boundary that it crosses, for some of its requests.

    Attributes:
        rows: the store that the copies go to.
        rows_B: int64, each request's place in it, on the device; -1 for requests that leave nothing.
        block_size: distance of the boundaries.
    """

    rows: StateRows
    rows_B: Tensor
    block_size: int


class RecurrentState:
    """The state of every slot, and what the rows of the step at hand would do to it.

    Attributes:
        rows: by slot; the last place is for padding.
        ends_S: int64, the position that each slot's state stands at: it has taken in all rows below.

    Args:
        settings: of the target.
        num_slots: requests at the same time.
        max_rows: rows of a step at most.
        dtype: the model's.
        device: the model's.
        state_dtype: as for `StateRows`.

    Raises:
        CapacityError: the memory is not there.
    """

    def __init__(
        self,
        settings: DeltaAttentionSettings,
        num_slots: int,
        *,
        max_rows: int,
        dtype: torch.dtype,
        device: torch.device,
        state_dtype: torch.dtype = torch.float32,
    ) -> None:
        self.rows = StateRows.allocate(settings, num_slots + 1, dtype=dtype, device=device, state_dtype=state_dtype)
        self.ends_S = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)
        self._records = DeltaRecords.allocate(
            len(settings.layers),
            num_slots,
            max_rows,
            settings.num_heads,
            settings.head_size,
            settings.head_size,
            num_channels=3 * settings.projection_size,
            dtype=dtype,
            device=device,
        )

    @property
    def num_bytes(self) -> int:
        """Memory of states and records."""
        return self.rows.num_bytes + sum(part.numel() * part.element_size() for part in self._records)

    def begin(self, slot: int, source: StateRows | None = None, row: int = 0, *, position: int = 0) -> None:
        """Give a slot to a new request.

        Args:
            slot: which.
            source: where its text's state at `position` is kept; None begins the text.
            row: of the source.
            position: 0 without a source.
        """
        assert (source is None) == (position == 0), "a text begins at 0; from elsewhere on it needs a state"
        if source is None:
            self.rows.clear(slot)
        else:
            self.rows.copy_from(source, row, to=slot)
        self.ends_S[slot] = position

    def records(self, num_requests: int, num_rows: int) -> DeltaRecords:
        """Room for what the rows of a step would do, for all layers."""
        return self._records.rows(num_requests, num_rows)

    def commit(
        self,
        slots_B: Tensor,
        counts_B: Tensor,
        num_rows: int,
        copies: StateCopies | None = None,
    ) -> None:
        """Take in the kept rows of the step that was recorded last; the host need not know how many.

        Args:
            slots_B: int64, of the step.
            counts_B: int64, 0 to T rows to take in, from the first on.
            num_rows: T.
            copies: also leave states behind block boundaries. Where none is crossed, what is left is worth nothing.
        """
        states, records = self.rows, self.records(slots_B.shape[0], num_rows)
        if copies is not None:
            starts_B = self.ends_S[slots_B]
            boundary_B = (starts_B + counts_B) // copies.block_size * copies.block_size
            replayed_B = (boundary_B - starts_B).clamp(min=0)
            commit_delta(*states, slots_B, records, replayed_B, into=CommitInto(*copies.rows, copies.rows_B))
        commit_delta(*states, slots_B, records, counts_B)
        self.ends_S[slots_B] += counts_B

    def poison_records(self) -> None:
        """Fill the records with NaN: nothing of a step that was committed is read again. For debug mode."""
        for part in self._records:
            part.fill_(torch.nan)

    def release(self) -> None:
        """Give the memory back; nothing can be run any more."""
        self.rows = StateRows(torch.empty(0), torch.empty(0))
        self._records = DeltaRecords(*(torch.empty(0) for _ in DeltaRecords._fields))
