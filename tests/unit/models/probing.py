"""Fingerprints with planted faults: the numbers alone have to name them."""

from __future__ import annotations

import json
from typing import Any

import torch
from tests.tiny import tiny_prompts
from torch import Tensor

from paceline.errors import CompatibilityError
from paceline.models.drafters.table import Drafter
from paceline.models.fingerprint import check_fingerprint, record_fingerprint
from paceline.models.probe.places import states_of_text
from paceline.models.taps import TapCollector
from paceline.models.targets.dense import DenseTarget

(PROBE,) = tiny_prompts([40], seed=3)


def without_hints(stored: dict[str, Tensor]) -> dict[str, Tensor]:
    """A fingerprint whose description says no more than the family: the recorded config must not give a fault away."""
    found = json.loads(bytes(stored["description"].tolist()))
    found["contract"] = {name: found["contract"][name] for name in ("family", "target_layer_ids")}
    return stored | {"description": torch.frombuffer(bytearray(json.dumps(found).encode()), dtype=torch.uint8)}


def refusal(
    target: DenseTarget,
    trained: Drafter,
    served: Drafter,
    *,
    trained_on: DenseTarget | None = None,
    hints: bool = False,
) -> CompatibilityError:
    """What a load says to a drafter that was recorded in one form and is served in another."""
    stored = record_fingerprint(trained_on or target, trained, PROBE)
    try:
        check_fingerprint(target, served, stored if hints else without_hints(stored))
    except CompatibilityError as error:
        return error
    raise AssertionError("the fault was not noticed")


class TwoStreams(DenseTarget):
    """A target with a second stream near the first, as attention residuals give one."""

    aux_hidden_streams = frozenset({"prefix", "attn_res"})

    def forward(
        self, token_ids_BT: Tensor, positions_BT: Tensor, attend: Any, taps: TapCollector | None = None
    ) -> Tensor:
        """Hand over each state mixed with the embedding where the second stream is asked for."""
        if taps is None or taps.stream == "prefix":
            return super().forward(token_ids_BT, positions_BT, attend, taps)
        inner = TapCollector([capture for capture in map(type(taps.capture_ids[0]), self.capture_ids)])
        hidden = super().forward(token_ids_BT, positions_BT, attend, inner)
        states = inner.collected()
        for capture in taps.capture_ids:
            norm = states[capture].norm(dim=-1, keepdim=True)
            taps.observe(capture, states[capture] + 0.25 * norm * torch.nn.functional.normalize(states[0], dim=-1))
        return hidden


def old_format(target: DenseTarget, drafter: Any, probe: list[int]) -> dict[str, Tensor]:
    """What format 1 stored: taps and features at the last eight positions, in float32."""
    positions = slice(max(1, len(probe) - 8), len(probe))
    states = states_of_text(target, probe, positions, ["prefix"])
    taps = [next(s for p, s in states.items() if p.capture == layer + 1) for layer in drafter.contract.target_layer_ids]
    found = {f"tap.{index}": tap.float() for index, tap in enumerate(taps)}
    return {"probe_ids": torch.tensor(probe), "context": drafter.backbone.context_features(taps).float(), **found}
