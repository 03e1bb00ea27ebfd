"""Bytes of masks against the masks themselves: what a step keeps for its gradient, what flex attention's lists take."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.unit.models.conftest import tiny_drafter
from tests.unit.training.packed_cases import Packed
from tests.unit.training.test_objective import Case
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from paceline.cli.mask_memory import dense_bytes, flex_bytes
from paceline.training.anchors import make_blocks, sample_anchors
from paceline.training.drafting import states_after_labels
from paceline.training.flex_attend import FlexBlocks
from paceline.training.objective import draft_blocks


class Kept:
    """Bytes that a forward keeps for its backward, of tensors that look like a mask."""

    def __init__(self) -> None:
        self.storages: dict[int, Tensor] = {}

    def look(self, tensor: Tensor) -> Tensor:
        if bool(torch.isneginf(tensor).any()) if tensor.is_floating_point() else tensor.dtype == torch.bool:
            self.storages[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    @property
    def num_bytes(self) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in self.storages.values())


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_heads": 2, "num_kv_heads": 2},
        {"num_layers": 3, "layer_windows": (None,) * 3, "layer_causal": (False,) * 3},
    ],
)
def test_a_step_keeps_a_number_per_pair_head_group_and_layer(changes: dict[str, Any]) -> None:
    case, kept = Case(tiny_drafter(**changes)), Kept()
    with torch.autograd.graph.saved_tensors_hooks(kept.look, lambda tensor: tensor):
        draft_blocks(case.drafter, case.taps, case.rows(), case.blocks)
    contract, (num_rows, num_blocks) = case.drafter.contract, case.blocks.anchors_BA.shape
    length, rows = case.taps[0].shape[1], num_blocks * contract.block_size
    group = contract.num_heads // contract.num_kv_heads
    assert kept.num_bytes == num_rows * rows * (length + rows) * group * 4 * contract.num_layers
    whole = dense_bytes(contract, num_rows, length, num_blocks, 4, is_trained=True)
    kinds = len(set(zip(contract.layer_windows, contract.layer_causal, strict=True)))
    assert whole == kept.num_bytes + num_rows * rows * (length + rows) * (kinds + group)


def test_chains_keep_the_masks_of_every_pass() -> None:
    case, kept = Packed("eagle3"), Kept()
    batch = case.alone(0)
    generator = torch.Generator().manual_seed(0)
    anchors, valid = sample_anchors(batch.supervised_BS, 4, generator)
    contract = case.drafter.contract
    blocks = make_blocks(batch.token_ids_BS, batch.supervised_BS, anchors, valid, contract.num_draft_tokens + 1)
    features = case.features_of(batch)
    with torch.autograd.graph.saved_tensors_hooks(kept.look, lambda tensor: tensor):
        states_after_labels(case.drafter, case.features_of, features, batch, blocks)
    (num_rows, length), num_blocks = batch.token_ids_BS.shape, anchors.shape[1]
    group = contract.num_heads // contract.num_kv_heads
    last = num_rows * num_blocks * (length + num_blocks * (contract.num_draft_tokens - 1))
    whole = dense_bytes(contract, num_rows, length, num_blocks, 4, is_trained=True)
    assert whole == kept.num_bytes + last * (1 + group)
    assert kept.num_bytes > 0


@pytest.mark.parametrize(("tokens", "num_blocks", "num_rows"), [(300, 40, 2), (128, 16, 1), (700, 9, 3)])
def test_flex_attention_keeps_lists_of_tiles(tokens: int, num_blocks: int, num_rows: int) -> None:
    contract, flex = tiny_drafter().contract, FlexBlocks(tokens, num_blocks, is_compiled=False)
    anchors = torch.arange(num_blocks).expand(num_rows, -1)
    kinds = dict.fromkeys(zip(contract.layer_windows, contract.layer_causal, strict=True))
    masks = [flex.mask(anchors, contract.block_size, tokens, window=window, causal=causal) for window, causal in kinds]
    assert flex_bytes(contract, flex, num_rows) == sum(map(bytes_of, masks))
    assert flex_bytes(contract, flex, num_rows) < dense_bytes(
        contract, num_rows, tokens, num_blocks, 4, is_trained=True
    )


def bytes_of(mask: BlockMask) -> int:
    parts = [part for part in mask.as_tuple(flatten=True) if isinstance(part, Tensor)]
    return sum(part.nbytes for part in parts)
