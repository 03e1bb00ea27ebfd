"""The drafter's fingerprint: what its taps looked like in training, replayed on the target that is to serve it.

Verification hides a tap taken one layer off, from another stream or another model: text stays right, only acceptance
falls. So training stores a short probe, its taps and its context features at a few positions, and loading compares.

P probe tokens, C compared positions, D width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.checkpoint.contract import CaptureId, DrafterContract, capture_id, target_layer_id
from paceline.errors import CheckpointError, CompatibilityError
from paceline.models.attends import WholeSequence
from paceline.models.drafters.block_drafter import BlockDrafter
from paceline.models.taps import TapCollector
from paceline.models.targets.dense import DenseTarget

# Relative error. SmolLM2-135M-Instruct, fingerprint recorded on a GPU in bf16 and replayed on a CPU in bf16 (plain,
# packed, row-invariant), float16 and float32: at most 0.012 for a tap, 0.013 for the context features. The nearest
# other layer is off by 0.227 to 0.321, depending on the tap.
TOLERANCE = 0.1
_NUM_POSITIONS = 8


@dataclass(frozen=True)
class TapComparison:
    """One tap against the stored one.

    Attributes:
        tap: index in the drafter's list.
        configured: the capture id that the contract asks for.
        error: relative error ||served - stored|| / ||stored|| there.
        best: the capture id that fits best.
        best_error: its relative error.
    """

    tap: int
    configured: CaptureId
    error: float
    best: CaptureId
    best_error: float


def compared_positions(num_tokens: int) -> list[int]:
    """Positions whose features are stored: the last few; position 0 is an outlier in most targets and says little."""
    return list(range(max(1, num_tokens - _NUM_POSITIONS), num_tokens))


@torch.no_grad()
def record_fingerprint(target: DenseTarget, drafter: BlockDrafter, probe_ids: list[int]) -> dict[str, Tensor]:
    """Run a probe through target and drafter and keep what a later load compares.

    Args:
        target: the one trained on.
        drafter: the one to be exported.
        probe_ids: 16 to 64 tokens of ordinary text.
    Returns:
        `probe_ids` int64 [P]; `tap.{t}` float32 [C, D] per tap; `context` float32 [C, D], the projected features.
    """
    ids = [capture_id(layer) for layer in drafter.contract.target_layer_ids]
    hidden = _hidden_states(target, probe_ids)
    positions = compared_positions(len(probe_ids))
    tensors = {"probe_ids": torch.tensor(probe_ids)}
    for tap, capture in enumerate(ids):
        tensors[f"tap.{tap}"] = hidden[capture][positions].float().cpu()
    features = drafter.backbone.context_features([hidden[capture] for capture in ids])
    tensors["context"] = features[positions].float().cpu()
    return tensors


@torch.no_grad()
def replay_fingerprint(
    target: DenseTarget, drafter: BlockDrafter, stored: Mapping[str, Tensor]
) -> list[TapComparison]:
    """Compare stored taps with the serving target's, at the configured layer and at every other one.

    Raises:
        CheckpointError: the fingerprint does not belong to this contract.
    """
    contract = drafter.contract
    wanted = {"probe_ids", "context"} | {f"tap.{tap}" for tap in range(contract.num_taps)}
    if set(stored) != wanted:
        raise CheckpointError(
            f"the fingerprint holds {sorted(stored)}, the contract has {contract.num_taps} taps",
            origin={"drafter": contract.origin},
            hint="export the drafter again",
        )
    _check_stored(stored, contract, target)
    probe_ids = [int(token) for token in stored["probe_ids"]]
    hidden = _hidden_states(target, probe_ids)
    positions = compared_positions(len(probe_ids))
    comparisons = []
    for tap, layer in enumerate(contract.target_layer_ids):
        errors = [_relative_error(state[positions], stored[f"tap.{tap}"]) for state in hidden]
        best = min(range(len(errors)), key=errors.__getitem__)
        configured = capture_id(layer)
        comparisons.append(TapComparison(tap, configured, errors[configured], CaptureId(best), errors[best]))
    return comparisons


@torch.no_grad()
def check_fingerprint(target: DenseTarget, drafter: BlockDrafter, stored: Mapping[str, Tensor]) -> None:
    """Refuse a target whose taps are not those that the drafter was trained on, and name the likely cause.

    Raises:
        CompatibilityError: a tap or the projected features differ by more than `TOLERANCE`.
    """
    contract = drafter.contract
    off = [c for c in replay_fingerprint(target, drafter, stored) if not c.error <= TOLERANCE]
    origin = {"drafter": contract.origin, "target": target.contract.origin}
    if off:
        findings = []
        for c in off:
            said = f"tap {c.tap} differs by {c.error:.0%} from what the drafter was trained on"
            if c.best_error <= TOLERANCE:
                said += f"; it matches layer {target_layer_id(c.best)}, the config says {target_layer_id(c.configured)}"
            findings.append(said)
        moved = all(c.best_error <= TOLERANCE for c in off)
        other = f"no layer of this target matches: the drafter was trained on {contract.target_name!r}, other weights"
        raise CompatibilityError(
            "; ".join(findings),
            origin=origin,
            hint="correct target_layer_ids in the drafter's config" if moved else other,
        )
    ids = [capture_id(layer) for layer in contract.target_layer_ids]
    hidden = _hidden_states(target, [int(token) for token in stored["probe_ids"]])
    positions = compared_positions(len(stored["probe_ids"]))
    features = drafter.backbone.context_features([hidden[capture][positions] for capture in ids])
    error = _relative_error(features, stored["context"])
    if not error <= TOLERANCE:
        raise CompatibilityError(
            f"the taps fit, but the drafter's context features differ by {error:.0%} from those in training",
            origin=origin,
            hint="fc, fc_norm or hidden_norm were changed or are read differently; export the drafter again",
        )


def _check_stored(stored: Mapping[str, Tensor], contract: DrafterContract, target: DenseTarget) -> None:
    """Refuse a probe that is damaged or proves nothing."""
    probe = stored["probe_ids"]
    is_text = probe.dim() == 1 and not probe.is_floating_point() and len(probe) > 1
    problem = None if is_text else f"probe_ids is {probe.dtype} of shape {list(probe.shape)}, expected several ids"
    if is_text and not (int(probe.min()) >= 0 and int(probe.max()) < target.contract.vocab_size):
        problem = f"probe_ids reaches from {int(probe.min())} to {int(probe.max())}, outside the target's vocabulary"
    num_rows = len(compared_positions(len(probe))) if is_text else 0
    widths = {f"tap.{tap}": contract.target_hidden_size for tap in range(contract.num_taps)}
    for name, width in (widths | {"context": contract.hidden_size}).items():
        if problem is None and tuple(stored[name].shape) != (num_rows, width):
            problem = f"{name} has shape {list(stored[name].shape)}, expected {[num_rows, width]}"
    if problem is not None:
        raise CheckpointError(
            f"the fingerprint cannot be replayed: {problem}",
            origin={"drafter": contract.origin},
            hint="export the drafter again",
        )


def _hidden_states(target: DenseTarget, token_ids: list[int]) -> list[Tensor]:
    """Every capturable hidden state of a short text, each [P, D]."""
    device = target.position_table.device
    ids = torch.tensor([token_ids], device=device)
    taps = TapCollector([CaptureId(capture) for capture in target.capture_ids])
    target(ids, torch.arange(len(token_ids), device=device).unsqueeze(0), WholeSequence(), taps)
    return [state[0] for state in taps.collected()]


def _relative_error(found: Tensor, stored: Tensor) -> float:
    difference = found.float().cpu() - stored
    return float(difference.norm() / stored.norm().clamp(min=1e-12))
