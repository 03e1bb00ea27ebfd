"""The k best ids of a vocabulary whose head is split over ranks, without gathering logits.

    shard    X head rows of one rank: ranges of real ids with padding anywhere between them, such as
             [base | base padding | added | added padding]; what is not inside a range is never read
    lanes    k per rank: float32 value and int32 id, packed into one message of 8k bytes per row; where a shard holds
             fewer than k ids, value -inf and id -1
    merge    on every rank, over the same bits, by (value descending, id ascending): every rank gets the same ids

The order is taken from the head's own scores. Softcap and scale rise with them, so they are applied to the k values
alone; in which order is a property of the drafter, and changes the values:

    softcap_then_scale   s * c * tanh(z / c)         scale_then_softcap   c * tanh(s * z / c)

Log-probabilities subtract the log-partition over the whole vocabulary; each rank's part travels in the same message.

R rows, X head rows of the shard, V vocabulary, C = k, N ranks, P packed columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.errors import CompatibilityError, ConfigError, ShapeError
from paceline.ops.top_k_tokens import order_keys, top_k_tokens

NO_ID = -1
_LAST = torch.iinfo(torch.int64).min

TransformOrder = Literal["softcap_then_scale", "scale_then_softcap"]


@dataclass(frozen=True)
class IdRange:
    """A run of real ids in a shard.

    Attributes:
        first_row: of the shard, holds `first_id`.
        first_id: in the whole vocabulary.
        num_ids: length of the run.
    """

    first_row: int
    first_id: int
    num_ids: int

    @property
    def end_row(self) -> int:
        """The row after the last."""
        return self.first_row + self.num_ids

    @property
    def end_id(self) -> int:
        """The id after the last."""
        return self.first_id + self.num_ids


@dataclass(frozen=True)
class VocabularyShard:
    """What one rank's part of the head stands for.

    Attributes:
        num_rows: X, padding included.
        ranges: of real ids, rows and ids both ascending; rows outside are padding.

    Raises:
        ConfigError: ranges that leave the shard, overlap or go backwards.
    """

    num_rows: int
    ranges: tuple[IdRange, ...]

    def __post_init__(self) -> None:
        end_row = end_id = 0
        for one in self.ranges:
            if one.num_ids < 1 or one.first_row < end_row or one.first_id < end_id or one.end_row > self.num_rows:
                raise ConfigError(
                    f"{one} is no range of a shard of {self.num_rows} rows; before it end row {end_row}, id {end_id}",
                    hint="ranges inside the shard, rows and ids ascending, none of them empty",
                )
            end_row, end_id = one.end_row, one.end_id

    @property
    def num_ids(self) -> int:
        """Real ids of the shard."""
        return sum(one.num_ids for one in self.ranges)


@dataclass(frozen=True)
class LogitTransform:
    """What happens to a head's scores before they are logits.

    Attributes:
        order: which comes first; there is no default, since published drafters differ.
        scale: above 0, or the order of ids would turn round.
        softcap: c, above 0; None for none.

    Raises:
        ConfigError: a value that is not above 0, or an unknown order.
    """

    order: TransformOrder
    scale: float = 1.0
    softcap: float | None = None

    def __post_init__(self) -> None:
        if self.order not in ("softcap_then_scale", "scale_then_softcap"):
            raise ConfigError(f"order is {self.order!r}, not 'softcap_then_scale' or 'scale_then_softcap'")
        for name, value in (("scale", self.scale), ("softcap", self.softcap)):
            if value is not None and not 0 < value < float("inf"):
                raise ConfigError(f"{name} is {value}; it has to be a finite number above 0")

    def apply(self, scores: Tensor) -> Tensor:
        """Logits of head scores, float32."""
        logits = scores.float()
        if self.order == "scale_then_softcap":
            logits = logits * self.scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits * self.scale if self.order == "softcap_then_scale" else logits


def split_vocabulary(
    base_size: int, added_size: int, *, rank: int, num_ranks: int, multiple: int = 64
) -> VocabularyShard:
    """Describe a rank's rows where base and added vocabulary are each padded and split on their own.

    Args:
        base_size: ids of the vocabulary as trained, from id 0.
        added_size: ids added later, behind them; 0 for none.
        rank: from 0.
        num_ranks: N.
        multiple: both parts are padded to this many rows, and to the ranks.
    """
    ranges, first_row = [], 0
    for first_id, size in ((0, base_size), (base_size, added_size)):
        padded = -(-size // multiple) * multiple
        rows = -(-padded // num_ranks)
        num_ids = min(rows, size - rank * rows)
        if num_ids > 0:
            ranges.append(IdRange(first_row, first_id + rank * rows, num_ids))
        first_row += rows
    return VocabularyShard(first_row, tuple(ranges))


def check_shards(shard: VocabularyShard, k: int, *, group: dist.ProcessGroup | None) -> None:
    """Make sure, at load, that the ranks hold every id once and that k of them exist. A collective call.

    Args:
        shard: of this rank.
        k: candidates that will be asked for.
        group: the ranks; None for a single one.

    Raises:
        CompatibilityError: an id is missing or held twice; every rank raises it.
        ConfigError: k is below 1, above the vocabulary, or not the same on all ranks.
    """
    everyone: list[tuple[VocabularyShard, int]] = [(shard, k)]
    if group is not None:
        everyone = everyone * dist.get_world_size(group)
        dist.all_gather_object(everyone, (shard, k), group=group)
    if len({wanted for _, wanted in everyone}) > 1:
        raise ConfigError(f"the ranks were asked for different numbers of candidates: {[k for _, k in everyone]}")
    end_id = 0
    held = [(one, rank) for rank, (part, _) in enumerate(everyone) for one in part.ranges]
    for one, rank in sorted(held, key=lambda entry: entry[0].first_id):
        if one.first_id != end_id:
            what = "no rank holds" if one.first_id > end_id else "two ranks hold"
            raise CompatibilityError(f"{what} id {min(end_id, one.first_id)}; rank {rank} holds {one}")
        end_id = one.end_id
    if not 1 <= k <= end_id:
        raise ConfigError(f"{k} candidates were asked for; the vocabulary has {end_id} ids")


def sharded_top_k(
    scores_RX: Tensor,
    k: int,
    shard: VocabularyShard,
    *,
    transform: LogitTransform,
    group: dist.ProcessGroup | None = None,
    with_log_probs: bool = False,
) -> tuple[Tensor, Tensor]:
    """Find the k best ids of every row over all ranks' shards; k = 1 is the argmax. One collective.

    Args:
        scores_RX: this rank's head scores, bfloat16, float16 or float32, before any transform.
        k: the same on all ranks, and checked at load with `check_shards`.
        shard: what the X columns stand for.
        transform: softcap and scale.
        group: the ranks; None for a single one, which communicates nothing.
        with_log_probs: give log-probabilities over the whole vocabulary instead of logits.

    Returns:
        values float32 [R, C], descending, and int64 ids [R, C], equal scores by ascending id; the same on all ranks.

    Raises:
        ShapeError: the scores do not have one column per row of the shard.
    """
    if scores_RX.dim() != 2 or scores_RX.shape[1] != shard.num_rows:
        raise ShapeError("head scores of a shard", expected=f"[R, {shard.num_rows}]", found=scores_RX.shape)
    packed_RP = pack_lanes(*local_top_k(scores_RX, k, shard))
    if with_log_probs:
        packed_RP = torch.cat((packed_RP, _log_partition(scores_RX, shard, transform).view(torch.int32)), dim=1)
    values_RC, ids_RC, partitions_RN = merge_lanes(_gathered(packed_RP, group), k)
    logits_RC = transform.apply(values_RC)
    if with_log_probs:
        logits_RC = logits_RC - torch.logsumexp(partitions_RN, dim=1, keepdim=True)
    return logits_RC, ids_RC


def local_top_k(scores_RX: Tensor, k: int, shard: VocabularyShard) -> tuple[Tensor, Tensor]:
    """The k best real ids of one shard.

    Returns:
        float32 values and int64 ids, both [R, C], ordered; -inf and -1 where the shard has fewer than k ids.
    """
    values_RC = scores_RX.new_full((scores_RX.shape[0], k), -torch.inf, dtype=torch.float32)
    ids_RC = torch.full_like(values_RC, NO_ID, dtype=torch.int64)
    for one in shard.ranges:
        best, rows = top_k_tokens(scores_RX[:, one.first_row : one.end_row], min(k, one.num_ids))
        merged = torch.cat((values_RC, best.float()), dim=1), torch.cat((ids_RC, rows + one.first_id), dim=1)
        values_RC, ids_RC = _first(*merged, k)
    return values_RC, ids_RC


def pack_lanes(values_RC: Tensor, ids_RC: Tensor) -> Tensor:
    """Values' bits and ids side by side, int32 [R, 2C]: exact for every id, as float pairs are only below 2^24."""
    return torch.cat((values_RC.view(torch.int32), ids_RC.int()), dim=1)


def merge_lanes(packed_NRP: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Merge all ranks' lanes, which takes the same messages to the same result on every rank.

    Args:
        packed_NRP: int32 messages of `pack_lanes`; columns behind 2k hold log-partitions.
        k: lanes per message.

    Returns:
        values float32 [R, C], ids int64 [R, C], log-partitions float32 [R, N] (or [R, 0]).
    """
    values_RK = packed_NRP[:, :, :k].transpose(0, 1).flatten(1).view(torch.float32)
    ids_RK = packed_NRP[:, :, k : 2 * k].transpose(0, 1).flatten(1).long()
    partitions_RN = packed_NRP[:, :, 2 * k :].transpose(0, 1).flatten(1).view(torch.float32)
    return *_first(values_RK, ids_RK, k), partitions_RN


def _first(values: Tensor, ids: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The first k lanes by value, then id; empty lanes come behind real ids of value -inf."""
    keys = order_keys(values, ids.clamp(min=0)).masked_fill(ids < 0, _LAST)
    lanes = keys.topk(k, dim=-1).indices
    return values.gather(-1, lanes), ids.gather(-1, lanes)


def _gathered(packed_RP: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    if group is None:
        return packed_RP.unsqueeze(0)
    num_ranks = dist.get_world_size(group)
    gathered_NRP = packed_RP.new_empty((num_ranks, *packed_RP.shape))
    dist.all_gather(list(gathered_NRP.unbind(0)), packed_RP.contiguous(), group=group)
    return gathered_NRP


def _log_partition(scores_RX: Tensor, shard: VocabularyShard, transform: LogitTransform) -> Tensor:
    """This shard's part, float32 [R, 1]; -inf for a shard that is all padding."""
    empty_R = scores_RX.new_full((scores_RX.shape[0],), -torch.inf, dtype=torch.float32)
    parts = [transform.apply(scores_RX[:, one.first_row : one.end_row]).logsumexp(dim=1) for one in shard.ranges]
    return torch.stack((empty_R, *parts), dim=1).logsumexp(dim=1, keepdim=True)
