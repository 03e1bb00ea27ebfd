"""What a model writes between the marks of a call, and is none."""

from __future__ import annotations

import pytest

from paceline.serving.tools import CLOSE, OPEN, CallReader, FoundCall


@pytest.mark.parametrize(
    "written",
    [
        '{"name": "f", "arguments": ' + "[" * 100_000,
        '{"name": "f", "arguments": ' + "1" * 5000 + "}",
        r'{"name": "f", "arguments": {"x": "\ud83d"}}',
        r'{"name": "f", "arguments": "\ud83d"}',
        r'{"name": "\ud83d", "arguments": {}}',
    ],
    ids=["deep", "digits", "half a pair", "half a pair in a text", "half a pair in a name"],
)
@pytest.mark.parametrize("is_cut", [False, True])
def test_what_cannot_be_read_or_sent_stays_text(written: str, is_cut: bool) -> None:
    text = OPEN + written + ("" if is_cut else CLOSE)
    reader = CallReader()
    found = [*reader.feed(text), *reader.finish()]
    assert "".join(piece for piece in found if isinstance(piece, str)) == text


def test_a_whole_pair_is_sent_as_its_character() -> None:
    found = CallReader().feed(OPEN + r'{"name": "f", "arguments": {"x": "\ud83d\ude00"}}' + CLOSE)
    assert found == [FoundCall("f", '{"x": "\U0001f600"}')]
