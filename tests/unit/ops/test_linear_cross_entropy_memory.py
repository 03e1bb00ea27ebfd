"""What a loss through an output head holds at once, counted in bytes of live tensors while it runs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from paceline.ops.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_reference

R, D, V = 512, 16, 3000


class LiveBytes(TorchDispatchMode):
    """Follows every storage that an operation makes until it is freed; `peak` is the most at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.untyped_storage().data_ptr() not in given:
                self._follow(leaf.untyped_storage())
        self.peak = max(self.peak, self.now)
        return result

    def _follow(self, storage: torch.UntypedStorage) -> None:
        size = storage.nbytes()
        self.now += size
        weakref.finalize(storage, self._freed, size)

    def _freed(self, size: int) -> None:
        self.now -= size


def run(loss_of: Callable[..., Any], **options: Any) -> tuple[float, Tensor, int]:
    """Loss, gradient of the states, and the peak of forward and backward together."""
    torch.manual_seed(0)
    hidden = torch.randn(R, D, requires_grad=True)
    arguments = (torch.randn(R, D), torch.randint(0, V, (R,)), torch.rand(R), torch.randn(V, D))
    with LiveBytes() as live:
        found = loss_of(hidden, *arguments, kl=0.5, ce=0.5, **options)
        loss = found if isinstance(found, Tensor) else found.loss
        (gradient,) = torch.autograd.grad(loss, hidden)
    return float(loss.detach()), gradient, live.peak


def test_chunks_hold_a_quarter_of_what_whole_logits_take_and_say_the_same() -> None:
    """B106: a teacher over the whole vocabulary, in float32, for every row at once fills a card."""
    whole_loss, whole_gradient, whole = run(linear_cross_entropy_reference)
    loss, gradient, peak = run(linear_cross_entropy, chunk_rows=32)
    assert loss == pytest.approx(whole_loss, rel=1e-4)
    torch.testing.assert_close(gradient, whole_gradient, rtol=1e-4, atol=1e-4)
    assert whole > 4 * R * V * 3, "the definition keeps logits and probabilities of both"
    assert peak < whole / 4
    assert run(linear_cross_entropy, chunk_rows=R)[2] > whole / 4, "the planted fault: one chunk of all rows"


def test_memory_does_not_grow_with_the_rows() -> None:
    peaks = [run(linear_cross_entropy, chunk_rows=rows)[2] for rows in (32, 64, 128)]
    assert peaks[1] == pytest.approx(2 * peaks[0], rel=0.2) and peaks[2] == pytest.approx(4 * peaks[0], rel=0.2)
