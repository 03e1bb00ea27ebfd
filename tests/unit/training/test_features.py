"""Features of a batch: the target's own taps, states, embeddings and head, unmoved by padding and without gradient."""

from __future__ import annotations

import pytest
import torch
from tests.unit.models.conftest import positions_of, tiny_target

from paceline.checkpoint.contract import CaptureId, TargetLayerId
from paceline.models.attends import WholeSequence
from paceline.models.taps import TapCollector
from paceline.training.features import TargetFeatures

LAYERS = tuple(TargetLayerId(layer) for layer in (-1, 0, 2))
TOKENS = torch.tensor([[5, 9, 11, 30, 2, 17], [8, 3, 50, 0, 0, 0]])


def test_taps_are_the_outputs_of_the_named_layers() -> None:
    target = tiny_target()
    features = TargetFeatures(target, LAYERS)(TOKENS)
    collector = TapCollector([CaptureId(capture) for capture in target.capture_ids])
    hidden = target(TOKENS, positions_of(TOKENS), WholeSequence(), collector)
    everywhere = collector.collected()
    for layer, tap in zip(LAYERS, features.taps, strict=True):
        assert torch.equal(tap, everywhere[layer + 1])
        assert not torch.equal(tap, everywhere[layer + 2]), "one layer off must be seen"
    assert torch.equal(features.hidden_BSD, hidden)


def test_the_hidden_state_gives_the_targets_logits() -> None:
    target = tiny_target()
    features = TargetFeatures(target, LAYERS)
    logits = target.logits(target(TOKENS, positions_of(TOKENS), WholeSequence()))
    torch.testing.assert_close(features(TOKENS).hidden_BSD @ features.head_VD.T, logits)


def test_padding_on_the_right_changes_nothing_before_it() -> None:
    features = TargetFeatures(tiny_target(), LAYERS)
    padded = features(TOKENS)
    alone = features(TOKENS[1:, :3])
    for with_padding, without in zip(padded.taps, alone.taps, strict=True):
        torch.testing.assert_close(with_padding[1:, :3], without)
    torch.testing.assert_close(padded.hidden_BSD[1:, :3], alone.hidden_BSD)


def test_the_first_token_sees_itself_alone() -> None:
    features = TargetFeatures(tiny_target(), LAYERS)
    changed = TOKENS.clone()
    changed[:, 1:] = 40
    for before, after in zip(features(TOKENS).taps, features(changed).taps, strict=True):
        torch.testing.assert_close(before[:, 0], after[:, 0])
    assert not torch.equal(features(TOKENS).taps[2][:, 1], features(changed).taps[2][:, 1])


def test_embeddings_are_raw_rows() -> None:
    target = tiny_target()
    features = TargetFeatures(target, LAYERS)
    assert torch.equal(features.embed(TOKENS), target.embed_tokens.weight[TOKENS])


@pytest.mark.parametrize("is_trainable", [False, True])
def test_nothing_carries_a_gradient(is_trainable: bool) -> None:
    target = tiny_target().requires_grad_(is_trainable)
    features = TargetFeatures(target, LAYERS)
    found = features(TOKENS)
    tensors = [*found.taps, found.hidden_BSD, features.embed(TOKENS), features.head_VD]
    assert not any(tensor.requires_grad for tensor in tensors)
