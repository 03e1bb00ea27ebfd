"""Reading conversations from token and chat files, bad files, batches, and their reproducible order."""

from __future__ import annotations

import contextlib
import datetime
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.byte_level import byte_level_tokenizer
from tests.tiny_run import tiny_settings, write_token_file

from paceline.capture.shards import ShardFolder
from paceline.checkpoint.tokenizer import TextTokenizer
from paceline.configuration.load import load_settings, to_toml
from paceline.configuration.run import DataSettings, TrainRun
from paceline.errors import ConfigError, DataError, RequestError
from paceline.training.anchors import anchor_candidates
from paceline.training.chats import chat_encoder
from paceline.training.data import BatchOrder, Conversations, drop_short, join, read_conversations, split_held_out

SPECIAL = {"<": 1, ">": 2, "/": 3}  # start, end, newline


class ChatML:
    """<start> role newline text <end> newline, as many small models have it; one id per character."""

    trailing = "/"

    def render_chat(self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True) -> str:
        rendered = "".join(f"<{m['role'][0].upper()}/{m['content']}>{self.trailing}" for m in messages)
        return rendered + ("<A/" if add_generation_prompt else "")

    def encode_chat(self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True) -> list[int]:
        text = self.render_chat(messages, add_generation_prompt=add_generation_prompt)
        return [SPECIAL.get(character, 100 + ord(character)) for character in text]


class NothingTrails(ChatML):
    trailing = ""


class DropsHistory(ChatML):
    """A template that rewrites earlier assistant turns, as those of reasoning models do."""

    def render_chat(self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True) -> str:
        last = len(messages) - 1
        shortened = [
            {**m, "content": m["content"][-1:]} if m["role"] == "assistant" and i < last else dict(m)
            for i, m in enumerate(messages)
        ]
        return super().render_chat(shortened, add_generation_prompt=add_generation_prompt)


class Refuses(ChatML):
    """A template that takes no system message, as some do."""

    def render_chat(self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True) -> str:
        if any(m["role"] == "system" for m in messages):
            raise RequestError("the template refuses: no system messages", hint="leave it out")
        return super().render_chat(messages, add_generation_prompt=add_generation_prompt)


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def write_chats(path: Path, *chats: Any) -> Path:
    path.write_text("".join(json.dumps({"messages": chat}, ensure_ascii=False) + "\n" for chat in chats), "utf-8")
    return path


def letters(tokens: np.ndarray) -> str:
    names = {id_: character for character, id_ in SPECIAL.items()}
    return "".join(names.get(int(t)) or chr(int(t) - 100) for t in tokens)


def supervised_text(conversations: Conversations) -> str:
    return letters(conversations.tokens[conversations.supervised])


def read(path: Path, encoder: ChatML | None = None, vocab_size: int = 10_000) -> Conversations:
    return read_conversations(path, vocab_size=vocab_size, encoder=encoder or ChatML())


# --- chat files ---


def test_the_end_token_is_supervised_and_the_newline_after_it_is_not(tmp_path: Path) -> None:
    path = write_chats(tmp_path / "c.jsonl", [turn("user", "hi"), turn("assistant", "yo")])
    found = read(path)
    assert letters(found.tokens) == "<U/hi>/<A/yo>/"
    assert supervised_text(found) == "yo>"
    assert not found.supervised[-1] and found.tokens.dtype == np.int32


def test_every_assistant_turn_is_supervised(tmp_path: Path) -> None:
    chat = [turn("system", "s"), turn("user", "a"), turn("assistant", "bc"), turn("user", "d"), turn("assistant", "0")]
    found = read(write_chats(tmp_path / "c.jsonl", chat))
    assert letters(found.tokens) == "<S/s>/<U/a>/<A/bc>/<U/d>/<A/0>/"
    assert supervised_text(found) == "bc>0>"


def test_a_template_with_nothing_after_the_end_token(tmp_path: Path) -> None:
    chat = [turn("user", "a"), turn("assistant", "yes"), turn("user", "b"), turn("assistant", "")]
    found = read(write_chats(tmp_path / "c.jsonl", chat), NothingTrails())
    assert supervised_text(found) == "yes>>"


def test_what_follows_the_last_answer_is_left_out_and_chats_without_one_too(tmp_path: Path) -> None:
    path = write_chats(
        tmp_path / "c.jsonl",
        [turn("user", "a"), turn("assistant", "b"), turn("user", "unanswered")],
        [turn("user", "never answered")],
        [turn("user", "c"), turn("assistant", "d")],
    )
    found = read(path)
    assert len(found) == 2 and letters(found.tokens) == "<U/a>/<A/b>/<U/c>/<A/d>/"
    assert found.starts.tolist() == [0, 12, 24]


def test_blank_lines_and_unusual_line_separators_inside_text_are_fine(tmp_path: Path) -> None:
    path = write_chats(tmp_path / "c.jsonl", [turn("user", "a\u2028b\u0085c"), turn("assistant", "d")])
    path.write_text("\n" + path.read_text("utf-8") + "\n\n", "utf-8")
    assert len(read(path)) == 1


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        "7",
        "{}",
        '{"messages": 3}',
        '{"messages": [{"role": "user"}]}',
        '{"messages": ["hello"]}',
        '{"messages": [{"role": "assistant", "content": null}]}',
        '{"messages": [{"role": "assistant", "content": [{"type": "text", "text": "x"}]}]}',
    ],
)
def test_a_line_that_is_no_chat_is_named(tmp_path: Path, line: str) -> None:
    path = write_chats(tmp_path / "c.jsonl", [turn("user", "a"), turn("assistant", "b")])
    path.write_text(path.read_text("utf-8") + line + "\n", "utf-8")
    with pytest.raises(DataError, match=re.escape(f"{path}:2 is not a chat")):
        read(path)


def test_a_template_that_rewrites_history_is_refused(tmp_path: Path) -> None:
    chat = [turn("user", "a"), turn("assistant", "bc"), turn("user", "d"), turn("assistant", "e")]
    with pytest.raises(DataError, match=r"c\.jsonl:1: adding turn 3 changes the tokens before it"):
        read(write_chats(tmp_path / "c.jsonl", chat), DropsHistory())


def test_what_a_template_refuses_is_named_with_its_line(tmp_path: Path) -> None:
    path = write_chats(
        tmp_path / "c.jsonl",
        [turn("user", "a"), turn("assistant", "b")],
        [turn("system", "s"), turn("user", "a"), turn("assistant", "b")],
    )
    with pytest.raises(DataError, match=r"c\.jsonl:2: the template refuses: no system messages"):
        read(path, Refuses())


class LeavesAnswersOut(ChatML):
    """A template that renders what it was asked and no answer."""

    def render_chat(self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True) -> str:
        asked = [m for m in messages if m["role"] != "assistant"]
        return super().render_chat(asked, add_generation_prompt=True)


def test_a_template_without_answers_is_refused(tmp_path: Path) -> None:
    path = write_chats(tmp_path / "c.jsonl", [turn("user", "a"), turn("assistant", "bc")])
    with pytest.raises(DataError, match=r"c\.jsonl:1: the template renders turn 1 without a token that the target"):
        read(path, LeavesAnswersOut())


def test_what_is_not_read_of_a_chat_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Reasoning and calls that the template would show, tools in front of the chat, weights of turns."""
    plain = [turn("user", "a"), turn("assistant", "b") | {"tool_calls": None, "refusal": ""}]
    thinking = [turn("user", "a"), turn("assistant", "b") | {"reasoning_content": "hm", "weight": 1}]
    path = write_chats(tmp_path / "c.jsonl", plain, thinking, thinking)
    assert len(read(path)) == 3
    (said,) = [record.message for record in caplog.records if "not read" in record.message]
    expected = "not read are messages.reasoning_content (first in line 2), messages.weight (first in line 2)"
    assert said.endswith(expected)
    caplog.clear()
    path.write_text(json.dumps({"id": 7, "messages": plain, "tools": [{"name": "f"}]}), "utf-8")
    read(path)
    assert "not read are tools (first in line 1)" in caplog.text
    caplog.clear()
    read(write_chats(path, plain))
    assert "not read" not in caplog.text


def test_chats_need_an_encoder(tmp_path: Path) -> None:
    path = write_chats(tmp_path / "c.jsonl", [turn("user", "a"), turn("assistant", "b")])
    with pytest.raises(DataError, match="no chat template"):
        read_conversations(path, vocab_size=10_000)


def test_a_file_in_another_encoding_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    path.write_bytes(b'{"messages": "\xff\xfe"}\n')
    with pytest.raises(DataError, match="cannot read"):
        read(path)


# --- token files ---

GOOD = {
    "tokens": np.arange(10, 21, dtype=np.uint16),
    "prompt_len": np.array([2, 3], np.int32),
    "response_len": np.array([4, 2], np.int32),
}


def write_tokens(path: Path, **changes: Any) -> Path:
    arrays = {name: array for name, array in {**GOOD, **changes}.items() if array is not None}
    np.savez(path, **arrays)
    return path


def test_responses_of_token_files_are_supervised(tmp_path: Path) -> None:
    found = read(write_tokens(tmp_path / "t.npz"))
    assert found.tokens.tolist() == list(range(10, 21))
    assert found.starts.tolist() == [0, 6, 11]
    assert found.tokens[found.supervised].tolist() == [12, 13, 14, 15, 19, 20]
    assert found.num_supervised == 6 and len(found) == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt_len": None}, r"lacks the arrays \['prompt_len'\]"),
        ({"response_len": np.array([4, 3])}, "add up to 12 tokens, the file holds 11"),
        ({"response_len": np.array([4])}, r"prompt_len has shape \(2,\), response_len \(1,\)"),
        ({"prompt_len": np.array([-1, 3]), "response_len": np.array([7, 2])}, "negative length"),
        ({"prompt_len": np.array([2.5, 2.5]), "response_len": np.array([4, 2])}, "prompt_len is float64"),
        ({"tokens": np.arange(11.0)}, "tokens is float64"),
        ({"tokens": np.arange(22).reshape(11, 2)[:, :1]}, r"tokens is int64 of shape \(11, 1\)"),
        ({"tokens": np.arange(11) + 9_990}, "token id 10000; the target's vocabulary has 10000"),
        ({"tokens": np.arange(11) - 1}, "token id -1"),
        ({"tokens": np.arange(11) + 2**32}, "token id 4294967306"),  # must not wrap into the vocabulary
        ({"tokens": np.array([{}] * 11, object)}, "cannot read"),
        ({"response_len": np.array([0, 0]), "prompt_len": np.array([6, 5])}, "no response token"),
        (
            {"tokens": np.empty(0, int), "prompt_len": np.empty(0, int), "response_len": np.empty(0, int)},
            "no response token",
        ),
    ],
)
def test_token_files_that_contradict_themselves(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message) as error:
        read(write_tokens(tmp_path / "t.npz", **changes))
    assert "t.npz" in str(error.value)


@pytest.mark.parametrize("compressed", [True, False])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 0.99])
def test_a_truncated_token_file_is_one_clear_error(tmp_path: Path, compressed: bool, share: float) -> None:
    path = tmp_path / "t.npz"
    (np.savez_compressed if compressed else np.savez)(path, **GOOD)
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
    with pytest.raises(DataError, match=re.escape(f"cannot read {path}")):
        read(path)


@pytest.mark.parametrize("compressed", [True, False])
def test_a_damaged_token_file_is_one_clear_error_or_reads_the_same(tmp_path: Path, compressed: bool) -> None:
    path = tmp_path / "t.npz"
    (np.savez_compressed if compressed else np.savez)(path, **GOOD)
    whole, expected = path.read_bytes(), read(path).fingerprint()
    for place in range(0, len(whole), 5):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        with contextlib.suppress(DataError):
            assert read(path).fingerprint() == expected  # a field that nobody reads


def test_an_array_file_with_the_wrong_name_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.npz"
    with path.open("wb") as file:
        np.save(file, np.arange(3))
    with pytest.raises(DataError, match="cannot read"):
        read(path)


@pytest.mark.parametrize(("name", "message"), [("none.npz", "no such data file"), ("t.csv", "neither .npz nor .jsonl")])
def test_files_that_are_not_there_or_of_another_kind(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "t.csv").write_text("1,2")
    with pytest.raises(DataError, match=message):
        read(tmp_path / name)


def captured(folder: Path, *shards: list[list[int]], content: str = "conversations") -> Path:
    """A complete folder as `paceline capture prompts` leaves it; two tokens of every conversation are its prompt."""
    opened = ShardFolder.open(folder, {"content": content}, len(shards), suffix=".npz")
    for index, rows in enumerate(shards):

        def fill(path: Path, rows: list[list[int]] = rows) -> dict[str, int]:
            with path.open("wb") as file:
                tiny = write_token_file(folder.parent / "rows.npz", rows, num_prompt_tokens=2)
                file.write(tiny.read_bytes())
            return {"conversations": len(rows)}

        opened.write(index, fill)
    opened.finish()
    return folder


def test_a_folder_of_captured_conversations_reads_like_a_file(tmp_path: Path) -> None:
    shards = [[5, 6, 7, 8], [9, 10, 11]], [[12, 13, 14]]
    folder = captured(tmp_path / "captured", *shards)
    whole = write_token_file(tmp_path / "whole.npz", [*shards[0], *shards[1]], num_prompt_tokens=2)
    assert read(folder).fingerprint() == read(whole).fingerprint()
    assert read(folder).supervised.tolist() == [False] * 2 + [True] * 2 + [False] * 2 + [True] + [False] * 2 + [True]
    with pytest.raises(DataError, match="vocabulary has 14"):
        read(folder, vocab_size=14)


def test_a_folder_of_something_else_or_an_unfinished_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError):
        read(tmp_path)
    with pytest.raises(DataError, match="holds no conversations"):
        read(captured(tmp_path / "features", [[5, 6, 7]], content="features"))
    folder = captured(tmp_path / "captured", [[5, 6, 7, 8]], [[12, 13, 14]])
    ShardFolder.read(folder).path(1).unlink()
    with pytest.raises(DataError):
        read(folder)


# --- sets and batches ---


def conversations(*lengths: int) -> Conversations:
    """Conversation i holds tokens 100 * i, 100 * i + 1, ...; all but the first token are supervised."""
    tokens = [100 * i + np.arange(length, dtype=np.int32) for i, length in enumerate(lengths)]
    return Conversations(
        np.concatenate(tokens),
        np.concatenate([np.arange(length) > 0 for length in lengths]),
        np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
    )


def test_batches_are_padded_cut_and_marked() -> None:
    batch = conversations(3, 70, 5).batch([1, 2], max_length=100)
    assert batch.token_ids_BS.shape == (2, 100)  # 70 rounds up to 128, held at max_length
    assert batch.lengths_B.tolist() == [70, 5]
    assert batch.token_ids_BS[1].tolist() == [200, 201, 202, 203, 204] + [0] * 95
    assert batch.supervised_BS[1].tolist() == [False, True, True, True, True] + [False] * 95
    cut = conversations(3, 70, 5).batch([1], max_length=10)
    assert cut.token_ids_BS[0].tolist() == list(range(100, 110)) and cut.lengths_B.tolist() == [10]
    assert conversations(3, 5).batch([0, 1], max_length=512).token_ids_BS.shape == (2, 64)


def test_selecting_joining_and_splitting_keep_conversations_whole() -> None:
    whole = conversations(3, 4, 5)
    picked = whole.select([2, 0])
    assert picked.tokens.tolist() == [200, 201, 202, 203, 204, 0, 1, 2] and picked.starts.tolist() == [0, 5, 8]
    again = join([whole.select([0]), whole.select([1, 2])])
    assert again.fingerprint() == whole.fingerprint() != picked.fingerprint()
    train, held_out = split_held_out(whole, 1)
    assert train.tokens.max() == 103 and held_out.tokens.tolist() == [200, 201, 202, 203, 204]
    assert len(split_held_out(whole, 0)[1]) == 0
    with pytest.raises(DataError, match="3 conversations, of which hold_out keeps 3"):
        split_held_out(whole, 3)


def short_ones() -> Conversations:
    """Supervised tokens: the first two, 3 apart from each other, 4 in a row, 6 in a row of which 4 lie far out."""
    marks = ["##....", "..#.#.#", ".####..", "....######"]
    starts = np.concatenate([[0], np.cumsum([len(mark) for mark in marks])]).astype(np.int64)
    supervised = np.array([letter == "#" for letter in "".join(marks)])
    return Conversations(np.arange(len(supervised), dtype=np.int32), supervised, starts)


@pytest.mark.parametrize(
    ("max_length", "least", "kept"),
    [
        (10, 0, [0, 1, 2, 3]),
        (10, 1, [2, 3]),  # no block can start in the others: never at the first token, nor without a successor
        (10, 5, [3]),
        (6, 2, [2, 3]),  # the cut leaves two
        (6, 3, [2]),
    ],
)
def test_too_little_to_learn_from_is_left_out_and_counted(
    max_length: int, least: int, kept: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    everything = short_ones()
    with caplog.at_level("INFO"):
        found = drop_short(everything, max_length=max_length, min_supervised=least)
    assert found.fingerprint() == everything.select(kept).fingerprint()
    message = f"{4 - len(kept)} of 4 conversations left out: fewer than {least} supervised tokens among the first"
    assert (message in caplog.text) == (len(kept) < 4)


def test_nothing_left_to_learn_from_is_refused() -> None:
    with pytest.raises(DataError, match="none of 4 conversations has 9 supervised tokens among its first 8"):
        drop_short(short_ones(), max_length=8, min_supervised=9)


@pytest.mark.parametrize(
    ("answers", "is_refused"),
    [
        ([(0, 1)], True),  # a token of answer: an anchor, and no draft behind it
        ([(0, 2)], True),  # the first token is read before anything is drafted
        ([(0, 3)], False),
        ([(7, 20)], True),  # one token before the cut
        ([(6, 20)], False),
        ([(8, 20), (0, 1), (3, 1)], True),
        ([(8, 20), (0, 1), (3, 2)], False),
    ],
)
def test_data_that_teaches_nothing_is_refused(answers: list[tuple[int, int]], is_refused: bool) -> None:
    """As many prompt and answer tokens: without a place for a block the loss would be 0 and the weights as before."""
    marks = [[False] * prompt + [True] * answer for prompt, answer in answers]
    borders = np.cumsum([0, *map(len, marks)]).astype(np.int64)
    data = Conversations(np.full(borders[-1], 7, np.int32), np.concatenate(marks), borders)
    batch = data.batch(range(len(data)), 8)
    assert bool(anchor_candidates(batch.supervised_BS).any()) != is_refused
    if is_refused:
        with pytest.raises(DataError, match=f"none of {len(data)} conversations .* among its first 8"):
            drop_short(data, max_length=8, min_supervised=0)
    else:
        assert drop_short(data, max_length=8, min_supervised=0) is data


def test_the_fingerprint_notices_ids_marks_and_borders() -> None:
    whole = conversations(3, 4)
    prints = {whole.fingerprint()}
    other = conversations(3, 4)
    other.tokens[0] = 9
    prints.add(other.fingerprint())
    other = conversations(3, 4)
    other.supervised[1] = False
    prints.add(other.fingerprint())
    prints.add(Conversations(whole.tokens, whole.supervised, np.array([0, 4, 7])).fingerprint())
    assert len(prints) == 4


# --- order ---


@given(
    count=st.integers(1, 300),
    batch_size=st.integers(1, 9),
    seed=st.integers(0, 2**31),
    indices=st.lists(st.integers(0, 400), min_size=2, max_size=6),
)
def test_the_order_is_a_pure_function_of_seed_and_index(
    count: int, batch_size: int, seed: int, indices: list[int]
) -> None:
    batch_size = min(batch_size, count)
    lengths = np.random.default_rng(0).integers(1, 50, count)
    in_order, jumping = BatchOrder(lengths, batch_size, seed), BatchOrder(lengths, batch_size, seed)
    expected = {index: in_order(index).tolist() for index in sorted(indices)}
    for index in indices:
        assert jumping(index).tolist() == expected[index]  # in any order of asking
        assert BatchOrder(lengths, batch_size, seed)(index).tolist() == expected[index]  # and from a fresh start


@given(count=st.integers(1, 300), batch_size=st.integers(1, 9), epoch=st.integers(0, 3))
def test_an_epoch_holds_each_conversation_at_most_once(count: int, batch_size: int, epoch: int) -> None:
    batch_size = min(batch_size, count)
    order = BatchOrder(np.arange(count), batch_size, 5)
    first = epoch * order.batches_per_epoch
    seen = [int(i) for index in range(first, first + order.batches_per_epoch) for i in order(index)]
    assert len(set(seen)) == len(seen) == count // batch_size * batch_size
    assert set(seen) <= set(range(count))


def test_epochs_and_seeds_differ_and_leftovers_change() -> None:
    order, other = BatchOrder(np.arange(50), 4, 1), BatchOrder(np.arange(50), 4, 2)
    epochs = [[order(e * 12 + i).tolist() for i in range(12)] for e in range(3)]
    assert epochs[0] != epochs[1] != epochs[2]
    assert epochs[0] != [other(i).tolist() for i in range(12)]
    left_out = [set(range(50)) - {i for batch in epoch for i in batch} for epoch in epochs]
    assert left_out[0] != left_out[1]


def test_batches_pad_little_without_being_sorted_over_the_epoch() -> None:
    lengths = np.random.default_rng(0).integers(1, 1000, 512)
    order = BatchOrder(lengths, 8, 0)
    spread = [np.ptp(lengths[order(index)]) for index in range(order.batches_per_epoch)]
    unsorted = [np.ptp(lengths[i * 8 : i * 8 + 8]) for i in range(64)]
    assert np.mean(spread) < 0.2 * np.mean(unsorted)
    longest = [lengths[order(index)].max() for index in range(order.batches_per_epoch)]
    assert longest != sorted(longest)
    windows = [longest[first : first + 16] for first in range(0, 64, 16)]  # in each of which they were sorted
    assert all(window != sorted(window) for window in windows), "batches would come from short to long"


def test_too_few_conversations_for_a_batch_are_refused() -> None:
    with pytest.raises(DataError, match=r"3 conversations to train on, schedule\.batch_size is 4"):
        BatchOrder(np.arange(3), 4, 0)


def test_a_template_that_writes_the_date(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The same chats are other data on another day, unless the day is fixed; tokens and other templates do not care."""
    dated = byte_level_tokenizer("{{ strftime_now('%d') }}{% for m in messages %}{{ m.content }}{% endfor %}")
    day = datetime.date(2026, 2, 3)

    def encoder(tokenizer: TextTokenizer, file: str, **settings: Any) -> Any:
        return chat_encoder(tokenizer, DataSettings(files=(Path(file),), **settings))

    fixed = encoder(dated, "c.jsonl", template_date=day)
    assert dated.decode(fixed.encode_chat([turn("user", "a")])) == "03a"
    assert encoder(dated, "c.npz") is dated and not caplog.records
    assert encoder(byte_level_tokenizer(), "c.jsonl", template_date=None) is byte_level_tokenizer()
    assert encoder(byte_level_tokenizer(""), "c.jsonl") is None and not caplog.records
    encoder(dated, "c.jsonl")
    (said,) = caplog.records
    assert f"data.template_date={datetime.date.today()}" in said.message


def test_a_date_in_files_of_settings_and_on_the_command_line(tmp_path: Path) -> None:
    """TOML has dates of its own; what `to_toml` writes is read back."""
    file = tmp_path / "run.toml"
    file.write_text(to_toml(tiny_settings(tmp_path, tmp_path / "c.jsonl")))
    day = datetime.date(2026, 2, 3)
    assert load_settings(TrainRun, file).data.template_date is None
    run = load_settings(TrainRun, file, ["data.template_date=2026-02-03"])
    assert run.data.template_date == day
    file.write_text(to_toml(run))
    assert load_settings(TrainRun, file).data.template_date == day
    assert load_settings(TrainRun, file, ["data.template_date=none"]).data.template_date is None
    with pytest.raises(ConfigError, match="template_date"):
        load_settings(TrainRun, file, ["data.template_date=yesterday"])
