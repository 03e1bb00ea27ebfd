"""Self-chat: prompts in the target's own template, answers that serving would give, files that training reads."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.fakes import ByteTokenizer
from tests.tiny import tiny_target, wrap_target

from paceline.capture.self_chat import SelfChatSettings, generate_self_chat, template_around_user
from paceline.capture.token_file import Conversation, write_token_file
from paceline.engine.engine import Engine, EngineSettings
from paceline.engine.request import SamplingParameters
from paceline.errors import CapacityError, CompatibilityError, RequestError
from paceline.models.loading import LoadedTarget
from paceline.training.data import read_conversations

VOCAB_SIZE, END = 32, 2
OPENING, CLOSING = [28, 29, 30], [END, 31, 29]


class TemplateTokenizer(ByteTokenizer):
    """Letters are ids 4 and up, between fixed openings and closings."""

    def __init__(self, opening: Sequence[int] = OPENING, closing: Sequence[int] = CLOSING) -> None:
        super().__init__()
        self._opening, self._closing = list(opening), list(closing)

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        (message,) = messages
        return [*self._opening, *(4 + ord(letter) % 20 for letter in message["content"]), *self._closing]


def chat_target(tokenizer: ByteTokenizer | None = None, **changes: Any) -> LoadedTarget:
    """So few ids that a user turn ends by chance after some thirty tokens; exact per row."""
    target = tiny_target(**({"vocab_size": VOCAB_SIZE, "hidden_size": 32, "head_size": 8} | changes))
    return wrap_target(target, "row_invariant", tokenizer or TemplateTokenizer())


@pytest.fixture(scope="module")
def target() -> LoadedTarget:
    return chat_target()


def settings(**changes: Any) -> SelfChatSettings:
    values: dict[str, Any] = {
        "num_conversations": 96,
        "batch_size": 40,
        "max_user_tokens": 20,
        "max_answer_tokens": 12,
        "seed": 1,
    }
    return SelfChatSettings(**(values | changes))


def chats(target: LoadedTarget, **changes: Any) -> list[Conversation]:
    return list(generate_self_chat(target, settings(**changes)))


def test_the_template_is_found_around_the_user(target: LoadedTarget) -> None:
    assert template_around_user(target) == (OPENING, CLOSING)


def test_every_prompt_is_a_rendered_user_turn(target: LoadedTarget) -> None:
    found = chats(target)
    assert len(found) > 20
    for chat in found:
        prompt = chat.prompt_ids.tolist()
        assert prompt[:3] == OPENING and prompt[-3:] == CLOSING
        text = prompt[3:-3]
        assert 1 <= len(text) <= 19, "the user's turn ends within its limit, end token included, and is not empty"
        assert END not in text, "the turn ends at its first end token"


def test_answers_end_at_the_stop_token_or_the_limit(target: LoadedTarget) -> None:
    found = chats(target, greedy_share=0.0, num_conversations=200)
    lengths = [len(chat.answer_ids) for chat in found]
    assert min(lengths) >= 1 and max(lengths) == 12
    for chat in found:
        answer = chat.answer_ids.tolist()
        assert END not in answer[:-1]
        assert answer[-1] == END or len(answer) == 12
    assert any(chat.answer_ids[-1] == END for chat in found)


def served(target: LoadedTarget, prompts: list[list[int]]) -> list[list[int]]:
    engine = Engine(target, None, EngineSettings(max_num_seqs=16))
    results = engine.generate(prompts, SamplingParameters(max_tokens=12))
    return [list(result.token_ids) for result in results]


@pytest.mark.parametrize("stop_token_ids", [(END,), (END, 7, 11)])
def test_greedy_answers_are_what_the_engine_serves(stop_token_ids: tuple[int, ...]) -> None:
    """Also for a target with several stop tokens: an answer does not run on past what serving would end."""
    target = chat_target(stop_token_ids=stop_token_ids)
    found = chats(target, greedy_share=1.0)
    assert len(found) > 10
    answers = [chat.answer_ids.tolist() for chat in found]
    assert answers == served(target, [chat.prompt_ids.tolist() for chat in found])
    assert not any(stop in answer[:-1] for answer in answers for stop in stop_token_ids)
    ends = {answer[-1] for answer in answers if len(answer) < 12}
    assert len(ends) > len(stop_token_ids) // 2, "some answers end by themselves"


def test_sampled_answers_are_not(target: LoadedTarget) -> None:
    found = chats(target, greedy_share=0.0)
    greedy = served(target, [chat.prompt_ids.tolist() for chat in found])
    same = sum(chat.answer_ids.tolist() == answer for chat, answer in zip(found, greedy, strict=True))
    assert same < len(found) / 2


def test_a_user_turn_that_stops_otherwise_is_dropped() -> None:
    """A stop token that does not close the turn is none of the user's words."""
    found = chats(chat_target(stop_token_ids=(END, 7)), num_conversations=200)
    assert found and not any(7 in chat.prompt_ids.tolist() for chat in found)


def test_duplicates_are_dropped_within_and_across_batches(target: LoadedTarget) -> None:
    """Turns of one token: 28 or fewer are possible."""
    found = chats(target, num_conversations=2000, batch_size=500, max_user_tokens=2, max_answer_tokens=1)
    prompts = [tuple(chat.prompt_ids.tolist()) for chat in found]
    assert len(set(prompts)) == len(prompts) <= VOCAB_SIZE
    assert len(prompts) > 5


def test_the_seed_decides(target: LoadedTarget) -> None:
    def ids(**changes: Any) -> list[list[int]]:
        return [[*chat.prompt_ids.tolist(), *chat.answer_ids.tolist()] for chat in chats(target, **changes)]

    assert ids() == ids()
    assert ids() != ids(seed=2)


@pytest.mark.parametrize(
    ("opening", "closing"),
    [
        (OPENING, [5, 31]),  # no stop token after the user
        (OPENING, []),
        ([], CLOSING),
    ],
)
def test_a_template_without_fixed_parts_is_refused(opening: list[int], closing: list[int]) -> None:
    target = chat_target(TemplateTokenizer(opening, closing))
    with pytest.raises(CompatibilityError, match="does not close the user's turn"):
        chats(target)


def test_a_tokenizer_without_a_template_is_refused(tmp_path: Path) -> None:
    from tests.tiny_run import write_tokenizer

    from paceline.checkpoint.tokenizer import open_tokenizer

    write_tokenizer(tmp_path, 64)
    (tmp_path / "tokenizer_config.json").unlink()
    bare: Any = open_tokenizer(tmp_path)
    with pytest.raises(RequestError, match="no chat template"):
        chats(chat_target(bare))


def test_a_conversation_that_outgrows_the_context_is_refused() -> None:
    target = chat_target(max_position_embeddings=37)
    with pytest.raises(CompatibilityError, match="may take 38 tokens; the target has positions for 37"):
        chats(target)
    assert chats(target, max_answer_tokens=11, num_conversations=40)


def test_training_reads_the_file(target: LoadedTarget, tmp_path: Path) -> None:
    found = chats(target)
    write_token_file(tmp_path / "chats.npz", found)
    read = read_conversations(tmp_path / "chats.npz", vocab_size=VOCAB_SIZE)
    assert len(read) == len(found)
    for index, chat in enumerate(found):
        start, end = read.starts[index], read.starts[index + 1]
        assert read.tokens[start:end].tolist() == [*chat.prompt_ids.tolist(), *chat.answer_ids.tolist()]
        marks = [False] * len(chat.prompt_ids) + [True] * len(chat.answer_ids)
        assert read.supervised[start:end].tolist() == marks


@pytest.mark.parametrize(("largest", "dtype"), [(65_535, np.uint16), (65_536, np.uint32)])
def test_ids_are_stored_as_narrow_as_they_fit(tmp_path: Path, largest: int, dtype: type[np.generic]) -> None:
    write_token_file(tmp_path / "chats.npz", [Conversation(np.array([1, largest]), np.array([3]))])
    with np.load(tmp_path / "chats.npz") as arrays:
        assert arrays["tokens"].dtype == dtype and arrays["tokens"].tolist() == [1, largest, 3]


def test_a_full_disk_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CapacityError):
        write_token_file(tmp_path / "chats.npz", [Conversation(np.array([1]), np.array([2]))])
    assert list(tmp_path.iterdir()) == []
