"""Bytes of single tokens, put together, are the text that they decode to."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.byte_level import byte_level_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from paceline.checkpoint.tiktoken_file import byte_of_character
from paceline.checkpoint.tokenizer import TextTokenizer
from paceline.serving.token_texts import FewestTokens, TokenTexts


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_bytes_put_together_are_the_text(text: str) -> None:
    tokenizer = byte_level_tokenizer()
    texts = TokenTexts(tokenizer)
    assert b"".join(map(texts.bytes_of, tokenizer.encode(text))) == text.encode()


def test_parts_of_a_character_have_exact_bytes_and_a_text_that_says_so() -> None:
    tokenizer = byte_level_tokenizer()
    texts = TokenTexts(tokenizer)
    ids = tokenizer.encode("é")
    assert [texts.bytes_of(token) for token in ids] == [b"\xc3", b"\xa9"]
    assert [texts.text_of(token) for token in ids] == ["\ufffd", "\ufffd"]


def test_special_tokens_are_shown_and_ids_without_a_token_are_empty() -> None:
    tokenizer = byte_level_tokenizer()
    texts = TokenTexts(tokenizer)
    end = tokenizer.token_id("<|end|>")
    assert end is not None
    assert texts.text_of(end) == "<|end|>"
    assert texts.bytes_of(10**6) == b""
    assert texts.text_of(10**6) == ""


@pytest.mark.parametrize("decoder", [decoders.ByteLevel(), decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])])
def test_byte_level_vocabularies_are_known_in_a_sequence_too(decoder: decoders.Decoder) -> None:
    backend = Tokenizer(models.BPE(vocab={"Ġa": 0, "Ã": 1, "a b": 2}, merges=[]))
    backend.decoder = decoder
    texts = TokenTexts(TextTokenizer(backend, chat_template=None, special_tokens={}, origin="t"))
    assert [texts.bytes_of(token) for token in range(3)] == [b" a", b"\xc3", b"a b"]
    assert texts.text_of(2) == backend.decode([2])  # a character that stands for no byte


def test_sentencepiece_vocabularies() -> None:
    vocabulary = {"<unk>": 0, "▁a": 1, "b": 2, "<0xE4>": 3, "<0xBD>": 4, "<0xA0>": 5, "▁": 6}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens([AddedToken("<unk>", special=True)])
    texts = TokenTexts(TextTokenizer(backend, chat_template=None, special_tokens={}, origin="t"))
    ids = [1, 2, 6, 3, 4, 5]
    assert b"".join(map(texts.bytes_of, ids)).decode() == backend.decode(ids) == " ab 你"
    assert texts.text_of(0) == "<unk>"


def test_every_byte_has_one_character() -> None:
    table = byte_of_character()
    assert sorted(table.values()) == list(range(256))
    assert set(table) == set(pre_tokenizers.ByteLevel.alphabet())
    assert (table["Ġ"], table["Ċ"], table["a"]) == (0x20, 0x0A, ord("a"))


# Names and sizes

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
