"""Keeps evaluation prompts out of training data: a text that shares a run of words with one of them is not used."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from paceline.errors import DataError

_MIN_WORDS = 4  # shorter entries of a file are names, ids and labels


def runs_of_words(text: str, length: int) -> set[tuple[str, ...]]:
    """Every run of `length` words, in lower case and without punctuation; a shorter text is one run."""
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[i : i + length]) for i in range(max(1, len(words) - length + 1))} if words else set()


class Exclusion:
    """Runs of words that must not occur.

    Args:
        files: `.jsonl` or `.json` with one object per line, of which every text of four words or more counts; any other
            file is text with one prompt per line.
        run_length: words in a row that may not be shared.
    Raises:
        DataError: a file is missing, unreadable, or has a line that is no JSON.
    """

    def __init__(self, files: Sequence[Path] = (), run_length: int = 8) -> None:
        self.run_length = run_length
        self.files: list[dict[str, str]] = []
        self._runs: set[tuple[str, ...]] = set()
        for file in files:
            content = _read(file)
            self.files.append({"name": file.name, "sha256": hashlib.sha256(content.encode()).hexdigest()})
            self.add(_texts(file, content))

    def add(self, texts: Iterable[str]) -> None:
        """Exclude further texts."""
        for text in texts:
            self._runs |= runs_of_words(text, self.run_length)

    def covers(self, text: str) -> bool:
        """Whether a text shares a run of words with what is excluded."""
        return bool(self._runs) and not self._runs.isdisjoint(runs_of_words(text, self.run_length))


def prompt_texts(file: Path) -> Iterator[str]:
    """Every text of a file that counts, as `Exclusion` reads it.

    Raises:
        DataError: it is missing, unreadable, or has a line that is no JSON.
    """
    yield from _texts(file, _read(file))


def _read(file: Path) -> str:
    if file.suffix == ".npz":
        raise DataError(f"{file} holds token ids, no words", hint="the evaluation prompts as .jsonl or text")
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise DataError("this file of prompts to exclude does not exist", origin={"exclude": file}) from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"this file of prompts to exclude cannot be read: {error}", origin={"exclude": file}) from error


def _texts(file: Path, content: str) -> Iterator[str]:
    for number, line in enumerate(content.split("\n"), start=1):
        if not line.strip():
            continue
        if file.suffix not in (".jsonl", ".json"):
            yield line
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(
                f"this line is not JSON: {error.msg} at column {error.colno}", origin={"exclude": f"{file}:{number}"}
            ) from error
        except (ValueError, RecursionError) as error:  # thousands of digits or brackets
            raise DataError(
                f"this line is not JSON that can be read: {error}", origin={"exclude": f"{file}:{number}"}
            ) from error
        yield from (text for text in _strings(row) if len(text.split()) >= _MIN_WORDS)


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _strings(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _strings(inner)
