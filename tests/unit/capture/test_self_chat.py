"""Self-chat: prompts in the target's own template, answers that serving would give."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.tiny_run import write_tokenizer
from tests.unit.capture.chatting import (
    CLOSING,
    END,
    OPENING,
    VOCAB_SIZE,
    TemplateTokenizer,
    chat_target,
    with_text_tokenizer,
)

from paceline.capture.exclusion import Exclusion
from paceline.capture.lockstep import LockstepWriter
from paceline.capture.rows import ShardContent
from paceline.capture.sampling import AnswerSampling
from paceline.capture.self_chat import SelfChat, template_around_user
from paceline.capture.writer import Passage, PassageRequest, Progress
from paceline.checkpoint.tokenizer import open_tokenizer
from paceline.engine.engine import Engine, EngineSettings
from paceline.engine.request import SamplingParameters
from paceline.errors import CompatibilityError, RequestError
from paceline.models.loading import LoadedTarget

MAX_ANSWER = 12


@pytest.fixture(scope="module")
def target() -> LoadedTarget:
    return chat_target()


def source(
    target: LoadedTarget, *, max_user_tokens: int = 20, exclusion: Exclusion | None = None, **changes: Any
) -> Any:
    sampling = AnswerSampling(**({"max_answer_tokens": MAX_ANSWER, "seed": 1} | changes))
    return SelfChat(target, 96, max_user_tokens, sampling, exclusion or Exclusion())


def written(target: LoadedTarget, rows: range = range(96), **changes: Any) -> ShardContent:
    content: ShardContent = source(target, **changes).shard(rows, LockstepWriter(target, batch_size=32))
    return content


def test_the_template_is_found_around_the_user(target: LoadedTarget) -> None:
    assert template_around_user(target) == (OPENING, CLOSING, 1)


def test_a_turn_may_be_closed_by_more_than_its_end_token() -> None:
    """As in Kimi-K3, where a mark and a name stand before it: the target has to write all of them."""
    closing = [7, 8, END, 31]
    source_ = source(chat_target(TemplateTokenizer(OPENING, closing)))
    asked = [
        Passage((5, 7, 8, END), "stop"),
        Passage((5, 9, 8, END), "stop"),
        Passage((7, 8, END), "stop"),
        Passage((END,), "stop"),
    ]
    content = source_.shard(range(4), _Scripted(asked, [Passage((9, END), "stop")]))
    assert [row.request.prompt_ids for row in content.rows] == [[*OPENING, 5, *closing]]
    assert content.dropped == [
        ("self-1", "user turn stops otherwise"),
        ("self-2", "empty user turn"),
        ("self-3", "user turn stops otherwise"),
    ]


def test_every_prompt_is_a_rendered_user_turn(target: LoadedTarget) -> None:
    content = written(target)
    assert len(content.rows) > 20
    for row in content.rows:
        prompt = list(row.request.prompt_ids)
        assert prompt[:3] == OPENING and prompt[-3:] == CLOSING
        text = prompt[3:-3]
        assert 1 <= len(text) <= 19, "the user's turn ends within its limit, end token included, and is not empty"
        assert END not in text, "the turn ends at its first end token"


def test_no_row_is_lost(target: LoadedTarget) -> None:
    content = written(target)
    names = [row.id for row in content.rows] + [name for name, _ in content.dropped]
    assert sorted(names) == sorted(f"self-{index}" for index in range(96))
    assert {reason for _, reason in content.dropped} >= {"user turn cut"}


def test_greedy_answers_are_what_the_engine_serves(target: LoadedTarget) -> None:
    content = written(target, greedy_share=1.0)
    engine = Engine(target, None, EngineSettings(max_num_seqs=16))
    prompts = [row.request.prompt_ids for row in content.rows]
    results = engine.generate(prompts, SamplingParameters(max_tokens=MAX_ANSWER))
    for row, result in zip(content.rows, results, strict=True):
        is_cut = row.passage.end == "loop"
        assert row.passage.token_ids == result.token_ids[: len(row.passage.token_ids) if is_cut else None]
    assert {row.passage.end for row in content.rows} >= {"stop", "length"}


def test_the_greedy_share_is_a_matter_of_rows(target: LoadedTarget) -> None:
    temperatures = [row.request.temperature for row in written(target, greedy_share=0.5, temperature=0.6).rows]
    assert set(temperatures) == {0.0, 0.6} and 0.2 < temperatures.count(0.0) / len(temperatures) < 0.8


def test_a_row_does_not_depend_on_its_shard(target: LoadedTarget) -> None:
    whole = {row.id: row for row in written(target).rows}
    part = written(target, range(40, 60))
    assert part.rows and all(whole.get(row.id, row) == row for row in part.rows)
    assert written(target, seed=2).rows != written(target).rows


def test_a_user_turn_that_stops_otherwise_is_dropped() -> None:
    """A stop token that does not close the turn is none of the user's words."""
    content = written(chat_target(stop_token_ids=(END, 7)))
    assert content.rows and not any(7 in row.request.prompt_ids for row in content.rows)
    assert "user turn stops otherwise" in {reason for _, reason in content.dropped}


def test_repeated_turns_are_answered_once(target: LoadedTarget) -> None:
    """Turns of one token: 28 or fewer are possible."""
    content = written(target, range(1500), max_user_tokens=2)
    prompts = [tuple(row.request.prompt_ids) for row in content.rows]
    assert len(set(prompts)) == len(prompts) <= VOCAB_SIZE
    assert "repeated" in {reason for _, reason in content.dropped}


def test_excluded_turns_are_dropped(target: LoadedTarget) -> None:
    first = written(target).rows[0]
    exclusion = Exclusion(run_length=30)
    exclusion.add([target.tokenizer.decode(list(first.request.prompt_ids[3:-3]))])
    content = written(target, exclusion=exclusion)
    assert (first.id, "excluded") in content.dropped and first.id not in {row.id for row in content.rows}


class _Scripted:
    """Gives passages that are set down."""

    def __init__(self, *passages: list[Passage]) -> None:
        self._passages = list(passages)

    def write(self, requests: Sequence[PassageRequest], on_progress: Progress | None = None) -> list[Passage]:
        return self._passages.pop(0)


def test_reasons_for_dropping(target: LoadedTarget) -> None:
    turn = Passage((5, END), "stop")
    asked = [turn, Passage((END,), "stop"), Passage((5, 5), "loop"), Passage((), "error"), Passage((6, END), "stop")]
    answers = [Passage((9, END), "stop"), Passage((), "error")]
    content = source(target).shard(range(5), _Scripted(asked, answers))
    assert [(row.id, row.request.prompt_ids) for row in content.rows] == [("self-0", [*OPENING, 5, *CLOSING])]
    assert sorted(content.dropped) == [
        ("self-1", "empty user turn"),
        ("self-2", "user turn loops"),
        ("self-3", "bad numbers"),
        ("self-4", "bad numbers"),
    ]


@pytest.mark.parametrize(
    ("opening", "closing"),
    [
        (OPENING, [5, 31]),  # no stop token after the user
        (OPENING, []),
        ([], CLOSING),
    ],
)
def test_a_template_without_fixed_parts_is_refused(opening: list[int], closing: list[int]) -> None:
    with pytest.raises(CompatibilityError, match="does not close the user's turn"):
        source(chat_target(TemplateTokenizer(opening, closing))).context_length()


def test_a_tokenizer_without_a_template_is_refused(tmp_path: Path, target: LoadedTarget) -> None:
    write_tokenizer(tmp_path, 64)
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(RequestError, match="no chat template"):
        source(with_text_tokenizer(target, open_tokenizer(tmp_path))).context_length()


def test_a_conversation_that_outgrows_the_context_is_refused() -> None:
    target = chat_target(max_position_embeddings=37)
    with pytest.raises(CompatibilityError, match="may take 38 tokens; the target has positions for 37"):
        source(target).context_length()
    assert source(target, max_answer_tokens=11).context_length() == 37
