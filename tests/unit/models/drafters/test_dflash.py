"""The DFlash drafter: a slow float64 twin, vectors of the public implementation, and exact proposals.

`tests/data/dflash_peer.safetensors` holds what package `dflash` 0.1.0 (transformers 5.24, torch 2.13, CPU) computed;
`PYTHONPATH=<unpacked wheel> python tests/data/make_dflash_peer.py` makes it.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from scipy.stats import chisquare
from tests.fakes import Lending
from tests.unit.models.conftest import CachedContext, drafter_contract, tiny_drafter
from torch import Tensor

from paceline.checkpoint.contract import RopeSettings, TargetLayerId
from paceline.models.drafters.dflash import DFlashDrafter
from paceline.models.drafters.proposal import MAX_CANDIDATES, DraftSampling, Proposal
from paceline.models.drafters.table import BLOCK_DRAFTERS

PEER = Path(__file__).parents[3] / "data" / "dflash_peer.safetensors"

# --- a second implementation, one position and one head at a time ---


def slow_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    return x * gain / math.sqrt(float((x * x).mean()) + eps)


def slow_turn(head: Tensor, position: int, theta: float, is_neox_style: bool) -> Tensor:
    size = head.shape[0]
    out = head.clone()
    for pair in range(size // 2):
        angle = position / theta ** (2 * pair / size)
        i, j = (pair, pair + size // 2) if is_neox_style else (2 * pair, 2 * pair + 1)
        out[i] = head[i] * math.cos(angle) - head[j] * math.sin(angle)
        out[j] = head[j] * math.cos(angle) + head[i] * math.sin(angle)
    return out


def slow_block(drafter: DFlashDrafter, taps: list[Tensor], embeddings_QD: Tensor) -> Tensor:
    """Final states of one block after a context of `taps`, each [n, width]."""
    c, p = drafter.contract, {n: t.detach().double() for n, t in drafter.checkpoint_parameters().items()}
    eps, num_context = c.rms_norm_eps, taps[0].shape[0]
    context = []
    for position in range(num_context):
        streams = [tap[position].double() for tap in taps]
        if c.has_tap_norm:
            streams = [slow_norm(s, p[f"fc_norm.{t}.weight"], eps) for t, s in enumerate(streams)]
        context.append(slow_norm(p["fc.weight"] @ torch.cat(streams), p["hidden_norm.weight"], eps))
    x = [row.double() * c.input_embedding_scale for row in embeddings_QD]
    q_size, kv_size = c.num_heads * c.head_size, c.num_kv_heads * c.head_size
    for layer in range(c.num_layers):
        w = {n.removeprefix(f"layers.{layer}."): t for n, t in p.items() if n.startswith(f"layers.{layer}.")}
        bias = w.get("self_attn.qkv_proj.bias", torch.zeros(q_size + 2 * kv_size, dtype=torch.float64))

        def project(y: Tensor, first: int, size: int, w: dict[str, Tensor] = w, bias: Tensor = bias) -> Tensor:
            rows = slice(first, first + size)
            return (w["self_attn.qkv_proj.weight"][rows] @ y + bias[rows]).view(-1, c.head_size)

        def key(y: Tensor, position: int, w: dict[str, Tensor] = w, project: Any = project) -> list[Tensor]:
            heads = [slow_norm(h, w["self_attn.k_norm.weight"], eps) for h in project(y, q_size, kv_size)]
            return [slow_turn(h, position, c.rope.theta, c.is_neox_style) for h in heads]

        normed = [slow_norm(row, w["input_layernorm.weight"], eps) for row in x]
        sources = context + normed
        keys = [key(y, position) for position, y in enumerate(sources)]
        values = [project(y, q_size + kv_size, kv_size) for y in sources]
        after = []
        for row, y in enumerate(normed):
            position = num_context + row
            seen = [
                j
                for j in range(len(sources))
                if not (c.layer_causal[layer] and j > position)
                and not (c.layer_windows[layer] is not None and abs(position - j) >= (c.layer_windows[layer] or 0))
            ]
            mixed = []
            for head, query in enumerate(project(y, 0, q_size)):
                query = slow_turn(
                    slow_norm(query, w["self_attn.q_norm.weight"], eps), position, c.rope.theta, c.is_neox_style
                )
                group = head // (c.num_heads // c.num_kv_heads)
                weights = torch.stack([query @ keys[j][group] for j in seen]).div(math.sqrt(c.head_size)).softmax(0)
                mixed.append(sum((a * values[j][group] for a, j in zip(weights, seen, strict=True)), torch.zeros(())))
            out = w["self_attn.o_proj.weight"] @ torch.cat(mixed)
            out = out + w.get("self_attn.o_proj.bias", torch.zeros((), dtype=torch.float64))
            middle = x[row] + out
            z = slow_norm(middle, w["post_attention_layernorm.weight"], eps)
            gate, up = (w["mlp.gate_up_proj.weight"] @ z).chunk(2)
            after.append(middle + w["mlp.down_proj.weight"] @ (gate / (1 + (-gate).exp()) * up))
        x = after
    return torch.stack([slow_norm(row, p["norm.weight"], eps) for row in x])


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"layer_causal": (True, False)},
        {"layer_windows": (4, None)},
        {"layer_windows": (3, 5), "layer_causal": (True, False)},
        {"is_neox_style": False},
        {"has_tap_norm": True, "attention_bias": True},
        {"num_kv_heads": 4, "head_size": 10, "rope": RopeSettings(theta=100.0)},
        {"input_embedding_scale": 3.0, "num_layers": 1, "layer_windows": (None,), "layer_causal": (False,)},
    ],
    ids=lambda changes: "+".join(changes) or "plain",
)
@torch.no_grad()
def test_blocks_agree_with_a_slow_float64_twin(changes: dict[str, Any]) -> None:
    drafter = tiny_drafter(**changes)
    taps = [torch.randn(9, 24), torch.randn(9, 24)]
    embeddings = torch.randn(4, 24)
    context = CachedContext(drafter)
    context.extend(taps)
    found = context.draft(embeddings * drafter.contract.input_embedding_scale)
    torch.testing.assert_close(found.double(), slow_block(drafter, taps, embeddings), rtol=1e-4, atol=2e-5)
    # The twin must be able to tell: any other contract with the same weights gives something else.
    for field, value in (("layer_causal", (True, True)), ("layer_windows", (2, 2)), ("input_embedding_scale", 0.5)):
        fault = value[: drafter.contract.num_layers] if isinstance(value, tuple) else value
        other = DFlashDrafter(drafter_contract(**{**changes, field: fault}))
        other.load_state_dict(drafter.state_dict())
        assert (slow_block(other, taps, embeddings) - found).abs().max() > 1e-3


# --- the public implementation ---


FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def peer_drafter(stored: dict[str, Tensor], **changes: Any) -> DFlashDrafter:
    contract = drafter_contract(
        target_num_layers=5,
        target_hidden_size=16,
        target_vocab_size=40,
        target_layer_ids=(TargetLayerId(1), TargetLayerId(3)),
        mask_token_id=39,
        vocab_size=40,
        draft_vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        num_heads=2,
        num_kv_heads=1,
        head_size=8,
        rms_norm_eps=1e-6,
        max_position_embeddings=64,
        **changes,
    )
    drafter = DFlashDrafter(contract)
    weights = {name.removeprefix("drafter."): t.float() for name, t in stored.items() if name.startswith("drafter.")}
    fused = {}
    for name in drafter.checkpoint_parameters():
        parts = [name]
        for fused_name, sources in FUSED.items():
            if fused_name in name:
                parts = [name.replace(fused_name, source) for source in sources]
        fused[f"backbone.{name}"] = torch.cat([weights.pop(part) for part in parts])
    assert not weights
    drafter.load_state_dict(fused)
    return drafter


VARIANTS: dict[str, dict[str, Any]] = {
    "full": {},
    "window_causal": {"layer_windows": (6, None), "layer_causal": (True, False)},
    "window_both": {
        "layer_windows": (6, None),
        "output_multiplier": 0.5,
        "final_logit_softcapping": 3.0,
        "input_embedding_scale": 2.0,
    },
}


@torch.no_grad()
def replay_peer(stored: dict[str, Tensor], name: str, drafter: DFlashDrafter) -> tuple[float, bool]:
    """Largest difference of final states over a whole generation, and whether all proposals are the same."""
    output_ids, features = stored[f"{name}.output_ids"], stored[f"{name}.features"]
    context = CachedContext(drafter)
    worst, same = 0.0, True
    for index, num_new in enumerate(stored[f"{name}.num_context"].tolist()):
        new = features[context.length : context.length + num_new]
        context.extend([new[:, :16], new[:, 16:]])
        ids = drafter.block_ids(output_ids[context.length].reshape(1), 3)[0]
        hidden = context.draft(drafter.embed(ids, Lending(stored["embedding"].float(), stored["head"].float())))
        worst = max(worst, float((hidden - stored[f"{name}.hidden"][index]).abs().max()))
        logits = drafter.vocabulary.transform(hidden[1:] @ stored["head"].float().T)
        same &= torch.equal(logits.argmax(-1), stored[f"{name}.proposals"][index])
    return worst, same


@pytest.mark.parametrize("name", VARIANTS)
def test_states_and_proposals_agree_with_the_public_implementation(name: str) -> None:
    stored = load_file(PEER)
    worst, same = replay_peer(stored, name, peer_drafter(stored, **VARIANTS[name]))
    assert worst < 2e-5 and same


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("full", {"layer_causal": (True, True)}),
        ("full", {"is_neox_style": False}),
        ("window_causal", {"layer_windows": (5, None)}),
        ("window_causal", {"layer_causal": (False, False)}),
        ("window_both", {"layer_windows": (7, None)}),
        ("window_both", {"input_embedding_scale": 1.0}),
    ],
)
def test_a_wrong_contract_does_not_agree_with_the_public_implementation(name: str, fault: dict[str, Any]) -> None:
    stored = load_file(PEER)
    worst, _ = replay_peer(stored, name, peer_drafter(stored, **{**VARIANTS[name], **fault}))
    assert worst > 1e-3


# --- rows, logits, proposals ---


def test_a_block_is_the_anchor_and_masks() -> None:
    drafter = tiny_drafter()
    assert drafter.block_ids(torch.tensor([5, 9]), 3).tolist() == [[5, 60, 60, 60], [9, 60, 60, 60]]
    assert drafter.block_ids(torch.tensor([[5], [9]]), 1).tolist() == [[[5, 60]], [[9, 60]]]
    assert BLOCK_DRAFTERS["dflash"] is DFlashDrafter


def test_multiplier_comes_before_the_soft_cap() -> None:
    logits = torch.tensor([[-8.0, 0.5, 4.0]])
    drafter = tiny_drafter(output_multiplier=2.0, final_logit_softcapping=5.0)
    torch.testing.assert_close(drafter.vocabulary.transform(logits), 5 * torch.tanh(2 * logits / 5))
    # worked numbers: a logit of 10 this way round, and the other
    assert float(drafter.vocabulary.transform(torch.tensor(10.0))) == pytest.approx(4.996646, abs=1e-6)
    assert 2 * 5 * math.tanh(10 / 5) == pytest.approx(9.640276, abs=1e-6)
    assert torch.equal(tiny_drafter().vocabulary.transform(logits), logits)


def test_the_embedding_scale_touches_block_rows_alone() -> None:
    table, ids = torch.randn(61, 24), torch.tensor([[5, 60, 60]])
    target = Lending(table, table)
    assert torch.equal(tiny_drafter(input_embedding_scale=2.0).embed(ids, target), table[ids] * 2)
    assert torch.equal(tiny_drafter().embed(ids, target), table[ids])


def propose(
    logits_BKV: Tensor,
    *,
    temperature: float | list[float] = 1.0,
    seed: int | Tensor = 7,
    position: int = 30,
    step: int = 0,
) -> Proposal:
    num_requests = logits_BKV.shape[0]
    temperatures = temperature if isinstance(temperature, list) else [temperature] * num_requests
    sampling = DraftSampling(
        method="probabilistic",
        temperature_B=torch.tensor(temperatures),
        seed_B=seed if isinstance(seed, Tensor) else torch.full((num_requests,), seed),
        position_B=torch.full((num_requests,), position),
        step_B=torch.full((num_requests,), step),
    )
    size = logits_BKV.shape[-1]
    drafter = tiny_drafter(vocab_size=size, draft_vocab_size=size, target_vocab_size=size)
    return drafter.propose(logits_BKV[..., :0], logits_BKV, torch.zeros(num_requests).long(), sampling)


def test_greedy_proposals_are_one_hot_argmaxes() -> None:
    logits = torch.randn(3, 4, 61)
    zeros = torch.zeros(3, dtype=torch.long)
    sampling = DraftSampling("greedy", torch.ones(3), zeros, zeros, zeros)
    proposal = tiny_drafter().propose(logits[..., :0], logits, zeros, sampling)
    assert torch.equal(proposal.ids_BK, logits.argmax(-1))
    assert proposal.candidate_ids_BKC is None and proposal.log_q_BKC is None


@pytest.mark.parametrize("vocab_size", [5, 32, 61])
def test_probabilities_are_normalised_over_unique_candidates_that_hold_the_draw(vocab_size: int) -> None:
    logits = torch.randn(6, 3, vocab_size) * 3
    proposal = propose(logits, temperature=0.7)
    ids, candidates, log_q = proposal[:3]
    assert candidates is not None and log_q is not None
    assert candidates.shape == log_q.shape == (6, 3, min(vocab_size, MAX_CANDIDATES))
    assert log_q.dtype == torch.float32
    torch.testing.assert_close(log_q.double().exp().sum(-1), torch.ones(6, 3, dtype=torch.float64))
    assert all(len(set(row)) == len(row) for request in candidates.tolist() for row in request)
    assert (candidates == ids[..., None]).any(-1).all()
    kept = logits.gather(-1, candidates) / 0.7
    torch.testing.assert_close(log_q, kept.log_softmax(-1))
    left_out = torch.full_like(logits, 1.0).scatter(-1, candidates, 0.0).bool()
    if left_out.any():
        assert logits[left_out].max() <= logits.max()
        assert (logits.masked_fill(~left_out, float("-inf")).amax(-1) <= kept.mul(0.7).amin(-1) + 1e-6).all()


def draws(logits_KV: Tensor, temperature: float, count: int) -> Tensor:
    """Ids [count, K] of as many requests with seeds of their own."""
    seeds = torch.arange(count) * 7919 + 13
    return propose(logits_KV.expand(count, -1, -1), temperature=temperature, seed=seeds).ids_BK


def p_value(ids: Tensor, q: Tensor) -> float:
    counts = torch.bincount(ids, minlength=q.shape[0]).double()
    return float(chisquare(counts.numpy(), (q.double() / q.double().sum() * len(ids)).numpy()).pvalue)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
def test_drawn_ids_are_distributed_as_q(temperature: float) -> None:
    logits = torch.tensor([[0.0, 1.0, -0.5, 0.3, 0.8, -1.0], [1.0, 0.0, 0.0, -1.0, 0.5, 0.2]])
    ids = draws(logits, temperature, 20_000)
    for k in range(2):
        q = (logits[k] / temperature).softmax(-1)
        assert p_value(ids[:, k], q) > 1e-3
        assert p_value(ids[:, k], (logits[k] / (temperature * 1.2)).softmax(-1)) < 1e-3  # the test can tell


def test_draws_of_one_block_are_independent() -> None:
    logits = torch.tensor([[0.0, 1.0, -0.5], [1.0, 0.0, 0.0]])
    ids = draws(logits, 1.0, 20_000)
    joint = torch.outer(logits[0].softmax(-1), logits[1].softmax(-1)).flatten()
    assert p_value(ids[:, 0] * 3 + ids[:, 1], joint) > 1e-3


def test_only_the_best_candidates_are_drawn() -> None:
    logits = torch.zeros(1, 1, 61).scatter(-1, torch.arange(32)[None, None] + 20, 1.0)
    ids = draws(logits[0], 1.0, 4000)
    assert set(ids.flatten().tolist()) == set(range(20, 52))


def test_requests_of_temperature_zero_take_the_argmax_beside_others() -> None:
    logits = torch.randn(64, 3, 61)
    temperatures = [0.0, 2.0] * 32
    ids = propose(logits, temperature=temperatures, seed=torch.arange(64)).ids_BK
    assert torch.equal(ids[::2], logits[::2].argmax(-1))
    assert not torch.equal(ids[1::2], logits[1::2].argmax(-1))


def test_equal_best_logits_go_to_the_lowest_id_at_temperature_zero() -> None:
    """bf16 logits tie often; the target's own argmax takes the lowest id, and so must a draft that hopes to match."""
    logits = torch.zeros(1, 2, 61)
    logits[:, :, [40, 9, 23]] = 1.0
    assert propose(logits, temperature=0.0).ids_BK.tolist() == [[9, 9]]


def test_a_draw_is_a_function_of_seed_position_and_step() -> None:
    logits = torch.zeros(1, 64, 16)
    first = propose(logits).ids_BK
    assert torch.equal(propose(logits).ids_BK, first)
    for other in (propose(logits, step=1), propose(logits, seed=8), propose(logits, position=1030)):
        assert 0 < int((other.ids_BK == first).sum()) < 16  # 4 expected by chance
    # Row k is keyed by the position before its token: rows shift with the anchor.
    assert torch.equal(propose(logits, position=31).ids_BK[:, :-1], first[:, 1:])


def test_a_draw_does_not_know_its_lane() -> None:
    logits, seeds = torch.randn(5, 3, 16), torch.tensor([3, 1, 4, 1, 5])
    together = propose(logits, seed=seeds).ids_BK
    for lane in range(5):
        assert torch.equal(propose(logits[lane : lane + 1], seed=seeds[lane : lane + 1]).ids_BK[0], together[lane])


def test_16_bit_logits_give_float32_probabilities() -> None:
    proposal = propose(torch.randn(2, 3, 61).to(torch.bfloat16))
    assert proposal.log_q_BKC is not None and proposal.log_q_BKC.dtype == torch.float32
    torch.testing.assert_close(proposal.log_q_BKC.exp().sum(-1), torch.ones(2, 3))
