"""What a request's rules make of the target's logits, row by row; stages that no request uses cost nothing.

    raw    = logits with the grammar mask in them
    ruled  = raw, then in this order
             allow-list     every other token -inf
             logit bias     added
             min tokens     stop ids -inf in rows that predict a position which comes too early to stop
             penalties      repetition, frequency, presence
             bad words      the token that would complete one -inf

Bias adds and the repetition penalty scales, so their order has a meaning. Every row of a block is treated as plain
decoding would treat it: its history ends with the drafts before it, its position counts them, its grammar mask follows
them. Temperature and truncation come after (`target_distribution`).

All in float32 on a copy. A row depends on its own request alone, so neither neighbours nor the split into chunks can be
seen in a result. -inf, NaN and +inf are never cured: a row that holds NaN or +inf, or nothing but -inf, ends as one.
No tensor value is read on the host.

B requests, K drafts, L = K + 1 rows, V vocabulary, W = ceil(V / 32) mask words, M ids per list.

Source: order of the logits processors of vLLM 0.33; the history rule is what makes it lossless (arXiv 2302.01318 asks
for p given the accepted prefix).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.errors import ShapeError
from paceline.ops.bad_words import BadWordRows, mask_bad_words_
from paceline.ops.penalties import PenaltyRows, apply_penalties_
from paceline.ops.token_masks import add_at_ids_, forbid_by_mask_, forbid_ids_, num_mask_words

MAX_CHUNK_BYTES = 2**30
_CPU_CHUNK_BYTES = 2**22


class TokenRules(NamedTuple):
    """The rules of the requests of one step; None where no request uses the stage.

    A request that does not use a stage of its neighbours has neutral values there, which change no bit: all ones in a
    mask, -1 in a list of ids.

    Attributes:
        grammar_mask_BLW: int32, see `token_masks`; one mask per row.
        allowed_mask_BW: int32, one mask per request.
        bias_ids_BM: int64, unique in a row; -1 is padding.
        bias_values_BM: float32.
        held_ids_BM: int64, stop ids held back by min_tokens; -1 is padding.
        held_before_B: int64, the first position at which they may come: prompt length + min_tokens.
        penalties: see `PenaltyRows`.
        bad_words: see `BadWordRows`.
    """

    grammar_mask_BLW: Tensor | None = None
    allowed_mask_BW: Tensor | None = None
    bias_ids_BM: Tensor | None = None
    bias_values_BM: Tensor | None = None
    held_ids_BM: Tensor | None = None
    held_before_B: Tensor | None = None
    penalties: PenaltyRows | None = None
    bad_words: BadWordRows | None = None

    def of_requests(self, requests: slice) -> TokenRules:
        """Give the rules of some of the requests."""

        def part(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor[requests]

        return TokenRules(
            grammar_mask_BLW=part(self.grammar_mask_BLW),
            allowed_mask_BW=part(self.allowed_mask_BW),
            bias_ids_BM=part(self.bias_ids_BM),
            bias_values_BM=part(self.bias_values_BM),
            held_ids_BM=part(self.held_ids_BM),
            held_before_B=part(self.held_before_B),
            penalties=None if self.penalties is None else PenaltyRows(*(tensor[requests] for tensor in self.penalties)),
            bad_words=None if self.bad_words is None else BadWordRows(*(tensor[requests] for tensor in self.bad_words)),
        )


class RuledLogits(NamedTuple):
    """Logits before and after the rules. They may share memory with each other and with what they were made from.

    Attributes:
        raw_BLV: with the grammar mask in them, in float32; where no request has one, the logits that were given.
        ruled_BLV: float32 after all rules; the same tensor as `raw_BLV` where there are no others.
    """

    raw_BLV: Tensor
    ruled_BLV: Tensor


def apply_token_rules(
    logits_BLV: Tensor,
    draft_ids_BK: Tensor,
    anchor_position_B: Tensor,
    rules: TokenRules | None,
    *,
    max_chunk_bytes: int = MAX_CHUNK_BYTES,
) -> RuledLogits:
    """Apply every rule to every row.

    Args:
        logits_BLV: any float dtype, vocabulary padding removed; not changed. Row i scores position anchor + i + 1.
        draft_ids_BK: int64 in [0, V); -1 where there is no draft, which adds nothing to a history.
        anchor_position_B: int64, position of row 0.
        rules: None where no request has any.
        max_chunk_bytes: bound on a float32 copy of the logits that are worked on at a time, and so on temporaries. A
            single request may exceed it: chunks hold whole requests.

    Raises:
        ShapeError: logits, drafts and rules do not fit each other.
        ValueError: one half of a rule is missing.
    """
    _check_shapes(logits_BLV, draft_ids_BK, anchor_position_B, rules)
    if rules is None or all(stage is None for stage in rules):
        return RuledLogits(logits_BLV, logits_BLV)
    chunks = request_chunks(logits_BLV, max_chunk_bytes)
    if len(chunks) == 1:
        return _apply_to_chunk(logits_BLV, draft_ids_BK, anchor_position_B, rules)
    has_other_rules = any(stage is not None for stage in rules[1:])
    float32 = torch.float32
    raw_BLV = logits_BLV if rules.grammar_mask_BLW is None else torch.empty_like(logits_BLV, dtype=float32)
    ruled_BLV = torch.empty_like(logits_BLV, dtype=float32) if has_other_rules else raw_BLV
    for chunk in chunks:
        done = _apply_to_chunk(
            logits_BLV[chunk], draft_ids_BK[chunk], anchor_position_B[chunk], rules.of_requests(chunk)
        )
        if rules.grammar_mask_BLW is not None:
            raw_BLV[chunk] = done.raw_BLV
        if has_other_rules:
            ruled_BLV[chunk] = done.ruled_BLV
    return RuledLogits(raw_BLV, ruled_BLV)


def request_chunks(logits_BLV: Tensor, max_chunk_bytes: int) -> list[slice]:
    """Split a batch so that a float32 copy of each part's logits stays within a bound, but never split a request.

    Args:
        logits_BLV: any float dtype.
        max_chunk_bytes: the bound; a single request may exceed it.
    """
    num_requests, num_rows, vocab_size = logits_BLV.shape
    if logits_BLV.device.type == "cpu":  # temporaries that fit its cache halve the time of 64 rows
        max_chunk_bytes = min(max_chunk_bytes, _CPU_CHUNK_BYTES)
    size = max(max_chunk_bytes // max(4 * num_rows * vocab_size, 1), 1)
    return [slice(start, start + size) for start in range(0, max(num_requests, 1), size)]


def _apply_to_chunk(
    logits_BLV: Tensor, draft_ids_BK: Tensor, anchor_position_B: Tensor, rules: TokenRules
) -> RuledLogits:
    num_rows = logits_BLV.shape[1]
    raw_BLV = logits_BLV
    if rules.grammar_mask_BLW is not None:
        raw_BLV = forbid_by_mask_(logits_BLV.to(torch.float32, copy=True), rules.grammar_mask_BLW)
    if all(stage is None for stage in rules[1:]):
        return RuledLogits(raw_BLV, raw_BLV)

    z_BLV = raw_BLV.to(torch.float32, copy=True)
    if rules.allowed_mask_BW is not None:
        forbid_by_mask_(z_BLV, rules.allowed_mask_BW.unsqueeze(1))
    if rules.bias_ids_BM is not None and rules.bias_values_BM is not None:
        ids_BLM = rules.bias_ids_BM.unsqueeze(1).expand(-1, num_rows, -1)
        add_at_ids_(z_BLV, ids_BLM, rules.bias_values_BM.unsqueeze(1).expand_as(ids_BLM))
    if rules.held_ids_BM is not None and rules.held_before_B is not None:
        ids_BLM = rules.held_ids_BM.unsqueeze(1).expand(-1, num_rows, -1)
        row_L = torch.arange(num_rows, device=z_BLV.device)
        position_BL = anchor_position_B.unsqueeze(1) + row_L + 1
        is_held_BL = position_BL < rules.held_before_B.unsqueeze(1)
        forbid_ids_(z_BLV, ids_BLM, is_held_BL.unsqueeze(2).expand_as(ids_BLM))
    if rules.penalties is not None:
        apply_penalties_(z_BLV, draft_ids_BK, rules.penalties)
    if rules.bad_words is not None:
        mask_bad_words_(z_BLV, draft_ids_BK, rules.bad_words)
    return RuledLogits(raw_BLV, z_BLV)


def _check_shapes(
    logits_BLV: Tensor, draft_ids_BK: Tensor, anchor_position_B: Tensor, rules: TokenRules | None
) -> None:
    num_requests, num_drafts = draft_ids_BK.shape
    if logits_BLV.dim() != 3 or logits_BLV.shape[:2] != (num_requests, num_drafts + 1):
        expected = f"[{num_requests}, {num_drafts + 1}, V]"
        raise ShapeError("logits", expected=expected, found=logits_BLV.shape)
    _check_shape("anchor_position", anchor_position_B, (num_requests,))
    if rules is None:
        return
    for names in (("bias_ids_BM", "bias_values_BM"), ("held_ids_BM", "held_before_B")):
        given = [name for name in names if getattr(rules, name) is not None]
        if len(given) == 1:
            raise ValueError(f"{given[0]} was given alone; it needs {' and '.join(names)}")
    vocab_size = logits_BLV.shape[2]
    num_words = num_mask_words(vocab_size)
    _check_shape("grammar_mask", rules.grammar_mask_BLW, (num_requests, num_drafts + 1, num_words))
    _check_shape("allowed_mask", rules.allowed_mask_BW, (num_requests, num_words))
    _check_shape("bias_ids", rules.bias_ids_BM, (num_requests, None))
    _check_shape("bias_values", rules.bias_values_BM, None if rules.bias_ids_BM is None else rules.bias_ids_BM.shape)
    _check_shape("held_ids", rules.held_ids_BM, (num_requests, None))
    _check_shape("held_before", rules.held_before_B, (num_requests,))
    if rules.penalties is not None:
        for name, tensor in zip(PenaltyRows._fields, rules.penalties, strict=True):
            _check_shape(name, tensor, (num_requests, vocab_size) if name.endswith("V") else (num_requests,))
    if rules.bad_words is not None:
        _check_shape("recent_ids", rules.bad_words.recent_ids_BH, (num_requests, None))
        _check_shape("words", rules.bad_words.words_BXM, (num_requests, None, None))


def _check_shape(name: str, tensor: Tensor | None, shape: Sequence[int | None] | None) -> None:
    """Compare a shape; None stands for any size, an absent tensor fits."""
    if tensor is None or shape is None:
        return
    fits = tensor.dim() == len(shape) and all(
        size is None or size == found for size, found in zip(shape, tensor.shape, strict=True)
    )
    if not fits:
        expected = "[" + ", ".join("any" if size is None else str(size) for size in shape) + "]"
        raise ShapeError(name, expected=expected, found=tensor.shape)
