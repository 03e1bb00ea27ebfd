"""Golden configs of every dialect, and folders with a tiny checkpoint that belongs to each."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from paceline.checkpoint.contract import DrafterContract
from paceline.checkpoint.dialects import contract_from_config
from paceline.checkpoint.dialects.tensors import file_name
from paceline.checkpoint.names import drafter_slots

GOLDEN_FOLDER = Path(__file__).parents[3] / "data" / "dialects"
GOLDEN_NAMES = sorted(path.stem for path in GOLDEN_FOLDER.glob("*.json"))
# what the weights of a golden config bring along: (embedding, head)
OWN_TABLES: Mapping[str, tuple[bool, bool]] = {
    "speculators-dflash": (False, True),
    "speculators-dspark": (False, True),
    "speculators-eagle3": (True, True),
    "specforge-eagle3": (False, True),
    "torchspec-dflash": (True, False),
    "deepspec-dspark": (True, True),
    "deepspec-dflash": (True, True),
    "deepspec-eagle3": (True, True),
    "kimi-dspark": (True, False),
    "zlab-dflash2-latent": (True, False),  # a copy of the target's
    "native-dspark": (True, True),
    "native-eagle3": (True, True),
    "zlab-dflash-sinks": (True, True),
}
RENAMINGS = {"torchspec": "torchspec", "kimi": "kimi", "assistant": "assistant"}


def load_golden(name: str) -> dict[str, Any]:
    """A config as its ecosystem writes it."""
    config: dict[str, Any] = json.loads((GOLDEN_FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return config


def stored_name(golden: str, canonical: str) -> str:
    """The name that the ecosystem of a golden config stores a tensor under."""
    renaming = "midlayer" if golden == "specforge-eagle3" else RENAMINGS.get(golden.split("-")[0], "")
    return file_name(canonical, renaming)


def full_contract(name: str, config: Mapping[str, Any] | None = None) -> DrafterContract:
    """The contract of a golden config with the tables that its weights bring along."""
    plain = {key: value for key, value in (config or load_golden(name)).items() if key != "has_own_lm_head"}
    embedding, head = OWN_TABLES.get(name, (False, False))
    contract = contract_from_config(plain, "c")
    return dataclasses.replace(contract, has_own_embedding=embedding, has_own_head=head)


def tiny_tensors(name: str) -> dict[str, Tensor]:
    """Random weights of a golden config, under the names of its ecosystem, with the tables that it stores."""
    contract = full_contract(name)
    generator = torch.Generator().manual_seed(0)
    tensors = {
        stored_name(name, slot.name): torch.randn(slot.shape, generator=generator) for slot in drafter_slots(contract)
    }
    if contract.has_own_embedding and contract.has_own_head and load_golden(name).get("tie_word_embeddings"):
        tensors["lm_head.weight"] = tensors["embed_tokens.weight"].clone()  # both are the target's, which ties them
    if contract.has_vocabulary_map:
        chosen = (
            torch.randperm(contract.target_vocab_size, generator=generator)[: contract.draft_vocab_size].sort().values
        )
        tensors["d2t"] = chosen - torch.arange(contract.draft_vocab_size)
        tensors["t2d"] = torch.zeros(contract.target_vocab_size, dtype=torch.bool).index_fill_(0, chosen, True)
    return tensors


def write_folder(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Path:
    """A drafter folder."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(dict(tensors), folder / "model.safetensors")
    return folder


@pytest.fixture
def golden_folder(tmp_path: Path) -> Callable[..., Path]:
    """A folder for a golden config; keyword arguments replace parts of it."""

    def write(
        name: str, *, config: Mapping[str, Any] | None = None, tensors: Mapping[str, Tensor] | None = None
    ) -> Path:
        content = load_golden(name) if config is None else config
        return write_folder(tmp_path / name, content, tiny_tensors(name) if tensors is None else tensors)

    return write


def leaves(config: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Paths of all keys whose value is no object."""
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, (*path, key))
        else:
            yield (*path, key)


def with_change(
    config: Mapping[str, Any], path: tuple[str, ...], change: Callable[[Any], Any] | None
) -> dict[str, Any]:
    """A copy with one key changed, or without it."""
    changed: dict[str, Any] = copy.deepcopy(dict(config))
    place = changed
    for key in path[:-1]:
        place = place[key]
    if change is None:
        del place[path[-1]]
    else:
        place[path[-1]] = change(place[path[-1]])
    return changed
