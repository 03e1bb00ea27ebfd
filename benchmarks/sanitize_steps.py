"""Cases of `sanitize` for what a step does around the layers: looking up its rows, committing, storing drafts."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from benchmarks.sanitize_comparing import Case, compared, dtypes, random
from torch import Tensor

from paceline.ops import noise
from paceline.ops.block_rows import block_rows_reference, block_rows_triton
from paceline.ops.commit_step import commit_step_reference, commit_step_triton
from paceline.ops.draft_chances import Coefficients, KnownFeatures, hold_back_drafts_reference, hold_back_drafts_triton
from paceline.ops.draw_candidates import (
    candidate_log_q_reference,
    candidate_log_q_triton,
    draw_candidates_reference,
    draw_candidates_triton,
)
from paceline.ops.finalise_block import Verdict
from paceline.ops.largest_ids import largest_ids_reference, largest_ids_triton
from paceline.ops.observe_drafts import NUM_SUMS, observe_drafts_reference, observe_drafts_triton
from paceline.ops.slot_columns import FIRST_STOP, IS_ALIVE, LIMIT, NUM_FRACTIONS, NUM_WHOLE, SlotColumns
from paceline.ops.step_rows import CacheCells, WaitingDrafts, step_rows_reference, step_rows_triton
from paceline.ops.stop_row import row_masses_reference, row_masses_triton, stop_noise_reference, stop_noise_triton
from paceline.ops.store_drafts import store_drafts_reference, store_drafts_triton
from paceline.ops.table_rows import table_rows_reference, table_rows_triton
from paceline.ops.target_distribution import temper_logits_reference, temper_logits_triton
from paceline.ops.top_k_tokens import top_k_tokens_reference, top_k_tokens_triton

_EXACT = 0.0  # copies and integers
_SLOTS, _DRAFTS, _CANDIDATES, _VOCABULARY = 5, 4, 3, 50  # the last slot is the trash slot


def step_cases(device: torch.device) -> Iterator[Case]:
    """All cases of a step's ends."""
    for make in (
        _rows,
        _blocks,
        _commits,
        _stores,
        _chances,
        _stops,
        _noise,
        _tempered,
        _draws,
        _best,
        _largest,
        _cells,
    ):
        yield from make(device)


def _columns(device: torch.device) -> SlotColumns:
    whole = torch.randint(_VOCABULARY, (_SLOTS, NUM_WHOLE), device=device)
    whole[:, IS_ALIVE], whole[:, LIMIT] = torch.tensor([1, 1, 0, 1, 0], device=device), 30
    whole[:, FIRST_STOP + 2 :] = -1
    return SlotColumns(whole, random(device, _SLOTS, NUM_FRACTIONS).abs())


def _waiting(device: torch.device, *, has_q: bool) -> WaitingDrafts:
    ids = torch.randint(-1, _VOCABULARY + 9, (_SLOTS, _DRAFTS), device=device)
    if not has_q:
        return WaitingDrafts(ids, None, None)
    shape = (_SLOTS, _DRAFTS, _CANDIDATES)
    return WaitingDrafts(ids, torch.randint(_VOCABULARY, shape, device=device), random(device, *shape))


def _slots(device: torch.device) -> Tensor:
    return torch.tensor([3, 2, 0], device=device)


def _rows(device: torch.device) -> Iterator[Case]:
    table = torch.randint(6, (_SLOTS, 4), dtype=torch.int32, device=device)
    firsts = torch.tensor([60, 0, 4], device=device)
    for num_drafts, has_q in ((_DRAFTS, True), (2, False), (0, False)):
        drafts = _waiting(device, has_q=has_q)
        cells, starts = (CacheCells(table, 8), firsts) if has_q else (None, None)
        arguments = (_columns(device), drafts, _slots(device), starts, cells, num_drafts, _VOCABULARY, 40)
        yield (
            f"step_rows, {num_drafts} drafts",
            partial(compared, step_rows_reference, step_rows_triton, arguments, _EXACT),
        )


def _blocks(device: torch.device) -> Iterator[Case]:
    for num_rows in (1, 5):
        arguments = (_columns(device), _slots(device), num_rows, 7, _VOCABULARY, 40)
        yield (
            f"block_rows, {num_rows} rows",
            partial(compared, block_rows_reference, block_rows_triton, arguments, _EXACT),
        )


def _commits(device: torch.device) -> Iterator[Case]:
    for num_drafts in (_DRAFTS, 0):
        whole, waiting = _columns(device).whole_SX, _waiting(device, has_q=False).ids_SK
        drafts = torch.randint(_VOCABULARY, (3, num_drafts), device=device)
        accepted = torch.tensor([num_drafts, 0, min(2, num_drafts)], device=device)
        zeros = torch.zeros_like(accepted)
        verdict = Verdict(
            accepted, torch.tensor([9, -1, 4], device=device), zeros + torch.tensor([0, 1, 0]).to(device), zeros
        )
        positions = torch.tensor([11, -1, 28], device=device)
        arguments = (whole, waiting, _slots(device), positions.clamp(min=0), positions, drafts, verdict)
        yield (
            f"commit_step, {num_drafts} drafts",
            partial(compared, commit_step_reference, commit_step_triton, arguments, _EXACT),
        )


def _stores(device: torch.device) -> Iterator[Case]:
    ids = torch.randint(_VOCABULARY, (3, 3), device=device)
    shape = (3, 3, _CANDIDATES)
    q = (torch.randint(_VOCABULARY, shape, device=device), random(device, *shape))
    wanted = torch.tensor([3, 0, 2], device=device)
    forms = {
        "with q": (_waiting(device, has_q=True), q, wanted),
        "one-hot beside q": (_waiting(device, has_q=True), (None, None), None),
        "one-hot": (_waiting(device, has_q=False), (None, None), wanted),
    }
    for name, (drafts, given, wanted_B) in forms.items():
        waiting = torch.full((3, 7), -5, device=device)[:, 2]  # a column of the report
        arguments = (drafts, _slots(device), ids, *given, wanted_B, waiting)
        yield f"store_drafts, {name}", partial(compared, store_drafts_reference, store_drafts_triton, arguments, _EXACT)


def _chances(device: torch.device) -> Iterator[Case]:
    known = KnownFeatures(
        random(device, _SLOTS, _DRAFTS), torch.tensor([True, False, True, True, False], device=device)
    )
    coefficients = Coefficients(*(random(device, *shape, dtype=torch.float64) for shape in ((), (_DRAFTS,))))
    log_q = random(device, 3, 3, _CANDIDATES).log_softmax(-1)
    head, thresholds = torch.rand(3, 3, device=device), torch.rand(_DRAFTS, dtype=torch.float64, device=device)
    ids, some = torch.randint(-1, _VOCABULARY, (3, 3), device=device), torch.tensor([True, False, True], device=device)
    forms = {"q": (log_q, None, thresholds, some), "head": (None, head, thresholds, None), "nothing": (None,) * 4}
    for name, given in forms.items():
        arguments = (known, coefficients, _slots(device), ids, *given)
        both = (hold_back_drafts_reference, hold_back_drafts_triton)
        yield f"hold_back_drafts, {name}", partial(compared, *both, arguments, 1e-5)
    sums = random(device, NUM_SUMS, _DRAFTS, dtype=torch.float64)
    for name, teaches in (("all", None), ("some", some)):
        arguments = (sums, known, coefficients, _slots(device), ids, torch.tensor([0, 3, 1], device=device), teaches)
        both = (observe_drafts_reference, observe_drafts_triton)
        yield f"observe_drafts, {name}", partial(compared, *both, arguments, 1e-5)


def _stops(device: torch.device) -> Iterator[Case]:
    temperature, keys = torch.tensor([0.0, 0.7, 1.0], device=device), torch.tensor([5, 8, 9], device=device)
    accepted = torch.tensor([1, 0, 2], device=device)  # 2 is the bonus row
    shape = (3, 2, _CANDIDATES)
    ids, log_q = torch.randint(_VOCABULARY, shape, device=device), random(device, *shape)
    for dtype, allowed in dtypes(device):
        logits = random(device, 3, 3, 4100, dtype=dtype)
        masses = [partial(run, is_tempered=False) for run in (row_masses_reference, row_masses_triton)]
        yield f"row_masses, {dtype}", partial(compared, *masses, (logits, temperature), allowed)
        warm = temperature + 0.3  # greedy requests draw nothing: -inf, which has no distance
        arguments = (logits, accepted, ids, log_q, warm, keys, keys + 11)
        noisy = [partial(run, is_tempered=False) for run in (stop_noise_reference, stop_noise_triton)]
        yield f"stop_noise, {dtype}", partial(compared, *noisy, arguments, allowed)


def _noise(device: torch.device) -> Iterator[Case]:
    seeds, steps = torch.tensor([7, 2**40 + 3, 0], device=device), torch.tensor([5, 0, 9], device=device)
    ids = torch.randint(_VOCABULARY, (3, _DRAFTS, _CANDIDATES), device=device)
    for name, step_B in (("drafts", steps), ("targets", None)):
        arguments = (seeds, step_B, steps + 11, ids, 2, noise.DRAFT)
        both = (noise.candidate_gumbel_reference, noise.candidate_gumbel_triton)
        yield f"candidate_gumbel, {name}", partial(compared, *both, arguments, 1e-5)


def _tempered(device: torch.device) -> Iterator[Case]:
    temperature = torch.tensor([0.0, 0.7, 1e-9], device=device)
    for dtype, allowed in dtypes(device):
        logits = random(device, 3, 2, 2100, dtype=dtype)
        logits[1, 0, 5] = -torch.inf  # no grammar takes it
        both = (temper_logits_reference, temper_logits_triton)
        yield f"temper_logits, {dtype}", partial(compared, *both, (logits, temperature), allowed)


def _draws(device: torch.device) -> Iterator[Case]:
    shape = (3, _DRAFTS, _CANDIDATES)
    scores, ids = random(device, *shape).sort(-1, descending=True).values, torch.randint(50, shape, device=device)
    scores[1, 2] = -torch.inf  # no candidate is possible
    temperature, keys = torch.tensor([0.0, 0.7, 1.0], device=device), torch.tensor([5, 8, 9], device=device)
    arguments = (scores, ids, temperature, keys, keys + 1, keys + 11, 0, noise.DRAFT)
    yield "draw_candidates", partial(compared, draw_candidates_reference, draw_candidates_triton, arguments, 1e-5)
    both = (candidate_log_q_reference, candidate_log_q_triton)
    yield "candidate_log_q", partial(compared, *both, (scores, temperature), 1e-5)


def _best(device: torch.device) -> Iterator[Case]:
    for dtype, _ in dtypes(device):
        scores = random(device, 2, 3, 2500, dtype=dtype)  # in bf16 with many equal ones
        scores[0, 0, 900:] = -torch.inf
        yield (
            f"top_k_tokens, {dtype}",
            partial(compared, top_k_tokens_reference, top_k_tokens_triton, (scores, 6), _EXACT),
        )


def _largest(device: torch.device) -> Iterator[Case]:
    for dtype, _ in dtypes(device):
        scores = random(device, 2, 5000, dtype=dtype)  # runs of several turns, the last of them not full
        both = (largest_ids_reference, largest_ids_triton)
        yield f"largest_ids, {dtype}", partial(compared, *both, (scores,), _EXACT)


def _cells(device: torch.device) -> Iterator[Case]:
    table = torch.randint(6, (_SLOTS, 4), dtype=torch.int32, device=device)
    starts = torch.tensor([0, 29, 13], device=device)  # one request goes on past its last block
    both = (table_rows_reference, table_rows_triton)
    yield "table_rows", partial(compared, *both, (table, _slots(device), starts, 9, 8), _EXACT)
