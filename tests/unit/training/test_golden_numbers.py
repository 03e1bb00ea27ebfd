"""Worked numbers of training that stand in no other test: weights of a block, sizes of networks, a selector's label."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.tiny import tiny_target_contract
from torch import nn

from paceline.checkpoint.contract import ConvolutionSettings, DrafterContract, SelectorSettings, TargetLayerId
from paceline.checkpoint.dialects import default_target_layer_ids
from paceline.models.drafters.table import DRAFTERS
from paceline.models.targets.dense import DenseTarget
from paceline.training.objective import position_weights
from paceline.training.selector import with_labels

SMOLLM2 = tiny_target_contract(
    num_layers=30,
    hidden_size=576,
    intermediate_size=1536,
    num_heads=9,
    num_kv_heads=3,
    head_size=64,
    vocab_size=49_152,
)


def smollm2_drafter(**changes: Any) -> DrafterContract:
    """Four layers of the target's sizes, five taps."""
    fields: dict[str, Any] = {
        "family": "dflash",
        "origin": "tests",
        "target_name": "smollm2",
        "target_num_layers": 30,
        "target_hidden_size": 576,
        "target_vocab_size": 49_152,
        "target_layer_ids": tuple(TargetLayerId(layer) for layer in (1, 8, 14, 20, 27)),
        "aux_hidden_stream": "prefix",
        "has_tap_norm": False,
        "block_size": 8,
        "layout": "fill_in",
        "mask_token_id": 0,
        "vocab_size": 49_152,
        "draft_vocab_size": 49_152,
        "num_layers": 4,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_heads": 9,
        "num_kv_heads": 3,
        "head_size": 64,
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "rope": SMOLLM2.rope,
        "is_neox_style": True,
        "max_position_embeddings": 2048,
        "layer_windows": (None,) * 4,
        "layer_causal": (False,) * 4,
        "input_embedding_scale": 1.0,
        "output_multiplier": 1.0,
        "final_logit_softcapping": None,
        "draft_sample_method": "greedy",
        "dtype": "bfloat16",
    }
    return DrafterContract(**(fields | changes))


def num_elements(module: nn.Module, *, of: str = "", matrices_only: bool = True) -> int:
    return sum(
        parameter.numel()
        for name, parameter in module.named_parameters()
        if of in name and (parameter.dim() > 1 or not matrices_only)
    )


def on_meta(contract: DrafterContract) -> nn.Module:
    with torch.device("meta"):
        return DRAFTERS[contract.family](contract)


def test_sizes_of_a_small_target() -> None:
    with torch.device("meta"):
        target = DenseTarget(SMOLLM2)
    layer = num_elements(target, of="layers.0.")
    assert layer == 3_538_944
    assert target.embed_tokens.weight.numel() == 28_311_552
    assert 30 * layer + target.embed_tokens.weight.numel() == 134_479_872


def test_sizes_of_its_drafters() -> None:
    plain = on_meta(smollm2_drafter())
    assert num_elements(plain) == 15_814_656
    extended = on_meta(
        smollm2_drafter(
            family="dflash2",
            convolution=ConvolutionSettings(num_taps=2, group_size=16),
            selector=SelectorSettings(rank=64, top_k=16),
        )
    )
    convolutions = num_elements(extended, of="layers.0.", matrices_only=False) - num_elements(
        plain, of="layers.0.", matrices_only=False
    )
    assert convolutions == 170_496
    assert num_elements(extended, of="candidate_selector.") == 6_328_320


DECAY_8_4 = [1, 0.7788, 0.6065, 0.4724, 0.3679, 0.2865, 0.2231]
DECAY_16_7 = [
    *(1, 0.8669, 0.7515, 0.6514, 0.5647, 0.4895, 0.4244, 0.3679),
    *(0.3189, 0.2765, 0.2397, 0.2077, 0.1801, 0.1561, 0.1353),
]


@pytest.mark.parametrize(("gamma", "drafts", "total"), [(4.0, DECAY_8_4, 3.7352), (7.0, DECAY_16_7, 6.6306)])
def test_weights_of_a_block(gamma: float, drafts: list[float], total: float) -> None:
    """The anchor weighs nothing and the first draft 1, whichever row of the network gives it: in fill-in blocks of 8
    and in anchor-sampling blocks of 7 alike.
    """
    weights = position_weights(len(drafts) + 1, gamma)
    assert weights.tolist() == pytest.approx([0, *drafts], abs=5e-5)
    assert float(weights.sum()) == pytest.approx(total, abs=5e-5)


def test_a_label_takes_the_place_of_the_weakest_candidate() -> None:
    candidates = torch.tensor([[7, 2, 9, 4], [7, 2, 9, 4]])
    labels = torch.tensor([5, 9])
    found = with_labels(candidates, labels)
    assert found.tolist() == [[7, 2, 9, 5], [7, 2, 9, 4]]
    assert (found == labels[:, None]).nonzero()[:, 1].tolist() == [3, 2]
    assert (candidates == labels[:, None]).any(1).tolist() == [False, True]


@pytest.mark.parametrize(
    ("num_layers", "three", "five"),
    [
        (12, [1, 5, 9], [1, 3, 5, 7, 9]),
        (24, [1, 11, 21], [1, 6, 11, 16, 21]),
        (28, [1, 13, 25], [1, 7, 13, 19, 25]),
        (30, [1, 14, 27], [1, 8, 14, 20, 27]),
        (32, [1, 15, 29], [1, 8, 15, 22, 29]),
        (36, [1, 17, 33], [1, 9, 17, 25, 33]),
        (40, [1, 19, 37], [1, 10, 19, 28, 37]),
        (61, [1, 30, 58], [1, 15, 30, 44, 58]),
        (93, [1, 46, 90], [1, 23, 46, 68, 90]),
    ],
)
def test_default_taps(num_layers: int, three: list[int], five: list[int]) -> None:
    assert list(default_target_layer_ids(num_layers, 3)) == three
    assert list(default_target_layer_ids(num_layers, 5)) == five
