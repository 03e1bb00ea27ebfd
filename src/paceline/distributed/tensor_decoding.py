"""Decoding over ranks that share every layer: each runs the engine on the same requests, and they meet in its sums.

    every rank    engine -> its heads, widths and ids -> sums over ranks -> the same stream, tokens and schedule
    meetings      o_proj, down_proj and experts; embeddings; the best ids of the vocabulary; the decider's drafts

Nothing tells the others what to do next: what an engine decides follows from requests and tokens, which are the same
everywhere. So a whole step is recorded on every rank, collectives included, and all ranks play the same recordings in
the same order. What follows from a clock is left out: draft lengths that adapt to step times, limits on waiting.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence

from paceline.checkpoint.contract import TargetContract
from paceline.distributed.decoding import DecodeSizes
from paceline.distributed.mesh import Mesh
from paceline.distributed.places import DecodeRequest, DecodeResult, check_requests
from paceline.distributed.told_drafts import ToldDrafts
from paceline.engine.engine import Engine
from paceline.engine.request import RequestResult
from paceline.engine.settings import EngineSettings
from paceline.models.loading import LoadedDrafter, LoadedTarget


class TensorDecoder:
    """One rank's engine.

    Args:
        mesh: this rank's place, in a layout of one stage.
        contract: of the whole target.
        target: this rank's part of it, with the contract of its share.
        sizes: the same on every rank.
        drafter: whole, on every rank.
    """

    def __init__(
        self,
        mesh: Mesh,
        contract: TargetContract,
        target: LoadedTarget,
        sizes: DecodeSizes,
        drafter: LoadedDrafter | None = None,
    ) -> None:
        assert mesh.layout.num_stages == 1, "stages take turns, and tell each other what to run"
        self._mesh, self._contract, self._sizes = mesh, contract, sizes
        settings = EngineSettings(
            max_num_seqs=sizes.num_places,
            max_model_len=sizes.max_model_len,
            num_draft_tokens=sizes.num_draft_tokens or None,
            prefill_chunk_size=sizes.prefill_chunk_size,
            verify_method="coupled",
            draft_vocab_size="full",
            cuda_graphs=sizes.cuda_graphs,
        )
        self.engine = Engine(target, drafter, settings, all_did=lambda did: all(mesh.world.gathered(did)))
        if drafter is not None and mesh.tensor.size > 1:
            self.engine.wrap_proposer(lambda inner: ToldDrafts(inner, mesh.tensor))

    def generate(self, requests: Sequence[DecodeRequest]) -> list[DecodeResult]:
        """Continue all requests; every rank calls it, and gets the results.

        Args:
            requests: those of the decider are served.
        Raises:
            RequestError: on the decider; a request cannot be served.
            OtherRankFailedError: on all others, then.
        """
        world, sizes = self._mesh.world, self._sizes
        given = world.given_by(self._mesh.decider, list(requests))
        world.together(
            lambda: check_requests(given, vocab_size=self._contract.vocab_size, max_model_len=sizes.max_model_len)
        )
        results = self.engine.generate([one.prompt_ids for one in given], [one.sampling() for one in given])
        return [_result_of(result) for result in results]

    def close(self) -> None:
        """Drop recordings and caches; recordings go before the ranks part, whose collectives they hold."""
        self.engine.close()
        gc.collect()  # a recording and its work know each other


def _result_of(result: RequestResult) -> DecodeResult:
    assert result.finish_reason != "abort", "nobody aborts here"
    steps = tuple(
        (len(step.proposed_ids), step.num_accepted, step.num_verified_accepted, len(step.emitted_ids))
        for step in result.trace.records
    )
    return DecodeResult(result.token_ids, result.finish_reason, steps)
