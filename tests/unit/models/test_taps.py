"""Taps: the two numberings, the right states in the right order, and a pure read."""

from __future__ import annotations

import pytest
import torch
from tests.unit.models.conftest import positions_of, tiny_target

from paceline.models.attends import WholeSequence
from paceline.models.taps import CaptureId, TapCollector, TargetLayerId, capture_id, target_layer_id

TOKENS = torch.randint(0, 61, (2, 9), generator=torch.Generator().manual_seed(0))


def test_a_capture_id_is_one_more_than_its_layer() -> None:
    assert capture_id(TargetLayerId(0)) == 1
    assert capture_id(TargetLayerId(-1)) == 0  # the embedding
    for layer in range(-1, 5):
        assert target_layer_id(capture_id(TargetLayerId(layer))) == layer


@pytest.mark.parametrize("ids", [(2, 1), (1, 1)])
def test_ids_must_increase(ids: tuple[int, ...]) -> None:
    with pytest.raises(AssertionError, match="increase"):
        TapCollector([CaptureId(i) for i in ids])


def test_collected_states_are_those_that_layers_put_out() -> None:
    target = tiny_target()
    outputs: dict[int, torch.Tensor] = {}
    for index, layer in enumerate(target.layers):
        layer.register_forward_hook(lambda _m, _a, out, index=index: outputs.__setitem__(index, out.clone()))
    taps = TapCollector.of_layers([TargetLayerId(i) for i in (-1, 0, 2, 3)])
    target(TOKENS, positions_of(TOKENS), WholeSequence(), taps)
    states = taps.collected()
    assert torch.equal(states[0], target.embed(TOKENS))
    for state, layer in zip(states[1:], (0, 2, 3), strict=True):
        assert torch.equal(state, outputs[layer])
        assert not torch.equal(state, outputs[(layer + 1) % 4])  # one layer off would be seen
    assert torch.equal(taps.concatenated(), torch.cat(states, dim=-1))


def test_reading_changes_nothing() -> None:
    target = tiny_target()
    plain = target.logits(target(TOKENS, positions_of(TOKENS), WholeSequence()))
    taps = TapCollector([CaptureId(i) for i in target.capture_ids])
    tapped = target.logits(target(TOKENS, positions_of(TOKENS), WholeSequence(), taps))
    assert torch.equal(plain, tapped)


def test_later_layers_do_not_write_into_collected_states() -> None:
    target = tiny_target()
    taps = TapCollector([CaptureId(i) for i in target.capture_ids])
    copies: list[torch.Tensor] = []
    observe = taps.observe

    def observe_and_copy(capture: int, hidden: torch.Tensor) -> None:
        observe(capture, hidden)
        copies.append(hidden.clone())

    taps.observe = observe_and_copy
    target(TOKENS, positions_of(TOKENS), WholeSequence(), taps)
    assert all(torch.equal(state, copy) for state, copy in zip(taps.collected(), copies, strict=True))


def test_a_state_that_never_came_is_named() -> None:
    taps = TapCollector([CaptureId(0), CaptureId(7)])
    taps.observe(0, torch.zeros(1))
    with pytest.raises(AssertionError, match=r"\[7\]"):
        taps.collected()
