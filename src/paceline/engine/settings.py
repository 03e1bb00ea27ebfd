"""Sizes and choices of an engine, and what the models allow of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from paceline.checkpoint.contract import DraftSampleMethod
from paceline.engine.draft_budget import DraftSchedule
from paceline.engine.draft_length import DRAFT_LENGTH_MODES, DraftLengthMode
from paceline.engine.proposal import Proposer
from paceline.engine.short_list import DraftVocabSize
from paceline.engine.start_checks import CANARY_MODES, CanaryMode
from paceline.errors import ConfigError
from paceline.models.loading import LoadedDrafter, LoadedTarget
from paceline.ops.acceptance import VERIFY_METHODS, VerifyMethod
from paceline.ops.delta_chunks import can_chunk_bound
from paceline.ops.delta_fla import find_chunk_kda
from paceline.ops.delta_prompts import PromptKernel

DEFAULT_MAX_MODEL_LEN = 2048
_SNAPSHOTS_PER_SLOT = 8  # a decoding request holds two of its own
_SNAPSHOT_SPACING = 1024  # positions, where blocks allow it
RecurrentStateDtype = Literal["float32", "bfloat16"]
_STATE_DTYPES: Mapping[RecurrentStateDtype, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}


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
        block_size: positions per block of the caches; None is 32 on a CPU and 64 on a GPU.
        num_blocks: blocks of every cache, the one for padding included; None is what `max_num_seqs` full contexts
            need. With fewer, requests wait for room, and the latest may have to step back for the others.
        prefix_cache: keep the keys of texts that ended, target's and drafter's alike, for requests that begin the same.
        num_snapshots: recurrent states that are kept at block boundaries, where the target has any and prefixes are
            cached: a request can begin behind a cached text where its state was kept. None is 8 per slot.
        snapshot_spacing: in long texts there is one at each multiple of so many positions, besides those at the ends
            of prompts and answers; a multiple of the block size. None is 1024, or a block that is larger.
        recurrent_state_dtype: in which recurrent states are kept, "float32" or "bfloat16". They are computed in float32
            either way. In bf16 they take half the room and half the reading; each pass rounds them once, plain decoding
            behind every token and a step behind all that it keeps, so greedy text need no longer be that of plain
            decoding where two tokens are nearly equal. It saves memory and no time: on an H200 steps of a small target
            took as long, or up to 17 % longer.
        prompt_kernel: what runs the recurrence over the rows of a prompt on a GPU, see `ops/delta_prompts.py`: "auto"
            goes by their number and by what is installed, "recurrent" gives the bits of decoding.
        max_num_waiting: requests that may wait beyond those for which slots are free; None sets no limit.
        max_itl_ms: how long prompt chunks may keep decoding requests waiting for their next tokens, their own step
            included; a chunk is then shorter than `prefill_chunk_size`, but a block at least. None sets no limit.
        run_ahead: launch a step before the results of the one before are read, so that a GPU has no pause in between;
            None does so on a GPU. Outputs are the same; a request's end is seen one step later, and requests with a
            grammar, whose masks depend on what was decided, make the host wait nevertheless.
        cuda_graphs: record decode steps as CUDA graphs and play them back; None is on a GPU with Triton, where nothing
            of a step asks the host. What a step computes does not change.
        record_prompts: record passes of short prompts as well, where decode steps are recorded and the target is dense;
            None does so. A pass is padded to a bucket then, and the first two of each shape are slow.
        check_invariants: check the engine around every pass, which costs far more than a pass; None asks the variable
            `PACELINE_DEBUG`.
        canary: "start" checks the drafter before the engine takes its first request, see `start_checks.py`.
        trace_details: records hold probabilities, entropies and times of each step's parts, see `trace.step`. Steps are
            neither recorded as graphs nor launched ahead then, and each takes longer; the text is the same.
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
    block_size: int | None = None
    num_blocks: int | None = None
    prefix_cache: bool = True
    num_snapshots: int | None = None
    snapshot_spacing: int | None = None
    recurrent_state_dtype: RecurrentStateDtype = "float32"
    prompt_kernel: PromptKernel = "auto"
    max_num_waiting: int | None = None
    max_itl_ms: float | None = None
    run_ahead: bool | None = None
    cuda_graphs: bool | None = None
    record_prompts: bool | None = None
    check_invariants: bool | None = None
    canary: CanaryMode = "off"
    trace_details: bool = False

    @property
    def wants_graphs(self) -> bool | None:
        """Whether decode steps shall be recorded; None leaves it to the device."""
        return False if self.trace_details else self.cuda_graphs

    def runs_ahead_on(self, device_type: str) -> bool:
        """Whether a step is launched before the results of the one before are read, on a device such as "cuda"."""
        if self.trace_details or self.run_ahead is None:
            return device_type == "cuda" and not self.trace_details
        return self.run_ahead

    def __post_init__(self) -> None:
        sizes = ("max_num_seqs", "max_model_len", "num_draft_tokens", "prefill_chunk_size", "block_size")
        for name in (*sizes, "num_snapshots", "snapshot_spacing"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; it has to be at least 1")
        if self.block_size == 1:
            raise ConfigError(
                "block_size is 1; it has to be at least 2, as one row of the block for padding stays zero"
            )
        if self.max_num_waiting is not None and self.max_num_waiting < 0:
            raise ConfigError(f"max_num_waiting is {self.max_num_waiting}; it has to be at least 0")
        if self.max_itl_ms is not None and not 0 < self.max_itl_ms < math.inf:
            raise ConfigError(f"max_itl_ms is {self.max_itl_ms}; it has to be a positive number of milliseconds")
        if self.draft_sample_method not in (None, "greedy", "probabilistic"):
            raise ConfigError(f"draft_sample_method is {self.draft_sample_method!r}, not 'greedy' or 'probabilistic'")
        choices = (
            ("verify_method", VERIFY_METHODS),
            ("draft_length", DRAFT_LENGTH_MODES),
            ("canary", CANARY_MODES),
            ("recurrent_state_dtype", tuple(_STATE_DTYPES)),
            ("prompt_kernel", get_args(PromptKernel)),
        )
        for name, known in choices:
            if getattr(self, name) not in known:
                raise ConfigError(f"{name} is {getattr(self, name)!r}, not one of {', '.join(map(repr, known))}")
        asked = self.draft_vocab_size
        if asked not in ("auto", "full") and not (type(asked) is int and asked >= 1):
            raise ConfigError(f"draft_vocab_size is {asked!r}, neither a number of ids nor 'auto' or 'full'")
        if self.trace_details and (self.run_ahead or self.cuda_graphs):
            raise ConfigError(
                "trace_details looks into each step, which neither run_ahead nor cuda_graphs leaves room for",
                hint="leaving both out",
            )
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


@dataclass(frozen=True)
class CacheSizes:
    """How the caches of an engine are cut into blocks.

    Attributes:
        block_size: positions per block.
        lookahead: positions that a request needs beyond those it has: what a step writes whose results are not read
            yet, and what the next one does.
        max_blocks: blocks of a full context.
        num_blocks: of every cache, block 0 included.
    """

    block_size: int
    lookahead: int
    max_blocks: int
    num_blocks: int


def cache_sizes(
    settings: EngineSettings, *, max_model_len: int, num_draft_tokens: int, spare_positions: int, device_type: str
) -> CacheSizes:
    """Cut the caches into blocks.

    Args:
        settings: what was asked for.
        max_model_len: tokens that prompt and output may hold together.
        num_draft_tokens: K; a step runs K + 1 rows.
        spare_positions: what the drafter writes beyond the rows of a step.
        device_type: such as "cpu".

    Raises:
        ConfigError: not even a single request fits.
    """
    block_size = settings.block_size or (32 if device_type == "cpu" else 64)
    lookahead = 2 * (num_draft_tokens + 1) + spare_positions
    max_blocks = -(-(max_model_len + lookahead) // block_size)
    num_blocks = settings.num_blocks if settings.num_blocks is not None else settings.max_num_seqs * max_blocks + 1
    if num_blocks <= max_blocks:
        raise ConfigError(
            f"num_blocks is {num_blocks}; one request of max_model_len {max_model_len}, with {lookahead} positions for "
            f"what is being drafted, needs {max_blocks} blocks of {block_size} beside the one for padding",
            hint=f"num_blocks={max_blocks + 1} or more, or a smaller max_model_len",
        )
    return CacheSizes(block_size, lookahead, max_blocks, num_blocks)


@dataclass(frozen=True)
class SnapshotSizes:
    """Where recurrent states are kept for later requests.

    Attributes:
        num_snapshots: how many at most.
        spacing: positions between two of a long text.
    """

    num_snapshots: int
    spacing: int


def snapshot_sizes(settings: EngineSettings, block_size: int) -> SnapshotSizes:
    """How many states to keep, and where.

    Args:
        settings: what was asked for.
        block_size: positions per block.

    Raises:
        ConfigError: they would lie where no hit can end.
    """
    spacing = settings.snapshot_spacing or -(-_SNAPSHOT_SPACING // block_size) * block_size
    if spacing % block_size:
        raise ConfigError(
            f"snapshot_spacing is {spacing}; blocks have {block_size} positions, and a hit ends with a block",
            hint=f"snapshot_spacing={-(-spacing // block_size) * block_size}",
        )
    return SnapshotSizes(settings.num_snapshots or _SNAPSHOTS_PER_SLOT * settings.max_num_seqs, spacing)


def recurrent_state_dtype(target: LoadedTarget, settings: EngineSettings) -> torch.dtype:
    """In which dtype an engine keeps the recurrent states of a target.

    Raises:
        ConfigError: another one than the usual was asked for, and the target has none.
    """
    asked, kimi = settings.recurrent_state_dtype, target.contract.kimi
    if asked != "float32" and (kimi is None or kimi.delta is None):
        raise ConfigError(
            f"recurrent_state_dtype is {asked!r}; {target.contract.name} keeps no recurrent state",
            origin={"target": target.contract.origin},
            hint="leaving it out",
        )
    return _STATE_DTYPES[asked]


def prompt_kernel(target: LoadedTarget, settings: EngineSettings) -> PromptKernel:
    """What runs the recurrence of a target's prompts.

    Raises:
        ConfigError: one was asked for that cannot run here, or for this target.
    """
    asked, kimi = settings.prompt_kernel, target.contract.kimi
    delta = kimi.delta if kimi is not None else None
    if asked in ("auto", "recurrent"):
        return asked
    weight, obstacle, hint = target.model.norm.weight, None, "prompt_kernel auto"
    if delta is None:
        obstacle = f"{target.contract.name} keeps no recurrent state"
    elif weight.device.type != "cuda":
        obstacle = f"the target is on {weight.device}, and kernels are for a GPU"
    elif asked == "chunks" and not can_chunk_bound(delta.gate_lower_bound):
        obstacle = f"gates are bounded by {delta.gate_lower_bound}, and chunks need a bound that float32 holds"
    elif asked == "fla" and weight.dtype == torch.float32:
        obstacle = "the target is in float32, and fla-core's kernels keep 16 bits in between"
    elif asked == "fla" and find_chunk_kda() is None:
        obstacle, hint = "fla-core is not installed, or does not go with torch and Triton", "pip install fla-core"
    if obstacle is not None:
        raise ConfigError(
            f"prompt_kernel is {asked!r}; {obstacle}", origin={"target": target.contract.origin}, hint=hint
        )
    return asked


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
