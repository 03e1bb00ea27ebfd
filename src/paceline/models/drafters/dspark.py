"""DSpark: one parallel pass over the block, then a walk that biases each row by the token drawn before it.

    logits_k = base_k + bias(prev_k, h_k),   prev_0 = anchor,   prev_k+1 = the target id drawn from logits_k

`base` is what the shared head gives, multiplier and soft-cap included; the bias is added raw, as in training. Without a
Markov head (rank 0) the rows are independent. Source: public DSpark drafters and their training code.

B requests, K draft tokens, C candidates, D width, V draft vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.checkpoint.contract import DrafterContract
from paceline.errors import CheckpointError
from paceline.models.drafters.backbone import plain_layer
from paceline.models.drafters.block_drafter import BlockDrafter
from paceline.models.drafters.draw import draw_rows, join_rows
from paceline.models.drafters.heads import ConfidenceHead, MarkovHead
from paceline.models.drafters.latent import latent_layer
from paceline.models.drafters.proposal import MAX_CANDIDATES, DraftSampling, Proposal


class DSparkDrafter(BlockDrafter):
    """Rows of both block layouts: from the anchor's own on (anchor_sampling), or from the first mask on (fill_in).

    Args:
        contract: of family "dspark".
        max_positions: rows of the position table.
    Raises:
        CheckpointError: the contract asks for what this class does not draft.
    """

    def __init__(self, contract: DrafterContract, *, max_positions: int | None = None) -> None:
        _check(contract)
        make_layer = plain_layer if contract.latent is None else latent_layer
        super().__init__(contract, max_positions=max_positions, make_layer=make_layer)
        markov, confidence = contract.markov, contract.confidence
        self.markov_head: MarkovHead | None = None
        if markov is not None:
            self.markov_head = MarkovHead(
                markov,
                hidden_size=contract.hidden_size,
                target_vocab_size=contract.target_vocab_size,
                draft_vocab_size=contract.draft_vocab_size,
            )
        self.confidence_head: ConfidenceHead | None = None
        if confidence is not None:
            reads_markov = markov is not None and confidence.with_markov
            self.confidence_head = ConfidenceHead(contract.hidden_size, markov.rank if markov and reads_markov else 0)

    @property
    def num_candidates(self) -> int:
        """C: under `draft_top_k` every other id has probability 0."""
        return min(super().num_candidates, self.contract.draft_top_k or MAX_CANDIDATES)

    def propose(
        self, hidden_BKD: Tensor, logits_BKV: Tensor, anchor_ids_B: Tensor, sampling: DraftSampling
    ) -> Proposal:
        """Walk the rows in order; each is drawn from logits that know what was drawn before it."""
        draft_ids_BKC = None
        if self.contract.draft_top_k is not None:
            # Taken from the base: no bias lifts an id into the set. Ascending, so that ties go to the lowest id.
            top_k = min(self.contract.draft_top_k, logits_BKV.shape[-1])
            draft_ids_BKC = logits_BKV.topk(top_k, dim=-1).indices.sort(dim=-1).values
            logits_BKV = logits_BKV.gather(-1, draft_ids_BKC)
        if self.markov_head is None:
            proposal = draw_rows(logits_BKV, sampling, self.vocabulary, draft_ids_BKV=draft_ids_BKC)
        else:
            proposal = self._walk(self.markov_head, hidden_BKD, logits_BKV, draft_ids_BKC, anchor_ids_B, sampling)
        if self.confidence_head is None:
            return proposal
        return proposal._replace(confidence_BK=self._confidence(hidden_BKD, anchor_ids_B, proposal.ids_BK))

    def _walk(
        self,
        head: MarkovHead,
        hidden_BKD: Tensor,
        base_BKV: Tensor,
        draft_ids_BKV: Tensor | None,
        anchor_ids_B: Tensor,
        sampling: DraftSampling,
    ) -> Proposal:
        previous_B, state = anchor_ids_B, None
        rows = []
        for k in range(base_BKV.shape[1]):
            scored = None if draft_ids_BKV is None else draft_ids_BKV[:, k : k + 1]
            bias_BV, state = head.bias(previous_B, hidden_BKD[:, k], state, None if scored is None else scored[:, 0])
            scores_B1V = (base_BKV[:, k].float() + bias_BV).unsqueeze(1)
            row = draw_rows(scores_B1V, sampling, self.vocabulary, first=k, draft_ids_BKV=scored)
            previous_B = row.ids_BK[:, 0]
            rows.append(row)
        return join_rows(rows)

    def _confidence(self, hidden_BKD: Tensor, anchor_ids_B: Tensor, ids_BK: Tensor) -> Tensor:
        """The estimate for each row, from the token before it and never from the row's own draft."""
        assert self.confidence_head is not None, "called only where there is one"
        embedding_BKR = None
        if self.confidence_head.reads_markov and self.markov_head is not None:
            previous_BK = torch.cat((anchor_ids_B.unsqueeze(1), ids_BK[:, :-1]), dim=1)
            embedding_BKR = self.markov_head.markov_w1(previous_BK)
        confidence_BK: Tensor = self.confidence_head(hidden_BKD, embedding_BKR)
        return confidence_BK


def _check(contract: DrafterContract) -> None:
    if contract.layout == "autoregressive":
        raise CheckpointError(
            f"the drafter's block layout is {contract.layout!r}; a DSpark drafter is served with the layouts "
            "'anchor_sampling' and 'fill_in'",
            origin={"drafter": contract.origin},
        )
    if contract.has_vocabulary_map and not contract.has_own_head:
        raise CheckpointError(
            f"the drafter proposes from {contract.draft_vocab_size} of {contract.target_vocab_size} token ids but "
            "brings no lm_head of its own; the target's head scores all of them",
            origin={"drafter": contract.origin},
        )
    if contract.has_mask_embedding:
        # DSpark is trained with the vocabulary's own row of the mask token.
        raise CheckpointError(
            "the drafter brings a mask embedding of its own; a DSpark drafter reads row "
            f"{contract.mask_token_id} (mask_token_id) of the embedding",
            origin={"drafter": contract.origin},
        )
