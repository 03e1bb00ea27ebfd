"""The same weights read by another contract: nothing is copied, nothing of the given drafter changes."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

import torch
from torch import nn

from paceline.checkpoint.contract import DrafterContract
from paceline.models.drafters.backbone import DrafterBackbone
from paceline.models.drafters.block_drafter import BlockDrafter
from paceline.models.drafters.eagle3 import Eagle3Drafter
from paceline.models.positions import position_table

AnyDrafter = TypeVar("AnyDrafter", bound=BlockDrafter | Eagle3Drafter)


def reread(drafter: AnyDrafter, **changes: Any) -> AnyDrafter:
    """A drafter of the same class over the same tensors, with plain arithmetic.

    Args:
        drafter: prepared for serving or not.
        changes: fields of its contract.
    Returns:
        Ready to run. Norms that only the new contract has get gains of 1; tensors that it does not call for are left
        out.
    Raises:
        CheckpointError: the class does not draft by such a contract.
        ValueError: the new contract asks for a tensor that is not there, or of another shape.
    """
    contract = dataclasses.replace(drafter.contract, **changes)
    make: type[AnyDrafter] = type(drafter)
    with torch.device("meta"):
        other = make(contract)
    # copies of the target's own tables were dropped as the drafter was loaded
    if drafter.contract.has_own_embedding and drafter.vocabulary.embed_tokens is None:
        other.vocabulary.embed_tokens = None
    if drafter.contract.has_own_head and drafter.vocabulary.lm_head is None:
        other.vocabulary.lm_head = None
    held = dict(drafter.named_parameters()) | dict(drafter.named_buffers())
    for name, parameter in list(other.named_parameters()):
        there = held.get(name)
        if there is None and "norm" in name and parameter.dim() == 1:
            some = next(iter(held.values()))
            there = torch.ones(parameter.shape, dtype=some.dtype, device=some.device)
        if there is None or there.shape != parameter.shape:
            raise ValueError(f"{name}: no tensor of shape {list(parameter.shape)}")
        _owner(other, name).register_parameter(name.rpartition(".")[2], nn.Parameter(there, requires_grad=False))
    for name, buffer in list(other.named_buffers()):
        there = held.get(name)
        if name.endswith("position_table"):
            continue
        if there is None or there.shape != buffer.shape:
            raise ValueError(f"{name}: no tensor of shape {list(buffer.shape)}")
        setattr(_owner(other, name), name.rpartition(".")[2], there)
    _renew_table(other, contract, num_positions=contract.max_position_embeddings, like=drafter)
    other.eval()
    return other


def positions_of(drafter: BlockDrafter | Eagle3Drafter) -> DrafterBackbone | Eagle3Drafter:
    """The module that holds the position table."""
    return drafter.backbone if isinstance(drafter, BlockDrafter) else drafter


def _renew_table(
    drafter: BlockDrafter | Eagle3Drafter,
    contract: DrafterContract,
    *,
    num_positions: int,
    like: BlockDrafter | Eagle3Drafter,
) -> None:
    """Copy the table if nothing about positions changed: a test may have replaced its frequencies."""
    old = positions_of(like).position_table
    is_same = contract.rope == like.contract.rope and contract.rotary_size == like.contract.rotary_size
    if is_same and old.shape[0] >= num_positions:
        positions_of(drafter).position_table = old
    else:
        table = position_table(contract.rope, contract.rotary_size, num_positions)
        positions_of(drafter).position_table = table.to(old.device)


def _owner(model: nn.Module, name: str) -> nn.Module:
    return model.get_submodule(name.rpartition(".")[0])


def gains_plus_one(drafter: AnyDrafter) -> AnyDrafter:
    """The same weights with every norm's gain read as 1 + w."""
    other = reread(drafter)
    for name, parameter in list(other.named_parameters()):
        if "norm" in name and parameter.dim() == 1:
            gain = nn.Parameter(parameter.detach() + 1, requires_grad=False)
            _owner(other, name).register_parameter(name.rpartition(".")[2], gain)
    return other
