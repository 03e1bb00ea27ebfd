"""Features of a batch: the target's own taps, states, embeddings and head, unmoved by padding and without gradient."""

from __future__ import annotations

import pytest
import torch
from tests.unit.models.conftest import positions_of, tiny_target

from paceline.checkpoint.contract import CaptureId, TargetLayerId
from paceline.models.attends import WholeSequence
from paceline.models.taps import TapCollector
from paceline.training.data import Batch
from paceline.training.features import TargetFeatures

LAYERS = tuple(TargetLayerId(layer) for layer in (-1, 0, 2))
TOKENS = torch.tensor([[5, 9, 11, 30, 2, 17], [8, 3, 50, 0, 0, 0]])


def test_taps_are_the_outputs_of_the_named_layers() -> None:
    target = tiny_target()
    features = TargetFeatures(target, LAYERS)(Batch.of_rows(TOKENS))
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
    torch.testing.assert_close(features(Batch.of_rows(TOKENS)).hidden_BSD @ features.head_VD.T, logits)


@torch.no_grad()
def test_the_teacher_reads_the_state_after_the_final_norm() -> None:
    """Report B05: with gains far from 1 the state before the norm gives another distribution."""
    target = tiny_target()
    target.norm.weight.uniform_(0.5, 2.0, generator=torch.Generator().manual_seed(3))
    features = TargetFeatures(target, LAYERS)
    collector = TapCollector([CaptureId(target.contract.num_layers)])
    logits = target.logits(target(TOKENS, positions_of(TOKENS), WholeSequence(), collector))
    head = features.head_VD.T
    found = (features(Batch.of_rows(TOKENS)).hidden_BSD @ head).softmax(-1)
    assert (found - logits.softmax(-1)).abs().max() < 1e-5
    unnormed = (collector.collected()[0] @ head).softmax(-1)
    assert (unnormed - logits.softmax(-1)).abs().max() > 1e-2


def test_features_belong_to_their_own_sequence() -> None:
    """Report B11: one by one, as one batch, again, and in reverse order."""
    features = TargetFeatures(tiny_target(), LAYERS)
    generator = torch.Generator().manual_seed(1)
    texts = [torch.randint(0, 61, (length,), generator=generator) for length in (7, 33, 64, 5, 120)]
    alone = [
        [*found.taps, found.hidden_BSD] for found in (features(Batch.of_rows(text.unsqueeze(0))) for text in texts)
    ]
    for order in ([0, 1, 2, 3, 4], [0, 1, 2, 3, 4], [4, 3, 2, 1, 0]):
        batch = torch.nn.utils.rnn.pad_sequence([texts[index] for index in order], batch_first=True)
        found = features(Batch.of_rows(batch))
        for row, index in enumerate(order):
            for together, single in zip([*found.taps, found.hidden_BSD], alone[index], strict=True):
                assert (together[row, : len(texts[index])] - single[0]).abs().max() < 1e-5


def test_padding_on_the_right_changes_nothing_before_it() -> None:
    features = TargetFeatures(tiny_target(), LAYERS)
    padded = features(Batch.of_rows(TOKENS))
    alone = features(Batch.of_rows(TOKENS[1:, :3]))
    for with_padding, without in zip(padded.taps, alone.taps, strict=True):
        torch.testing.assert_close(with_padding[1:, :3], without)
    torch.testing.assert_close(padded.hidden_BSD[1:, :3], alone.hidden_BSD)


def test_the_first_token_sees_itself_alone() -> None:
    features = TargetFeatures(tiny_target(), LAYERS)
    changed = TOKENS.clone()
    changed[:, 1:] = 40
    for before, after in zip(features(Batch.of_rows(TOKENS)).taps, features(Batch.of_rows(changed)).taps, strict=True):
        torch.testing.assert_close(before[:, 0], after[:, 0])
    assert not torch.equal(
        features(Batch.of_rows(TOKENS)).taps[2][:, 1], features(Batch.of_rows(changed)).taps[2][:, 1]
    )


def test_embeddings_are_raw_rows() -> None:
    target = tiny_target()
    features = TargetFeatures(target, LAYERS)
    assert torch.equal(features.embed(TOKENS), target.embed_tokens.weight[TOKENS])


@pytest.mark.parametrize("is_trainable", [False, True])
def test_nothing_carries_a_gradient(is_trainable: bool) -> None:
    target = tiny_target().requires_grad_(is_trainable)
    features = TargetFeatures(target, LAYERS)
    found = features(Batch.of_rows(TOKENS))
    tensors = [*found.taps, found.hidden_BSD, features.embed(TOKENS), features.head_VD]
    assert not any(tensor.requires_grad for tensor in tensors)
