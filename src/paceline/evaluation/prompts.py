"""Prompt sets: reads them from files and turns a prompt into the ids that a target sees.

A `.jsonl` file has one object per line, with one of `prompt` (one user turn), `turns` (user turns, answered in
order) or `messages` (a chat that ends with the user), and optionally `id` and `category`. A `.npz` token file
(`tokens`, `prompt_len`, `response_len`) gives the prompts of its last conversations, those that training held out: as
many as the drafter's record says, else 1,024, training's default. Any other file is text with one prompt per line.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import DataError, RequestError

if TYPE_CHECKING:
    from paceline.checkpoint.tokenizer import TextTokenizer

NUM_HELD_OUT = 1024  # conversations at the end of a token file that training leaves alone by default
_KNOWN_ROLES = ("system", "user", "assistant")


@dataclass(frozen=True)
class Message:
    """One message of a chat."""

    role: str
    content: str


@dataclass(frozen=True)
class Prompt:
    """One thing to answer. Either `token_ids` is set, or `messages` and `turns` say what is asked.

    Args:
        id: unique within its file.
        messages: chat so far; what `turns` adds comes after it.
        turns: user turns, each answered before the next is asked.
        token_ids: the rendered prompt itself, which needs no tokenizer.
        category: kind of prompt, for tables.
    """

    id: str
    messages: tuple[Message, ...] = ()
    turns: tuple[str, ...] = ()
    token_ids: tuple[int, ...] | None = None
    category: str | None = None

    @property
    def num_turns(self) -> int:
        """Answers that the prompt asks for."""
        return max(1, len(self.turns))


def single_prompt(text: str, *, identity: str = "prompt") -> Prompt:
    """A prompt of one user turn."""
    return Prompt(id=identity, turns=(text,))


def read_prompts(path: Path, *, limit: int | None = None, num_held_out: int | None = None) -> list[Prompt]:
    """Read a prompt set.

    Args:
        path: `.jsonl`, `.npz` or plain text.
        limit: how many prompts to take from the start; None takes all.
        num_held_out: conversations at the end of a token file that the drafter has not learnt; None is not known.

    Raises:
        DataError: the file is missing, empty or unreadable, or a line is malformed; the message names file and line. Or
            a token file has nothing that was held out.
    """
    if limit is not None and limit < 1:
        raise DataError(f"{limit} prompts were asked for; at least 1 is needed", origin={"prompts": path})
    if path.suffix == ".npz":
        return _from_token_file(path, limit, num_held_out)
    prompts: list[Prompt] = []
    seen: dict[str, int] = {}
    for number, line in _lines(path):
        if path.suffix in (".jsonl", ".json"):
            prompt = _from_json_line(line, f"{path}:{number}", default_id=f"{path.stem}-{number}")
        else:
            prompt = single_prompt(line, identity=f"{path.stem}-{number}")
        if prompt.id in seen:
            raise DataError(
                f"the id {prompt.id!r} stands in line {seen[prompt.id]} already", origin={"prompts": f"{path}:{number}"}
            )
        seen[prompt.id] = number
        prompts.append(prompt)
        if limit is not None and len(prompts) == limit:
            break
    if not prompts:
        raise DataError("this file holds no prompt", origin={"prompts": path})
    return prompts


def file_sha256(path: Path) -> str:
    """SHA-256 of a file, to name a prompt set in a result."""
    try:
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"this file cannot be read: {error.strerror}", origin={"prompts": path}) from error


def encode_prompt(
    prompt: Prompt,
    tokenizer: TextTokenizer,
    *,
    answers: Sequence[str] = (),
    system: str | None = None,
    raw: bool = False,
) -> list[int]:
    """The ids of the next question of a prompt.

    Args:
        prompt: what to ask.
        tokenizer: the target's.
        answers: answers to the turns so far; turn `len(answers)` is asked next.
        system: system message, unless the prompt brings one.
        raw: encode the text of the turn as it is, without the chat template.

    Returns:
        Token ids, ready for generation.

    Raises:
        RequestError: a chat is asked for but the target has no chat template, or `raw` meets a chat.
    """
    if prompt.token_ids is not None:
        return list(prompt.token_ids)
    if raw:
        if prompt.messages or len(prompt.turns) != 1:
            raise RequestError(f"prompt {prompt.id!r} is a chat of several messages and cannot be taken raw")
        return tokenizer.encode(prompt.turns[0], add_special_tokens=True)
    if not tokenizer.has_chat_template:
        raise RequestError(
            "the target has no chat template, so it is not known how it wants to be asked",
            hint="--raw, which takes the prompt as it is",
        )
    messages = list(prompt.messages)
    if system is not None and not any(message.role == "system" for message in messages):
        messages.insert(0, Message("system", system))
    for index, turn in enumerate(prompt.turns[: len(answers) + 1]):
        messages.append(Message("user", turn))
        if index < len(answers):
            messages.append(Message("assistant", answers[index]))
    return tokenizer.encode_chat([{"role": message.role, "content": message.content} for message in messages])


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Numbered lines that are not blank."""
    try:
        with path.open(encoding="utf-8-sig") as stream:  # a byte order mark is no part of the first prompt
            for number, line in enumerate(stream, start=1):
                if line.strip():
                    yield number, line.strip()
    except FileNotFoundError:
        raise DataError("this file of prompts does not exist", origin={"prompts": path}) from None
    except UnicodeDecodeError as error:
        raise DataError(f"this file is not UTF-8 text: {error.reason}", origin={"prompts": path}) from error
    except OSError as error:
        raise DataError(f"this file cannot be read: {error.strerror}", origin={"prompts": path}) from error


def _from_json_line(line: str, place: str, *, default_id: str) -> Prompt:
    origin = {"prompts": place}
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"this line is not JSON: {error.msg} at column {error.colno}", origin=origin) from error
    except (ValueError, RecursionError) as error:  # thousands of digits or brackets
        raise DataError(f"this line is JSON that cannot be read: {error}", origin=origin) from error
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise DataError(f"this line cannot be written as UTF-8: {error.reason}", origin=origin) from error
    if not isinstance(row, dict):
        raise DataError(f"this line holds {type(row).__name__}, not an object", origin=origin)
    forms = [key for key in ("prompt", "turns", "messages") if key in row]
    if len(forms) != 1:
        found = " and ".join(forms) if forms else f"only {', '.join(map(repr, row)) or 'nothing'}"
        raise DataError(f"a prompt has one of prompt, turns or messages; this line has {found}", origin=origin)
    identity = str(row.get("id", row.get("question_id", default_id)))
    category = str(row["category"]) if row.get("category") is not None else None
    if forms == ["messages"]:
        return Prompt(id=identity, messages=_messages(row["messages"], origin), category=category)
    turns = [row["prompt"]] if forms == ["prompt"] else row["turns"]
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise DataError(f"{forms[0]} must be text that is not empty, found {row[forms[0]]!r}"[:300], origin=origin)
    return Prompt(id=identity, turns=tuple(turns), category=category)


def _messages(rows: object, origin: Mapping[str, object]) -> tuple[Message, ...]:
    if not isinstance(rows, list) or not rows:
        raise DataError("messages must be a list that is not empty", origin=origin)
    messages: list[Message] = []
    for row in rows:
        role, content = (row.get("role"), row.get("content")) if isinstance(row, dict) else (None, None)
        if role not in _KNOWN_ROLES or not isinstance(content, str):
            raise DataError(
                f"a message has a role ({', '.join(_KNOWN_ROLES)}) and a text as content, found {row!r}"[:300],
                origin=origin,
            )
        messages.append(Message(role, content))
    if messages[-1].role != "user":
        raise DataError(f"the last message is the {messages[-1].role}'s; there is nothing to answer", origin=origin)
    return tuple(messages)


def _from_token_file(path: Path, limit: int | None, num_held_out: int | None) -> list[Prompt]:
    """Prompts of the held-out conversations of a token file, in the file's order."""
    from paceline.capture.token_file import read_token_file  # numpy; the other kinds of files need none

    file = read_token_file(path)
    if num_held_out == 0:
        raise DataError(
            "the drafter has learnt every conversation of this file (data.hold_out 0)",
            origin={"prompts": path},
            hint="prompts that it has not seen",
        )
    if num_held_out is None and len(file) <= NUM_HELD_OUT:
        raise DataError(
            f"{path} holds {len(file)} conversations; the last {NUM_HELD_OUT:,} of a token file count as held out, so "
            "it cannot be told which of these were trained on",
            hint="a larger file, or the held-out prompts as .jsonl",
        )
    first = len(file) - (NUM_HELD_OUT if num_held_out is None else num_held_out)
    chosen = range(first, len(file) if limit is None else min(len(file), first + limit))
    return [Prompt(id=f"{path.stem}-{index}", token_ids=tuple(file.prompt_ids(index))) for index in chosen]
