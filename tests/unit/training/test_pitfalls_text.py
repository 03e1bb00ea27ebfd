"""Faults between a text and the ids that are learnt: another template, text encoded again, an end that is not learnt.

Each check stands beside the fault that it has to find.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.tiny_run import CHAT_TEMPLATE, END, write_token_file, write_tokenizer

from paceline.checkpoint.tokenizer import TextTokenizer, open_tokenizer
from paceline.errors import DataError
from paceline.training import chats as chats_module
from paceline.training.data import Conversations, read_conversations

VOCAB_SIZE = 64
TEMPLATE = CHAT_TEMPLATE.replace("<assistant>", "{% if add_generation_prompt %}<assistant> {% endif %}")
LINE_AFTER_THE_END = TEMPLATE.replace("<end> ", "<end> w3 ")
WITH_SYSTEM_PROMPT = "<user> w20 <end> " + TEMPLATE  # put in where the chat has none, as some templates do
CHATS = [
    [("user", "w7 w8"), ("assistant", "w9 w10 w11")],
    [("user", "w12"), ("assistant", "w13"), ("user", "w14 w15"), ("assistant", "w16 w17")],
]


def tokenizer(folder: Path, template: str = TEMPLATE) -> TextTokenizer:
    """A word for each id, "0" and "yes" among them."""
    folder.mkdir()
    write_tokenizer(folder, VOCAB_SIZE)
    content = json.loads((folder / "tokenizer.json").read_text())
    words = content["model"]["vocab"]
    words["0"], words["yes"] = words.pop("w5"), words.pop("w6")
    (folder / "tokenizer.json").write_text(json.dumps(content))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
    return open_tokenizer(folder)


def turns(chat: list[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in chat]


def read(folder: Path, encoder: TextTokenizer) -> Conversations:
    path = folder / "chats.jsonl"
    path.write_text("".join(json.dumps({"messages": turns(chat)}) + "\n" for chat in CHATS))
    return read_conversations(path, vocab_size=VOCAB_SIZE, encoder=encoder)


def rows(conversations: Conversations) -> list[tuple[list[int], list[bool]]]:
    one_by_one = [conversations.select([index]) for index in range(len(conversations))]
    return [(one.tokens.tolist(), one.supervised.tolist()) for one in one_by_one]


# --- 18: the template of serving ---


def begins_as_served(conversations: Conversations, serving: TextTokenizer) -> bool:
    """Whether every answer stands behind exactly the ids that a request with its history is turned into."""
    for (ids, marks), chat in zip(rows(conversations), CHATS, strict=True):
        for index in range(1, len(chat), 2):
            prompt = serving.encode_chat(turns(chat[:index]))
            if ids[: len(prompt)] != prompt or marks[len(prompt) - 1] or not marks[len(prompt)]:
                return False
    return True


@pytest.mark.parametrize("template", [TEMPLATE, WITH_SYSTEM_PROMPT, LINE_AFTER_THE_END])
def test_training_reads_a_chat_as_serving_renders_it(tmp_path: Path, template: str) -> None:
    serving = tokenizer(tmp_path / "serving", template)
    assert begins_as_served(read(tmp_path, serving), serving)
    other = tokenizer(tmp_path / "other", TEMPLATE if template == WITH_SYSTEM_PROMPT else WITH_SYSTEM_PROMPT)
    assert not begins_as_served(read(tmp_path, other), serving)
    assert other.template_sha256 != serving.template_sha256


def test_a_scaffold_that_only_the_open_turn_has_is_refused(tmp_path: Path) -> None:
    """As models that think leave it: what is served opens with tokens that no finished turn has."""
    scaffold = tokenizer(tmp_path / "t", TEMPLATE.replace("<assistant>", "<assistant> w4 w4"))
    with pytest.raises(DataError, match="changes the tokens before it"):
        read(tmp_path, scaffold)


# --- 19: ids that were sampled ---


def test_ids_of_a_file_are_learnt_as_they_are(tmp_path: Path) -> None:
    """Another way to write the same text is not what the target said."""
    text = tokenizer(tmp_path / "t")
    said = [[10, 11, 12, 13, END, 9], [7, 8, 63, 9, 10, END]]
    file = write_token_file(tmp_path / "data.npz", said, num_prompt_tokens=2)
    assert [ids for ids, _ in rows(read_conversations(file, vocab_size=VOCAB_SIZE))] == said
    again = [text.encode(text.decode(ids)) for ids in said]
    assert all(one != other for one, other in zip(again, said, strict=True)), "encoding again loses what has no text"


# --- 20: the end token ---


def ends_are_learnt(conversations: Conversations) -> bool:
    """Whether every answer's last mark stands on the end token."""
    for ids, marks in rows(conversations):
        ends = [index for index, mark in enumerate(marks) if mark and not (*marks[index + 1 :], False)[0]]
        if not ends or any(ids[index] != END for index in ends):
            return False
    return True


@pytest.mark.parametrize("template", [TEMPLATE, LINE_AFTER_THE_END])
def test_every_answer_ends_with_a_mark_on_the_end_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, template: str
) -> None:
    encoder = tokenizer(tmp_path / "t", template)
    assert ends_are_learnt(read(tmp_path, encoder))
    trailing = chats_module._num_trailing
    for fault in (-1, 1):  # one token more is learnt, the end token is not

        def wrong(*arguments: Any, by: int = fault) -> int:
            return max(trailing(*arguments) + by, 0)

        monkeypatch.setattr(chats_module, "_num_trailing", wrong)
        is_possible = fault > 0 or template == LINE_AFTER_THE_END
        assert ends_are_learnt(read(tmp_path, encoder)) != is_possible


# --- 21: a mark for every token ---


def test_there_are_as_many_marks_as_tokens_in_every_row(tmp_path: Path) -> None:
    for ids, marks in rows(read(tmp_path, tokenizer(tmp_path / "t"))):
        assert len(ids) == len(marks) and 0 < sum(marks) < len(marks)
    batch = read(tmp_path, tokenizer(tmp_path / "u")).batch([0, 1], 32)
    assert batch.token_ids_BS.shape == batch.supervised_BS.shape
