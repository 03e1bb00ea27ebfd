"""DFlash: one parallel pass over [anchor, mask, mask, ...]; row i predicts the token at its own position.

B requests, Q block rows (anchor included), K = Q - 1 draft tokens, C candidates, D width, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from paceline.checkpoint.contract import DrafterContract, DraftSampleMethod
from paceline.errors import CheckpointError
from paceline.models.drafters.backbone import DrafterBackbone
from paceline.models.drafters.proposal import Proposal
from paceline.ops.noise import DRAFT, gumbel_from_hash, hash32, mix_step

MAX_CANDIDATES = 32


class DFlashDrafter(nn.Module):
    """A backbone, and the fill-in block around it; embedding and head are the target's.

    Args:
        contract: of family "dflash".
        max_positions: rows of the position table.
    Raises:
        CheckpointError: its blocks are laid out in a way that this class does not draft.
    """

    def __init__(self, contract: DrafterContract, *, max_positions: int | None = None) -> None:
        super().__init__()
        if contract.layout != "fill_in":
            # Served as fill-in, each row would be read one position off: right text, next to no acceptance.
            raise CheckpointError(
                f"the drafter was trained with the block layout {contract.layout!r} (sample_from_anchor), where the "
                "anchor's own row predicts too; a DFlash drafter is served with the layout 'fill_in'",
                origin={"drafter": contract.origin},
            )
        self.contract = contract
        self.backbone = DrafterBackbone(contract, max_positions=max_positions)

    def block_ids(self, anchor_ids_B: Tensor, num_draft_tokens: int) -> Tensor:
        """Input ids of a block, [B, 1 + num_draft_tokens]: the anchor, then mask tokens."""
        masks = anchor_ids_B.new_full((*anchor_ids_B.shape, num_draft_tokens), self.contract.mask_token_id)
        return torch.cat((anchor_ids_B.unsqueeze(-1), masks), dim=-1)

    def embed_block(self, rows: Tensor) -> Tensor:
        """Scale the target's raw embedding rows as this drafter was trained to read them."""
        scale = self.contract.input_embedding_scale
        return rows if scale == 1.0 else rows * scale

    def draft_logits(self, head_logits: Tensor) -> Tensor:
        """Multiplier first, then soft-cap, on the target head's scores."""
        logits = head_logits
        if self.contract.output_multiplier != 1.0:
            logits = logits * self.contract.output_multiplier
        cap = self.contract.final_logit_softcapping
        return logits if not cap else torch.tanh(logits / cap) * cap

    def propose(
        self,
        logits_BKV: Tensor,
        *,
        method: DraftSampleMethod,
        temperature_B: Tensor,
        seed_B: Tensor,
        position_B: Tensor,
        step_B: Tensor,
    ) -> Proposal:
        """Choose one id per predicted position, each on its own.

        Args:
            logits_BKV: `draft_logits` of rows 1..K.
            method: "greedy" proposes the argmax, one-hot; "probabilistic" draws from the softmax of the best
                `MAX_CANDIDATES` logits at the request's temperature, and rows of temperature 0 take the argmax.
            temperature_B: float32 of each request.
            seed_B: int64 of each request.
            position_B: int64, the anchor's position; every draw is keyed by the position before its token.
            step_B: int64, how many blocks this request drafted before.
        Returns:
            Ids and, for "probabilistic", the candidates' exact log-probabilities.
        """
        if method == "greedy":
            return Proposal(logits_BKV.max(dim=-1).indices)  # on a CPU four times as fast as argmax, same ties
        values_BKC, ids_BKC = logits_BKV.float().topk(min(MAX_CANDIDATES, logits_BKV.shape[-1]), dim=-1)
        is_greedy_B = temperature_B <= 0
        divisor_B = torch.where(is_greedy_B, torch.ones_like(temperature_B), temperature_B)
        log_q_BKC = (values_BKC / divisor_B[:, None, None]).log_softmax(dim=-1)
        offsets_K = torch.arange(logits_BKV.shape[1], device=logits_BKV.device)
        noise_BKC = gumbel_from_hash(
            hash32(
                mix_step(seed_B, step_B)[:, None, None], (position_B[:, None] + offsets_K)[:, :, None], ids_BKC, DRAFT
            )
        )
        drawn_BK = ids_BKC.gather(-1, (log_q_BKC + noise_BKC).argmax(dim=-1, keepdim=True)).squeeze(-1)
        # topk lists equal logits in any order, argmax takes the lowest id, which is what the target's own argmax does.
        chosen_BK = torch.where(is_greedy_B[:, None], logits_BKV.argmax(dim=-1), drawn_BK)
        return Proposal(chosen_BK, ids_BKC, log_q_BKC)

    def checkpoint_parameters(self) -> dict[str, Tensor]:
        """Parameters by the names that `checkpoint/names.py` maps to files."""
        return self.backbone.checkpoint_parameters()
