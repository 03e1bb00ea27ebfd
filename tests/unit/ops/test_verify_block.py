from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.errors import ShapeError
from paceline.ops import noise
from paceline.ops import verify_block as module
from paceline.ops.sample_tokens import sample_tokens
from paceline.ops.verify_block import (
    VerifiedBlock,
    accepts_draft,
    candidate_residual,
    one_hot_residual,
    residual_log_weights,
    verify_block,
)

P = torch.tensor([[0.5, 0.3, 0.15, 0.05]], dtype=torch.float64)
Q = torch.tensor([[0.25, 0.25, 0.4, 0.1]], dtype=torch.float64)
NEVER = -math.inf


def verify(
    drafts: list[list[int]],
    processed: torch.Tensor,
    *,
    temperature: float | list[float] = 1.0,
    seed: list[int] | None = None,
    position: list[int] | None = None,
    step: list[int] | None = None,
    **options: Any,
) -> VerifiedBlock:
    num_requests = len(drafts)
    temperatures = temperature if isinstance(temperature, list) else [temperature] * num_requests
    return verify_block(
        torch.tensor(drafts, dtype=torch.long).view(num_requests, -1),
        processed,
        temperature_B=torch.tensor(temperatures),
        seed_B=torch.tensor(seed or [11 * i for i in range(num_requests)]),
        anchor_position_B=torch.tensor(position or [100 + i for i in range(num_requests)]),
        step_B=torch.tensor(step or [0] * num_requests),
        **options,
    )


def random_rows(num_requests: int, num_rows: int, vocab_size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_requests, num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 2


def normalised(log_weights: torch.Tensor) -> list[float]:
    return log_weights.softmax(-1).flatten().tolist()


# Worked numbers


def test_worked_residual_of_a_distribution() -> None:
    log_weights = residual_log_weights(P.log(), Q.log())
    assert log_weights.flatten().tolist() == pytest.approx([-1.386294, -2.995732, NEVER, NEVER], abs=1e-6)
    assert normalised(log_weights) == pytest.approx([5 / 6, 1 / 6, 0, 0])
    nucleus = torch.tensor([[10 / 19, 6 / 19, 3 / 19, 0.0]], dtype=torch.float64)
    assert normalised(residual_log_weights(nucleus.log(), Q.log())) == pytest.approx([21 / 26, 5 / 26, 0, 0])


def test_worked_acceptance_is_the_ratio() -> None:
    for p, expected in ((P[0], (1, 1, 3 / 8, 1 / 2)), (torch.tensor([10, 6, 3, 0]).double() / 19, (1, 1, 15 / 38, 0))):
        for log_p, log_q, probability in zip(p.log(), Q[0].log(), expected, strict=True):
            uniforms = (torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000
            share = accepts_draft(log_p, log_q, uniforms.log()).double().mean().item()
            assert share == pytest.approx(probability, abs=1e-4)


@pytest.mark.parametrize(
    ("draft", "residual"),
    [
        (0, (0, 3 / 5, 3 / 10, 1 / 10)),
        (1, (5 / 7, 0, 3 / 14, 1 / 14)),
        (2, (10 / 17, 6 / 17, 0, 1 / 17)),
        (3, (10 / 19, 6 / 19, 3 / 19, 0)),
    ],
)
def test_worked_point_mass(draft: int, residual: tuple[float, ...]) -> None:
    assert normalised(one_hot_residual(P.log(), torch.tensor([draft]))) == pytest.approx(residual)


def test_worked_q_on_two_of_four_tokens() -> None:
    """p on four tokens, q on tokens 0 and 2 alone; the second of them drafted, and then both as often as q says."""
    p, q = torch.tensor([[0.5, 0.2, 0.2, 0.1]]), torch.tensor([[0.25, 0.75]])
    candidates = torch.tensor([[0, 2]])
    uniforms = (torch.arange(30_000) + 0.5) / 30_000
    share = accepts_draft(p[0, 2].log(), q[0, 1].log(), uniforms.log()).double().mean().item()
    assert share == pytest.approx(0.266667, abs=1e-4)
    residual = normalised(candidate_residual(p.log(), candidates, q.log()))
    assert residual == pytest.approx([0.454545, 0.363636, 0, 0.181818], abs=1e-6)

    num_requests = 100_000
    drafts = torch.where(torch.arange(num_requests) % 4 == 0, 0, 2)
    found = verify(
        drafts.unsqueeze(1).tolist(),
        p.log().expand(num_requests, 2, 4),
        seed=list(range(num_requests)),
        candidate_ids_BKC=candidates.expand(num_requests, 1, 2),
        log_q_BKC=q.log().expand(num_requests, 1, 2),
    )
    is_kept = found.accepted_B == 1
    assert is_kept[drafts == 2].double().mean().item() == pytest.approx(0.266667, abs=0.007)
    assert is_kept.double().mean().item() == pytest.approx(0.45, abs=0.007)
    emitted = torch.where(is_kept, drafts, found.bonus_ids_B)
    assert (emitted.bincount(minlength=4) / num_requests).tolist() == pytest.approx(p[0].tolist(), abs=0.007)


@given(data=st.data(), vocab_size=st.integers(2, 6))
def test_acceptance_and_residual_add_up_to_the_target(data: st.DataObject, vocab_size: int) -> None:
    weights = st.lists(st.integers(0, 9), min_size=vocab_size, max_size=vocab_size).filter(any)
    p, q = (torch.tensor(data.draw(weights), dtype=torch.float64) for _ in range(2))
    p, q = p / p.sum(), q / q.sum()
    kept = torch.minimum(p, q)
    residual = residual_log_weights(p.log(), q.log()).exp()
    assert torch.allclose(kept + residual, p, atol=1e-12)
    assert residual.sum().item() == pytest.approx(1 - kept.sum().item(), abs=1e-12)


def test_all_drafts_of_a_chain_enumerated_give_the_target_joint() -> None:
    """Two drafts, three symbols: every draft pair, every outcome, against the exact joint of three tokens."""
    p = torch.tensor([[0.4, 0.4, 0.2], [0.1, 0.3, 0.6], [0.4, 0.5, 0.1], [0.5, 0.3, 0.2]], dtype=torch.float64)
    q = torch.tensor([[0.1, 0.2, 0.7], [0.2, 0.4, 0.4], [0.3, 0.4, 0.3], [0.6, 0.2, 0.2]], dtype=torch.float64)
    start = 3
    residual = residual_log_weights(p.log(), q.log()).softmax(-1)
    keep = (p / q).clamp(max=1)
    joint, num_kept = torch.zeros(3, 3, 3, dtype=torch.float64), 0.0
    for x in range(3):
        drawn = q[start, x]
        joint += (drawn * (1 - keep[start, x])) * residual[start][:, None, None] * p[:3, :, None] * p[None, :3, :]
        for y in range(3):
            both = drawn * keep[start, x] * q[x, y]
            joint[x] += both * (1 - keep[x, y]) * residual[x][:, None] * p[:3]
            joint[x, y] += both * keep[x, y] * p[y]
            num_kept += (both * (1 + keep[x, y])).item()
    exact = p[start][:, None, None] * p[:3, :, None] * p[None, :3, :]
    assert torch.allclose(joint, exact, atol=1e-14)
    assert num_kept == pytest.approx(1.47)


# Edges of the formulas


def test_impossible_tokens_are_refused_even_at_u_zero() -> None:
    zero = torch.tensor(0.0)
    assert not accepts_draft(torch.tensor(NEVER), zero, torch.tensor(NEVER))  # p = 0, u = 0
    assert not accepts_draft(torch.tensor(NEVER), torch.tensor(NEVER), torch.tensor(-1.0))  # p = q = 0
    assert not accepts_draft(torch.tensor(-1.0), torch.tensor(NEVER), torch.tensor(-1.0))  # q = 0
    assert accepts_draft(torch.tensor(-50.0), zero, torch.tensor(NEVER))


def test_residual_edges() -> None:
    log_p = torch.tensor([NEVER, NEVER, -1.0, -1.0, -1.0])
    log_q = torch.tensor([NEVER, -1.0, NEVER, -1.0, -1.0000001])
    weights = residual_log_weights(log_p, log_q)
    assert weights[:4].tolist() == [NEVER, NEVER, -1.0, NEVER]
    assert weights[4].item() == pytest.approx(-1.0 + math.log(1.1920929e-07), abs=1e-5)
    assert not weights.isnan().any()


def test_an_empty_residual_falls_back_to_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_log_acceptance_uniforms", lambda *_: torch.zeros(40_000, 1))  # u = 1 refuses all
    log_p = torch.tensor([0.1, 0.2, 0.3, 0.4]).log()
    rows = log_p.expand(40_000, 2, 4)
    ids = torch.arange(4).expand(40_000, 1, 4)
    verdict = verify([[1]] * 40_000, rows, candidate_ids_BKC=ids, log_q_BKC=log_p.log_softmax(-1).expand(40_000, 1, 4))
    assert verdict.accepted_B.sum().item() == 0
    shares = torch.bincount(verdict.bonus_ids_B, minlength=4) / 40_000
    assert shares.tolist() == pytest.approx([0.1, 0.2, 0.3, 0.4], abs=0.015)
    certain = torch.tensor([NEVER, NEVER, 5.0, NEVER]).expand(40_000, 2, 4)
    assert set(verify([[2]] * 40_000, certain).bonus_ids_B.tolist()) == {2}


def test_a_draft_without_q_is_refused_and_counted() -> None:
    rows = random_rows(3, 3, 6)
    ids = torch.tensor([[0, 1], [2, 3]]).expand(3, 2, 2)
    log_q = torch.full((3, 2, 2), math.log(0.5))
    log_q[2, 0, 1] = math.nan
    verdict = verify(
        [[5, 2], [5, 5], [1, 2]], rows, candidate_ids_BKC=ids, log_q_BKC=log_q, temperature=[1.0, 0.0, 1.0]
    )
    assert verdict.num_zero_q_B.tolist() == [1, 0, 1]  # a greedy request has no use for q
    assert verdict.accepted_B[[0, 2]].tolist() == [0, 0]


# Greedy


def plain_greedy(table: torch.Tensor, token: int, num_tokens: int) -> list[int]:
    tokens = []
    for _ in range(num_tokens):
        token = int(table[token].argmax())
        tokens.append(token)
    return tokens


@given(data=st.data(), seed=st.integers(0, 999), num_drafts=st.integers(0, 5), all_greedy=st.booleans())
def test_any_draft_leaves_greedy_output_unchanged(
    data: st.DataObject, seed: int, num_drafts: int, all_greedy: bool
) -> None:
    # Rounded to whole numbers in a small vocabulary: ties everywhere.
    table = (torch.randn(5, 5, generator=torch.Generator().manual_seed(seed)) * 2).round().bfloat16()
    token, tokens = 0, []
    while len(tokens) < 12:
        guess = plain_greedy(table, token, num_drafts)
        wrong = data.draw(st.lists(st.integers(-1, 4), min_size=num_drafts, max_size=num_drafts))
        is_right = data.draw(st.lists(st.booleans(), min_size=num_drafts, max_size=num_drafts))
        drafts = [g if right else w for g, w, right in zip(guess, wrong, is_right, strict=True)]
        rows = table[[token, *(max(d, 0) for d in drafts)]].unsqueeze(0)
        verdict = verify([drafts], rows, temperature=0.0, all_greedy=all_greedy)
        accepted = int(verdict.accepted_B)
        tokens += [*drafts[:accepted], int(verdict.bonus_ids_B)]
        token = tokens[-1]
    assert tokens == plain_greedy(table, 0, len(tokens))


def test_a_single_draft_is_judged_too() -> None:
    """A shifted comparison would leave draft 0 unchecked: accepted always at one draft a step."""
    rows = random_rows(4000, 2, 50)
    drafts = torch.randint(0, 50, (4000, 1), generator=torch.Generator().manual_seed(9))
    accepted = verify(drafts.tolist(), rows, temperature=0.0).accepted_B
    assert torch.equal(accepted, drafts.eq(rows.argmax(-1)[:, :1]).long().squeeze(1))
    assert accepted.float().mean().item() == pytest.approx(1 / 50, abs=0.01)


# Blocks and batches


def test_placeholders_stop_the_block_with_the_plain_draw_of_that_position() -> None:
    rows = random_rows(6, 4, 30)
    drafts = [[-1, 3, 3]] * 3 + [[-1, -1, -1]] * 3
    seed, position, temperature = [1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 12], [1.0, 0.0, 1.0, 1.0, 0.0, 1.0]
    verdict = verify(drafts, rows, seed=seed, position=position, temperature=temperature)
    plain = sample_tokens(
        rows[:, 0],
        temperature_R=torch.tensor(temperature),
        seed_R=torch.tensor(seed),
        position_R=torch.tensor(position),
    )
    assert verdict.accepted_B.tolist() == [0] * 6
    assert torch.equal(verdict.bonus_ids_B, plain)
    no_drafts = verify([[]] * 6, rows[:, :1], seed=seed, position=position, temperature=temperature)
    assert torch.equal(no_drafts.bonus_ids_B, plain)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_shorter_block_uses_its_own_bonus_row(temperature: float) -> None:
    certain = torch.full((1, 4, 8), -50.0)
    for row, token in enumerate([3, 5, 6, 7]):
        certain[0, row, token] = 50.0
    assert verify([[3, -1, -1]], certain, temperature=temperature).bonus_ids_B.tolist() == [5]
    full = verify([[3, 5, 6]], certain, temperature=temperature)
    assert (full.accepted_B.tolist(), full.bonus_ids_B.tolist()) == ([3], [7])
    refused = verify([[3, 4, 6]], certain, temperature=temperature)
    assert (refused.accepted_B.tolist(), refused.bonus_ids_B.tolist()) == ([1], [5])


def full_q_case(num_requests: int = 8) -> tuple[list[list[int]], dict[str, Any]]:
    generator = torch.Generator().manual_seed(3)
    ids = torch.stack([torch.randperm(20, generator=generator)[:6] for _ in range(num_requests * 3)]).view(-1, 3, 6)
    log_q = torch.randn(num_requests, 3, 6, generator=generator).log_softmax(-1)
    drafts = ids.gather(2, torch.randint(0, 6, (num_requests, 3, 1), generator=generator)).squeeze(2)
    return drafts.tolist(), {"candidate_ids_BKC": ids, "log_q_BKC": log_q}


def as_rows(verdict: VerifiedBlock) -> list[tuple[int, int, bool, int]]:
    columns = (verdict.accepted_B, verdict.bonus_ids_B, verdict.bad_B, verdict.num_zero_q_B)
    return list(zip(*(column.tolist() for column in columns), strict=True))


@pytest.mark.parametrize("is_full_q", [False, True])
def test_a_request_does_not_see_its_batch(is_full_q: bool) -> None:
    drafts, q = full_q_case()
    q = q if is_full_q else {}
    rows = random_rows(8, 4, 20) / 4
    if not is_full_q:  # lift the drafts, so that some are kept
        rows[:, :3] = rows[:, :3].scatter_add(2, torch.tensor(drafts).unsqueeze(2), torch.full((8, 3, 1), 3.0))
    keys = {
        "seed": [5, 5, -7, 2**62, 0, 1, 2, 3],
        "position": [0, 1, 2, 3, 500, 600, 70000, 8],
        "step": [0, 1, 2, 3, 4, 5, 6, 7],
        "temperature": [0.0, 1.0, 0.7, 0.0, 1.0, 1.0, 2.0, 1.0],
    }
    together = as_rows(verify(drafts, rows, **keys, **q))
    assert len({accepted for accepted, *_ in together}) > 1
    order = [6, 1, 3, 0, 7, 5, 2, 4]
    shuffled = verify(
        [drafts[i] for i in order],
        rows[order],
        **{name: [values[i] for i in order] for name, values in keys.items()},
        **{name: value[order] for name, value in q.items()},
    )
    assert as_rows(shuffled) == [together[i] for i in order]
    for i in range(8):
        one = slice(i, i + 1)
        alone = verify(
            drafts[one],
            rows[one],
            **{name: values[one] for name, values in keys.items()},
            **{name: value[one] for name, value in q.items()},
        )
        assert as_rows(alone) == [together[i]]


def test_the_seed_matters_when_sampling_and_only_then() -> None:
    rows = torch.zeros(3, 4, 1000)
    sampled = as_rows(verify([[1, 2, 3]] * 3, rows, seed=[1, 1, 2], position=[50] * 3))
    assert sampled[0] == sampled[1] != sampled[2]
    greedy = as_rows(verify([[1, 2, 3]] * 3, rows, seed=[1, 1, 2], position=[50] * 3, temperature=0.0))
    assert greedy[0] == greedy[1] == greedy[2]


def test_order_and_padding_of_candidates_do_not_matter() -> None:
    drafts, q = full_q_case(64)
    rows = random_rows(64, 4, 20) / 4
    expected = as_rows(verify(drafts, rows, **q))
    ids, log_q = q["candidate_ids_BKC"], q["log_q_BKC"]
    order = [4, 2, 0, 5, 1, 3]
    assert as_rows(verify(drafts, rows, candidate_ids_BKC=ids[..., order], log_q_BKC=log_q[..., order])) == expected
    padding = torch.full((64, 3, 2), -1)
    padded_ids = torch.cat([padding, ids, padding], dim=-1)
    padded_log_q = torch.cat([padding * math.inf, log_q, padding * math.inf], dim=-1)
    assert as_rows(verify(drafts, rows, candidate_ids_BKC=padded_ids, log_q_BKC=padded_log_q)) == expected
    dense_ids = torch.arange(20).expand(64, 3, 20)
    dense_log_q = torch.full((64, 3, 20), NEVER).scatter(2, ids, log_q)
    assert as_rows(verify(drafts, rows, candidate_ids_BKC=dense_ids, log_q_BKC=dense_log_q)) == expected


def test_padding_cannot_undo_a_real_candidate_zero() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    log_q = torch.tensor([[0.6, 0.4, 0.0, 0.0]]).log()
    weights = candidate_residual(logits, torch.tensor([[0, 1, -1, -1]]), log_q)
    assert normalised(weights) == pytest.approx([0, 0, 0.75, 0.25], abs=1e-6)


def test_one_hot_as_a_single_candidate_is_the_same_verdict() -> None:
    rows = random_rows(500, 4, 12) / 2
    drafts = torch.randint(0, 12, (500, 3), generator=torch.Generator().manual_seed(1))
    one_hot = as_rows(verify(drafts.tolist(), rows))
    single = verify(drafts.tolist(), rows, candidate_ids_BKC=drafts.unsqueeze(2), log_q_BKC=torch.zeros(500, 3, 1))
    assert as_rows(single) == one_hot


# Numbers that are none


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("is_full_q", [False, True])
def test_a_bad_row_is_flagged_where_it_is_reached(temperature: float, value: float, is_full_q: bool) -> None:
    certain = torch.full((4, 4, 8), -60.0)
    for row, token in enumerate([3, 5, 6, 7]):
        certain[:, row, token] = 60.0
    drafts = [[3, 5, 6], [3, 5, 6], [3, 4, 6], [3, 5, 6]]
    ids = torch.tensor(drafts).unsqueeze(2)
    q = {"candidate_ids_BKC": ids, "log_q_BKC": torch.zeros(4, 3, 1)} if is_full_q else {}
    certain[0, 1, 5] = value  # the very token that is drafted there
    certain[1, 3, 0] = value  # the bonus row
    certain[2, 2, 0] = value  # behind a refusal: nobody asked this row
    for all_greedy in {False, temperature == 0.0}:
        verdict = verify(drafts, certain, temperature=temperature, all_greedy=all_greedy, **q)
        assert verdict.accepted_B.tolist() == [1, 3, 1, 3]
        assert verdict.bad_B.tolist() == [True, True, False, False]
        assert verdict.bonus_ids_B.tolist() == [-1, -1, 5, 7]


def test_a_row_without_any_token_is_bad() -> None:
    rows = random_rows(2, 2, 6)
    rows[0, 0] = NEVER
    verdict = verify([[0], [0]], rows)
    assert verdict.bad_B.tolist() == [True, False]
    assert verdict.accepted_B[0].item() == 0 and verdict.bonus_ids_B[0].item() == -1


# What a CUDA graph needs, and what a caller may get wrong


class NoHostReads(TorchDispatchMode):
    """Refuses every operation whose result shape or Python value depends on tensor values."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        for word in ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal", "is_nonzero"):
            if name.startswith(f"aten::{word}"):
                raise AssertionError(f"{name} reads tensor values on the host")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("is_full_q", [False, True])
@pytest.mark.parametrize("all_greedy", [False, True])
def test_nothing_is_read_on_the_host(is_full_q: bool, all_greedy: bool) -> None:
    drafts, q = full_q_case()
    draft_ids, rows = torch.tensor(drafts), random_rows(8, 4, 20)
    ones = torch.ones(8, dtype=torch.long)
    keys = {"temperature_B": torch.ones(8), "seed_B": ones, "anchor_position_B": ones, "step_B": ones}
    with NoHostReads():
        verify_block(draft_ids, rows, **keys, all_greedy=all_greedy, **(q if is_full_q else {}))
        sample_tokens(
            rows[:, 0], temperature_R=torch.ones(8), seed_R=ones, position_R=ones, step_R=ones, domain=noise.DRAFT
        )
        with pytest.raises(AssertionError, match="on the host"):
            bool(ones[0])


def test_shapes_are_checked() -> None:
    with pytest.raises(ShapeError, match=r"processed logits has shape \[1, 2, 6\], expected \[1, 3, V\]"):
        verify([[0, 1]], random_rows(1, 2, 6))
    q = {"candidate_ids_BKC": torch.zeros(1, 3, 2, dtype=torch.long), "log_q_BKC": torch.zeros(1, 3, 2)}
    with pytest.raises(ShapeError, match=r"candidate_ids has shape \[1, 3, 2\], expected \[1, 2, C\]"):
        verify([[0, 1]], random_rows(1, 3, 6), **q)
    with pytest.raises(ShapeError, match=r"log_q has shape \[1, 2, 1\], expected \[1, 2, 2\]"):
        verify(
            [[0, 1]],
            random_rows(1, 3, 6),
            candidate_ids_BKC=q["candidate_ids_BKC"][:, :2],
            log_q_BKC=torch.zeros(1, 2, 1),
        )
    with pytest.raises(ValueError, match="log_q was given without candidate_ids"):
        verify([[0, 1]], random_rows(1, 3, 6), log_q_BKC=torch.zeros(1, 2, 1))
