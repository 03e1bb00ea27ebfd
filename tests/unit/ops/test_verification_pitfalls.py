"""Silent faults of verification, planted at the level of operations; `docs/pitfalls.md` has all of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline.engine.slots import SlotState
from paceline.ops import acceptance, noise, target_distribution
from paceline.ops.acceptance import accepts_draft
from paceline.ops.sample_tokens import sample_tokens
from paceline.ops.target_distribution import process_logits
from paceline.ops.verify_block import VerifiedBlock, verify_block

P = torch.tensor([0.5, 0.3, 0.15, 0.05])
GRID = torch.linspace(0, 1, 100_001)[1:-1].log()  # ln u


def judged(log_q_BKC: torch.Tensor, candidate_ids_BKC: torch.Tensor, drafts_BK: torch.Tensor) -> VerifiedBlock:
    size = drafts_BK.shape[0]
    return verify_block(
        drafts_BK,
        P.log().expand(size, 2, 4),
        temperature_B=torch.ones(size),
        seed_B=torch.arange(size),
        anchor_position_B=torch.full((size,), 9),
        step_B=torch.zeros(size, dtype=torch.int64),
        candidate_ids_BKC=candidate_ids_BKC,
        log_q_BKC=log_q_BKC,
    )


def test_p1_q_of_another_row_is_refused_where_it_says_impossible() -> None:
    """Drafts from (.2, .2, .5, .1), told as (.5, .5, 0, 0): sound code refuses two tokens, .32 are accepted; code that
    takes q = 0 for "always" accepts .92 instead of .60."""
    drawn, told = torch.tensor([0.2, 0.2, 0.5, 0.1]), torch.tensor([0.5, 0.5, 0.0, 0.0])

    def acceptance(q: torch.Tensor, accepts: Any) -> float:
        shares = [accepts(P.log()[x], q.log()[x], GRID).float().mean() for x in range(4)]
        return float((drawn * torch.stack(shares)).sum())

    assert acceptance(drawn, accepts_draft) == pytest.approx(0.60, abs=1e-4)
    assert acceptance(told, accepts_draft) == pytest.approx(0.32, abs=1e-4)
    assert acceptance(told, lambda log_p, log_q, log_u: log_p > log_u + log_q) == pytest.approx(0.92, abs=1e-4)


def test_p2_a_distribution_that_nobody_wrote_accepts_nothing() -> None:
    """A slot begins with no candidates; one that began with zeros would call every draft certain to be drawn."""
    state = SlotState(1, num_draft_tokens=1, num_candidates=4, device=torch.device("cpu"))
    drafts = torch.full((4000, 1), 3)

    def verdict() -> VerifiedBlock:
        return judged(state.log_q[:1].expand(4000, 1, 4), state.candidate_ids[:1].expand(4000, 1, 4), drafts)

    assert verdict().accepted_B.sum() == 0 and verdict().num_zero_q_B.sum() == 4000
    state.log_q.fill_(-torch.tensor(151_936.0).log())
    state.candidate_ids.copy_(torch.arange(4).expand_as(state.candidate_ids))
    assert verdict().accepted_B.sum() == 4000 and verdict().num_zero_q_B.sum() == 0, "p = .05, yet all are kept"


def test_p18_extreme_logits_at_extreme_temperatures_stay_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.tensor([[1e4, -1e4, 9999.0, 0.0]]).expand(4, 4)
    temperature = torch.tensor([0.0, 1e-6, 1.1e-5, 0.009])
    settings = {"top_k_R": torch.zeros(4).long(), "top_p_R": torch.ones(4), "min_p_R": torch.zeros(4)}

    def drawn() -> list[int]:
        processed = process_logits(logits, temperature_R=temperature, **settings)
        keys = {"seed_R": torch.arange(4), "position_R": torch.arange(4)}
        return sample_tokens(processed, temperature_R=temperature, **keys).tolist()

    assert drawn() == [0] * 4
    monkeypatch.setattr(target_distribution, "LOWEST_TEMPERATURE", 1e-43)
    temperature[2:] = 1.1e-5
    logits = logits * 1e30
    assert drawn() != [0] * 4, "without the clamp a division overflows"


def test_p19_p_equal_to_q_up_to_one_unit_never_falls_to_token_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """u is 1, so that every draft is refused although p and q are equal, or a unit in the last place apart."""
    p = torch.tensor([1e-6, 0.3, 0.4, 0.299999])
    size = 30_000
    units = torch.tensor([0, 1, -1])[torch.arange(size) % 3].view(size, 1, 1) * torch.finfo(torch.float32).eps
    log_q = p.log() * (1 + units)
    monkeypatch.setattr(acceptance, "log_acceptance_uniforms", lambda *_: torch.full((size, 1), 1e-6))

    def num_zeros() -> int:
        options: dict[str, Any] = {"temperature_B": torch.ones(size), "seed_B": torch.arange(size)}
        verdict = verify_block(
            torch.full((size, 1), 2),
            p.log().expand(size, 2, 4),
            anchor_position_B=torch.full((size,), 9),
            step_B=torch.zeros(size, dtype=torch.int64),
            candidate_ids_BKC=torch.arange(4).expand(size, 1, 4),
            log_q_BKC=log_q,
            **options,
        )
        assert verdict.accepted_B.sum() == 0 and (verdict.bonus_ids_B >= 0).all()
        return int((verdict.bonus_ids_B == 0).sum())

    assert num_zeros() < 5
    residual = acceptance.candidate_residual
    monkeypatch.setattr(acceptance, "candidate_residual", lambda *row: residual(*row).clamp(min=-1e30))
    assert num_zeros() > 5000, "a floor in place of -inf makes the lowest id win"


def test_p20_a_uniform_of_zero_accepts_nothing_impossible(monkeypatch: pytest.MonkeyPatch) -> None:
    """p of the draft is 0, and u is stubbed to 0."""
    rows = torch.tensor([0.0, 0.5, 0.5, 0.0]).log().expand(8, 2, 4)
    monkeypatch.setattr(acceptance, "log_acceptance_uniforms", lambda *_: torch.full((8, 1), -torch.inf))
    options: dict[str, Any] = {
        "temperature_B": torch.ones(8),
        "seed_B": torch.arange(8),
        "anchor_position_B": torch.zeros(8).long(),
        "step_B": torch.zeros(8).long(),
    }
    assert verify_block(torch.zeros(8, 1).long(), rows, **options).accepted_B.sum() == 0
    monkeypatch.setattr(acceptance, "accepts_draft", lambda log_p, log_q, log_u: log_p >= log_u + log_q)
    assert verify_block(torch.zeros(8, 1).long(), rows, **options).accepted_B.sum() == 8


def test_p21_a_token_seventeen_nats_down_can_win() -> None:
    """The extreme words of the hash decide what can ever be drawn."""
    words = torch.tensor([0, 1, 2**16, 2**31, 2**32 - 1])
    assert noise.gumbel_from_hash(words).max() > 22.8 and noise.gumbel_from_hash(words).isfinite().all()

    def naive(word: torch.Tensor) -> torch.Tensor:
        return -torch.log(-torch.log(noise.uniform_from_hash(word)))

    assert naive(words).max() < 16.7


def test_p24_ids_that_no_drafter_can_propose_are_still_said() -> None:
    """A third of p lies above the drafter's vocabulary of two ids."""
    p = torch.tensor([0.4, 0.26, 0.3, 0.04])
    size = 30_000
    drafts = torch.randint(0, 2, (size, 1), generator=torch.Generator().manual_seed(1))
    options: dict[str, Any] = {
        "temperature_B": torch.ones(size),
        "seed_B": torch.arange(size),
        "anchor_position_B": torch.full((size,), 9),
        "step_B": torch.zeros(size, dtype=torch.int64),
        "candidate_ids_BKC": torch.arange(2).expand(size, 1, 2),
        "log_q_BKC": torch.full((size, 1, 2), 0.5).log(),
    }

    def shares(rows: torch.Tensor) -> list[float]:
        verdict = verify_block(drafts, rows.log().expand(size, 2, len(rows)), **options)
        first = torch.where(verdict.accepted_B > 0, drafts[:, 0], verdict.bonus_ids_B)
        return (torch.bincount(first, minlength=4) / size).tolist()

    assert shares(p) == pytest.approx(p.tolist(), abs=0.012)
    assert shares(p[:2])[2:] == [0.0, 0.0], "clipped to the smaller vocabulary"


def test_p42_the_faults_that_raise_acceptance_are_found_by_their_output(monkeypatch: pytest.MonkeyPatch) -> None:
    size, q = 20_000, torch.tensor([0.25, 0.25, 0.4, 0.1])
    drafts = torch.multinomial(q, size, replacement=True, generator=torch.Generator().manual_seed(4)).unsqueeze(1)

    def acceptance_and_distance() -> tuple[float, float]:
        verdict = judged(q.log().expand(size, 1, 4), torch.arange(4).expand(size, 1, 4), drafts)
        first = torch.where(verdict.accepted_B > 0, drafts[:, 0], verdict.bonus_ids_B)
        share = torch.bincount(first, minlength=4) / size
        return float(verdict.accepted_B.float().mean()), float((share - P).abs().sum()) / 2

    accepted, distance = acceptance_and_distance()
    assert accepted == pytest.approx(0.7, abs=0.015) and distance < 0.015
    monkeypatch.setattr(acceptance, "accepts_draft", lambda log_p, log_q, log_u: log_p > log_u + log_q - 0.5)
    accepted, distance = acceptance_and_distance()
    assert accepted > 0.75 and distance > 0.03, "faster, and wrong"
