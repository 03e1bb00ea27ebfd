from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.errors import ShapeError
from paceline.ops import acceptance, noise, token_rules
from paceline.ops.acceptance import accepts_draft, candidate_residual
from paceline.ops.sample_tokens import sample_tokens
from paceline.ops.target_distribution import process_logits
from paceline.ops.verify_block import VERIFY_METHODS, VerifiedBlock, VerifyMethod, _log_p_of_drafts, verify_block

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


# Edges of the formulas


def test_an_empty_residual_falls_back_to_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptance, "log_acceptance_uniforms", lambda *_: torch.zeros(40_000, 1))  # u = 1 refuses all
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


@pytest.mark.parametrize("method", VERIFY_METHODS)
@pytest.mark.parametrize("is_full_q", [False, True])
def test_a_request_does_not_see_its_batch(is_full_q: bool, method: VerifyMethod) -> None:
    drafts, q = full_q_case()
    q = {**(q if is_full_q else {}), "method": method}
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
        **{name: value[order] if isinstance(value, Tensor) else value for name, value in q.items()},
    )
    assert as_rows(shuffled) == [together[i] for i in order]
    for i in range(8):
        one = slice(i, i + 1)
        alone = verify(
            drafts[one],
            rows[one],
            **{name: values[one] for name, values in keys.items()},
            **{name: value[one] if isinstance(value, Tensor) else value for name, value in q.items()},
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


def test_one_hot_as_a_single_candidate_is_the_same_verdict() -> None:
    rows = random_rows(500, 4, 12) / 2
    drafts = torch.randint(0, 12, (500, 3), generator=torch.Generator().manual_seed(1))
    one_hot = as_rows(verify(drafts.tolist(), rows))
    single = verify(drafts.tolist(), rows, candidate_ids_BKC=drafts.unsqueeze(2), log_q_BKC=torch.zeros(500, 3, 1))
    assert as_rows(single) == one_hot


# Numbers that are none


@pytest.mark.parametrize("method", VERIFY_METHODS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("is_full_q", [False, True])
def test_a_bad_row_is_flagged_where_it_is_reached(
    temperature: float, value: float, is_full_q: bool, method: VerifyMethod
) -> None:
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
        verdict = verify(drafts, certain, temperature=temperature, all_greedy=all_greedy, method=method, **q)
        assert verdict.accepted_B.tolist() == [1, 3, 1, 3]
        assert verdict.fault_B.tolist() == [1, 1, 0, 0]
        assert verdict.bad_B.tolist() == [True, True, False, False]
        assert verdict.bonus_ids_B.tolist() == [-1, -1, 5, 7]


@pytest.mark.parametrize("method", VERIFY_METHODS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_any_token_is_bad(method: VerifyMethod, temperature: float) -> None:
    rows = random_rows(3, 2, 6)
    clean = verify([[0]] * 3, rows, method=method, temperature=temperature)
    rows[0, 0] = NEVER
    rows[1, 1] = NEVER
    rows[1, 0, 0] = 60.0
    verdict = verify([[0]] * 3, rows, method=method, temperature=temperature)
    assert verdict.fault_B.tolist() == [2, 2, 0] and verdict.bad_B.tolist() == [True, True, False]
    assert verdict.accepted_B.tolist()[:2] == [0, 1] and verdict.bonus_ids_B.tolist()[:2] == [-1, -1]
    assert as_rows(verdict)[2] == as_rows(clean)[2]
    # The guard that hides this: with a large negative number in place of -inf, forbidden tokens come out.
    hidden = verify([[0]] * 3, rows.nan_to_num(neginf=-1e30), method=method, temperature=temperature)
    assert hidden.fault_B.tolist() == [0, 0, 0] and (hidden.bonus_ids_B >= 0).all()


@pytest.mark.parametrize("method", VERIFY_METHODS)
def test_extreme_logits_and_temperatures_are_sound(method: VerifyMethod) -> None:
    logits = torch.tensor([1e4, -1e4, 9999.0, 0.0]).repeat(3, 2, 1)
    temperature = torch.tensor([1e-6, 1e-4, 1.0])
    processed = process_logits(
        logits.flatten(0, 1),
        temperature_R=temperature.repeat_interleave(2),
        top_k_R=torch.zeros(6, dtype=torch.long),
        top_p_R=torch.ones(6),
        min_p_R=torch.zeros(6),
    ).view(3, 2, 4)
    verdict = verify([[0], [1], [3]], processed, temperature=temperature.tolist(), method=method)
    assert verdict.fault_B.tolist() == [0, 0, 0]
    assert verdict.accepted_B.tolist() == [1, 0, 0] and set(verdict.bonus_ids_B.tolist()) <= {0, 2}


# Methods


@pytest.mark.parametrize("is_full_q", [False, True])
def test_a_single_draft_is_judged_alike_by_block_and_standard(is_full_q: bool) -> None:
    drafts, q = full_q_case(400)
    q = {name: value[:, :1] for name, value in q.items()} if is_full_q else {}
    rows, first = random_rows(400, 2, 20) / 4, [row[:1] for row in drafts]
    standard = as_rows(verify(first, rows, **q))
    assert as_rows(verify(first, rows, method="block", **q)) == standard
    assert {accepted for accepted, *_ in standard} == {0, 1}


def test_methods_that_judge_by_equality_give_the_rows_own_draws() -> None:
    rows, temperature, seed = random_rows(60, 4, 12), [0.0, 1.0, 1.0] * 20, list(range(60))
    keys: dict[str, Any] = {"temperature_R": torch.tensor(temperature), "seed_R": torch.tensor(seed)}
    own = [sample_tokens(rows[:, i], position_R=torch.full((60,), 7 + i), **keys) for i in range(4)]
    drafts = torch.stack(own[:3], dim=1)
    drafts[::4, 1] = (drafts[::4, 1] + 1) % 12
    drafts[1::4, 2] = -1
    expected = [1, 2, 3, 3] * 15
    _, q = full_q_case(60)
    for method in ("match", "coupled"):
        for proposal in ({}, q):  # q is not looked at
            found = verify(
                drafts.tolist(), rows, temperature=temperature, seed=seed, position=[7] * 60, method=method, **proposal
            )
            assert found.accepted_B.tolist() == expected and found.num_zero_q_B.sum() == 0
            assert found.bonus_ids_B.tolist() == [own[n][b].item() for b, n in enumerate(expected)]


def test_a_draft_without_q_ends_a_block_and_is_counted() -> None:
    """In a block, too: nothing behind it revives it."""
    rows = torch.zeros(200, 4, 6)
    ids, log_q = torch.tensor([0, 1]).expand(200, 3, 2), torch.full((200, 3, 2), math.log(0.5))
    verdict = verify([[0, 5, 1]] * 200, rows, candidate_ids_BKC=ids, log_q_BKC=log_q, method="block")
    assert verdict.num_zero_q_B.tolist() == [1] * 200 and verdict.accepted_B.max() <= 1


@pytest.mark.parametrize("method", ["standard", "block"])
def test_u_zero_keeps_nothing_that_the_target_forbids(method: VerifyMethod, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptance, "log_acceptance_uniforms", lambda *_: torch.full((2, 2), NEVER))
    rows = torch.zeros(2, 3, 4)
    rows[0, 0, 1] = rows[1, 1, 2] = NEVER
    q = {"candidate_ids_BKC": torch.tensor([[[1], [2]]] * 2), "log_q_BKC": torch.zeros(2, 2, 1)}
    for proposal in ({}, q):
        assert verify([[1, 2]] * 2, rows, method=method, **proposal).accepted_B.tolist() == [0, 1]


@pytest.mark.parametrize("method", ["standard", "block"])
def test_drafts_whose_p_equals_q_leave_no_stray_tokens(method: VerifyMethod) -> None:
    """A million requests, q bitwise p or an ulp beside it; token 0 is impossible, and no empty residual may give it."""
    num_requests = 1_000_000
    log_p = torch.tensor([0.0, 0.2, 0.3, 0.5]).log().log_softmax(-1)
    drafts = torch.arange(num_requests).remainder(3).add(1).unsqueeze(1)
    ids = torch.arange(4).expand(num_requests, 1, 4)
    for log_q in (log_p, log_p + torch.tensor([0.0, 1.2e-7, -1.2e-7, 1.2e-7])):
        verdict = verify_block(
            drafts,
            log_p.expand(num_requests, 2, 4),
            temperature_B=torch.ones(num_requests),
            seed_B=torch.arange(num_requests),
            anchor_position_B=torch.full((num_requests,), 9),
            step_B=torch.zeros(num_requests, dtype=torch.long),
            candidate_ids_BKC=ids,
            log_q_BKC=log_q.expand(num_requests, 1, 4),
            method=method,
        )
        assert verdict.bonus_ids_B.min() > 0
        assert num_requests - verdict.accepted_B.sum() < 20


# What a CUDA graph needs, and what a caller may get wrong


class NoHostReads(TorchDispatchMode):
    """Refuses every operation whose result shape or Python value depends on tensor values."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        for word in ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal", "is_nonzero"):
            if name.startswith(f"aten::{word}"):
                raise AssertionError(f"{name} reads tensor values on the host")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("method", VERIFY_METHODS)
@pytest.mark.parametrize("is_full_q", [False, True])
def test_nothing_is_read_on_the_host(is_full_q: bool, method: VerifyMethod) -> None:
    drafts, q = full_q_case()
    draft_ids, rows = torch.tensor(drafts), random_rows(8, 4, 20)
    ones = torch.ones(8, dtype=torch.long)
    keys = {"temperature_B": torch.ones(8), "seed_B": ones, "anchor_position_B": ones, "step_B": ones}
    with NoHostReads():
        for all_greedy in (False, True):
            verify_block(draft_ids, rows, **keys, all_greedy=all_greedy, method=method, **(q if is_full_q else {}))
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


@pytest.mark.parametrize("num_drafts", [1, 2, 5])
def test_requests_in_chunks_are_judged_as_all_together(num_drafts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(num_drafts)
    logits = 4 * torch.randn(6, num_drafts + 1, 700, generator=generator)
    draft_ids = torch.randint(0, 700, (6, num_drafts), generator=generator)
    options = {
        "temperature_B": torch.ones(6),
        "seed_B": torch.arange(6),
        "anchor_position_B": torch.arange(6) + 9,
        "step_B": torch.zeros(6, dtype=torch.int64),
    }
    together = verify_block(draft_ids, logits, **options)
    log_p = _log_p_of_drafts(draft_ids, logits[:, :-1])
    monkeypatch.setattr(token_rules, "_CPU_CHUNK_BYTES", 1)
    assert torch.equal(_log_p_of_drafts(draft_ids, logits[:, :-1]), log_p)
    alone = verify_block(draft_ids, logits, **options)
    assert torch.equal(alone.accepted_B, together.accepted_B)
    assert torch.equal(alone.bonus_ids_B, together.bonus_ids_B)
