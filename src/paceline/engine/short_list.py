"""Which ids an engine drafts: all, the most frequent ones, or as many of these as cover nearly all text.

V listed ids, W target vocabulary.
"""

from __future__ import annotations

import logging
from typing import Literal

from torch import Tensor

from paceline.errors import ConfigError, RequestError
from paceline.models.drafters.short_list import ShortList
from paceline.models.drafters.vocabulary import by_frequency
from paceline.models.loading import LoadedDrafter, LoadedTarget

DraftVocabSize = int | Literal["auto", "full"]
AUTO_COVERAGE = 0.995
AUTO_MULTIPLE = 1024  # rows of a head that oneDNN and tensor cores cut without a rest
_NO_TEXT = [{"role": "user", "content": ""}]
_log = logging.getLogger(__name__)


def choose_short_list(target: LoadedTarget, drafter: LoadedDrafter, asked: DraftVocabSize) -> ShortList | None:
    """The ids that an engine drafts; None is all that the drafter can.

    "auto" lists the fewest ids, in steps of 1024, that cover 99.5 % of the counted tokens, where this is less than half
    of the vocabulary, on a CPU: there a draft step waits for the head's bytes. On a GPU, without counts or with a
    reduced vocabulary it lists nothing. Ids that end a text or that the chat template writes are always listed.

    Args:
        target: whose ids they are.
        drafter: with the counts of the text that it was trained on.
        asked: a number of ids, "auto" or "full".
    Raises:
        ConfigError: a number that this drafter cannot do, or that leaves out an id that is always listed.
    """
    if asked in ("full", target.contract.vocab_size):
        return None
    is_cpu = target.model.norm.weight.device.type == "cpu"
    if asked == "auto" and not (is_cpu and drafter.token_counts_W is not None and _may_be_listed(drafter)):
        return None
    counts_W = _counts_for(drafter, asked)
    always = _always_listed(target)
    order_W = by_frequency(counts_W, always)
    if isinstance(asked, int):
        _require_size(asked, len(always), target)
        size = asked
    else:
        size = auto_size(counts_W[order_W], num_always=len(always))
        if 2 * size >= len(counts_W):
            return None
    ids_V = order_W[:size].sort().values
    coverage = int(counts_W[ids_V].sum()) / int(counts_W.sum())
    _log.info("drafting from %d of %d ids, %.2f %% of the counted tokens", size, len(counts_W), 100 * coverage)
    return ShortList(ids_V, coverage)


def auto_size(ordered_counts_W: Tensor, *, num_always: int = 0) -> int:
    """The fewest ids, in steps of 1024, that cover 99.5 % of the counted tokens.

    Args:
        ordered_counts_W: int64, of `by_frequency`; at least one is above 0.
        num_always: how many ids stand first because they are always listed: it is no fewer.
    """
    covered_W = ordered_counts_W.cumsum(0).double()
    num_enough = int((covered_W < AUTO_COVERAGE * covered_W[-1]).sum()) + 1
    return -(-max(num_enough, num_always) // AUTO_MULTIPLE) * AUTO_MULTIPLE


def _may_be_listed(drafter: LoadedDrafter) -> bool:
    return not drafter.contract.has_vocabulary_map


def _counts_for(drafter: LoadedDrafter, asked: DraftVocabSize) -> Tensor:
    contract = drafter.contract
    if not _may_be_listed(drafter):
        raise ConfigError(
            f"draft_vocab_size is {asked}; the drafter has a vocabulary of its own, {contract.draft_vocab_size} of "
            f"{contract.target_vocab_size} ids, and was trained with it",
            origin={"drafter": contract.origin},
            hint="draft_vocab_size 'full'",
        )
    if drafter.token_counts_W is None:
        raise ConfigError(
            f"draft_vocab_size is {asked}; the drafter's folder does not say which ids are frequent",
            origin={"drafter": contract.origin},
            hint="`paceline capture counts FILES... --into DRAFTER`, with files of conversations like those it drafts",
        )
    return drafter.token_counts_W


def _require_size(size: int, num_always: int, target: LoadedTarget) -> None:
    if not num_always <= size <= target.contract.vocab_size:
        raise ConfigError(
            f"draft_vocab_size is {size}; it has to be from {num_always}, the ids that end a text or that the chat "
            f"template writes, to {target.contract.vocab_size}, the whole vocabulary",
            origin={"target": target.contract.origin},
        )


def _always_listed(target: LoadedTarget) -> set[int]:
    """Ids that end a text, and those that the chat template writes around a turn."""
    ids = set(target.contract.stop_token_ids)
    if target.tokenizer.has_chat_template:
        try:
            ids.update(target.tokenizer.encode_chat(_NO_TEXT))
        except RequestError:
            _log.debug("the chat template refuses a turn without text; its ids are listed where they are frequent")
    return {token for token in ids if token < target.contract.vocab_size}
