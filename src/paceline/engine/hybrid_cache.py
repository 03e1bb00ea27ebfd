"""What a hybrid target keeps: latent rows in blocks, and recurrent states by slot."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.checkpoint.contract import TargetContract
from paceline.engine.block_tables import BlockTables
from paceline.engine.latent_cache import LatentCache
from paceline.engine.recurrent_state import RecurrentState


class HybridCache:
    """The caches of a target with latent attention and, in most layers, delta attention.

    Attributes:
        latents: one row per position and latent layer.
        recurrent: states of the delta layers; None where there are none.
        places: by decoder layer, its place among the layers of its kind.

    Args:
        contract: of the target, with `kimi` set.
        tables: which blocks a slot has.
        max_rows: rows of a step at most.
        dtype: the model's.
        device: the model's.
        state_dtype: of the recurrent states.

    Raises:
        CapacityError: the memory is not there.
    """

    def __init__(
        self,
        contract: TargetContract,
        tables: BlockTables,
        *,
        max_rows: int,
        dtype: torch.dtype,
        device: torch.device,
        state_dtype: torch.dtype = torch.float32,
    ) -> None:
        kimi = contract.kimi
        assert kimi is not None, "a target with keys and values has `KeyValueCache`"
        delta_layers = () if kimi.delta is None else kimi.delta.layers
        latent_layers = [layer for layer in range(contract.num_layers) if not kimi.has_delta(layer)]
        self.places = {layer: place for layers in (delta_layers, latent_layers) for place, layer in enumerate(layers)}
        self.latents = LatentCache(
            tables, num_layers=len(latent_layers), width=kimi.latent.latent_size, dtype=dtype, device=device
        )
        self.recurrent: RecurrentState | None = None
        if kimi.delta is not None:
            self.recurrent = RecurrentState(
                kimi.delta, tables.num_slots, max_rows=max_rows, dtype=dtype, device=device, state_dtype=state_dtype
            )

    @property
    def tables(self) -> BlockTables:
        """Which blocks a slot has."""
        return self.latents.tables

    @property
    def num_bytes(self) -> int:
        """Memory of the rows in blocks."""
        return self.latents.num_bytes

    def clear_blocks(self, blocks: Sequence[int]) -> None:
        """Zero whole blocks."""
        self.latents.clear_blocks(blocks)
