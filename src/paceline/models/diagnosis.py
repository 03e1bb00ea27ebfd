"""Why a fingerprint does not fit: stage by stage, which other reading of the same weights would.

The first stage that differs names the cause. Later stages are computed from stored inputs, so that a second fault shows
on its own; only where a stage repeats the arithmetic of an earlier one is it passed over (`_REPEATS`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from paceline.checkpoint.contract import target_layer_id
from paceline.errors import CompatibilityError
from paceline.models.drafters.table import Drafter
from paceline.models.fingerprint import TAP_TOLERANCE, Replay, TapComparison
from paceline.models.probe.description import FieldDifference
from paceline.models.probe.findings import Finding
from paceline.models.probe.places import Place
from paceline.models.probe.search import search_stage
from paceline.models.probe.stages import TITLES, Stage
from paceline.models.targets.target import Target

_REPEATS: Mapping[Stage, tuple[Stage, ...]] = {
    "context": ("fc_input",),
    "rows": ("keys",),
    "recycled": ("embeddings", "keys", "rows"),
}


def explain(target: Target, drafter: Drafter, stored: Mapping[str, Tensor], replay: Replay) -> CompatibilityError:
    """The error for a fingerprint that does not fit: every cause that was found, and what to do about the first."""
    findings = diagnose(target, drafter, stored, replay)
    return CompatibilityError(
        "; ".join(finding.cause for finding in findings),
        origin={"drafter": drafter.contract.origin, "target": target.contract.origin},
        hint=findings[0].fix,
    )


def diagnose(target: Target, drafter: Drafter, stored: Mapping[str, Tensor], replay: Replay) -> list[Finding]:
    """Causes in the order of the stages; never empty where a stage failed.

    Args:
        target: serving.
        drafter: as loaded.
        stored: the fingerprint, already replayed.
        replay: of which some stage failed.
    """
    findings: list[Finding] = []
    failed = [result.stage for result in replay.failed]
    for result in replay.failed:
        if any(earlier in failed for earlier in _REPEATS.get(result.stage, ())):
            continue
        if result.stage == "taps":
            findings.append(_taps(drafter, replay.taps))
        elif result.stage == "config":
            findings += _recorded_otherwise(drafter, replay.differences, findings)
        else:
            found = search_stage(target, drafter, stored, result)
            is_echo = result.stage == "drafts" and "logits" in failed
            if found.is_named or (not is_echo and all(earlier.is_named for earlier in findings)):
                findings.append(found)
    if any(finding.stage == "config" for finding in findings):
        findings.sort(key=lambda finding: not finding.is_named)  # a changed field says more than "other weights"
    return findings


def _recorded_otherwise(
    drafter: Drafter, differences: Sequence[FieldDifference], findings: Sequence[Finding]
) -> list[Finding]:
    """One finding per field, but for those that an earlier one has named."""
    origin = drafter.contract.origin
    said = " ".join(f"{finding.cause} {finding.fix}" for finding in findings)
    return [
        Finding(
            "config",
            f"the fingerprint was recorded with {d.name} {d.recorded!r}, the config says {d.served!r} ({origin})",
            f"{d.name} {d.recorded!r} in {origin}; if the config is right, remove the fingerprint and have another "
            "written by `paceline check --record`",
        )
        for d in differences
        if d.name.rpartition(".")[2] not in said
    ]


def _taps(drafter: Drafter, taps: Sequence[TapComparison]) -> Finding:
    off = [c for c in taps if not c.is_ok]
    found = [c for c in off if c.best_error <= TAP_TOLERANCE and c.best != c.configured]
    contract = drafter.contract
    if not found:
        said = "; ".join(f"tap {c.tap} differs by {c.error:.0%} from what the drafter was trained on" for c in off)
        return Finding(
            "taps",
            f"{said}; no layer of this target matches",
            f"the target {contract.target_name!r} that the drafter was trained on: this one has other weights",
            is_named=False,
        )
    if all(c.best.is_normed for c in found):
        return _normed(found)
    if all(c.best.capture == c.configured.capture and not c.best.is_normed for c in found):
        trained, declared = found[0].best.stream, found[0].configured.stream
        return Finding(
            "taps",
            f"the drafter was trained on the stream {trained}, the config says {declared} ({_errors(found)})",
            f'"aux_hidden_stream": "{trained}" in the drafter\'s config',
        )
    swapped = _swapped(taps)
    if swapped is not None:
        one, other = swapped
        return Finding(
            "taps",
            f"taps {one} and {other} are swapped: tap {one} matches {taps[one].best}, tap {other} {taps[other].best} "
            f"({_errors(found)})",
            "fc.weight was trained with another order of taps; swap its blocks of columns "
            f"{one} and {other}, and fc_norm.{one} and fc_norm.{other} where it has them",
        )
    shifts = {c.best.capture - c.configured.capture for c in found}
    text = "; ".join(
        f"tap {c.tap} differs by {c.error:.0%} from what the drafter was trained on; "
        f"it matches {_named(c.best, c.configured)}, the config says {target_layer_id(c.configured.capture)}"
        for c in found
    )
    lost = [c.tap for c in off if c not in found]
    if lost:
        text += f"; taps {lost} match no layer"
    layers = [target_layer_id((c.best if c in found else c.configured).capture) for c in taps]
    fix = f"correct target_layer_ids in the drafter's config: {list(layers)}"
    if shifts == {1} and len(found) == len(taps) > 1:
        fix += "; all are one layer early, as if the ids named the inputs of layers"
    elif shifts == {-1} and len(found) == len(taps) > 1:
        fix += "; all are one layer late, as if one had been added twice"
    return Finding("taps", text, fix)


def _normed(found: Sequence[TapComparison]) -> Finding:
    tap = found[0]
    return Finding(
        "taps",
        f"tap {tap.tap} fits only after the final norm (error {tap.best_error:.3f}, {tap.error:.3f} at the declared "
        f"layer {target_layer_id(tap.configured.capture)}): the drafter was trained on the post-norm last layer",
        "train it on the state before the final norm, or take a drafter that taps an earlier layer: "
        "no target hands over the normed state as a tap",
    )


def _swapped(taps: Sequence[TapComparison]) -> tuple[int, int] | None:
    """Two taps whose best places are each other's declared ones, if they are all that is wrong."""
    off = [c for c in taps if not c.is_ok]
    if len(off) != 2:
        return None
    one, other = off
    is_swap = one.best == other.configured and other.best == one.configured
    return (one.tap, other.tap) if is_swap else None


def _named(best: Place, configured: Place) -> str:
    return str(best) if best.stream == configured.stream else f"{best} in the stream {best.stream}"


def _errors(found: Sequence[TapComparison]) -> str:
    return ", ".join(f"tap {c.tap}: {c.error:.3f} as declared, {c.best_error:.3f} there" for c in found)


def stage_table(replay: Replay) -> list[tuple[str, str, str]]:
    """Rows of title, verdict and numbers, for people."""
    return [(TITLES[r.stage], "ok" if r.is_ok else "differs", r.note) for r in replay.results]
