from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.slow_target_distribution import (
    Case,
    Wishes,
    bits,
    cases,
    settings_of,
    slow_processed,
    slow_rules,
)

from paceline.errors import ShapeError
from paceline.ops import target_distribution
from paceline.ops.target_distribution import TargetLogits, effective_temperature, process_logits, target_logits
from paceline.ops.token_rules import RuledLogits, apply_token_rules


def process(
    logits: torch.Tensor,
    *,
    temperature: float | list[float] = 1.0,
    top_k: int | list[int] = 0,
    top_p: float | list[float] = 1.0,
    min_p: float | list[float] = 0.0,
    **flags: Any,
) -> torch.Tensor:
    num_rows = logits.shape[0]

    def column(value: Any) -> torch.Tensor:
        return torch.tensor(value if isinstance(value, list) else [value] * num_rows)

    return process_logits(
        logits,
        temperature_R=column(temperature),
        top_k_R=column(top_k),
        top_p_R=column(top_p),
        min_p_R=column(min_p),
        **flags,
    )


def slow_kept_ids(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> tuple[set[int], bool]:
    """The stages in plain Python; the second result says whether some mass is too close to 1 - p to call."""
    z = [value / temperature for value in logits]
    alive = set(range(len(z)))
    if min_p > 0:
        alive = {v for v in alive if z[v] >= max(z) + math.log(min_p)}
    if 0 < top_k < len(z):
        ranked = sorted((z[v] if v in alive else -math.inf for v in range(len(z))), reverse=True)
        alive = {v for v in alive if z[v] >= ranked[top_k - 1]}
    too_close = False
    if top_p < 1:
        highest = max(z)
        total = sum(math.exp(z[v] - highest) for v in alive)
        dropped_mass = 0.0
        for v in sorted(alive, key=lambda v: (z[v], -v))[:-1]:
            dropped_mass += math.exp(z[v] - highest) / total
            too_close = too_close or abs(dropped_mass - (1 - top_p)) < 1e-5
            if dropped_mass > 1 - top_p:
                break
            alive.discard(v)
    return alive, too_close


grid = st.integers(-24, 24).map(lambda step: step / 4)  # a coarse grid makes ties common


@settings(max_examples=300, deadline=None)
@given(
    logits=st.lists(grid, min_size=2, max_size=40),
    temperature=st.sampled_from([0.25, 0.5, 1.0, 2.0]),  # exact divisions keep min-p comparisons exact as well
    top_k=st.integers(0, 45),
    top_p=st.floats(0.0, 1.0),
    min_p=st.sampled_from([0.0, 0.03, 0.2, 0.7]),
)
def test_agrees_with_a_slow_formula(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    kept, too_close = slow_kept_ids(logits, temperature, top_k, top_p, min_p)
    if too_close:
        return
    processed = process(torch.tensor([logits]), temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    assert set(processed[0].isfinite().nonzero().squeeze(1).tolist()) == kept
    for token in kept:
        assert processed[0, token].item() == logits[token] / temperature


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    spread=st.sampled_from([0.0, 0.05, 1.0, 6.0]),
    is_tied=st.booleans(),
    top_k=st.sampled_from([0, 3, 300, 5000]),
)
def test_guessed_nucleus_equals_the_sorted_one(seed: int, spread: float, is_tied: bool, top_k: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(6, 6000, generator=generator) * spread
    logits = (logits * 2).round() / 2 if is_tied else logits
    top_p_R = torch.tensor([0.0, 0.1, 0.5, 0.9, 0.999, 1.0])
    z = process(logits, top_k=top_k)
    log_sum_R = torch.logsumexp(z, -1)
    sorted_way = target_distribution._apply_top_p_sorted(z, top_p_R, log_sum_R)
    assert torch.equal(process(logits, top_k=top_k, top_p=top_p_R.tolist()), sorted_way)


def test_a_peaked_row_needs_no_full_sort(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> torch.Tensor:
        raise AssertionError("sorted a whole vocabulary")

    monkeypatch.setattr(target_distribution, "_apply_top_p_sorted", refuse)
    logits = torch.randn(4, 5000, generator=torch.Generator().manual_seed(0)) * 4
    assert (process(logits, top_p=0.95).isfinite().sum(-1) < 256).all()
    assert (process(torch.zeros(1, 5000).index_fill(1, torch.arange(900), 6.0), top_p=0.5).isfinite().sum() > 256).all()
    with pytest.raises(AssertionError, match="sorted a whole"):
        process(torch.zeros(1, 5000), top_p=0.95)


def test_worked_nucleus() -> None:
    p = torch.tensor([[0.5, 0.3, 0.15, 0.05]])
    kept = process(p.log(), top_p=0.9).softmax(-1)
    assert kept[0].tolist() == pytest.approx([10 / 19, 6 / 19, 3 / 19, 0.0])


def test_ties_stay_at_top_k_and_the_lowest_ids_stay_at_top_p() -> None:
    logits = torch.tensor([[1.0, 2.0, 1.0, 1.0, 0.0]])
    assert process(logits, top_k=2).isfinite().tolist() == [[True, True, True, True, False]]
    assert process(torch.zeros(1, 4), top_p=0.5).isfinite().tolist() == [[True, True, False, False]]
    assert process(torch.zeros(1, 4), top_p=0.0).isfinite().tolist() == [[True, False, False, False]]


def test_greedy_rows_come_back_raw_beside_sampled_ones() -> None:
    logits = torch.randn(3, 9, generator=torch.Generator().manual_seed(1)).bfloat16()
    settings_of_rows: dict[str, Any] = {"temperature": [0.0, 0.7, 9e-6], "top_k": 2, "top_p": 0.5, "min_p": 0.5}
    processed = process(logits, **settings_of_rows)
    assert processed.dtype is torch.float32
    assert torch.equal(processed[[0, 2]], logits[[0, 2]].float())
    assert not processed[1].isfinite().all()


def test_an_all_greedy_batch_costs_nothing() -> None:
    logits = torch.randn(3, 9).bfloat16()
    assert process(logits, temperature=0.0, all_greedy=True) is logits


def test_flags_that_skip_stages_change_nothing() -> None:
    logits = torch.randn(4, 700, generator=torch.Generator().manual_seed(2)) * 3
    only_top_k: dict[str, Any] = {"temperature": 0.8, "top_k": [0, 1, 5, 40]}
    expected = process(logits, **only_top_k)
    assert torch.equal(process(logits, **only_top_k, max_top_k=40, any_top_p=False, any_min_p=False), expected)
    assert torch.equal(process(logits, temperature=0.8, max_top_k=0), logits / 0.8)


def test_rows_do_not_see_their_neighbours() -> None:
    logits = torch.randn(8, 900, generator=torch.Generator().manual_seed(3)) * 2
    rows: dict[str, Any] = {
        "temperature": [0.0, 0.5, 1.0, 1.5, 0.3, 1.0, 1.0, 2.0],
        "top_k": [0, 4, 0, 900, 50, 0, 1, 0],
        "top_p": [0.5, 1.0, 0.9, 0.99, 0.5, 0.0, 0.8, 0.9999],
        "min_p": [0.1, 0.0, 0.0, 0.05, 0.0, 0.2, 0.0, 0.0],
    }
    together = process(logits, **rows)
    order = [5, 2, 7, 0, 1, 6, 3, 4]
    shuffled = process(logits[order], **{name: [values[i] for i in order] for name, values in rows.items()})
    assert torch.equal(together[order], shuffled)
    for row in range(8):
        alone = process(logits[row : row + 1], **{name: values[row] for name, values in rows.items()})
        assert torch.equal(together[row], alone[0])


@pytest.mark.parametrize(
    ("asked", "acted_on"), [(0.0, 0.0), (9e-6, 0.0), (1e-5, 0.01), (0.005, 0.01), (0.01, 0.01), (1.3, 1.3)]
)
def test_temperature_clamps(asked: float, acted_on: float) -> None:
    assert effective_temperature(asked) == acted_on
    logits = torch.tensor([[1e4, -1e4, 3.0]])
    divisor = acted_on if acted_on > 0 else 1.0
    assert process(logits, temperature=asked)[0].tolist() == pytest.approx((logits[0] / divisor).tolist())
    assert process(logits, temperature=asked).softmax(-1).isfinite().all()


@pytest.mark.parametrize("vocab_size", [6, 600])
def test_bad_values_stay_visible_and_leave_the_neighbour_alone(vocab_size: int) -> None:
    logits = torch.randn(4, vocab_size, generator=torch.Generator().manual_seed(4))
    clean = process(logits, temperature=0.9, top_k=3, top_p=0.9, min_p=0.01)
    logits[0, 2] = math.nan
    logits[1] = math.nan
    logits[2] = -math.inf
    processed = process(logits, temperature=0.9, top_k=3, top_p=0.9, min_p=0.01)
    assert processed[0].isnan().any() and processed[1].isnan().all()
    assert not processed[2].isfinite().any()
    assert torch.equal(processed[3], clean[3])


def test_settings_need_one_entry_per_row() -> None:
    with pytest.raises(ShapeError, match=r"top_p has shape \[2\], expected \[3\]"):
        process(torch.zeros(3, 5), top_p=[0.5, 0.5])


def compose(case: Case, *, fills_all: bool = False, **options: Any) -> TargetLogits:
    rules = case.rules(fills_all=fills_all)
    return target_logits(case.logits, case.drafts, case.anchor_position, rules, **settings_of(case.requests), **options)


@settings(max_examples=80)
@given(case=cases())
def test_the_whole_chain_agrees_with_the_slow_one_to_the_bit(case: Case) -> None:
    raw, processed = compose(case)
    for b, wishes in enumerate(case.requests):
        for row in range(case.logits.shape[1]):
            slow_raw, ruled = slow_rules(case.logits[b, row].tolist(), row, case.drafts[b].tolist(), wishes)
            wanted, too_close = slow_processed(ruled, wishes)
            assert raw[b, row].tolist() == slow_raw
            assert too_close or processed[b, row].tolist() == wanted


@given(case=cases(is_exact=False, has_faults=True))
def test_neutral_stages_neighbours_and_chunks_change_no_bit(case: Case) -> None:
    together = compose(case)
    for other in (compose(case, fills_all=True), compose(case, max_chunk_bytes=1)):
        assert torch.equal(bits(other.raw_BLV), bits(together.raw_BLV))
        assert torch.equal(bits(other.processed_BLV), bits(together.processed_BLV))
    for index in range(len(case.requests)):
        alone = compose(case.part([index]))
        assert torch.equal(bits(alone.processed_BLV[0]), bits(together.processed_BLV[index]))


@given(case=cases(is_exact=False))
def test_flags_of_the_batch_change_no_bit(case: Case) -> None:
    sampled = [wishes for wishes in case.requests if wishes.temperature > 0]
    flags = {
        "max_top_k": max((wishes.top_k for wishes in sampled), default=0),
        "any_top_p": any(wishes.top_p < 1 for wishes in sampled),
        "any_min_p": any(wishes.min_p > 0 for wishes in sampled),
        "all_greedy": not sampled,
    }
    assert torch.equal(bits(compose(case, **flags).processed_BLV), bits(compose(case).processed_BLV))


def test_greedy_rows_obey_rules_and_nothing_else() -> None:
    wishes = Wishes(allowed=frozenset({1, 2, 3}), bias={1: 5.0}, top_k=1, top_p=0.1, min_p=0.9)
    case = Case(torch.zeros(2, 1, 5), torch.empty(2, 0, dtype=torch.int64), (wishes, Wishes(temperature=1.0, top_k=1)))
    processed = compose(case).processed_BLV
    assert processed[0, 0].tolist() == [-math.inf, 5.0, 0.0, 0.0, -math.inf]
    alone = case.part([0])
    assert torch.equal(compose(alone, all_greedy=True).processed_BLV[0], processed[0])
    assert torch.equal(compose(alone, all_greedy=True, max_chunk_bytes=1).processed_BLV[0], processed[0])


def test_a_batch_that_asks_for_nothing_costs_nothing() -> None:
    logits = torch.randn(2, 3, 9).bfloat16()
    case = Case(logits, torch.zeros(2, 2, dtype=torch.int64), (Wishes(), Wishes()))
    raw, processed = compose(case, all_greedy=True, max_chunk_bytes=1)
    assert raw is logits and processed is logits


@pytest.mark.parametrize("temperature", [0.0, 1e-6, 1e-5, 0.01])
def test_extreme_logits_and_temperatures_stay_numbers(temperature: float) -> None:
    wishes = Wishes(
        output=(0, 1), bias={0: 100.0}, repetition=1.9, frequency=2.0, presence=-2.0, temperature=temperature, min_p=0.1
    )
    logits = torch.tensor([[[1e4, -1e4, 1e4, 3.0]]])
    processed = compose(Case(logits, torch.empty(1, 0, dtype=torch.int64), (wishes,))).processed_BLV[0, 0]
    assert not processed.isnan().any()
    assert processed.softmax(-1).tolist() == pytest.approx([0.0, 0.0, 1.0, 0.0])


def test_rows_with_nothing_left_or_broken_stay_recognisable() -> None:
    empty = Wishes(allowed=frozenset(), temperature=0.7, top_k=3, top_p=0.5, min_p=0.1, repetition=1.5)
    sound = Wishes(temperature=0.7, top_k=3, top_p=0.5, min_p=0.1)
    logits = torch.randn(4, 2, 400, generator=torch.Generator().manual_seed(5))
    logits[1, 0, 7], logits[2, 1, 3] = math.nan, math.inf
    case = Case(logits, torch.zeros(4, 1, dtype=torch.int64), (empty, sound, sound, sound))
    processed = compose(case).processed_BLV
    assert (processed[0] == -math.inf).all()
    assert processed[1, 0].isnan().any() and processed[2, 1, 3] == math.inf
    for b, row in ((1, 1), (2, 0), (3, 0), (3, 1)):
        assert processed[b, row].amax().isfinite()
    assert torch.equal(processed[3], compose(case.part([3])).processed_BLV[0])


def test_a_guard_that_makes_nan_finite_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def guarded(*arguments: Any, **options: Any) -> RuledLogits:
        return RuledLogits(*(logits.nan_to_num(neginf=-1e30) for logits in apply_token_rules(*arguments, **options)))

    monkeypatch.setattr(target_distribution, "apply_token_rules", guarded)
    with pytest.raises(AssertionError):
        test_rows_with_nothing_left_or_broken_stay_recognisable()


def everything(vocab_size: int, temperature: float) -> Case:
    """Three requests that use every stage, with a hole among the drafts."""
    logits = torch.randn(3, 4, vocab_size, generator=torch.Generator().manual_seed(6)) * 3
    wishes = Wishes(
        prompt=(3, 4),
        output=(5, 6),
        grammar=(None, frozenset(range(1, vocab_size))),
        allowed=frozenset(range(vocab_size - 1)),
        bias={2: 1.5},
        stop_ids=(0, 1),
        min_tokens=4,
        repetition=1.3,
        frequency=0.4,
        presence=0.2,
        bad_words=((7,), (6, 8), (5, 6, 9)),
        temperature=temperature,
        top_k=40,
        top_p=0.9,
        min_p=0.01,
    )
    return Case(logits, torch.tensor([[8, 6, 8], [6, -1, -1], [-1, -1, -1]]), (wishes, wishes, wishes))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_no_tensor_value_is_read_on_the_host(temperature: float) -> None:
    """Tensors without data can take every step that a captured CUDA graph can."""
    case = everything(500, temperature)

    def without_data(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.to("meta")
        return type(value)(*map(without_data, value)) if isinstance(value, tuple) else value

    arguments = (case.logits, case.drafts, case.anchor_position, case.rules())
    settings_B = {name: setting.to("meta") for name, setting in settings_of(case.requests).items()}
    for options in ({}, {"max_chunk_bytes": 1}, {"all_greedy": True}):
        raw, processed = target_logits(*map(without_data, arguments), **settings_B, **options)
        assert raw.shape == processed.shape == (3, 4, 500)
        assert processed.dtype is torch.float32


@pytest.mark.gpu
def test_a_captured_graph_follows_its_inputs() -> None:
    device = torch.device("cuda")

    def on_device(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.to(device)
        return type(value)(*map(on_device, value)) if isinstance(value, tuple) else value

    first, second = everything(4999, 0.8), everything(4999, 1.3)
    second = Case(second.logits.flip(2), second.drafts.flip(0), second.requests)
    held, fresh = (
        (on_device(case.logits), on_device(case.drafts), on_device(case.anchor_position), on_device(case.rules()))
        for case in (first, second)
    )
    held_settings, fresh_settings = (
        {name: on_device(value) for name, value in settings_of(case.requests).items()} for case in (first, second)
    )

    def run() -> TargetLogits:
        return target_logits(*held, **held_settings)

    replay = captured(run)
    held[0].copy_(fresh[0])
    held[1].copy_(fresh[1])
    for name, setting in held_settings.items():
        setting.copy_(fresh_settings[name])
    wanted = target_logits(*fresh, **fresh_settings)
    for found, eager in zip(replay(), wanted, strict=True):
        assert torch.equal(bits(found), bits(eager))
    on_cpu = compose(second).processed_BLV
    assert (wanted.processed_BLV.cpu().isfinite() == on_cpu.isfinite()).float().mean() > 0.999


def captured(run: Callable[[], TargetLogits]) -> Callable[[], TargetLogits]:
    """Capture a body; its replay returns what the capture returned."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = run()

    def replay() -> TargetLogits:
        graph.replay()
        return output

    return replay


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("B", "L", "V"), [(4, 1, 33), (5, 3, 70)])
def test_the_kernel_divides_to_the_bit_as_the_reference_does(
    kernel_device: torch.device, B: int, L: int, V: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target_distribution, "_TILE", 32)
    logits = (torch.randn(B, L, V) * 9).to(dtype)
    logits[0, 0, :3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    temperature = torch.tensor([0.7, 0.0, 1e-6, 0.003, 1.3])[:B]
    expected = target_distribution.temper_logits_reference(logits, temperature)
    found = target_distribution.temper_logits_triton(logits.to(kernel_device), temperature.to(kernel_device)).cpu()
    assert found.dtype == torch.float32 and torch.equal(found.nan_to_num(77.0), expected.nan_to_num(77.0))
    assert torch.equal(expected[1], logits[1].float())
