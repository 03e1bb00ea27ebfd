"""Sizes and choices of an engine, and what the models allow of them."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.checkpoint.contract import DraftSampleMethod
from paceline.engine.draft_budget import DraftSchedule
from paceline.engine.draft_length import DRAFT_LENGTH_MODES, DraftLengthMode
from paceline.engine.proposal import Proposer
from paceline.engine.short_list import DraftVocabSize
from paceline.errors import ConfigError
from paceline.models.loading import LoadedDrafter, LoadedTarget
from paceline.ops.acceptance import VERIFY_METHODS, VerifyMethod

DEFAULT_MAX_MODEL_LEN = 2048


@dataclass(frozen=True)
class EngineSettings:
    """Sizes and choices of an engine.

    Attributes:
        max_num_seqs: requests decoded at the same time.
        max_model_len: tokens that prompt and output may hold together; None is the target's limit, at most 2048, which
            bounds the memory of the caches.
        num_draft_tokens: proposals per step; None is what the drafter was loaded for. A block drafter makes no more
            than it was trained for; one that goes token by token makes any number.
        draft_sample_method: None is the drafter's own, and "probabilistic" under the method "coupled".
        prefill_chunk_size: prompt tokens per target pass, and per step while others decode.
        verify_method: how drafts are judged, see `ops/acceptance.py`; all methods leave the distribution alone.
        draft_length: "off" drafts nothing, "fixed" always `num_draft_tokens`, "adaptive" what pays by recent acceptance
            and by step costs measured on the spot; a request may ask for another mode. Greedy text is the same in all
            of them. Sampled text is from the same distribution; where it has to be the very same for a seed, too, take
            verify_method "match" or "coupled".
        num_drafts_by_batch_size: (first, last, drafts), the first two inclusive: at most so many drafts per request in
            a step of so many requests. The first range begins at 1; gaps and what lies behind keep the number before
            them. None sets no limit.
        draft_vocab_size: how many ids drafts are chosen from, the most frequent ones by the counts in the drafter's
            folder; "full" is all of them, "auto" what `short_list.choose_short_list` says. The output is the same.
    """

    max_num_seqs: int = 8
    max_model_len: int | None = None
    num_draft_tokens: int | None = None
    draft_sample_method: DraftSampleMethod | None = None
    prefill_chunk_size: int = 512
    verify_method: VerifyMethod = "standard"
    draft_length: DraftLengthMode = "fixed"
    num_drafts_by_batch_size: tuple[tuple[int, int, int], ...] | None = None
    draft_vocab_size: DraftVocabSize = "auto"

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_model_len", "num_draft_tokens", "prefill_chunk_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; it has to be at least 1")
        if self.draft_sample_method not in (None, "greedy", "probabilistic"):
            raise ConfigError(f"draft_sample_method is {self.draft_sample_method!r}, not 'greedy' or 'probabilistic'")
        for name, known in (("verify_method", VERIFY_METHODS), ("draft_length", DRAFT_LENGTH_MODES)):
            if getattr(self, name) not in known:
                raise ConfigError(f"{name} is {getattr(self, name)!r}, not one of {', '.join(map(repr, known))}")
        asked = self.draft_vocab_size
        if asked not in ("auto", "full") and not (type(asked) is int and asked >= 1):
            raise ConfigError(f"draft_vocab_size is {asked!r}, neither a number of ids nor 'auto' or 'full'")
        if self.num_drafts_by_batch_size is not None:
            DraftSchedule(self.num_drafts_by_batch_size, self.num_draft_tokens or 1)
        if self.verify_method == "coupled" and self.draft_sample_method == "greedy":
            raise ConfigError(
                "verify_method is 'coupled', where drafts share the target's noise, but draft_sample_method is "
                "'greedy', where drafts use none",
                hint="verify_method='match', which judges greedy drafts by equality, too",
            )


def context_length(target: LoadedTarget, settings: EngineSettings) -> int:
    """Tokens that a prompt and its output may hold together.

    Raises:
        ConfigError: more was asked for than the target has positions.
    """
    limit = min(target.contract.max_position_embeddings, target.model.position_table.shape[0])
    if settings.max_model_len is None:
        return min(limit, DEFAULT_MAX_MODEL_LEN)
    if settings.max_model_len > limit:
        raise ConfigError(
            f"max_model_len is {settings.max_model_len}; the target has positions for {limit}",
            origin={"target": target.contract.origin},
        )
    return settings.max_model_len


def draft_tokens_per_step(drafter: LoadedDrafter | None, proposer: Proposer | None, settings: EngineSettings) -> int:
    """Proposals per step, 0 without anything that drafts.

    Raises:
        ConfigError: more was asked for than the drafter was trained to propose.
    """
    if proposer is not None:
        return proposer.num_draft_tokens
    if drafter is None:
        return 0
    wanted = settings.num_draft_tokens or drafter.num_draft_tokens
    is_block = drafter.contract.layout != "autoregressive"
    if is_block and wanted > drafter.contract.num_draft_tokens:
        raise ConfigError(
            f"num_draft_tokens is {wanted}; the drafter was trained to propose {drafter.contract.num_draft_tokens}",
            origin={"drafter": drafter.contract.origin},
        )
    return wanted
