"""DFlash2: DFlash with a convolution along the block's rows, and a selector that walks through each row's candidates.

B requests, K draft tokens, C candidates, D width, R rank, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from paceline.checkpoint.contract import DrafterContract, SelectorSettings
from paceline.errors import CheckpointError
from paceline.models.drafters.block_drafter import BlockDrafter
from paceline.models.drafters.convolved_layer import convolved_layer
from paceline.models.drafters.proposal import MAX_CANDIDATES, DraftSampling, Proposal
from paceline.models.layers import Block, Linear
from paceline.ops.candidate_walk import candidate_walk
from paceline.ops.draw_candidates import candidate_log_q
from paceline.ops.top_k_tokens import top_k_tokens


class CandidateSelector(Block):
    """Low-rank scores of one token after another, weighed by the row's hidden state.

    Args:
        vocab_size: V.
        hidden_size: D.
        rank: R.
        top_k: C, candidates per position.
    """

    def __init__(self, vocab_size: int, hidden_size: int, rank: int, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.predecessor_codebook = nn.Parameter(torch.empty(vocab_size, rank))
        self.successor_codebook = nn.Parameter(torch.empty(vocab_size, rank))
        self.hidden_projection = Linear(hidden_size, rank)

    def walk(
        self,
        hidden_BKD: Tensor,
        unary_BKC: Tensor,
        candidate_ids_BKC: Tensor,
        anchor_ids_B: Tensor,
        *,
        temperature_B: Tensor | None = None,
        gumbel_BKC: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Choose along the block; arguments and results are those of `ops.candidate_walk`."""
        return candidate_walk(
            unary_BKC,
            candidate_ids_BKC,
            self.hidden_projection(hidden_BKD),
            self.predecessor_codebook,
            self.successor_codebook,
            anchor_ids_B,
            temperature_B=temperature_B,
            gumbel_BKC=gumbel_BKC,
        )


class DFlash2Drafter(BlockDrafter):
    """Each position's best candidates are scored after the token that was really chosen before them.

    Args:
        contract: of family "dflash2".
        max_positions: rows of the position table.
    Raises:
        CheckpointError: the contract asks for something that this class does not draft.
    """

    def __init__(self, contract: DrafterContract, *, max_positions: int | None = None) -> None:
        selector = _checked(contract)
        super().__init__(contract, max_positions=max_positions, make_layer=convolved_layer)
        top_k = min(selector.top_k, contract.vocab_size)
        self.candidate_selector = CandidateSelector(contract.vocab_size, contract.hidden_size, selector.rank, top_k)

    @property
    def num_candidates(self) -> int:
        """The selector's candidates: every other id has probability 0."""
        return min(self.candidate_selector.top_k, self.contract.draft_vocab_size)

    def num_read(self, sampling: DraftSampling) -> int | None:
        """The selector's candidates."""
        return self.num_candidates

    def propose(
        self, hidden_BKD: Tensor, logits_BKV: Tensor, anchor_ids_B: Tensor, sampling: DraftSampling
    ) -> Proposal:
        """Walk through the best logits of each row, as they are after multiplier and soft-cap."""
        selector = self.candidate_selector
        unary_BKC, columns_BKC = top_k_tokens(logits_BKV, self.num_candidates)
        candidate_ids_BKC = self.vocabulary.to_target_ids(columns_BKC)  # the codebooks have a row for each
        if sampling.method == "greedy":
            ids_BK, _ = selector.walk(hidden_BKD, unary_BKC, candidate_ids_BKC, anchor_ids_B)
            return Proposal(ids_BK)
        ids_BK, scores_BKC = selector.walk(
            hidden_BKD,
            unary_BKC,
            candidate_ids_BKC,
            anchor_ids_B,
            temperature_B=sampling.temperature_B,
            gumbel_BKC=sampling.gumbel(candidate_ids_BKC),
        )
        return Proposal(ids_BK, candidate_ids_BKC, candidate_log_q(scores_BKC, sampling.temperature_B))


def _checked(contract: DrafterContract) -> SelectorSettings:
    """The selector of a contract that this class drafts; a refusal of any other."""
    origin = {"drafter": contract.origin}
    if contract.layout != "fill_in":
        raise CheckpointError(
            f"the drafter was trained with the block layout {contract.layout!r}; a DFlash2 drafter is served with "
            "the layout 'fill_in'",
            origin=origin,
        )
    if contract.has_vocabulary_map:
        raise CheckpointError(
            f"the drafter proposes from {contract.draft_vocab_size} of {contract.target_vocab_size} token ids; the "
            "codebooks of a DFlash2 selector are indexed by target ids, which takes the whole vocabulary",
            origin=origin,
        )
    convolution, selector = contract.convolution, contract.selector
    if convolution is None or selector is None:
        missing = "convolution" if convolution is None else "candidate selector"
        raise CheckpointError(f"the drafter is of family 'dflash2' but has no {missing}", origin=origin)
    if contract.hidden_size % convolution.group_size:
        raise CheckpointError(
            f"the convolution's groups of {convolution.group_size} channels do not divide the drafter's width "
            f"{contract.hidden_size}",
            origin=origin,
        )
    if selector.top_k > MAX_CANDIDATES:
        raise CheckpointError(
            f"the selector walks through {selector.top_k} candidates per position; at most {MAX_CANDIDATES} can be "
            "verified",
            origin=origin,
        )
    return selector
