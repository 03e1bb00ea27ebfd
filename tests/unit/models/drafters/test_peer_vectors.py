"""DFlash2 and the Hugging Face assistant against states and proposals that their public implementations computed.

`tests/data/make_dflash2_peer.py` (package `dflash` 0.1.0) and `tests/data/make_assistant_peer.py` (transformers 5.24)
say how the vectors were made; docs/peers.md says where the peers deviate.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.fakes import Lending
from tests.unit.models.conftest import CachedContext, drafter_contract
from torch import Tensor

from paceline.checkpoint.contract import ConvolutionSettings, DrafterContract, SelectorSettings, TargetLayerId
from paceline.checkpoint.dialects import file_names
from paceline.checkpoint.names import drafter_destinations
from paceline.checkpoint.sources import RenamedSource
from paceline.checkpoint.weights import load_strict, open_safetensors
from paceline.models.drafters.block_drafter import BlockDrafter
from paceline.models.drafters.dflash2 import DFlash2Drafter
from paceline.models.drafters.proposal import MAX_CANDIDATES, DraftSampling
from paceline.models.drafters.table import BLOCK_DRAFTERS

DATA = Path(__file__).parents[3] / "data"
WIDTH, NUM_DRAFTS, WINDOW, TEMPERATURE = 16, 3, 6, 0.7
SCALED = {"output_multiplier": 0.5, "final_logit_softcapping": 3.0, "input_embedding_scale": 2.0}
DFLASH2: dict[str, dict[str, Any]] = {
    "two_taps": {},
    "three_taps_scaled": {"convolution": ConvolutionSettings(num_taps=3, group_size=4), **SCALED},
    "window_causal": {"layer_windows": (WINDOW, WINDOW), "layer_causal": (True, True)},
}
# `sliding_window` 6 of the assistant is our window of 7: its distance is inclusive
ASSISTANT: dict[str, dict[str, Any]] = {"full": {}, "window": {"layer_windows": (WINDOW + 1, None)}}


def peer_contract(**changes: Any) -> DrafterContract:
    fields: dict[str, Any] = {
        "target_num_layers": 5,
        "target_hidden_size": WIDTH,
        "target_vocab_size": 40,
        "target_layer_ids": (TargetLayerId(1), TargetLayerId(3)),
        "mask_token_id": 39,
        "vocab_size": 40,
        "draft_vocab_size": 40,
        "hidden_size": WIDTH,
        "intermediate_size": 24,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_size": 8,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 64,
    }
    return drafter_contract(**(fields | changes))


def dflash2_contract(**changes: Any) -> DrafterContract:
    parts = {"convolution": ConvolutionSettings(num_taps=2, group_size=4), "selector": SelectorSettings(6, 5)}
    return peer_contract(**{"family": "dflash2", **parts, **changes})


def load(contract: DrafterContract, stored: dict[str, Tensor], prefix: str, dialect: Any, folder: Path) -> BlockDrafter:
    """A drafter from stored tensors, through the strict loader."""
    file = folder / "model.safetensors"
    save_file({name.removeprefix(prefix): t.float() for name, t in stored.items() if name.startswith(prefix)}, file)
    canonical = {file_name: name for name, file_name in file_names(contract, dialect).items()}
    drafter = BLOCK_DRAFTERS[contract.family](contract)
    source = RenamedSource(open_safetensors(folder), canonical)
    load_strict(drafter.checkpoint_parameters(), source, drafter_destinations(contract))
    return drafter.eval()


@torch.no_grad()
def replay(stored: dict[str, Tensor], name: str, drafter: BlockDrafter) -> tuple[float, bool]:
    """Largest difference of final states over a whole generation, and whether all proposals are the same."""
    output_ids, features = stored[f"{name}.output_ids"], stored[f"{name}.features"]
    lender = Lending(stored["embedding"].float(), stored["head"].float())
    zeros = torch.zeros(1, dtype=torch.long)
    greedy = DraftSampling("greedy", torch.zeros(1), zeros, zeros, zeros)
    context = CachedContext(drafter)
    worst, same = 0.0, True
    for index, num_new in enumerate(stored[f"{name}.num_context"].tolist()):
        new = features[context.length : context.length + num_new]
        context.extend([new[:, :WIDTH], new[:, WIDTH:]])
        anchor = output_ids[context.length].reshape(1)
        hidden = context.draft(drafter.embed(drafter.block_ids(anchor, NUM_DRAFTS)[0], lender))
        worst = max(worst, float((hidden - stored[f"{name}.hidden"][index]).abs().max()))
        predicted = drafter.predicted_rows(hidden[None])
        proposal = drafter.propose(predicted, drafter.logits(predicted, lender), anchor, greedy)
        same &= torch.equal(proposal.ids_BK[0], stored[f"{name}.proposals"][index])
    return worst, same


def replay_dflash2(name: str, folder: Path, **fault: Any) -> tuple[float, bool]:
    stored = load_file(DATA / "dflash2_peer.safetensors")
    contract = dflash2_contract(**{**DFLASH2[name], **fault})
    return replay(stored, name, load(contract, stored, f"{name}.drafter.", "zlab", folder))


def replay_assistant(name: str, folder: Path, **fault: Any) -> tuple[float, bool]:
    stored = load_file(DATA / "assistant_peer.safetensors")
    contract = peer_contract(**{**ASSISTANT[name], **fault})
    return replay(stored, name, load(contract, stored, "drafter.", "assistant", folder))


@pytest.mark.parametrize("name", DFLASH2)
def test_dflash2_agrees_with_the_public_implementation(name: str, tmp_path: Path) -> None:
    worst, same = replay_dflash2(name, tmp_path)
    assert worst < 2e-5 and same


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("two_taps", {"layer_causal": (True, True)}),
        ("three_taps_scaled", {"input_embedding_scale": 1.0}),
        ("window_causal", {"layer_causal": (False, False)}),
        ("window_causal", {"layer_windows": (WINDOW + 1, WINDOW + 1)}),
    ],
)
def test_a_wrong_contract_does_not_agree(name: str, fault: dict[str, Any], tmp_path: Path) -> None:
    worst, _ = replay_dflash2(name, tmp_path, **fault)
    assert worst > 1e-3


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("three_taps_scaled", {"output_multiplier": 8.0}),
        ("three_taps_scaled", {"final_logit_softcapping": None, "output_multiplier": 8.0}),
        ("two_taps", {"selector": SelectorSettings(rank=6, top_k=1)}),  # the unary best of each row
    ],
)
def test_the_walk_needs_the_right_scores(name: str, fault: dict[str, Any], tmp_path: Path) -> None:
    worst, same = replay_dflash2(name, tmp_path, **fault)
    assert worst < 2e-5 and not same  # the states are the same, what is made of them is not


@pytest.mark.parametrize(("name", "is_causal"), [("two_taps", False), ("window_causal", True)])
@torch.no_grad()
def test_a_shorter_block_is_another_input_unless_rows_are_causal(name: str, is_causal: bool, tmp_path: Path) -> None:
    """At the end of a budget the peer cuts its blocks; we draft whole ones and drop what is over."""
    stored = load_file(DATA / "dflash2_peer.safetensors")
    drafter = load(dflash2_contract(**DFLASH2[name]), stored, f"{name}.drafter.", "zlab", tmp_path)
    features = torch.cat((stored[f"{name}.features"], stored[f"{name}.short.features"]))
    expected = stored[f"{name}.short.hidden"]
    context = CachedContext(drafter)
    context.extend([features[:, :WIDTH], features[:, WIDTH:]])
    anchor = stored[f"{name}.output_ids"][context.length]
    lender = Lending(stored["embedding"].float(), stored["head"].float())
    num_short = expected.shape[0] - 1
    short, whole = (
        context.draft(drafter.embed(drafter.block_ids(anchor, count), lender)) for count in (num_short, NUM_DRAFTS)
    )
    assert 1 <= num_short < NUM_DRAFTS
    assert float((short - expected).abs().max()) < 2e-5
    difference = float((whole[: num_short + 1] - expected).abs().max())
    assert difference < 2e-5 if is_causal else difference > 1e-3


def stored_distributions() -> dict[str, Tensor]:
    stored = load_file(DATA / "dflash2_peer.safetensors")
    return {name.removeprefix("q."): tensor for name, tensor in stored.items() if name.startswith("q.")}


@torch.no_grad()
def test_the_selector_draws_from_the_same_rows(tmp_path: Path) -> None:
    q = stored_distributions()
    contract = dflash2_contract()
    stored = load_file(DATA / "dflash2_peer.safetensors")
    drafter = load(contract, stored, "two_taps.drafter.", "zlab", tmp_path)
    assert isinstance(drafter, DFlash2Drafter)
    candidates_BKC = q["selector.candidates"][None]
    is_taken_BKC = candidates_BKC == q["selector.path"][None, :, None]
    ids_BK, scores_BKC = drafter.candidate_selector.walk(
        q["selector.hidden"][None],
        q["selector.logits"][None].gather(-1, candidates_BKC),
        candidates_BKC,
        q["selector.anchor"],
        temperature_B=torch.tensor([TEMPERATURE]),
        gumbel_BKC=torch.where(is_taken_BKC, 1e6, 0.0),  # noise that takes the peer's path
    )
    assert torch.equal(ids_BK[0], q["selector.path"])
    torch.testing.assert_close((scores_BKC[0] / TEMPERATURE).softmax(-1), q["selector.q"], rtol=1e-4, atol=1e-6)


@torch.no_grad()
def test_our_q_of_dflash_is_cut_to_the_best_candidates_and_to_nothing_else() -> None:
    """The peer's q is the whole softmax, cut by the request's top-k and top-p; any exact q leaves the text alone."""
    q = stored_distributions()
    vocab_size = q["dflash.logits"].shape[-1]
    drafter = BLOCK_DRAFTERS["dflash"](peer_contract(vocab_size=vocab_size, draft_vocab_size=vocab_size))
    ones = torch.ones(1, dtype=torch.long)
    sampling = DraftSampling("probabilistic", torch.tensor([TEMPERATURE]), ones, ones, ones)
    proposal = drafter.propose(torch.zeros(1, 2, WIDTH), q["dflash.logits"][None], ones, sampling)
    assert proposal.candidate_ids_BKC is not None and proposal.log_q_BKC is not None
    assert proposal.candidate_ids_BKC.shape[-1] == MAX_CANDIDATES < vocab_size
    ours = proposal.log_q_BKC[0].exp()
    theirs = q["dflash.q"].gather(-1, proposal.candidate_ids_BKC[0])
    assert bool((theirs.sum(-1) < 0.98).all()) and bool((theirs.sum(-1) > 0.8).all())
    torch.testing.assert_close(ours, theirs / theirs.sum(-1, keepdim=True), rtol=1e-4, atol=1e-6)
    cut = q["dflash.q_cut"].gather(-1, proposal.candidate_ids_BKC[0])
    assert bool(((cut > 0).sum(-1) <= 10).all()) and float((ours - cut).abs().max()) > 0.01


@pytest.mark.parametrize("name", ASSISTANT)
def test_dflash_agrees_with_assisted_generation(name: str, tmp_path: Path) -> None:
    worst, same = replay_assistant(name, tmp_path)
    assert worst < 2e-5 and same


@pytest.mark.parametrize("window", [WINDOW, WINDOW + 2])
def test_the_assistants_window_is_one_token_wider_than_its_number(window: int, tmp_path: Path) -> None:
    worst, _ = replay_assistant("window", tmp_path, layer_windows=(window, None))
    assert worst > 1e-3
