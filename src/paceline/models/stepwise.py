"""Attention of a hybrid target over contiguous caches that grow pass by pass: exact, simple, for one process and tests.

Every pass, a prompt's included, runs each row by the same arithmetic: latent rows absorbed, the recurrence row by row
from the committed state. So how a sequence is split into passes, and whether rows were drafted and partly rejected,
makes no difference to what is committed; with row-invariant products, not even in the last bit.

    context = StepwiseContext(contract, 1, 256, dtype=torch.float32, device="cpu")
    hidden = target(token_ids, positions, context)     # rows are tried
    context.commit(torch.tensor([accepted]))            # and some of them, from the first, become context

B requests, T rows of a pass, S cached rows at most, X width of a latent row, L delta layers, N heads, K channels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.checkpoint.contract import TargetContract
from paceline.errors import CapacityError
from paceline.models.hybrid import DeltaProjections, DeltaWeights, LatentHeads, convolve
from paceline.ops.delta_attention import verify_delta
from paceline.ops.delta_commit import DeltaRecords, clear_slots, commit_delta
from paceline.ops.multi_head_latent_attention import absorbed_latent_attention


class StepwiseContext:
    """Caches of B requests side by side; satisfies `HybridAttend`.

    Args:
        contract: of the target, with `kimi` set.
        num_requests: B.
        capacity: S, rows that each request can commit.
        dtype: of the target.
        device: of the target.
        layers: first layer of a stage of a pipeline and the one behind its last; None is the whole target.
    """

    def __init__(
        self,
        contract: TargetContract,
        num_requests: int,
        capacity: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        layers: tuple[int, int] | None = None,
    ) -> None:
        kimi = contract.kimi
        assert kimi is not None, "only hybrid targets have such a context"
        own = range(*(layers or (0, contract.num_layers)))
        delta_layers = [layer for layer in own if kimi.has_delta(layer)]
        latent_layers = [layer for layer in own if not kimi.has_delta(layer)]
        self._place = {layer: place for places in (delta_layers, latent_layers) for place, layer in enumerate(places)}
        self.lengths_B = torch.zeros(num_requests, dtype=torch.int64, device=device)
        self._slots_B = torch.arange(num_requests, device=device)
        self._num_rows = 0  # of the pass that awaits its commit
        self._capacity = capacity
        latent_shape = (len(latent_layers), num_requests, capacity, kimi.latent.latent_size)
        self._latents = torch.zeros(latent_shape, dtype=dtype, device=device)
        self.states_LBNKK: Tensor | None = None
        self.histories_LBHC: Tensor | None = None
        self._records: DeltaRecords | None = None
        if kimi.delta is not None:
            size, heads, num_layers = kimi.delta.head_size, kimi.delta.num_heads, len(delta_layers)
            self.states_LBNKK = torch.zeros(num_layers, num_requests, heads, size, size, device=device)
            history = (num_layers, num_requests, kimi.delta.convolution_size - 1, 3 * kimi.delta.projection_size)
            self.histories_LBHC = torch.zeros(history, dtype=dtype, device=device)

    def __call__(
        self, layer: int, q_BTNH: Tensor, k_BTMH: Tensor, v_BTMH: Tensor, *, sink_N: Tensor | None = None
    ) -> Tensor:
        """Kimi targets have no attention over keys and values per head."""
        raise AssertionError(f"layer {layer} of a hybrid target asked for keys and values")

    def latent(self, layer: int, q_BTNQ: Tensor, rows_BTX: Tensor, heads: LatentHeads) -> Tensor:
        """Store the pass's rows behind the committed ones and attend, absorbed."""
        num_rows = self._begin(rows_BTX.shape[1])
        latents_BSX = self._latents[self._place[layer]]
        places_BT = self.lengths_B.unsqueeze(1) + torch.arange(num_rows, device=rows_BTX.device)
        latents_BSX.scatter_(1, places_BT.unsqueeze(-1).expand(-1, -1, rows_BTX.shape[-1]), rows_BTX)
        reach = int(places_BT.max()) + 1
        visible_B1TS = (torch.arange(reach, device=rows_BTX.device) <= places_BT.unsqueeze(-1)).unsqueeze(1)
        mixed_BTNR = absorbed_latent_attention(
            heads.absorb(q_BTNQ),
            latents_BSX[:, :reach],
            visible=visible_B1TS,
            value_size=heads.latent_size,
            scale=heads.scale,
            mode="row_invariant" if heads.mode == "row_invariant" else "plain",
        )
        return heads.expand(mixed_BTNR)

    def delta(self, layer: int, rows: DeltaProjections, weights: DeltaWeights) -> Tensor:
        """Run the pass's rows from the committed state, and record them for `commit`."""
        assert self.states_LBNKK is not None and self.histories_LBHC is not None, "a target with delta attention"
        self._begin(rows.rows_BTC.shape[1])
        place, records = self._place[layer], self._records_for(rows)
        inputs = convolve(rows, weights, self.histories_LBHC[place], self._slots_B)
        own = records.layer(place)
        own.inputs_BTC.copy_(rows.rows_BTC)
        return verify_delta(inputs, weights.gate, self.states_LBNKK[place], self._slots_B, own)

    def commit(self, counts_B: Tensor) -> None:
        """Make the first rows of the last pass context, and forget the rest.

        Args:
            counts_B: int64, 0 to the number of rows of that pass.
        """
        assert bool(((counts_B >= 0) & (counts_B <= self._num_rows)).all()), "rows of the last pass"
        if self._records is not None:
            assert self.states_LBNKK is not None and self.histories_LBHC is not None
            commit_delta(self.states_LBNKK, self.histories_LBHC, self._slots_B, self._records, counts_B)
        self.lengths_B += counts_B
        self._num_rows, self._records = 0, None

    def commit_all(self) -> None:
        """Make every row of the last pass context."""
        self.commit(torch.full_like(self.lengths_B, self._num_rows))

    def keep(self, requests: Tensor) -> None:
        """Go on with some of the requests, int64 [kept], in this order; nothing may await its commit."""
        assert self._num_rows == 0, "commit the last pass first"
        self.lengths_B, self._latents = self.lengths_B[requests], self._latents[:, requests]
        self._slots_B = torch.arange(len(requests), device=requests.device)
        if self.states_LBNKK is not None and self.histories_LBHC is not None:
            self.states_LBNKK, self.histories_LBHC = self.states_LBNKK[:, requests], self.histories_LBHC[:, requests]

    def clear(self, request: int) -> None:
        """Give a request's place to a new one."""
        self.lengths_B[request] = 0
        if self.states_LBNKK is not None and self.histories_LBHC is not None:
            clear_slots(self.states_LBNKK, self.histories_LBHC, request)

    def _begin(self, num_rows: int) -> int:
        if self._num_rows == 0:
            longest = int(self.lengths_B.max()) + num_rows
            if longest > self._capacity:
                raise CapacityError(f"{longest} rows; the context holds {self._capacity} per request")
            self._num_rows = num_rows
        assert num_rows == self._num_rows, "one pass at a time: commit the last one first"
        return num_rows

    def _records_for(self, rows: DeltaProjections) -> DeltaRecords:
        if self._records is None:
            assert self.states_LBNKK is not None
            num_layers, _, heads, key_size, value_size = self.states_LBNKK.shape
            num_requests, num_rows, num_channels = rows.rows_BTC.shape
            self._records = DeltaRecords.allocate(
                num_layers,
                num_requests,
                num_rows,
                heads,
                key_size,
                value_size,
                num_channels=num_channels,
                dtype=rows.rows_BTC.dtype,
                device=rows.rows_BTC.device,
            )
        return self._records
