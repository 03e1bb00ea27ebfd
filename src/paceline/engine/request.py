"""What a caller asks for and what comes back: sampling parameters, deltas while a request runs, its final result."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from paceline.engine.sampling import LogprobsMode, SamplingParameters, as_float
from paceline.errors import RequestError, shown
from paceline.trace.step import RequestTrace, StepRecord

if TYPE_CHECKING:
    from paceline.ops.verify_block import VerifyMethod

__all__ = [
    "FinishReason",
    "QueueOptions",
    "RequestDelta",
    "RequestResult",
    "SamplingParameters",
    "TokenLogprobs",
    "check_prompt",
]

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True)
class QueueOptions:
    """How a request is queued; checked on construction.

    Attributes:
        priority: lower ones are served first, and step back last.
        timeout_s: seconds from now on after which it ends, wherever it stands; None for never.
        cache_salt: it shares cached text with requests of the same salt alone, so that nobody learns from timing what
            others wrote; None shares with all that have none.

    Raises:
        RequestError: a value is impossible; the message names it.
    """

    priority: int = 0
    timeout_s: float | None = None
    cache_salt: str | None = None

    def __post_init__(self) -> None:
        priority: object = self.priority
        if not isinstance(priority, int) or isinstance(priority, bool):
            raise RequestError(f"priority is {shown(priority)}; it has to be an integer")
        timeout_s: object = self.timeout_s
        if timeout_s is not None:
            is_number = isinstance(timeout_s, int | float) and not isinstance(timeout_s, bool)
            if not is_number or not 0 < as_float(timeout_s) < math.inf:
                raise RequestError(f"timeout_s is {shown(timeout_s)}; it has to be a positive number of seconds")
        salt: object = self.cache_salt
        if salt is not None and not isinstance(salt, str):
            raise RequestError(f"cache_salt is {shown(salt)}; it has to be a text")


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities at one delivered token, always the target's own.

    Attributes:
        token_id: the token.
        logprob: of the token.
        top: the most likely tokens and theirs, best first and equal ones by ascending id; as many as asked for, fewer
            where fewer are possible. The delivered token may be among them.
        mode: "raw" or "processed", see `SamplingParameters.logprobs_mode`.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    mode: LogprobsMode


# Not frozen, like the record of a step: there are as many of them.
@dataclass(slots=True, unsafe_hash=True)
class RequestDelta:
    """What one engine step added to one request. Nobody changes it once it is made.

    Attributes:
        request_id: whose.
        token_ids: delivered now, in order; may be empty.
        text: delivered now; lags behind the ids while a character or a possible stop text is incomplete.
        finish_reason: set on a request's last delta.
        step: the record of the step, None for the delta of the prompt pass or of an abort.
        logprobs: one entry per delivered token; None if none were asked for.
    """

    request_id: str
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None = None
    step: StepRecord | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None


@dataclass(frozen=True)
class RequestResult:
    """A finished request.

    Attributes:
        request_id: whose.
        prompt_ids: as given.
        token_ids: everything delivered; a stop token is its last entry, and with a stop text the token completing it.
        text: decoded without special tokens; ends before a stop text or stop token unless asked otherwise.
        finish_reason: "stop", "length" (budget or context used up), "abort", or "error".
        stop_reason: the stop token or stop text that ended it; None where a complete structured output did.
        trace: every step.
        logprobs: one entry per token of `token_ids`; None if none were asked for.
        error: for the reason "error", what happened: NaN or infinity in logits, rules that left no token, or no room
            for what its rules need. For "abort", that its time was up; None where the caller ended it.
        sample_index: which of the prompt's n samples this is.
        verify_method: how drafts were judged.
        is_lossless: whether that method leaves the target's distribution untouched.
        num_cached_tokens: prompt tokens whose keys were there already when it was first admitted.
        num_preemptions: how often it stepped back for others and was resumed.
        context_start: positions below it had no draft context at some admission; 0 where all of it was there.
        has_dead_end: whether the error is that its own rules left no token.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    stop_reason: int | str | None
    trace: RequestTrace
    logprobs: tuple[TokenLogprobs, ...] | None = None
    error: str | None = None
    sample_index: int = 0
    verify_method: VerifyMethod = "standard"
    is_lossless: bool = True
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    context_start: int = 0
    has_dead_end: bool = False


def check_prompt(prompt_ids: Sequence[int], *, vocab_size: int, max_model_len: int) -> tuple[int, ...]:
    """Refuse a prompt that cannot be run.

    Args:
        prompt_ids: token ids.
        vocab_size: of the target.
        max_model_len: tokens that prompt and output may hold together.
    Raises:
        RequestError: no sequence of integers, empty, an id outside the vocabulary, or no room for a single new token.
    """
    ids = _as_ids(prompt_ids)
    if not ids:
        raise RequestError("the prompt is empty; at least one token is needed to predict the next")
    if len(ids) >= max_model_len:
        raise RequestError(
            f"the prompt has {len(ids)} tokens; a context of {max_model_len} leaves no room for a new one",
            hint=f"a prompt of at most {max_model_len - 1} tokens, or a larger max_model_len",
        )
    for index, token in enumerate(ids):
        if not 0 <= token < vocab_size:
            raise RequestError(f"prompt token {index} is {shown(token)}; the vocabulary has ids 0 to {vocab_size - 1}")
    return ids


def _as_ids(prompt_ids: object) -> tuple[int, ...]:
    """Integers of any library as Python's own; nothing is rounded, and no text is taken for ids."""
    num_dimensions = getattr(prompt_ids, "ndim", 1)  # of a tensor or array
    if num_dimensions != 1:
        raise RequestError(
            f"the prompt has {num_dimensions} dimensions; it has to be a sequence of token ids",
            hint="a row of it, or Engine.generate, which takes several prompts",
        )
    if isinstance(prompt_ids, str | bytes | Mapping | Set) or not isinstance(prompt_ids, Iterable):
        raise RequestError(
            f"the prompt is of type {type(prompt_ids).__name__}; it has to be a sequence of token ids",
            hint="tokenizer.encode(text)",
        )
    ids = []
    for index, token in enumerate(prompt_ids):
        if isinstance(token, bool) or not hasattr(token, "__index__"):
            raise RequestError(f"prompt token {index} is {shown(token)}; it has to be an integer")
        try:
            ids.append(operator.index(token))
        except TypeError as error:  # a tensor says that it is an integer, whatever it holds
            raise RequestError(f"prompt token {index} is {shown(token)}; it has to be an integer") from error
    return tuple(ids)
