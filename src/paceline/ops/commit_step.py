"""What a step's verdict changes: the slots' numbers, and the row of numbers that the host gets for each request.

    tokens     kept drafts, the target's own token, then -1; that one is -1, too, where its row was at fault
    commit     n' = n + accepted + 1, the last token becomes the anchor, the step counter moves on, waiting drafts go
    retire     a request is alive no more once n' reaches its limit, a token is one of its stop ids, or there is a fault
    report     accepted, fault, drafts of zero q, drafts that wait (0 here), position or -1, T tokens, K judged drafts

B requests, T = K + 1 rows, S slots.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from paceline.ops.dispatch import choose, kernel, tl, triton
from paceline.ops.finalise_block import SOUND, Verdict
from paceline.ops.native import steps as native
from paceline.ops.sample_tokens import NO_TOKEN
from paceline.ops.slot_columns import (
    ANCHOR,
    FIRST_STOP,
    IS_ALIVE,
    LENGTH,
    LIMIT,
    NUM_STOPS,
    NUM_WHOLE,
    STEP,
    SlotColumns,
)

ACCEPTED, FAULT, NUM_ZERO_Q, NUM_WAITING, POSITION = range(5)
NUM_COUNTS = 5


class Committed(NamedTuple):
    """Where requests stand behind a step.

    Attributes:
        ends_B: int64, n'.
        report_BX: int64 [B, NUM_COUNTS + T + K].
    """

    ends_B: Tensor
    report_BX: Tensor


def emitted_tokens(draft_ids_BK: Tensor, accepted_B: Tensor, bonus_ids_B: Tensor) -> Tensor:
    """Put together what a step emits: kept drafts, the target's own token, then -1; int64 [B, T].

    Args:
        draft_ids_BK: int64.
        accepted_B: int64, drafts kept.
        bonus_ids_B: int64, the target's own token, or -1.
    """
    accepted_B1 = accepted_B.unsqueeze(1)
    padded_BT = torch.nn.functional.pad(draft_ids_BK, (0, 1), value=NO_TOKEN)
    row_T = torch.arange(padded_BT.shape[1], device=padded_BT.device)
    kept_BT = padded_BT.masked_fill(row_T >= accepted_B1, NO_TOKEN)
    return kept_BT.scatter(1, accepted_B1, bonus_ids_B.unsqueeze(1))


def retire_reference(whole_SX: Tensor, slots_B: Tensor, ends_B: Tensor, tokens_BT: Tensor, fault_B: Tensor) -> None:
    """Mark requests whose end can be seen; a request that has ended stays so.

    Args:
        whole_SX: int64, of all slots, changed in place.
        slots_B: int64.
        ends_B: int64, committed lengths.
        tokens_BT: int64, what was emitted; -1 behind.
        fault_B: int64, 0 sound.
    """
    stop_ids_BS = whole_SX[slots_B, FIRST_STOP:]
    is_stop_BTS = (tokens_BT.unsqueeze(2) == stop_ids_BS.unsqueeze(1)) & (tokens_BT != NO_TOKEN).unsqueeze(2)
    goes_on_B = (ends_B < whole_SX[slots_B, LIMIT]) & ~is_stop_BTS.flatten(1).any(1) & (fault_B == SOUND)
    whole_SX[slots_B, IS_ALIVE] *= goes_on_B


def commit_step_reference(
    whole_SX: Tensor,
    waiting_ids_SK: Tensor,
    slots_B: Tensor,
    starts_B: Tensor,
    positions_B: Tensor,
    draft_ids_BK: Tensor,
    verdict: Verdict,
) -> Committed:
    """The definition."""
    accepted_B, bonus_ids_B, fault_B, num_zero_q_B = verdict
    tokens_BT = emitted_tokens(draft_ids_BK, accepted_B, bonus_ids_B)
    ends_B = starts_B + accepted_B + 1
    whole_SX[slots_B, LENGTH] = ends_B
    whole_SX[slots_B, ANCHOR] = bonus_ids_B
    whole_SX[slots_B, STEP] += 1
    waiting_ids_SK[slots_B] = NO_TOKEN
    retire_reference(whole_SX, slots_B, ends_B, tokens_BT, fault_B)
    counts = (accepted_B, fault_B, num_zero_q_B, torch.zeros_like(accepted_B), positions_B)
    return Committed(ends_B, torch.cat((torch.stack(counts, dim=1), tokens_BT, draft_ids_BK), dim=1))


@kernel
def _commit_step_kernel(
    whole_ptr: tl.tensor,
    waiting_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    draft_ptr: tl.tensor,
    accepted_ptr: tl.tensor,
    bonus_ptr: tl.tensor,
    fault_ptr: tl.tensor,
    num_zero_q_ptr: tl.tensor,
    ends_ptr: tl.tensor,
    report_ptr: tl.tensor,
    num_kept: tl.tensor,
    NUM_ROWS: tl.constexpr,
    NUM_COUNTS: tl.constexpr,
    NUM_WHOLE: tl.constexpr,
    LENGTH: tl.constexpr,
    ANCHOR: tl.constexpr,
    STEP: tl.constexpr,
    IS_ALIVE: tl.constexpr,
    LIMIT: tl.constexpr,
    FIRST_STOP: tl.constexpr,
    NUM_STOPS: tl.constexpr,
    SOUND: tl.constexpr,
    ROWS: tl.constexpr,
    KEPT: tl.constexpr,
) -> None:
    request = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + request)
    accepted, bonus = tl.load(accepted_ptr + request), tl.load(bonus_ptr + request)
    fault, position = tl.load(fault_ptr + request), tl.load(positions_ptr + request)
    end = tl.load(starts_ptr + request) + accepted + 1
    row = tl.arange(0, ROWS)
    is_draft = row < NUM_ROWS - 1
    draft = tl.load(draft_ptr + request * (NUM_ROWS - 1) + row, mask=is_draft, other=-1)
    token = tl.where(row < accepted, draft, tl.where(row == accepted, bonus, -1))

    own = whole_ptr + slot * NUM_WHOLE
    stop = tl.load(own + FIRST_STOP + tl.arange(0, NUM_STOPS))
    is_stop = (token[:, None] == stop[None, :]) & (token[:, None] != -1) & (row[:, None] < NUM_ROWS)
    num_stops = tl.sum(tl.sum(is_stop.to(tl.int32), axis=1), axis=0)
    goes_on = (end < tl.load(own + LIMIT)) & (num_stops == 0) & (fault == SOUND)
    tl.store(own + IS_ALIVE, tl.where(goes_on, tl.load(own + IS_ALIVE), 0))
    tl.store(own + LENGTH, end)
    tl.store(own + ANCHOR, bonus)
    tl.store(own + STEP, tl.load(own + STEP) + 1)
    kept = tl.arange(0, KEPT)
    tl.store(waiting_ptr + slot * num_kept + kept, -1, mask=kept < num_kept)

    tl.store(ends_ptr + request, end)
    report = report_ptr + request * (NUM_COUNTS + 2 * NUM_ROWS - 1)
    tl.store(report, accepted)
    tl.store(report + 1, fault)
    tl.store(report + 2, tl.load(num_zero_q_ptr + request))
    tl.store(report + 3, 0)
    tl.store(report + 4, position)
    tl.store(report + NUM_COUNTS + row, token, mask=row < NUM_ROWS)
    tl.store(report + NUM_COUNTS + NUM_ROWS + row, draft, mask=is_draft)


def commit_step_triton(
    whole_SX: Tensor,
    waiting_ids_SK: Tensor,
    slots_B: Tensor,
    starts_B: Tensor,
    positions_B: Tensor,
    draft_ids_BK: Tensor,
    verdict: Verdict,
) -> Committed:
    """Launch one program per request. Those that have ended meet in the trash slot, whose numbers nobody relies on."""
    num_requests, num_drafts = draft_ids_BK.shape
    ends_B = torch.empty_like(starts_B)
    report_BX = starts_B.new_empty(num_requests, NUM_COUNTS + 2 * num_drafts + 1)
    with torch.cuda.device_of(whole_SX):
        _commit_step_kernel[(num_requests,)](
            whole_SX,
            waiting_ids_SK,
            slots_B.contiguous(),
            starts_B.contiguous(),
            positions_B.contiguous(),
            draft_ids_BK.contiguous(),
            *(values.contiguous() for values in verdict),
            ends_B,
            report_BX,
            waiting_ids_SK.shape[1],
            NUM_ROWS=num_drafts + 1,
            NUM_COUNTS=NUM_COUNTS,
            NUM_WHOLE=NUM_WHOLE,
            LENGTH=LENGTH,
            ANCHOR=ANCHOR,
            STEP=STEP,
            IS_ALIVE=IS_ALIVE,
            LIMIT=LIMIT,
            FIRST_STOP=FIRST_STOP,
            NUM_STOPS=NUM_STOPS,
            SOUND=SOUND,
            ROWS=triton.next_power_of_2(num_drafts + 1),
            KEPT=triton.next_power_of_2(max(1, waiting_ids_SK.shape[1])),
            num_warps=1,
        )
    return Committed(ends_B, report_BX)


def commit_step_native(
    whole_SX: Tensor,
    waiting_ids_SK: Tensor,
    slots_B: Tensor,
    starts_B: Tensor,
    positions_B: Tensor,
    draft_ids_BK: Tensor,
    verdict: Verdict,
) -> Committed:
    """The same as the reference, on a CPU."""
    return Committed(
        *native.commit_step(whole_SX, waiting_ids_SK, slots_B, starts_B, positions_B, draft_ids_BK, verdict)
    )


def commit_step(
    columns: SlotColumns,
    waiting_ids_SK: Tensor,
    slots_B: Tensor,
    *,
    starts_B: Tensor,
    positions_B: Tensor,
    draft_ids_BK: Tensor,
    verdict: Verdict,
) -> Committed:
    """Take a step's verdict in; no tensor is read on the host.

    Args:
        columns: of all slots, changed in place.
        waiting_ids_SK: int64, drafts of all slots, changed in place.
        slots_B: int64; only the trash slot may stand here twice.
        starts_B: int64, position of row 0.
        positions_B: int64, the same with -1 for requests that have ended.
        draft_ids_BK: int64, what was judged.
        verdict: on them.
    """
    is_native = native.can_run(columns.whole_SX, waiting_ids_SK)
    on_cpu = commit_step_native if is_native else None
    run = choose("commit_step", slots_B, commit_step_reference, commit_step_triton, on_cpu)
    return run(columns.whole_SX, waiting_ids_SK, slots_B, starts_B, positions_B, draft_ids_BK, verdict)
