"""Folds the norms before `fc` into `fc`, for peers whose network has none.

Per tap, `rms_norm(h) * gain` becomes `scale * gain * h` with one constant: the median of 1 / rms(h) over texts.
Residual streams keep nearly the same size from token to token (the first position apart), so acceptance hardly moves;
it is another drafter all the same, and both sides of a comparison get it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from paceline.checkpoint.contract import DrafterContract
    from paceline.models.loading import LoadedTarget


def fold_tap_norms(
    contract: DrafterContract, tensors: Mapping[str, Tensor], target: LoadedTarget, texts: Sequence[Sequence[int]]
) -> tuple[DrafterContract, dict[str, Tensor]]:
    """A drafter without tap norms that stands in for one with them, in float32.

    Args:
        contract: of the drafter; one without tap norms comes back as it is.
        tensors: its weights by canonical name.
        target: whose taps it reads.
        texts: token ids over which the streams are measured.
    """
    exact = {name: tensor.float() for name, tensor in tensors.items()}
    if not contract.has_tap_norm:
        return dataclasses.replace(contract, dtype="float32"), exact
    scales_T = median_inverse_sizes(contract, target, texts)
    fc_DTW = exact["fc.weight"].unflatten(1, (contract.num_taps, contract.target_hidden_size))
    gains_TW = torch.stack([exact.pop(f"fc_norm.{tap}.weight") for tap in range(contract.num_taps)])
    exact["fc.weight"] = (fc_DTW * (gains_TW * scales_T.unsqueeze(1))).flatten(1)
    return dataclasses.replace(contract, has_tap_norm=False, dtype="float32"), exact


def median_inverse_sizes(contract: DrafterContract, target: LoadedTarget, texts: Sequence[Sequence[int]]) -> Tensor:
    """Median of 1 / rms of every tapped stream, over all positions of all texts; float32, one per tap."""
    from paceline.training.data import Batch
    from paceline.training.features import TargetFeatures

    features = TargetFeatures(target.model, contract.target_layer_ids)
    sizes = []
    for text in texts:
        taps = features(Batch.of_rows(torch.tensor([list(text)]))).taps
        sizes.append(torch.stack([tap[0].float().pow(2).mean(-1) for tap in taps]))
    inverse = (torch.cat(sizes, dim=1) + contract.rms_norm_eps).rsqrt()
    return inverse.median(dim=1).values
