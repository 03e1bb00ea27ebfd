"""Reads prompts that shall be answered: JSONL with `prompt` or `messages`, each with an id that outlives the file.

Needs no torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.capture.exclusion import Exclusion
from paceline.errors import DataError

_ROLES = ("system", "user", "assistant")
_EXAMPLE = '{"prompt": "..."} or {"messages": [{"role": "user", "content": "..."}]}'

Message = Mapping[str, str]


@dataclass(frozen=True)
class GivenPrompt:
    """A chat whose answers are to be written anew.

    Attributes:
        id: as given, else a hash of the messages.
        messages: up to the last question. Answers in between only mark their place.
        place: file and line.
    """

    id: str
    messages: tuple[Message, ...]
    place: str

    @property
    def questions(self) -> list[int]:
        """Indices of the messages behind which an answer belongs: the last user message of each run of them."""
        last = len(self.messages) - 1
        return [
            index
            for index, message in enumerate(self.messages)
            if message["role"] == "user" and (index == last or self.messages[index + 1]["role"] == "assistant")
        ]


@dataclass(frozen=True)
class GivenPrompts:
    """What a file holds after sorting out.

    Attributes:
        prompts: kept, in the file's order.
        dropped: (id, reason) of the others.
        sha256: of the file.
        name: of the file.
    """

    prompts: Sequence[GivenPrompt]
    dropped: Sequence[tuple[str, str]]
    sha256: str
    name: str


def read_given_prompts(path: Path, exclusion: Exclusion) -> GivenPrompts:
    """Read a file; repeated chats are dropped, the first one stays, as are those that are excluded.

    Raises:
        DataError: the file is missing, unreadable or without a prompt, a line is malformed, or one id names two chats.
    """
    try:
        content = path.read_bytes()
        lines = content.decode("utf-8").split("\n")  # str.splitlines would also cut inside JSON strings
    except FileNotFoundError:
        raise DataError("this file of prompts does not exist", origin={"prompts": path}) from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"this file of prompts cannot be read: {error}", origin={"prompts": path}) from error
    kept: dict[str, GivenPrompt] = {}
    chats: set[str] = set()
    dropped: list[tuple[str, str]] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        prompt = _parsed(line, f"{path}:{number}")
        chat = json.dumps(prompt.messages)
        earlier = kept.get(prompt.id)
        if earlier is not None and json.dumps(earlier.messages) != chat:
            raise DataError(
                f"the id {prompt.id!r} names two different chats",
                origin={"first": earlier.place, "second": prompt.place},
                hint="an id of its own for each chat, or no ids at all",
            )
        if chat in chats:
            dropped.append((prompt.id, "repeated"))
        elif any(exclusion.covers(m["content"]) for m in prompt.messages if m["role"] == "user"):
            dropped.append((prompt.id, "excluded"))
        else:
            kept[prompt.id] = prompt
        chats.add(chat)
    if not kept:
        what = "no prompt" if not dropped else f"no prompt that is left: all {len(dropped)} are repeated or excluded"
        raise DataError(f"this file holds {what}", origin={"prompts": path}, hint=_EXAMPLE if not dropped else None)
    return GivenPrompts(list(kept.values()), dropped, hashlib.sha256(content).hexdigest(), path.name)


def _parsed(line: str, place: str) -> GivenPrompt:
    origin = {"prompts": place}
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"this line is not JSON: {error.msg} at column {error.colno}", origin=origin) from error
    except (ValueError, RecursionError) as error:  # thousands of digits or brackets
        raise DataError(f"this line is not JSON that can be read: {error}", origin=origin) from error
    if not isinstance(row, dict) or ("prompt" in row) == ("messages" in row):
        raise DataError(f"a prompt has either `prompt` or `messages`, found {line.strip()[:120]}", origin=origin)
    chat = [{"role": "user", "content": row["prompt"]}] if "prompt" in row else row["messages"]
    messages = _messages(chat, origin)
    given = row.get("id")
    if given is not None and (not isinstance(given, str | int) or isinstance(given, bool) or given == ""):
        raise DataError(f"an id is a text or a number, found {given!r}", origin=origin)
    name = str(given) if given is not None else hashlib.sha256(json.dumps(messages).encode()).hexdigest()[:16]
    return GivenPrompt(name, messages, place)


def _messages(chat: object, origin: Mapping[str, object]) -> tuple[Message, ...]:
    messages: list[Message] = []
    for message in chat if isinstance(chat, list) else [chat]:
        role, text = (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, None)
        if role not in _ROLES or not isinstance(text, str):
            raise DataError(
                f"a message has a role ({', '.join(_ROLES)}) and a text as content, found {message!r}"[:300],
                origin=origin,
                hint=_EXAMPLE,
            )
        if role == "user" and not text.strip():
            raise DataError("a prompt is empty", origin=origin)
        messages.append({"role": role, "content": text})
    while messages and messages[-1]["role"] != "user":
        messages.pop()
    if not messages:
        raise DataError("a chat needs a message of the user, which is answered", origin=origin, hint=_EXAMPLE)
    return tuple(messages)
