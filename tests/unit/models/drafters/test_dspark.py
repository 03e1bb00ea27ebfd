"""The DSpark drafter: the worked walk, both layouts, exact sampled blocks, and the faults each of these would show."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from tests.fakes import Lending
from tests.unit.models.conftest import CachedContext, drafter_contract, randomise, tiny_drafter
from tests.unit.models.drafters.test_backbone import (
    ANCHOR,
    MASK,
    OUT,
    TAP_A,
    TAP_B,
    hand_made_contract,
    hand_made_drafter,
)
from tests.unit.models.drafters.test_heads import BIAS_AFTER, W1, W2, slow_recurrence
from torch import Tensor

import paceline.models.drafters.dspark as dspark_module
from paceline.checkpoint.contract import (
    ConfidenceSettings,
    DrafterContract,
    DraftSampleMethod,
    LatentAttentionSettings,
    MarkovKind,
    MarkovSettings,
)
from paceline.checkpoint.names import drafter_slots
from paceline.errors import CheckpointError
from paceline.models.drafters.dflash import DFlashDrafter
from paceline.models.drafters.draw import draw_rows
from paceline.models.drafters.dspark import DSparkDrafter
from paceline.models.drafters.heads import kept_by_confidence
from paceline.models.drafters.proposal import DraftSampling, Proposal
from paceline.models.drafters.table import BLOCK_DRAFTERS

LATENT = LatentAttentionSettings(
    q_lora_rank=12, kv_lora_rank=16, qk_nope_head_size=8, qk_rope_head_size=4, v_head_size=6
)


def dspark_contract(*, kind: MarkovKind = "vanilla", rank: int = 6, **changes: Any) -> DrafterContract:
    markov = MarkovSettings(rank, kind) if rank else None
    defaults: dict[str, Any] = {"family": "dspark", "layout": "anchor_sampling", "markov": markov}
    return drafter_contract(**(defaults | changes))


def dspark(seed: int = 1, **changes: Any) -> DSparkDrafter:
    drafter = DSparkDrafter(dspark_contract(**changes))
    randomise(drafter, seed)
    return drafter.requires_grad_(False).eval()


def sampling_of(
    count: int,
    *,
    method: DraftSampleMethod = "greedy",
    temperature: float = 1.0,
    seeds: Tensor | None = None,
    position: int = 30,
) -> DraftSampling:
    zeros = torch.zeros(count, dtype=torch.long)
    seeds = torch.arange(count) * 7919 + 13 if seeds is None else seeds
    return DraftSampling(method, torch.full((count,), temperature), seeds, zeros + position, zeros)


# --- the worked example ---

BASE = torch.tensor([[[0.6, 1.9, 0.0, 0.5], [0.2, 0.1, 0.9, 0.3], [0.0, 0.9, 0.4, 0.6]]])
CORRECTED = [[2.6, 0.9, 3.0, -1.0], [1.2, 1.1, 0.9, 0.3], [0.0, 1.9, -0.6, 1.1]]
HIDDEN = torch.tensor([[[1.0, 2.0], [0.0, 1.0], [2.0, 0.0]]])
ANCHOR_3 = torch.tensor([3])


@torch.no_grad()
def worked_drafter(**changes: Any) -> DSparkDrafter:
    drafter = dspark(
        rank=2, hidden_size=2, num_heads=1, num_kv_heads=1, head_size=2,
        **({"target_vocab_size": 4, "vocab_size": 4, "draft_vocab_size": 4, "mask_token_id": 3} | changes),
    )  # fmt: skip
    assert drafter.markov_head is not None
    drafter.markov_head.markov_w1.weight.copy_(torch.tensor(W1))
    drafter.markov_head.markov_w2.weight.copy_(torch.tensor(W2))
    return drafter


def test_each_row_is_biased_by_the_token_drawn_before_it() -> None:
    proposal = worked_drafter().propose(HIDDEN, BASE, ANCHOR_3, sampling_of(1))
    assert proposal.ids_BK.tolist() == [[2, 0, 1]]
    bias = torch.tensor(BIAS_AFTER)
    corrected = BASE[0] + bias[[3, 2, 0]]
    torch.testing.assert_close(corrected, torch.tensor(CORRECTED))
    # Planted: no bias at all, and the anchor's bias everywhere.
    assert (
        BASE.argmax(-1).tolist()
        == [[1, 2, 1]]
        == worked_rank_0().propose(HIDDEN, BASE, ANCHOR_3, sampling_of(1))[0].tolist()
    )
    assert (BASE + bias[3]).argmax(-1).tolist() == [[2, 2, 2]]


def worked_rank_0() -> DSparkDrafter:
    return dspark(rank=0, target_vocab_size=4, vocab_size=4, draft_vocab_size=4, mask_token_id=3)


def test_only_the_best_base_logits_are_reordered_under_top_k() -> None:
    proposal = worked_drafter(draft_top_k=2).propose(HIDDEN, BASE, ANCHOR_3, sampling_of(1))
    assert proposal.ids_BK.tolist() == [[0, 3, 1]]
    for top_k in (4, 99):  # a set that holds everything changes nothing
        assert worked_drafter(draft_top_k=top_k).propose(HIDDEN, BASE, ANCHOR_3, sampling_of(1)).ids_BK.tolist() == [
            [2, 0, 1]
        ]
    # Planted: top-k of the corrected logits would keep the plain walk's tokens.
    assert torch.tensor(CORRECTED).topk(2).indices[:, 0].tolist() == [2, 0, 1]


def test_under_top_k_every_other_id_has_probability_zero() -> None:
    sampling = sampling_of(500, method="probabilistic")
    proposal = worked_drafter(draft_top_k=2).propose(
        HIDDEN.expand(500, -1, -1), BASE.expand(500, -1, -1), ANCHOR_3.expand(500), sampling
    )
    candidates, log_q = proposal.candidate_ids_BKC, proposal.log_q_BKC
    assert candidates is not None and log_q is not None and candidates.shape == (500, 3, 2)
    assert worked_drafter(draft_top_k=2).num_candidates == 2
    assert (dspark().num_candidates, dspark(draft_top_k=40).num_candidates, worked_drafter().num_candidates) == (
        32,
        32,
        4,
    )
    for k, allowed in enumerate(({0, 1}, {2, 3}, {1, 3})):
        assert set(candidates[:, k].flatten().tolist()) == allowed == set(proposal.ids_BK[:, k].tolist())
    torch.testing.assert_close(log_q.exp().sum(-1), torch.ones(500, 3))


def test_equal_scores_go_to_the_lowest_id_under_top_k() -> None:
    drafter = dspark(draft_top_k=3)
    assert drafter.markov_head is not None
    drafter.markov_head.markov_w2.weight.zero_()
    for tied in itertools.permutations((40, 9, 23)):
        logits = torch.zeros(1, 1, 61)
        logits[0, 0, list(tied)] = torch.tensor([1.0, 1.0, 1.0])
        logits[0, 0, tied[0]] = 1.5  # topk lists it first
        hidden, sampling = torch.randn(1, 1, 24), sampling_of(1)
        assert drafter.propose(hidden, logits, torch.tensor([0]), sampling).ids_BK.tolist() == [[tied[0]]]
        drafter.markov_head.markov_w1.weight[0] = torch.eye(6)[0]
        drafter.markov_head.markov_w2.weight[list(tied[1:]), 0] = 0.5  # the bias makes all three equal
        assert drafter.propose(hidden, logits, torch.tensor([0]), sampling).ids_BK.tolist() == [[9]]
        drafter.markov_head.markov_w2.weight.zero_()


def test_the_worked_confidence_follows_the_walk() -> None:
    drafter = worked_drafter(confidence=ConfidenceSettings(with_markov=True))
    assert drafter.confidence_head is not None and drafter.confidence_head.proj.bias is not None
    drafter.confidence_head.proj.weight.copy_(torch.tensor([[0.5, -0.25, 0.1, 0.2]]))
    drafter.confidence_head.proj.bias.fill_(-0.1)
    confidence = drafter.propose(HIDDEN, BASE, ANCHOR_3, sampling_of(1)).confidence_BK
    assert confidence is not None
    torch.testing.assert_close(confidence, torch.tensor([[0.549834, 0.487503, 0.731059]]), rtol=0, atol=1e-6)
    assert kept_by_confidence(confidence, 0.5).tolist() == [1]
    # What a row itself draws is no part of its confidence, or keeping slots by it would bias the output.
    other_base = BASE.clone()
    other_base[0, 1] = torch.tensor([0.0, 0.0, 0.0, 9.0])
    other = drafter.propose(HIDDEN, other_base, ANCHOR_3, sampling_of(1))
    assert other.ids_BK[0, 1] == 3 and other.confidence_BK is not None
    assert torch.equal(other.confidence_BK[0, :2], confidence[0, :2]) and other.confidence_BK[0, 2] != confidence[0, 2]


def test_confidence_without_markov_reads_hidden_rows_alone() -> None:
    for changes in ({"confidence": ConfidenceSettings(False)}, {"confidence": ConfidenceSettings(True), "rank": 0}):
        drafter = dspark(**changes)
        assert drafter.confidence_head is not None and drafter.confidence_head.proj.weight.shape == (1, 24)
        hidden, logits = torch.randn(2, 4, 24), torch.randn(2, 4, 61)
        one, two = (drafter.propose(hidden, logits, torch.tensor(a), sampling_of(2)) for a in ([5, 6], [7, 8]))
        assert one.confidence_BK is not None and two.confidence_BK is not None
        assert torch.equal(one.confidence_BK, two.confidence_BK)
    assert dspark().propose(hidden, logits, torch.tensor([5, 6]), sampling_of(2)).confidence_BK is None


# --- rows and layouts ---


@pytest.mark.parametrize("layout", ["fill_in", "anchor_sampling"])
@torch.no_grad()
def test_which_rows_are_sampled(layout: str) -> None:
    """The hand-made layer, anchor at 2: fill-in samples row 1 for position 3, the other rows 0 and 1 for 3 and 4."""
    contract = dataclasses.replace(hand_made_contract(causal=False), family="dspark", layout=layout)
    drafter = DSparkDrafter(contract)
    drafter.load_state_dict(hand_made_drafter(causal=False).state_dict())
    first = 1 if layout == "fill_in" else 0
    num_drafts = contract.num_draft_tokens
    assert (num_drafts, drafter.num_rows(num_drafts)) == (2 - first, 2)
    context = CachedContext(drafter)
    context.extend([TAP_A, TAP_B])
    assert drafter.block_ids(torch.tensor([7]), num_drafts).tolist() == [[7, contract.mask_token_id]]
    hidden = drafter.predicted_rows(context.draft(torch.tensor([ANCHOR, MASK]))[None])
    torch.testing.assert_close(hidden[0], torch.tensor(OUT[False][first:]), rtol=0, atol=3e-6)
    # Draft 0 is the token at position 3 in either layout, so its noise is keyed by the anchor's position, 2.
    logits = torch.zeros(1, num_drafts, 61)
    sampling = sampling_of(1, method="probabilistic", position=context.length)
    drawn = drafter.propose(hidden, logits, torch.tensor([7]), sampling).ids_BK
    candidates = torch.arange(61).expand(1, num_drafts, 61)
    assert torch.equal(drawn[:, 0], draw_rows(logits[:, :1], sampling, drafter.vocabulary).ids_BK[:, 0])
    assert sampling.gumbel(candidates).shape == (1, num_drafts, 61)


def test_block_size_7_drafts_7_tokens_from_7_rows() -> None:
    """B08: in anchor_sampling the block size is the number of drafts, and verification runs one row more."""
    drafter = dspark(block_size=7)
    num_drafts = drafter.contract.num_draft_tokens
    assert (num_drafts, drafter.num_rows(num_drafts)) == (7, 7)
    assert drafter.block_ids(torch.tensor([5]), num_drafts).tolist() == [[5] + [60] * 6]
    hidden = torch.randn(1, 7, 24)
    assert torch.equal(drafter.predicted_rows(hidden), hidden)  # row 0 is not thrown away
    fill_in = dspark(block_size=7, layout="fill_in")
    assert (fill_in.contract.num_draft_tokens, fill_in.num_rows(6)) == (6, 7)


@torch.no_grad()
def test_the_configured_epsilon_is_used() -> None:
    """B08: another epsilon gives other draft logits."""
    taps, embeddings = [torch.randn(5, 24) for _ in range(2)], torch.randn(4, 24)
    found = []
    for eps in (1e-5, 1e-2):
        context = CachedContext(dspark(rms_norm_eps=eps))
        context.extend(taps)
        found.append(context.draft(embeddings))
    assert (found[0] - found[1]).abs().max() > 1e-4


def test_layouts_and_parts_that_are_not_dspark_are_refused() -> None:
    assert BLOCK_DRAFTERS["dspark"] is DSparkDrafter
    with pytest.raises(CheckpointError, match="'autoregressive'; a DSpark drafter is served with"):
        dspark(layout="autoregressive")
    with pytest.raises(CheckpointError, match="from 20 of 61 token ids but brings no lm_head"):
        dspark(draft_vocab_size=20)
    with pytest.raises(CheckpointError, match=r"mask embedding of its own; a DSpark drafter reads row 60"):
        dspark(has_mask_embedding=True)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rank": 0},
        {"kind": "gated", "layout": "fill_in"},
        {"kind": "rnn", "confidence": ConfidenceSettings(True)},
        {"draft_vocab_size": 20, "has_own_head": True, "has_own_embedding": True},
        {"latent": LATENT, "has_tap_norm": True, "confidence": ConfidenceSettings(False)},
    ],
    ids=lambda changes: "+".join(changes) or "plain",
)
def test_parameters_are_those_that_files_hold(changes: dict[str, Any]) -> None:
    drafter = dspark(**changes)
    held = {name: tuple(parameter.shape) for name, parameter in drafter.checkpoint_parameters().items()}
    sizes: dict[str, tuple[int, ...]] = {}
    for slot in drafter_slots(drafter.contract):
        known = sizes.get(slot.parameter)
        sizes[slot.parameter] = slot.shape if known is None else (known[0] + slot.shape[0], *known[1:])
    assert held == sizes
    drafter.prepare_for_serving("row_invariant")
    assert set(drafter.checkpoint_parameters()) == set(sizes)


# --- equivalences ---


@pytest.mark.parametrize("method", ["greedy", "probabilistic"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_head_of_zeros_gives_the_base_bit_for_bit(method: str, dtype: torch.dtype) -> None:
    hidden, logits = torch.randn(5, 4, 24).to(dtype), torch.randn(5, 4, 61).to(dtype)
    anchors, sampling = torch.randint(61, (5,)), sampling_of(5, method=method, temperature=0.8)
    base = dspark(rank=0).to(dtype).propose(hidden, logits, anchors, sampling)
    dflash = tiny_drafter().to(dtype).propose(hidden, logits, anchors, sampling)
    for kind in ("vanilla", "gated", "rnn"):
        drafter = dspark(kind=kind).to(dtype)
        biased = drafter.propose(hidden, logits, anchors, sampling)
        assert not torch.equal(biased.ids_BK, base.ids_BK)
        assert drafter.markov_head is not None
        drafter.markov_head.markov_w2.weight.zero_()
        found = drafter.propose(hidden, logits, anchors, sampling)
        for part, expected, other in zip(found, base, dflash, strict=True):
            assert (part is None) == (expected is None)
            assert part is None or (torch.equal(part, expected) and torch.equal(part, other))


def slow_walk(
    drafter: DSparkDrafter, hidden_KD: Tensor, base_KV: Tensor, anchor: int, *, by_draft_id: bool = False
) -> list[int]:
    """Greedy target ids of one block, vanilla head, float64; `by_draft_id` plants a wrong index into w1."""
    assert drafter.markov_head is not None
    w1, w2 = drafter.markov_head.markov_w1.weight.double(), drafter.markov_head.markov_w2.weight.double()
    previous, out = anchor, []
    for row in base_KV.double():
        draft_id = int((row + w2 @ w1[previous]).argmax())
        out.append(int(drafter.vocabulary.to_target_ids(torch.tensor(draft_id))))
        previous = draft_id if by_draft_id else out[-1]
    return out


def reduced(**changes: Any) -> DSparkDrafter:
    drafter = dspark(draft_vocab_size=20, has_own_head=True, **changes)
    drafter.vocabulary.target_ids_V = torch.randperm(61, generator=torch.Generator().manual_seed(3))[:20].sort().values
    return drafter


@torch.no_grad()
def test_with_a_reduced_vocabulary_the_walk_remembers_target_ids() -> None:
    """P31: w1 has a row per target id; draft ids would read other rows."""
    drafter = reduced()
    hidden, anchors = torch.randn(6, 4, 24), torch.randint(61, (6,))
    logits = drafter.logits(hidden, Lending(torch.randn(61, 24), torch.randn(61, 24)))
    assert logits.shape == (6, 4, 20)
    logits = logits * 0.3
    found = drafter.propose(hidden, logits, anchors, sampling_of(6)).ids_BK.tolist()
    both = list(zip(hidden, logits, anchors.tolist(), strict=True))
    assert found == [slow_walk(drafter, *block) for block in both]
    assert found != [slow_walk(drafter, *block, by_draft_id=True) for block in both]
    kept = drafter.vocabulary.target_ids_V
    assert kept is not None
    assert set(itertools.chain(*found)) <= set(kept.tolist())
    drawn = drafter.propose(hidden, logits, anchors, sampling_of(6, method="probabilistic"))
    assert drawn.candidate_ids_BKC is not None and drawn.candidate_ids_BKC.shape == (6, 4, 20)
    assert torch.equal(drawn.candidate_ids_BKC.sort(-1).values, kept.expand(6, 4, 20))
    assert (drawn.candidate_ids_BKC == drawn.ids_BK[..., None]).any(-1).all()


def test_the_bias_is_added_after_the_soft_cap() -> None:
    drafter = worked_drafter(final_logit_softcapping=1.0)
    head = torch.tensor([[[4.0, 5.0, 0.0, 0.0]]])
    logits = drafter.vocabulary.transform(head)
    drawn = drafter.propose(HIDDEN[:, :1], logits, ANCHOR_3, sampling_of(1, method="probabilistic"))
    assert drawn.candidate_ids_BKC is not None and drawn.log_q_BKC is not None
    log_q = drawn.log_q_BKC.gather(-1, drawn.candidate_ids_BKC.argsort(-1))[0, 0]
    bias = torch.tensor(BIAS_AFTER[3])
    torch.testing.assert_close(log_q, (torch.tanh(head[0, 0]) + bias).log_softmax(-1))
    for wrong in (torch.tanh(head[0, 0]) + torch.tanh(bias), torch.tanh(head[0, 0] + bias), head[0, 0] + bias):
        assert (wrong.log_softmax(-1) - log_q).abs().max() > 0.1


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
@pytest.mark.parametrize("method", ["greedy", "probabilistic"])
@pytest.mark.parametrize("top_k", [None, 5])
def test_a_batch_gives_each_request_what_it_gets_alone(kind: str, method: str, top_k: int | None) -> None:
    drafter = dspark(kind=kind, draft_top_k=top_k, confidence=ConfidenceSettings(True))
    drafter.prepare_for_serving("row_invariant")
    hidden, logits, anchors = torch.randn(5, 4, 24), torch.randn(5, 4, 61), torch.randint(61, (5,))
    seeds = torch.tensor([3, 1, 4, 1, 5])
    together = drafter.propose(hidden, logits, anchors, sampling_of(5, method=method, seeds=seeds))
    for lane in range(5):
        one = slice(lane, lane + 1)
        alone = drafter.propose(hidden[one], logits[one], anchors[one], sampling_of(1, method=method, seeds=seeds[one]))
        for part, whole in zip(alone, together, strict=True):
            assert (part is None) == (whole is None)
            assert part is None or torch.equal(part[0], whole[lane])


def slow_recurrent_walks(
    drafter: DSparkDrafter, blocks: list[tuple[Tensor, Tensor, int]], fault: str
) -> list[list[int]]:
    """Greedy ids of blocks one after another, float64; `fault` plants a state that lives too long or too short."""
    assert drafter.markov_head is not None
    state, walks = [0.0] * 6, []
    for hidden_KD, base_KV, anchor in blocks:
        walk = [anchor]
        state = state if fault == "carried across blocks" else [0.0] * 6
        for hidden, base in zip(hidden_KD, base_KV.double(), strict=True):
            state = [0.0] * 6 if fault == "lost between rows" else state
            (bias,) = slow_recurrence(drafter.markov_head, [walk[-1]], hidden[None], state=state)
            walk.append(int((base + torch.tensor(bias, dtype=torch.float64)).argmax()))
        walks.append(walk[1:])
    return walks


def test_a_recurrent_walk_remembers_its_block_and_no_other() -> None:
    """P31: the state starts at 0 in every block."""
    drafter = dspark(kind="rnn")
    hidden, logits, anchors = torch.randn(12, 8, 24), torch.randn(12, 8, 61) * 0.3, torch.randint(61, (12,))
    blocks = list(zip(hidden, logits, anchors.tolist(), strict=True))
    right = slow_recurrent_walks(drafter, blocks, "")
    assert drafter.propose(hidden, logits, anchors, sampling_of(12)).ids_BK.tolist() == right
    one_by_one = [
        drafter.propose(h[None], z[None], torch.tensor([a]), sampling_of(1)).ids_BK[0].tolist() for h, z, a in blocks
    ]
    assert one_by_one == right
    for fault in ("carried across blocks", "lost between rows"):
        assert slow_recurrent_walks(drafter, blocks, fault) != right


# --- exact sampling ---


def walk_probabilities(temperature: float) -> Tensor:
    """Exact probability of each of the 64 blocks of the worked example, float64."""
    bias = torch.tensor(BIAS_AFTER, dtype=torch.float64)
    paths = []
    for path in itertools.product(range(4), repeat=3):
        p = torch.ones((), dtype=torch.float64)
        for base, previous, drawn in zip(BASE[0].double(), (3, *path), path, strict=False):
            p = p * ((base + bias[previous]) / temperature).softmax(-1)[drawn]
        paths.append(p)
    return torch.stack(paths)


def p_value(ids_BK: Tensor, probabilities: Tensor) -> float:
    counts = torch.bincount(ids_BK @ torch.tensor([16, 4, 1]), minlength=64).double()
    expected = probabilities * len(ids_BK)
    common = expected >= 5
    found = torch.cat((counts[common], counts[~common].sum()[None]))
    wanted = torch.cat((expected[common], expected[~common].sum()[None]))
    is_there = wanted > 0
    return float(chisquare(found[is_there].numpy(), wanted[is_there].numpy()).pvalue)


def walks(temperature: float, count: int = 20_000) -> Proposal:
    sampling = sampling_of(count, method="probabilistic", temperature=temperature)
    return worked_drafter().propose(
        HIDDEN.expand(count, -1, -1), BASE.expand(count, -1, -1), ANCHOR_3.expand(count), sampling
    )


@pytest.mark.parametrize("temperature", [0.7, 1.5])
def test_blocks_are_drawn_with_their_exact_probability(temperature: float) -> None:
    proposal = walks(temperature)
    assert p_value(proposal.ids_BK, walk_probabilities(temperature)) > 1e-3
    independent = (BASE[0].double() / temperature).softmax(-1)
    joint = torch.einsum("a,b,c->abc", *independent).flatten()
    assert p_value(proposal.ids_BK, joint) < 1e-6  # the test can tell a walk from independent rows
    assert p_value(proposal.ids_BK, walk_probabilities(temperature * 1.1)) < 1e-3
    # The reported q is that of the realised prefix, exactly.
    assert proposal.candidate_ids_BKC is not None and proposal.log_q_BKC is not None
    drawn = proposal.log_q_BKC.masked_fill(proposal.candidate_ids_BKC != proposal.ids_BK[..., None], 0).sum((1, 2))
    exact = walk_probabilities(temperature).log()[proposal.ids_BK @ torch.tensor([16, 4, 1])]
    torch.testing.assert_close(drawn.double(), exact, rtol=0, atol=1e-5)


def test_noise_that_forgets_the_place_in_the_block_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(scores: Tensor, sampling: DraftSampling, vocabulary: Any, *, first: int, **rest: Any) -> Proposal:
        return draw_rows(scores, sampling, vocabulary, **rest)

    monkeypatch.setattr(dspark_module, "draw_rows", forgetful)
    assert p_value(walks(1.5).ids_BK, walk_probabilities(1.5)) < 1e-6


def test_requests_of_temperature_zero_walk_greedily_beside_others() -> None:
    drafter = dspark()
    hidden, logits, anchors = torch.randn(8, 4, 24), torch.randn(8, 4, 61), torch.randint(61, (8,))
    sampling = sampling_of(8, method="probabilistic", temperature=2.0)
    sampling.temperature_B[::2] = 0.0
    greedy = drafter.propose(hidden, logits, anchors, sampling_of(8)).ids_BK
    mixed = drafter.propose(hidden, logits, anchors, sampling).ids_BK
    assert torch.equal(mixed[::2], greedy[::2]) and not torch.equal(mixed[1::2], greedy[1::2])


def test_a_dspark_without_heads_is_not_a_dflash() -> None:
    """DeepSpec's "DFlash" has the anchor-sampling layout; served as fill-in it would be read one row off."""
    assert dspark(rank=0).num_rows(4) == 4
    with pytest.raises(CheckpointError, match="anchor_sampling"):
        DFlashDrafter(drafter_contract(layout="anchor_sampling"))
