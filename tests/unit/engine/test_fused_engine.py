"""Engines with fused layers: greedy texts are those of the modules, whatever the drafter, batch and chunks."""

from __future__ import annotations

from typing import Any

import pytest
from tests.tiny import loaded
from tests.unit.engine.test_paged_attends import force_paged, texts
from torch import Tensor

from paceline.checkpoint.contract import DrafterFamily
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


def test_a_lost_residual_changes_some(monkeypatch: pytest.MonkeyPatch) -> None:
    target, _ = loaded("qwen3", linear_mode="fused")
    force_paged(monkeypatch)
    alone = texts(target, None, at_once=1)
    honest = fused_layer.linear_residual

    def lost(x: Tensor, weight: Tensor, residual: Tensor, **options: Any) -> Tensor:
        return honest(x, weight, residual * 0.5, **options)

    monkeypatch.setattr(fused_layer, "linear_residual", lost)
    assert texts(target, None, at_once=3) != alone
