"""Models without weights, to be loaded into, and untrained drafters, to be trained."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from paceline.checkpoint.contract import DrafterContract, TargetContract
from paceline.errors import ConfigError
from paceline.models.drafters.block_drafter import BlockDrafter
from paceline.models.drafters.table import DRAFTERS, Drafter
from paceline.models.positions import position_table
from paceline.models.targets.dense import DenseTarget
from paceline.models.targets.kimi import KimiTarget
from paceline.models.targets.kimi_multimodal import KimiMultimodalTarget
from paceline.models.targets.table import TARGETS


def empty_target(
    contract: TargetContract, dtype: torch.dtype, device: torch.device
) -> DenseTarget | KimiTarget | KimiMultimodalTarget:
    """A target whose weights are not yet set, without paying for an initialisation."""
    with torch.device("meta"):
        model = TARGETS[contract.architecture](contract)
    materialise(model, dtype, device)
    if isinstance(model, DenseTarget):
        model.settle(device)
    return model.eval()


def empty_drafter(contract: DrafterContract, dtype: torch.dtype, device: torch.device) -> Drafter:
    """A drafter whose weights are not yet set."""
    with torch.device("meta"):
        drafter = DRAFTERS[contract.family](contract)
    materialise(drafter, dtype, device)
    table = position_table(contract.rope, contract.rotary_size, contract.max_position_embeddings)
    (drafter.backbone if isinstance(drafter, BlockDrafter) else drafter).position_table = table.to(device)
    return drafter.eval()


def empty_block_drafter(contract: DrafterContract, dtype: torch.dtype, device: torch.device) -> BlockDrafter:
    """The same for whoever works on blocks, as training does.

    Raises:
        ConfigError: this family drafts token by token.
    """
    drafter = empty_drafter(contract, dtype, device)
    if not isinstance(drafter, BlockDrafter):
        raise ConfigError(
            f"a drafter of family {contract.family!r} drafts token by token; a block drafter is needed here",
            origin={"drafter": contract.origin},
        )
    return drafter


def initialise_drafter(contract: DrafterContract, device: torch.device, *, seed: int) -> BlockDrafter:
    """An untrained drafter in float32, the same on every device.

    Matrices start at N(0, 0.02), gains at 1, biases at 0. What couples the rows of a block starts without effect: a
    DFlash2's convolution as the identity, a Markov head without a bias.
    """
    drafter = empty_block_drafter(contract, torch.float32, torch.device("cpu"))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            _fill(name.rpartition(".")[2], name.split(".")[-2], parameter, generator)
    return drafter.requires_grad_(True).to(device)


def _fill(name: str, module: str, parameter: Tensor, generator: torch.Generator) -> None:
    if module in ("kernel_projection", "markov_w2") or name in ("bias", "attention_sink_bias"):
        parameter.zero_()
    elif name == "base_kernel":
        parameter.zero_()
        parameter[:, 0] = 1.0  # on both sides, a row reads itself alone
    elif parameter.dim() > 1:
        parameter.normal_(0.0, 0.01 if module == "markov_w1" else 0.02, generator=generator)
    else:
        parameter.fill_(1.0)


def materialise(model: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Give a model that was made on the meta device memory for its weights, which are then set."""
    # what `to_empty` does, but for `empty_like` of a meta tensor, which imports sympy
    model.to(dtype)._apply(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device=device))
    model.requires_grad_(False)
