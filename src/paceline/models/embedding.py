"""Embedding tables as models are made with them: without rows, which are set when weights are read."""

from __future__ import annotations

import torch
from torch import nn


def empty_embedding(num_rows: int, width: int) -> nn.Embedding:
    """A table whose rows are not yet set.

    torch would draw them first, and on the meta device, where models are made, that imports its compiler: a second of
    every start.
    """
    return nn.Embedding(num_rows, width, _weight=torch.empty(num_rows, width))
