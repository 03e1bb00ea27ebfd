from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from tests.slow_target_distribution import Case, Wishes, bits, cases, slow_rules
from torch import Tensor

from paceline.errors import ShapeError
from paceline.ops import penalties, token_rules
from paceline.ops.token_rules import RuledLogits, TokenRules, apply_token_rules, request_chunks


def rule(case: Case, *, fills_all: bool = False, **options: Any) -> RuledLogits:
    return apply_token_rules(case.logits, case.drafts, case.anchor_position, case.rules(fills_all=fills_all), **options)


def one(logits: list[list[float]], drafts: list[int], wishes: Wishes) -> Case:
    return Case(torch.tensor([logits]), torch.tensor([drafts], dtype=torch.int64), (wishes,))


def expected(case: Case) -> tuple[Tensor, Tensor]:
    num_requests, num_rows, _ = case.logits.shape
    rows = [
        [slow_rules(case.logits[b, i].tolist(), i, case.drafts[b].tolist(), case.requests[b]) for i in range(num_rows)]
        for b in range(num_requests)
    ]
    raw = torch.tensor([[raw for raw, _ in request] for request in rows], dtype=torch.float64)
    return raw, torch.tensor([[ruled for _, ruled in request] for request in rows], dtype=torch.float64)


def agrees_exactly(found: Tensor, wanted: Tensor) -> bool:
    return torch.equal(found.double().nan_to_num(nan=1e300, posinf=2e300), wanted.nan_to_num(nan=1e300, posinf=2e300))


@settings(max_examples=80)
@given(case=cases(has_faults=True))
def test_agrees_with_the_slow_rules_to_the_bit(case: Case) -> None:
    before = case.logits.clone()
    ruled = rule(case)
    raw, wanted = expected(case)
    assert agrees_exactly(ruled.raw_BLV, raw)
    assert agrees_exactly(ruled.ruled_BLV, wanted)
    assert torch.equal(bits(case.logits), bits(before))


@given(case=cases(is_exact=False))
def test_agrees_with_the_slow_rules_for_any_numbers(case: Case) -> None:
    ruled = rule(case)
    _, wanted = expected(case)
    assert torch.equal(ruled.ruled_BLV.isfinite(), wanted.isfinite())
    torch.testing.assert_close(ruled.ruled_BLV.double(), wanted, rtol=1e-5, atol=1e-4)


@given(case=cases(is_exact=False, has_faults=True))
def test_neutral_values_change_no_bit(case: Case) -> None:
    skipping, neutral = rule(case), rule(case, fills_all=True)
    assert torch.equal(bits(skipping.raw_BLV), bits(neutral.raw_BLV))
    assert torch.equal(bits(skipping.ruled_BLV), bits(neutral.ruled_BLV))
    nobody = Case(case.logits, case.drafts, tuple(Wishes() for _ in case.requests))
    assert rule(nobody).ruled_BLV is case.logits
    assert torch.equal(bits(rule(nobody, fills_all=True).ruled_BLV), bits(case.logits))


@given(case=cases(is_exact=False, has_faults=True))
def test_neither_neighbours_nor_chunks_can_be_seen(case: Case) -> None:
    together = rule(case)
    order = list(reversed(range(len(case.requests))))
    shuffled = rule(case.part(order))
    in_chunks = rule(case, max_chunk_bytes=1)
    for found, wanted in zip(in_chunks, together, strict=True):
        assert torch.equal(bits(found), bits(wanted))
    assert torch.equal(bits(shuffled.ruled_BLV), bits(together.ruled_BLV[order]))
    for index in order:
        alone = rule(case.part([index]))
        assert torch.equal(bits(alone.ruled_BLV[0]), bits(together.ruled_BLV[index]))
        assert torch.equal(bits(alone.raw_BLV[0]), bits(together.raw_BLV[index]))


@given(case=cases(is_exact=False))
def test_each_row_equals_plain_decoding_after_its_drafts(case: Case) -> None:
    in_block = rule(case).ruled_BLV
    for b, wishes in enumerate(case.requests):
        for row in range(case.logits.shape[1]):
            drafts = case.drafts[b, :row].tolist()
            if -1 in drafts:
                break
            grammar = (wishes.grammar_of_row(row),) if wishes.grammar else ()
            grown = Wishes(**{**vars(wishes), "output": (*wishes.output, *drafts), "grammar": grammar})
            plain = rule(Case(case.logits[b : b + 1, row : row + 1], case.drafts[:1, :0], (grown,)))
            assert torch.equal(bits(plain.ruled_BLV[0, 0]), bits(in_block[b, row]))


def worked_case() -> Case:
    """Repetition 1.3, frequency 0.4, and token 0 drafted first; the prompt's token is out of the way."""
    logits = [[2.0, 1.0, 0.5, -1.0, -99.0]] * 2
    return one(logits, [0], Wishes(prompt=(4,), output=(4,), repetition=1.3, frequency=0.4))


def test_worked_penalties() -> None:
    ruled = rule(worked_case()).ruled_BLV[0]
    assert ruled[0, :4].tolist() == [2.0, 1.0, 0.5, -1.0]
    assert ruled[0, :4].softmax(-1).tolist() == pytest.approx([0.609460, 0.224208, 0.135989, 0.030343], abs=1e-6)
    assert ruled[1, :4].tolist() == pytest.approx([1.138462, 1.0, 0.5, -1.0], abs=1e-6)
    assert ruled[1, :4].softmax(-1).tolist() == pytest.approx([0.397356, 0.345976, 0.209845, 0.046823], abs=1e-6)


def test_worked_penalties_catch_a_missing_history(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_history(draft_ids_BK: Tensor, ids_BK: Tensor) -> Tensor:
        return torch.zeros(1, ids_BK.shape[1] + 1, ids_BK.shape[1], dtype=torch.int32)

    monkeypatch.setattr(penalties, "_counts_in_block", no_history)
    wrong = rule(worked_case()).ruled_BLV[0, 1, :4]
    assert wrong.softmax(-1).tolist() == pytest.approx([0.609460, 0.224208, 0.135989, 0.030343], abs=1e-6)
    with pytest.raises(AssertionError):
        test_worked_penalties()


def test_min_tokens_end_inside_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    # Prompt 0..2, output 3..4, anchor at 4; with five tokens wanted, stops may come from position 8 on: row 3.
    wishes = Wishes(prompt=(0, 1, 2), output=(3, 0), stop_ids=(2, 3), min_tokens=5)
    case = one([[0.0] * 5] * 5, [1, 1, 1, 1], wishes)
    is_held = [[False, False, True, True, False]] * 3 + [[False] * 5] * 2
    assert rule(case).ruled_BLV[0].isinf().tolist() == is_held

    monkeypatch.setattr(torch, "arange", lambda size, device=None: torch.zeros(size, dtype=torch.int64))
    only_once_per_step = apply_token_rules(case.logits, case.drafts, case.anchor_position, case.rules())
    assert only_once_per_step.ruled_BLV[0].isinf().tolist() != is_held


def test_bias_comes_before_the_repetition_penalty() -> None:
    wishes = Wishes(prompt=(1,), output=(0,), bias={0: 3.0, 1: -1.0}, repetition=2.0)
    assert rule(one([[1.0, 0.5, 7.0]], [], wishes)).ruled_BLV.tolist() == [[[2.0, -1.0, 7.0]]]


def test_rows_without_any_token_left_stay_so_and_leave_the_neighbour_alone() -> None:
    empty = Wishes(
        allowed=frozenset(), bias={0: 100.0}, repetition=0.5, frequency=-2.0, presence=-2.0, bad_words=((0,),)
    )
    by_grammar = Wishes(grammar=(frozenset(), frozenset({2})), bias={1: 100.0}, frequency=-2.0)
    neighbour = Wishes(output=(1,), presence=0.5)
    logits = torch.randn(3, 2, 40, generator=torch.Generator().manual_seed(1))
    case = Case(logits, torch.tensor([[0], [1], [1]]), (empty, by_grammar, neighbour))
    raw, ruled = rule(case)
    assert (ruled[0] == -math.inf).all() and (ruled[1, 0] == -math.inf).all()
    assert torch.equal(raw[0], logits[0])
    assert (raw[1, 0] == -math.inf).all()
    assert ruled[1, 1].isfinite().nonzero().tolist() == [[2]]
    assert torch.equal(ruled[2], rule(case.part([2])).ruled_BLV[0])


def test_broken_logits_do_not_hide_behind_a_mask() -> None:
    wishes = Wishes(allowed=frozenset({2}), stop_ids=(0,), min_tokens=9, bad_words=((1,),))
    ruled = rule(one([[math.nan, math.inf, 1.0], [0.0, -0.0, 1.0]], [2], wishes)).ruled_BLV[0]
    assert ruled[0].isnan().tolist() == [True, True, False]
    assert ruled[1].tolist() == [-math.inf, -math.inf, 1.0]


def test_missing_drafts_add_nothing() -> None:
    wishes = Wishes(output=(2,), repetition=3.0, frequency=1.0, presence=1.0, bad_words=((2, 0), (0, 1)))
    logits = torch.randn(1, 4, 6, generator=torch.Generator().manual_seed(2))
    ruled = rule(Case(logits, torch.tensor([[-1, -1, -1]]), (wishes,))).ruled_BLV
    for row in range(4):
        plain = rule(Case(logits[:, row : row + 1], torch.empty(1, 0, dtype=torch.int64), (wishes,)))
        assert torch.equal(ruled[:, row : row + 1], plain.ruled_BLV)


def test_half_precision_is_ruled_in_float32() -> None:
    wishes = Wishes(allowed=frozenset({0, 1}), repetition=1.3, frequency=0.4)
    logits = torch.randn(1, 3, 50, generator=torch.Generator().manual_seed(3)).bfloat16()
    half = rule(Case(logits, torch.tensor([[0, 1]]), (wishes,)))
    full = rule(Case(logits.float(), torch.tensor([[0, 1]]), (wishes,)))
    assert half.ruled_BLV.dtype is torch.float32
    assert torch.equal(half.ruled_BLV, full.ruled_BLV)


def test_chunks_hold_whole_requests() -> None:
    logits = torch.empty(7, 3, 151936, dtype=torch.bfloat16, device="meta")
    request = 4 * 3 * 151936
    assert request_chunks(logits, 2**30) == [slice(0, 2**30 // request)]
    assert request_chunks(logits, 3 * request) == [slice(0, 3), slice(3, 6), slice(6, 9)]
    assert request_chunks(logits, request - 1) == [slice(i, i + 1) for i in range(7)]
    assert request_chunks(logits[:0], 1) == [slice(0, 1)]
    assert request_chunks(torch.empty(4, 1, 2**19), 2**30) == [slice(0, 2), slice(2, 4)]  # a CPU's cache is small


def test_rules_indexed_by_their_place_in_a_chunk_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = tuple(Wishes(allowed=frozenset({token}), bad_words=((3, token),)) for token in range(3))
    case = Case(torch.zeros(3, 1, 8), torch.empty(3, 0, dtype=torch.int64), requests)
    calls: list[int] = []
    honest = token_rules._apply_to_chunk

    def counted(logits_BLV: Tensor, *arguments: Any) -> RuledLogits:
        calls.append(logits_BLV.shape[0])
        return honest(logits_BLV, *arguments)

    monkeypatch.setattr(token_rules, "_apply_to_chunk", counted)
    whole = rule(case)
    assert torch.equal(rule(case, max_chunk_bytes=1).ruled_BLV, whole.ruled_BLV)
    assert calls == [3, 1, 1, 1]
    of_requests = TokenRules.of_requests
    monkeypatch.setattr(
        TokenRules,
        "of_requests",
        lambda self, requests: of_requests(self, slice(0, requests.stop - requests.start)),
    )
    assert not torch.equal(rule(case, max_chunk_bytes=1).ruled_BLV, whole.ruled_BLV)


def test_an_empty_batch_is_fine() -> None:
    case = Case(torch.zeros(2, 2, 8), torch.zeros(2, 1, dtype=torch.int64), (Wishes(), Wishes()))
    rules = case.rules(fills_all=True).of_requests(slice(0, 0))
    ruled = apply_token_rules(case.logits[:0], case.drafts[:0], case.anchor_position[:0], rules)
    assert ruled.ruled_BLV.shape == (0, 2, 8)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("grammar_mask_BLW", torch.zeros(1, 2, 1, dtype=torch.int32), r"grammar_mask has shape \[1, 2, 1\], .*2, 2\]"),
        ("allowed_mask_BW", torch.zeros(2, 2, dtype=torch.int32), r"allowed_mask .* expected \[1, 2\]"),
        ("bias_values_BM", torch.zeros(1, 9), r"bias_values has shape \[1, 9\], expected \[1, 1\]"),
        ("held_before_B", torch.zeros(1, 1), r"held_before .* expected \[1\]"),
    ],
)
def test_rules_have_to_fit(field: str, value: Tensor, message: str) -> None:
    case = one([[0.0] * 33] * 2, [1], Wishes())
    rules = case.rules(fills_all=True)._replace(**{field: value})
    with pytest.raises(ShapeError, match=message):
        apply_token_rules(case.logits, case.drafts, case.anchor_position, rules)


def test_tensors_have_to_fit() -> None:
    case = one([[0.0] * 33] * 2, [1], Wishes())
    rules = case.rules(fills_all=True)
    with pytest.raises(ShapeError, match=r"logits has shape \[1, 1, 33\], expected \[1, 2, V\]"):
        apply_token_rules(case.logits[:, :1], case.drafts, case.anchor_position, None)
    with pytest.raises(ShapeError, match="anchor_position"):
        apply_token_rules(case.logits, case.drafts, case.anchor_position[:0], None)
    with pytest.raises(ShapeError, match=r"prompt_mask_BV .* expected \[1, 33\]"):
        assert rules.penalties is not None
        cut = rules.penalties._replace(prompt_mask_BV=rules.penalties.prompt_mask_BV[:, :4])
        apply_token_rules(case.logits, case.drafts, case.anchor_position, rules._replace(penalties=cut))
    with pytest.raises(ShapeError, match=r"words has shape \[1\], expected \[1, any, any\]"):
        assert rules.bad_words is not None
        flat = rules.bad_words._replace(words_BXM=torch.zeros(1))
        apply_token_rules(case.logits, case.drafts, case.anchor_position, rules._replace(bad_words=flat))
    with pytest.raises(ValueError, match="bias_ids_BM was given alone"):
        apply_token_rules(case.logits, case.drafts, case.anchor_position, rules._replace(bias_values_BM=None))
