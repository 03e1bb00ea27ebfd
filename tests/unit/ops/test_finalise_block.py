"""The verdict from statistics, in torch and as a kernel, against verification over whole rows.

Verdicts are compared for equality. The two sides round logarithms differently, so a weight that ties with another to
1e-5 might fall the other way; none of these fixed seeds has such a tie.
"""

from __future__ import annotations

import pytest
import torch
from tests.unit.ops.blocks import Block, odd_block
from tests.unit.ops.conftest import Version
from torch import Tensor

from paceline.ops import acceptance, stop_row, verify_block, vocab_statistics
from paceline.ops import finalise_block as module
from paceline.ops.acceptance import CandidateRows, VerifyMethod, candidate_rows, reads_q
from paceline.ops.finalise_block import Verdict, finalise_block_reference, finalise_block_triton
from paceline.ops.verify_block import (
    VerifiedBlock,
    verify_block_reference,
    verify_block_triton,
    verify_greedily_native,
    verify_greedily_reference,
    verify_greedily_triton,
)
from paceline.ops.vocab_statistics import vocab_statistics_reference

METHODS: tuple[VerifyMethod, ...] = ("standard", "block", "match")
SHAPES = [(4, 2, 41, 5), (2, 0, 16, 3), (3, 3, 33, 1), (2, 1, 7, 7)]


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocab_statistics, "TILE", 16)
    monkeypatch.setattr(stop_row, "MASS_TILE", 16)
    monkeypatch.setattr(stop_row, "NOISE_TILE", 8)


def proposal(block: Block, is_full_q: bool) -> tuple[Tensor | None, Tensor | None]:
    return (block.candidate_ids, block.log_q) if is_full_q else (None, None)


def by_reference(block: Block, is_full_q: bool, method: VerifyMethod) -> list[list[int]]:
    return as_lists(
        verify_block_reference(block.drafts, block.logits, *proposal(block, is_full_q), *block.settings, method)
    )


def by_statistics(block: Block, is_full_q: bool, method: VerifyMethod) -> list[list[int]]:
    candidates = candidate_rows(block.drafts, *proposal(block, is_full_q))
    if not reads_q(method):
        candidates = CandidateRows(candidates.ids_BKC[..., :0], candidates.log_q_BKC[..., :0])
    tiles = vocab_statistics_reference(block.logits, candidates.ids_BKC, *block.settings[:3])
    return as_lists(finalise_block_reference(tiles, block.drafts, block.logits, candidates, *block.settings, method))


def as_lists(verdict: VerifiedBlock | Verdict) -> list[list[int]]:
    columns = (verdict.accepted_B, verdict.bonus_ids_B, verdict.fault_B, verdict.num_zero_q_B)
    return torch.stack([column.cpu() for column in columns], dim=1).tolist()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("is_full_q", [True, False])
def test_statistics_decide_as_whole_rows_do(method: VerifyMethod, is_full_q: bool) -> None:
    seen = set()
    for seed in range(6):
        for B, K, V, C in ((50, 3, 41, 5), (50, 1, 16, 16), (20, 0, 9, 2)):
            block = odd_block(B, K, V, C, seed=seed)
            found = by_statistics(block, is_full_q, method)
            assert found == by_reference(block, is_full_q, method)
            seen |= {(accepted, fault) for accepted, _, fault, _ in found}
    assert {(0, 0), (1, 0), (3, 0), (0, 1), (0, 2)} <= seen


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize(
    ("method", "is_full_q"),
    [("standard", True), ("standard", False), ("block", True), ("block", False), ("match", True)],
)
@pytest.mark.parametrize(("B", "K", "V", "C"), SHAPES)
def test_the_kernels_decide_as_the_reference_does(
    kernel_device: torch.device, B: int, K: int, V: int, C: int, method: VerifyMethod, is_full_q: bool, is_tied: bool
) -> None:
    block = odd_block(B, K, V, C, seed=V + K, is_tied=is_tied, has_faults=is_tied)
    there = block.on(kernel_device)
    found = verify_block_triton(there.drafts, there.logits, *proposal(there, is_full_q), *there.settings, method)
    assert as_lists(found) == by_reference(block, is_full_q, method)


@pytest.mark.parametrize("is_tempered", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_full_q", [False, True])
@pytest.mark.parametrize(("B", "K", "V", "C"), SHAPES)
def test_noise_of_the_stop_rows_alone_decides_as_the_reference_does(
    kernel_device: torch.device,
    B: int,
    K: int,
    V: int,
    C: int,
    is_full_q: bool,
    dtype: torch.dtype,
    is_tempered: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(verify_block, "_MANY_ROWS", 0)
    block = odd_block(B, K, V, C, seed=V + K + 1, is_tied=is_tempered, has_faults=is_tempered)
    block = block._replace(logits=block.logits.to(dtype))
    there = block.on(kernel_device)
    q = proposal(block, is_full_q)
    expected = verify_block_reference(block.drafts, block.logits, *q, *block.settings, "standard", is_tempered)
    q = proposal(there, is_full_q)
    found = verify_block_triton(there.drafts, there.logits, *q, *there.settings, "standard", is_tempered)
    assert as_lists(found) == as_lists(expected)


@pytest.mark.parametrize("method", METHODS)
def test_logits_are_divided_where_they_are_read(
    kernel_device: torch.device, method: VerifyMethod, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: what is divided twice, or not at all, decides otherwise. These requests are tried, and every fifth."""
    monkeypatch.setattr(verify_block, "_MANY_ROWS", 0)  # as with all 30
    block = odd_block(30, 3, 33, 5, seed=5)
    block = block._replace(temperature=torch.linspace(0.0, 2.0, 30))
    expected, undivided = (
        as_lists(
            verify_block_reference(
                block.drafts, block.logits, *proposal(block, True), *block.settings, method, is_tempered
            )
        )
        for is_tempered in (False, True)
    )
    changed = [b for b in range(30) if expected[b] != undivided[b]]
    assert changed
    chosen = sorted({*changed, *range(0, 30, 5)})
    there = block.of(chosen).on(kernel_device)
    found = {
        is_tempered: as_lists(
            verify_block_triton(
                there.drafts, there.logits, *proposal(there, True), *there.settings, method, is_tempered
            )
        )
        for is_tempered in (False, True)
    }
    assert found[False] == [expected[b] for b in chosen] and found[True] == [undivided[b] for b in chosen]


@pytest.mark.parametrize("method", METHODS)
def test_the_finishing_kernel_follows_its_own_reference(kernel_device: torch.device, method: VerifyMethod) -> None:
    block = odd_block(6, 2, 41, 5, seed=77)
    candidates = candidate_rows(block.drafts, block.candidate_ids, block.log_q)
    if not reads_q(method):
        candidates = CandidateRows(candidates.ids_BKC[..., :0], candidates.log_q_BKC[..., :0])
    tiles = vocab_statistics_reference(block.logits, candidates.ids_BKC, *block.settings[:3])
    arguments = (tiles, block.drafts, block.logits, candidates, *block.settings)
    there = [
        type(a)(*(t.to(kernel_device) for t in a)) if isinstance(a, tuple) else a.to(kernel_device) for a in arguments
    ]
    assert as_lists(finalise_block_triton(*there, method)) == as_lists(finalise_block_reference(*arguments, method))


@pytest.mark.parametrize("method", ["standard", "block"])
def test_ids_without_probability_are_left_out_by_the_kernels_themselves(
    kernel_device: torch.device, method: VerifyMethod, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify_block, "_MANY_ROWS", 0)  # as with all 48
    block = odd_block(48, 3, 12, 6, seed=11, has_faults=False)
    is_padding = block.candidate_ids < 0
    is_draft = block.candidate_ids == block.drafts.unsqueeze(2)
    is_impossible = ~is_draft & ~is_padding & (torch.arange(6) % 2 == 0)
    log_q = block.log_q.masked_fill(is_impossible, -torch.inf)
    block = block._replace(log_q=log_q)
    expected = by_reference(block, True, method)
    # as candidates they would be drawn less often, or not at all
    kept = by_reference(block._replace(log_q=log_q.masked_fill(is_impossible, 0.0)), True, method)
    changed = [b for b in range(48) if kept[b] != expected[b]]
    assert changed
    chosen = sorted({*changed, *range(0, 48, 5)})
    there = block.of(chosen).on(kernel_device)
    found = verify_block_triton(there.drafts, there.logits, *proposal(there, True), *there.settings, method)
    assert as_lists(found) == [expected[b] for b in chosen]
    # drafts without probability are counted, but for requests that do not look at it
    lost = block._replace(log_q=log_q.masked_fill(is_draft, -torch.inf)).of(chosen)
    there = lost.on(kernel_device)
    counted = as_lists(verify_block_triton(there.drafts, there.logits, *proposal(there, True), *there.settings, method))
    assert counted == by_reference(lost, True, method)
    assert {number > 0 for *_, number in counted} == {True, False}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("B", "K", "V", "C"), [*SHAPES, (3, 0, 40, 2)])
def test_greedy_versions_decide_as_one_argmax_does(
    version: Version, B: int, K: int, V: int, C: int, dtype: torch.dtype
) -> None:
    """Whatever the temperatures say: that every request is greedy is the host's word."""
    block = odd_block(B, K, V, C, seed=V, is_tied=True)
    best = block.logits.nan_to_num(0.0, posinf=9.0).argmax(-1)[:, :K]
    block = block._replace(
        logits=block.logits.to(dtype), drafts=torch.where(torch.rand(B, K) < 0.7, best, block.drafts)
    )
    there = block.on(version.device)
    expected = as_lists(verify_greedily_reference(block.drafts, block.logits, *block.settings))
    run = version.of(verify_greedily_triton, verify_greedily_native)
    assert as_lists(run(there.drafts, there.logits, *there.settings)) == expected


def test_nothing_left_of_p_falls_back_to_p(monkeypatch: pytest.MonkeyPatch, kernel_device: torch.device) -> None:
    """q is a little more than p everywhere and the draft is impossible: refused, and the residual is empty."""
    log_p = torch.tensor([0.0, 0.2, 0.3, 0.5]).log()
    block = Block(
        drafts=torch.zeros(6, 1, dtype=torch.long),
        logits=log_p.expand(6, 2, 4).contiguous(),
        candidate_ids=torch.tensor([0, 1, 2, 3]).expand(6, 1, 4).contiguous(),
        log_q=torch.tensor([0.001, 0.2003, 0.3003, 0.5003]).log().expand(6, 1, 4).contiguous(),
        temperature=torch.ones(6),
        seed=torch.arange(6) * 31,
        position=torch.arange(6),
        step=torch.zeros(6, dtype=torch.long),
    )
    there = block.on(kernel_device)
    for method in ("standard", "block"):
        expected = by_reference(block, True, method)
        assert all(accepted == 0 and bonus > 0 for accepted, bonus, *_ in expected)
        assert by_statistics(block, True, method) == expected
        found = verify_block_triton(
            there.drafts, there.logits, there.candidate_ids, there.log_q, *there.settings, method
        )
        assert as_lists(found) == expected


FAULTS: dict[str, tuple[object, str, object]] = {
    "residual from p": (module, "residual_log_weights", lambda log_p, log_q: log_p),
    "first failure": (acceptance, "count_to_last", acceptance.count_leading),
    "standard residual": (module, "count_by_ratio", lambda *arguments: _without_pi(*arguments)),
}


def test_where_q_is_most_of_p_every_part_of_the_draw_matters(
    kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few ids, nearly all of them candidates: these verdicts change with each planted fault, and the kernels' don't."""
    block = odd_block(48, 3, 6, 5, seed=3, has_faults=False)
    expected = by_reference(block, True, "block")
    assert by_statistics(block, True, "block") == expected
    chosen = {0, 1}
    for owner, name, value in FAULTS.values():
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value)
            faulty = by_statistics(block, True, "block")
        changed = [b for b in range(48) if faulty[b] != expected[b]]
        assert changed
        chosen.add(changed[0])
        chosen.add(changed[-1])
    some = block.of(sorted(chosen)).on(kernel_device)
    found = verify_block_triton(some.drafts, some.logits, some.candidate_ids, some.log_q, *some.settings, "block")
    assert as_lists(found) == [expected[b] for b in sorted(chosen)]


def _without_pi(*arguments: Tensor) -> tuple[Tensor, Tensor]:
    accepted_B, log_pi_B = acceptance.count_by_ratio(*arguments)
    return accepted_B, torch.zeros_like(log_pi_B)
