"""What cached keys belong to: names for a target and a drafter that others of the same shape do not share."""

from __future__ import annotations

from hashlib import blake2b

import torch
from torch import nn

from paceline.engine.prefix_chain import PrefixIdentity
from paceline.models.drafters.eagle3 import Eagle3Drafter
from paceline.models.loading import LoadedDrafter, LoadedTarget
from paceline.models.targets.target import Target

_VALUES_PER_TENSOR = 4


def prefix_identity(target: LoadedTarget, drafter: LoadedDrafter | None, *, method: str) -> PrefixIdentity:
    """Name what computes keys.

    Args:
        target: computes the target's.
        drafter: computes context keys; None without one.
        method: what drafts, for something else than a loaded drafter.
    """
    return PrefixIdentity(
        target=f"{target.contract.origin} {target.linear_mode} {weights_digest(target.model)}",
        drafter=method if drafter is None else f"{drafter.contract.origin} {weights_digest(drafter.model)}",
        reads_ahead=drafter is not None and isinstance(drafter.model, Eagle3Drafter),
    )


def weights_digest(model: nn.Module | Target) -> str:
    """A name for a model's weights: names, sizes and a few values of each tensor, which tell two trainings apart."""
    digest = blake2b(digest_size=16)
    samples = []
    for name, tensor in model.named_parameters():
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype};".encode())
        samples.append(tensor.detach().flatten()[:_VALUES_PER_TENSOR].float())
    if samples:
        digest.update(torch.cat(samples).cpu().numpy().tobytes())
    return digest.hexdigest()
