"""Chats as token ids through the target's own template, with a mark on every token that it would write itself."""

from __future__ import annotations

import datetime
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from paceline.checkpoint.tokenizer import TextTokenizer
from paceline.configuration.run import DataSettings
from paceline.errors import DataError, RequestError

_log = logging.getLogger(__name__)

_READ = ("role", "content")  # of a message
_RENDERED_TOO = ("tools", "functions", "documents")  # of a row: a server shows them to the target, in front of the chat


class ChatEncoder(Protocol):
    """What reading chat files needs of a tokenizer."""

    def encode_chat(self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True) -> list[int]:
        """Messages through the target's template; at the end, if asked for, what opens the assistant's turn."""
        ...


def chat_encoder(tokenizer: TextTokenizer, data: DataSettings) -> ChatEncoder | None:
    """What renders and encodes a run's chats; None where the target has no template for them.

    Args:
        tokenizer: of the target.
        data: of the run; its date is what the template is told, and without one the same chats are other data tomorrow.
    """
    if not tokenizer.has_chat_template:
        return None
    if data.template_date is not None:
        return tokenizer.dated(data.template_date)
    if any(file.suffix == ".jsonl" for file in data.files) and tokenizer.tells_the_date:
        _log.warning(
            "the chat template writes today's date: on another day the same chats are other data, also for --resume; "
            "data.template_date=%s keeps it",
            datetime.date.today(),
        )
    return tokenizer


def read_chats(path: Path, encoder: ChatEncoder) -> list[tuple[list[int], list[bool]]]:
    """Token ids and supervision marks of every chat of a file that holds an assistant's turn.

    Args:
        path: one JSON object per line with `messages`.
        encoder: renders and encodes them.
    Raises:
        DataError: names the line that is no chat or cannot be told apart.
    """
    rows: list[tuple[list[int], list[bool]]] = []
    unread: dict[str, int] = {}
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # str.splitlines would also cut inside JSON strings
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read {path}: {error}") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            turns = [{key: _text(message[key]) for key in _READ} for message in row["messages"]]
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise DataError(
                f"{path}:{number} is not a chat: {error!r}",
                hint='{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}',
            ) from error
        if any(turn["role"] == "assistant" for turn in turns):
            rows.append(encode_turns(turns, encoder, where=f"{path}:{number}"))
            for key in _unread(row):
                unread.setdefault(key, number)
    if unread:
        _log.warning(
            "%s: these texts are of role and content alone; not read are %s",
            path,
            ", ".join(f"{key} (first in line {number})" for key, number in unread.items()),
        )
    return rows


def _unread(row: Mapping[str, Any]) -> Iterator[str]:
    """What of a row a template might render, or a trainer heed, and is not read here; what is empty says nothing."""
    yield from (key for key in _RENDERED_TOO if row.get(key))
    yield from (
        f"messages.{key}" for message in row["messages"] for key, value in message.items() if key not in _READ and value
    )


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected text, found {value!r}")
    return value


def encode_turns(
    turns: Sequence[Mapping[str, str]], encoder: ChatEncoder, *, where: str
) -> tuple[list[int], list[bool]]:
    """Token ids of a chat and their supervision marks, through the target's own template.

    An assistant turn is what the render with it adds to the render that asks for it, up to the last token that the
    target itself would write: text that the template puts after the end token is context, not a label.

    Raises:
        DataError: the template rewrites earlier turns, so no border can be drawn, or leaves an answer out.
    """
    ids: list[int] = []
    marks: list[bool] = []
    for index, turn in enumerate(turns):
        if turn["role"] != "assistant":
            continue
        try:
            prompt = encoder.encode_chat(turns[:index], add_generation_prompt=True)
            whole = encoder.encode_chat(turns[: index + 1], add_generation_prompt=False)
            trailing = _num_trailing(encoder, turns[:index], whole)
        except RequestError as error:
            raise DataError(f"{where}: {error.message}", hint=error.hint) from error
        if prompt[: len(ids)] != ids or whole[: len(prompt)] != prompt:
            raise DataError(
                f"{where}: adding turn {index} changes the tokens before it, so its own cannot be told apart",
                hint="one assistant turn per conversation (some templates rewrite earlier ones), no leading blank line",
            )
        num_answer = len(whole) - len(prompt) - trailing
        if num_answer < 1:
            raise DataError(
                f"{where}: the template renders turn {index} without a token that the target would write itself",
                hint="a template that keeps what the assistant said, and ends it",
            )
        marks += [False] * (len(prompt) - len(ids)) + [True] * num_answer + [False] * trailing
        ids = whole
    return ids, marks


def _num_trailing(encoder: ChatEncoder, history: Sequence[Mapping[str, str]], whole: Sequence[int]) -> int:
    """Tokens that the template puts after the end token of an assistant turn.

    What a render ends in whatever the answer says is the end token and what follows it. Two other answers are rendered,
    since the real one may end as one of them does; and held against the real one, since a tokenizer of few words may
    know neither of them, nor tell one from the other.

    Args:
        encoder: renders and encodes.
        history: turns before the answer.
        whole: tokens of the render with the answer.
    """
    others = [
        encoder.encode_chat([*history, {"role": "assistant", "content": answer}], add_generation_prompt=False)
        for answer in ("0", "yes")
    ]
    return max(min(_common_ending(whole, other) for other in others) - 1, 0)


def _common_ending(ids: Sequence[int], others: Sequence[int]) -> int:
    """How many last tokens two renders share."""
    same = 0
    while same < min(len(ids), len(others)) and ids[-1 - same] == others[-1 - same]:
        same += 1
    return same
