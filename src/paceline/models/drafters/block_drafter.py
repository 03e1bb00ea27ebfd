"""What the block drafters share: the block's rows, both ends of the network, and the way into a checkpoint.

B requests, Q block rows, K draft tokens, D width, V draft vocabulary.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor, nn

from paceline.checkpoint.contract import DrafterContract
from paceline.models.drafters.backbone import DrafterBackbone, plain_layer
from paceline.models.drafters.proposal import MAX_CANDIDATES, DraftSampling, Proposal
from paceline.models.drafters.vocabulary import DraftVocabulary, Lender
from paceline.models.layers import LinearMode, set_drafter_mode


class BlockDrafter(nn.Module):
    """One parallel pass over [anchor, mask, mask, ...]; a family adds how it turns hidden rows into tokens.

    Args:
        contract: of the family.
        max_positions: rows of the position table.
        make_layer: builds layer i of the backbone.
    """

    def __init__(
        self,
        contract: DrafterContract,
        *,
        max_positions: int | None = None,
        make_layer: Callable[[DrafterContract, int], nn.Module] = plain_layer,
    ) -> None:
        super().__init__()
        self.contract = contract
        self.backbone = DrafterBackbone(contract, max_positions=max_positions, make_layer=make_layer)
        self.vocabulary = DraftVocabulary(contract)

    @property
    def num_candidates(self) -> int:
        """C: candidates per position of a "probabilistic" proposal."""
        return min(MAX_CANDIDATES, self.contract.draft_vocab_size)

    def num_rows(self, num_draft_tokens: int) -> int:
        """Q: rows of a block that proposes `num_draft_tokens`."""
        return num_draft_tokens + self.contract.first_predicted_row

    def block_ids(self, anchor_ids: Tensor, num_draft_tokens: int) -> Tensor:
        """Input ids of a block, [...] to [..., Q]: the anchor, then mask tokens."""
        num_masks = self.num_rows(num_draft_tokens) - 1
        masks = anchor_ids.new_full((*anchor_ids.shape, num_masks), self.contract.mask_token_id)
        return torch.cat((anchor_ids.unsqueeze(-1), masks), dim=-1)

    def embed(self, token_ids: Tensor, target: Lender) -> Tensor:
        """Embedding rows of a block's input ids, as this drafter was trained to read them."""
        return self.vocabulary.embed(token_ids, target)

    def predicted_rows(self, hidden_BQD: Tensor) -> Tensor:
        """The rows whose outputs are sampled, [..., Q, D] to [..., K, D]."""
        return hidden_BQD[..., self.contract.first_predicted_row :, :]

    def logits(self, hidden: Tensor, target: Lender, *, num_read: int | None = None) -> Tensor:
        """Draft scores of predicted rows before anything that couples positions, [..., D] to [..., V].

        Args:
            hidden: predicted rows.
            target: lends its head where the drafter has none.
            num_read: how many of a row's best will be looked at; None is all.
        """
        return self.vocabulary.logits(hidden, target, num_read=num_read)

    def num_read(self, sampling: DraftSampling) -> int | None:
        """How many of a row's best scores `propose` looks at; None is all of them."""
        return None

    @abstractmethod
    def propose(
        self, hidden_BKD: Tensor, logits_BKV: Tensor, anchor_ids_B: Tensor, sampling: DraftSampling
    ) -> Proposal:
        """Choose one id per predicted position.

        Args:
            hidden_BKD: predicted rows after the final norm.
            logits_BKV: `logits` of these rows, any float dtype.
            anchor_ids_B: int64 target ids.
            sampling: method, temperature and noise keys.
        Returns:
            Target ids and, for "probabilistic", the candidates' exact log-probabilities.
        """

    def prepare_for_serving(self, mode: LinearMode) -> None:
        """Stack the context projections and set the arithmetic of every linear."""
        self.backbone.stack_context()
        set_drafter_mode(self, mode)

    def checkpoint_parameters(self) -> dict[str, Tensor]:
        """Parameters by the names that `checkpoint/names.py` maps to files."""
        named = self.backbone.checkpoint_parameters()
        for name, parameter in self.named_parameters():
            if not name.startswith("backbone."):
                named[name.removeprefix("vocabulary.")] = parameter
        return named
