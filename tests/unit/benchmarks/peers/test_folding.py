from __future__ import annotations

import dataclasses

import torch
from benchmarks.peers.folding import fold_tap_norms, median_inverse_sizes
from tests import tiny
from torch import Tensor

from paceline.checkpoint.export import split_fused
from paceline.checkpoint.names import drafter_destinations
from paceline.checkpoint.weights import load_strict
from paceline.models.drafters.dflash import DFlashDrafter
from paceline.models.loading import LoadedTarget
from paceline.training.data import Batch
from paceline.training.features import TargetFeatures


class Source:
    """Tensors in a dict."""

    origin = "tests"

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors

    def names(self) -> list[str]:
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def load(self, name: str) -> Tensor:
        return self._tensors[name]


def prepare() -> tuple[LoadedTarget, DFlashDrafter, dict[str, Tensor]]:
    target, _ = tiny.loaded(linear_mode="plain")
    drafter = tiny.tiny_drafter(target.contract)
    return target, drafter, split_fused(drafter.checkpoint_parameters(), drafter_destinations(drafter.contract))


def test_a_stream_of_median_size_gives_the_same_feature() -> None:
    target, drafter, tensors = prepare()
    text = tiny.tiny_prompts([1])  # a single position is its own median
    contract, folded = fold_tap_norms(drafter.contract, tensors, target, text)
    assert not contract.has_tap_norm and not any("fc_norm" in name for name in folded)
    other = DFlashDrafter(contract)
    load_strict(other.checkpoint_parameters(), Source(folded), drafter_destinations(contract))
    taps = TargetFeatures(target.model, contract.target_layer_ids)(Batch.of_rows(torch.tensor(text))).taps
    expected = drafter.backbone.context_features(taps)
    assert torch.allclose(other.backbone.context_features(taps), expected, atol=1e-5)
    doubled = [taps[0] * 2, *taps[1:]]  # the norm would undo this, the constant cannot
    assert not torch.allclose(other.backbone.context_features(doubled), expected, atol=1e-2)


def test_median_over_all_texts() -> None:
    target, drafter, _ = prepare()
    texts = tiny.tiny_prompts([5, 8])
    found = median_inverse_sizes(drafter.contract, target, texts)
    features = TargetFeatures(target.model, drafter.contract.target_layer_ids)
    streams = [
        torch.cat([features(Batch.of_rows(torch.tensor([text]))).taps[tap][0] for text in texts]) for tap in range(3)
    ]
    expected = [(stream.pow(2).mean(-1) + drafter.contract.rms_norm_eps).rsqrt().median() for stream in streams]
    assert torch.allclose(found, torch.stack(expected))


def test_a_drafter_without_norms_stays_what_it_is() -> None:
    target, drafter, tensors = prepare()
    del tensors["fc_norm.0.weight"], tensors["fc_norm.1.weight"], tensors["fc_norm.2.weight"]
    plain = dataclasses.replace(drafter.contract, has_tap_norm=False, dtype="bfloat16")
    contract, same = fold_tap_norms(plain, tensors, target, [])
    assert contract == dataclasses.replace(plain, dtype="float32")
    assert same.keys() == tensors.keys() and torch.equal(same["fc.weight"], tensors["fc.weight"])
