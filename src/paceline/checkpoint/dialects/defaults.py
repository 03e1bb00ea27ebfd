"""Which layers trainers of the DFlash family tap unless told otherwise."""

from __future__ import annotations

from paceline.checkpoint.contract import TargetLayerId
from paceline.errors import CheckpointError


def default_target_layer_ids(num_layers: int, num_taps: int) -> tuple[TargetLayerId, ...]:
    """The taps that the DFlash family chooses by default: evenly spread, clear of both ends.

    Args:
        num_layers: depth of the target.
        num_taps: how many layers to tap.
    Returns:
        Layers whose output is tapped, ascending.
    Raises:
        CheckpointError: the target is too shallow for that many distinct taps below its last layer.
    Source: z-lab DFlash; rounds halves to even, so 59 layers and 5 taps give 28 in the middle, not 29.
    """
    if num_taps < 1:
        raise CheckpointError(f"{num_taps} taps were asked for; at least 1 is needed")
    if num_taps == 1:
        taps = [num_layers // 2]
    else:
        taps = [round(1 + index * (num_layers - 4) / (num_taps - 1)) for index in range(num_taps)]
    if len(set(taps)) < num_taps or taps != sorted(taps) or taps[-1] >= num_layers - 1:
        raise CheckpointError(
            f"{num_taps} taps do not fit a target of {num_layers} layers by the default rule", hint="fewer taps"
        )
    return tuple(TargetLayerId(tap) for tap in taps)
