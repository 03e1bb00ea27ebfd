"""Which ids a drafter of few ids drafts: the most frequent ones among the tokens that it is trained to predict."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from paceline.errors import ConfigError, DataError
from paceline.models.drafters.vocabulary import by_frequency
from paceline.training.data import Conversations


@dataclass(frozen=True)
class ReducedVocabulary:
    """Chosen ids.

    Attributes:
        target_ids_V: int64, ascending: the target id of every draft id.
        coverage: share of the supervised tokens that are among them; the rest can never be drafted.
    """

    target_ids_V: Tensor
    coverage: float


def most_frequent_ids(
    conversations: Conversations, size: int, *, vocab_size: int, always: Collection[int]
) -> ReducedVocabulary:
    """Count the supervised tokens and keep the most frequent ids; equal counts go to the lower id.

    Data with fewer distinct ids than asked for is no problem: unseen ids, the lowest first, make up the number.

    Args:
        conversations: to be trained on.
        size: V, how many ids.
        vocab_size: of the target.
        always: ids that are kept whatever their count, such as stop tokens: a drafter without them loses the last
            block of every text.
    """
    counts_W = count_response_tokens(conversations, vocab_size)
    chosen_V = by_frequency(counts_W, always)[:size].sort().values
    return ReducedVocabulary(chosen_V, _coverage(counts_W, chosen_V))


def vocabulary_of(target_ids_V: Tensor, conversations: Conversations, *, vocab_size: int) -> ReducedVocabulary:
    """The vocabulary that a drafter has already, and what it covers of other conversations.

    Args:
        target_ids_V: int64, the target id of every draft id.
        conversations: to be trained on.
        vocab_size: of the target.
    """
    return ReducedVocabulary(target_ids_V, _coverage(count_response_tokens(conversations, vocab_size), target_ids_V))


def _coverage(counts_W: Tensor, chosen_V: Tensor) -> float:
    return int(counts_W[chosen_V].sum()) / max(int(counts_W.sum()), 1)


def count_response_tokens(conversations: Conversations, vocab_size: int) -> Tensor:
    """How often each id is to be predicted, int64 [vocab_size].

    Raises:
        DataError: an id lies outside the vocabulary.
    """
    tokens = conversations.tokens[conversations.supervised]
    counts = np.bincount(tokens, minlength=vocab_size).astype(np.int64)
    if len(counts) > vocab_size:
        raise DataError(f"the conversations hold token id {len(counts) - 1}; the vocabulary ends at {vocab_size - 1}")
    return torch.from_numpy(counts)


def require_coverage(vocabulary: ReducedVocabulary, wanted: float) -> None:
    """Refuse a choice that leaves too much text without drafts.

    Raises:
        ConfigError: the coverage is below `wanted`.
    """
    if vocabulary.coverage < wanted:
        raise ConfigError(
            f"drafter.draft_vocab_size {len(vocabulary.target_ids_V)} covers {vocabulary.coverage:.1%} of the response "
            f"tokens, less than drafter.min_vocab_coverage {wanted:.1%}",
            hint="a larger draft_vocab_size, or none at all",
        )
