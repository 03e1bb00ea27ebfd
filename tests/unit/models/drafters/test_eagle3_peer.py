"""EAGLE-3 against logits that a public implementation computed, from folders that it wrote itself.

`tests/data/make_eagle3_peer.py` (package `speculators` 0.9.0) says how they were made: at every place of a text, drafts
one by one, each behind the text's own tokens.
"""

from __future__ import annotations

import dataclasses
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.fakes import Lending
from tests.tiny import tiny_target_contract
from tests.unit.models.drafters.test_eagle3 import Windows
from torch import Tensor

from paceline.checkpoint.compatibility import complete_contract
from paceline.checkpoint.dialects import read_drafter
from paceline.checkpoint.names import drafter_destinations
from paceline.checkpoint.weights import load_strict
from paceline.models.drafters.eagle3 import Eagle3Drafter

VARIANTS = ("llama", "qwen3_all_switches", "qwen3_tap_norms")
WIDTH, VOCAB_SIZE, DEPTH, NUM_STEPS = 16, 40, 7, 3
EXACT = 1e-4  # of logits near 10; positions are one apart in the two, which rotates alike and rounds differently


@cache
def vectors() -> dict[str, Tensor]:
    return load_file(Path(__file__).parents[3] / "data" / "eagle3_peer.safetensors")


def load(name: str, folder: Path, **changes: Any) -> Eagle3Drafter:
    """The peer's own folder through our reader; `changes` replace fields of the contract or of its switches."""
    prefix = f"{name}.weights."
    (folder / "config.json").write_bytes(bytes(vectors()[f"{name}.config"].tolist()))
    tensors = {key.removeprefix(prefix): value for key, value in vectors().items() if key.startswith(prefix)}
    save_file(tensors, folder / "model.safetensors")
    files = read_drafter(folder)
    assert files.dialect == "speculators" and files.contract.target_layer_ids == (1, 2, 4)
    target = tiny_target_contract(num_layers=DEPTH, vocab_size=VOCAB_SIZE, hidden_size=WIDTH)
    contract = complete_contract(files.contract, target)
    assert contract.eagle3 is not None and contract.has_own_head and contract.has_own_embedding
    switches = {key: changes.pop(key) for key in list(changes) if hasattr(contract.eagle3, key)}
    contract = dataclasses.replace(contract, eagle3=dataclasses.replace(contract.eagle3, **switches), **changes)
    drafter = Eagle3Drafter(contract)
    load_strict(drafter.checkpoint_parameters(), files.source, drafter_destinations(contract), ignored=files.ignored)
    return drafter.eval()


@torch.no_grad()
def differences(name: str, drafter: Eagle3Drafter, *, beside: int = 0) -> list[float]:
    """Largest difference of logits at each step; `beside` moves the token that a row reads."""
    taps, following = vectors()[f"{name}.taps"], vectors()[f"{name}.following"].roll(beside)
    expected, lender = vectors()[f"{name}.logits"], Lending(torch.zeros(1, 1), torch.zeros(1, 1))
    attend, worst = Windows(drafter.contract.layer_windows), [0.0] * NUM_STEPS
    features = drafter.features(list(taps.split(WIDTH, dim=-1)))
    for place in range(len(following) - NUM_STEPS + 1):
        hidden = features[None, : place + 1]
        for step in range(NUM_STEPS):
            ids = following[None, : place + step + 1]
            positions = torch.arange(ids.shape[1])[None]
            out, recycled = drafter(drafter.embed(ids, lender), hidden, positions, attend)
            found = drafter.logits(out[0, -1], lender)
            worst[step] = max(worst[step], float((found - expected[step, place]).abs().max()))
            hidden = torch.cat((hidden, recycled[:, -1:]), dim=1)
    return worst


@pytest.mark.parametrize("name", VARIANTS)
def test_every_step_agrees_with_the_public_implementation(name: str, tmp_path: Path) -> None:
    worst = differences(name, load(name, tmp_path))
    assert max(worst) < EXACT, worst


@pytest.mark.parametrize(
    ("name", "changes", "is_right_at_first"),
    [
        ("llama", {"norm_before_residual": True}, False),
        ("llama", {"norm_output": True}, True),
        ("llama", {"is_neox_style": False}, False),
        ("llama", {"rms_norm_eps": 1e-2}, False),
        ("qwen3_all_switches", {"norm_output": False}, True),
        ("qwen3_all_switches", {"norm_before_residual": False}, False),
        ("qwen3_tap_norms", {"layer_windows": (3, 3)}, False),
    ],
)
def test_a_switch_read_wrongly_shows_from_its_first_step_on(
    name: str, changes: dict[str, Any], is_right_at_first: bool, tmp_path: Path
) -> None:
    worst = differences(name, load(name, tmp_path, **changes))
    assert (worst[0] < EXACT) is is_right_at_first and min(worst[1:]) > 1e-2, worst


def test_the_token_beside_a_row_is_the_next_one(tmp_path: Path) -> None:
    assert min(differences("llama", load("llama", tmp_path), beside=1)) > 1e-2
