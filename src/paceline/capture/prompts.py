"""Captures conversations shard by shard into a folder that a kill cannot spoil, and reads such folders back.

A shard follows from the plan and its index: which rows it starts, how they are drawn and in which batches. So a capture
that was stopped, in whatever way, goes on where it was and ends in the same bytes. Prompts that occur in several shards
are kept once, in the shard of the lowest index, when the folder is read: that does not depend on who wrote first.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from paceline.capture.answers import Answers
from paceline.capture.engine_writer import EngineWriter
from paceline.capture.exclusion import Exclusion
from paceline.capture.given_prompts import read_given_prompts
from paceline.capture.lockstep import LockstepWriter
from paceline.capture.provenance import engine_record, target_record
from paceline.capture.rows import SHARD_SUFFIX, ShardContent, write_rows
from paceline.capture.sampling import AnswerSampling
from paceline.capture.self_chat import SelfChat
from paceline.capture.shards import MANIFEST_FILE, ShardFolder, ShardRecord
from paceline.capture.token_file import TokenFile, join_token_files, read_token_file, select_conversations
from paceline.capture.writer import PassageRequest, Progress, Writer
from paceline.configuration.capture import CapturePromptsRun
from paceline.errors import CompatibilityError, DataError
from paceline.models.loading import LoadedDrafter, LoadedTarget

_log = logging.getLogger(__name__)

_REPORT_EVERY_S = 10.0
_PROBE_TOKENS, _PROBE_ROWS = 16, 64  # what a dry run writes to learn how fast that is


class Source(Protocol):
    """Where conversations come from."""

    @property
    def num_items(self) -> int:
        """Conversations that are started."""
        ...

    def plan(self) -> dict[str, object]:
        """What the rows follow from, beside target and sampling."""
        ...

    def context_length(self) -> int:
        """Tokens of the longest conversation."""
        ...

    def shard(self, rows: range, writer: Writer, on_progress: Progress | None = None) -> ShardContent:
        """Some of the conversations, written."""
        ...


@dataclass(frozen=True)
class CaptureEstimate:
    """What a capture takes at most: every conversation kept, every answer as long as it may be.

    Attributes:
        num_conversations: started.
        num_shards: files, each with a small record.
        num_answer_tokens: to write.
        disk_bytes: of all shards, before compression, which saves about a quarter.
        free_disk_bytes: where the folder is or will be.
        tokens_per_s: measured with a short batch.
        time_s: to write all of it.
    """

    num_conversations: int
    num_shards: int
    num_answer_tokens: int
    disk_bytes: int
    free_disk_bytes: int
    tokens_per_s: float
    time_s: float


class PromptCapture:
    """One capture: its source, its plan, and what writes.

    Args:
        run: settings.
        target: what writes, loaded as the settings say.
        drafter: what drafts, if anything.
    Raises:
        ConfigError, DataError, RequestError, CompatibilityError: settings, files, template and target do not fit.
    """

    def __init__(self, run: CapturePromptsRun, target: LoadedTarget, drafter: LoadedDrafter | None = None) -> None:
        self.run, self._target, self._drafter = run, target, drafter
        limit = target.model.position_table.shape[0]
        if run.max_answer_tokens >= limit:
            raise CompatibilityError(
                f"max_answer_tokens is {run.max_answer_tokens}; the target has positions for {limit} tokens in all",
                origin={"target": target.contract.origin},
                hint="fewer tokens per answer",
            )
        self._sampling = AnswerSampling(run.max_answer_tokens, run.greedy_share, run.temperature, run.top_p, run.seed)
        self._exclusion = Exclusion(run.exclude, run.exclude_ngram)
        self._num_left_out = 0
        self.source = self._source()
        self._context_length = self.source.context_length()
        self._batch_size = min(run.batch_size, run.shard_size, self.source.num_items)
        self.num_shards = -(-self.source.num_items // run.shard_size)

    def _source(self) -> Source:
        run = self.run
        if run.prompts is None:
            assert run.self_chat is not None, "the settings have one of the two"
            return SelfChat(self._target, run.self_chat, run.max_user_tokens, self._sampling, self._exclusion)
        given = read_given_prompts(run.prompts, self._exclusion)
        answers = Answers(self._target, given, self._sampling, max_prompt_tokens=run.max_prompt_tokens)
        self._num_left_out = len(answers.dropped)
        return answers

    def plan(self) -> dict[str, object]:
        """Everything that the shards' bytes follow from."""
        return {
            "schema_version": 1,
            "content": "conversations",
            **target_record(self._target),
            "engine": engine_record(self._target, self._drafter, backend=self.run.backend, batch_size=self._batch_size),
            "source": self.source.plan(),
            "sampling": self._sampling.plan(),
            "excluded": {"files": self._exclusion.files, "words_in_a_row": self._exclusion.run_length},
            "shard_size": self.run.shard_size,
        }

    def run_all(
        self, spread: Callable[[Sequence[int], Callable[[int], None]], None] | None = None
    ) -> dict[str, object]:
        """Write what is missing, then check and close the folder.

        Args:
            spread: writes the given shards in other processes, by their `open`, and tells of each; None writes here.
        Returns:
            The manifest's totals and summary.
        Raises:
            ConfigError: the folder holds another capture.
            CapacityError: the disk is full.
        """
        folder = self._folder()
        missing = folder.missing()
        if missing:
            if len(missing) < self.num_shards:
                _log.info("%d of %d shards are there already", self.num_shards - len(missing), self.num_shards)
            if spread is None:
                self._write(folder, missing)
            else:
                spread(missing, lambda index: _log.info("shard %d of %d written", index + 1, self.num_shards))
        return self._close(folder)

    def open(self) -> Callable[[int], ShardRecord]:
        """What writes one shard after another into the folder, for a process that shares the work."""
        folder, writer = self._folder(), self._writer()
        return lambda index: folder.write(index, self._fill(index, writer, _Reporter(len(self._rows(index)))))

    def _folder(self) -> ShardFolder:
        return ShardFolder.open(self.run.output, self.plan(), self.num_shards, suffix=SHARD_SUFFIX)

    def _write(self, folder: ShardFolder, missing: Sequence[int]) -> None:
        writer = self._writer()
        progress = _Reporter(sum(len(self._rows(index)) for index in missing))
        for index in missing:
            folder.write(index, self._fill(index, writer, progress))
            progress.tell(f"shard {index + 1} of {self.num_shards} written")

    def estimate(self) -> CaptureEstimate:
        """What the whole takes at most; writes a short batch of text to learn how fast that is, and no file."""
        source, run = self.source, self.run
        num_rows = min(_PROBE_ROWS, self._batch_size)
        probe = [PassageRequest([index % 7 + 1] * 16, _PROBE_TOKENS, 0.0, 1.0, index) for index in range(num_rows)]
        writer = self._writer()
        writer.write(probe[:1])  # the first pass pays for set-up
        began = time.perf_counter()
        num_written = sum(len(passage.token_ids) for passage in writer.write(probe))
        speed = num_written / (time.perf_counter() - began)
        num_answer_tokens = source.num_items * run.max_answer_tokens
        if run.self_chat is not None:
            num_answer_tokens += source.num_items * run.max_user_tokens
        id_bytes = 2 if self._target.contract.vocab_size <= 2**16 else 4
        there = next(path for path in (run.output, *run.output.absolute().parents) if path.exists())
        return CaptureEstimate(
            num_conversations=source.num_items,
            num_shards=self.num_shards,
            num_answer_tokens=num_answer_tokens,
            disk_bytes=source.num_items * self._context_length * id_bytes,
            free_disk_bytes=shutil.disk_usage(there).free,
            tokens_per_s=speed,
            time_s=num_answer_tokens / speed,
        )

    def _rows(self, index: int) -> range:
        start = index * self.run.shard_size
        return range(start, min(start + self.run.shard_size, self.source.num_items))

    def _fill(self, index: int, writer: Writer, progress: _Reporter) -> Callable[[Path], dict[str, int]]:
        return lambda path: write_rows(path, self.source.shard(self._rows(index), writer, progress))

    def _writer(self) -> Writer:
        if self.run.backend == "lockstep":
            return LockstepWriter(self._target, batch_size=self._batch_size)
        return EngineWriter(
            self._target,
            self._drafter,
            batch_size=self._batch_size,
            max_model_len=max(self._context_length, 2 * _PROBE_TOKENS),
            num_draft_tokens=self.run.spec_tokens,
        )

    def _close(self, folder: ShardFolder) -> dict[str, object]:
        folder.check()
        whole = join_token_files([read_token_file(folder.path(index)) for index in range(self.num_shards)])
        kept = first_of_each_prompt(whole)
        num_tokens = int(np.diff(whole.starts)[kept].sum())
        summary: dict[str, object] = {
            "conversations": len(kept),
            "tokens": num_tokens,
            "answer_tokens": num_tokens - int(whole.prompt_lengths[kept].sum()),
            "repeated_across_shards": len(whole) - len(kept),
            "prompts_left_out": self._num_left_out,
        }
        folder.finish(summary)
        if not len(kept):
            _log.warning("%s holds no conversation: everything was dropped, see %s", folder.folder, MANIFEST_FILE)
        return {**folder.totals(), **summary}


class _Reporter:
    """Counts what is written, and says now and then how far it is."""

    def __init__(self, num_conversations: int) -> None:
        self._left = self._all = num_conversations
        self._num_tokens = 0
        self._began = self._told = time.perf_counter()

    def __call__(self, num_ended: int, num_tokens: int) -> None:
        self._left -= num_ended
        self._num_tokens += num_tokens
        if time.perf_counter() - self._told >= _REPORT_EVERY_S:
            self.tell("writing")

    def tell(self, what: str) -> None:
        """Log a line."""
        self._told = time.perf_counter()
        elapsed = self._told - self._began
        num_done = self._all - self._left
        rest = f", {elapsed / num_done * max(0, self._left):.0f} s left" if num_done > 0 else ""
        speed = self._num_tokens / max(elapsed, 1e-9)
        _log.info("%s: %d of %d conversations, %.0f tokens/s%s", what, num_done, self._all, speed, rest)


def first_of_each_prompt(file: TokenFile) -> np.ndarray:
    """Indices of the conversations whose prompt did not occur before."""
    seen: set[bytes] = set()
    kept = []
    for index in range(len(file)):
        start = int(file.starts[index])
        key = file.tokens[start : start + int(file.prompt_lengths[index])].tobytes()
        if key not in seen:
            seen.add(key)
            kept.append(index)
    return np.array(kept, np.int64)


def read_captured(folder: Path) -> TokenFile:
    """The conversations of a complete folder in the order of its shards, each prompt once.

    Raises:
        DataError: not complete, damaged, or a folder of something else.
    """
    shards = ShardFolder.read(folder)
    if shards.plan.get("content") != "conversations":
        raise DataError(
            f"{folder} holds no conversations (its manifest says {shards.plan.get('content')!r})",
            hint="a folder that `paceline capture prompts` made",
        )
    whole = join_token_files([read_token_file(shards.path(index)) for index in range(shards.num_shards)])
    return select_conversations(whole, first_of_each_prompt(whole))
