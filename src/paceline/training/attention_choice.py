"""Dense masks or flex attention for the blocks of a run: what was asked for, what is possible, what is faster."""

from __future__ import annotations

import logging

import torch

from paceline.checkpoint.contract import DrafterContract
from paceline.configuration.run import TrainRun
from paceline.errors import ConfigError
from paceline.ops.dispatch import HAS_TRITON
from paceline.training.flex_attend import FlexBlocks

_log = logging.getLogger(__name__)

# Scores per layer from which flex attention is taken. Its time over that of dense masks, measured on an H200
# (docs/results/block-attention.json): 1.62 at 0.09e9 scores, 1.10 at 0.30e9, 0.81 at 0.45e9, 0.24 at 6.4e9.
FLEX_FROM_SCORES = 1_000_000_000
_LEAST_HEAD_SIZE = 16  # of the compiled kernel


def choose_attention(
    run: TrainRun, contract: DrafterContract, device: torch.device, num_ranks: int = 1
) -> FlexBlocks | None:
    """How the blocks of a training step attend, for a whole run; says which in the log.

    Args:
        run: what was asked for, and the sizes of its largest batch.
        contract: of the drafter.
        device: that trains.
        num_ranks: processes that share a batch.
    Returns:
        Sizes for flex attention; None takes dense masks.
    Raises:
        ConfigError: flex attention was asked for and cannot be had.
    """
    flex, reason = judge_attention(run, contract, device, num_ranks)
    _log.info("training blocks attend by %s: %s", "flex attention" if flex is not None else "dense masks", reason)
    return flex


def judge_attention(
    run: TrainRun,
    contract: DrafterContract,
    device: torch.device,
    num_ranks: int = 1,
    *,
    has_triton: bool | None = None,
) -> tuple[FlexBlocks | None, str]:
    """The choice and its reason, unsaid; arguments and errors as `choose_attention`'s.

    Args:
        has_triton: of the machine that trains, where that is another one; None asks this one.
    """
    asked, obstacle = (
        run.schedule.attention,
        _obstacle(contract, device, HAS_TRITON if has_triton is None else has_triton),
    )
    if asked == "flex" and obstacle is not None:
        raise ConfigError(f"schedule.attention is 'flex'; {obstacle}", hint="schedule.attention=auto, or dense")
    num_blocks = min(run.schedule.num_anchors, run.data.max_length)
    scores, sizes = _scores(run, contract, num_blocks, num_ranks)
    if asked == "auto":
        is_large = scores >= FLEX_FROM_SCORES
        reason = obstacle or f"{sizes}, {'at least' if is_large else 'below'} {FLEX_FROM_SCORES:.3g}"
        takes_flex = obstacle is None and is_large
    else:
        reason, takes_flex = "asked for", asked == "flex"
    return (FlexBlocks(run.data.max_length, num_blocks) if takes_flex else None), reason


def _scores(run: TrainRun, contract: DrafterContract, num_blocks: int, num_ranks: int) -> tuple[int, str]:
    """Scores of a layer in the largest batch, and how they come about."""
    batch = max(1, run.schedule.batch_size // num_ranks)
    rows = num_blocks * run.drafter.block_size
    keys = run.data.max_length + rows
    scores = batch * rows * keys * contract.num_heads
    return scores, f"{batch} x {rows} rows, {keys} keys and {contract.num_heads} heads make {scores:.3g} scores"


def _obstacle(contract: DrafterContract, device: torch.device, has_triton: bool) -> str | None:
    """Why flex attention cannot be had, if it cannot."""
    if contract.family == "eagle3":
        return "an eagle3 drafter attends from one row per block, by dense masks alone"
    if contract.has_attention_sink:
        return "the drafter has attention sinks, which flex attention does not know"
    if contract.latent is not None:
        return "the drafter has latent attention, which is trained by dense masks alone"
    if any(window is not None for window in contract.layer_windows):
        # On an H200 with torch 2.11 a windowed layer's gradients of keys came out a third off in bf16 (docs/log.md).
        return "the drafter has windowed layers, whose gradients flex attention was seen to get wrong in bf16"
    if contract.head_size < _LEAST_HEAD_SIZE:
        return f"flex attention takes heads of {_LEAST_HEAD_SIZE} channels or more, not of {contract.head_size}"
    if device.type != "cuda":
        return f"flex attention has gradients on a GPU alone, the device is {device.type}"
    if not has_triton:
        return "Triton, which flex attention is compiled by, is not installed"
    return None
