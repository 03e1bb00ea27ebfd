"""Tokenizers of Kimi targets against tiktoken itself, with the same ranks and pattern."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
import tiktoken
from hypothesis import given
from hypothesis import strategies as st
from tests.tiny_kimi_text import LINEAR_TOKENS, write_kimi_text
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

from paceline.checkpoint.tiktoken_file import (
    NUM_ADDED,
    WORD_PATTERN,
    byte_of_character,
    merges_of,
    open_tiktoken,
    read_ranks,
)
from paceline.checkpoint.tokenizer import TextTokenizer, open_tokenizer
from paceline.errors import CheckpointError

TEXTS = (
    "The leader rides in front, the others draft behind it; nobody's wheel may touch. It's 12345 metres, I'll say!",
    "中文English混合 你好,世界。数学 2 + 2 = 4 ひらがな カタカナ 한글 Ünïcödé É e\u0301 ǅ ʰ ² Ⅷ",
    "def f(x):\n    return x ** 2\r\n\r\n\tif x: pass  \n\n\n" + "aaaaaaaa bbbb ababab " * 4,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ranks that a trainer of byte-level BPE has found, as real ones are."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORD_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trained.train_from_iterator(TEXTS * 3, trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet))
    byte_of, by_id = byte_of_character(), sorted(trained.get_vocab().items(), key=lambda pair: pair[1])
    folder = tmp_path_factory.mktemp("kimi")
    write_kimi_text(folder)
    lines = [f"{base64.b64encode(bytes(byte_of[c] for c in token)).decode()} {rank}" for token, rank in by_id]
    (folder / "tiktoken.model").write_text("\n".join(lines))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    moved = {str(int(key) - 256 + len(lines)): entry for key, entry in config["added_tokens_decoder"].items()}
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": moved}))
    return folder


@pytest.fixture(scope="module")
def ours(folder: Path) -> TextTokenizer:
    return open_tokenizer(folder)


@pytest.fixture(scope="module")
def theirs(folder: Path) -> tiktoken.Encoding:
    ranks = read_ranks(folder / "tiktoken.model")
    return tiktoken.Encoding("kimi", pat_str=WORD_PATTERN, mergeable_ranks=ranks, special_tokens={})


@given(
    text=st.text(max_size=60)
    | st.text(alphabet="abAB \n\r\t'sre.,!0129中你éÉßǅ\u0301한あ🙂\u2028\u0085\xa0²Ⅷ_-", max_size=60)
    | st.sampled_from(TEXTS)
)
def test_the_ids_are_those_of_tiktoken(ours: TextTokenizer, theirs: tiktoken.Encoding, text: str) -> None:
    ids = ours.encode(text)
    assert ids == theirs.encode(text)
    assert ours.decode(ids) == text


def test_a_word_that_is_a_token_is_that_token(tmp_path: Path) -> None:
    """Also where no merges lead to it: its parts are no tokens."""
    write_kimi_text(tmp_path)
    with (tmp_path / "tiktoken.model").open("a") as file:
        file.write(base64.b64encode("中文".encode()).decode() + " 256\n")
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())["added_tokens_decoder"]
    moved = {str(int(key) + 1): entry for key, entry in config.items()}
    tokenizer = open_tiktoken(tmp_path, {"added_tokens_decoder": moved})
    assert tokenizer.encode("中文").ids == [256]


def test_merges_are_in_the_order_of_what_they_become() -> None:
    ranks = {b"a": 0, b"b": 1, b"ab": 2, b"ba": 3, b"aba": 4}
    assert merges_of(ranks) == [(b"a", b"b"), (b"b", b"a"), (b"a", b"ba"), (b"ab", b"a")]


def test_added_tokens(tmp_path: Path) -> None:
    """Those with names, those without, and which of them an answer's text shows."""
    first = write_kimi_text(tmp_path, added=(*LINEAR_TOKENS, "<|tool_call_begin|>"))
    tokenizer = open_tokenizer(tmp_path)
    assert tokenizer.vocab_size == first + NUM_ADDED
    assert tokenizer.encode("a<|im_end|>b") == [97, first + 2, 98]
    assert tokenizer.token_id(f"<|reserved_token_{first + NUM_ADDED - 1}|>") == first + NUM_ADDED - 1
    assert tokenizer.decode([97, first + 2, first + len(LINEAR_TOKENS), first + 200]) == "a<|tool_call_begin|>"
    assert not tokenizer.has_channels and not tokenizer.has_chat_template


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda lines: [*lines[:-1], "not-base64! 255"], "line 256 of .* is not a token in base64"),
        (lambda lines: [*lines[:-1], "YQ=="], "line 256 of .* is not a token in base64"),
        (lambda lines: lines[:-1], "ranks are not 0 to 254"),
        (lambda lines: [*lines[:-1], "YWI= 255"], "no token for the byte 255"),
        (lambda lines: [*lines, "YQ== 256"], "256 different tokens; their ranks"),
        (lambda _: ["version https://git-lfs.github.com/spec/v1"], "git lfs pull"),
    ],
)
def test_damaged_files(tmp_path: Path, change: object, message: str) -> None:
    write_kimi_text(tmp_path)
    file = tmp_path / "tiktoken.model"
    file.write_text("\n".join(change(file.read_text().splitlines())))  # type: ignore[operator]
    with pytest.raises(CheckpointError, match=message):
        open_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("listed", "message"),
    [
        ({"3": {"content": "x"}}, "an id 3; tiktoken.model has 256 tokens, so those behind it are 256 to 511"),
        ({"512": {"content": "x"}}, "an id 512"),
        ({"300": {}}, "not a table of ids and tokens"),
        ([{"300": {"content": "x"}}], "not a table of ids and tokens"),
        ({"300": {"content": "a"}}, "an added token is a token of tiktoken.model, too"),
        ({"300": {"content": "x1"}, "301": {"content": "x1"}}, "two added tokens"),
    ],
)
def test_added_tokens_that_cannot_be(tmp_path: Path, listed: object, message: str) -> None:
    write_kimi_text(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": listed}))
    with pytest.raises(CheckpointError, match=message):
        open_tokenizer(tmp_path)
