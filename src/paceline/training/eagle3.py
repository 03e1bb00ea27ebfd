"""EAGLE-3 unrolled as it is served: one pass over the whole conversations, then one row per block and further draft.

Row p reads the token at p + 1 and predicts the one at p + 2. A block with its anchor at a starts at row a - 1, the last
that the target has settled; its features are known up to there, since serving knows no state of the anchor. Draft k > 1
comes from a row at a - 2 + k that starts from the state the row before gave. Such a row sees the settled rows up to
a - 1 and the rows of its own block, and no row of another block. So every block is drafted as if it were alone, and
what a draft costs beyond the first pass does not grow with the length of the conversation.

B conversations, S tokens, A blocks, K drafts, D width, M key/value heads, H head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paceline.models.attends import WholeSequence
from paceline.models.drafters.eagle3 import Eagle3Drafter
from paceline.models.drafters.vocabulary import Lender
from paceline.ops.attention import attention
from paceline.training.anchors import same_document
from paceline.training.data import Batch

NextIds = Callable[[int, Tensor], Tensor]


@dataclass
class _Chains:
    """Attention of both kinds of pass, and the keys and values that they leave behind.

    Attributes:
        settled_BAS: bool, settled rows that a block's rows see.
        own_AA: bool, a block's row among the rows of all blocks.
        whole: attention of whole conversations.
        settled: per layer, keys and values of the whole conversations, [B, M, S, H].
        drafted: per layer, the same of every further pass, each [B, M, A, H].
    """

    settled_BAS: Tensor
    own_AA: Tensor
    whole: WholeSequence = field(default_factory=WholeSequence)
    settled: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    drafted: dict[int, list[tuple[Tensor, Tensor]]] = field(default_factory=dict)

    def __call__(
        self, layer: int, q_BTNH: Tensor, k_BTMH: Tensor, v_BTMH: Tensor, *, sink_N: Tensor | None = None
    ) -> Tensor:
        """Attend from whole conversations at the first call of a layer, from one row per block afterwards."""
        assert sink_N is None, "EAGLE-3 drafters have no attention sinks"
        q, k, v = (rows.transpose(1, 2) for rows in (q_BTNH, k_BTMH, v_BTMH))
        if layer not in self.settled:
            self.settled[layer] = k, v
            return self.whole(layer, q_BTNH, k_BTMH, v_BTMH)
        drafted = self.drafted.setdefault(layer, [])
        drafted.append((k, v))
        keys, values = zip(self.settled[layer], *drafted, strict=True)
        own_BAR = self.own_AA.repeat(1, len(drafted)).expand(len(self.settled_BAS), -1, -1)
        visible = torch.cat((self.settled_BAS, own_BAR), dim=-1).unsqueeze(1)
        return attention(q, torch.cat(keys, dim=2), torch.cat(values, dim=2), visible=visible).transpose(1, 2)


def draft_chains(
    drafter: Eagle3Drafter,
    target: Lender,
    taps: Sequence[Tensor],
    batch: Batch,
    anchors_BA: Tensor,
    num_drafts: int,
    next_ids: NextIds,
) -> Tensor:
    """Run an EAGLE-3 drafter from every anchor.

    Args:
        drafter: to be trained or scored; every layer sees all there is.
        target: lends the embedding.
        taps: each [B, S, D], of the whole conversations.
        batch: the conversations.
        anchors_BA: int64, at least 1 where anybody cares for the result.
        num_drafts: K.
        next_ids: takes k, from 1, and what the head reads for draft k, [B, A, D]; gives draft k itself or, in training,
            the token that really came, int64 [B, A]: the next row reads its embedding.
    Returns:
        What the head reads for every draft, [B, A, K, D].
    """
    contract = drafter.contract
    assert all(window is None for window in contract.layer_windows), "rows of a block see every settled row"
    token_ids_BS, packing = batch.token_ids_BS, batch.packing
    key_S = torch.arange(token_ids_BS.shape[1], device=token_ids_BS.device)
    starts_BA = (anchors_BA - 1).clamp(min=0)
    settled_BAS = key_S <= starts_BA.unsqueeze(-1)
    # What stands behind a conversation's last row does not matter: no block starts there.
    following_BS = torch.cat((token_ids_BS[:, 1:], token_ids_BS[:, -1:]), dim=1)
    start_positions_BA = starts_BA
    if packing is not None:
        settled_BAS = settled_BAS & same_document(packing.documents_BS, starts_BA)
        start_positions_BA = packing.positions_BS.gather(1, starts_BA)
    chains = _Chains(
        settled_BAS,
        torch.eye(anchors_BA.shape[1], dtype=torch.bool, device=anchors_BA.device),
        WholeSequence(None if packing is None else packing.documents_BS),
    )
    out_BSD, recycled_BSD = drafter(
        drafter.embed(following_BS, target), drafter.features(taps), batch.positions_BS, chains
    )
    index_BAD = starts_BA.unsqueeze(-1).expand(-1, -1, out_BSD.shape[-1])
    out_BAD, hidden_BAD = out_BSD.gather(1, index_BAD), recycled_BSD.gather(1, index_BAD)
    states, last = [out_BAD], drafter.position_table.shape[0] - 1
    for k in range(1, num_drafts):
        embeddings_BAD = drafter.embed(next_ids(k, out_BAD), target)
        out_BAD, hidden_BAD = drafter(embeddings_BAD, hidden_BAD, (start_positions_BA + k).clamp(max=last), chains)
        states.append(out_BAD)
    return torch.stack(states, dim=2)
