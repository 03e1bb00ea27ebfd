"""Answers of the target to prompts that are given; in chats of several turns it answers each of them, in order.

The history of a later turn holds the target's own earlier answers, rendered as a client would send them again. Every
answer is a row of its own, whose prompt is that history.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.capture.given_prompts import GivenPrompt, GivenPrompts, Message
from paceline.capture.rows import CapturedRow, ShardContent
from paceline.capture.sampling import AnswerSampling
from paceline.capture.writer import Progress, Writer
from paceline.errors import DataError, RequestError
from paceline.models.loading import LoadedTarget

_TEMPLATE_TOKENS = 32  # of a turn, more or less: what a template puts around its text


@dataclass
class _Chat:
    """A chat on its way: what is answered next, and what was said so far."""

    prompt: GivenPrompt
    turn: int = 0
    answers: dict[int, str] = field(default_factory=dict)  # by the index of their question

    def history(self) -> list[Message]:
        """Messages up to the next question, with the target's own answers for those that were given."""
        messages: list[Message] = []
        question = self.prompt.questions[self.turn]
        for index, message in enumerate(self.prompt.messages[: question + 1]):
            replaced = message["role"] == "assistant" and index - 1 in self.answers
            messages.append({"role": "assistant", "content": self.answers[index - 1]} if replaced else message)
        return messages


class Answers:
    """A source of conversations from a file of prompts; a row follows from its prompt, its id and the seed.

    Args:
        target: what answers.
        given: prompts, sorted out.
        sampling: of the answers.
        max_prompt_tokens: prompts beyond are dropped; None refuses those that do not fit into the context.
    Raises:
        DataError: a prompt leaves no room for an answer in the target's context; names its line.
        RequestError: the target has no chat template, or it refuses a chat.
    """

    def __init__(
        self,
        target: LoadedTarget,
        given: GivenPrompts,
        sampling: AnswerSampling,
        *,
        max_prompt_tokens: int | None = None,
    ) -> None:
        self._target, self._given, self._sampling = target, given, sampling
        self._limit = target.model.position_table.shape[0] - sampling.max_answer_tokens
        self._most = min(self._limit, max_prompt_tokens or self._limit)
        self._max_prompt_tokens = max_prompt_tokens
        self.dropped = list(given.dropped)
        self._prompts: list[GivenPrompt] = []
        self._longest = 1
        for prompt in given.prompts:
            length = len(self._encoded(_Chat(prompt)))
            if length <= self._most:
                self._prompts.append(prompt)
                self._longest = max(self._longest, self._foreseen_length(prompt, length))
            elif max_prompt_tokens is None:
                raise DataError(
                    f"a prompt has {length} tokens; beside {sampling.max_answer_tokens} of an answer the target has "
                    f"room for {self._limit}",
                    origin={"prompts": prompt.place, "target": target.contract.origin},
                    hint=f"--max-prompt-tokens {max(1, self._limit)}, which leaves longer prompts out, or fewer tokens "
                    "per answer",
                )
            else:
                self.dropped.append((prompt.id, "prompt too long"))
        if not self._prompts:
            raise DataError(
                f"all {len(given.prompts)} prompts have more than {self._most} tokens",
                origin={"prompts": given.name},
                hint="a larger --max-prompt-tokens, or fewer tokens per answer",
            )
        self._most = min(self._most, self.context_length() - sampling.max_answer_tokens)

    @property
    def num_items(self) -> int:
        """Chats that are answered."""
        return len(self._prompts)

    def plan(self) -> dict[str, object]:
        """What the rows follow from, beside target and sampling."""
        return {
            "kind": "prompts",
            "file": {"name": self._given.name, "sha256": self._given.sha256},
            "chats": self.num_items,
            "max_prompt_tokens": self._max_prompt_tokens,
        }

    def context_length(self) -> int:
        """Tokens of the longest prompt with its answer, as far as that can be foreseen."""
        return min(self._limit, self._longest) + self._sampling.max_answer_tokens

    def shard(self, rows: range, writer: Writer, on_progress: Progress | None = None) -> ShardContent:
        """Answer some of the chats: the first question of all of them, then the second, and so on."""
        content: list[CapturedRow] = []
        dropped: list[tuple[str, str]] = []
        chats = [_Chat(self._prompts[row]) for row in rows]
        while chats:
            chats = self._one_turn(chats, writer, content, dropped, on_progress)
        order = {self._prompts[row].id: row for row in rows}
        return ShardContent(sorted(content, key=lambda row: (order[row.id], row.turn)), dropped)

    def _one_turn(
        self,
        chats: Sequence[_Chat],
        writer: Writer,
        content: list[CapturedRow],
        dropped: list[tuple[str, str]],
        on_progress: Progress | None,
    ) -> list[_Chat]:
        """Answer one question of each chat; returns those that have another one."""
        asked: list[tuple[_Chat, list[int]]] = []
        for chat in chats:
            prompt_ids = self._encoded(chat)
            if len(prompt_ids) <= self._most:
                asked.append((chat, prompt_ids))
            else:
                dropped.append((chat.prompt.id, "history too long"))
        requests = [self._sampling.request(chat.prompt.id, chat.turn, ids) for chat, ids in asked]
        going_on = []
        tell_tokens = None if on_progress is None else (lambda _, num_tokens: on_progress(0, num_tokens))
        passages = writer.write(requests, tell_tokens) if requests else []
        for (chat, _), request, passage in zip(asked, requests, passages, strict=True):
            if passage.end == "error":
                dropped.append((chat.prompt.id, "bad numbers"))
                continue
            content.append(CapturedRow(chat.prompt.id, chat.turn, request, passage))
            questions = chat.prompt.questions
            if chat.turn + 1 == len(questions):
                continue
            if passage.end != "stop":
                dropped.append((chat.prompt.id, "turns behind a cut answer"))
                continue
            chat.answers[questions[chat.turn]] = self._target.tokenizer.decode(list(passage.token_ids[:-1]))
            chat.turn += 1
            going_on.append(chat)
        if on_progress is not None:
            on_progress(len(chats) - len(going_on), 0)
        return going_on

    def _encoded(self, chat: _Chat) -> list[int]:
        try:
            return self._target.tokenizer.encode_chat(chat.history())
        except RequestError as error:
            raise RequestError(error.message, origin={"prompts": chat.prompt.place, **error.origin}) from error

    def _foreseen_length(self, prompt: GivenPrompt, first: int) -> int:
        """Tokens of the last prompt of a chat if every answer is as long as it may be; an upper bound, as a rule."""
        questions = prompt.questions
        later = prompt.messages[questions[0] + 1 :]
        texts = [m["content"] for m in later if m["role"] != "assistant"]
        text_tokens = sum(len(self._target.tokenizer.encode(text)) + _TEMPLATE_TOKENS for text in texts)
        return first + text_tokens + (len(questions) - 1) * (self._sampling.max_answer_tokens + _TEMPLATE_TOKENS)
