"""Training conversations from prompts that are given: the target answers each of them.

Rows of a batch advance in lockstep, whatever the length of their prompts: a row takes its prompt token by token, then
goes on by itself. Prompts of similar length go together, so few rows idle.

B rows, S tokens.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from paceline.capture.lockstep import Lockstep, draw_tokens
from paceline.capture.token_file import Conversation
from paceline.errors import RequestError
from paceline.models.loading import LoadedTarget
from paceline.models.targets.dense import DenseTarget

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class AnswerSettings:
    """How prompts are answered.

    Attributes:
        batch_size: rows at a time.
        max_answer_tokens: an answer is cut there and kept.
        greedy_share: share of prompts answered greedily; the rest at `temperature`.
        temperature: of the other answers.
        seed: of all draws.
    """

    batch_size: int = 4096
    max_answer_tokens: int = 320
    greedy_share: float = 0.75
    temperature: float = 0.8
    seed: int = 0


def answer_prompts(
    target: LoadedTarget, prompts: Sequence[Sequence[int]], settings: AnswerSettings
) -> Iterator[Conversation]:
    """Answer every prompt once, batch by batch, shortest prompts first.

    Args:
        target: loaded with plain linears; a GPU makes this worth while.
        prompts: token ids of each, template included, up to where the answer begins.
        settings: see above.
    Raises:
        RequestError: a prompt is empty, or has no room for its answer in the target's context.
    """
    limit = target.model.position_table.shape[0] - settings.max_answer_tokens
    for index, prompt in enumerate(prompts):
        if not 0 < len(prompt) <= limit:
            raise RequestError(
                f"prompt {index} has {len(prompt)} tokens; beside {settings.max_answer_tokens} of an answer the target "
                f"has room for 1 to {limit}",
                hint="shorter prompts, or fewer tokens per answer",
            )
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    generator = torch.Generator(target.model.norm.weight.device).manual_seed(settings.seed)
    began, num_done, num_tokens = time.perf_counter(), 0, 0
    for first in range(0, len(order), settings.batch_size):
        batch = [prompts[index] for index in order[first : first + settings.batch_size]]
        for conversation in _one_batch(target.model, batch, settings, generator):
            num_tokens += len(conversation.answer_ids)
            yield conversation
        num_done += len(batch)
        _log.info(
            "%d of %d prompts, %d answer tokens, %.0f tokens/s",
            num_done,
            len(order),
            num_tokens,
            num_tokens / (time.perf_counter() - began),
        )


@torch.inference_mode()
def _one_batch(
    model: DenseTarget, prompts: list[Sequence[int]], settings: AnswerSettings, generator: torch.Generator
) -> list[Conversation]:
    device = model.norm.weight.device
    size, longest = len(prompts), max(map(len, prompts))
    length = longest + settings.max_answer_tokens
    starts_B = torch.tensor([len(prompt) for prompt in prompts], device=device)
    prompts_BS = torch.zeros(size, longest, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        prompts_BS[row, : len(prompt)] = torch.tensor(prompt)
    ids_BS = torch.zeros(size, length, dtype=torch.int64, device=device)
    ids_BS[:, :longest] = prompts_BS.to(device)
    stop_ids = torch.tensor(model.contract.stop_token_ids, dtype=torch.int64, device=device)
    is_greedy_B = torch.rand(size, device=device, generator=generator) < settings.greedy_share
    temperature_B = torch.full((size,), settings.temperature, device=device)
    ends_B = starts_B + settings.max_answer_tokens
    is_done_B = torch.zeros(size, dtype=torch.bool, device=device)
    cache = Lockstep(model, size, length)
    shortest = int(starts_B.min())
    hidden = model(ids_BS[:, :shortest], torch.arange(shortest, device=device).expand(size, -1), cache)
    cache.length = shortest
    for position in range(shortest, length):
        logits = model.logits(hidden[:, -1])
        chosen_B = torch.where(is_greedy_B, logits.argmax(-1), draw_tokens(logits, temperature_B, generator))
        is_answer_B = position >= starts_B
        chosen_B = torch.where(is_answer_B, chosen_B, ids_BS[:, position])
        ids_BS[:, position] = chosen_B
        is_stop_B = is_answer_B & ~is_done_B & torch.isin(chosen_B, stop_ids)
        ends_B = torch.where(is_stop_B, position + 1, ends_B)
        is_done_B |= is_stop_B | (position + 1 >= ends_B)
        if position % 32 == 0 and bool(is_done_B.all()):
            break
        hidden = model(chosen_B[:, None], torch.full((size, 1), position, device=device), cache)
        cache.length = position + 1
    rows: np.ndarray = ids_BS.cpu().numpy()
    bounds = zip(rows, starts_B.tolist(), ends_B.tolist(), strict=True)
    return [Conversation(row[:start], row[start:end]) for row, start, end in bounds]
