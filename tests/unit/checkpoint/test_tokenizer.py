"""Tokenizers from folders and GGUF metadata: the same ids whichever way they came."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.checkpoint.tokenizer import TextTokenizer, open_tokenizer
from paceline.errors import CheckpointError, RequestError

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|go|>{% endif %}"
)


@pytest.fixture(scope="module")
def smol(smollm2: Path) -> TextTokenizer:
    return open_tokenizer(smollm2)


def byte_alphabet() -> list[str]:
    from tokenizers import pre_tokenizers

    return sorted(pre_tokenizers.ByteLevel.alphabet())


def byte_characters() -> dict[int, str]:
    """The visible character that stands for each byte in byte-level vocabularies."""
    visible = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {byte: chr(byte) for byte in visible} | {byte: chr(256 + index) for index, byte in enumerate(hidden)}


def make_folder(folder: Path, *, config: dict[str, Any] | None = None, bos: bool = True) -> Path:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    vocabulary = {token: index for index, token in enumerate([*byte_alphabet(), "ab", "abc"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("a", "b"), ("ab", "c")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken("<s>", special=True), AddedToken("<|go|>", special=True)])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
        )
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding()
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_folder_round_trip_without_truncation_or_padding(tmp_path: Path) -> None:
    tokenizer = open_tokenizer(make_folder(tmp_path))
    ids = tokenizer.encode("abc ab abc ab abc")
    assert tokenizer.decode(ids) == "abc ab abc ab abc" and len(ids) > 4
    assert tokenizer.vocab_size == 260
    assert tokenizer.special_ids == {tokenizer.token_id("<s>"), tokenizer.token_id("<|go|>")}
    assert tokenizer.token_id("nothing like it") is None
    assert not tokenizer.has_chat_template and tokenizer.template_sha256 is None


def test_special_tokens_are_added_only_on_request(tmp_path: Path) -> None:
    tokenizer = open_tokenizer(make_folder(tmp_path))
    plain = tokenizer.encode("ab")
    assert tokenizer.encode("ab", add_special_tokens=True) == [tokenizer.token_id("<s>"), *plain]
    assert tokenizer.encode("<s>ab") == [tokenizer.token_id("<s>"), *plain]
    assert tokenizer.decode(tokenizer.encode("<s>ab")) == "ab"
    assert tokenizer.decode(tokenizer.encode("<s>ab"), skip_special_tokens=False) == "<s>ab"


def test_template_file_wins_over_the_field(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, config={"chat_template": "field", "bos_token": {"content": "<s>"}})
    assert open_tokenizer(folder).render_chat([{"role": "user", "content": "x"}]) == "field"
    (folder / "chat_template.jinja").write_text("{{ bos_token }}" + TEMPLATE)
    tokenizer = open_tokenizer(folder)
    assert tokenizer.render_chat([{"role": "user", "content": "x"}]) == "<s><|user|>x<|go|>"
    assert tokenizer.render_chat([{"role": "user", "content": "x"}], add_generation_prompt=False) == "<s><|user|>x"
    ids = tokenizer.encode_chat([{"role": "user", "content": "ab"}])
    assert ids[0] == tokenizer.token_id("<s>") and ids[-1] == tokenizer.token_id("<|go|>")
    assert ids.count(ids[0]) == 1  # the template writes its own begin token; none is added
    assert tokenizer.template_sha256 is not None and len(tokenizer.template_sha256) == 64


def test_named_templates_use_the_default_one(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    assert (
        open_tokenizer(make_folder(tmp_path / "a", config={"chat_template": named})).render_chat(
            [{"role": "user", "content": "x"}]
        )
        == "D"
    )
    with pytest.raises(CheckpointError, match=r"\['tool_use'\] and none named 'default'"):
        open_tokenizer(make_folder(tmp_path / "b", config={"chat_template": named[:1]}))


def test_special_tokens_map_fills_gaps(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, config={"chat_template": "{{ bos_token }}{{ eos_token }}", "bos_token": "<s>"})
    (folder / "special_tokens_map.json").write_text(json.dumps({"bos_token": "no", "eos_token": {"content": "<e>"}}))
    assert open_tokenizer(folder).render_chat([{"role": "user", "content": "x"}]) == "<s><e>"


def test_tokens_that_only_the_config_lists_are_added(tmp_path: Path) -> None:
    entry = {"content": "<late>", "special": True, "normalized": False}
    tokenizer = open_tokenizer(make_folder(tmp_path / "a", config={"added_tokens_decoder": {"260": entry}}))
    assert tokenizer.encode("<late>") == [260] and 260 in tokenizer.special_ids
    with pytest.raises(CheckpointError, match=r"'<late>' has id 300 in tokenizer_config\.json and 260"):
        open_tokenizer(make_folder(tmp_path / "b", config={"added_tokens_decoder": {"300": entry}}))


@pytest.mark.parametrize("listed", [[1], {"x": {"content": "a"}}, {"260": "a"}, {"260": {}}])
def test_malformed_token_table_is_refused(tmp_path: Path, listed: object) -> None:
    with pytest.raises(CheckpointError, match="added_tokens_decoder is not a table"):
        open_tokenizer(make_folder(tmp_path, config={"added_tokens_decoder": listed}))


def test_folder_agrees_with_transformers(tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    folder = make_folder(tmp_path, config={"chat_template": TEMPLATE, "bos_token": "<s>"})
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), bos_token="<s>")
    theirs.chat_template = TEMPLATE
    ours = open_tokenizer(folder)
    messages = [{"role": "user", "content": "abc é"}, {"role": "assistant", "content": "ab"}]
    assert ours.render_chat(messages) == theirs.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    assert ours.encode("abcab é <s>") == theirs.encode("abcab é <s>", add_special_tokens=False)


@pytest.mark.parametrize(
    ("messages", "part"),
    [
        ([], "at least one message"),
        ([{"role": "user"}], "message 0 has content None"),
        ([{"role": 1, "content": "x"}], "message 0 has role 1"),
    ],
)
def test_malformed_messages_are_request_errors(tmp_path: Path, messages: Any, part: str) -> None:
    tokenizer = open_tokenizer(make_folder(tmp_path, config={"chat_template": TEMPLATE}))
    with pytest.raises(RequestError, match=part):
        tokenizer.render_chat(messages)


def test_tools_and_variables_reach_the_template(tmp_path: Path) -> None:
    template = "{{ messages[0].name }}{{ messages[0].tool_calls | tojson }}{{ tools | tojson }}{{ mood }}"
    tokenizer = open_tokenizer(make_folder(tmp_path, config={"chat_template": template}))
    assert tokenizer.chat_template == template
    message = {"role": "user", "content": "x", "name": "n", "tool_calls": [1]}
    found = tokenizer.render([message], tools=[{"a": 1}], variables={"mood": "calm"}).text
    assert found == 'n[1][{"a": 1}]calm'


def test_a_tokenizer_without_template_has_none(tmp_path: Path) -> None:
    tokenizer = open_tokenizer(make_folder(tmp_path))
    assert (tokenizer.chat_template, tokenizer.has_chat_template, tokenizer.template_sha256) == (None, False, None)


def test_text_that_is_no_utf_8_is_a_request_error(tmp_path: Path) -> None:
    tokenizer = open_tokenizer(make_folder(tmp_path, config={"chat_template": TEMPLATE}))
    for text in ("half a pair \ud83d", b"a byte of Latin-1: \xe9".decode("utf-8", "surrogateescape")):
        with pytest.raises(RequestError, match="no UTF-8"):
            tokenizer.encode(text)
        with pytest.raises(RequestError, match="no UTF-8"):
            tokenizer.encode_chat([{"role": "user", "content": text}])


def test_chat_without_template_is_a_request_error(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="has no chat template"):
        open_tokenizer(make_folder(tmp_path)).encode_chat([{"role": "user", "content": "x"}])


def test_damaged_and_missing_files_are_named(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    text = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(text[: len(text) // 2])
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is not valid JSON"):
        open_tokenizer(folder)
    damaged = json.loads(text)
    longest = max(damaged["model"]["vocab"], key=len)
    damaged["model"]["merges"] = [[longest, longest]]  # a product longer than any token: the library panics
    (folder / "tokenizer.json").write_text(json.dumps(damaged))
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is not a usable tokenizer"):
        open_tokenizer(folder)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is not a usable tokenizer"):
        open_tokenizer(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json"):
        open_tokenizer(folder)
    with pytest.raises(CheckpointError, match="does not exist"):
        open_tokenizer(tmp_path / "nowhere")


def test_smollm2_chat_prompt(smol: TextTokenizer) -> None:
    ids = smol.encode_chat([{"role": "user", "content": "What is 12?"}])
    expected = (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is 12?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert smol.decode(ids, skip_special_tokens=False) == expected
    assert ids[0] == 1 and ids.count(1) == 3 and ids.count(2) == 2
    assert smol.vocab_size == 49152 and {0, 1, 2} <= smol.special_ids
    assert smol.has_chat_template


def test_smollm2_splits_digits(smol: TextTokenizer) -> None:
    assert [smol.decode([token_id]) for token_id in smol.encode("a 2048x")] == ["a", " ", "2", "0", "4", "8", "x"]


@given(text=st.text(max_size=60))
def test_smollm2_decodes_what_it_encoded(smol: TextTokenizer, text: str) -> None:
    ids = smol.encode(text)
    assert all(0 <= token_id < smol.vocab_size for token_id in ids)
    # the vocabulary was trained without some bytes that only rare characters have; those are lost, as with the original
    known = {byte for byte, character in byte_characters().items() if smol.token_id(character) is not None}
    if set(text.encode()) <= known:
        assert smol.decode(ids, skip_special_tokens=False) == text


def test_smollm2_knows_every_byte_of_ascii_and_common_scripts(smol: TextTokenizer) -> None:
    text = "".join(map(chr, range(32, 127))) + "\n\tnaïve Ünïcödé 東京 привет 🙂"
    assert smol.decode(smol.encode(text)) == text


def with_tokens(tiny: Any, *, pre: str | None, model: str = "gpt2") -> Path:
    tokens = [*byte_alphabet(), "ab", "abc", "<|end|>", "  keep  "]
    types = [1] * 258 + [3, 4]
    tiny.general |= {
        "tokenizer.ggml.model": model,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": ["a b", "ab c"],
        "tokenizer.ggml.eos_token_id": 258,
        "tokenizer.ggml.bos_token_id": 258,
        "tokenizer.chat_template": TEMPLATE,
    }
    if pre is not None:
        tiny.general["tokenizer.ggml.pre"] = pre
    path: Path = tiny.write()
    return path


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        (None, ["12345", "67"]),
        ("gpt-2", ["12345", "67"]),
        ("default", ["12345", "67"]),
        ("smollm", ["1", "2", "3", "4", "5", " ", "6", "7"]),
        ("llama-bpe", ["123", "45", " ", "67"]),
        ("qwen2", ["1", "2", "3", "4", "5", " ", "6", "7"]),
    ],
)
def test_known_pre_tokenizers_cut_as_they_should(tiny_gguf: Any, pre: str | None, pieces: list[str]) -> None:
    tokenizer = open_tokenizer(with_tokens(tiny_gguf, pre=pre))
    cut = [piece for piece, _ in tokenizer.backend.pre_tokenizer.pre_tokenize_str("12345 67")]
    joined = [piece.replace("Ġ", " ") for piece in cut]
    assert joined == (pieces if len(pieces) > 2 else ["12345", " 67"])
    assert tokenizer.decode(tokenizer.encode("it's  12345\n\n67 é🙂")) == "it's  12345\n\n67 é🙂"


def test_gguf_special_and_user_defined_tokens(tiny_gguf: Any) -> None:
    tokenizer = open_tokenizer(with_tokens(tiny_gguf, pre="gpt-2"))
    assert tokenizer.special_ids == {258}
    assert tokenizer.encode("ab<|end|>  keep  ") == [256, 258, 259]
    assert tokenizer.decode([256, 258, 259]) == "ab  keep  "
    assert tokenizer.encode("ab", add_special_tokens=True) == [256]
    assert tokenizer.render_chat([{"role": "user", "content": "x"}]) == "<|user|>x<|go|>"


def test_gguf_begin_token_follows_its_flag_and_family(tiny_gguf: Any) -> None:
    assert open_tokenizer(with_tokens(tiny_gguf, pre="llama-bpe")).encode("ab", add_special_tokens=True) == [258, 256]
    tiny_gguf.general["tokenizer.ggml.add_bos_token"] = False
    assert open_tokenizer(with_tokens(tiny_gguf, pre="llama-bpe")).encode("ab", add_special_tokens=True) == [256]
    tiny_gguf.general["tokenizer.ggml.add_bos_token"] = True
    assert open_tokenizer(with_tokens(tiny_gguf, pre="qwen2")).encode("ab", add_special_tokens=True) == [258, 256]


@pytest.mark.parametrize(
    ("pre", "model", "message"),
    [
        ("viking", "gpt2", "has the pre-tokenizer 'viking'; supported are smollm"),
        ("default", "llama", "has a tokenizer of model 'llama'"),
        ("default", "bert", "has a tokenizer of model 'bert'"),
    ],
)
def test_unknown_gguf_tokenizers_are_refused_by_name(tiny_gguf: Any, pre: str, model: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        open_tokenizer(with_tokens(tiny_gguf, pre=pre, model=model))


def test_damaged_gguf_vocabularies_are_refused(tiny_gguf: Any) -> None:
    with_tokens(tiny_gguf, pre="gpt-2")
    sound = dict(tiny_gguf.general)
    longest = max(sound["tokenizer.ggml.tokens"], key=len)
    for change, message in (
        ({"tokenizer.ggml.eos_token_id": 999}, "eos_token_id is 999, there are 260 tokens"),
        ({"tokenizer.ggml.token_type": [1, 2]}, "and 2 token types"),
        ({"tokenizer.ggml.merges": ["nope never"]}, "unusable vocabulary"),
        ({"tokenizer.ggml.merges": [f"{longest} {longest}"]}, "unusable vocabulary"),
        ({"tokenizer.ggml.merges": [1, 2]}, "merges is not a list of the right kind"),
    ):
        tiny_gguf.general = sound | change
        with pytest.raises(CheckpointError, match=message):
            open_tokenizer(tiny_gguf.write())
    del tiny_gguf.general["tokenizer.ggml.tokens"]
    with pytest.raises(CheckpointError, match="tokens is missing"):
        open_tokenizer(tiny_gguf.write())
