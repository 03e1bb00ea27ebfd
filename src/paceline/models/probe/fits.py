"""Faults that are solved for rather than tried: a scale, a multiplier, the gains of a norm, the token of a row.

T taps, D width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from paceline.models.drafters.block_drafter import BlockDrafter
from paceline.models.drafters.table import Drafter
from paceline.models.probe.findings import Finding
from paceline.models.probe.programs import program_of
from paceline.models.probe.stages import MEASURES, relative_error, spread_error
from paceline.models.targets.target import Target

_SAME = 0.05  # share by which a solved factor may miss the declared one
_FITS = 0.1
_CHUNK_ROWS = 8192


def scale_between(found: Tensor, stored: Tensor) -> float:
    """The factor on `found` that brings it closest to `stored`."""
    found, stored = found.float().cpu().flatten(), stored.float().flatten()
    return float(found @ stored / (found @ found).clamp(min=1e-12))


def fit_embeddings(target: Target, drafter: Drafter, stored: Mapping[str, Tensor]) -> Finding | None:
    """A scale on every row, or another mask row."""
    contract = drafter.contract
    name = "block_embedding" if isinstance(drafter, BlockDrafter) else "row_embedding"
    tolerance = MEASURES[name].tolerance
    found = program_of(drafter).run("embeddings", target, stored)[name].float().cpu()
    kept = stored[name].float()
    if found.shape != kept.shape:
        return None
    anchors, kept_anchors = (found[:, 0], kept[:, 0]) if isinstance(drafter, BlockDrafter) else (found, kept)
    factor = scale_between(anchors, kept_anchors)
    if relative_error(anchors * factor, kept_anchors) > tolerance:
        return Finding(
            "embeddings",
            "the embedded anchor rows are other rows than those recorded, at any scale: the drafter was trained with "
            "an embedding of its own, or with another target",
            "the drafter's own embed_tokens.weight beside its weights, or the target of its training",
        )
    if abs(factor - 1) > _SAME:
        scale = contract.input_embedding_scale * factor
        root = math.sqrt(contract.hidden_size)
        said = said_exactly = f"{scale:.3g}"
        if abs(scale / root - 1) < _SAME:
            said, said_exactly = f"{root:.4g}, the root of the width", f"{root:.10g}"
        elif abs(scale - 1) < _SAME:
            said = said_exactly = "1"
        return Finding(
            "embeddings",
            f"the embedded rows fit with input_embedding_scale {said}; the config says "
            f"{contract.input_embedding_scale:.4g}",
            f'"input_embedding_scale": {said_exactly} in the drafter\'s config',
        )
    if not isinstance(drafter, BlockDrafter) or found.shape[1] < 2:
        return None
    return _fit_mask_row(target, drafter, kept[0, 1], tolerance)


def _fit_mask_row(target: Target, drafter: BlockDrafter, kept_D: Tensor, tolerance: float) -> Finding | None:
    contract = drafter.contract
    owner = drafter.vocabulary.embed_tokens
    rows = (owner if owner is not None else target.embed_tokens).weight
    wanted_D = kept_D.to(rows.device) / contract.input_embedding_scale
    errors_V = torch.cat([(chunk.float() - wanted_D).norm(dim=1) for chunk in rows.split(_CHUNK_ROWS)])
    errors_V = errors_V / wanted_D.norm().clamp(min=1e-12)
    token = int(errors_V.argmin())
    error = float(errors_V[token])
    if error > tolerance:
        return Finding(
            "embeddings",
            "the stored mask row is no row of the vocabulary: the drafter was trained with a mask embedding of its own",
            "mask_embedding.pt beside the weights, as the drafter came with it",
        )
    if token == contract.mask_token_id and contract.has_mask_embedding:
        return Finding(
            "embeddings",
            f"the stored mask row is token {token}'s own: the drafter was trained without mask_embedding.pt",
            "remove mask_embedding.pt from the drafter's folder",
        )
    if token == contract.mask_token_id:
        return None
    return Finding(
        "embeddings",
        f"the stored mask row is token {token}'s (error {error:.3f}); mask_token_id is {contract.mask_token_id} in the "
        "config",
        f'"mask_token_id": {token} in the drafter\'s config',
    )


def fit_values(drafter: Drafter, found: Mapping[str, Tensor], stored: Mapping[str, Tensor]) -> Finding | None:
    """A scale on the values alone."""
    keys = MEASURES["context_key"]
    value, kept = found["context_value"].float().cpu(), stored["context_value"].float()
    if value.shape != kept.shape or keys.compare(found["context_key"], stored["context_key"]) > keys.tolerance:
        return None
    factor = scale_between(value, kept)
    if relative_error(value * factor, kept) > keys.tolerance:
        return None
    scale = drafter.contract.attention_value_scale
    return Finding(
        "keys",
        f"the context values fit with attention_value_scale {scale * factor:.3g}; the config says {scale:.4g}",
        f'"attention_value_scale": {scale * factor:.3g} in the drafter\'s config',
    )


def fit_logits(drafter: Drafter, found: Mapping[str, Tensor], stored: Mapping[str, Tensor]) -> Finding | None:
    """A multiplier on the logits, or a soft-cap that the config does not have."""
    contract = drafter.contract
    live, kept = found["logit_values"].float().cpu(), stored["logit_values"]
    if live.shape != kept.shape or contract.final_logit_softcapping:
        return None
    factor = scale_between(live, kept)
    scale = contract.output_multiplier
    if factor > 0 and abs(factor - 1) > _SAME and spread_error(live * factor, kept) < _FITS:
        return Finding(
            "logits",
            f"the draft logits fit with output_multiplier {scale * factor:.3g}; the config says {scale:.4g}",
            f'"output_multiplier": {scale * factor:.3g} in the drafter\'s config',
        )
    lowest = float(kept.abs().max()) * 1.001
    caps = [lowest * 1.05**step for step in range(60)]
    cap = min(caps, key=lambda cap: spread_error(torch.tanh(live / cap) * cap, kept))
    if spread_error(torch.tanh(live / cap) * cap, kept) < _FITS < spread_error(live, kept):
        return Finding(
            "logits",
            f"the draft logits fit with a soft-cap of about {cap:.2g}; the config has none",
            f'"final_logit_softcapping" as the drafter was trained with, about {cap:.2g}',
        )
    return None


def fit_fc_input(drafter: Drafter, stored: Mapping[str, Tensor]) -> Finding | None:
    """The gains of a norm before the projection, read off one stored row and tried on another."""
    contract = drafter.contract
    eps = contract.rms_norm_eps
    taps = [stored[f"tap.{tap}"][-2:].float() for tap in range(contract.num_taps)]
    kept = stored["fc_input"].float()
    joined = torch.cat(taps, dim=-1)
    if kept.shape != joined.shape:
        return None
    if relative_error(joined, kept) < _FITS:
        return None  # no norm at all, which gains could imitate where rows are of one size
    per_tap = _error_of(torch.cat([_normed(tap, eps) for tap in taps], dim=-1), kept)
    over_all = _error_of(_normed(joined, eps), kept)
    has_joint_norm = contract.eagle3 is not None and contract.eagle3.norm_before_fc
    if min(per_tap, over_all) > _FITS:
        return None
    if per_tap <= over_all and not contract.has_tap_norm:
        return Finding(
            "fc_input",
            "fc_norm is missing: the context features were made with one norm per tap, the config has none",
            f'"fc_norm": true, and the tensors fc_norm.0.weight to fc_norm.{contract.num_taps - 1}.weight',
        )
    if over_all < per_tap and not has_joint_norm:
        return Finding(
            "fc_input",
            "the norm over all taps is missing: the context features were made with one norm over their concatenation "
            "(norm_before_fc)",
            '"norm_before_fc": true, and the tensor input_norm.weight',
        )
    return None


def _normed(rows: Tensor, eps: float) -> Tensor:
    return rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps)


def _error_of(rows: Tensor, kept: Tensor) -> float:
    """How far the gains that turn the first row into what is kept are from doing so with the second."""
    is_usable = rows[0].abs() > 0.05
    gains = torch.where(is_usable, kept[0] / torch.where(is_usable, rows[0], 1.0), 1.0)
    return relative_error(rows[1][is_usable] * gains[is_usable], kept[1][is_usable])
