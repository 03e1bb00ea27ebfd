"""Tiny targets that chat: so few ids that a user turn ends by chance after some thirty tokens; exact per row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.fakes import ByteTokenizer
from tests.tiny import tiny_target, wrap_target
from tests.tiny_run import write_target_folder

from paceline.checkpoint.tokenizer import TextTokenizer
from paceline.configuration.capture import CapturePromptsRun
from paceline.models.loading import LoadedTarget

VOCAB_SIZE, END = 32, 2
OPENING, CLOSING = [28, 29, 30], [END, 31, 29]
SMALL = {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "head_size": 8}


class TemplateTokenizer(ByteTokenizer):
    """Letters are ids 4 to 23, between fixed openings and closings; an assistant's turn is its text and an end."""

    has_chat_template = True

    def __init__(self, opening: Sequence[int] = OPENING, closing: Sequence[int] = CLOSING) -> None:
        super().__init__()
        self._opening, self._closing = list(opening), list(closing)

    def encode(self, text: str) -> list[int]:
        return [4 + ord(letter) % 20 for letter in text]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return " ".join(chr(96 + index) for index in ids)

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        ids: list[int] = []
        for message in messages:
            text = self.encode(message["content"])
            ids += [*text, END] if message["role"] == "assistant" else [*self._opening, *text, *self._closing]
        return ids


def chat_target(tokenizer: ByteTokenizer | None = None, **changes: Any) -> LoadedTarget:
    """In memory, with a `TemplateTokenizer`."""
    return wrap_target(tiny_target(**(SMALL | changes)), "row_invariant", tokenizer or TemplateTokenizer())


def chat_target_folder(folder: Path, **changes: Any) -> Path:
    """On disk, with a real tokenizer that knows a word per id, "0" and "yes" among them."""
    import json

    model = tiny_target(**(SMALL | {"num_layers": 2} | changes))
    write_target_folder(folder, model)
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    words = content["model"]["vocab"]
    words["0"], words["yes"] = words.pop("w5"), words.pop("w6")
    path.write_text(json.dumps(content))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = (
        "{% for m in messages %}<{{ m.role }}> {{ m.content }} <end> {% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def with_text_tokenizer(target: LoadedTarget, tokenizer: TextTokenizer) -> LoadedTarget:
    """The same target with a real tokenizer."""
    return LoadedTarget(target.model, target.contract, tokenizer, target.linear_mode)


def capture_run(folder: Path, **changes: Any) -> CapturePromptsRun:
    """90 self-chats in shards of 16 on a tiny target; `changes` replace settings."""
    values: dict[str, Any] = {
        "model": "tiny",
        "output": str(folder),
        "max_user_tokens": 20,
        "max_answer_tokens": 12,
        "batch_size": 8,
        "shard_size": 16,
        "seed": 1,
        "device": "cpu",
        "dtype": "float32",
    }
    if "prompts" not in changes:
        values["self_chat"] = 90
    return CapturePromptsRun.model_validate(values | changes)
