"""Judge a draft block against the target: how many drafts are kept, and which token the target adds.

    greedy    accept draft x iff x is the row's argmax; then emit the stop row's argmax
    standard  accept iff ln p(x) > ln u + ln q(x); after a refusal emit one draw of max(p - q, 0), normalised;
              after K acceptances one draw of p
    one-hot   the same with q = 1 at x: accept iff u < p(x); the residual is p without x
    block     judges the whole block at once and keeps at least as much on average, see `acceptance`
    match     accept iff x is the row's own draw; the output is that of plain decoding with the same seed, to the token
    coupled   the same for drafts drawn with the target's own noise, which makes them agree often

Row i of a request whose anchor stands at position n sits at n + i and predicts position n + i + 1; row K predicts the
bonus. Every draw is keyed by the position before its token, n + i. B requests, K drafts, L = K + 1, C candidates of
the drafter, V vocabulary.

The emitted tokens follow the target's distribution exactly, for any drafter, as long as q is what the draft was really
drawn from and the three noise domains stay apart (see `noise`). One-hot judging is exact for any draft at all, and so
are match and coupled, which never look at q. Which drafts exist may depend on the tokens before them, never on the
drafts themselves: one that a grammar forbids has to be judged (its p is 0), only those behind it may become -1.

The reference makes noise and residual for the one stop row of each request where the method allows it. Kernels read the
logits once (`vocab_statistics`) and finish per request (`finalise_block`); with many rows `standard` finds the stop
rows first and makes noise for these alone (`stop_row`). Nothing here reads a tensor value on the host, so the whole op
can sit in a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from paceline.errors import ShapeError
from paceline.ops import acceptance, noise
from paceline.ops.acceptance import VERIFY_METHODS, RowsBehind, VerifyMethod, at_row, is_lossless
from paceline.ops.dispatch import choose
from paceline.ops.finalise_block import SOUND, Verdict, fault_of_rows, finalise_block_triton
from paceline.ops.finalise_rows import finalise_rows_triton
from paceline.ops.native import steps as native
from paceline.ops.sample_tokens import NO_TOKEN, pick_largest
from paceline.ops.stop_row import row_masses_triton, stop_noise_triton
from paceline.ops.target_distribution import rows_are_greedy, temper_logits_reference, temper_logits_triton
from paceline.ops.token_rules import MAX_CHUNK_BYTES, request_chunks
from paceline.ops.vocab_statistics import vocab_statistics_triton

_MANY_ROWS = 64  # from here on noise of rows whose draw nobody takes costs more than two launches

__all__ = ["VERIFY_METHODS", "VerifiedBlock", "VerifyMethod", "is_lossless", "verify_block"]


@dataclass(frozen=True)
class VerifiedBlock:
    """What verification decided, one entry per request.

    Attributes:
        accepted_B: int64 in [0, K], drafts kept, bonus excluded.
        bonus_ids_B: int64, the target's own token after them; -1 where `bad_B`.
        fault_B: int64, what is wrong with the row after the kept drafts, which are sound: 0 nothing, 1 NaN or +inf in
            it, 2 no token left in it (all -inf).
        num_zero_q_B: int64, drafts that their own q says were impossible; refused, and a sign of a broken drafter.
    """

    accepted_B: Tensor
    bonus_ids_B: Tensor
    fault_B: Tensor
    num_zero_q_B: Tensor

    @property
    def verdict(self) -> Verdict:
        """The same without a name of its own for what follows from it."""
        return Verdict(self.accepted_B, self.bonus_ids_B, self.fault_B, self.num_zero_q_B)

    @property
    def bad_B(self) -> Tensor:
        """Where there is no bonus token, bool."""
        return self.fault_B > SOUND


def verify_block(
    draft_ids_BK: Tensor,
    processed_BLV: Tensor,
    *,
    temperature_B: Tensor,
    seed_B: Tensor,
    anchor_position_B: Tensor,
    step_B: Tensor,
    candidate_ids_BKC: Tensor | None = None,
    log_q_BKC: Tensor | None = None,
    method: VerifyMethod = "standard",
    all_greedy: bool = False,
    is_tempered: bool = True,
) -> VerifiedBlock:
    """Count each request's accepted drafts and draw the target's own token after them.

    Args:
        draft_ids_BK: int64 proposals, the anchor is not among them; -1 ends a request's block early.
        processed_BLV: float logits from `process_logits` (raw for greedy rows); row i scores draft i, row K the bonus.
        temperature_B: float; below 1e-5 the request is greedy.
        seed_B: int64 request seeds.
        anchor_position_B: int64 absolute position of the anchor.
        step_B: int64 step counter of the request, the one its drafts were drawn with.
        candidate_ids_BKC: int64 ids that the drafter could have drawn at each position, unique, padded with -1. None
            together with `log_q_BKC` judges every draft as one-hot.
        log_q_BKC: float32 log-probabilities they were drawn with; ids outside have q = 0. A one-hot row among others
            is one candidate with 0 and the rest -inf.
        method: of sampled requests; "match" and "coupled" do not look at q. All are lossless, see `is_lossless`.
        all_greedy: every request is greedy (the host knows); costs one argmax over the logits.
        is_tempered: temperatures are applied already; else the logits are divided here, as `temper_logits` does.

    Returns:
        A VerifiedBlock of device tensors.

    Raises:
        ShapeError: logits without one row more than drafts, or candidates that do not match them.
    """
    _check_shapes(draft_ids_BK, processed_BLV, candidate_ids_BKC, log_q_BKC)
    settings = (temperature_B, seed_B, anchor_position_B, step_B)
    if all_greedy:
        on_cpu = verify_greedily_native if native.can_verify(processed_BLV) else None
        judge = choose("verify_greedily", processed_BLV, verify_greedily_reference, verify_greedily_triton, on_cpu)
        return judge(draft_ids_BK, processed_BLV, *settings)
    run = choose("verify_block", processed_BLV, verify_block_reference, verify_block_triton)
    return run(draft_ids_BK, processed_BLV, candidate_ids_BKC, log_q_BKC, *settings, method, is_tempered)


def verify_block_reference(
    draft_ids_BK: Tensor,
    processed_BLV: Tensor,
    candidate_ids_BKC: Tensor | None,
    log_q_BKC: Tensor | None,
    temperature_B: Tensor,
    seed_B: Tensor,
    anchor_position_B: Tensor,
    step_B: Tensor,
    method: VerifyMethod,
    is_tempered: bool = True,
) -> VerifiedBlock:
    """The definition: acceptance on the drafts' own logits, then one draw over the vocabulary at each stop row."""
    if not is_tempered:
        processed_BLV = temper_logits_reference(processed_BLV, temperature_B)
    best_BL, argmax_ids_BL = processed_BLV.max(dim=-1)
    fault_BL = fault_of_rows(best_BL)
    is_greedy_B = rows_are_greedy(temperature_B)
    is_draft_BK = draft_ids_BK >= 0
    is_judged_BK = is_draft_BK & (fault_BL[:, :-1] == SOUND)
    own_ids_BL = argmax_ids_BL
    if not acceptance.reads_q(method):
        drawn_ids_BL = _draw_every_row(processed_BLV, seed_B, anchor_position_B)
        own_ids_BL = torch.where(is_greedy_B.unsqueeze(1), argmax_ids_BL, drawn_ids_BL)
    accepted_B = acceptance.count_leading(draft_ids_BK.eq(own_ids_BL[:, :-1]) & is_judged_BK)
    if not acceptance.reads_q(method):
        return _stopped_at(accepted_B, own_ids_BL, fault_BL)

    log_p_BK = _log_p_of_drafts(draft_ids_BK, processed_BLV[:, :-1])
    log_q_BK = acceptance.log_q_of_drafts(draft_ids_BK, candidate_ids_BKC, log_q_BKC)
    log_u_BK = acceptance.log_acceptance_uniforms(seed_B, step_B, anchor_position_B, draft_ids_BK.shape[1])
    behind = None
    if method == "block":
        behind = _rows_behind(draft_ids_BK, processed_BLV, candidate_ids_BKC, log_q_BKC)
    by_ratio_B, log_pi_B = acceptance.count_by_ratio(is_judged_BK, log_p_BK, log_q_BK, log_u_BK, behind)
    accepted_B = torch.where(is_greedy_B, accepted_B, by_ratio_B)
    drawn_ids_B = _draw_at_stop_row(
        draft_ids_BK, processed_BLV, accepted_B, seed_B, anchor_position_B, candidate_ids_BKC, log_q_BKC, log_pi_B
    )
    is_impossible_BK = (log_q_BK == -torch.inf) & is_draft_BK & ~is_greedy_B.unsqueeze(1)
    verdict = _stopped_at(accepted_B, argmax_ids_BL, fault_BL)
    bonus_ids_B = torch.where(is_greedy_B, verdict.bonus_ids_B, drawn_ids_B)
    return VerifiedBlock(
        accepted_B,
        bonus_ids_B.masked_fill(verdict.bad_B, NO_TOKEN),
        verdict.fault_B,
        is_impossible_BK.long().sum(dim=1),
    )


def verify_block_triton(
    draft_ids_BK: Tensor,
    processed_BLV: Tensor,
    candidate_ids_BKC: Tensor | None,
    log_q_BKC: Tensor | None,
    temperature_B: Tensor,
    seed_B: Tensor,
    anchor_position_B: Tensor,
    step_B: Tensor,
    method: VerifyMethod,
    is_tempered: bool = True,
) -> VerifiedBlock:
    """Two kernels, or four, called as the reference is; equal to it but for near-ties, see `finalise_block`."""
    processed_BLV = processed_BLV.contiguous()  # once, not for each of them
    if not acceptance.reads_q(method):  # no id is left out of the rows' own draws
        candidates = acceptance.GivenCandidates(draft_ids_BK.new_empty(*draft_ids_BK.shape, 0), None)
    elif candidate_ids_BKC is None:
        candidates = acceptance.GivenCandidates(draft_ids_BK.unsqueeze(2), None)
    else:
        candidates = acceptance.GivenCandidates(candidate_ids_BKC, log_q_BKC)
    if method == "block" and not is_tempered:
        processed_BLV, is_tempered = temper_logits_triton(processed_BLV, temperature_B), True
    settings = (temperature_B, seed_B, anchor_position_B)
    num_requests, num_rows = processed_BLV.shape[:2]
    if method == "standard" and num_rows > 1 and num_requests * num_rows >= _MANY_ROWS:
        masses = row_masses_triton(processed_BLV, temperature_B, is_tempered=is_tempered)
        finish = partial(
            finalise_rows_triton,
            masses,
            draft_ids_BK,
            processed_BLV,
            candidates,
            *settings,
            step_B,
            judges_by_ratio=True,
            is_tempered=is_tempered,
        )
        accepted_B = finish()[0]
        found = stop_noise_triton(processed_BLV, accepted_B, *candidates, *settings, is_tempered=is_tempered)
        return VerifiedBlock(*finish(stop_noise=found))
    tiles = vocab_statistics_triton(
        processed_BLV, candidates.ids_BKC, *settings, log_q_BKC=candidates.log_q_BKC, is_tempered=is_tempered
    )
    verdict = finalise_block_triton(
        tiles, draft_ids_BK, processed_BLV, candidates, *settings, step_B, method, is_tempered=is_tempered
    )
    return VerifiedBlock(*verdict)


def verify_greedily_reference(
    draft_ids_BK: Tensor,
    processed_BLV: Tensor,
    temperature_B: Tensor,
    seed_B: Tensor,
    anchor_position_B: Tensor,
    step_B: Tensor,
) -> VerifiedBlock:
    """One argmax over the logits; nothing of the settings is read."""
    best_BL, argmax_ids_BL = processed_BLV.max(dim=-1)
    fault_BL = fault_of_rows(best_BL)
    is_kept_BK = draft_ids_BK.eq(argmax_ids_BL[:, :-1]) & (fault_BL[:, :-1] == SOUND)
    return _stopped_at(acceptance.count_leading(is_kept_BK), argmax_ids_BL, fault_BL)


def verify_greedily_triton(
    draft_ids_BK: Tensor,
    processed_BLV: Tensor,
    temperature_B: Tensor,
    seed_B: Tensor,
    anchor_position_B: Tensor,
    step_B: Tensor,
) -> VerifiedBlock:
    """The two kernels without noise: rows that are greedy are judged by equality, as in match."""
    nobody = acceptance.GivenCandidates(draft_ids_BK.new_empty(*draft_ids_BK.shape, 0), None)
    settings = (temperature_B, seed_B, anchor_position_B)
    tiles = vocab_statistics_triton(processed_BLV, nobody.ids_BKC, *settings, all_greedy=True)
    verdict = finalise_block_triton(
        tiles, draft_ids_BK, processed_BLV, nobody, *settings, step_B, "match", all_greedy=True
    )
    return VerifiedBlock(*verdict)


def verify_greedily_native(
    draft_ids_BK: Tensor,
    processed_BLV: Tensor,
    temperature_B: Tensor,
    seed_B: Tensor,
    anchor_position_B: Tensor,
    step_B: Tensor,
) -> VerifiedBlock:
    """The same as the reference, on a CPU; rows behind the one that stops are not read."""
    return VerifiedBlock(*native.verify_greedily(draft_ids_BK, processed_BLV).unbind())


def _stopped_at(accepted_B: Tensor, choice_ids_BL: Tensor, fault_BL: Tensor) -> VerifiedBlock:
    """The verdict of requests whose every row has its own choice already."""
    fault_B = at_row(fault_BL, accepted_B)
    bonus_ids_B = at_row(choice_ids_BL, accepted_B).masked_fill(fault_B != SOUND, NO_TOKEN)
    return VerifiedBlock(accepted_B, bonus_ids_B, fault_B, torch.zeros_like(accepted_B))


def _draw_every_row(processed_BLV: Tensor, seed_B: Tensor, anchor_position_B: Tensor) -> Tensor:
    """One draw of p per row, row by row: the noise of a whole block at once would be many times the logits' size."""
    vocab_size = processed_BLV.shape[2]
    drawn = []
    for row in range(processed_BLV.shape[1]):
        noise_BV = noise.gumbel_noise(seed_B, anchor_position_B + row, vocab_size, domain=noise.TARGET)
        drawn.append(pick_largest(processed_BLV[:, row].float() + noise_BV))
    return torch.stack(drawn, dim=1)


def _log_p_of_drafts(draft_ids_BK: Tensor, processed_BKV: Tensor) -> Tensor:
    logits_BKV = processed_BKV.float()
    drafted_BK = logits_BKV.gather(2, draft_ids_BK.clamp(min=0).unsqueeze(2)).squeeze(2)
    if draft_ids_BK.shape[1] < 2:  # torch sums a lone row in another order
        return drafted_BK - torch.logsumexp(logits_BKV, dim=-1)
    chunks = request_chunks(logits_BKV, MAX_CHUNK_BYTES)
    return drafted_BK - torch.cat([torch.logsumexp(logits_BKV[chunk], dim=-1) for chunk in chunks])


def _rows_behind(
    draft_ids_BK: Tensor, processed_BLV: Tensor, candidate_ids_BKC: Tensor | None, log_q_BKC: Tensor | None
) -> RowsBehind:
    """Look up what `block` needs of rows 1..K; the bonus row has no candidates, and is not read."""
    ids_BKC, log_q_BKC = acceptance.candidate_rows(draft_ids_BK, candidate_ids_BKC, log_q_BKC)
    ids_BKC = torch.nn.functional.pad(ids_BKC[:, 1:], (0, 0, 0, 1), value=NO_TOKEN)[:, : draft_ids_BK.shape[1]]
    log_q_BKC = torch.nn.functional.pad(log_q_BKC[:, 1:], (0, 0, 0, 1), value=-torch.inf)[:, : draft_ids_BK.shape[1]]
    logits_BKV = processed_BLV[:, 1:].float()
    log_p_BKC = logits_BKV.gather(2, ids_BKC.clamp(min=0)) - torch.logsumexp(logits_BKV, dim=-1, keepdim=True)
    log_p_BKC = log_p_BKC.masked_fill(ids_BKC < 0, -torch.inf)
    return RowsBehind((1.0 - log_p_BKC.exp().sum(dim=-1)).clamp(min=0.0), log_p_BKC, log_q_BKC)


def _draw_at_stop_row(
    draft_ids_BK: Tensor,
    processed_BLV: Tensor,
    accepted_B: Tensor,
    seed_B: Tensor,
    anchor_position_B: Tensor,
    candidate_ids_BKC: Tensor | None,
    log_q_BKC: Tensor | None,
    log_pi_B: Tensor,
) -> Tensor:
    """Draw from the residual where a draft was refused, from p where the block or the proposals ended."""
    num_requests, num_rows, vocab_size = processed_BLV.shape
    logits_BV = at_row(processed_BLV, accepted_B).float()
    # The bonus row has no draft to refuse, exactly like a placeholder.
    no_draft_B1 = draft_ids_BK.new_full((num_requests, 1), NO_TOKEN)
    refused_B = at_row(torch.cat([draft_ids_BK, no_draft_B1], dim=1), accepted_B)
    weights_BV = logits_BV
    if num_rows > 1:
        if candidate_ids_BKC is None or log_q_BKC is None:  # q = 1 at the draft leaves nothing of it for any pi
            residual_BV = acceptance.one_hot_residual(logits_BV, refused_B.clamp(min=0))
        else:
            draft_index_B = accepted_B.clamp(max=num_rows - 2)
            residual_BV = acceptance.candidate_residual(
                logits_BV,
                at_row(candidate_ids_BKC, draft_index_B),
                at_row(log_q_BKC, draft_index_B).float() - log_pi_B.unsqueeze(1),
            )
        # Rounding can refuse although p equals q and nothing is left over; p itself is then the right draw.
        has_residual_B = (refused_B >= 0) & (residual_BV.amax(dim=-1) > -torch.inf)
        weights_BV = torch.where(has_residual_B.unsqueeze(1), residual_BV, logits_BV)
    return pick_largest(
        weights_BV + noise.gumbel_noise(seed_B, anchor_position_B + accepted_B, vocab_size, domain=noise.TARGET)
    )


def _check_shapes(
    draft_ids_BK: Tensor, processed_BLV: Tensor, candidate_ids_BKC: Tensor | None, log_q_BKC: Tensor | None
) -> None:
    num_requests, num_drafts = draft_ids_BK.shape
    if processed_BLV.dim() != 3 or processed_BLV.shape[:2] != (num_requests, num_drafts + 1):
        expected = f"[{num_requests}, {num_drafts + 1}, V]"
        raise ShapeError("processed logits", expected=expected, found=processed_BLV.shape)
    if (candidate_ids_BKC is None) != (log_q_BKC is None):
        given, missing = ("log_q", "candidate_ids") if candidate_ids_BKC is None else ("candidate_ids", "log_q")
        raise ValueError(f"{given} was given without {missing}; both describe q")
    if candidate_ids_BKC is not None and log_q_BKC is not None:
        if candidate_ids_BKC.dim() != 3 or candidate_ids_BKC.shape[:2] != (num_requests, num_drafts):
            expected = f"[{num_requests}, {num_drafts}, C]"
            raise ShapeError("candidate_ids", expected=expected, found=candidate_ids_BKC.shape)
        if log_q_BKC.shape != candidate_ids_BKC.shape:
            raise ShapeError("log_q", expected=candidate_ids_BKC.shape, found=log_q_BKC.shape)
