from __future__ import annotations

import pytest

from paceline.evaluation.token_classes import TokenClassifier


def classes(pieces: list[str]) -> list[str]:
    reader = TokenClassifier()
    return [reader.advance(piece) for piece in pieces]


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ([" ", "\n\n", "\t"], ["white space"] * 3),
        (["12", " 3.5", "x1"], ["digits", "digits", "word"]),
        (["{", " ==", "a_b", "->"], ["code"] * 4),
        ([".", " ,", "—", "\ufffd"], ["punctuation"] * 4),
        (["The", " cat", " Anna", " sat", ".", " Then"], ["word", "word", "name", "word", "punctuation", "word"]),
        ([" in", " Mal", "lard", " said"], ["word", "name", "name", "word"]),
        (["in", " the", "re"], ["word", "word", "word"]),
        (["say", ":", " Anna"], ["word", "punctuation", "word"]),
    ],
)
def test_a_class_for_every_token(pieces: list[str], expected: list[str]) -> None:
    assert classes(pieces) == expected


def test_a_fence_makes_code_of_what_is_in_it() -> None:
    pieces = ["Look", ":\n", "``", "`", "python", "\n", "print", "(", "12", ")", "\n", "```", "\n", "done", " 3"]
    expected = ["word", "punctuation", "code", "code", "code", "white space", "code", "code", "code", "code"]
    assert classes(pieces) == [*expected, "white space", "code", "white space", "word", "digits"]


def test_a_longer_row_of_backticks_is_one_fence() -> None:
    assert classes(["````", "a"])[-1] == "code"
    assert classes(["```", "```", "a"])[-1] == "code", "six in a row are no end"


def test_peeking_changes_nothing() -> None:
    reader = TokenClassifier()
    reader.advance("A")
    assert reader.peek("```") == "code" and reader.peek(" b") == "word"
