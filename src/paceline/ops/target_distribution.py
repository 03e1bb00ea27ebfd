"""The target's distribution as logits: rules, temperature, then min-p, top-k, top-p; removed tokens become -inf.

    rules  grammar, allow-list, bias, min tokens, penalties, bad words: `token_rules`
    z      = ruled logits / T                                  in float32, always by division
    min-p  drops z < max(z) + ln(min_p)
    top-k  drops z below the k-th largest value; ties with it stay
    top-p  sorts, then drops from the small end while the mass dropped so far is <= 1 - p; the top token always stays;
           of tokens with equal logits the higher ids go first

p of a row is softmax(z). B requests, K drafts, L = K + 1 rows of each, R rows, V vocabulary. Temperatures below 1e-5
mean greedy: such a row stays as its rules left it. Temperatures in between 1e-5 and 0.01 act as 0.01, since a division
by less overflows. The drafter's q has to use the same rule, so both get it from here.

Speculative and plain decoding share this file; a tie or a rounding can't fall one way in one of them and another way
in the other. Every row is worked on by itself: the result does not depend on its neighbours.

Source: order and clamps of the sampler of vLLM 0.33; top-p is arXiv 1904.09751, min-p arXiv 2407.01082.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from paceline.errors import ShapeError
from paceline.ops.dispatch import choose, kernel, needs_gradient, tl, triton
from paceline.ops.token_rules import MAX_CHUNK_BYTES, TokenRules, apply_token_rules, request_chunks

GREEDY_BELOW = 1e-5
LOWEST_TEMPERATURE = 0.01
_TILE = 4096  # ids per program

_NUCLEUS_GUESSES = (256, 4096)


def effective_temperature(temperature: float) -> float:
    """Give the temperature that is acted on: 0.0 for greedy, else at least 0.01.

    Args:
        temperature: as asked for, >= 0.
    """
    return 0.0 if temperature < GREEDY_BELOW else max(temperature, LOWEST_TEMPERATURE)


def rows_are_greedy(temperature_R: Tensor) -> Tensor:
    """Tell which rows take the argmax; bool like `temperature_R`."""
    return temperature_R < GREEDY_BELOW


def temperature_divisor(temperature_R: Tensor) -> Tensor:
    """Give the float32 divisor of each row's logits: 1 for greedy rows, else the temperature, at least 0.01."""
    held_up_R = temperature_R.float().clamp(min=LOWEST_TEMPERATURE)
    return torch.where(rows_are_greedy(temperature_R), torch.ones_like(held_up_R), held_up_R)


def temper_logits_reference(logits_BLV: Tensor, temperature_B: Tensor) -> Tensor:
    """The definition; always a division, in float32, and never in place."""
    return logits_BLV.float() / temperature_divisor(temperature_B)[:, None, None]


@kernel
def tempered(logits: tl.tensor, temperature: tl.tensor, GREEDY_BELOW: tl.constexpr, LOWEST: tl.constexpr) -> tl.tensor:
    """In a kernel: float32 logits of one request, divided by its temperature."""
    temperature = temperature.to(tl.float32)
    divisor = tl.where(temperature < GREEDY_BELOW, 1.0, tl.maximum(temperature, LOWEST))
    if divisor != 1.0:
        logits = tl.div_rn(logits, divisor)
    return logits


@kernel
def _temper_logits_kernel(
    logits_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    tempered_ptr: tl.tensor,
    num_rows: tl.tensor,
    vocab_size: tl.tensor,
    GREEDY_BELOW: tl.constexpr,
    LOWEST: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_inside = ids < vocab_size
    logits = tl.load(logits_ptr + row * vocab_size + ids, mask=is_inside, other=0.0).to(tl.float32)
    logits = tempered(logits, tl.load(temperature_ptr + row // num_rows), GREEDY_BELOW, LOWEST)
    tl.store(tempered_ptr + row * vocab_size + ids, logits, mask=is_inside)


def temper_logits_triton(logits_BLV: Tensor, temperature_B: Tensor) -> Tensor:
    """Launch one program per row and tile."""
    num_requests, num_rows, vocab_size = logits_BLV.shape
    tempered_BLV = torch.empty(logits_BLV.shape, dtype=torch.float32, device=logits_BLV.device)
    with torch.cuda.device_of(logits_BLV):
        _temper_logits_kernel[(num_requests * num_rows, triton.cdiv(vocab_size, _TILE))](
            logits_BLV.contiguous(),
            temperature_B.contiguous(),
            tempered_BLV,
            num_rows,
            vocab_size,
            GREEDY_BELOW=GREEDY_BELOW,
            LOWEST=LOWEST_TEMPERATURE,
            TILE=_TILE,
        )
    return tempered_BLV


def temper_logits(logits_BLV: Tensor, temperature_B: Tensor) -> Tensor:
    """Divide logits by their requests' temperatures, in float32; rows of greedy requests stay what they are.

    Args:
        logits_BLV: any float dtype.
        temperature_B: float.
    """
    if needs_gradient(logits_BLV):
        return temper_logits_reference(logits_BLV, temperature_B)
    run = choose("temper_logits", logits_BLV, temper_logits_reference, temper_logits_triton)
    return run(logits_BLV, temperature_B)


class TargetLogits(NamedTuple):
    """Logits of the target before and after all that a request asked for. They may share memory with what was given.

    Attributes:
        raw_BLV: with the grammar mask in them, in float32; where no request has one, the logits that were given. Their
            log-softmax gives raw log-probabilities.
        processed_BLV: their softmax is what is sampled from; their argmax is what greedy rows take. float32, or the
            logits that were given where no request of the batch asked for anything. Where temperature was left to
            whoever reads them, they are still to be divided.
    """

    raw_BLV: Tensor
    processed_BLV: Tensor


def target_logits(
    logits_BLV: Tensor,
    draft_ids_BK: Tensor,
    anchor_position_B: Tensor,
    rules: TokenRules | None,
    *,
    temperature_B: Tensor,
    top_k_B: Tensor,
    top_p_B: Tensor,
    min_p_B: Tensor,
    all_greedy: bool = False,
    max_top_k: int | None = None,
    any_top_p: bool = True,
    any_min_p: bool = True,
    is_temperature_left: bool = False,
    max_chunk_bytes: int = MAX_CHUNK_BYTES,
) -> TargetLogits:
    """Turn the rows of a block into the logits of the distributions that verification and sampling use.

    Args:
        logits_BLV: any float dtype, vocabulary padding removed; not changed. Row i scores position anchor + i + 1.
        draft_ids_BK: int64 in [0, V); -1 where there is no draft. Row i's history ends with drafts 0..i-1.
        anchor_position_B: int64, position of row 0.
        rules: of the requests; None where none has any. Greedy requests obey theirs, too.
        temperature_B: this and the settings and flags after it as in `process_logits`, one entry per request.
        top_k_B: int64.
        top_p_B: float.
        min_p_B: float.
        all_greedy: every request is greedy.
        max_top_k: the largest entry of `top_k_B`, None when unknown.
        any_top_p: some request may have top_p below 1.
        any_min_p: some request may have min_p above 0.
        is_temperature_left: whoever reads the processed logits divides them; not beside truncation, which reads them.
        max_chunk_bytes: bound on a float32 copy of the logits that are worked on at a time; chunks hold whole requests.

    Raises:
        ShapeError: the tensors do not fit each other.
    """
    num_rows = logits_BLV.shape[1]

    truncates = max_top_k is None or max_top_k > 0 or any_top_p or any_min_p
    assert not (truncates and is_temperature_left), "truncation looks at probabilities"

    def of_chunk(requests: slice) -> TargetLogits:
        ruled = apply_token_rules(
            logits_BLV[requests],
            draft_ids_BK[requests],
            anchor_position_B[requests],
            None if rules is None else rules.of_requests(requests),
            max_chunk_bytes=max_chunk_bytes,
        )
        if not truncates:
            return TargetLogits(ruled.raw_BLV, temper_logits(ruled.ruled_BLV, temperature_B[requests]))
        processed_RV = process_logits(
            ruled.ruled_BLV.flatten(0, 1),
            temperature_R=temperature_B[requests].repeat_interleave(num_rows),
            top_k_R=top_k_B[requests].repeat_interleave(num_rows),
            top_p_R=top_p_B[requests].repeat_interleave(num_rows),
            min_p_R=min_p_B[requests].repeat_interleave(num_rows),
            max_top_k=max_top_k,
            any_top_p=any_top_p,
            any_min_p=any_min_p,
        )
        return TargetLogits(ruled.raw_BLV, processed_RV.view(ruled.ruled_BLV.shape))

    if all_greedy or is_temperature_left:
        return TargetLogits(
            *apply_token_rules(logits_BLV, draft_ids_BK, anchor_position_B, rules, max_chunk_bytes=max_chunk_bytes)
        )
    chunks = request_chunks(logits_BLV, max_chunk_bytes)
    if len(chunks) == 1:
        return of_chunk(chunks[0])
    changes_raw = rules is not None and rules.grammar_mask_BLW is not None
    raw_BLV = torch.empty_like(logits_BLV, dtype=torch.float32) if changes_raw else logits_BLV
    processed_BLV = torch.empty_like(logits_BLV, dtype=torch.float32)
    for chunk in chunks:
        done = of_chunk(chunk)
        processed_BLV[chunk] = done.processed_BLV
        if changes_raw:
            raw_BLV[chunk] = done.raw_BLV
    return TargetLogits(raw_BLV, processed_BLV)


def process_logits(
    logits_RV: Tensor,
    *,
    temperature_R: Tensor,
    top_k_R: Tensor,
    top_p_R: Tensor,
    min_p_R: Tensor,
    all_greedy: bool = False,
    max_top_k: int | None = None,
    any_top_p: bool = True,
    any_min_p: bool = True,
) -> Tensor:
    """Turn logits into the logits of the distribution that is sampled from.

    The flags repeat on the host what the tensors say, so that a stage nobody asked for costs nothing and no tensor
    value has to be read. They may claim too much work, never too little.

    Args:
        logits_RV: any float dtype; NaN stays NaN, see `row_is_bad`.
        temperature_R: float; below 1e-5 the row is greedy and its other settings are ignored.
        top_k_R: int64; 0 or less, or V or more, keeps all.
        top_p_R: float; 1 or more keeps all.
        min_p_R: float in [0, 1); 0 keeps all.
        all_greedy: every row is greedy; the logits come back as they are, uncopied and in their own dtype.
        max_top_k: the largest entry of `top_k_R` (0: no row uses top-k); None when unknown, which sorts whole rows.
        any_top_p: some row may have top_p below 1.
        any_min_p: some row may have min_p above 0.

    Returns:
        float32 [R, V], -inf where a token was removed; greedy rows hold the logits unchanged.

    Raises:
        ShapeError: a setting does not have one entry per row.
    """
    if all_greedy:
        return logits_RV
    num_rows = logits_RV.shape[0]
    for name, setting in (("temperature", temperature_R), ("top_k", top_k_R), ("top_p", top_p_R), ("min_p", min_p_R)):
        if setting.shape != (num_rows,):
            raise ShapeError(name, expected=[num_rows], found=setting.shape)
    is_greedy_R = rows_are_greedy(temperature_R)
    z_RV = temper_logits(logits_RV.unsqueeze(1), temperature_R).squeeze(1)
    if any_min_p:
        z_RV = _apply_min_p_(z_RV, min_p_R.float().masked_fill(is_greedy_R, 0.0))
    if max_top_k is None or max_top_k > 0:
        z_RV = _apply_top_k_(z_RV, top_k_R.masked_fill(is_greedy_R, 0), max_top_k)
    if any_top_p:
        z_RV = _apply_top_p(z_RV, top_p_R.float().masked_fill(is_greedy_R, 1.0))
    return z_RV


def _apply_min_p_(z_RV: Tensor, min_p_R: Tensor) -> Tensor:
    floor_R = z_RV.amax(dim=-1) + min_p_R.log()  # ln 0 = -inf removes nothing
    return z_RV.masked_fill_(z_RV < floor_R.unsqueeze(1), -torch.inf)


def _apply_top_k_(z_RV: Tensor, top_k_R: Tensor, max_top_k: int | None) -> Tensor:
    vocab_size = z_RV.shape[1]
    width = vocab_size if max_top_k is None else min(max_top_k, vocab_size)
    largest_RK = torch.topk(z_RV, width, dim=-1).values
    keeps_all_R = (top_k_R <= 0) | (top_k_R >= vocab_size)
    threshold_R = largest_RK.gather(1, (top_k_R.long() - 1).clamp(0, width - 1).unsqueeze(1)).squeeze(1)
    threshold_R = threshold_R.masked_fill(keeps_all_R, -torch.inf)
    return z_RV.masked_fill_(z_RV < threshold_R.unsqueeze(1), -torch.inf)


def _apply_top_p(z_RV: Tensor, top_p_R: Tensor) -> Tensor:
    log_sum_R = torch.logsumexp(z_RV, dim=-1)
    if z_RV.device.type != "cpu" or z_RV.shape[1] <= _NUCLEUS_GUESSES[0]:
        return _apply_top_p_sorted(z_RV, top_p_R, log_sum_R)
    # Sorting 49,152 floats takes a core 4 ms, finding the largest 256 a tenth of that, and most nuclei lie within
    # those. A CPU may look at the outcome (there is no graph to capture), so rows are sorted in full only where the
    # guesses were too small. All ways sum the same numbers in the same order.
    cuts_R = top_p_R < 1.0
    kept_RV = torch.full_like(z_RV, -torch.inf)
    kept_RV[~cuts_R] = z_RV[~cuts_R]
    open_rows = cuts_R.nonzero().squeeze(1)
    for num_candidates in _NUCLEUS_GUESSES:
        if open_rows.numel() == 0 or num_candidates >= z_RV.shape[1]:
            break
        open_z = z_RV if open_rows.numel() == z_RV.shape[0] else z_RV[open_rows]
        ids, members, is_settled = _guess_nucleus(open_z, top_p_R[open_rows], log_sum_R[open_rows], num_candidates)
        kept_RV[open_rows[is_settled].unsqueeze(1), ids[is_settled]] = members[is_settled]
        open_rows = open_rows[~is_settled]
    if open_rows.numel() > 0:
        kept_RV[open_rows] = _apply_top_p_sorted(z_RV[open_rows], top_p_R[open_rows], log_sum_R[open_rows])
    return kept_RV


def _outside_nucleus(sorted_z: Tensor, top_p_R: Tensor, log_sum_R: Tensor) -> Tensor:
    """Mark, in rows sorted from the largest, the tokens before which a mass of p has already gone by."""
    probability = (sorted_z - log_sum_R.unsqueeze(1)).exp()
    mass_before = probability.cumsum(dim=-1) - probability
    outside = mass_before >= top_p_R.unsqueeze(1)
    outside[:, 0] = False
    return outside & (top_p_R < 1.0).unsqueeze(1)


def _apply_top_p_sorted(z_RV: Tensor, top_p_R: Tensor, log_sum_R: Tensor) -> Tensor:
    sorted_RV, ids_RV = torch.sort(z_RV, dim=-1, descending=True, stable=True)
    outside_RV = _outside_nucleus(sorted_RV, top_p_R, log_sum_R)
    return z_RV.masked_fill(torch.zeros_like(outside_RV).scatter(1, ids_RV, outside_RV), -torch.inf)


def _guess_nucleus(
    z_RV: Tensor, top_p_R: Tensor, log_sum_R: Tensor, num_candidates: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Cut the largest tokens to the nucleus: their ids, their logits or -inf, and for which rows that was enough."""
    ids_RM = torch.topk(z_RV, num_candidates, dim=-1).indices.sort(dim=-1).values
    sorted_RM, order_RM = torch.sort(z_RV.gather(1, ids_RM), dim=-1, descending=True, stable=True)
    outside_RM = _outside_nucleus(sorted_RM, top_p_R, log_sum_R)
    # The smallest member has to lie strictly above the smallest candidate, else ties with it may be out of sight.
    smallest_member_R = sorted_RM.masked_fill(outside_RM, torch.inf).amin(dim=-1)
    is_settled_R = outside_RM[:, -1] & (smallest_member_R > sorted_RM[:, -1])
    return ids_RM.gather(1, order_RM), sorted_RM.masked_fill(outside_RM, -torch.inf), is_settled_R
