"""Passes of short prompts, from recordings where that is asked for.

A pass of a few hundred rows is hundreds of launches, and the host needs longer to make them than a GPU to run them. So
it is padded to a bucket of requests and of rows and played back, like a decode step (`graphs.py`): padding requests are
one token of the trash slot, and rows behind a prompt's end are like refused drafts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from paceline.engine.counters import Counters
from paceline.engine.graphs import buckets_up_to
from paceline.engine.hybrid_cache import HybridCache
from paceline.engine.paged_attends import can_attend_paged
from paceline.engine.parts import EngineParts
from paceline.engine.prefill import PrefillChunk, prefill_prompts, prompt_numbers, run_prompts
from paceline.engine.recordings import Record, Recorded
from paceline.engine.sampling_flags import SamplingFlags
from paceline.engine.step import StepOutput
from paceline.engine.transfers import write_to
from paceline.ops.acceptance import VerifyMethod

_FEWEST_ROWS = 16
_MOST_TOKENS = 4096  # of a recorded pass, padding included: above, launches cost nothing beside the arithmetic
_MOST_RECORDINGS = 64  # of different shapes; the one that was not used for longest goes first


class PromptKey(NamedTuple):
    """What is written into a recording of a pass.

    Attributes:
        num_requests: padding included.
        num_rows: of each.
        flags: the requests' sampling settings, summarised.
        writes_context: whether the drafter's context is written.
        lacks_context: whether a request's context begins later than its text.
        verify_method: of the engine.
        rules: where rules on tokens lie.
    """

    num_requests: int
    num_rows: int
    flags: SamplingFlags
    writes_context: bool
    lacks_context: bool
    verify_method: VerifyMethod
    rules: tuple[tuple[int, tuple[int, ...]], ...]


class PromptRunner:
    """Runs passes of new prompts.

    Args:
        parts: what is run.
        counters: count recordings.
        max_num_seqs: the most prompts of a pass.
        record: makes a recording; None runs every pass as it is.
    """

    def __init__(self, parts: EngineParts, counters: Counters, *, max_num_seqs: int, record: Record | None) -> None:
        self._parts, self._counters, self._record = parts, counters, record
        self._buckets = buckets_up_to(max_num_seqs)
        self._works: OrderedDict[PromptKey, _Pass] = OrderedDict()

    @property
    def is_recording(self) -> bool:
        """Whether passes are padded to buckets and recorded."""
        return self._record is not None

    def has_room(self, num_requests: int, longest: int) -> bool:
        """Whether a pass of so many prompts is small enough to be recorded; where nothing is recorded, all are.

        Args:
            num_requests: its prompts.
            longest: tokens of the longest.
        """
        if self._record is None or num_requests > self._buckets[-1]:
            return self._record is None
        return self._bucket(num_requests) * _num_rows(longest) <= _MOST_TOKENS

    def run(self, chunks: Sequence[PrefillChunk], flags: SamplingFlags, *, writes_context: bool) -> StepOutput:
        """Run a pass.

        Args:
            chunks: as for `prefill_prompts`.
            flags: of all their requests.
            writes_context: hand the taps to the proposer.
        """
        parts = self._parts
        key = self._key(chunks, flags, writes_context=writes_context)
        longest = max(len(chunk.token_ids) for chunk in chunks)
        if self._record is None or not self.has_room(len(chunks), longest) or not self._can_record(key):
            self._counters.num_unrecorded_prompts += self._record is not None
            proposer = parts.proposer if writes_context else None
            return prefill_prompts(parts.target.model, proposer, parts.cache, parts.state, parts.choice, chunks, flags)
        work = self._works.get(key)
        if work is None:
            if len(self._works) >= _MOST_RECORDINGS:
                self._works.popitem(last=False)
            work = self._works[key] = _Pass(parts, key)
        self._works.move_to_end(key)
        parts.require_fixed()
        work.fill(chunks)
        output: StepOutput = work.recorded.do(self._record, self._counters)
        self._counters.num_replayed_prompts += work.recorded.is_recorded
        self._counters.num_unrecorded_prompts += not work.recorded.is_recorded
        return replace(output, num_requests=len(chunks))

    def drop(self) -> None:
        """Forget all recordings, before what they read goes away."""
        self._works.clear()

    def _key(self, chunks: Sequence[PrefillChunk], flags: SamplingFlags, *, writes_context: bool) -> PromptKey:
        longest = max(len(chunk.token_ids) for chunk in chunks)
        return PromptKey(
            self._bucket(len(chunks)),
            _num_rows(longest),
            flags,
            writes_context,
            any(chunk.context_start > 0 for chunk in chunks),
            chunks[0].verify_method,
            self._parts.state.tokens.places() if flags.any_rules else (),
        )

    def _bucket(self, num_requests: int) -> int:
        return next(bucket for bucket in self._buckets if bucket >= num_requests)

    def _can_record(self, key: PromptKey) -> bool:
        proposer, cache = self._parts.proposer, self._parts.cache
        if isinstance(cache, HybridCache):
            return False
        caches = [cache]
        if key.writes_context and proposer is not None:
            # What goes token by token keeps the state of its last rows on the host's side, each time elsewhere.
            if not (proposer.is_capturable and proposer.is_parallel):
                return False
            caches += [] if proposer.cache is None else [proposer.cache]
        return all(can_attend_paged(cache) for cache in caches)


def _num_rows(longest: int) -> int:
    """Of each prompt in a pass, padding included."""
    return max(_FEWEST_ROWS, 1 << (longest - 1).bit_length())


class _Pass:
    """A pass of one shape on the numbers that were filled in last."""

    def __init__(self, parts: EngineParts, key: PromptKey) -> None:
        self._parts, self._key = parts, key
        shape = prompt_numbers((), key.num_requests, key.num_rows, parts.state.trash_slot).shape
        self._numbers_BX = torch.zeros(shape, dtype=torch.int64, device=parts.state.device)
        self.recorded = Recorded(self._run, f"a pass of {key.num_requests} prompts of {key.num_rows} rows")

    def fill(self, chunks: Sequence[PrefillChunk]) -> None:
        """Write the numbers of some prompts; what they leave over is padding."""
        key, state = self._key, self._parts.state
        numbers = prompt_numbers(chunks, key.num_requests, key.num_rows, state.trash_slot)
        write_to(self._numbers_BX, torch.from_numpy(numbers))

    def _run(self) -> StepOutput:
        key, parts = self._key, self._parts
        return run_prompts(
            parts.target.model,
            parts.proposer if key.writes_context else None,
            parts.cache,
            parts.state,
            parts.choice,
            self._numbers_BX,
            key.flags,
            lacks_context=key.lacks_context,
            method=key.verify_method,
        )
