from __future__ import annotations

import builtins
from typing import Any

import pytest
from tests.fakes import ByteTokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from paceline.checkpoint.tokenizer import TextTokenizer
from paceline.engine.grammar_tokenizer import build_tokenizer, known_ids
from paceline.errors import ConfigError, MissingExtraError


def text_tokenizer(model: Any = None) -> TextTokenizer:
    """Byte-level BPE: 256 bytes, the pieces `ab` and `abc`, an added special token and an added plain one."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: token for token, piece in enumerate([*alphabet, "ab", "abc"])}
    tokenizer = Tokenizer(model or models.BPE(vocab=vocabulary, merges=[("a", "b"), ("ab", "c")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    tokenizer.add_tokens([AddedToken("</think>", special=False, normalized=False)])
    return TextTokenizer(tokenizer, chat_template=None, special_tokens={}, origin="test")


def test_a_text_tokenizer_keeps_its_ids_and_bytes() -> None:
    tokenizer = text_tokenizer()
    assert known_ids(tokenizer) == set(range(260))
    built = build_tokenizer(tokenizer, 300)
    assert built.vocab_size == 300
    for text in ("abcab", "é😀\n", "a b</think>"):
        ids = tokenizer.encode(text)
        assert built.decode_bytes(ids).decode() == text
    assert built.eos_tokens == [260], "an id without a token plays the end"
    assert built.is_special_token(258)


def test_the_end_of_text_gets_an_id_of_its_own_where_the_head_has_no_padding() -> None:
    assert build_tokenizer(text_tokenizer(), 260).eos_tokens == [260]


def test_a_table_of_pieces_keeps_its_bytes_and_spells_with_the_longest() -> None:
    tokenizer = ByteTokenizer({256: b"ab", 257: b"abc", 97: b""})
    assert known_ids(tokenizer) == set(range(258)) - {97}
    built = build_tokenizer(tokenizer, 300)
    assert [built.decode_bytes([token]) for token in (98, 254, 256, 257)] == [b"b", b"\xfe", b"ab", b"abc"]
    assert built.tokenize_str("abcabb") == [257, 256, 98]
    assert built.eos_tokens == [300]


def test_a_tokenizer_that_cannot_be_read_is_refused() -> None:
    tokenizer = text_tokenizer(models.WordLevel(vocab={"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    tokenizer.backend.decoder = decoders.CTC()
    with pytest.raises(ConfigError, match="cannot use the target's tokenizer"):
        build_tokenizer(tokenizer, 300)


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    really_import = builtins.__import__

    def refuse(name: str, *rest: Any, **options: Any) -> Any:
        if name == "llguidance":
            raise ImportError(name)
        return really_import(name, *rest, **options)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(MissingExtraError, match="paceline\\[structured\\]"):
        build_tokenizer(ByteTokenizer(), 300)
