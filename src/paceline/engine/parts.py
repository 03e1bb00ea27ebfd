"""What an engine runs on the device: models, caches over one set of blocks, and the state of its slots."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from paceline.configuration.environment import read_environment
from paceline.engine.attends import AttentionChoice
from paceline.engine.block_planes import BlockPlanes
from paceline.engine.block_tables import BlockTables
from paceline.engine.counters import ComponentStats
from paceline.engine.hybrid_cache import HybridCache
from paceline.engine.make_proposer import make_proposer, spare_positions_of
from paceline.engine.proposal import Proposer
from paceline.engine.recurrent_state import RecurrentState, StateRows
from paceline.engine.settings import (
    CacheSizes,
    EngineSettings,
    SnapshotSizes,
    cache_sizes,
    context_length,
    draft_tokens_per_step,
    prompt_kernel,
    recurrent_state_dtype,
    snapshot_sizes,
)
from paceline.engine.short_list import choose_short_list
from paceline.engine.slots import SlotState
from paceline.engine.target_cache import TargetCache, make_target_cache
from paceline.errors import EngineFaultError
from paceline.models.drafters.short_list import ShortList
from paceline.models.layers import NATIVE_MODES, GatedMLP, Linear
from paceline.models.loading import LoadedDrafter, LoadedTarget
from paceline.models.targets.target import Target
from paceline.ops.dispatch import allow_dependent_launch, implementations


@dataclass
class EngineParts:
    """The device's side of an engine.

    Attributes:
        target: as loaded.
        drafter: as loaded; None without one.
        proposer: what drafts; None decodes plainly.
        short_list: ids that drafts are chosen from; None is all that the drafter can.
        choice: form of attention.
        max_model_len: tokens that prompt and output may hold together.
        sizes: of the caches.
        tables: which blocks each slot has.
        cache: what the target keeps.
        planes: all caches as one.
        state: of the slots.
        snapshot_sizes: how many recurrent states may be kept for later requests, and where.
        snapshots: room for them; None where the target has none, or prefixes are not cached.
        addresses: of all that recorded steps read, as they were when this was made.
    """

    target: LoadedTarget
    drafter: LoadedDrafter | None
    proposer: Proposer | None
    short_list: ShortList | None
    choice: AttentionChoice
    max_model_len: int
    sizes: CacheSizes
    tables: BlockTables
    cache: TargetCache
    planes: BlockPlanes
    state: SlotState
    snapshot_sizes: SnapshotSizes
    snapshots: StateRows | None = None
    addresses: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self.addresses = self._addresses()

    def _addresses(self) -> tuple[int, ...]:
        tensors = [self.tables.table, *self.state.tensors()]
        tensors += [cache.planes for cache in self.planes.caches]
        for rows in (self.recurrent.rows if self.recurrent is not None else None, self.snapshots):
            tensors += () if rows is None else rows
        return tuple(tensor.data_ptr() for tensor in tensors)

    def require_fixed(self) -> None:
        """See that nothing moved of what a recorded step reads where it lay when it was captured.

        Raises:
            EngineFaultError: something did.
        """
        if self._addresses() != self.addresses:
            raise EngineFaultError("a tensor that recorded steps read was replaced since the engine was made")

    @property
    def recurrent(self) -> RecurrentState | None:
        """States by slot, where the target has layers that keep one."""
        return self.cache.recurrent if isinstance(self.cache, HybridCache) else None

    @property
    def num_draft_tokens(self) -> int:
        """K; 0 where nothing drafts."""
        return self.proposer.num_draft_tokens if self.proposer is not None else 0

    @property
    def method(self) -> str:
        """How drafts are made, or "plain"."""
        return self.proposer.name if self.proposer is not None else "plain"

    def stats(self) -> ComponentStats:
        """Where the memory goes, and what carries an operation out."""
        weights = {parameter.data_ptr(): parameter for parameter in self.target.model.parameters()}
        drafter_cache = self.proposer.cache if self.proposer is not None else None
        choice = self.choice
        form = "row_invariant" if choice.is_row_invariant else "batched" if choice.is_batched else "per_request"
        form = "native" if choice.is_native else "paged" if choice.is_paged else form
        return ComponentStats(
            target_weight_bytes=_weight_bytes(self.target.model, set()),
            drafter_weight_bytes=0 if self.drafter is None else _weight_bytes(self.drafter.model, set(weights)),
            target_cache_bytes=self.cache.num_bytes,
            snapshot_bytes=self.snapshots.num_bytes if self.snapshots is not None else 0,
            recurrent_state_bytes=self.recurrent.num_bytes if self.recurrent is not None else 0,
            drafter_cache_bytes=drafter_cache.num_bytes if drafter_cache is not None else 0,
            token_rules_bytes=self.state.tokens.num_bytes,
            linear_mode=self.target.linear_mode,
            attention=form,
            implementations=implementations(),
            method=self.method,
        )

    def release(self) -> None:
        """Give the memory of the caches back; nothing can be run any more."""
        self.planes.release()
        if self.recurrent is not None:
            self.recurrent.release()
        self.snapshots = None
        self.proposer = None


def make_parts(
    target: LoadedTarget, drafter: LoadedDrafter | None, settings: EngineSettings, proposer: Proposer | None
) -> EngineParts:
    """Put an engine's parts together.

    Args:
        target: the model that decides.
        drafter: the model that proposes; None decodes plainly.
        settings: sizes and choices.
        proposer: something else that proposes, instead of `drafter`.

    Raises:
        ConfigError: a setting asks for more than the models can do, or the pool holds not even one request; or a
            variable of the environment makes no sense.
        CapacityError: the caches do not fit into memory.
    """
    allow_dependent_launch(read_environment().dependent_launch)
    weight, contract = target.model.norm.weight, target.contract
    mode = target.linear_mode
    choice = AttentionChoice.for_device(
        weight.device,
        is_row_invariant=mode == "row_invariant",
        is_native=mode in NATIVE_MODES,
        is_paged=mode == "fused",
        prompt_kernel=prompt_kernel(target, settings),
    )
    max_model_len = context_length(target, settings)
    num_draft_tokens = draft_tokens_per_step(drafter, proposer, settings)
    sizes = cache_sizes(
        settings,
        max_model_len=max_model_len,
        num_draft_tokens=num_draft_tokens,
        spare_positions=spare_positions_of(drafter, num_draft_tokens) if proposer is None else 0,
        device_type=weight.device.type,
    )
    tables = BlockTables(
        settings.max_num_seqs,
        num_blocks=sizes.num_blocks,
        block_size=sizes.block_size,
        max_blocks=sizes.max_blocks,
        device=weight.device,
    )
    state_dtype = recurrent_state_dtype(target, settings)
    cache = make_target_cache(target, tables, max_rows=num_draft_tokens + 1, state_dtype=state_dtype)
    short_list: ShortList | None = None
    if drafter is not None and proposer is None:
        short_list = choose_short_list(target, drafter, settings.draft_vocab_size)
        proposer = make_proposer(
            target, drafter, choice, settings, num_draft_tokens=num_draft_tokens, tables=tables, short_list=short_list
        )
    drafter_cache = proposer.cache if proposer is not None else None
    state = SlotState(
        settings.max_num_seqs,
        num_draft_tokens=num_draft_tokens,
        num_candidates=proposer.num_candidates if proposer is not None else 0,
        device=weight.device,
        vocab_size=contract.vocab_size,
    )
    in_blocks = cache.latents if isinstance(cache, HybridCache) else cache
    planes = BlockPlanes([in_blocks] if drafter_cache is None else [in_blocks, drafter_cache])
    kept = snapshot_sizes(settings, sizes.block_size)
    snapshots: StateRows | None = None
    delta = contract.kimi.delta if contract.kimi is not None else None
    if delta is not None and settings.prefix_cache:
        snapshots = StateRows.allocate(
            delta, kept.num_snapshots, dtype=weight.dtype, device=weight.device, state_dtype=state_dtype
        )
    return EngineParts(
        target,
        drafter,
        proposer,
        short_list,
        choice,
        max_model_len,
        sizes,
        tables,
        cache,
        planes,
        state,
        kept,
        snapshots,
    )


def _weight_bytes(model: nn.Module | Target, known: set[int]) -> int:
    """Memory of a model's parameters and of its packed weights, each once; those of another model are left out."""
    sizes = {
        tensor.data_ptr(): tensor.numel() * tensor.element_size()
        for tensor in model.parameters()
        if tensor.data_ptr() not in known
    }
    for part in model.modules():
        packed = part.packed if isinstance(part, Linear) and part.weight.data_ptr() not in known else None
        if packed is not None:  # a second copy, in the order that oneDNN reads
            sizes[torch.ops.mkldnn.data_ptr(packed)] = torch.ops.mkldnn._nbytes(packed)
        native = (
            part.native if isinstance(part, Linear) else part.native_gate_up if isinstance(part, GatedMLP) else None
        )
        if native is not None and native.panels.data_ptr() not in known:
            sizes[native.panels.data_ptr()] = native.panels.numel() * native.panels.element_size()
    return sum(sizes.values())
