"""Drafting: a proposer keeps the drafter's context up to date and turns anchors into draft blocks.

B requests, T rows of a target pass, K draft tokens, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from torch import Tensor

from paceline.checkpoint.contract import AuxHiddenStream, DraftSampleMethod, TargetLayerId
from paceline.engine.attends import AttentionChoice, attend_block
from paceline.engine.cache import KeyValueCache, Write
from paceline.engine.side_stream import SideStream
from paceline.engine.slots import SlotState
from paceline.engine.step_watch import StepWatch
from paceline.models.drafters.block_drafter import BlockDrafter
from paceline.models.drafters.proposal import DraftSampling, Proposal
from paceline.models.targets.target import Target
from paceline.ops.block_rows import BlockRows
from paceline.ops.sample_tokens import NO_TOKEN


@dataclass(frozen=True)
class Rows:
    """The requests of one target pass, on the host and on the device.

    Attributes:
        slots: one slot per request.
        slots_B: the same, int64.
        starts: position of each request's first row.
        starts_B: the same, int64.
        num_rows: T, rows per request.
        context_starts: positions below hold no draft context, as after a prefix hit that lacks it; None is 0 for all.
            The target knows nothing of it.
        context_starts_B: the same, int64.
        positions_BT: int64, of every row, at most the last one of the target's table, where they were made already.
        cells_BT: int64, physical rows of the caches that the rows go to, where a batched step made them already; one
            object's tables serve all caches.
    """

    slots: Sequence[int]
    slots_B: Tensor
    starts: Sequence[int]
    starts_B: Tensor
    num_rows: int
    context_starts: Sequence[int] | None = None
    context_starts_B: Tensor | None = None
    positions_BT: Tensor | None = None
    cells_BT: Tensor | None = None


class Proposer(Protocol):
    """What the engine needs of anything that drafts.

    Attributes:
        name: for traces, such as "dflash/greedy".
        num_draft_tokens: K, proposals per block.
        num_candidates: width of the stored q; 0 if proposals are one-hot.
        max_positions: positions below this can be drafted for; beyond it a request goes on without drafts.
        target_layer_ids: target layers whose outputs `write_context` wants, ascending.
        aux_hidden_stream: which of the target's streams they are read from.
        is_capturable: drafting asks the host for nothing, so a step that drafts can be recorded.
        is_parallel: a block costs one pass, however many drafts it has.
    """

    name: str
    num_draft_tokens: int
    num_candidates: int
    max_positions: int
    target_layer_ids: tuple[TargetLayerId, ...]
    aux_hidden_stream: AuxHiddenStream
    is_capturable: bool
    is_parallel: bool

    @property
    def cache(self) -> KeyValueCache | None:
        """Context keys and values, if it keeps any."""
        ...

    def write_context(self, rows: Rows, taps: Sequence[Tensor], positions_BT: Tensor) -> None:
        """Take in the taps of target rows, refused ones among them: those are written again before they count."""
        ...

    def settle(self, rows: Rows, token_ids_BT: Tensor, ends_B: Tensor, next_ids_B: Tensor) -> None:
        """Learn which of the rows last written count; called once after each `write_context`, before any `propose`.

        Args:
            rows: as written.
            token_ids_BT: int64, what the target read at these rows.
            ends_B: int64, rows at positions below are final.
            next_ids_B: int64, the tokens at these positions: the new anchor after verification or a whole prompt, the
                next prompt token within a prompt; -1 if the target's numbers gave none.
        """
        ...

    def propose(self, rows: Rows, state: SlotState, *, all_greedy: bool, num_drafts: int | None = None) -> Proposal:
        """Draft the block after each request's anchor; `state` is committed, so anchors sit at `state.lengths`.

        Args:
            rows: as settled.
            state: where each request stands.
            all_greedy: no request of the batch samples.
            num_drafts: 1 to K; None is K. It was chosen before anything of the block was computed. Fewer cost less:
                mask rows at a block's end, or passes, are left out.
        Returns:
            `num_drafts` drafts per request.
        """
        ...


class BlockProposer:
    """A block drafter served from the cache.

    Context keys exist for positions 0..n-1 only; the block's own rows, anchor included, are a dense tail that never
    enters the cache. So there is nothing to roll back, and a refused draft leaves no trace.

    Args:
        target: lends embedding and head.
        drafter: prepared for serving.
        cache: the drafter's planes, addressed by the same tables as the target's.
        choice: form of attention.
        num_draft_tokens: K; fewer than trained drops mask rows from the block's end.
        method: how drafts are drawn from the drafter's logits.
        is_coupled: draw with the target's own noise, for verification by equality.

    Attributes:
        watch: is shown every block, for a trace with details; None for nobody.
    """

    is_capturable = True
    is_parallel = True

    def __init__(
        self,
        target: Target,
        drafter: BlockDrafter,
        cache: KeyValueCache,
        choice: AttentionChoice,
        *,
        num_draft_tokens: int,
        method: DraftSampleMethod,
        is_coupled: bool = False,
    ) -> None:
        contract = drafter.contract
        self._target, self._drafter, self._cache, self._choice = target, drafter, cache, choice
        self._method: DraftSampleMethod = method
        self._is_coupled = is_coupled
        self.name = f"{contract.family}/{method}"
        self.num_draft_tokens = num_draft_tokens
        self.num_candidates = drafter.num_candidates if method == "probabilistic" else 0
        self.max_positions = min(contract.max_position_embeddings, drafter.backbone.position_table.shape[0])
        self.target_layer_ids = contract.target_layer_ids
        self.aux_hidden_stream: AuxHiddenStream = contract.aux_hidden_stream
        self._side = SideStream(cache.planes.device)
        self.watch: StepWatch | None = None

    @property
    def cache(self) -> KeyValueCache:
        """Context keys and values of every slot."""
        return self._cache

    def write_context(self, rows: Rows, taps: Sequence[Tensor], positions_BT: Tensor) -> None:
        """Project taps to keys and values of every drafter layer and store them beside the target's.

        In a batched step that happens beside the head and the verification, which do not read them.
        """
        if rows.cells_BT is None:
            self._write_context(rows, taps, positions_BT)
            return
        with self._side.forked(*taps, positions_BT, rows.cells_BT):
            self._write_context(rows, taps, positions_BT)

    def _write_context(self, rows: Rows, taps: Sequence[Tensor], positions_BT: Tensor) -> None:
        backbone = self._drafter.backbone
        cache = self._cache
        rows_BT = rows.cells_BT
        if rows_BT is None and self._choice.is_batched:
            rows_BT = cache.tables.rows_of(rows.slots_B, positions_BT)
        if rows_BT is None and backbone.writes_at_once(cache.planes):
            rows_BT = cache.tables.rows_of_slots(rows.slots, rows.starts, rows.num_rows)
        if rows_BT is not None and backbone.is_stacked:
            backbone.write_taps(taps, rows_BT, positions_BT, cache.planes, counters=cache.counters)
            return
        if rows_BT is not None:
            write: Write = partial(cache.write_batch, cells=cache.cells_to_write(rows_BT))
        else:
            write = cache.writer(rows.slots, rows.starts, rows.num_rows)
        # A request beyond the drafter's positions drafts no more; its rows are written only to keep the batch uniform.
        turned_as_BT = positions_BT.clamp(max=self.max_positions - 1)
        features_BTD = backbone.context_features(taps)
        for layer, (k_BTMH, v_BTMH) in enumerate(backbone.context_kv(features_BTD, turned_as_BT)):
            write(layer, k_BTMH, v_BTMH)

    def settle(self, rows: Rows, token_ids_BT: Tensor, ends_B: Tensor, next_ids_B: Tensor) -> None:
        """Context keys depend on taps alone, so they are final as written; from here on they can be read."""
        self._side.join()

    def propose(self, rows: Rows, state: SlotState, *, all_greedy: bool, num_drafts: int | None = None) -> Proposal:
        """One pass of the drafter over [anchor, mask, ...] of every request."""
        num_drafts = self.num_draft_tokens if num_drafts is None else num_drafts
        block = state.block_rows(
            rows.slots_B,
            num_rows=self._drafter.num_rows(num_drafts),
            mask_id=self._drafter.contract.mask_token_id,
            vocab_size=self._target.contract.vocab_size,
            max_positions=self.max_positions,
        )
        hidden_BQD = self._run_block(rows, block)
        hidden_BKD = self._drafter.predicted_rows(hidden_BQD).to(self._target.norm.weight.dtype)
        sampling = DraftSampling(
            method="greedy" if all_greedy else self._method,
            temperature_B=block.temperature_B,
            seed_B=block.seeds_B,
            position_B=block.lengths_B,
            step_B=block.steps_B,
            is_coupled=self._is_coupled,
        )
        logits_BKV = self._drafter.logits(hidden_BKD, self._target, num_read=self._drafter.num_read(sampling))
        proposal = self._drafter.propose(hidden_BKD, logits_BKV, block.anchors_B, sampling)
        if self.watch is not None:
            self.watch.drafted(rows.slots, proposal, logits_BKV, self._drafter.vocabulary.target_ids_V)
        return proposal._replace(ids_BK=proposal.ids_BK.masked_fill(block.is_beyond_B.unsqueeze(1), NO_TOKEN))

    def _run_block(self, rows: Rows, block: BlockRows) -> Tensor:
        contract = self._drafter.contract
        backbone = self._drafter.backbone
        embeddings_BQD = self._drafter.embed(block.token_ids_BQ, self._target).to(backbone.fc.weight.dtype)
        attend = attend_block(
            self._cache,
            self._choice,
            slots=rows.slots,
            slots_B=rows.slots_B,
            lengths_B=block.lengths_B,
            max_length=max(rows.starts) + rows.num_rows,
            num_rows=block.token_ids_BQ.shape[1],
            windows=contract.layer_windows,
            causal=contract.layer_causal,
            context_starts=rows.context_starts,
            context_starts_B=rows.context_starts_B,
        )
        hidden: Tensor = backbone(embeddings_BQD, block.positions_BQ, attend)
        return hidden
