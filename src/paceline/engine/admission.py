"""What a request comes to for one target: checked token ids, stop ids, and its rules on tokens in ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from paceline.engine.sampling import SamplingParameters
from paceline.errors import RequestError

MAX_BAD_WORD_TOKENS = 64  # every slot has room for the longest word there was, as often as for the most words


class TextEncoder(Protocol):
    """The part of a tokenizer that admission needs."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without special tokens."""
        ...


@dataclass(frozen=True)
class TokenLimits:
    """A request's rules on tokens, in ids of the target; the defaults rule nothing out.

    Attributes:
        allowed_ids: nothing else may be chosen; None allows all.
        bias_pairs: id and number added to its logit.
        held_ids: ids that cannot be chosen for the first `num_held` tokens.
        num_held: `min_tokens`; 0 holds nothing back.
        repetition_penalty: 1 is off.
        frequency_penalty: 0 is off.
        presence_penalty: 0 is off.
        bad_words: token sequences that are never completed.
    """

    allowed_ids: tuple[int, ...] | None = None
    bias_pairs: tuple[tuple[int, float], ...] = ()
    held_ids: tuple[int, ...] = ()
    num_held: int = 0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    bad_words: tuple[tuple[int, ...], ...] = ()

    @property
    def has_penalties(self) -> bool:
        """Whether any of the three penalties does something."""
        return (self.repetition_penalty, self.frequency_penalty, self.presence_penalty) != (1.0, 0.0, 0.0)


def stop_ids_of(sampling: SamplingParameters, target_stop_ids: Sequence[int]) -> tuple[int, ...]:
    """Token ids that end a request: its own, and the target's unless it goes past those."""
    own = () if sampling.ignore_eos else tuple(target_stop_ids)
    return tuple(dict.fromkeys(own + sampling.stop_token_ids))


def token_limits(
    sampling: SamplingParameters, tokenizer: TextEncoder, *, vocab_size: int, target_stop_ids: Sequence[int]
) -> TokenLimits:
    """Turn a request's rules into ids of a target.

    Args:
        sampling: as asked for.
        tokenizer: encodes the bad words.
        vocab_size: of the target.
        target_stop_ids: the target's own stop ids.

    Raises:
        RequestError: an id is not in the vocabulary, or a bad word has no tokens or more than 64.
    """
    for name, ids in (
        ("stop_token_ids", sampling.stop_token_ids),
        ("logit_bias", [token for token, _ in sampling.bias_pairs]),
        ("allowed_token_ids", sampling.allowed_token_ids or ()),
    ):
        outside = [token for token in ids if token >= vocab_size]
        if outside:
            raise RequestError(f"{name} holds {outside[0]}; the vocabulary has {vocab_size} ids")
    return TokenLimits(
        allowed_ids=sampling.allowed_token_ids,
        bias_pairs=sampling.bias_pairs,
        held_ids=stop_ids_of(sampling, target_stop_ids) if sampling.min_tokens else (),
        num_held=sampling.min_tokens,
        repetition_penalty=sampling.repetition_penalty,
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        bad_words=_bad_word_ids(sampling.bad_words, tokenizer, vocab_size),
    )


def _bad_word_ids(words: Sequence[str], tokenizer: TextEncoder, vocab_size: int) -> tuple[tuple[int, ...], ...]:
    """Each word as it stands at the beginning of a text and after a space; the two may be the same tokens."""
    found: dict[tuple[int, ...], None] = {}  # an ordered set
    for word in words:
        for text in (word, " " + word.lstrip(" ")):
            ids = tuple(tokenizer.encode(text))
            if not ids:
                raise RequestError(f"the bad word {word!r} has no tokens in this vocabulary")
            if len(ids) > MAX_BAD_WORD_TOKENS:
                raise RequestError(
                    f"a bad word has {len(ids)} tokens, at most {MAX_BAD_WORD_TOKENS} are possible: {word[:40]!r}..."
                )
            if max(ids) < vocab_size:  # a tokenizer may know more ids than the model has rows; those never come
                found[ids] = None
    return tuple(found)
