"""Engines with fused layers: greedy texts are those of the modules, whatever the drafter, batch and chunks."""

from __future__ import annotations

from typing import Any

import pytest
from tests.tiny import loaded
from tests.unit.engine.test_paged_attends import force_paged, texts
from torch import Tensor

from paceline.checkpoint.contract import DrafterFamily
from paceline.engine import paged_attends
from paceline.models import fused_layer
from paceline.models.fused_layer import linear_gated


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("drafter_family", ["dflash", "dflash2", "dspark", "eagle3"])
def test_greedy_texts_are_those_of_the_modules(
    family: Any, drafter_family: DrafterFamily, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[int] = []

    def counted(x: Tensor, *arguments: Any, **options: Any) -> Tensor:
        launched.append(x.shape[0])
        return linear_gated(x, *arguments, **options)

    alone = texts(loaded(family, linear_mode="plain")[0], None, at_once=1, prefix_cache=False)
    force_paged(monkeypatch)
    monkeypatch.setattr(fused_layer, "linear_gated", counted)
    target, drafter = loaded(family, linear_mode="fused", drafter_family=drafter_family)
    assert texts(target, drafter, at_once=3, prefill_chunk_size=16, block_size=8) == alone
    assert launched, "the fused layers ran"


def counted_in(monkeypatch: pytest.MonkeyPatch) -> tuple[list[Tensor], list[Tensor]]:
    """What launches of an engine count in: products, and attention."""
    target, drafter = loaded(linear_mode="fused")
    products, attentions = [], []
    gated, attention = fused_layer.linear_gated, paged_attends.paged_attention

    def noted_product(*arguments: Any, **options: Any) -> Tensor:
        products.append(options["counters"])
        return gated(*arguments, **options)

    def noted_attention(*arguments: Any, **options: Any) -> Tensor:
        attentions.append(options["arrivals"])
        return attention(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(fused_layer, "linear_gated", noted_product)
        patch.setattr(paged_attends, "paged_attention", noted_attention)
        for _ in range(2):
            texts(target, drafter, at_once=2)
    return products, attentions


def test_two_engines_of_one_model_count_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """On two streams their launches run at the same time; each has fixed memory for its two caches."""
    force_paged(monkeypatch)
    for launches in counted_in(monkeypatch):
        addresses = [each.data_ptr() for each in launches]  # all are alive, so none is given twice
        half = len(addresses) // 2
        assert len(set(addresses[:half])) == len(set(addresses[half:])) == 2
        assert set(addresses[:half]).isdisjoint(addresses[half:])


def test_counting_in_what_belongs_to_the_model_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    force_paged(monkeypatch)
    monkeypatch.setattr(fused_layer.Pass, "counters", lambda _pass, layer: layer.counters)
    products, _ = counted_in(monkeypatch)
    num_layers = 4 + 2
    assert len({each.data_ptr() for each in products}) == num_layers, "those of the layers, in both engines"


def test_a_lost_residual_changes_some(monkeypatch: pytest.MonkeyPatch) -> None:
    target, _ = loaded("qwen3", linear_mode="fused")
    force_paged(monkeypatch)
    alone = texts(target, None, at_once=1)
    honest = fused_layer.linear_residual

    def lost(x: Tensor, weight: Tensor, residual: Tensor, **options: Any) -> Tensor:
        return honest(x, weight, residual * 0.5, **options)

    monkeypatch.setattr(fused_layer, "linear_residual", lost)
    assert texts(target, None, at_once=3) != alone
