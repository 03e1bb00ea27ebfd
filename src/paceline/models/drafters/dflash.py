"""DFlash: one parallel pass over [anchor, mask, mask, ...]; row i predicts the token at its own position.

B requests, K draft tokens, D width, V draft vocabulary.
"""

from __future__ import annotations

from torch import Tensor

from paceline.checkpoint.contract import DrafterContract
from paceline.errors import CheckpointError
from paceline.models.drafters.block_drafter import BlockDrafter
from paceline.models.drafters.draw import draw_rows
from paceline.models.drafters.proposal import DraftSampling, Proposal


class DFlashDrafter(BlockDrafter):
    """Positions of a block are chosen independently of each other.

    Args:
        contract: of family "dflash".
        max_positions: rows of the position table.
    Raises:
        CheckpointError: its blocks are laid out in a way that this class does not draft.
    """

    def __init__(self, contract: DrafterContract, *, max_positions: int | None = None) -> None:
        if contract.layout != "fill_in":
            # Served as fill-in, each row would be read one position off: right text, next to no acceptance.
            raise CheckpointError(
                f"the drafter was trained with the block layout {contract.layout!r} (sample_from_anchor), where the "
                "anchor's own row predicts too; a DFlash drafter is served with the layout 'fill_in'",
                origin={"drafter": contract.origin},
            )
        super().__init__(contract, max_positions=max_positions)

    def num_read(self, sampling: DraftSampling) -> int | None:
        """The best one, or those that are drawn from."""
        return 1 if sampling.method == "greedy" else self.num_candidates

    def propose(
        self, hidden_BKD: Tensor, logits_BKV: Tensor, anchor_ids_B: Tensor, sampling: DraftSampling
    ) -> Proposal:
        """Choose each position on its own."""
        return draw_rows(logits_BKV, sampling, self.vocabulary)
