"""A whole pass through attention residuals against the published `flash-attn-res`, whose blocks count sub-layers.

That package (seen with 0.1.12) keeps our schedule: the embedding is the first block, a block's first sub-layer sees
closed blocks alone, the last mixture sees all. Its kernels, here interpreted, store mixtures in bf16.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from paceline.ops.attention_residual import attention_residual

EPS = 1e-5
WIDTH = 16


def our_pass(x: Tensor, queries: Tensor, sub_layers: list[Callable[[Tensor], Tensor]], block_size: int) -> Tensor:
    """Layers of two sub-layers each, `block_size` of them to a block."""
    bank = torch.full((*x.shape[:-1], 1 + len(sub_layers), WIDTH), torch.nan)
    prefix, delta = x, None
    for layer in range(len(sub_layers) // 2):
        num_sources, writes = -(-layer // block_size), layer % block_size == 0
        prefix, mixed = attention_residual(
            prefix,
            bank,
            num_sources,
            queries[2 * layer],
            eps=EPS,
            delta_TD=delta,
            write_row=num_sources if writes else None,
        )
        delta = sub_layers[2 * layer](mixed)
        if writes:
            prefix, delta = delta, None
        prefix, mixed = attention_residual(
            prefix, bank, num_sources + writes, queries[2 * layer + 1], eps=EPS, delta_TD=delta
        )
        delta = sub_layers[2 * layer + 1](mixed)
    num_blocks = -(-len(sub_layers) // (2 * block_size))
    return attention_residual(prefix, bank, num_blocks, queries[-1], eps=EPS, delta_TD=delta)[1]


@pytest.mark.parametrize(("num_layers", "block_size"), [(2, 1), (4, 2), (3, 2), (2, 4)])
def test_a_pass_agrees_with_the_published_package(
    kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch, num_layers: int, block_size: int
) -> None:
    autograd = pytest.importorskip("flash_attn_res.experimental.autograd")
    kernels = pytest.importorskip("flash_attn_res.kernels")
    for kernel in (
        kernels.phase_1.phase_1_batched_attention_forward_kernel,
        kernels.phase_2.phase_2_online_softmax_merge_forward_kernel,
    ):
        if hasattr(kernel, "configs"):  # nothing can be timed without a GPU, and one choice needs no timing
            monkeypatch.setattr(kernel, "configs", kernel.configs[:1])
    num_sub_layers = 2 * num_layers
    x, queries = torch.randn(1, 3, WIDTH), torch.randn(num_sub_layers + 1, WIDTH)
    matrices = torch.randn(num_sub_layers, WIDTH, WIDTH) / WIDTH**0.5

    def sub_layer(index: int, device: torch.device) -> Callable[[Tensor], Tensor]:
        return lambda rows: rows.float() @ matrices[index].to(device)

    ours = our_pass(x, queries, [sub_layer(i, x.device) for i in range(num_sub_layers)], block_size)
    there = [sub_layer(i, kernel_device) for i in range(num_sub_layers)]
    theirs = autograd.BlockAttentionResiduals.apply(
        x.to(kernel_device), queries.to(kernel_device), there, 2 * block_size, EPS
    )
    torch.testing.assert_close(theirs.cpu().float(), ours, rtol=0.05, atol=0.05)
    other = our_pass(x, queries, [sub_layer(i, x.device) for i in range(num_sub_layers)], 3 - min(block_size, 2))
    if block_size < num_layers:
        assert (other - ours).abs().max() > 0.2, "blocks of another size are told apart"
