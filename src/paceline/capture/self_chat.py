"""Training conversations from the target alone: it writes the user's turn at temperature 1, then answers it.

All rows of a batch open with the same template text and advance one token a step in lockstep, so positions are equal
across the batch, no row is padded and attention needs no mask. Rows whose user turn has ended take the template's
closing tokens one by one; rows whose answer has ended run along idle until the batch is done.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.capture.lockstep import Lockstep, draw_tokens
from paceline.capture.token_file import Conversation
from paceline.errors import CompatibilityError
from paceline.models.loading import LoadedTarget
from paceline.models.targets.dense import DenseTarget

_log = logging.getLogger(__name__)

_USER, _TEMPLATE, _ANSWER, _DONE = range(4)


@dataclass(frozen=True)
class SelfChatSettings:
    """What to generate.

    Attributes:
        num_conversations: rows started; duplicates of a user turn are dropped afterwards.
        batch_size: rows at a time.
        max_user_tokens: a longer user turn is dropped, since it was cut.
        max_answer_tokens: an answer is cut there and kept.
        greedy_share: share of rows answered greedily; the rest at `temperature`.
        temperature: of the other answers.
        seed: of all draws.
    """

    num_conversations: int
    batch_size: int = 4096
    max_user_tokens: int = 98
    max_answer_tokens: int = 320
    greedy_share: float = 0.75
    temperature: float = 0.8
    seed: int = 0


def generate_self_chat(target: LoadedTarget, settings: SelfChatSettings) -> Iterator[Conversation]:
    """Generate batch by batch; user turns that were cut, are empty or occurred before are dropped.

    Args:
        target: loaded with plain linears; a GPU makes this worth while.
        settings: see above.
    Raises:
        CompatibilityError: the target's chat template does not put the user's text between fixed parts, or the longest
            conversation has no room in its context.
        RequestError: the target has no chat template.
    """
    opening, closing = template_around_user(target)
    longest = len(opening) + settings.max_user_tokens + len(closing) + settings.max_answer_tokens
    if longest > target.model.position_table.shape[0]:
        raise CompatibilityError(
            f"a conversation may take {longest} tokens; the target has positions for "
            f"{target.model.position_table.shape[0]}",
            origin={"target": target.contract.origin},
            hint="fewer tokens per answer or per user turn",
        )
    generator = torch.Generator(target.model.norm.weight.device).manual_seed(settings.seed)
    seen: set[bytes] = set()
    began, num_tokens = time.perf_counter(), 0
    for first in range(0, settings.num_conversations, settings.batch_size):
        size = min(settings.batch_size, settings.num_conversations - first)
        for conversation in _one_batch(target.model, opening, closing, size, settings, generator):
            key = conversation.prompt_ids.tobytes()
            if key not in seen:
                seen.add(key)
                num_tokens += len(conversation.answer_ids)
                yield conversation
        _log.info(
            "%d conversations, %d answer tokens, %.0f tokens/s",
            len(seen),
            num_tokens,
            num_tokens / (time.perf_counter() - began),
        )


def template_around_user(target: LoadedTarget) -> tuple[list[int], list[int]]:
    """Token ids that the chat template puts before and after the user's first turn, up to the answer.

    Raises:
        CompatibilityError: see `generate_self_chat`.
    """
    renders = [target.tokenizer.encode_chat([{"role": "user", "content": text}]) for text in ("0", "yes")]
    shorter = min(map(len, renders))
    before = next((i for i in range(shorter) if renders[0][i] != renders[1][i]), shorter)
    after = next((i for i in range(shorter - before) if renders[0][-1 - i] != renders[1][-1 - i]), shorter - before)
    opening, closing = renders[0][:before], renders[0][len(renders[0]) - after :]
    if before == 0 or after == 0 or closing[0] not in target.contract.stop_token_ids:
        raise CompatibilityError(
            "the chat template does not close the user's turn with a stop token, so the target cannot write that turn",
            origin={"target": target.contract.origin},
            hint="prompts from a file instead",
        )
    return opening, closing


@torch.inference_mode()
def _one_batch(
    model: DenseTarget,
    opening: list[int],
    closing: list[int],
    size: int,
    settings: SelfChatSettings,
    generator: torch.Generator,
) -> list[Conversation]:
    device = model.norm.weight.device
    length = len(opening) + settings.max_user_tokens + len(closing) + settings.max_answer_tokens
    cache = Lockstep(model, size, length)
    end_of_turn = closing[0]
    ids = torch.full((size, length + 1), end_of_turn, dtype=torch.int64, device=device)
    ids[:, : len(opening)] = torch.tensor(opening, device=device)
    phase = torch.full((size,), _USER, device=device)
    answer_start = torch.full((size,), length, device=device)
    answer_end = torch.full((size,), length, device=device)
    forced = torch.tensor([*closing, end_of_turn], device=device)
    forced_index = torch.zeros(size, dtype=torch.int64, device=device)
    stop_ids = torch.tensor(model.contract.stop_token_ids, device=device)
    is_greedy = torch.rand(size, device=device, generator=generator) < settings.greedy_share
    hidden = model(ids[:, : len(opening)], torch.arange(len(opening), device=device).expand(size, -1), cache)
    cache.length = len(opening)
    for position in range(len(opening), length):
        logits = model.logits(hidden[:, -1])
        temperature = torch.where(phase == _USER, 1.0, settings.temperature)
        drawn = draw_tokens(logits, temperature, generator)
        chosen = torch.where(is_greedy & (phase == _ANSWER), logits.argmax(-1), drawn)
        chosen = torch.where(phase == _TEMPLATE, forced[forced_index], chosen)
        chosen = torch.where(phase == _DONE, end_of_turn, chosen)
        ids[:, position] = chosen

        # Phases move on after the token: a user turn that ends has written closing[0] itself.
        # An answer ends where serving would end it, at any stop token.
        is_stop = torch.isin(chosen, stop_ids)
        ended_answer = (phase == _ANSWER) & (is_stop | (position + 1 - answer_start >= settings.max_answer_tokens))
        answer_end = torch.where(ended_answer, position + 1, answer_end)
        template_over = (phase == _TEMPLATE) & (forced_index + 1 >= len(closing))
        answer_start = torch.where(template_over, position + 1, answer_start)
        ended_user = (phase == _USER) & (chosen == end_of_turn)
        is_too_long = position + 1 - len(opening) >= settings.max_user_tokens
        is_lost = (phase == _USER) & ~ended_user & (is_stop | is_too_long)
        forced_index = torch.where(phase == _TEMPLATE, forced_index + 1, forced_index)
        forced_index = torch.where(ended_user, 1, forced_index)
        phase = torch.where(ended_answer | is_lost, _DONE, phase)
        phase = torch.where(template_over, _ANSWER, phase)
        phase = torch.where(ended_user, _TEMPLATE, phase)
        if position % 32 == 0 and bool((phase == _DONE).all()):
            break
        hidden = model(chosen[:, None], torch.full((size, 1), position, device=device), cache)
        cache.length = position + 1
    return _collect(ids, answer_start, answer_end, phase, shortest_prompt=len(opening) + len(closing))


def _collect(
    ids: Tensor, answer_start: Tensor, answer_end: Tensor, phase: Tensor, *, shortest_prompt: int
) -> list[Conversation]:
    """Rows that have an answer and a user turn; the empty user turn's prompt is template alone."""
    rows, starts, ends = ids.cpu().numpy(), answer_start.tolist(), answer_end.tolist()
    conversations = []
    for row, start, end, is_done in zip(rows, starts, ends, (phase == _DONE).tolist(), strict=True):
        if is_done and shortest_prompt < start < end:
            conversations.append(Conversation(row[:start], row[start:end]))
    return conversations
