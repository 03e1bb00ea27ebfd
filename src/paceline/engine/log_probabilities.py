"""Log-probabilities of emitted tokens and of the best tokens beside them, always the target's own.

    ln p(v) = z[v] - ln sum exp z        in float32; z are the logits of the row that predicted the token

raw z carry nothing but a grammar's mask; processed z carry every rule and the sampling settings, so that a greedy row
has the rules and temperature 1. Row i of a block predicts its i-th emitted token, whether that was an accepted draft,
a correction or the bonus. B requests, L rows, V vocabulary, N best tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.engine.request import TokenLogprobs
from paceline.engine.sampling import LogprobsMode
from paceline.ops.top_k_tokens import top_k_tokens


class RowLogprobs(NamedTuple):
    """Log-probabilities of the rows of a step in one mode.

    Attributes:
        chosen_BL: float32, of the emitted tokens; without meaning behind them.
        top_ids_BLN: int64, best first, equal ones by ascending id.
        top_BLN: float32, theirs.
    """

    chosen_BL: Tensor
    top_ids_BLN: Tensor
    top_BLN: Tensor

    @property
    def num_columns(self) -> int:
        """Numbers per request in `columns`."""
        return self.chosen_BL.shape[1] * (1 + 2 * self.top_BLN.shape[2])

    @property
    def columns(self) -> Tensor:
        """All numbers of each request side by side, float64 [B, L * (1 + 2 N)]: ids are exact in it."""
        parts = (self.chosen_BL.unsqueeze(2), self.top_ids_BLN, self.top_BLN)
        return torch.cat([part.double() for part in parts], dim=2).flatten(1)


class BlockLogprobs(NamedTuple):
    """What a step's requests asked for; a mode that nobody wants is None."""

    raw: RowLogprobs | None
    processed: RowLogprobs | None


def row_logprobs(logits_BLV: Tensor, token_ids_BL: Tensor, num_top: int) -> RowLogprobs:
    """Read the log-probabilities of given tokens, and the best ones.

    Args:
        logits_BLV: any float dtype; -inf has probability 0.
        token_ids_BL: int64; -1 where there is no token.
        num_top: N, cut to V.
    """
    z_BLV = logits_BLV.float()
    log_sum_BL1 = torch.logsumexp(z_BLV, dim=-1, keepdim=True)
    chosen_BL = (z_BLV.gather(2, token_ids_BL.clamp(min=0).unsqueeze(2)) - log_sum_BL1).squeeze(2)
    num_top = min(num_top, z_BLV.shape[2])
    if num_top == 0:
        nothing = chosen_BL.new_empty(*chosen_BL.shape, 0)
        return RowLogprobs(chosen_BL, nothing.long(), nothing)
    best_BLN, ids_BLN = top_k_tokens(z_BLV, num_top)
    return RowLogprobs(chosen_BL, ids_BLN, best_BLN - log_sum_BL1)


def entries_of(
    columns: Sequence[float], token_ids: Sequence[int], num_rows: int, mode: LogprobsMode
) -> tuple[TokenLogprobs, ...]:
    """Undo `RowLogprobs.columns` for one request on the host.

    Args:
        columns: its row.
        token_ids: emitted, one per row from the first on.
        num_rows: L.
        mode: what was computed.
    Returns:
        One entry per emitted token; tokens of probability 0 are not among the best.
    """
    width = len(columns) // num_rows
    num_top = (width - 1) // 2
    entries = []
    for row, token in enumerate(token_ids):
        chosen, *best = columns[row * width : (row + 1) * width]
        pairs = zip(map(int, best[:num_top]), best[num_top:], strict=True)
        entries.append(TokenLogprobs(token, chosen, tuple(pair for pair in pairs if pair[1] > -torch.inf), mode))
    return tuple(entries)
