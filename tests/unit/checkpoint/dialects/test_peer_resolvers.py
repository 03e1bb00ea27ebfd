"""What we write about windows and causality means the same to every program that reads it (spec 2.3).

Each program decides by other keys; their rules are restated here, and the files that we write satisfy all of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from tests.unit.checkpoint.dialects.conftest import load_golden

from paceline.checkpoint.contract import DrafterContract
from paceline.checkpoint.dialects import contract_from_config, write_drafter_config

Layers = tuple[tuple[int | None, ...], tuple[bool, ...]]
SLIDING = "sliding_attention"
CASES: dict[str, Layers] = {
    "full": ((None, None), (False, False)),
    "all sliding, causal": ((64, 64), (True, True)),
    "all sliding, both directions": ((2048, 2048), (False, False)),
    "first sliding and causal": ((128, None), (True, False)),
    "first sliding, both directions": ((128, None), (False, False)),
    "first sliding, all causal": ((128, None), (True, True)),
    "full, all causal": ((None, None), (True, True)),
}


def by_zlab(config: Mapping[str, Any]) -> Layers:
    """Layer types and the top-level override; nothing inside `dflash_config`."""
    types = config["layer_types"]
    window = config["sliding_window"] if config["use_sliding_window"] else None
    override = config.get("is_causal")
    causal = tuple(kind == SLIDING if override is None else override for kind in types)
    return tuple(window if kind == SLIDING else None for kind in types), causal


def by_vllm(config: Mapping[str, Any]) -> Layers:
    """`use_swa` and `swa_window_size` before layer types, `dflash_config.causal` below the top-level override."""
    types, nested = config["layer_types"], config["dflash_config"]
    uses_swa = nested.get("use_swa", False) and SLIDING not in types
    window = nested.get("swa_window_size", config["sliding_window"])
    override = config["is_causal"] if config.get("is_causal") is not None else nested.get("causal")
    causal = tuple(kind == SLIDING if override is None else override for kind in types)
    return tuple(window if uses_swa or kind == SLIDING else None for kind in types), causal


def by_specforge(config: Mapping[str, Any]) -> Layers:
    """Layer types decide everything: sliding layers are causal, and no key overrides it."""
    types = config["layer_types"]
    windows = tuple(config["sliding_window"] if kind == SLIDING else None for kind in types)
    return windows, tuple(kind == SLIDING for kind in types)


def by_transformers(config: Mapping[str, Any]) -> Layers:
    """Layer types give windows, and rows always see each other in both directions."""
    types = config["layer_types"]
    return tuple(config["sliding_window"] if kind == SLIDING else None for kind in types), (False,) * len(types)


def contract_of(layers: Layers) -> DrafterContract:
    contract = contract_from_config(load_golden("zlab-dflash"), "c")
    return dataclasses.replace(
        contract, num_layers=2, layer_windows=layers[0], layer_causal=layers[1], attention_bias=False
    )


@pytest.mark.parametrize("reader", [by_zlab, by_vllm])
@pytest.mark.parametrize("layers", CASES.values(), ids=CASES)
def test_the_public_layout_is_read_alike(layers: Layers, reader: Callable[[Mapping[str, Any]], Layers]) -> None:
    config = write_drafter_config(contract_of(layers), "zlab")
    assert reader(config) == layers
    found = contract_from_config(config, "c")
    assert (found.layer_windows, found.layer_causal) == layers


@pytest.mark.parametrize("name", ["all sliding, both directions", "first sliding, all causal", "full, all causal"])
def test_overrides_are_lost_on_a_reader_that_has_none(name: str) -> None:
    """The known loss: SpecForge reads no override, so these drafters are other ones there."""
    assert by_specforge(write_drafter_config(contract_of(CASES[name]), "zlab")) != CASES[name]


@pytest.mark.parametrize("name", ["full", "all sliding, both directions", "first sliding, both directions"])
def test_the_assistant_layout_is_read_alike(name: str) -> None:
    config = write_drafter_config(contract_of(CASES[name]), "assistant")
    assert by_transformers(config) == CASES[name]
    found = contract_from_config(config, "c")
    assert (found.layer_windows, found.layer_causal) == CASES[name]
