"""From token ids to text that may be shown: whole characters only, nothing past a stop, limits exact to the token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from paceline.engine.admission import stop_ids_of
from paceline.engine.request import FinishReason, SamplingParameters

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_LONGEST_WINDOW = 8  # ids; cutting a window costs a decoding, so it is not done at every push


class TextDecoder(Protocol):
    """The part of a tokenizer that output needs."""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids; bytes that form no character come out as U+FFFD."""
        ...


class IncrementalDecoder:
    """Turns a growing list of ids into a growing text whose pieces, joined, are the decoding of all ids.

    Only a window of the last ids is decoded again. Once it is long it is cut at a token where the text was complete,
    and takes the ids before that along, since some decoders treat the first token of a text specially. Replacement
    characters at the end may be the first bytes of a character and wait for the rest.

    Args:
        tokenizer: decodes ids.
    """

    def __init__(self, tokenizer: TextDecoder) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._num_before = 0  # ids at the window's front whose text was complete when they were pushed
        self._num_shown = 0  # characters of the window's text already given out

    def push(self, token_ids: Sequence[int]) -> str:
        """Add ids; returns the text that has become certain."""
        if not token_ids:
            return ""
        window, num_shown = self._window, self._num_shown
        window.extend(token_ids)
        text = self._tokenizer.decode(window)
        certain = text.rstrip(_REPLACEMENT)
        num_certain = len(certain)
        if num_certain > num_shown:
            self._num_shown = num_certain
        if num_certain == len(text):
            if len(window) > _LONGEST_WINDOW and self._num_before > 0:
                self._window = window = window[self._num_before :]
                self._num_shown = len(self._tokenizer.decode(window))
            self._num_before = len(window)
        return certain[num_shown:]

    def flush(self) -> str:
        """The text that was waiting for bytes which never came."""
        text = self._tokenizer.decode(self._window)
        new = text[self._num_shown :]
        self._num_shown = max(self._num_shown, len(text))
        return new

    def copy(self) -> IncrementalDecoder:
        """An independent decoder in the same state."""
        twin = IncrementalDecoder(self._tokenizer)
        twin._window, twin._num_before, twin._num_shown = list(self._window), self._num_before, self._num_shown
        return twin


@dataclass(frozen=True)
class StopMatch:
    """Where a stop text was found: which, and the range of characters it takes."""

    stop: str
    start: int
    end: int


def find_stop(text: str, stops: Sequence[str], *, from_index: int = 0) -> StopMatch | None:
    """The stop text that completes first, reading characters one by one; of two that complete together the longer.

    This order does not depend on how the text was cut into tokens or blocks.

    Args:
        text: to search.
        stops: non-empty texts.
        from_index: characters before it were searched already.
    """
    best: StopMatch | None = None
    for stop in stops:
        start = text.find(stop, max(0, from_index - len(stop) + 1))
        if start >= 0:
            match = StopMatch(stop, start, start + len(stop))
            if best is None or (match.end, match.start) < (best.end, best.start):
                best = match
    return best


def held_back(text: str, stops: Sequence[str]) -> int:
    """How many characters at the end may be the beginning of a stop text."""
    longest = 0
    for stop in stops:
        for length in range(min(len(stop) - 1, len(text)), longest, -1):
            if text.endswith(stop[:length]):
                longest = length
                break
    return longest


class Extension(NamedTuple):
    """What `RequestOutput.extend` made of new tokens.

    Attributes:
        num_kept: how many of them count; the rest lies behind the end and is dropped.
        text: newly certain.
        finish_reason: set if the request ends here.
        stop_reason: the stop token or text that ended it.
    """

    num_kept: int
    text: str
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


class RequestOutput:
    """Tokens and text of one request, and the rules of where it ends.

    The end is the first in token order of: a stop token, the token that completes a stop text, the token that completes
    the request's grammar, the token that uses up the budget. At the same token a stop beats the budget. The first
    `min_tokens` tokens complete no stop.

    Args:
        tokenizer: decodes ids.
        sampling: stops and switches.
        max_tokens: the budget after it was cut to the context's room.
        target_stop_ids: the target's own stop ids.
    """

    def __init__(
        self, tokenizer: TextDecoder, sampling: SamplingParameters, *, max_tokens: int, target_stop_ids: Sequence[int]
    ) -> None:
        self.token_ids: list[int] = []
        self.max_tokens = max_tokens
        self._min_tokens = sampling.min_tokens
        self.stop_ids = frozenset(stop_ids_of(sampling, target_stop_ids))
        self._stops = sampling.stop
        self._shows_stop = sampling.include_stop_str_in_output
        self._decoder = IncrementalDecoder(tokenizer)
        self._shown: list[str] = []
        self._pending = ""  # certain text that may be the beginning of a stop text

    @property
    def text(self) -> str:
        """Everything given out so far."""
        return "".join(self._shown)

    @property
    def num_remaining(self) -> int:
        """Tokens left in the budget."""
        return self.max_tokens - len(self.token_ids)

    def extend_within(self, token_ids: Sequence[int]) -> str | None:
        """Take in tokens of which none can end the request, as in nearly every step.

        Args:
            token_ids: in order.

        Returns:
            Newly certain text; None, and nothing was taken in, where the request may end.
        """
        own_ids = self.token_ids
        if self._stops or len(own_ids) + len(token_ids) >= self.max_tokens or not self.stop_ids.isdisjoint(token_ids):
            return None
        text = self._decoder.push(token_ids)
        own_ids.extend(token_ids)
        self._shown.append(text)
        return text

    def extend(self, token_ids: Sequence[int], *, is_complete: bool = False) -> Extension:
        """Take in tokens, as many as count.

        Args:
            token_ids: in order.
            is_complete: the last of them completes the request's grammar.
        """
        text = None if is_complete else self.extend_within(token_ids)
        if text is not None:
            return Extension(len(token_ids), text)
        num_remaining = self.num_remaining
        kept = list(token_ids[:num_remaining])
        reason: FinishReason | None = "length" if len(kept) == num_remaining else None
        if is_complete and len(kept) == len(token_ids):
            reason = "stop"
        stop_reason: int | str | None = None
        num_unchecked = max(0, self._min_tokens - len(self.token_ids))
        if not self.stop_ids.isdisjoint(kept):
            for index, token in enumerate(kept[num_unchecked:], num_unchecked):
                if token in self.stop_ids:
                    kept, reason, stop_reason = kept[: index + 1], "stop", token
                    break
        hides_last = stop_reason is not None and not self._shows_stop
        shown = kept[:-1] if hides_last else kept
        if self._stops:
            self._pending += self._decoder.push(shown[:num_unchecked])
            pushed = self._push_until_stop(shown[num_unchecked:])
            if pushed is not None:
                num_kept, stop, text = pushed
                num_kept += num_unchecked
                self.token_ids.extend(kept[:num_kept])
                self._shown.append(text)
                return Extension(num_kept, text, "stop", stop)
        else:
            self._pending += self._decoder.push(shown)
        self.token_ids.extend(kept)
        return Extension(len(kept), self._give_out(is_final=reason is not None), reason, stop_reason)

    def finish(self) -> str:
        """End the request from outside (abort, error): returns the text that was held back."""
        return self._give_out(is_final=True)

    def _give_out(self, *, is_final: bool) -> str:
        if is_final:
            self._pending += self._decoder.flush()
        cut = len(self._pending) - (held_back(self._pending, self._stops) if self._stops and not is_final else 0)
        text, self._pending = self._pending[:cut], self._pending[cut:]
        self._shown.append(text)
        return text

    def _push_until_stop(self, token_ids: Sequence[int]) -> tuple[int, str, str] | None:
        """Add text; if a stop text completes, returns the tokens up to it, the stop and the last text to give out."""
        before, decoder_before = self._pending, self._decoder.copy()
        self._pending += self._decoder.push(token_ids)
        if find_stop(self._pending, self._stops, from_index=len(before)) is None:
            return None
        # Text at a token is a prefix of the text at later ones, so going token by token finds the same stop.
        self._pending, self._decoder = before, decoder_before
        for index, token in enumerate(token_ids):
            length = len(self._pending)
            self._pending += self._decoder.push([token])
            match = find_stop(self._pending, self._stops, from_index=length)
            if match is not None:
                return index + 1, match.stop, self._pending[: match.end if self._shows_stop else match.start]
        # A tokenizer whose text depends on how it is cut: the stop exists only in the whole.
        match = find_stop(self._pending, self._stops, from_index=len(before))
        return None if match is None else (len(token_ids), match.stop, self._pending[: match.start])
