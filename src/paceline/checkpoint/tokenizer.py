"""Text to token ids and back, and chat messages to prompts, from a model folder or from GGUF metadata.

The tokenizer of the *target* serves both models: a drafter folder needs none. `encode` parses special tokens that occur
in its text, as Hugging Face tokenizers do, because rendered chat prompts consist of them; what a chat template makes of
user text is up to the template.
"""

from __future__ import annotations

import contextlib
import copy
import datetime
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.checkpoint.chat_template import ChatTemplate
from paceline.checkpoint.gguf_header import GgufHeader, read_gguf_header
from paceline.checkpoint.kimi_k3_chat import render_kimi_k3
from paceline.checkpoint.kimi_k3_marks import MARKS
from paceline.checkpoint.locate import read_json
from paceline.checkpoint.rendered_chat import RenderedChat, Segment
from paceline.checkpoint.tiktoken_file import FILE_NAME as TIKTOKEN_FILE
from paceline.checkpoint.tiktoken_file import open_tiktoken
from paceline.errors import CheckpointError, RequestError, shown

if TYPE_CHECKING:
    from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# `tokenizer.ggml.pre` names a family of split patterns; the names are those of llama.cpp
_GPT2_NAMES = ("gpt-2", "gpt2", "default")
_LLAMA3_NAMES = ("llama-bpe", "llama3", "llama-v3")
_QWEN2_NAMES = ("qwen2", "deepseek-r1-qwen")
_CONTROL, _USER_DEFINED = 3, 4  # values of `tokenizer.ggml.token_type`
_KIMI_K3 = "the chat format of Kimi-K3, 1"  # stands for a template's text where its hash is asked for


class TextTokenizer:
    """A `tokenizers.Tokenizer` with the chat template and special tokens that belong to it.

    A tokenizer without a template that has the marks of Kimi-K3 renders chats in that format.

    Args:
        tokenizer: the fast tokenizer; truncation and padding are switched off.
        chat_template: jinja source, or None.
        special_tokens: values of `bos_token`, `eos_token` and the like, as templates use them.
        origin: where it was read, for messages.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, chat_template: str | None, special_tokens: Mapping[str, str], origin: str
    ) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self._renderer: ChatTemplate | None = None  # compiled at first use: jinja2 is a slow import
        self._special_tokens = dict(special_tokens)
        self._today: datetime.date | None = None
        self.origin = origin
        added = tokenizer.get_added_tokens_decoder()
        self._added_texts = tuple(token.content for token in added.values())
        self.special_ids: frozenset[int] = frozenset(token_id for token_id, token in added.items() if token.special)

    @property
    def vocab_size(self) -> int:
        """Number of ids with a token, added tokens included; a model's embedding may have more rows."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    @property
    def has_chat_template(self) -> bool:
        """Whether chat messages can be rendered."""
        return self._chat_template is not None or self.has_channels

    @property
    def has_channels(self) -> bool:
        """Whether answers have the channels of Kimi-K3; without a template, chats are rendered in that format, too."""
        return set(MARKS) <= set(self._added_texts)

    @property
    def chat_template(self) -> str | None:
        """The template's text, for those who have to know what it can do."""
        return self._chat_template

    @property
    def tells_the_date(self) -> bool:
        """Whether the template asks what day it is."""
        return "strftime_now" in (self._chat_template or "")

    def dated(self, today: datetime.date) -> TextTokenizer:
        """The same tokenizer, whose template is told that it is this day."""
        twin = copy.copy(self)
        twin._today = today
        return twin

    @property
    def template_sha256(self) -> str | None:
        """Hash of the chat template's text: two prompts are comparable only under the same template."""
        text = self._chat_template if self._chat_template is not None or not self.has_channels else _KIMI_K3
        return None if text is None else hashlib.sha256(text.encode()).hexdigest()

    @property
    def backend(self) -> Tokenizer:
        """The wrapped tokenizer, for incremental decoding."""
        return self._tokenizer

    def token_id(self, token: str) -> int | None:
        """The id of one token given by its text, or None."""
        return self._tokenizer.token_to_id(token)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Turn text into ids.

        Args:
            text: any text; special tokens written out in it become their ids.
            add_special_tokens: also add what the tokenizer puts around a text, such as a begin-of-text id.
        Returns:
            Token ids.
        Raises:
            RequestError: the text cannot be written as UTF-8.
        """
        try:
            return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)
        except TypeError as error:  # all that the Rust side says of half a surrogate pair
            if not isinstance(text, str):
                raise
            try:
                text.encode()
            except UnicodeEncodeError as place:
                raise RequestError(
                    f"the text holds {shown(text[place.start])} as character {place.start}, a byte that is no UTF-8 or "
                    "half a surrogate pair",
                    hint="text in UTF-8",
                ) from error
            raise

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Turn ids into text.

        Args:
            ids: token ids; ids without a token (padding rows of the embedding) yield nothing.
            skip_special_tokens: leave special tokens out.
        Returns:
            The text; bytes that form no character yet become U+FFFD.
        """
        return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, object] | None = None,
    ) -> RenderedChat:
        """Render chat messages with the model's template.

        Args:
            messages: each with the strings `role` and `content`, and whatever else the template looks at.
            add_generation_prompt: end with what opens the assistant's turn.
            tools: functions that the model may call.
            variables: further ones for the template.
        Raises:
            RequestError: there is no template, a message is malformed, or the template fails or refuses.
        """
        if not self.has_chat_template:
            raise RequestError(
                "the model has no chat template", origin={"tokenizer": self.origin}, hint="a plain prompt, without chat"
            )
        if not messages:
            raise RequestError("a chat needs at least one message")
        for index, message in enumerate(messages):
            for key in ("role", "content"):
                if not isinstance(message.get(key), str):
                    raise RequestError(f"message {index} has {key} {shown(message.get(key))}, expected a string")
        if self._chat_template is None:
            return render_kimi_k3(
                messages, add_generation_prompt=add_generation_prompt, tools=tools, variables=variables
            )
        if self._renderer is None:
            self._renderer = ChatTemplate(self._chat_template, self.origin)
        text = self._renderer.render(
            messages,
            self._special_tokens,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            variables=variables,
            today=self._today,
        )
        return RenderedChat((Segment(text, holds_tokens=True),))

    def encode_rendered(self, chat: RenderedChat) -> list[int]:
        """Token ids of a rendered chat; nothing is added around them: a template writes its own begin-of-text token.

        Raises:
            RequestError: a text cannot be written as UTF-8.
        """
        ids: list[int] = []
        for segment in chat.segments:
            ids += self.encode(segment.text) if segment.holds_tokens else self._encode_plain(segment.text)
        return ids

    def _encode_plain(self, text: str) -> list[int]:
        """Token ids of a text in which no added token is looked for."""
        ids = self.encode(text)
        if not any(added in text for added in self._added_texts):
            return ids
        words = self._tokenizer.pre_tokenizer.pre_tokenize_str(text)
        return [token.id for word, _ in words for token in self._tokenizer.model.tokenize(word)]

    def render_chat(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> str:
        """The text of what `render` gives; the arguments are a part of its own."""
        return self.render(messages, add_generation_prompt=add_generation_prompt).text

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> list[int]:
        """Token ids of what `render` gives; the arguments are a part of its own.

        Raises:
            RequestError: as `render` and `encode_rendered`.
        """
        return self.encode_rendered(self.render(messages, add_generation_prompt=add_generation_prompt))


def open_tokenizer(path: Path) -> TextTokenizer:
    """Open the tokenizer of a target.

    Args:
        path: a Hugging Face folder (tokenizer.json or tiktoken.model, tokenizer_config.json, chat_template.jinja; slow
            formats through transformers) or a `.gguf` file.
    Returns:
        The tokenizer.
    Raises:
        CheckpointError: files are missing or damaged, or the GGUF file names a tokenizer that is not supported.
    """
    if path.is_dir():
        return _from_folder(path)
    return _from_gguf(read_gguf_header(path))


def _from_folder(folder: Path) -> TextTokenizer:
    from tokenizers import Tokenizer

    config_file = folder / "tokenizer_config.json"
    config = read_json(config_file) if config_file.exists() else {}
    if (folder / "tokenizer.json").is_file():
        file = folder / "tokenizer.json"
        read_json(file)  # a damaged file gets our message, not the parser's
        with _rust_errors(f"{file} is not a usable tokenizer"):
            tokenizer = Tokenizer.from_file(str(file))
        _add_configured_tokens(tokenizer, config, config_file)
        template = None
    elif (folder / TIKTOKEN_FILE).is_file():
        tokenizer, template = open_tiktoken(folder, config), None
    else:
        tokenizer, template = _through_transformers(folder)
    return TextTokenizer(
        tokenizer,
        chat_template=_folder_template(folder, config) or template,
        special_tokens=_folder_special_tokens(folder, config),
        origin=str(folder),
    )


@contextlib.contextmanager
def _rust_errors(what: str) -> Iterator[None]:
    """Turn what the tokenizer library raises into our error: bare exceptions, and panics, which are not even those.

    It panics over a merge whose product is longer than any token, as in a damaged file.
    """
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise CheckpointError(f"{what}: {error}") from error


def _add_configured_tokens(tokenizer: Tokenizer, config: Mapping[str, Any], origin: Path) -> None:
    """Add tokens that only tokenizer_config.json lists: some writers keep late additions nowhere else."""
    from tokenizers import AddedToken

    listed = config.get("added_tokens_decoder") or {}
    is_sound = isinstance(listed, Mapping) and all(
        key.isdecimal() and isinstance(entry, Mapping) and isinstance(entry.get("content"), str)
        for key, entry in listed.items()
    )
    if not is_sound:
        raise CheckpointError("added_tokens_decoder is not a table of ids and tokens", origin={"file": origin})
    for key, entry in sorted(listed.items(), key=lambda item: int(item[0])):
        content = entry["content"]
        if tokenizer.token_to_id(content) is None:
            flags = {name: entry.get(name, False) for name in ("lstrip", "rstrip", "single_word", "special")}
            tokenizer.add_tokens([AddedToken(content, normalized=entry.get("normalized", True), **flags)])
        found = tokenizer.token_to_id(content)
        if found != int(key):
            raise CheckpointError(
                f"token {content!r} has id {key} in tokenizer_config.json and {found} in tokenizer.json",
                origin={"file": origin},
            )


def _through_transformers(folder: Path) -> tuple[Tokenizer, str | None]:
    from transformers import AutoTokenizer

    try:
        slow = AutoTokenizer.from_pretrained(folder, local_files_only=True)  # type: Any
    except Exception as error:  # whatever its many back ends raise
        raise CheckpointError(
            f"{folder} has no tokenizer.json, and transformers cannot build a tokenizer from it: {error}",
            hint="the tokenizer files of the model",
        ) from error
    backend = getattr(slow, "backend_tokenizer", None)
    if backend is None:
        kind = type(slow).__name__
        raise CheckpointError(f"{folder} has no tokenizer.json, and its tokenizer {kind} has no fast form")
    template = slow.chat_template
    return backend, template if isinstance(template, str) else None


def _folder_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():  # Hugging Face lets the file win over the field
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{file} cannot be read: {error}") from error
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, Mapping)}
        template = named.get("default")
        if template is None:
            raise CheckpointError(
                f"tokenizer_config.json has the chat templates {sorted(map(str, named))} and none named 'default'",
                origin={"folder": folder},
            )
    if template is not None and not isinstance(template, str):
        raise CheckpointError(f"chat_template is {template!r}, expected a string", origin={"folder": folder})
    return template


def _folder_special_tokens(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    file = folder / "special_tokens_map.json"
    sources = [config, read_json(file) if file.exists() else {}]
    tokens: dict[str, str] = {}
    for name in _SPECIAL_NAMES:
        for source in sources:
            value = source.get(name)
            text = value.get("content") if isinstance(value, Mapping) else value
            if isinstance(text, str):
                tokens.setdefault(name, text)
    return tokens


def _from_gguf(header: GgufHeader) -> TextTokenizer:
    from tokenizers import AddedToken, Tokenizer, models, processors

    metadata = header.metadata
    model, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "default")
    if model != "gpt2":
        raise CheckpointError(f"{header.path} has a tokenizer of model {model!r}; supported is gpt2 (byte-level BPE)")
    tokens = _gguf_list(header, "tokenizer.ggml.tokens", str)
    merges = [tuple(merge.split(" ", 1)) for merge in _gguf_list(header, "tokenizer.ggml.merges", str)]
    types = _gguf_list(header, "tokenizer.ggml.token_type", int)
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens) or len(types) != len(tokens):
        raise CheckpointError(
            f"{header.path} has {len(tokens)} tokens, {len(vocabulary)} of them distinct, and {len(types)} token types"
        )
    is_llama3 = pre in _LLAMA3_NAMES
    splitter, normalizer, decoder = _byte_level_parts(pre, header)
    with _rust_errors(f"{header.path} has an unusable vocabulary"):
        # Llama 3 looks whole words up before it merges; its merge list alone does not reach every word
        bpe = models.BPE(vocab=vocabulary, merges=merges, ignore_merges=is_llama3)
    tokenizer = Tokenizer(bpe)
    tokenizer.pre_tokenizer = splitter
    tokenizer.decoder = decoder
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    added = [
        AddedToken(token, special=kind == _CONTROL, normalized=False)
        for token, kind in zip(tokens, types, strict=True)
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    tokenizer.add_tokens(added)
    special_tokens = _gguf_special_tokens(header, tokens)
    bos = special_tokens.get("bos_token")
    if metadata.get("tokenizer.ggml.add_bos_token", is_llama3) and bos is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], pair=[bos, "$A", bos, "$B"], special_tokens=[(bos, vocabulary[bos])]
        )
    template = metadata.get("tokenizer.chat_template")
    return TextTokenizer(
        tokenizer,
        chat_template=None if template is None else str(template),
        special_tokens=special_tokens,
        origin=str(header.path),
    )


def _gguf_list(header: GgufHeader, key: str, kind: type[Any]) -> list[Any]:
    values = header.metadata.get(key)
    if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
        found = "missing" if values is None else "not a list of the right kind"
        raise CheckpointError(f"{header.path}: {key} is {found}; the file has no usable tokenizer")
    return values


def _gguf_special_tokens(header: GgufHeader, tokens: Sequence[str]) -> dict[str, str]:
    keys = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    special: dict[str, str] = {}
    for name, key in keys.items():
        token_id = header.metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is None:
            continue
        if not 0 <= token_id < len(tokens):
            raise CheckpointError(f"{header.path}: {key}_token_id is {token_id}, there are {len(tokens)} tokens")
        special[name] = tokens[token_id]
    return special


def _byte_level_parts(
    pre: str, header: GgufHeader
) -> tuple[pre_tokenizers.PreTokenizer, normalizers.Normalizer | None, decoders.Decoder]:
    """How text is cut into words before merging, for the families named by `tokenizer.ggml.pre`."""
    from tokenizers import Regex, decoders, normalizers, pre_tokenizers

    add_space = bool(header.metadata.get("tokenizer.ggml.add_space_prefix", False))
    normalizer = None
    parts: list[pre_tokenizers.PreTokenizer]
    if pre in _GPT2_NAMES:
        parts = [pre_tokenizers.ByteLevel(add_prefix_space=add_space, use_regex=True)]
    elif pre == "smollm":
        parts = [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=add_space, use_regex=True),
        ]
    elif pre in _LLAMA3_NAMES or pre in _QWEN2_NAMES:
        digits = r"\p{N}{1,3}" if pre in _LLAMA3_NAMES else r"\p{N}"
        pattern = f"{_CONTRACTIONS}|{_WORDS}|{digits}|{_REST}"
        parts = [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=add_space, use_regex=False),
        ]
        normalizer = normalizers.NFC() if pre in _QWEN2_NAMES else None
    else:
        known = ", ".join(("smollm", *_GPT2_NAMES, *_LLAMA3_NAMES, *_QWEN2_NAMES))
        raise CheckpointError(f"{header.path} has the pre-tokenizer {pre!r}; supported are {known}")
    return pre_tokenizers.Sequence(parts), normalizer, decoders.ByteLevel()
