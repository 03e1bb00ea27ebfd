"""Features of a frozen target on disk: its taps, and its last states, for every token of the training conversations.

The target computes on one side of a bounded buffer, the disk writes on the other. A shard's bytes are a function of the
plan and its index, so a capture that was killed goes on where it stopped, and shards may be written by many processes.

B conversations, S tokens of a padded row, N tokens of a shard, T taps, D width.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from paceline.capture.feature_buffer import FeatureBuffer
from paceline.capture.feature_checks import ScaleWatch, check_sample
from paceline.capture.feature_file import (
    SUFFIX,
    ShardContent,
    TapScales,
    feature_header,
    read_tap_scales,
    write_feature_file,
)
from paceline.capture.feature_plan import CaptureSettings, bytes_per_token, require_disk, shard_borders, shard_bytes
from paceline.capture.feature_record import Texts, run_id
from paceline.capture.shards import ShardFolder, ShardRecord
from paceline.checkpoint.contract import capture_id
from paceline.models.loading import LoadedTarget
from paceline.models.sequence_attend import sequence_attend
from paceline.models.taps import TapCollector

_log = logging.getLogger(__name__)

_WIDTH_STEP = 64  # padded rows are multiples of this
_LAST_WAIT_S = 10.0  # for the writing thread, once something has failed
_CHECKED_TOKENS = 32  # answer tokens per conversation on which the last state is held against the text
FEWEST_AGREEING = 0.97  # share of greedy text that a bf16 target's last states must predict


@dataclass(frozen=True)
class Piece:
    """Some conversations of a shard, computed."""

    index: int  # of the shard
    rows: tuple[int, ...]  # conversations
    taps_BSE: Tensor
    hidden_BSD: Tensor | None
    num_checked: int
    num_agreed: int

    @property
    def num_bytes(self) -> int:
        """In memory."""
        tensors = [self.taps_BSE] + ([] if self.hidden_BSD is None else [self.hidden_BSD])
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class FeatureCapture:
    """Computes and writes the features of conversations.

    Args:
        target: frozen, in eval mode; its dtype is that of the features.
        texts: all conversations, cut to what training uses.
        settings: see above.
        record: from `feature_record`, of the same target, texts and settings.
    """

    def __init__(
        self, target: LoadedTarget, texts: Texts, settings: CaptureSettings, record: Mapping[str, object]
    ) -> None:
        assert len(texts) > 0, "an empty data file is refused where it is read"
        self._model, self._texts, self._settings, self._record = target.model, texts, settings, record
        weight = target.model.norm.weight
        self._device, self._dtype = weight.device, weight.dtype
        width = target.contract.hidden_size
        num_taps = len(settings.layer_ids)
        self._state_bytes = bytes_per_token(width, num_taps, self._dtype.itemsize, keeps_hidden=settings.keeps_hidden)
        self._borders = shard_borders(texts.lengths, self._state_bytes, settings.shard_bytes)
        self._watch = ScaleWatch(num_taps)
        self.plan = {
            "kind": "features",
            "run_id": run_id(record),
            "capture": dict(record),
            "shard_bytes": settings.shard_bytes,
            "batch_tokens": settings.batch_tokens,
        }

    @property
    def num_shards(self) -> int:
        """Files of the whole."""
        return len(self._borders) - 1

    def num_bytes(self, indices: Sequence[int]) -> int:
        """Size of some shards on disk."""
        lengths, borders = self._texts.lengths, self._borders
        spans = [slice(int(borders[index]), int(borders[index + 1])) for index in indices]
        num_tokens = sum(int(lengths[span].sum()) for span in spans)
        return shard_bytes(num_tokens, sum(s.stop - s.start for s in spans), self._state_bytes, len(spans))

    def open(self, folder: Path) -> ShardFolder:
        """The folder to write to, or go on with, if the disk can hold what is missing.

        Raises:
            CapacityError: it cannot; nothing was written.
            ConfigError: the folder holds something else.
        """
        # A folder that is not there yet misses everything; opening would already make it.
        there = ShardFolder(folder, self.plan, self.num_shards, SUFFIX)
        require_disk(folder, self.num_bytes(there.missing()))
        return ShardFolder.open(folder, self.plan, self.num_shards, suffix=SUFFIX)

    @torch.no_grad()
    def pieces(self, index: int) -> Iterator[Piece]:
        """Compute one shard, batch by batch, the shortest conversations first."""
        settings = self._settings
        for rows in self._batches(index):
            ids, is_answer = self._padded(rows)
            token_ids_BS = ids.to(self._device)
            taps = TapCollector.of_layers(settings.layer_ids, settings.stream)
            positions = torch.arange(token_ids_BS.shape[1], device=self._device).expand(token_ids_BS.shape)
            hidden = self._model(token_ids_BS, positions, sequence_attend(self._model), taps)
            num_checked, num_agreed = self._teacher_check(is_answer, token_ids_BS, hidden)
            kept = hidden.cpu() if settings.keeps_hidden else None
            yield Piece(index, rows, taps.concatenated().cpu(), kept, num_checked, num_agreed)

    def assemble(self, index: int, pieces: Sequence[Piece]) -> ShardContent:
        """Put the pieces of a shard together, every conversation checked.

        Raises:
            NumericError: a state is not finite.
        """
        texts, width = self._texts, self._model.contract.hidden_size
        first, last = int(self._borders[index]), int(self._borders[index + 1])
        offset, end = int(texts.starts[first]), int(texts.starts[last])
        taps_NE = torch.empty(end - offset, len(self._settings.layer_ids) * width, dtype=self._dtype)
        hidden_ND = torch.empty(end - offset, width, dtype=self._dtype) if self._settings.keeps_hidden else None
        scales: dict[int, TapScales] = {}
        for piece in pieces:
            for row, conversation in enumerate(piece.rows):
                span = texts.span(conversation)
                length, place = span.stop - span.start, slice(span.start - offset, span.stop - offset)
                taps_SE = taps_NE[place].copy_(piece.taps_BSE[row, :length])
                hidden_SD = None
                if hidden_ND is not None and piece.hidden_BSD is not None:
                    hidden_SD = hidden_ND[place].copy_(piece.hidden_BSD[row, :length])
                scales[conversation] = check_sample(
                    conversation, taps_SE, hidden_SD, self._settings.layer_ids, self._watch
                )
        assert sorted(scales) == list(range(first, last)), "every conversation of a shard comes once"
        total = TapScales((0.0,) * len(self._settings.layer_ids), 0, (0.0,) * len(self._settings.layer_ids), 0)
        for conversation in range(first, last):
            total += scales[conversation]
        return ShardContent(
            taps=taps_NE,
            last_hidden=hidden_ND,
            token_ids=texts.tokens[offset:end],
            loss_mask=texts.supervised[offset:end],
            starts=texts.starts[first : last + 1] - offset,
            scales=total,
            num_checked=sum(piece.num_checked for piece in pieces),
            num_agreed=sum(piece.num_agreed for piece in pieces),
        )

    def write(self, shards: ShardFolder, index: int, pieces: Sequence[Piece] | None = None) -> ShardRecord:
        """Write one shard; its pieces are computed here unless they are given."""
        content = self.assemble(index, list(self.pieces(index)) if pieces is None else pieces)
        captured = [capture_id(layer) for layer in self._settings.layer_ids]
        header = feature_header(run_id(self._record), self._record, captured, index, self.num_shards)
        return shards.write(index, lambda path: write_feature_file(path, content, header))

    def run(self, shards: ShardFolder, on_shard: Callable[[ShardRecord], None] | None = None) -> None:
        """Write all that is missing, the target and the disk working at the same time.

        Args:
            shards: from `open`.
            on_shard: told of every shard that is complete, from another thread.
        Raises:
            CapacityError: the disk is full, or stopped answering.
            NumericError: a state is not finite.
        """
        settings = self._settings
        buffer: FeatureBuffer[Piece] = FeatureBuffer(settings.high_bytes, settings.low_bytes, settings.timeout_s)
        errors: list[BaseException] = []

        def consume() -> None:
            try:
                self._write_all(shards, buffer, on_shard)
            except BaseException as error:
                errors.append(error)
                buffer.fail(error)

        writer = threading.Thread(target=consume, name="feature writer", daemon=True)
        writer.start()
        try:
            for index in shards.missing():
                for piece in self.pieces(index):
                    buffer.put(piece, piece.num_bytes)
            buffer.end()
        except BaseException as error:
            buffer.fail(error)
            writer.join(_LAST_WAIT_S)  # a daemon: a disk that does not answer must not hide the error
            raise
        writer.join()
        if errors:
            raise errors[0]

    def _write_all(
        self, shards: ShardFolder, buffer: FeatureBuffer[Piece], on_shard: Callable[[ShardRecord], None] | None
    ) -> None:
        held: list[Piece] = []
        for piece in buffer:
            held.append(piece)
            wanted = int(self._borders[piece.index + 1] - self._borders[piece.index])
            if sum(len(one.rows) for one in held) == wanted:
                record = self.write(shards, piece.index, held)
                held = []
                if on_shard is not None:
                    on_shard(record)

    def _batches(self, index: int) -> Iterator[tuple[int, ...]]:
        lengths = self._texts.lengths
        rows = range(int(self._borders[index]), int(self._borders[index + 1]))
        batch: list[int] = []
        for row in sorted(rows, key=lambda row: (int(lengths[row]), row)):
            if batch and (len(batch) + 1) * self._width(int(lengths[row])) > self._settings.batch_tokens:
                yield tuple(batch)
                batch = []
            batch.append(row)
        if batch:
            yield tuple(batch)

    def _width(self, length: int) -> int:
        return min(math.ceil(max(length, 1) / _WIDTH_STEP) * _WIDTH_STEP, self._model.position_table.shape[0])

    def _padded(self, rows: Sequence[int]) -> tuple[Tensor, np.ndarray]:
        """Right-padded ids int64 [B, S], and which positions are answers."""
        texts = self._texts
        width = self._width(max(int(texts.lengths[row]) for row in rows))
        token_ids = np.zeros((len(rows), width), np.int64)
        is_answer = np.zeros((len(rows), width), bool)
        for place, row in enumerate(rows):
            span = texts.span(row)
            token_ids[place, : span.stop - span.start] = texts.tokens[span]
            is_answer[place, : span.stop - span.start] = texts.supervised[span]
        return torch.from_numpy(token_ids), is_answer

    def _teacher_check(self, is_answer: np.ndarray, token_ids_BS: Tensor, hidden_BSD: Tensor) -> tuple[int, int]:
        """How many answer tokens were looked at, and how many the last state before them predicts."""
        is_answer[:, 0] = False  # nothing comes before it
        is_answer &= is_answer.cumsum(1) <= _CHECKED_TOKENS
        row, position = (torch.from_numpy(axis).to(self._device) for axis in is_answer.nonzero())
        if len(row) == 0:
            return 0, 0
        best = self._model.logits(hidden_BSD[row, position - 1].unsqueeze(0))[0].argmax(-1)
        return len(row), int((best == token_ids_BS[row, position]).sum())


def finish_capture(shards: ShardFolder) -> dict[str, object]:
    """Complete a folder whose shards are all there, and say what its features look like.

    Returns:
        What the manifest's summary holds: scale of every tap, and how well the last states predict the text.
    Raises:
        DataError: a shard is missing or damaged.
    """
    counts = [record.counts for record in shards.records()]
    scales = [read_tap_scales(shards.path(record.index)) for record in shards.records()]
    checked, agreed = (sum(count[key] for count in counts) for key in ("teacher_checked", "teacher_agreed"))
    summary: dict[str, object] = {"teacher_checked": checked, "teacher_agreed": agreed}
    if checked:
        summary["teacher_agreement"] = agreed / checked
        _log.info(
            "the last state predicts %.1f %% of %d answer tokens; text that this target wrote greedily gives at least "
            "%.0f %%",
            100 * agreed / checked,
            checked,
            100 * FEWEST_AGREEING,
        )
    if scales:
        total = scales[0]
        for more in scales[1:]:
            total += more
        summary["tap_rms"], summary["tap_rms_at_first_position"] = total.rms, total.first_rms
    shards.finish(summary)
    return summary
