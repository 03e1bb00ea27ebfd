"""What a caller asks for and what comes back: sampling parameters, deltas while a request runs, its final result."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from paceline.errors import RequestError
from paceline.trace.step import RequestTrace, StepRecord

FinishReason = Literal["stop", "length", "abort", "error"]

_SEED_RANGE = (-(2**63), 2**63 - 1)


@dataclass(frozen=True)
class SamplingParameters:
    """How a request's tokens are chosen and when it ends; checked on construction.

    Attributes:
        max_tokens: most tokens to generate, at least 1; cut to the room that the context length leaves.
        temperature: 0 takes the most likely token; below 1e-5 counts as 0, and 0.01 is the least above.
        top_k: sample among the k most likely tokens; 0 keeps all.
        top_p: sample among the most likely tokens that hold this mass, in (0, 1].
        min_p: drop tokens below this share of the most likely one's probability, in [0, 1].
        seed: of the request's noise; None draws one at admission. The same seed gives the same text whatever slot or
            neighbours a request has, as far as the arithmetic is row-invariant.
        stop: texts that end the request; the text before the first of them is delivered.
        stop_token_ids: token ids that end the request, besides the target's own.
        ignore_eos: go past the target's own stop ids (not past `stop_token_ids`).
        include_stop_str_in_output: deliver the stop text, too, and the text of a stop token.

    Raises:
        RequestError: a value is impossible; the message names it.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        _require_integer("max_tokens", self.max_tokens, minimum=1)
        _require_integer("top_k", self.top_k, minimum=0)
        _require_number("temperature", self.temperature, "a finite number >= 0", lambda value: value >= 0)
        _require_number("top_p", self.top_p, "in (0, 1]", lambda value: 0 < value <= 1)
        _require_number("min_p", self.min_p, "in [0, 1]", lambda value: 0 <= value <= 1)
        if self.seed is not None:
            _require_integer("seed", self.seed, minimum=_SEED_RANGE[0])
            if self.seed > _SEED_RANGE[1]:
                raise RequestError(f"seed is {self.seed}; it has to fit in 64 bits, at most {_SEED_RANGE[1]}")
        if isinstance(self.stop, str):
            raise RequestError(f"stop is the text {self.stop!r}; it has to be a sequence of texts", hint="stop=(text,)")
        for name, values in (("stop", tuple(self.stop)), ("stop_token_ids", tuple(self.stop_token_ids))):
            object.__setattr__(self, name, values)
        for text in self.stop:
            if not text:
                raise RequestError("stop holds an empty text; every entry needs at least one character")
        for token in self.stop_token_ids:
            _require_integer("an entry of stop_token_ids", token, minimum=0)

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken at every position."""
        return self.temperature < 1e-5


@dataclass(frozen=True)
class RequestDelta:
    """What one engine step added to one request.

    Attributes:
        request_id: whose.
        token_ids: delivered now, in order; may be empty.
        text: delivered now; lags behind the ids while a character or a possible stop text is incomplete.
        finish_reason: set on a request's last delta.
        step: the record of the step, None for the delta of the prompt pass or of an abort.
    """

    request_id: str
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None = None
    step: StepRecord | None = None


@dataclass(frozen=True)
class RequestResult:
    """A finished request.

    Attributes:
        request_id: whose.
        prompt_ids: as given.
        token_ids: everything delivered; a stop token is its last entry, and with a stop text the token completing it.
        text: decoded without special tokens; ends before a stop text or stop token unless asked otherwise.
        finish_reason: "stop", "length" (budget or context used up), "abort", or "error" (NaN or infinity in logits).
        stop_reason: the stop token or stop text that ended it.
        trace: every step.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    stop_reason: int | str | None
    trace: RequestTrace


def check_prompt(prompt_ids: Sequence[int], *, vocab_size: int, max_model_len: int) -> tuple[int, ...]:
    """Refuse a prompt that cannot be run.

    Args:
        prompt_ids: token ids.
        vocab_size: of the target.
        max_model_len: tokens that prompt and output may hold together.
    Raises:
        RequestError: empty, an id outside the vocabulary, or no room for a single new token.
    """
    if len(prompt_ids) == 0:
        raise RequestError("the prompt is empty; at least one token is needed to predict the next")
    if len(prompt_ids) >= max_model_len:
        raise RequestError(
            f"the prompt has {len(prompt_ids)} tokens; a context of {max_model_len} leaves no room for a new one",
            hint=f"a prompt of at most {max_model_len - 1} tokens, or a larger max_model_len",
        )
    for index, token in enumerate(prompt_ids):
        if not 0 <= token < vocab_size:
            raise RequestError(f"prompt token {index} is {token}; the vocabulary has ids 0 to {vocab_size - 1}")
    return tuple(int(token) for token in prompt_ids)


def _require_integer(name: str, value: object, *, minimum: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise RequestError(f"{name} is {value!r}; it has to be an integer")
    if value < minimum:
        raise RequestError(f"{name} is {value}; it has to be at least {minimum}")


def _require_number(name: str, value: object, wanted: str, holds: Callable[[float], bool]) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(float(str(value))) or not holds(float(str(value))):
        raise RequestError(f"{name} is {value!r}; it has to be {wanted}")
