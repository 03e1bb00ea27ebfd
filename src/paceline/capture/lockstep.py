"""A batch of passages that advances one token a step in lockstep: no row is padded and attention needs no mask.

Rows take their prompts token by token, then go on by themselves. Prompts of similar length go together, so few rows
wait; rows that have ended leave the batch every 32 steps.

B rows, T tokens of a pass, S tokens in all, N query heads, M key/value heads, H head size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.capture.writer import LoopWatch, Passage, PassageEnd, PassageRequest, Progress
from paceline.errors import RequestError
from paceline.models.loading import LoadedTarget
from paceline.models.stepwise import StepwiseContext
from paceline.models.targets.target import Target
from paceline.ops.attention import attention
from paceline.ops.sample_tokens import NO_TOKEN, sample_tokens
from paceline.ops.target_distribution import process_logits

_LOOK_EVERY = 32  # steps between two looks of the host at what was written
_SMALLEST_SHRINK = 0.75  # copying the caches pays once so few rows are left


class Lockstep:
    """Keys and values of a batch whose rows are all equally long."""

    def __init__(self, target: Target, batch_size: int, length: int) -> None:
        contract, weight = target.contract, target.norm.weight
        shape = (2, batch_size, contract.num_kv_heads, length, contract.head_size)
        self._layers = [
            torch.zeros(shape, dtype=weight.dtype, device=weight.device) for _ in range(contract.num_layers)
        ]
        self.length = self._num_rows = 0

    def __call__(
        self, layer: int, q_BTNH: Tensor, k_BTMH: Tensor, v_BTMH: Tensor, *, sink_N: Tensor | None = None
    ) -> Tensor:
        assert sink_N is None, "targets have no attention sinks"
        self._num_rows = q_BTNH.shape[1]
        end = self.length + self._num_rows
        k, v = self._layers[layer]
        k[:, :, self.length : end] = k_BTMH.transpose(1, 2)
        v[:, :, self.length : end] = v_BTMH.transpose(1, 2)
        visible = None
        if q_BTNH.shape[1] > 1:
            visible = torch.ones(q_BTNH.shape[1], end, dtype=torch.bool, device=k.device).tril(self.length)
        return attention(q_BTNH.transpose(1, 2), k[:, :, :end], v[:, :, :end], visible=visible).transpose(1, 2)

    def commit_all(self) -> None:
        """The rows of the last pass are context now."""
        self.length += self._num_rows

    def keep(self, rows: Tensor) -> None:
        """Go on with some of the rows; layer by layer, so that one layer at a time is there twice."""
        for layer in range(len(self._layers)):
            self._layers[layer] = self._layers[layer][:, rows]


def _context(target: Target, batch_size: int, length: int) -> Lockstep | StepwiseContext:
    """What a target keeps of a batch: keys and values, or latent rows and recurrent states."""
    if target.contract.kimi is None:
        return Lockstep(target, batch_size, length)
    weight = target.norm.weight
    return StepwiseContext(target.contract, batch_size, length, dtype=weight.dtype, device=weight.device)


class LockstepWriter:
    """A `Writer` without an engine.

    Args:
        target: what writes; its arithmetic is used as it is.
        batch_size: rows at a time.
    """

    def __init__(self, target: LoadedTarget, *, batch_size: int) -> None:
        self._model, self._batch_size = target.model, batch_size

    def write(self, requests: Sequence[PassageRequest], on_progress: Progress | None = None) -> list[Passage]:
        """One passage per request, batch by batch, shortest prompts first.

        Raises:
            RequestError: a prompt is empty, or has no room for its passage in the target's context.
        """
        limit = self._model.position_table.shape[0]
        for index, request in enumerate(requests):
            if not 0 < len(request.prompt_ids) <= limit - request.max_tokens:
                raise RequestError(
                    f"prompt {index} has {len(request.prompt_ids)} tokens; beside {request.max_tokens} of an answer "
                    f"the target has room for 1 to {limit - request.max_tokens}",
                    hint="shorter prompts, or fewer tokens per answer",
                )
        order = sorted(range(len(requests)), key=lambda index: len(requests[index].prompt_ids))
        passages: dict[int, Passage] = {}
        for first in range(0, len(order), self._batch_size):
            chosen = order[first : first + self._batch_size]
            batch = _Batch(self._model, [requests[index] for index in chosen], on_progress)
            passages.update(zip(chosen, batch.run(), strict=True))
        return [passages[index] for index in range(len(requests))]


class _Batch:
    """One batch. Device arrays hold the rows that still run; the host keeps what every row wrote.

    `_ids_BS` are prompts and passages, `_rows` the requests that the rows belong to.
    """

    def __init__(self, model: Target, requests: Sequence[PassageRequest], on_progress: Progress | None) -> None:
        self._model, self._requests, self._on_progress = model, requests, on_progress
        device = model.norm.weight.device
        starts = [len(request.prompt_ids) for request in requests]
        self._shortest, self._length = min(starts), max(len(r.prompt_ids) + r.max_tokens for r in requests)
        ids_BS = torch.zeros(len(requests), self._length, dtype=torch.int64)
        for row, request in enumerate(requests):
            ids_BS[row, : starts[row]] = torch.tensor(request.prompt_ids)
        self._ids_BS = ids_BS.to(device)
        self._starts_B = torch.tensor(starts, device=device)
        self._temperature_B = torch.tensor([r.temperature for r in requests], dtype=torch.float32, device=device)
        self._top_p_B = torch.tensor([r.top_p for r in requests], dtype=torch.float32, device=device)
        self._seed_B = torch.tensor([r.seed for r in requests], dtype=torch.int64, device=device)
        self._cache = _context(model, len(requests), self._length)
        self._rows = list(range(len(requests)))
        self._written: list[list[int]] = [[] for _ in requests]
        self._ends: list[PassageEnd | None] = [None] * len(requests)
        self._watches = [LoopWatch() for _ in requests]
        self._summarise()

    @torch.inference_mode()
    def run(self) -> list[Passage]:
        model, cache, device = self._model, self._cache, self._ids_BS.device
        positions = torch.arange(self._shortest, device=device).expand(len(self._rows), -1)
        hidden = model(self._ids_BS[:, : self._shortest], positions, cache)
        cache.commit_all()
        num_seen = self._shortest
        for position in range(self._shortest, self._length):
            chosen_B = self._choose(model.logits(hidden[:, -1]), position)
            is_written_B = position >= self._starts_B
            chosen_B = torch.where(is_written_B, chosen_B, self._ids_BS[:, position])
            self._ids_BS[:, position] = chosen_B
            is_last = position + 1 == self._length
            if is_last or (position + 1 - self._shortest) % _LOOK_EVERY == 0:
                self._look(num_seen, position + 1)
                num_seen = position + 1
                chosen_B = self._shrink(chosen_B)
                if not self._rows:
                    break
            if not is_last:
                places = torch.full((len(self._rows), 1), position, device=device)
                hidden = model(chosen_B.clamp(min=0)[:, None], places, cache)
                cache.commit_all()
        return [Passage(tuple(ids), end or "length") for ids, end in zip(self._written, self._ends, strict=True)]

    def _summarise(self) -> None:
        """What the host can tell of the running rows, so that a stage nobody asked for costs nothing."""
        sampled = [self._requests[row] for row in self._rows if self._requests[row].temperature > 0]
        self._all_greedy, self._any_top_p = not sampled, any(request.top_p < 1 for request in sampled)

    def _choose(self, logits_BV: Tensor, position: int) -> Tensor:
        processed_BV = process_logits(
            logits_BV,
            temperature_R=self._temperature_B,
            top_k_R=torch.zeros_like(self._seed_B),
            top_p_R=self._top_p_B,
            min_p_R=torch.zeros_like(self._top_p_B),
            all_greedy=self._all_greedy,
            max_top_k=0,
            any_top_p=self._any_top_p,
            any_min_p=False,
        )
        return sample_tokens(
            processed_BV,
            temperature_R=self._temperature_B,
            seed_R=self._seed_B,
            position_R=torch.full_like(self._seed_B, position - 1),
            all_greedy=self._all_greedy,
        )

    def _look(self, start: int, end: int) -> None:
        """Take what was written at positions from `start` to `end` to the host, and see which rows have ended."""
        ids = self._ids_BS[:, start:end].tolist()
        num_ended = num_tokens = 0
        for row, new in zip(self._rows, ids, strict=True):
            if self._ends[row] is not None:
                continue
            new = new[max(0, len(self._requests[row].prompt_ids) - start) :]
            num_kept, self._ends[row] = self._end_of(row, new)
            self._written[row] += new[:num_kept]
            num_ended += self._ends[row] is not None
            num_tokens += num_kept
        if self._on_progress is not None:
            self._on_progress(num_ended, num_tokens)

    def _end_of(self, row: int, new: list[int]) -> tuple[int, PassageEnd | None]:
        """How many of the new tokens count, and why the passage ends there, if it does."""
        stops = self._model.contract.stop_token_ids
        num_left = self._requests[row].max_tokens - len(self._written[row])
        kept = new[:num_left]
        for index, token in enumerate(kept):
            if token == NO_TOKEN:
                return index, "error"
            if token in stops:
                kept = kept[: index + 1]
                break
        num_kept = self._watches[row].push(kept)
        is_stopped = bool(kept) and kept[-1] in stops
        if num_kept is not None and (num_kept < len(kept) or not is_stopped):
            return num_kept, "loop"
        if is_stopped:
            return len(kept), "stop"
        return len(kept), "length" if len(kept) == num_left else None

    def _shrink(self, chosen_B: Tensor) -> Tensor:
        alive = [place for place, row in enumerate(self._rows) if self._ends[row] is None]
        if len(alive) > _SMALLEST_SHRINK * len(self._rows):
            return chosen_B
        self._rows = [self._rows[place] for place in alive]
        kept = torch.tensor(alive, dtype=torch.int64, device=chosen_B.device)
        if alive:
            self._cache.keep(kept)
        self._ids_BS, self._starts_B = self._ids_BS[kept], self._starts_B[kept]
        self._temperature_B, self._top_p_B = self._temperature_B[kept], self._top_p_B[kept]
        self._seed_B = self._seed_B[kept]
        self._summarise()
        return chosen_B[kept]
