"""Log-probabilities of completions: each token under its own name, at its own place in the text."""

from __future__ import annotations

import pytest
from tests.served import byte_level_tokenizer

from paceline.engine.request import TokenLogprobs
from paceline.serving.answers import completion_logprobs
from paceline.serving.token_texts import TokenTexts


def _entries(text: str) -> list[TokenLogprobs]:
    """Each token, with two parts of characters as the likeliest beside it."""
    tokenizer = byte_level_tokenizer()
    one, other = tokenizer.encode("\N{GRINNING FACE}")[:2]
    return [TokenLogprobs(token, -3.0, ((one, -1.0), (other, -2.0)), "raw") for token in tokenizer.encode(text)]


@pytest.mark.parametrize("text", ["a\N{GRINNING FACE}b\u00e9c", "plain", "a<|end|>b"])
def test_offsets_are_places_in_the_text(text: str) -> None:
    found = completion_logprobs(_entries(text), TokenTexts(byte_level_tokenizer()), num_top=2)
    shown = text.replace("<|end|>", "")  # special tokens are not part of the text
    for token, offset in zip(found.tokens, found.text_offset, strict=True):
        if len(token) == 1:
            assert shown[offset] == token


def test_tokens_that_are_parts_of_characters_do_not_hide_each_other() -> None:
    (entry,) = completion_logprobs(_entries("z"), TokenTexts(byte_level_tokenizer()), num_top=2).top_logprobs or ()
    assert entry == {"z": -3.0, r"bytes:\xf0": -1.0, r"bytes:\x9f": -2.0}
