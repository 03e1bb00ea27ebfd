"""Per-slot state behind the rules on tokens: masks, biases and histories on the device, read as `TokenRules`.

A stage's arrays are made when the first request that uses it is admitted, so an engine whose requests have no rules
holds nothing. Admission sets a slot to neutral values in every array there is, then writes what the request asked for:
nothing of its former owner stays readable. A step adds the tokens it emitted, kept drafts and the target's own; refused
drafts never enter a history. After an interruption histories are written again from the host's tokens.

S slots plus the trash row, B requests of a step, L rows of a block, V vocabulary, W mask words.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.engine.admission import TokenLimits
from paceline.engine.sampling_flags import SamplingFlags
from paceline.ops.bad_words import BadWordRows
from paceline.ops.penalties import PenaltyRows
from paceline.ops.sample_tokens import NO_TOKEN
from paceline.ops.token_masks import num_mask_words, pack_token_mask
from paceline.ops.token_rules import TokenRules

_EVERYTHING = -1  # a mask word with all bits set
_FAR_AWAY = 2**62  # a position that no request reaches


class TokenState:
    """Arrays with one row per slot and a trash row at index `num_slots`.

    Args:
        num_slots: S.
        vocab_size: V.
        device: where the arrays live.
    """

    def __init__(self, num_slots: int, *, vocab_size: int, device: torch.device) -> None:
        self._num_rows, self._vocab_size, self._device = num_slots + 1, vocab_size, device
        self._allowed_SW: Tensor | None = None
        self._bias: tuple[Tensor, Tensor] | None = None  # ids, values [S + 1, M]
        self._held: tuple[Tensor, Tensor] | None = None  # ids [S + 1, M], first position at which they may come
        self._penalties: PenaltyRows | None = None
        self._bad_words: BadWordRows | None = None

    @property
    def num_bytes(self) -> int:
        """Memory of all arrays there are."""
        return sum(array.numel() * array.element_size() for array in self._arrays())

    def places(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """Address and shape of all arrays there are: a recorded step reads them where they were."""
        return tuple((array.data_ptr(), tuple(array.shape)) for array in self._arrays())

    def _arrays(self) -> list[Tensor]:
        single = [] if self._allowed_SW is None else [self._allowed_SW]
        groups = (self._bias, self._held, self._penalties, self._bad_words)
        return single + [array for group in groups if group is not None for array in group]

    # Admission

    def admit(self, slot: int, limits: TokenLimits, prompt_ids: Sequence[int]) -> None:
        """Give a slot to a request.

        Args:
            slot: its row.
            limits: its rules; checked.
            prompt_ids: its prompt, which histories begin with.
        """
        self._make_room(limits)
        self._clear(slot)
        if limits.allowed_ids is not None and self._allowed_SW is not None:
            allowed_V = torch.zeros(self._vocab_size, dtype=torch.bool)
            allowed_V[list(limits.allowed_ids)] = True
            self._allowed_SW[slot] = pack_token_mask(allowed_V).to(self._device)
        if limits.bias_pairs and self._bias is not None:
            ids, values = zip(*limits.bias_pairs, strict=True)
            _write_left(self._bias[0][slot], ids)
            _write_left(self._bias[1][slot], values)
        if limits.held_ids and self._held is not None:
            _write_left(self._held[0][slot], limits.held_ids)
            self._held[1][slot] = min(len(prompt_ids) + limits.num_held, _FAR_AWAY)
        if limits.has_penalties and self._penalties is not None:
            self._penalties.repetition_B[slot] = limits.repetition_penalty
            self._penalties.frequency_B[slot] = limits.frequency_penalty
            self._penalties.presence_B[slot] = limits.presence_penalty
        if limits.bad_words and self._bad_words is not None:
            for row_M, word in zip(self._bad_words.words_BXM[slot], limits.bad_words, strict=False):
                row_M[-len(word) :] = self._tensor(word)
        self.restore(slot, prompt_ids, ())

    def restore(self, slot: int, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> None:
        """Write a slot's histories again from what the host knows."""
        if self._penalties is not None:
            prompt_mask_V, counts_V = self._penalties.prompt_mask_BV[slot], self._penalties.output_counts_BV[slot]
            prompt_mask_V.zero_()
            counts_V.zero_()
            prompt_mask_V[self._tensor(prompt_ids)] = True
            output_T = self._tensor(output_ids)
            counts_V.index_add_(0, output_T, torch.ones_like(output_T, dtype=torch.int32))
        if self._bad_words is not None:
            recent_H = self._bad_words.recent_ids_BH[slot]
            recent_H.fill_(NO_TOKEN)
            text = [*prompt_ids, *output_ids][-len(recent_H) :] if len(recent_H) else []
            if text:
                recent_H[-len(text) :] = self._tensor(text)

    def _clear(self, slot: int) -> None:
        if self._allowed_SW is not None:
            self._allowed_SW[slot] = _EVERYTHING
        if self._bias is not None:
            self._bias[0][slot] = NO_TOKEN
            self._bias[1][slot] = 0.0
        if self._held is not None:
            self._held[0][slot] = NO_TOKEN
            self._held[1][slot] = 0
        if self._penalties is not None:
            self._penalties.repetition_B[slot] = 1.0
            self._penalties.frequency_B[slot] = 0.0
            self._penalties.presence_B[slot] = 0.0
        if self._bad_words is not None:
            self._bad_words.words_BXM[slot] = NO_TOKEN

    def _make_room(self, limits: TokenLimits) -> None:
        """Make the arrays that a request needs, or widen them; rows of others keep what they say."""
        rows, vocab_size = self._num_rows, self._vocab_size
        if limits.allowed_ids is not None and self._allowed_SW is None:
            self._allowed_SW = self._full((rows, num_mask_words(vocab_size)), _EVERYTHING, torch.int32)
        if limits.bias_pairs:
            ids, values = self._bias or (self._full((rows, 0), NO_TOKEN), self._full((rows, 0), 0.0, torch.float32))
            width = _capacity(len(limits.bias_pairs), ids.shape[1])
            self._bias = _widened(ids, width, NO_TOKEN), _widened(values, width, 0.0)
        if limits.held_ids:
            ids, before = self._held or (self._full((rows, 0), NO_TOKEN), self._full((rows,), 0))
            self._held = _widened(ids, _capacity(len(limits.held_ids), ids.shape[1]), NO_TOKEN), before
        if limits.has_penalties and self._penalties is None:
            self._penalties = PenaltyRows(
                prompt_mask_BV=self._full((rows, vocab_size), False, torch.bool),
                output_counts_BV=self._full((rows, vocab_size), 0, torch.int32),
                repetition_B=self._full((rows,), 1.0, torch.float32),
                frequency_B=self._full((rows,), 0.0, torch.float32),
                presence_B=self._full((rows,), 0.0, torch.float32),
            )
        if limits.bad_words:
            recent, words = self._bad_words or (self._full((rows, 0), NO_TOKEN), self._full((rows, 0, 1), NO_TOKEN))
            longest = _capacity(max(map(len, limits.bad_words)), words.shape[2])
            num_words = _capacity(len(limits.bad_words), words.shape[1])
            words = _widened(words, longest, NO_TOKEN, in_front=True)
            words = _widened(words.transpose(1, 2), num_words, NO_TOKEN).transpose(1, 2).contiguous()
            # Histories of others become longer only with missing tokens, which their own shorter words do not read.
            self._bad_words = BadWordRows(_widened(recent, longest - 1, NO_TOKEN, in_front=True), words)

    # Steps

    def rules_of(self, slots_B: Tensor, flags: SamplingFlags, grammar_mask_BLW: Tensor | None) -> TokenRules | None:
        """Read the rules of a step's requests.

        Args:
            slots_B: int64.
            flags: what the requests use; other stages are left out.
            grammar_mask_BLW: of this step; None if no request has a grammar.
        Returns:
            None where there is no rule at all.
        """
        if grammar_mask_BLW is None and not flags.any_rules:
            return None
        allowed_mask_BW = bias_ids_BM = bias_values_BM = held_ids_BM = held_before_B = penalties = bad_words = None
        if flags.any_allowed_ids and self._allowed_SW is not None:
            allowed_mask_BW = self._allowed_SW[slots_B]
        if flags.any_bias and self._bias is not None:
            bias_ids_BM, bias_values_BM = (array[slots_B] for array in self._bias)
        if flags.any_min_tokens and self._held is not None:
            held_ids_BM, held_before_B = (array[slots_B] for array in self._held)
        if flags.any_penalties and self._penalties is not None:
            penalties = PenaltyRows(*(array[slots_B] for array in self._penalties))
        if flags.any_bad_words and self._bad_words is not None:
            bad_words = BadWordRows(*(array[slots_B] for array in self._bad_words))
        rules = TokenRules(
            grammar_mask_BLW,
            allowed_mask_BW,
            bias_ids_BM,
            bias_values_BM,
            held_ids_BM,
            held_before_B,
            penalties,
            bad_words,
        )
        return None if all(stage is None for stage in rules) else rules

    def extend(self, slots_B: Tensor, token_ids_BL: Tensor, flags: SamplingFlags) -> None:
        """Add the tokens that a step emitted to the histories of its requests.

        Args:
            slots_B: int64, each slot once.
            token_ids_BL: int64, emitted tokens, then -1.
            flags: what the requests use.
        """
        if flags.any_penalties and self._penalties is not None:
            places = (slots_B.unsqueeze(1).expand_as(token_ids_BL), token_ids_BL.clamp(min=0))
            self._penalties.output_counts_BV.index_put_(places, (token_ids_BL >= 0).int(), accumulate=True)
        if flags.any_bad_words and self._bad_words is not None:
            recent_BH = self._bad_words.recent_ids_BH[slots_B]
            num_new_B1 = (token_ids_BL >= 0).sum(dim=1, keepdim=True)
            columns_BH = num_new_B1 + torch.arange(recent_BH.shape[1], device=self._device)
            self._bad_words.recent_ids_BH[slots_B] = torch.cat((recent_BH, token_ids_BL), dim=1).gather(1, columns_BH)

    def _full(self, shape: tuple[int, ...], value: float, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.full(shape, value, dtype=dtype, device=self._device)

    def _tensor(self, ids: Sequence[int]) -> Tensor:
        return torch.tensor(ids, dtype=torch.int64, device=self._device)


def _capacity(wanted: int, present: int) -> int:
    """At least what is wanted, in powers of two, so that few admissions make arrays anew."""
    return max(present, 1 << max(wanted - 1, 0).bit_length())


def _widened(array: Tensor, width: int, value: float, *, in_front: bool = False) -> Tensor:
    """The same rows with a longer last dimension."""
    num_new = width - array.shape[-1]
    if num_new == 0:
        return array
    return torch.nn.functional.pad(array, (num_new, 0) if in_front else (0, num_new), value=value)


def _write_left(row_M: Tensor, values: Sequence[float]) -> None:
    row_M[: len(values)] = torch.tensor(values, dtype=row_M.dtype, device=row_M.device)
