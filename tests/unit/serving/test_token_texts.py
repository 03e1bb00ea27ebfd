"""Names, sizes and bytes of single tokens, parts of characters among them."""

from __future__ import annotations

import pytest
from tests.served import byte_level_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, normalizers

from paceline.checkpoint.tokenizer import TextTokenizer
from paceline.serving.token_texts import FewestTokens, TokenTexts

TEXT = "tea \N{GRINNING FACE} \u00e9 tin"


def _changed(change: str) -> TextTokenizer:
    text = byte_level_tokenizer().backend.to_str()
    backend = Tokenizer.from_str(text.replace('"z":', '"<filler-z>":') if change == "lacks z" else text)
    if change == "NFC":
        backend.normalizer = normalizers.NFC()
    elif change == "strips":
        backend.normalizer = normalizers.Strip()
    elif change == "swallows":
        backend.add_tokens([AddedToken("<|gap|>", rstrip=True)])
    elif change == "fuses":
        backend.decoder = decoders.Fuse()
    return TextTokenizer(backend, chat_template=None, special_tokens={}, origin="tests")


def test_parts_of_a_character_have_names_of_their_own() -> None:
    tokenizer = byte_level_tokenizer()
    texts = TokenTexts(tokenizer)
    ids = tokenizer.encode("\N{GRINNING FACE}")
    assert [texts.name_of(token) for token in ids] == [r"bytes:\xf0", r"bytes:\x9f", r"bytes:\x98", r"bytes:\x80"]
    (letter,) = tokenizer.encode("z")
    assert (texts.name_of(letter), texts.num_characters(letter)) == ("z", 1)


def test_characters_add_up_to_those_of_the_text() -> None:
    tokenizer = byte_level_tokenizer()
    texts = TokenTexts(tokenizer)
    ids = tokenizer.encode(TEXT + "<|end|>")
    assert sum(map(texts.num_characters, ids)) == len(TEXT) == len(tokenizer.decode(ids))


def test_no_text_has_fewer_tokens_than_its_bytes_say() -> None:
    plain, composing = FewestTokens(byte_level_tokenizer()), FewestTokens(_changed("NFC"))
    for text in (TEXT, "et" * 500, "<|assistant|>" * 90, "\u212a" * 500, "u\u0308\u0304" * 300):
        assert 0 < plain.of(text * 10) <= len(byte_level_tokenizer().encode(text * 10))
        assert 0 < composing.of(text * 10) <= len(_changed("NFC").encode(text * 10))
    assert plain.of("\ud800" * 1000) > 0  # no text at all; encoding says so


def test_bytes_that_no_token_has_do_not_count() -> None:
    tokenizer = _changed("lacks z")
    assert tokenizer.encode("z" * 900) == []
    assert FewestTokens(tokenizer).of("z" * 900) == 0
    assert FewestTokens(tokenizer).of("zt" * 900) == FewestTokens(tokenizer).of("t" * 900) > 0


@pytest.mark.parametrize("change", ["strips", "swallows", "fuses"])
def test_where_a_token_may_stand_for_any_number_of_characters_nothing_is_said(change: str) -> None:
    assert FewestTokens(_changed(change)).of("t" * 10_000) == 0
