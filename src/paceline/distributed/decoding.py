"""Decoding over ranks: a pass through all stages, one rank's verdict on it, and that verdict back to every rank.

    1 the decider tells every rank how many rows of the last pass count, and which rows come next      (`plan.py`)
    2 each rank commits the states of its own layers by these counts, and runs its layers              (`stage_pass.py`)
    3 the ranks of the last stage choose each row's own token together                                 (`choosing.py`)
    4 the decider compares it with the drafts, takes taps and tokens into the drafter, and drafts      (`drafting.py`)

Every pass is exact, row by row (`models/stepwise.py`, `key_value_context.py`): what was rejected leaves no trace in any
stage. So in
row-invariant arithmetic the tokens with drafts are those without, and a pipeline's are those of one process. Stages
take turns: with one batch under way, all but one of them wait. B places, T rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from paceline.checkpoint.contract import TargetContract
from paceline.distributed.choosing import choose_ids
from paceline.distributed.drafting import Drafting
from paceline.distributed.key_value_context import KeyValueContext
from paceline.distributed.mesh import Mesh
from paceline.distributed.places import DecodeRequest, DecodeResult, Places
from paceline.distributed.plan import Plan, hear, tell
from paceline.distributed.sharding import share_of, vocabulary_shard
from paceline.distributed.stage_pass import StagePass
from paceline.distributed.world import OtherRankFailedError
from paceline.engine.slots import SamplingRows
from paceline.errors import EXIT_FAILED
from paceline.models.layers import Linear
from paceline.models.stepwise import StepwiseContext
from paceline.ops.sample_tokens import NO_TOKEN

Context: TypeAlias = StepwiseContext | KeyValueContext


@dataclass(frozen=True)
class DecodeSizes:
    """Sizes that all ranks share.

    Attributes:
        num_places: requests at the same time.
        max_model_len: tokens that prompt and answer may hold together.
        prefill_chunk_size: prompt tokens of a request per pass.
        num_draft_tokens: K; 0 without a drafter.
        cuda_graphs: as for an engine, where all ranks share every layer; stages record nothing.
    """

    num_places: int = 4
    max_model_len: int = 2048
    prefill_chunk_size: int = 32
    num_draft_tokens: int = 0
    cuda_graphs: bool | None = None

    @property
    def max_rows(self) -> int:
        """W, rows of a request and pass."""
        return max(self.prefill_chunk_size, self.num_draft_tokens + 1)


class Decoder:
    """One rank's part of decoding.

    Args:
        mesh: this rank's place.
        contract: of the whole target.
        stage_pass: this rank's layers, with taps prepared.
        sizes: the same on every rank.
        drafting: on the decider, if there is a drafter.
    """

    def __init__(
        self,
        mesh: Mesh,
        contract: TargetContract,
        stage_pass: StagePass,
        sizes: DecodeSizes,
        drafting: Drafting | None = None,
    ) -> None:
        assert drafting is None or mesh.is_decider, "one rank drafts"
        self._mesh, self._contract, self._pass, self._sizes = mesh, contract, stage_pass, sizes
        self._drafting = drafting

    def generate(self, requests: Sequence[DecodeRequest]) -> list[DecodeResult]:
        """Continue all requests; every rank calls it, and gets the results.

        Args:
            requests: those of the decider are served.
        Raises:
            RequestError: on the decider; a request cannot be served.
            OtherRankFailedError: on all others, if the decider failed.
        """
        context = self._new_context()
        if not self._mesh.is_decider:
            self._follow(context)
            return self._mesh.world.given_by(self._mesh.decider, None)
        try:
            results = self._decide(requests, context)
        except Exception:
            self._tell(Plan.closing("failed", self._sizes.num_places))
            raise
        return self._mesh.world.given_by(self._mesh.decider, results)

    def _new_context(self) -> Context:
        stage, sizes = self._pass.stage, self._sizes
        layer, layers = stage.layers[stage.start], self._mesh.layers
        weight = layer.get_submodule("input_layernorm").get_parameter("weight")
        share = share_of(self._contract, self._mesh.tensor.size)
        num_places, capacity = sizes.num_places, sizes.max_model_len + sizes.max_rows
        if share.kimi is not None:
            return StepwiseContext(share, num_places, capacity, dtype=weight.dtype, device=weight.device, layers=layers)
        projection = layer.get_submodule("self_attn.o_proj")
        assert isinstance(projection, Linear)
        return KeyValueContext(
            share,
            num_places,
            capacity,
            dtype=weight.dtype,
            device=weight.device,
            layers=layers,
            mode=projection.mode,
        )

    def _decide(self, requests: Sequence[DecodeRequest], context: Context) -> list[DecodeResult]:
        sizes = self._sizes
        places = Places(
            self._contract,
            requests,
            num_places=sizes.num_places,
            max_rows=sizes.max_rows,
            max_model_len=sizes.max_model_len,
        )
        counts = [0] * sizes.num_places
        while True:
            new = places.admit()
            rows = places.next_rows()
            if not any(rows):
                self._tell(Plan.closing("end", sizes.num_places))
                return places.results()
            running = [place.request if place is not None else None for place in places.running]
            plan = Plan.of_rows(
                rows,
                counts=counts,
                new_places=new,
                num_judged=places.num_judged(),
                requests=running,
            )
            self._tell(plan)
            for number in new:
                place = places.running[number]
                if self._drafting is not None and place is not None:
                    self._drafting.begin(number, place)
            own_ids_BT, taps = self._step(plan, context)
            counts = places.take(own_ids_BT.tolist())
            if self._drafting is not None:
                self._drafting.follow(places.running, counts, plan.token_ids_BT, taps)

    def _follow(self, context: Context) -> None:
        sizes, decider = self._sizes, self._mesh.decider
        while (plan := hear(sizes.num_places, sizes.max_rows, decider)).kind == "run":
            self._step(plan, context)
        if plan.kind == "failed":
            raise OtherRankFailedError(decider, EXIT_FAILED, "its own message says how")

    def _step(self, plan: Plan, context: Context) -> tuple[Tensor, list[Tensor]]:
        """Commit the last pass, then run this one; what is returned says something on the last stage alone."""
        device = context.lengths_B.device
        context.commit(plan.counts_B.to(device))
        for place in plan.is_new_B.nonzero().flatten().tolist():
            context.clear(place)
        token_ids_BT = plan.token_ids_BT.to(device)
        rows_T = torch.arange(token_ids_BT.shape[1], device=device)
        # Rows past a place's own, and the last drafts of a text, may lie beyond the positions; nothing comes of them.
        positions_BT = (context.lengths_B.unsqueeze(1) + rows_T).clamp(max=self._contract.max_position_embeddings - 1)
        found = self._pass.run(token_ids_BT, context, positions_BT)
        if found is None:
            return token_ids_BT, []
        hidden_BTD, taps = found
        return self._choose(hidden_BTD, plan, context), taps

    def _choose(self, hidden_BTD: Tensor, plan: Plan, context: Context) -> Tensor:
        """The target's own token behind every row that is judged, int64 [B, T]; -1 elsewhere."""
        device, num_rows = hidden_BTD.device, hidden_BTD.shape[1]
        own_ids_BT = torch.full(hidden_BTD.shape[:2], NO_TOKEN, dtype=torch.int64, device=device)
        is_judged_BT = torch.arange(num_rows) < plan.num_judged_B.unsqueeze(1)
        places_R, rows_R = (index_R.to(device) for index_R in is_judged_BT.nonzero(as_tuple=True))
        if len(places_R):
            own_ids_BT[places_R, rows_R], _ = choose_ids(
                self._pass.logits(hidden_BTD[places_R, rows_R]),
                vocabulary_shard(self._contract, self._mesh.tensor),
                self._mesh.tensor,
                sampling=SamplingRows(*(setting_B.to(device)[places_R] for setting_B in plan.sampling)),
                position_R=context.lengths_B[places_R] + rows_R,
                all_greedy=plan.all_greedy,
                vocab_size=self._contract.vocab_size,
                truncation=plan.truncation,
            )
        return own_ids_BT

    def _tell(self, plan: Plan) -> None:
        if self._mesh.world.size > 1:
            tell(plan, self._sizes.max_rows, self._mesh.decider)
