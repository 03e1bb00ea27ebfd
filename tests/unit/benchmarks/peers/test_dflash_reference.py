"""The watch on the package `dflash`, with a stub of it: the package itself is no dependency."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from benchmarks.peers.dflash_reference import load_peer, peer_drafts
from torch import Tensor, nn

ROUNDS = [(7, 4), (8, 4), (11, 2)]  # anchor position and rows of each block
HEAD = nn.Linear(4, 6, bias=False)


class Drafter(nn.Module):
    def forward(self, *, noise_embedding: Tensor, position_ids: Tensor) -> Tensor:
        return noise_embedding + position_ids[:, -noise_embedding.shape[1] :, None]

    def compute_logits(self, hidden: Tensor, head: Callable[[Tensor], Tensor]) -> Tensor:
        return head(hidden)


class SelectingDrafter(Drafter):
    def propose(self, hidden: Tensor, _anchors: Tensor, head: Callable[[Tensor], Tensor], _temperature: float) -> Any:
        return self.compute_logits(hidden, head).argmin(-1), None, None


def generate(drafter: Any, _target: object, _prompt: Tensor, _max_tokens: int, stop_token_ids: list[int]) -> None:
    assert stop_token_ids == [2]
    for anchor, num_rows in ROUNDS:
        positions = torch.arange(anchor - 3, anchor + num_rows)[None]
        hidden = drafter(noise_embedding=torch.zeros(1, num_rows, 4), position_ids=positions)[:, 1:]
        if hasattr(drafter, "propose"):
            drafter.propose(hidden, positions[:, 0], HEAD, 0.0)
        else:
            drafter.compute_logits(hidden, HEAD)


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    root, model = ModuleType("dflash"), ModuleType("dflash.model")
    vars(model)["dflash_generate"] = generate
    vars(root)["model"] = model
    monkeypatch.setitem(sys.modules, "dflash", root)
    monkeypatch.setitem(sys.modules, "dflash.model", model)
    return model


@pytest.mark.parametrize(("kind", "best"), [(Drafter, Tensor.argmax), (SelectingDrafter, Tensor.argmin)])
def test_every_block_is_noted(kind: type[Drafter], best: Callable[[Tensor, int], Tensor], package: ModuleType) -> None:
    drafter = kind()
    with torch.no_grad():
        found = peer_drafts(drafter, None, [1, 2, 3], 9, [2])
        rows = [torch.arange(anchor + 1, anchor + num_rows)[:, None].expand(-1, 4) for anchor, num_rows in ROUNDS]
        expected = [tuple(best(HEAD(states.float()), -1).tolist()) for states in rows]
    assert found == list(zip([anchor for anchor, _ in ROUNDS], expected, strict=True))
    assert not vars(drafter).keys() & {"forward", "compute_logits", "propose"}  # nothing is left on it
    assert not drafter._forward_pre_hooks


def test_the_architecture_string_chooses_the_class(package: ModuleType, tmp_path: Path) -> None:
    class Recording(nn.Module):
        @classmethod
        def from_pretrained(cls, folder: Path, dtype: str) -> Recording:
            assert folder == tmp_path and dtype == "float32"
            return cls()

    vars(package)["DFlash2DraftModel"] = Recording
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["DFlash2DraftModel"]}))
    loaded = load_peer(tmp_path)
    assert isinstance(loaded, Recording) and not loaded.training
