"""Readings of a drafter's config that change no tensor: what a wrong key, a default or a converter makes of it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from paceline.checkpoint.contract import CaptureId, capture_id, target_layer_id
from paceline.errors import PacelineError
from paceline.models.drafters.block_drafter import BlockDrafter
from paceline.models.drafters.eagle3 import Eagle3Drafter
from paceline.models.probe.alternatives import THETAS
from paceline.models.probe.places import Place
from paceline.models.readings import reread
from paceline.models.targets.target import Target


@dataclass(frozen=True)
class Reading:
    """One reading.

    Attributes:
        name: in words.
        fix: what to do if it is right.
        places: where each tap is read.
        drafter: the weights, read so.
    """

    name: str
    fix: str
    places: tuple[Place, ...]
    drafter: BlockDrafter | Eagle3Drafter


def readings_of(target: Target, drafter: BlockDrafter | Eagle3Drafter, mask_candidates: Sequence[int]) -> list[Reading]:
    """The declared reading first, then all others that this family and these weights allow.

    Args:
        target: says which layers and streams there are.
        drafter: as declared.
        mask_candidates: further ids for the mask rows.
    """
    contract = drafter.contract
    declared = tuple(Place(contract.aux_hidden_stream, capture_id(layer)) for layer in contract.target_layer_ids)
    readings = [Reading("as the config says", "", declared, drafter)]
    for name, fix, places in _tap_readings(target, declared):
        readings.append(Reading(name, fix, places, drafter))
    for name, fix, changes in _config_readings(target, drafter, mask_candidates):
        try:
            readings.append(Reading(name, fix, declared, reread(drafter, **changes)))
        except (PacelineError, ValueError):  # not of this family, or a tensor for it is not there
            continue
    return readings


def _tap_readings(target: Target, declared: tuple[Place, ...]) -> Iterator[tuple[str, str, tuple[Place, ...]]]:
    legal = set(target.capture_ids)

    def moved(taps: Sequence[int], step: int) -> tuple[Place, ...] | None:
        places = tuple(
            replace(place, capture=CaptureId(place.capture + step)) if tap in taps else place
            for tap, place in enumerate(declared)
        )
        return places if all(place.capture in legal for place in places) else None

    every = range(len(declared))
    for step, said in ((1, "later"), (-1, "earlier")):
        for taps in ([list(every)] if len(declared) > 1 else []) + [[tap] for tap in every]:
            places = moved(taps, step)
            if places is None:
                continue
            name = "every tap" if len(taps) > 1 else f"tap {taps[0]}"
            layers = [int(target_layer_id(place.capture)) for place in places]
            yield f"{name} one layer {said}", f"target_layer_ids {layers} in the drafter's config", places
    for one, other in itertools.combinations(every, 2):
        order = list(declared)
        order[one], order[other] = order[other], order[one]
        yield (
            f"taps {one} and {other} swapped",
            f"swap their blocks of columns in fc.weight ({one}, {other})",
            tuple(order),
        )
    last = CaptureId(max(legal))
    for stream in sorted(target.aux_hidden_streams - {declared[0].stream}):
        places = tuple(replace(place, stream=stream) for place in declared)
        yield f"the stream {stream}", f'"aux_hidden_stream": "{stream}" in the drafter\'s config', places
    normed = (*declared[:-1], Place(declared[-1].stream, last, is_normed=True))
    yield "the last tap after the final norm", "a drafter that taps states before the final norm", normed


def _config_readings(
    target: Target, drafter: BlockDrafter | Eagle3Drafter, mask_candidates: Sequence[int]
) -> Iterator[tuple[str, str, dict[str, Any]]]:
    contract = drafter.contract
    where = "in the drafter's config"
    yield (
        "without a norm per tap" if contract.has_tap_norm else "with a norm per tap, gains of 1",
        f'"fc_norm": {str(not contract.has_tap_norm).lower()} {where}',
        {"has_tap_norm": not contract.has_tap_norm},
    )
    flipped = not contract.is_neox_style
    pairing = "split halves" if flipped else "interleaved pairs"
    yield f"RoPE with {pairing}", f'"is_neox_style": {str(flipped).lower()} {where}', {"is_neox_style": flipped}
    for theta in THETAS:
        if theta != contract.rope.theta:
            rope = replace(contract.rope, theta=theta)
            yield f"theta {theta:.10g}", f'"rope_theta": {theta:.10g} {where}', {"rope": rope}
    for scale in (1.0, math.sqrt(contract.hidden_size)):
        if not math.isclose(scale, contract.input_embedding_scale, rel_tol=0.01):
            name = f"input_embedding_scale {scale:.6g}"
            yield name, f'"input_embedding_scale": {scale:.6g} {where}', {"input_embedding_scale": scale}
    if any(window is not None for window in contract.layer_windows):
        changes: dict[str, Any] = {"layer_windows": (None,) * contract.num_layers}
        yield "without windows", f"layer_types all full_attention {where}", changes
    if isinstance(drafter, Eagle3Drafter):
        eagle3 = contract.eagle3
        assert eagle3 is not None, "the class has checked it"
        before = not eagle3.norm_before_residual
        switched = {"eagle3": replace(eagle3, norm_before_residual=before)}
        yield (
            f"norm_before_residual {str(before).lower()}",
            f'"norm_before_residual": {str(before).lower()} {where}',
            switched,
        )
        return
    for causal in (True, False):
        if contract.layer_causal != (causal,) * contract.num_layers:
            name = "causal blocks" if causal else "bidirectional blocks"
            yield name, f'"is_causal": {str(causal).lower()} {where}', {"layer_causal": (causal,) * contract.num_layers}
    layout = "fill_in" if contract.layout == "anchor_sampling" else "anchor_sampling"
    anchored = str(layout == "anchor_sampling").lower()
    yield f"the block layout {layout}", f'"sample_from_anchor": {anchored} {where}', {"layout": layout}
    special = (*target.contract.stop_token_ids, target.contract.bos_token_id, 0, contract.vocab_size - 1)
    for token in dict.fromkeys((*mask_candidates, *special)):
        if token is not None and token != contract.mask_token_id and 0 <= token < contract.vocab_size:
            yield f"the mask id {token}", f'"mask_token_id": {token} {where}', {"mask_token_id": token}
