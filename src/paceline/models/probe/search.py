"""The search behind a stage that differs: other readings of the same weights, tried on the stored inputs.

A reading is taken if it fits and is far closer than the declared one. Where none fits, the weights themselves are not
those that were recorded, or the fault is one that the numbers cannot name; then the description in the fingerprint may
still say which field has changed since.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.errors import PacelineError
from paceline.models.drafters.table import Drafter
from paceline.models.probe.alternatives import Alternative, alternatives_of
from paceline.models.probe.description import is_rounded, read_description, recorded_values
from paceline.models.probe.findings import Finding
from paceline.models.probe.fits import fit_embeddings, fit_fc_input, fit_logits, fit_values
from paceline.models.probe.programs import program_of
from paceline.models.probe.stages import TITLES, Stage, StageResult, compare_stage
from paceline.models.targets.target import Target

_FAR_CLOSER = 0.5
_MUCH_CLOSER = 0.2  # for a stage that is within its tolerance
_DOUBTFUL = 0.3  # share of the tolerance from which on it is worth asking
_ASKED: tuple[Stage, ...] = ("context", "keys", "rows", "recycled", "logits")
_FIELDS: Mapping[Stage, tuple[str, ...]] = {
    "fc_input": ("has_tap_norm", "eagle3", "rms_norm_eps"),
    "context": ("has_tap_norm", "eagle3", "rms_norm_eps", "hidden_size"),
    "keys": ("rope", "is_neox_style", "attention_value_scale", "has_qk_norm", "rms_norm_eps"),
    "embeddings": ("input_embedding_scale", "mask_token_id", "has_mask_embedding", "has_own_embedding"),
    "rows": ("layer_causal", "layer_windows", "block_size", "layout", "has_attention_sink", "convolution", "eagle3"),
    "recycled": ("eagle3", "layer_windows"),
    "logits": ("output_multiplier", "final_logit_softcapping", "layout", "has_own_head", "draft_vocab_size"),
    "drafts": ("draft_top_k", "markov", "selector", "confidence", "draft_vocab_size"),
}
_WEIGHTS: Mapping[Stage, str] = {
    "fc_input": "fc_norm",
    "context": "fc, fc_norm or hidden_norm",
    "keys": "k_proj, v_proj or k_norm of the first or last layer",
    "embeddings": "the embedding",
    "rows": "a decoder layer or the final norm",
    "recycled": "a decoder layer or the final norm",
    "logits": "the output head",
    "drafts": "the heads that couple positions, or the table of draft ids",
}


@dataclass(frozen=True)
class _Best:
    alternative: Alternative
    error: float


@torch.no_grad()
def search_stage(target: Target, drafter: Drafter, stored: Mapping[str, Tensor], result: StageResult) -> Finding:
    """Name the cause of a stage that differs.

    Args:
        target: serving.
        drafter: as loaded.
        stored: the fingerprint.
        result: of the stage.
    """
    stage = result.stage
    recorded = _recorded(stored, drafter)
    changed = {name: recorded[name] for name in _FIELDS.get(stage, ()) if name in recorded}
    found = _fit(target, drafter, stored, stage)
    if found is not None:
        return found
    best = _best(target, drafter, stored, stage, changed)
    if best is not None and best.error <= 1.0 and best.error < _FAR_CLOSER * result.error:
        return Finding(stage, f"the {best.alternative.text} ({result.note} as read now)", best.alternative.fix)
    return _unnamed(target, drafter, stored, result, changed)


@torch.no_grad()
def is_beaten(target: Target, drafter: Drafter, stored: Mapping[str, Tensor], result: StageResult) -> bool:
    """Whether a stage within its tolerance is so because the fault is mild: another reading fits several times better.

    Rounding is the same for every reading, so a right one is never beaten like this.
    """
    if not result.is_ok or result.error < _DOUBTFUL or result.stage not in _ASKED:
        return False
    recorded = _recorded(stored, drafter)
    changed = {name: recorded[name] for name in _FIELDS.get(result.stage, ()) if name in recorded}
    best = _best(target, drafter, stored, result.stage, changed)
    return best is not None and best.error < _MUCH_CLOSER * result.error


def _best(
    target: Target, drafter: Drafter, stored: Mapping[str, Tensor], stage: Stage, changed: Mapping[str, Any]
) -> _Best | None:
    tried = [_Best(other, _error(target, other, stage)) for other in alternatives_of(stage, drafter, stored, changed)]
    return min(tried, key=lambda best: best.error, default=None)


def _fit(target: Target, drafter: Drafter, stored: Mapping[str, Tensor], stage: Stage) -> Finding | None:
    """Faults that are solved for rather than tried."""
    if stage == "embeddings":
        return fit_embeddings(target, drafter, stored)
    found = program_of(drafter).run(stage, target, stored) if stage in ("logits", "keys") else {}
    if stage == "logits":
        return fit_logits(drafter, found, stored)
    if stage == "keys":
        return fit_values(drafter, found, stored)
    return fit_fc_input(drafter, stored) if stage == "fc_input" else None


def _error(target: Target, alternative: Alternative, stage: Stage) -> float:
    try:
        drafter = alternative.make()
    except (PacelineError, ValueError):  # the class does not draft so, or a tensor for it is not there
        return float("inf")
    found = program_of(drafter).run(stage, target, alternative.stored)
    is_quantised = is_rounded(drafter.contract, alternative.stored)
    error = compare_stage(stage, found, alternative.stored, is_quantised=is_quantised).error
    return error if error >= 0 else float("inf")


def _recorded(stored: Mapping[str, Tensor], drafter: Drafter) -> dict[str, Any]:
    if "description" not in stored:
        return {}
    return recorded_values(read_description(stored["description"])[1], drafter.contract)


def _unnamed(
    target: Target,
    drafter: Drafter,
    stored: Mapping[str, Tensor],
    result: StageResult,
    changed: Mapping[str, Any],
) -> Finding:
    title = TITLES[result.stage]
    if changed:
        fields = "; ".join(
            f"{name} was {value!r} when the fingerprint was recorded and is {getattr(drafter.contract, name)!r}"
            for name, value in changed.items()
        )
        return Finding(
            result.stage, f"the {title} differ ({result.note}): {fields}", "the recorded values in the config"
        )
    weights = _WEIGHTS[result.stage]
    if result.stage == "keys" and _agrees_unturned(target, drafter, stored):
        return Finding(
            "keys",
            f"the {title} agree at position 0 and differ beyond ({result.note}): the RoPE settings are others",
            "rope_theta, rope_scaling and is_neox_style as the drafter was trained with",
        )
    return Finding(
        result.stage,
        f"the taps fit, but the drafter's {title} differ ({result.note}), and no other reading of its config fits: "
        f"its weights begin to differ here, in {weights}",
        f"{weights} were changed or are read differently; export the drafter again",
        is_named=False,
    )


def _agrees_unturned(target: Target, drafter: Drafter, stored: Mapping[str, Tensor]) -> bool:
    """Whether keys at position 0, which no rotation changes, are as recorded."""
    first = {name: stored[name][:, :1] for name in ("context_key", "context_value")}
    found = program_of(drafter).run("keys", target, stored)
    turned = {name: found[name][:, :1] for name in first}
    return compare_stage("keys", turned, first, is_quantised=is_rounded(drafter.contract, stored)).is_ok
