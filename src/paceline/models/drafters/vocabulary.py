"""The two ends of a drafter: embedding rows in, scores out, and which target ids the scores stand for.

A drafter borrows the target's embedding and output head unless it brings its own; a copy that equals the target's bit
for bit is dropped at load. B requests, Q block rows, D width, V draft vocabulary, W target vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor, nn

from paceline.checkpoint.contract import DrafterContract
from paceline.models.embedding import empty_embedding
from paceline.models.layers import GivesBestScores, Linear, score_rows
from paceline.ops.embed_rows import gather_rows


class Lender(Protocol):
    """What a target lends: raw embedding rows, and scores through its own head, quantised or not."""

    def embed(self, token_ids: Tensor) -> Tensor:
        """Raw rows, [...] to [..., D]."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., D] to [..., target vocabulary]."""
        ...


class DraftVocabulary(nn.Module):
    """Own or borrowed embedding and head, embedding scale, logit transforms, reduced vocabulary.

    Args:
        contract: says which parts the drafter brings.
    """

    def __init__(self, contract: DrafterContract) -> None:
        super().__init__()
        self.contract = contract
        self.embed_tokens: nn.Embedding | None = None
        if contract.has_own_embedding:
            self.embed_tokens = empty_embedding(contract.vocab_size, contract.hidden_size)
        self.lm_head = Linear(contract.hidden_size, contract.draft_vocab_size) if contract.has_own_head else None
        self.mask_embedding_D: Tensor | None
        mask = torch.zeros(contract.hidden_size) if contract.has_mask_embedding else None
        self.register_buffer("mask_embedding_D", mask, persistent=False)
        self.target_ids_V: Tensor | None  # int64, the target id of every draft id; None where they are the same
        identity = torch.arange(contract.draft_vocab_size) if contract.has_vocabulary_map else None
        self.register_buffer("target_ids_V", identity, persistent=False)

    def embed(self, token_ids: Tensor, target: Lender) -> Tensor:
        """Embedding rows as the drafter was trained to read them: mask row replaced first, then scaled."""
        own = self.embed_tokens
        rows = target.embed(token_ids) if own is None else gather_rows(own.weight, token_ids)
        if self.mask_embedding_D is not None:
            is_mask = (token_ids == self.contract.mask_token_id).unsqueeze(-1)
            rows = torch.where(is_mask, self.mask_embedding_D.to(rows.dtype), rows)
        scale = self.contract.input_embedding_scale
        return rows if scale == 1.0 else rows * scale

    def logits(self, hidden: Tensor, target: Lender, *, num_read: int | None = None) -> Tensor:
        """Draft scores of hidden rows, [..., D] to [..., V]: head, then multiplier, then soft-cap.

        Args:
            hidden: rows behind the final norm.
            target: lends its head where the drafter has none.
            num_read: how many of a row's best scores somebody will look at. Of a head that is split over processes no
                more is asked for, and the others come as -inf; None is all of them.
        """
        head = getattr(target, "lm_head", None)
        is_some = self.lm_head is None and num_read is not None and self.contract.final_logit_softcapping is None
        if is_some and num_read is not None and isinstance(head, GivesBestScores):
            return self.transform(head.best_scores(hidden, num_read))
        return self.transform(target.logits(hidden) if self.lm_head is None else score_rows(self.lm_head, hidden))

    def transform(self, head_logits: Tensor) -> Tensor:
        """Multiplier first, then soft-cap, on the head's scores."""
        logits = head_logits
        if self.contract.output_multiplier != 1.0:
            logits = logits * self.contract.output_multiplier
        cap = self.contract.final_logit_softcapping
        return logits if not cap else torch.tanh(logits / cap) * cap

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        """Target ids of draft ids; the same tensor where the vocabularies are one."""
        return draft_ids if self.target_ids_V is None else self.target_ids_V[draft_ids]

    def set_tables(self, draft_to_target_V: Tensor | None, mask_embedding_D: Tensor | None) -> None:
        """Fill in what a checkpoint stores beside its parameters; what the contract has no place for stays out.

        Args:
            draft_to_target_V: int64, the target id of every draft id.
            mask_embedding_D: the row of the mask token.
        """
        for place, table in ((self.target_ids_V, draft_to_target_V), (self.mask_embedding_D, mask_embedding_D)):
            assert (place is None) == (table is None), "the contract and the checkpoint's side tables disagree"
            if place is not None and table is not None:
                place.copy_(table)

    def shortened(self, ids_V: Tensor, target_head: Linear) -> DraftVocabulary:
        """The same ends with a head that scores some ids alone; its rows are copied, all else is shared.

        Args:
            ids_V: int64 target ids, ascending.
            target_head: what is borrowed where the drafter has no head of its own.
        """
        assert self.target_ids_V is None, "draft ids are target ids, or a list of some would mean others"
        with torch.device("meta"):
            short = DraftVocabulary(replace(self.contract, draft_vocab_size=len(ids_V)))
        head = target_head if self.lm_head is None else self.lm_head
        short.embed_tokens, short.mask_embedding_D = self.embed_tokens, self.mask_embedding_D
        short.lm_head = head.some_outputs(ids_V)
        short.target_ids_V = ids_V.to(head.weight.device)
        return short

    def drop_copies(self, embedding_VD: Tensor, head_VD: Tensor) -> list[str]:
        """Share the target's tables where the drafter's own are the same, bit for bit.

        Equality decides, never the existence of a name: a fine-tuned table must not be replaced in silence.

        Returns:
            Which were dropped: "embedding", "output head".
        """
        dropped = []
        if self.embed_tokens is not None and _is_same(self.embed_tokens.weight, embedding_VD):
            self.embed_tokens = None
            dropped.append("embedding")
        if self.lm_head is not None and self.target_ids_V is None and _is_same(self.lm_head.weight, head_VD):
            self.lm_head = None
            dropped.append("output head")
        return dropped


def by_frequency(counts_W: Tensor, always: Collection[int]) -> Tensor:
    """Target ids by how often they occur; of equal counts the lower id comes first.

    Args:
        counts_W: int64, occurrences of every target id.
        always: ids that come before all others, whatever their counts.
    Returns:
        int64 [W].
    """
    ranks_W = counts_W.clone()
    ranks_W[torch.tensor(sorted(always), dtype=torch.int64)] = counts_W.max() + 1
    return ranks_W.argsort(descending=True, stable=True)


def _is_same(own: Tensor, lent: Tensor) -> bool:
    return own.shape == lent.shape and torch.equal(own, lent)
