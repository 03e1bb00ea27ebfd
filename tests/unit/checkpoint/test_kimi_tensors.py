"""Kimi checkpoints of every storage come out under one spelling; what contradicts itself is refused."""

from __future__ import annotations

import pytest
import torch
from tests.tiny_kimi import k3_tiny_config, kimi_contract, kimi_target, kimi_tensors, multimodal_config
from tests.unit.checkpoint.test_sources import MemorySource
from torch import Tensor

from paceline.checkpoint.contract import TargetContract
from paceline.checkpoint.kimi_tensors import open_kimi
from paceline.checkpoint.weights import TensorSource
from paceline.errors import CheckpointError

RATES = "model.layers.0.self_attn.A_log"


@pytest.fixture
def contract() -> TargetContract:
    return kimi_contract(k3_tiny_config())


def source_of(contract: TargetContract, **tensors: Tensor) -> TensorSource:
    return open_kimi(MemorySource(dict(tensors)), contract, None)


@pytest.mark.parametrize("shape", [(4,), (1, 1, 4, 1), (32,), (128,)])
def test_every_storage_of_decay_rates(shape: tuple[int, ...], contract: TargetContract) -> None:
    stored = torch.zeros(shape)
    stored.view(-1)[:4] = torch.tensor([1.0, -2.0, 3.0, 0.0])
    source = source_of(contract, **{RATES: stored})
    assert source.shape(RATES) == (4,)
    assert source.load(RATES).tolist() == [1.0, -2.0, 3.0, 0.0]


def test_decay_rates_behind_the_heads_must_be_zero(contract: TargetContract) -> None:
    stored = torch.zeros(32)
    stored[5] = 1e-6
    with pytest.raises(CheckpointError, match="holds 32 values for 4 heads, and those behind the heads' are not zero"):
        source_of(contract, **{RATES: stored}).load(RATES)


def test_too_few_decay_rates_keep_their_shape_for_the_loader_to_refuse(contract: TargetContract) -> None:
    assert source_of(contract, **{RATES: torch.zeros(3)}).shape(RATES) == (3,)


def test_convolutions_may_have_a_middle_dimension(contract: TargetContract) -> None:
    name, weight = "model.layers.0.self_attn.k_conv1d.weight", torch.randn(128, 1, 4)
    for stored in (weight, weight[:, 0]):
        source = source_of(contract, **{name: stored})
        assert source.shape(name) == (128, 4) and torch.equal(source.load(name), weight[:, 0])


def test_exports_without_the_inner_prefix() -> None:
    contract = kimi_contract(multimodal_config())
    names = ["language_model.layers.0.mlp.gate_proj.weight", "language_model.model.norm.weight"]
    names += ["language_model.embed_tokens.weight", "language_model.lm_head.weight", "vision_tower.encoder.x"]
    source = source_of(contract, **{name: torch.ones(2) for name in names})
    assert source.names() == [
        "language_model.model.layers.0.mlp.gate_proj.weight",
        "language_model.model.norm.weight",
        "language_model.model.embed_tokens.weight",
        "language_model.lm_head.weight",
        "vision_tower.encoder.x",
    ]
    assert source.load("language_model.model.embed_tokens.weight").tolist() == [1.0, 1.0]
    twice = {"language_model.norm.weight": torch.ones(2), "language_model.model.norm.weight": torch.ones(2)}
    with pytest.raises(CheckpointError, match="one tensor has two names"):
        source_of(contract, **twice)


def test_names_that_are_not_there(contract: TargetContract) -> None:
    with pytest.raises(CheckpointError, match="has no tensor x"):
        source_of(contract, **{RATES: torch.zeros(4)}).load("x")


def test_a_whole_file_keeps_its_numbers(contract: TargetContract) -> None:
    target = kimi_target()
    source = source_of(contract, **kimi_tensors(target, rates="padded"))
    flat = kimi_tensors(target, rates="flat", flat_convolution=True)
    assert all(torch.equal(source.load(name), tensor) for name, tensor in flat.items())
