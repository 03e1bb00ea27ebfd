"""The DFlash2 drafter: its tensors, what it shares with DFlash, exact walks, training equal to serving, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from scipy.stats import chisquare
from tests.fakes import Lending
from tests.unit.models.conftest import CachedContext, drafter_contract, randomise, tiny_drafter
from tests.unit.ops.test_candidate_walk import EXAMPLE, GREEDY_IS_NOT_VITERBI, PATHS, Walk, max_sum_path
from torch import Tensor

import paceline.models.drafters.dflash2 as dflash2_module
from paceline.checkpoint.contract import (
    ConvolutionSettings,
    DrafterContract,
    LatentAttentionSettings,
    SelectorSettings,
)
from paceline.checkpoint.names import drafter_destinations, drafter_slots
from paceline.checkpoint.weights import load_strict, open_safetensors
from paceline.errors import CheckpointError
from paceline.models.drafters.dflash import DFlashDrafter
from paceline.models.drafters.dflash2 import DFlash2Drafter
from paceline.models.drafters.proposal import DraftSampling, Proposal
from paceline.models.drafters.table import BLOCK_DRAFTERS
from paceline.training.anchors import make_blocks
from paceline.training.objective import draft_blocks

LATENT = LatentAttentionSettings(
    q_lora_rank=12, kv_lora_rank=16, qk_nope_head_size=8, qk_rope_head_size=4, v_head_size=6
)


def dflash2_contract(**changes: Any) -> DrafterContract:
    defaults: dict[str, Any] = {
        "family": "dflash2",
        "convolution": ConvolutionSettings(num_taps=2, group_size=6),
        "selector": SelectorSettings(rank=5, top_k=4),
    }
    return drafter_contract(**(defaults | changes))


def dflash2(seed: int = 1, **changes: Any) -> DFlash2Drafter:
    drafter = DFlash2Drafter(dflash2_contract(**changes))
    randomise(drafter, seed)
    return drafter.requires_grad_(False).eval()


def sampling_of(count: int, temperature: float | list[float] = 1.0, *, method: str = "probabilistic") -> DraftSampling:
    zeros = torch.zeros(count, dtype=torch.long)
    temperatures = temperature if isinstance(temperature, list) else [temperature] * count
    seeds = torch.arange(count) * 7919 + 13
    return DraftSampling(method, torch.tensor(temperatures), seeds, zeros + 30, zeros)


# --- tensors ---


@pytest.mark.parametrize("changes", [{}, {"latent": LATENT, "is_neox_style": False}], ids=["plain", "latent"])
def test_a_file_of_exactly_the_named_tensors_fills_it(tmp_path: Path, changes: dict[str, Any]) -> None:
    contract = dflash2_contract(**changes)
    tensors = {slot.name: torch.randn(slot.shape) for slot in drafter_slots(contract)}
    assert {name for name in tensors if "selector" in name or "layers.0.mlp_conv" in name} == {
        "candidate_selector.predecessor_codebook",
        "candidate_selector.successor_codebook",
        "candidate_selector.hidden_projection.weight",
        "layers.0.mlp_conv.base_kernel",
        "layers.0.mlp_conv.kernel_projection.weight",
    }
    drafter = DFlash2Drafter(contract).requires_grad_(False)
    save_file(tensors, tmp_path / "model.safetensors")
    load_strict(drafter.checkpoint_parameters(), open_safetensors(tmp_path), drafter_destinations(contract))
    filled = drafter.checkpoint_parameters()
    for name in tensors:
        if "_conv." in name or "selector" in name:
            assert torch.equal(filled[name], tensors[name])
    # P21, P23: neither a missing codebook nor a plain DFlash file goes unnoticed, nor a DFlash2 file in a DFlash.
    del tensors["candidate_selector.successor_codebook"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"missing tensors.*successor_codebook"):
        load_strict(drafter.checkpoint_parameters(), open_safetensors(tmp_path), drafter_destinations(contract))
    if not changes:
        plain = DFlashDrafter(drafter_contract()).requires_grad_(False)
        with pytest.raises(CheckpointError, match="unused tensors"):
            load_strict(plain.checkpoint_parameters(), open_safetensors(tmp_path), drafter_destinations(plain.contract))


def test_it_is_registered() -> None:
    assert BLOCK_DRAFTERS["dflash2"] is DFlash2Drafter


# --- what it shares with DFlash ---


def identity_pair(dtype: torch.dtype = torch.float32) -> tuple[DFlashDrafter, DFlash2Drafter]:
    """A DFlash, and a DFlash2 of the same weights whose own parts do nothing."""
    plain, drafter = tiny_drafter().requires_grad_(False), dflash2()
    drafter.load_state_dict(plain.state_dict(), strict=False)
    for name, parameter in drafter.named_parameters():
        if "_conv." in name or "codebook" in name:
            parameter.zero_()
        if "base_kernel" in name:
            parameter[:, 0] = 1.0
    for model in (plain, drafter):
        model.to(dtype)
        model.backbone.position_table = model.backbone.position_table.float()
    return plain, drafter


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_with_identity_convolutions_and_zero_codebooks_it_is_dflash_bit_for_bit(dtype: torch.dtype) -> None:
    plain, drafter = identity_pair(dtype)
    target = Lending(torch.randn(61, 24).to(dtype), torch.randn(61, 24).to(dtype))
    taps = [torch.randn(9, 24).to(dtype) for _ in range(2)]
    anchors = torch.tensor([7])
    proposals = []
    for model in (plain, drafter):
        context = CachedContext(model)
        context.extend(taps)
        hidden = context.draft(model.embed(model.block_ids(anchors, 3), target)[0])
        predicted = model.predicted_rows(hidden)[None]
        logits = model.logits(predicted, target)
        proposals.append((hidden, model.propose(predicted, logits, anchors, sampling_of(1, method="greedy")).ids_BK))
    assert torch.equal(proposals[0][0], proposals[1][0])
    assert torch.equal(proposals[0][1], proposals[1][1])
    # The comparison can tell: a single coefficient of the second tap makes another drafter.
    drafter.backbone.layers[0].attention_conv.base_kernel[0, 1, 0] = 0.5
    context = CachedContext(drafter)
    context.extend(taps)
    assert not torch.equal(context.draft(drafter.embed(drafter.block_ids(anchors, 3), target)[0]), proposals[0][0])


@torch.no_grad()
def test_equal_logits_go_to_the_lowest_id_as_in_dflash() -> None:
    plain, drafter = identity_pair()
    logits = torch.zeros(2, 3, 61)
    logits[:, :, [40, 9, 23]] = 1.0
    hidden, anchors = torch.randn(2, 3, 24), torch.tensor([0, 1])
    for sampling in (sampling_of(2, method="greedy"), sampling_of(2, 0.0)):
        for model in (plain, drafter):
            assert model.propose(hidden, logits, anchors, sampling).ids_BK.tolist() == [[9] * 3] * 2


# --- the walk ---


@torch.no_grad()
def drafter_of(walk: Walk) -> tuple[DFlash2Drafter, Tensor, Tensor]:
    """A drafter with a walk's codebooks, and hidden rows and logits that give its projections and candidates."""
    V, R = walk.predecessor.shape
    C = walk.unary.shape[-1]
    sizes = {"target_vocab_size": V, "vocab_size": V, "draft_vocab_size": V, "mask_token_id": V - 1}
    drafter = dflash2(selector=SelectorSettings(rank=R, top_k=C), **sizes)
    selector = drafter.candidate_selector
    selector.predecessor_codebook.copy_(walk.predecessor)
    selector.successor_codebook.copy_(walk.successor)
    selector.hidden_projection.weight.zero_()[:, :R] = torch.eye(R)
    hidden = torch.nn.functional.pad(walk.projected, (0, 24 - R))
    logits = torch.full((*walk.unary.shape[:2], V), -30.0).scatter(-1, walk.candidates, walk.unary)
    return drafter, hidden, logits


def propose(walk: Walk, sampling: DraftSampling) -> Proposal:
    drafter, hidden, logits = drafter_of(walk)
    return drafter.propose(hidden, logits, walk.anchors, sampling)


def test_the_worked_walks() -> None:
    greedy = sampling_of(1, method="greedy")
    assert propose(EXAMPLE, greedy).ids_BK.tolist() == [[2, 3]]
    assert propose(GREEDY_IS_NOT_VITERBI, greedy).ids_BK.tolist() == [[1, 0]]


def viterbi(*arguments: Tensor, **options: Tensor | None) -> tuple[Tensor, Tensor]:
    return torch.tensor([max_sum_path(Walk(*arguments))]), arguments[0].float()


def unary_argmax(unary: Tensor, candidates: Tensor, *rest: Tensor, **options: Tensor | None) -> tuple[Tensor, Tensor]:
    return candidates.gather(-1, unary.argmax(-1, keepdim=True)).squeeze(-1), unary.float()


def all_after_the_best(unary: Tensor, candidates: Tensor, *rest: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """Every position scored at once, as if each position before it had taken its own best logit."""
    projected, predecessor, successor, anchors = rest
    best, _ = unary_argmax(unary, candidates)
    before = torch.cat((anchors[:, None], best[:, :-1]), dim=1)
    scores = unary + (successor[candidates] * (predecessor[before] * projected)[:, :, None]).sum(-1)
    return candidates.gather(-1, scores.argmax(-1, keepdim=True)).squeeze(-1), scores


@pytest.mark.parametrize("fault", [viterbi, unary_argmax, all_after_the_best])
@torch.no_grad()
def test_other_walks_are_told_apart(fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """P27: on random drafters, each wrong walk proposes something else in a good part of the blocks."""
    rows = []
    for is_broken in (False, True):
        if is_broken:
            monkeypatch.setattr(dflash2_module, "candidate_walk", fault)
        torch.manual_seed(0)
        drafter = dflash2()
        drafter.candidate_selector.successor_codebook.mul_(3)
        found = []
        for anchor in range(40):
            hidden, logits = torch.randn(1, 3, 24), torch.randn(1, 3, 61)
            proposal = drafter.propose(hidden, logits, torch.tensor([anchor]), sampling_of(1, method="greedy"))
            found.append(proposal.ids_BK[0].tolist())
        rows.append(found)
    assert sum(a != b for a, b in zip(*rows, strict=True)) >= 5


def test_sampled_blocks_have_the_exact_probabilities_of_the_worked_example() -> None:
    count = 40_000
    ids, candidates, log_q, _ = propose(EXAMPLE.repeated(count), sampling_of(count))
    assert candidates is not None and log_q is not None
    counts = [int(((ids[:, 0] == a) & (ids[:, 1] == b)).sum()) for a, b in PATHS]
    total = sum(PATHS.values())
    assert sum(counts) == count
    assert chisquare(counts, [p * count / total for p in PATHS.values()]).pvalue > 1e-3
    # What is reported is what was drawn from: q of position 1 depends on the token at position 0.
    for first, q_3 in ((2, 0.869892), (5, 0.475021)):
        after = (ids[:, 0] == first).nonzero()[0, 0]
        assert float(log_q[after, 1][candidates[after, 1] == 3].exp()) == pytest.approx(q_3, abs=1e-5)
    drawn = log_q.gather(-1, (candidates == ids[..., None]).long().argmax(-1, keepdim=True)).sum((1, 2)).exp()
    for path, probability in PATHS.items():
        on_path = (ids == torch.tensor(path)).all(-1)
        assert float(drawn[on_path][0]) == pytest.approx(probability, abs=1e-5)


def test_temperature_divides_whole_rows() -> None:
    log_q = propose(EXAMPLE, sampling_of(1, 0.5)).log_q_BKC
    assert log_q is not None
    torch.testing.assert_close(log_q[0, 0].exp(), torch.tensor([0.937027, 0.062973]), rtol=0, atol=1e-5)


@torch.no_grad()
def test_proposals_are_normalised_over_top_k_candidates_and_hold_the_draw() -> None:
    drafter = dflash2()
    hidden, logits, anchors = torch.randn(6, 3, 24), torch.randn(6, 3, 61) * 3, torch.arange(6)
    ids, candidates, log_q, _ = drafter.propose(hidden, logits, anchors, sampling_of(6, [0.0, 0.7] * 3))
    assert candidates is not None and log_q is not None
    assert candidates.shape == log_q.shape == (6, 3, drafter.num_candidates) == (6, 3, 4)
    assert log_q.dtype == torch.float32
    torch.testing.assert_close(log_q.exp().sum(-1), torch.ones(6, 3))
    assert (candidates == ids[..., None]).any(-1).all()
    best = logits.topk(4).indices
    assert torch.equal(candidates.sort(-1).values, best.sort(-1).values)
    greedy = drafter.propose(hidden, logits, anchors, sampling_of(6, method="greedy"))
    assert greedy.candidate_ids_BKC is None and greedy.log_q_BKC is None
    assert torch.equal(greedy.ids_BK[::2], ids[::2]), "temperature 0 is greedy"


@torch.no_grad()
def test_a_request_drafts_the_same_alone_and_in_company() -> None:
    drafter = dflash2()
    drafter.prepare_for_serving("row_invariant")
    hidden, logits, anchors = torch.randn(5, 3, 24), torch.randn(5, 3, 61), torch.arange(5)
    together = drafter.propose(hidden, logits, anchors, sampling_of(5, 0.8))
    keys = ("temperature_B", "seed_B", "position_B", "step_B")
    for b in range(5):
        one = slice(b, b + 1)
        sampling = DraftSampling("probabilistic", *(getattr(sampling_of(5, 0.8), name)[one] for name in keys))
        alone = drafter.propose(hidden[one], logits[one], anchors[one], sampling)
        for mine, theirs in zip(alone[:3], together[:3], strict=True):
            assert mine is not None and theirs is not None and torch.equal(mine, theirs[one])


# --- logit transforms ---


@torch.no_grad()
def test_the_selector_reads_logits_after_the_multiplier_and_then_the_soft_cap() -> None:
    """Spec 8.4, P26. Capped last, both candidates are nearly equal, and the pair scores decide."""
    drafter = dflash2(output_multiplier=2.0, final_logit_softcapping=5.0)
    assert float(drafter.vocabulary.transform(torch.tensor(10.0))) == pytest.approx(4.996646, abs=1e-6)
    seen = []
    original = drafter.candidate_selector.walk

    def watch(hidden: Tensor, unary: Tensor, *rest: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        seen.append(unary)
        return original(hidden, unary, *rest, **options)

    drafter.candidate_selector.walk = watch
    target = Lending(torch.randn(61, 24), torch.randn(61, 24))
    hidden = torch.randn(1, 3, 24)
    raw = target.logits(hidden)
    drafter.propose(hidden, drafter.logits(hidden, target), torch.tensor([3]), sampling_of(1, method="greedy"))
    expected = (5 * torch.tanh(2 * raw / 5)).topk(4).values
    torch.testing.assert_close(seen[0], expected)
    assert (2 * 5 * torch.tanh(raw / 5)).topk(4).values.sub(expected).abs().max() > 0.5, "the other order"


# --- blocks ---


@pytest.mark.parametrize("causal", [True, False])
@torch.no_grad()
def test_training_drafts_what_serving_drafts(causal: bool) -> None:
    """Many blocks to a row in training, one in serving: the convolution must know where each block starts."""
    drafter = dflash2(layer_causal=(causal, causal), convolution=ConvolutionSettings(num_taps=3, group_size=6))
    taps = [torch.randn(2, 20, 24) for _ in range(2)]
    tokens, table = torch.randint(0, 60, (2, 20)), torch.randn(61, 24)
    anchors = torch.tensor([[5, 7, 12], [6, 9, 15]])
    valid = torch.ones_like(anchors, dtype=torch.bool)
    blocks = make_blocks(tokens, torch.ones(2, 20, dtype=torch.bool), anchors, valid, 4)
    rows = drafter.embed(drafter.block_ids(tokens.gather(1, anchors), 3), Lending(table, table))
    trained = draft_blocks(drafter, taps, rows, blocks)
    for row in range(2):
        for block, anchor in enumerate(anchors[row].tolist()):
            context = CachedContext(drafter)
            context.extend([tap[row, :anchor] for tap in taps])
            torch.testing.assert_close(trained[row, block], context.draft(rows[row, block]), rtol=1e-4, atol=1e-4)
            # B81, section 4.7: causal rows of a shorter block are the same rows.
            if causal:
                short = context.draft(rows[row, block, :3])
                torch.testing.assert_close(short, trained[row, block, :3], rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_latent_attention_drafts_too() -> None:
    drafter = dflash2(latent=LATENT, is_neox_style=False)
    drafter.prepare_for_serving("plain")
    features = drafter.backbone.context_features([torch.randn(5, 24) for _ in range(2)])
    rows, _ = drafter.backbone.context_kv(features, torch.arange(5))[0]
    assert rows.shape == (5, 1, LATENT.latent_size)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layout": "anchor_sampling"}, "layout 'anchor_sampling'"),
        ({"draft_vocab_size": 40}, "40 of 61 token ids"),
        ({"convolution": None}, "no convolution"),
        ({"selector": None}, "no candidate selector"),
        ({"convolution": ConvolutionSettings(num_taps=2, group_size=7)}, "groups of 7 channels"),
        ({"selector": SelectorSettings(rank=4, top_k=33)}, "33 candidates per position; at most 32"),
    ],
)
def test_what_it_cannot_draft_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        DFlash2Drafter(dflash2_contract(**changes))
