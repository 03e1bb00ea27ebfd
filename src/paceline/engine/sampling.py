"""How a request's tokens are chosen and when it ends: every parameter a caller may set, checked on construction."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from paceline.engine.draft_length import DraftLengthMode, checked_draft_length
from paceline.engine.structured import StructuredOutput, require_encodable
from paceline.errors import RequestError, shown

LogprobsMode = Literal["raw", "processed"]

MAX_LOGIT_BIASES = 1024
MAX_BAD_WORDS = 1024
MAX_LOGPROBS = 32
MAX_SAMPLES = 64
_SEED_RANGE = (-(2**63), 2**63 - 1)
_LARGEST_BIAS = 100.0
_LARGEST_PENALTY = 2.0


@dataclass(frozen=True)
class SamplingParameters:
    """How a request's tokens are chosen and when it ends; checked on construction.

    The rules on tokens (structured output, `allowed_token_ids`, `logit_bias`, `min_tokens`, penalties, `bad_words`, in
    this order) hold for greedy requests, too; temperature, min-p, top-k and top-p follow them. Every rule sees the text
    as it stands at each position of a draft block, so drafting changes nothing.

    Attributes:
        max_tokens: most tokens to generate, at least 1; cut to the room that the context length leaves.
        temperature: 0 takes the most likely token; below 1e-5 counts as 0, and 0.01 is the least above.
        top_k: sample among the k most likely tokens; 0 keeps all.
        top_p: sample among the most likely tokens that hold this mass, in (0, 1].
        min_p: drop tokens below this share of the most likely one's probability, in [0, 1].
        seed: of the request's noise; None draws one at admission. The same seed gives the same text whatever slot or
            neighbours a request has, as far as the arithmetic is row-invariant; under the methods "standard" and
            "block" also as far as the number of drafts is fixed. "match" and "coupled" need no fixed number.
        stop: texts that end the request; the text before the first of them is delivered.
        stop_token_ids: token ids that end the request, besides the target's own.
        ignore_eos: go past the target's own stop ids (not past `stop_token_ids`).
        include_stop_str_in_output: deliver the stop text, too, and the text of a stop token.
        min_tokens: the first so many tokens cannot end the request: ids that would are held back, stop texts that
            complete within them do not count. At most `max_tokens`. A structured output that is complete ends the
            request all the same: nothing could follow it.
        logit_bias: token id to a number in [-100, 100] added to its logit, at most 1024 ids; kept as sorted pairs.
        allowed_token_ids: nothing else is ever chosen; None allows all.
        repetition_penalty: divides positive and multiplies negative logits of tokens in prompt or output; 1 is off, the
            range is [1e-6, 1e6].
        frequency_penalty: subtracted once per occurrence in the output, in [-2, 2].
        presence_penalty: subtracted once from tokens that occur in the output, in [-2, 2].
        bad_words: texts whose tokens are never completed, with and without a leading space; at most 1024, and none of
            more than 64 tokens.
        logprobs: None for no log-probabilities, 0 for those of the chosen tokens, n up to 32 for the n best besides.
        logprobs_mode: "raw" reads the model's own distribution (under the grammar, if there is one), "processed" the
            one that was sampled from.
        n: samples of the prompt, 1 to 64; sample i uses `seed` + i.
        structured_output: the form the text must have.
        draft_length: "off", "fixed" or "adaptive" for this request; None follows the engine.

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
    min_tokens: int = 0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    bad_words: tuple[str, ...] = ()
    logprobs: int | None = None
    logprobs_mode: LogprobsMode = "raw"
    n: int = 1
    structured_output: StructuredOutput | None = None
    draft_length: DraftLengthMode | None = None

    def __post_init__(self) -> None:
        self._check_distribution()
        self._check_ends()
        self._check_token_rules()
        self._check_answer()

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken at every position."""
        return self.temperature < 1e-5

    @property
    def bias_pairs(self) -> tuple[tuple[int, float], ...]:
        """`logit_bias` as it is kept: pairs by ascending id."""
        return _pairs_of(self.logit_bias)

    @property
    def has_penalties(self) -> bool:
        """Whether any of the three penalties does something."""
        return (self.repetition_penalty, self.frequency_penalty, self.presence_penalty) != (1.0, 0.0, 0.0)

    def _check_distribution(self) -> None:
        _require_number("temperature", self.temperature, "a finite number >= 0", lambda value: value >= 0)
        _require_integer("top_k", self.top_k, minimum=0)
        _require_number("top_p", self.top_p, "in (0, 1]", lambda value: 0 < value <= 1)
        _require_number("min_p", self.min_p, "in [0, 1]", lambda value: 0 <= value <= 1)
        if self.seed is not None:
            _require_integer("seed", self.seed, minimum=_SEED_RANGE[0], maximum=_SEED_RANGE[1])

    def _check_ends(self) -> None:
        _require_integer("max_tokens", self.max_tokens, minimum=1)
        _require_integer("min_tokens", self.min_tokens, minimum=0)
        if self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens is {self.min_tokens}, more than max_tokens, which is {self.max_tokens}")
        self._keep_texts("stop")
        self._keep_ids("stop_token_ids", self.stop_token_ids)
        for name in ("ignore_eos", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} is {shown(getattr(self, name))}; it has to be True or False")

    def _check_token_rules(self) -> None:
        if self.logit_bias is not None:
            object.__setattr__(self, "logit_bias", _checked_biases(self.logit_bias))
        if self.allowed_token_ids is not None:
            self._keep_ids("allowed_token_ids", self.allowed_token_ids)
            if not self.allowed_token_ids:
                raise RequestError("allowed_token_ids is empty; at least one token has to be allowed, None allows all")
        _require_number(
            "repetition_penalty", self.repetition_penalty, "in [1e-6, 1e6]", lambda value: 1e-6 <= value <= 1e6
        )
        for name in ("frequency_penalty", "presence_penalty"):
            _require_number(name, getattr(self, name), "in [-2, 2]", lambda value: abs(value) <= _LARGEST_PENALTY)
        self._keep_texts("bad_words")
        if len(self.bad_words) > MAX_BAD_WORDS:
            raise RequestError(f"bad_words has {len(self.bad_words)} entries; at most {MAX_BAD_WORDS} are possible")

    def _check_answer(self) -> None:
        if self.logprobs is not None:
            _require_integer("logprobs", self.logprobs, minimum=0, maximum=MAX_LOGPROBS)
        if self.logprobs_mode not in get_args(LogprobsMode):
            raise RequestError(f"logprobs_mode is {shown(self.logprobs_mode)}; it has to be 'raw' or 'processed'")
        _require_integer("n", self.n, minimum=1, maximum=MAX_SAMPLES)
        if self.structured_output is not None and not isinstance(self.structured_output, StructuredOutput):
            raise RequestError(f"structured_output is {shown(self.structured_output)}; it has to be a StructuredOutput")
        if self.draft_length is not None:
            checked_draft_length(self.draft_length)

    def _keep_texts(self, name: str) -> None:
        value = getattr(self, name)
        if isinstance(value, str):
            raise RequestError(
                f"{name} is the text {shown(value)}; it has to be a sequence of texts", hint=f"{name}=(text,)"
            )
        texts = _sequence(name, value)
        for text in texts:
            if not isinstance(text, str):
                raise RequestError(f"{name} holds {shown(text)}, which is no text")
            if not text:
                raise RequestError(f"{name} holds an empty text; every entry needs at least one character")
            require_encodable(f"an entry of {name}", text)
        object.__setattr__(self, name, texts)

    def _keep_ids(self, name: str, value: object) -> None:
        ids = _sequence(name, value)
        for token in ids:
            _require_integer(f"an entry of {name}", token, minimum=0)
        object.__setattr__(self, name, ids)


def samples_of(sampling: SamplingParameters) -> list[SamplingParameters]:
    """Give the parameters of each of a prompt's n samples: one sample each, seeds counted up and wrapped at 64 bits.

    Args:
        sampling: `seed` None stays None, so that every sample draws its own.
    """
    if sampling.n == 1:
        return [sampling]
    lowest, highest = _SEED_RANGE
    size = highest - lowest + 1
    return [
        replace(sampling, n=1, seed=None if sampling.seed is None else (sampling.seed + index - lowest) % size + lowest)
        for index in range(sampling.n)
    ]


def _pairs_of(biases: Mapping[int, float] | Sequence[tuple[int, float]] | None) -> tuple[tuple[int, float], ...]:
    if biases is None:
        return ()
    return tuple(biases.items() if isinstance(biases, Mapping) else biases)


def _checked_biases(value: object) -> tuple[tuple[int, float], ...]:
    entries = _sequence("logit_bias", value.items() if isinstance(value, Mapping) else value)
    if len(entries) > MAX_LOGIT_BIASES:
        raise RequestError(f"logit_bias has {len(entries)} entries; at most {MAX_LOGIT_BIASES} are possible")
    pairs: dict[int, float] = {}
    for entry in entries:
        if not isinstance(entry, tuple | list) or len(entry) != 2:
            raise RequestError(f"logit_bias holds {shown(entry)}; it has to map token ids to numbers")
        token, bias = entry
        _require_integer("a token id of logit_bias", token, minimum=0)
        name = f"logit_bias of token {token}"
        _require_number(name, bias, "in [-100, 100]", lambda number: abs(number) <= _LARGEST_BIAS)
        if token in pairs:
            raise RequestError(f"logit_bias names token {token} twice")
        pairs[token] = float(bias)
    return tuple(sorted(pairs.items()))


def _sequence(name: str, value: object) -> tuple[Any, ...]:
    if not isinstance(value, Iterable):
        raise RequestError(f"{name} is {shown(value)}; it has to be a sequence")
    return tuple(value)


def _require_integer(name: str, value: object, *, minimum: int, maximum: int = _SEED_RANGE[1]) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise RequestError(f"{name} is {shown(value)}; it has to be an integer")
    if value < minimum:
        raise RequestError(f"{name} is {shown(value)}; it has to be at least {minimum}")
    if value > maximum:
        raise RequestError(f"{name} is {shown(value)}; it has to be at most {maximum}")


def _require_number(name: str, value: object, wanted: str, holds: Callable[[float], bool]) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    number = as_float(value) if is_number else math.nan
    if not math.isfinite(number) or not holds(number):
        raise RequestError(f"{name} is {shown(value)}; it has to be {wanted}")


def as_float(value: object) -> float:
    """A caller's number; NaN for an integer that has more digits than Python turns into text."""
    try:
        return float(str(value))
    except ValueError:
        return math.nan
