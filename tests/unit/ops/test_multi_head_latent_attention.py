"""Latent attention: explicit and absorbed form against a slow float64 twin and each other, bits of rows, gradients."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from paceline.errors import ShapeError
from paceline.ops.multi_head_latent_attention import (
    absorb_queries,
    absorbed_latent_attention,
    absorbed_latent_attention_reference,
    expand_values,
    explicit_latent_attention,
    explicit_latent_attention_reference,
    split_expansion,
)

HEADS, OWN, SHARED, LATENT, VALUE = 3, 4, 2, 5, 6
WIDTH = LATENT + SHARED
SCALE = (OWN + SHARED) ** -0.5


def slow_attention(q_TNQ: Tensor, latents_SX: Tensor, weight_OR: Tensor, visible_TS: Tensor) -> Tensor:
    """One request, row, head and key at a time, in float64, from the matrix as a checkpoint stores it."""
    num_rows, num_heads = q_TNQ.shape[:2]
    heads = weight_OR.double().view(num_heads, OWN + VALUE, LATENT)
    mixed = torch.zeros(num_rows, num_heads, VALUE, dtype=torch.float64)
    for n in range(num_heads):
        keys = [
            torch.cat((heads[n, :OWN] @ row[:LATENT].double(), row[LATENT:].double())) for row in latents_SX.unbind(0)
        ]
        for t in range(num_rows):
            seen = [s for s in range(len(keys)) if visible_TS[t, s]]
            scores = [float(q_TNQ[t, n].double() @ keys[s]) / math.sqrt(OWN + SHARED) for s in seen]
            weights = [math.exp(score - max(scores)) for score in scores]
            for s, weight in zip(seen, weights, strict=True):
                mixed[t, n] += weight / sum(weights) * (heads[n, OWN:] @ latents_SX[s, :LATENT].double())
    return mixed


def random_case(num_requests: int, num_rows: int, num_keys: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [
        torch.randn(num_requests, num_rows, HEADS, OWN + SHARED).to(dtype),
        torch.randn(num_requests, num_keys, WIDTH).to(dtype),
        torch.randn(HEADS * (OWN + VALUE), LATENT).to(dtype),
    ]


def by_absorption(q: Tensor, latents: Tensor, weight: Tensor, visible: Tensor | None, mode: str = "plain") -> Tensor:
    key, value = split_expansion(weight, num_heads=HEADS, nope_size=OWN)
    absorbed = absorb_queries(q, key, mode=mode)  # type: ignore[arg-type]
    mixed = absorbed_latent_attention(
        absorbed,
        latents,
        visible=visible,
        value_size=LATENT,
        scale=SCALE,
        mode=mode,  # type: ignore[arg-type]
    )
    return expand_values(mixed, value, mode=mode)  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", ["explicit", "plain", "row_invariant"])
@pytest.mark.parametrize(("num_rows", "num_keys"), [(1, 1), (1, 9), (4, 4), (3, 7)])
def test_all_forms_agree_with_a_slow_float64_twin(mode: str, num_rows: int, num_keys: int) -> None:
    q, latents, weight = random_case(2, num_rows, num_keys)
    causal = torch.ones(num_rows, num_keys, dtype=torch.bool).tril(num_keys - num_rows)
    window = causal & causal.flip(0).flip(1) if num_rows == num_keys else causal
    for visible, given in ((causal, None), (causal, causal), (window, window[None, None])):
        if mode == "explicit":
            matrices = split_expansion(weight, num_heads=HEADS, nope_size=OWN)
            found = explicit_latent_attention(q, latents, *matrices, visible=given)
        else:
            found = by_absorption(q, latents, weight, given, mode)
        for request in range(2):
            expected = slow_attention(q[request], latents[request], weight, visible)
            torch.testing.assert_close(found[request].double(), expected, rtol=1e-4, atol=1e-5)


def test_the_references_agree_with_the_fused_forms() -> None:
    q, latents, weight = random_case(2, 3, 7)
    matrices = split_expansion(weight, num_heads=HEADS, nope_size=OWN)
    visible = torch.ones(3, 7, dtype=torch.bool).tril(4)
    expected = explicit_latent_attention_reference(q, latents, *matrices, visible)
    torch.testing.assert_close(explicit_latent_attention(q, latents, *matrices, visible=None), expected)
    absorbed = absorb_queries(q, matrices[0])
    mixed = absorbed_latent_attention_reference(absorbed, latents, visible, LATENT, SCALE)
    torch.testing.assert_close(expand_values(mixed, matrices[1]), expected)
    found = absorbed_latent_attention(absorbed, latents, visible=visible, value_size=LATENT, scale=SCALE)
    torch.testing.assert_close(found, mixed)


def test_worked_numbers() -> None:
    """Two rows, one head, one channel each of latent and shared key: scores (2 * 3 * 1 + 1 * 4) / sqrt(2) and so on."""
    q = torch.tensor([[[[3.0, 4.0]]]])
    latents = torch.tensor([[[1.0, 1.0], [2.0, -1.0]]])
    key, value = torch.tensor([[[2.0]]]), torch.tensor([[[10.0]]])
    scores = [(3 * 2 * 1 + 4 * 1) / math.sqrt(2), (3 * 2 * 2 - 4 * 1) / math.sqrt(2)]
    share = 1 / (1 + math.exp(scores[0] - scores[1]))
    expected = (1 - share) * 10 + share * 20
    found = explicit_latent_attention(q, latents, key, value, visible=None)
    assert float(found) == pytest.approx(expected, rel=1e-6)
    absorbed = absorb_queries(q, key)
    assert absorbed.flatten().tolist() == [6.0, 4.0]
    mixed = absorbed_latent_attention(absorbed, latents, visible=None, value_size=1, scale=2**-0.5)
    assert float(expand_values(mixed, value)) == pytest.approx(expected, rel=1e-6)


def test_the_scale_counts_the_shared_channels() -> None:
    """With the root of the own channels alone, or of a cached row's, the result is another one."""
    q, latents, weight = random_case(1, 2, 6)
    key, value = split_expansion(weight, num_heads=HEADS, nope_size=OWN)
    expected = explicit_latent_attention(q, latents, key, value, visible=None)
    for width in (OWN, WIDTH):
        mixed = absorbed_latent_attention(
            absorb_queries(q, key), latents, visible=None, value_size=LATENT, scale=width**-0.5
        )
        assert (expand_values(mixed, value) - expected).abs().max() > 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rows_bits_depend_on_what_it_sees_alone(dtype: torch.dtype) -> None:
    """Row-invariant: single rows, blocks and whole prompts; later rows may hold anything."""
    q, latents, weight = random_case(2, 70, 70, dtype)
    whole = by_absorption(q, latents, weight, None, "row_invariant")
    latents_of_one = latents[1:].clone()
    for row in (0, 3, 64, 69):
        seen = latents_of_one[:, : row + 1]
        alone = by_absorption(q[1:, row : row + 1], seen, weight, None, "row_invariant")
        assert torch.equal(alone[0, 0], whole[1, row])
    spoilt = latents_of_one.clone()
    spoilt[:, 67:] = torch.nan
    block = by_absorption(
        q[1:, 60:67], spoilt[:, :70], weight, torch.ones(70, 70).tril().bool()[60:67], "row_invariant"
    )
    assert torch.equal(block, whole[1:, 60:67])


def test_without_shared_channels() -> None:
    q, latents = torch.randn(1, 2, HEADS, OWN), torch.randn(1, 3, LATENT)
    weight = torch.randn(HEADS * (OWN + VALUE), LATENT)
    key, value = split_expansion(weight, num_heads=HEADS, nope_size=OWN)
    absorbed = absorb_queries(q, key)
    assert absorbed.shape[-1] == LATENT
    mixed = absorbed_latent_attention(absorbed, latents, visible=None, value_size=LATENT, scale=OWN**-0.5)
    expected = explicit_latent_attention(q, latents, key, value, visible=None)
    torch.testing.assert_close(expand_values(mixed, value), expected)


def test_gradients() -> None:
    q, latents, weight = (t.double().requires_grad_() for t in random_case(1, 2, 3))

    def explicit(q: Tensor, latents: Tensor, weight: Tensor) -> Tensor:
        matrices = split_expansion(weight, num_heads=HEADS, nope_size=OWN)
        return explicit_latent_attention(q, latents, *matrices, visible=None)

    assert torch.autograd.gradcheck(explicit, (q, latents, weight))
    assert torch.autograd.gradcheck(lambda *leaves: by_absorption(*leaves, None), (q, latents, weight))


def test_what_does_not_fit_is_refused() -> None:
    q, latents, weight = random_case(2, 1, 3)
    key, value = split_expansion(weight, num_heads=HEADS, nope_size=OWN)
    with pytest.raises(ShapeError, match=r"q has shape .*, expected \[B, T, N, 6\]"):
        explicit_latent_attention(q[..., :-1], latents, key, value, visible=None)
    with pytest.raises(ShapeError, match="q has shape"):
        absorbed_latent_attention(q, latents, visible=None, value_size=LATENT, scale=1.0)
    with pytest.raises(ShapeError, match="latents has shape"):
        explicit_latent_attention(q, latents[:1], key, value, visible=None)
