"""DSpark against rows, heads and walks that a public implementation computed, from folders that it wrote itself.

`tests/data/make_dspark_peer.py` (package `speculators` 0.9.0, which trains such drafters) says how they were made.
Report B09 is of a server whose DSpark had drifted from its authors' code, which verification hides.
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
from tests.unit.models.conftest import CachedContext
from torch import Tensor

from paceline.checkpoint.compatibility import complete_contract
from paceline.checkpoint.contract import DrafterContract
from paceline.checkpoint.dialects import read_drafter
from paceline.checkpoint.names import drafter_destinations
from paceline.checkpoint.weights import load_strict
from paceline.models.drafters.dspark import DSparkDrafter
from paceline.models.drafters.proposal import DraftSampling

VARIANTS = ("vanilla", "gated", "rnn", "fill_in", "rank_0")
EXACT = 2e-5
WIDTH, BLOCK_SIZE, VOCAB_SIZE, DEPTH = 16, 4, 40, 6


@cache
def vectors() -> dict[str, Tensor]:
    return load_file(Path(__file__).parents[3] / "data" / "dspark_peer.safetensors")


def stored(name: str, key: str) -> Tensor:
    return vectors()[f"{name}.{key}"]


def load(name: str, folder: Path, **changes: Any) -> DSparkDrafter:
    """The peer's own folder through our reader; `changes` replace fields of the contract."""
    prefix = f"{name}.weights."
    (folder / "config.json").write_bytes(bytes(stored(name, "config").tolist()))
    tensors = {key.removeprefix(prefix): value for key, value in vectors().items() if key.startswith(prefix)}
    save_file(tensors, folder / "model.safetensors")
    files = read_drafter(folder)
    assert files.dialect == "speculators" and files.contract.target_layer_ids == (1, 3)
    target = tiny_target_contract(num_layers=DEPTH, vocab_size=VOCAB_SIZE, hidden_size=WIDTH)
    contract: DrafterContract = dataclasses.replace(complete_contract(files.contract, target), **changes)
    drafter = DSparkDrafter(contract)
    load_strict(drafter.checkpoint_parameters(), files.source, drafter_destinations(contract), ignored=files.ignored)
    return drafter.eval()


@torch.no_grad()
def differences(name: str, drafter: DSparkDrafter) -> dict[str, float]:
    """How far rows, base logits, heads and proposals are from the peer's, at the worst anchor."""
    lender = Lending(stored(name, "embedding"), stored(name, "head"))
    worst = dict.fromkeys(("hidden", "logits", "bias", "confidence", "proposals"), 0.0)
    first = drafter.contract.first_predicted_row
    for index, anchor in enumerate(stored(name, "anchors").tolist()):
        context = CachedContext(drafter)  # type: ignore[arg-type]
        context.extend(list(stored(name, "taps")[:anchor].split(WIDTH, dim=-1)))
        token = stored(name, "ids")[anchor].reshape(1)
        rows = BLOCK_SIZE - 1 if first else BLOCK_SIZE
        hidden = context.draft(drafter.embed(drafter.block_ids(token, rows)[0], lender))
        expected = stored(name, "hidden")[index]
        predicted = drafter.predicted_rows(hidden[None])
        logits = drafter.logits(predicted, lender)
        found = {"hidden": (hidden - expected), "logits": logits[0] - stored(name, "logits")[index][first:]}
        previous = stored(name, "previous")[index][first:]
        if drafter.markov_head is not None:
            state, biases = None, []
            for row, token_before in zip(predicted[0], previous, strict=True):
                bias, state = drafter.markov_head.bias(token_before[None], row[None], state)
                biases.append(bias[0])
            peers = stored(name, "bias")[index][first:]
            found["bias"] = torch.stack(biases) - peers
        if drafter.confidence_head is not None:
            head = drafter.markov_head
            reads = drafter.confidence_head.reads_markov and head is not None
            confidence = drafter.confidence_head(predicted, head.markov_w1(previous)[None] if reads and head else None)
            found["confidence"] = confidence[0] - stored(name, "confidence")[index][first:]
        zeros = torch.zeros(1, dtype=torch.long)
        greedy = DraftSampling("greedy", torch.zeros(1), zeros, zeros, zeros)
        proposal = drafter.propose(predicted, logits, token, greedy)
        found["proposals"] = (proposal.ids_BK[0] != stored(name, "proposals")[index]).float()
        for key, difference in found.items():
            worst[key] = max(worst[key], float(difference.abs().max()))
    return worst


@pytest.mark.parametrize("name", VARIANTS)
def test_every_head_agrees_with_the_public_implementation(name: str, tmp_path: Path) -> None:
    drafter = load(name, tmp_path)
    kind = {"fill_in": "vanilla", "rank_0": None}.get(name, name)
    assert (drafter.contract.markov.kind if drafter.contract.markov else None) == kind
    found = differences(name, drafter)
    assert max(found.values()) < EXACT, found


def test_the_heads_matter_in_these_vectors() -> None:
    """Walks differ from the unary best, or the comparison of proposals would say little."""
    for name in ("vanilla", "gated", "rnn", "fill_in"):
        first = 1 if name == "fill_in" else 0
        assert (stored(name, "logits")[:, first:].argmax(-1) != stored(name, "proposals")).any(), name
    assert torch.equal(stored("rank_0", "logits").argmax(-1), stored("rank_0", "proposals"))


@pytest.mark.parametrize(
    ("name", "changes", "parts"),
    [
        ("vanilla", {"rms_norm_eps": 1e-2}, {"hidden"}),
        ("vanilla", {"layer_causal": (True, True)}, {"hidden"}),
        ("vanilla", {"is_neox_style": False}, {"hidden"}),
        ("gated", {"layer_windows": (3, 3)}, {"hidden"}),
        ("rnn", {"output_multiplier": 0.5}, {"logits"}),
        ("rank_0", {"mask_token_id": 5}, {"hidden"}),
    ],
)
def test_a_small_deviation_shows_where_it_begins(
    name: str, changes: dict[str, Any], parts: set[str], tmp_path: Path
) -> None:
    found = differences(name, load(name, tmp_path, **changes))
    off = {part for part, difference in found.items() if difference > 1e-3}
    assert parts <= off and ("hidden" in off) == ("hidden" in parts), found


@pytest.mark.parametrize("fault", ["state is carried on", "anchor biases every row", "bias of the row's own token"])
def test_faults_of_the_walk_show(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "rnn" if fault == "state is carried on" else "vanilla"
    drafter = load(name, tmp_path)
    head = drafter.markov_head
    assert head is not None
    honest, last, begun = head.bias, [None], [None]

    def bias(previous: Tensor, hidden: Tensor, state: Any = None, ids: Any = None) -> Any:
        if fault == "state is carried on":  # from one block into the next
            found, last[0] = honest(previous, hidden, last[0], ids)
            return found, last[0]
        if fault == "anchor biases every row":
            begun[0] = previous if begun[0] is None else begun[0]
            return honest(begun[0], hidden, state, ids)
        return honest((previous + 1) % VOCAB_SIZE, hidden, state, ids)

    monkeypatch.setattr(head, "bias", bias)
    found = differences(name, drafter)
    assert found["hidden"] < EXACT and found["bias"] > 1e-3, found
