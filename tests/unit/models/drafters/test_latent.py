"""Latent attention: the absorbed form against an explicit float64 twin, with every fault that keeps the text right."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.unit.models.conftest import CachedContext
from tests.unit.models.drafters.test_dspark import LATENT, dspark, dspark_contract
from torch import Tensor

from paceline.checkpoint.contract import RopeSettings
from paceline.models.building import empty_drafter
from paceline.models.drafters.dspark import DSparkDrafter
from paceline.models.drafters.latent import attention_scale

# mscale and mscale_all_dim differ, so that a factor which reaches only one of its two places shows
YARN = RopeSettings(
    theta=10_000.0, kind="yarn", factor=4.0, original_max_position_embeddings=32, mscale=0.7, mscale_all_dim=1.4
)
# contract.head_size and num_kv_heads mean nothing here: values that fit nowhere
UNUSED = {"head_size": 7, "num_kv_heads": 3}


def latent_drafter(**changes: Any) -> DSparkDrafter:
    return dspark(**({"latent": LATENT, "is_neox_style": False} | UNUSED | changes))


def slow_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    return x * gain / math.sqrt(float((x * x).mean()) + eps)


def slow_angles(rope: RopeSettings, size: int, position: int) -> list[float]:
    """Radians per channel pair."""
    angles = []
    for pair in range(size // 2):
        plain = position * rope.theta ** (-2 * pair / size)
        if rope.kind == "yarn":
            length = rope.original_max_position_embeddings or 0

            def channel(turns: float, length: int = length) -> float:
                return size * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

            low = max(math.floor(channel(rope.beta_fast)), 0)
            high = min(math.ceil(channel(rope.beta_slow)), size - 1)
            slowed = min(max((pair - low) / max(high - low, 1e-3), 0.0), 1.0)
            plain = plain * (1 - slowed) + plain / rope.factor * slowed
        angles.append(plain)
    return angles


def slow_magnitude(rope: RopeSettings, scale: float | None) -> float:
    return 0.1 * scale * math.log(rope.factor) + 1 if scale and rope.kind == "yarn" else 1.0


def slow_turn(x: Tensor, rope: RopeSettings, position: int, is_neox_style: bool) -> Tensor:
    out, size = x.clone(), x.shape[0]
    table = slow_magnitude(rope, rope.mscale) / slow_magnitude(rope, rope.mscale_all_dim)
    for pair, angle in enumerate(slow_angles(rope, size, position)):
        i, j = (pair, pair + size // 2) if is_neox_style else (2 * pair, 2 * pair + 1)
        out[i] = (x[i] * math.cos(angle) - x[j] * math.sin(angle)) * table
        out[j] = (x[j] * math.cos(angle) + x[i] * math.sin(angle)) * table
    return out


def slow_block(drafter: DSparkDrafter, taps: list[Tensor], embeddings_QD: Tensor, *, fault: str = "") -> Tensor:
    """Final states of one block, every head with keys and values of its own; `fault` plants a mistake."""
    c, p = drafter.contract, {n: t.detach().double() for n, t in drafter.checkpoint_parameters().items()}
    eps, num_context, heads = c.rms_norm_eps, taps[0].shape[0], c.num_heads
    nope, turned, rank, value = (
        LATENT.qk_nope_head_size, LATENT.qk_rope_head_size, LATENT.kv_lora_rank, LATENT.v_head_size,
    )  # fmt: skip
    scale = (nope + turned) ** -0.5 * slow_magnitude(c.rope, c.rope.mscale_all_dim) ** 2
    if fault == "no magnitude in the softmax":
        scale = (nope + turned) ** -0.5
    elif fault == "magnitude once":
        scale = (nope + turned) ** -0.5 * slow_magnitude(c.rope, c.rope.mscale_all_dim)
    elif fault == "scale of the latent row":
        scale = (rank + turned) ** -0.5
    is_neox_style = c.is_neox_style != (fault == "the other pairing")
    context = []
    for position in range(num_context):
        streams = [tap[position].double() for tap in taps]
        if c.has_tap_norm:
            streams = [slow_norm(s, p[f"fc_norm.{t}.weight"], eps) for t, s in enumerate(streams)]
        context.append(slow_norm(p["fc.weight"] @ torch.cat(streams), p["hidden_norm.weight"], eps))
    x = list(embeddings_QD.double())
    for layer in range(c.num_layers):
        w = {n.removeprefix(f"layers.{layer}."): t for n, t in p.items() if n.startswith(f"layers.{layer}.")}
        attention = {n.removeprefix("self_attn."): t for n, t in w.items() if n.startswith("self_attn.")}
        normed = [slow_norm(row, w["input_layernorm.weight"], eps) for row in x]
        seen_context = context
        if fault == "input norm on the context":
            seen_context = [slow_norm(row, w["input_layernorm.weight"], eps) for row in context]
        keys, values = [], []
        for position, y in enumerate(seen_context + normed):
            row = attention["kv_a_proj_with_mqa.weight"] @ y
            compressed = slow_norm(row[:rank], attention["kv_a_layernorm.weight"], eps)
            if fault == "norm over the whole row":
                gain = torch.cat((attention["kv_a_layernorm.weight"], torch.ones(turned)))
                row = slow_norm(row, gain, eps)
                compressed = row[:rank]
            positional = slow_turn(row[rank:], c.rope, position, is_neox_style)
            per_head = (attention["kv_b_proj.weight"] @ compressed).view(heads, nope + value)
            keys.append([torch.cat((head[:nope], positional)) for head in per_head])
            values.append([head[nope:] for head in per_head])
        after = []
        for index, y in enumerate(normed):
            position = num_context + index
            low = slow_norm(attention["q_a_proj.weight"] @ y, attention["q_a_layernorm.weight"], eps)
            window = c.layer_windows[layer]
            seen = [
                j
                for j in range(len(keys))
                if not (c.layer_causal[layer] and j > position) and (window is None or abs(position - j) < window)
            ]
            mixed = []
            for head, query in enumerate((attention["q_b_proj.weight"] @ low).view(heads, nope + turned)):
                q = torch.cat((query[:nope], slow_turn(query[nope:], c.rope, position, is_neox_style)))
                weights = torch.stack([q @ keys[j][head] * scale for j in seen]).softmax(0)
                mixed.append(sum((a * values[j][head] for a, j in zip(weights, seen, strict=True)), torch.zeros(())))
            middle = x[index] + attention["o_proj.weight"] @ torch.cat(mixed)
            z = slow_norm(middle, w["post_attention_layernorm.weight"], eps)
            gate, up = (w["mlp.gate_up_proj.weight"] @ z).chunk(2)
            after.append(middle + w["mlp.down_proj.weight"] @ (gate / (1 + (-gate).exp()) * up))
        x = after
    return torch.stack([slow_norm(row, p["norm.weight"], eps) for row in x])


def served(drafter: DSparkDrafter, taps: list[Tensor], embeddings: Tensor, cuts: list[int] | None = None) -> Tensor:
    context = CachedContext(drafter)
    start = 0
    for end in [*(cuts or []), taps[0].shape[0]]:
        context.extend([tap[start:end] for tap in taps])
        start = end
    return context.draft(embeddings)


FAULTS = [
    "the other pairing",
    "input norm on the context",
    "norm over the whole row",
    "scale of the latent row",
]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"has_tap_norm": True, "rope": YARN},
        {"is_neox_style": True},
        {"layer_windows": (4, None), "layer_causal": (True, False)},
    ],
    ids=lambda changes: "+".join(changes) or "plain",
)
@torch.no_grad()
def test_the_absorbed_form_agrees_with_explicit_heads(changes: dict[str, Any]) -> None:
    drafter = latent_drafter(**changes)
    taps, embeddings = [torch.randn(9, 24), torch.randn(9, 24)], torch.randn(4, 24)
    found = served(drafter, taps, embeddings).double()
    torch.testing.assert_close(found, slow_block(drafter, taps, embeddings), rtol=1e-4, atol=2e-5)
    for fault in FAULTS:
        assert (slow_block(drafter, taps, embeddings, fault=fault) - found).abs().max() > 1e-3, fault


@torch.no_grad()
def test_yarn_reaches_the_table_and_the_softmax() -> None:
    drafter = latent_drafter(rope=YARN)
    m, m_all = 0.07 * math.log(4) + 1, 0.14 * math.log(4) + 1
    table = drafter.backbone.position_table
    torch.testing.assert_close(table.square().sum(1), torch.full((128, 2), (m / m_all) ** 2))
    assert attention_scale(LATENT, YARN) == pytest.approx(12**-0.5 * m_all**2)
    assert drafter.backbone.layers[0].self_attn.query_scale == pytest.approx(20**0.5 * 12**-0.5 * m_all**2)
    taps, embeddings = [torch.randn(9, 24), torch.randn(9, 24)], torch.randn(4, 24)
    found = served(drafter, taps, embeddings).double()
    for fault in ("no magnitude in the softmax", "magnitude once"):
        assert (slow_block(drafter, taps, embeddings, fault=fault) - found).abs().max() > 1e-3
    plain = latent_drafter(rope=YARN)
    plain.backbone.position_table = plain.backbone.position_table * (m_all / m)  # as if the table had no factor
    assert (served(plain, taps, embeddings) - found).abs().max() > 1e-4


@pytest.mark.parametrize(
    ("changes", "magnitude"),
    [
        ({"mscale_all_dim": None}, 1.0),
        ({"mscale_all_dim": 0.0}, 1.0),
        ({"factor": 1.0}, 1.0),
        ({"kind": "linear"}, 1.0),
        ({"mscale_all_dim": 1.0, "factor": 32.0}, 0.1 * math.log(32) + 1),
    ],
)
def test_the_softmax_is_scaled_only_where_yarn_says_so(changes: dict[str, Any], magnitude: float) -> None:
    settings = {"theta": 5e4, "kind": "yarn", "factor": 4.0, "mscale_all_dim": 1.0} | changes
    assert attention_scale(LATENT, RopeSettings(**settings)) == pytest.approx(12**-0.5 * magnitude**2)


# --- the cached row ---


@torch.no_grad()
def test_one_row_per_position_is_cached_for_all_heads() -> None:
    drafter = latent_drafter()
    assert drafter.backbone.cache_shape == (1, 20)
    assert drafter.backbone.position_table.shape == (128, 2, 2)
    features, positions = torch.randn(2, 5, 24), torch.arange(5).expand(2, 5)
    for k, v in drafter.backbone.context_kv(features, positions):
        assert k.shape == (2, 5, 1, 20) and torch.equal(k, v)
    # Position 0 turns nothing; elsewhere only the last channels know where they are.
    (here, _), *_ = drafter.backbone.context_kv(features, positions)
    (origin, _), *_ = drafter.backbone.context_kv(features, torch.zeros_like(positions))
    assert torch.equal(here[..., :16], origin[..., :16]) and torch.equal(here[:, 0], origin[:, 0])
    assert (here[:, 1:, :, 16:] - origin[:, 1:, :, 16:]).abs().amax(-1).min() > 1e-3


@torch.no_grad()
def test_context_written_piece_by_piece_equals_a_recomputation() -> None:
    drafter = latent_drafter(has_tap_norm=True)
    drafter.prepare_for_serving("row_invariant")
    taps, embeddings = [torch.randn(20, 24), torch.randn(20, 24)], torch.randn(4, 24)
    whole = served(drafter, taps, embeddings)
    for cuts in ([1, 2, 3], [7, 8], [13]):
        assert torch.equal(served(drafter, taps, embeddings, cuts), whole)
    assert not torch.equal(served(drafter, [tap[:-1] for tap in taps], embeddings), whole)


@torch.no_grad()
def test_row_invariant_products_agree_with_plain_ones_and_know_no_neighbours() -> None:
    drafter = latent_drafter()
    attention = drafter.backbone.layers[0].self_attn
    q, mixed = torch.randn(3, 5, 4, 8), torch.randn(3, 5, 4, 16)
    plain = attention.kv_b_proj.absorb_key(q), attention.kv_b_proj.expand_value(mixed)
    drafter.prepare_for_serving("row_invariant")
    fixed = attention.kv_b_proj.absorb_key(q), attention.kv_b_proj.expand_value(mixed)
    for one, other in zip(plain, fixed, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    assert torch.equal(attention.kv_b_proj.absorb_key(q[1:2, 2:3]), fixed[0][1:2, 2:3])
    assert torch.equal(attention.kv_b_proj.expand_value(mixed[1:2, 2:3]), fixed[1][1:2, 2:3])


def test_an_empty_drafter_has_a_table_for_the_turned_channels() -> None:
    contract = dspark_contract(latent=LATENT, is_neox_style=False, rope=YARN, **UNUSED)
    drafter = empty_drafter(contract, torch.bfloat16, torch.device("cpu"))
    assert contract.rotary_size == 4 and dspark_contract().rotary_size == 8
    assert isinstance(drafter, DSparkDrafter)
    assert torch.equal(drafter.backbone.position_table, latent_drafter(rope=YARN).backbone.position_table)


@torch.no_grad()
def test_16_bit_rows_stay_16_bit_and_close() -> None:
    exact, rounded = latent_drafter(rope=YARN), latent_drafter(rope=YARN).to(torch.bfloat16)
    rounded.backbone.position_table = exact.backbone.position_table
    taps, embeddings = [torch.randn(30, 24), torch.randn(30, 24)], torch.randn(4, 24)
    assert rounded.backbone.context_kv(torch.randn(3, 24).bfloat16(), torch.arange(3))[0][0].dtype == torch.bfloat16
    found = served(rounded, taps, embeddings.bfloat16())
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), served(exact, taps, embeddings), rtol=0.05, atol=0.1)
