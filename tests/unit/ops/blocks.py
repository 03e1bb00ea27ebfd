"""Blocks to verify, with all that may be odd about one, for kernels against their references."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Block(NamedTuple):
    """The tensors of one call of `verify_block`; B requests, K drafts, C candidates, V vocabulary."""

    drafts: Tensor
    logits: Tensor
    candidate_ids: Tensor
    log_q: Tensor
    temperature: Tensor
    seed: Tensor
    position: Tensor
    step: Tensor

    @property
    def settings(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.temperature, self.seed, self.position, self.step

    def of(self, requests: Sequence[int]) -> Block:
        """Some of the requests."""
        return Block(*(tensor[list(requests)] for tensor in self))

    def on(self, device: torch.device) -> Block:
        return Block(*(tensor.to(device) for tensor in self))


def odd_block(
    B: int, K: int, V: int, C: int, *, seed: int = 0, is_tied: bool = False, has_faults: bool = True
) -> Block:
    """Greedy and sampled requests, missing drafts, padded candidates, removed tokens, rows that are no rows.

    `is_tied` rounds logits to whole numbers: equal ones all over the row, across any border.
    """
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(B, K + 1, V, generator=generator) * 1.5
    if is_tied:
        logits = logits.round()
    else:
        logits = logits.masked_fill(torch.rand(logits.shape, generator=generator) < 0.2, -torch.inf)
        logits[..., 0] = 0.5  # something is always left
    ids = torch.rand(B, K, V, generator=generator).topk(C, dim=-1).indices
    log_q = torch.randn(B, K, C, generator=generator).log_softmax(-1)
    drafts = ids.gather(2, torch.randint(C, (B, K, 1), generator=generator)).squeeze(2)
    # Most drafts are lifted, so that whole blocks are kept, too.
    lift = 4.0 * (torch.rand(B, K, 1, generator=generator) < 0.7)
    logits[:, :K] = logits[:, :K].scatter_add(2, drafts.unsqueeze(2), lift)
    drafts[torch.rand(B, K, generator=generator) < 0.1] = -1
    is_padding = (torch.rand(B, K, C, generator=generator) < 0.2) & (ids != drafts.unsqueeze(2))
    ids, log_q = ids.masked_fill(is_padding, -1), log_q.masked_fill(is_padding, -torch.inf)
    temperature = torch.rand(B, generator=generator) + 0.2
    temperature[1::3] = 0.0
    if has_faults:
        for row, value in zip(range(0, B * (K + 1), 7), (torch.nan, -torch.inf, torch.inf) * B, strict=False):
            spot = slice(None) if value == -torch.inf else row % V
            logits.view(-1, V)[row, spot] = value
    words = torch.randint(-(2**62), 2**62, (B,), generator=generator)
    position, step = (torch.randint(5000, (B,), generator=generator) for _ in range(2))
    return Block(drafts, logits, ids, log_q, temperature, words, position, step)
