"""What a rank keeps of a dense target's layers: keys and values of its heads, in an engine's cache with fixed tables.

Rows of a pass are stored behind the committed ones. Those that do not count lie past the length, where nothing reads
them and the next pass writes first. B places, T rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.checkpoint.contract import TargetContract
from paceline.engine.attends import AttentionChoice, write_then_attend
from paceline.engine.block_tables import BlockTables
from paceline.engine.cache import KeyValueCache
from paceline.models.hybrid import DeltaProjections, DeltaWeights, LatentHeads
from paceline.models.layers import Attend, LinearMode


class KeyValueContext:
    """Keys and values of B requests side by side; satisfies `HybridAttend`, of which dense layers call one method.

    Args:
        contract: of the rank's share.
        num_requests: B.
        capacity: rows of a request that are stored at the same time, those of a pass included.
        dtype: of the target.
        device: of the target.
        layers: first layer of the stage and the one behind its last.
        mode: arithmetic of the products, which decides that of attention.
    """

    def __init__(
        self,
        contract: TargetContract,
        num_requests: int,
        capacity: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        layers: tuple[int, int],
        mode: LinearMode,
    ) -> None:
        self._first_layer = layers[0]
        self._choice = AttentionChoice.for_device(device, is_row_invariant=mode == "row_invariant")
        self._cache = KeyValueCache(
            BlockTables.fixed(num_requests, capacity=capacity, device=device),
            num_layers=layers[1] - layers[0],
            num_kv_heads=contract.num_kv_heads,
            head_size=contract.head_size,
            dtype=dtype,
            device=device,
        )
        self.lengths_B = torch.zeros(num_requests, dtype=torch.int64, device=device)
        self._slots_B = torch.arange(num_requests, device=device)
        self._attend: Attend | None = None  # of the pass at hand

    def __call__(
        self, layer: int, q_BTNH: Tensor, k_BTMH: Tensor, v_BTMH: Tensor, *, sink_N: Tensor | None = None
    ) -> Tensor:
        """Store the pass's rows behind the committed ones and attend over both."""
        if self._attend is None:
            starts = [0] * len(self._slots_B) if self._choice.is_paged else self.lengths_B.tolist()
            self._attend = write_then_attend(
                self._cache,
                self._choice,
                slots=range(len(self._slots_B)),
                slots_B=self._slots_B,
                starts=starts,
                starts_B=self.lengths_B,
                num_rows=q_BTNH.shape[1],
            )
        return self._attend(layer - self._first_layer, q_BTNH, k_BTMH, v_BTMH, sink_N=sink_N)

    def latent(self, layer: int, q_BTNQ: Tensor, rows_BTX: Tensor, heads: LatentHeads) -> Tensor:
        """Dense targets have no latent attention."""
        raise AssertionError(f"layer {layer} of a dense target asked for latent rows")

    def delta(self, layer: int, rows: DeltaProjections, weights: DeltaWeights) -> Tensor:
        """Dense targets have no recurrent states."""
        raise AssertionError(f"layer {layer} of a dense target asked for a recurrent state")

    def commit(self, counts_B: Tensor) -> None:
        """Make the first rows of the last pass context, and forget the rest."""
        self.lengths_B += counts_B
        self._attend = None

    def clear(self, request: int) -> None:
        """Give a request's place to a new one."""
        self.lengths_B[request] = 0
