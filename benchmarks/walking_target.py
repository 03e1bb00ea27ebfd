"""A small Kimi target that was taught a text which cannot be drafted without taps, and prompts of that text.

Tokens are places of a ring, named in random order. A text begins with a token that tells its stride, and goes on from
place to place by it. The last token alone has as many successors as there are strides, and so does every draft behind
it: whoever drafts must learn the stride from what the target knows, which is what its taps say.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.command_line import say

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from paceline.models.targets.kimi import KimiTarget

VOCAB_SIZE = 128
_STRIDES = (1, 3, 5, 7, 11, 13, 17, 19)
_NUM_PLACES, _FIRST_STRIDE_ID, _FIRST_PLACE_ID = 64, 4, 16
_LESSON_LENGTH, _BATCH_SIZE, _LEARNING_RATE, _WARM_UP = 24, 24, 2e-3, 0.1


def walks(count: int, length: int, generator: torch.Generator) -> Tensor:
    """Texts of the target, int64 [count, length]."""
    import torch

    names = torch.randperm(_NUM_PLACES, generator=torch.Generator().manual_seed(1))
    kinds = torch.randint(len(_STRIDES), (count,), generator=generator)
    starts = torch.randint(_NUM_PLACES, (count, 1), generator=generator)
    strides = torch.tensor(_STRIDES)[kinds].unsqueeze(1)
    ids = _FIRST_PLACE_ID + names[(starts + strides * torch.arange(length)) % _NUM_PLACES]
    ids[:, 0] = _FIRST_STRIDE_ID + kinds
    return ids


def teach(model: KimiTarget, num_steps: int, *, seed: int) -> float:
    """Train a target on walks, all weights of it.

    Args:
        model: random, of `VOCAB_SIZE`.
        num_steps: of AdamW; 200 suffice for 8 layers of width 128.
        seed: of the walks.
    Returns:
        The share of next tokens that were its best guess at the last step.
    """
    import torch
    from torch.nn import functional

    from paceline.models.attends import WholeSequence

    generator = torch.Generator().manual_seed(seed)
    model.requires_grad_(True).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, betas=(0.9, 0.99), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, _LEARNING_RATE, num_steps, pct_start=_WARM_UP)
    right = 0.0
    for step in range(num_steps):
        ids_BT = walks(_BATCH_SIZE, _LESSON_LENGTH, generator)
        positions_BT = torch.arange(_LESSON_LENGTH).expand_as(ids_BT)
        # The first place can be any, so that what the stride's own row says does not count.
        logits_BTV = model.logits(model(ids_BT, positions_BT, WholeSequence()))[:, 1:-1]
        labels_BT = ids_BT[:, 2:]
        optimizer.zero_grad()
        functional.cross_entropy(logits_BTV.flatten(0, 1), labels_BT.flatten()).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        right = float((logits_BTV.argmax(-1) == labels_BT).float().mean())
        if step % 50 == 49:
            say(f"target: {step + 1} of {num_steps} steps, {right:.3f} of next tokens right")
    model.requires_grad_(False).eval()
    return right
