"""A conversation over real engines: what it answers, what it keeps, and what an end in the middle leaves behind."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.tiny import loaded
from tests.tiny_run import write_tokenizer
from tests.unit.cli.fakes import ANSWER, FakeEngine, FakeTokenizer

from paceline.checkpoint.tokenizer import TextTokenizer, open_tokenizer
from paceline.cli.conversation import Conversation
from paceline.engine.engine import Engine, EngineSettings
from paceline.engine.request import RequestResult, SamplingParameters
from paceline.errors import DataError, NumericError, RequestError

GREEDY = SamplingParameters(max_tokens=12, ignore_eos=True)
QUESTIONS = ("w5 w6 w7", "w8 w9", "w10 w11 w12 w13")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder, 512)
    return open_tokenizer(folder)


@pytest.fixture
def make_engine(tokenizer: TextTokenizer) -> Callable[..., Engine]:
    def make(**settings: Any) -> Engine:
        target, drafter = loaded(tokenizer=tokenizer)
        fields = {"max_num_seqs": 1, "max_model_len": 256, "block_size": 4, **settings}
        return Engine(target, drafter, EngineSettings(**fields))

    return make


def talk(conversation: Conversation, questions: Sequence[str] = QUESTIONS) -> list[tuple[RequestResult, str]]:
    """Results, each with what was shown of it."""
    answers = []
    for question in questions:
        shown: list[str] = []
        answers.append((conversation.ask(question, shown.append), "".join(shown)))
    return answers


def as_generated(messages: Sequence[Mapping[str, str]], tokenizer: TextTokenizer, engine: Engine) -> list[str]:
    """What a fresh engine says to each question, behind the messages before it."""
    prompts = [tokenizer.encode_chat(messages[:index]) for index in range(len(messages)) if index % 2 == 1]
    return [result.text for result in engine.generate(prompts, GREEDY)]


def test_every_answer_is_that_to_the_rendered_history(
    tokenizer: TextTokenizer, make_engine: Callable[..., Engine]
) -> None:
    conversation = Conversation(make_engine(draft_length="adaptive"), tokenizer, GREEDY)
    answers = talk(conversation)
    messages = conversation.messages
    assert [message["role"] for message in messages] == ["user", "assistant"] * 3
    assert [message["content"] for message in messages[::2]] == list(QUESTIONS)
    expected = as_generated(messages, tokenizer, make_engine(prefix_cache=False, draft_length="off"))
    assert [result.text for result, _ in answers] == expected == [message["content"] for message in messages[1::2]]
    assert [shown for _, shown in answers] == expected
    assert len(set(expected)) == 3  # otherwise history need not have been looked at


def test_a_forgotten_turn_would_be_seen(tokenizer: TextTokenizer, make_engine: Callable[..., Engine]) -> None:
    """The planted fault: answers to the last message alone."""

    class Forgetful:
        has_chat_template = True

        def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
            return tokenizer.encode_chat(messages[-1:])

    conversation = Conversation(make_engine(), Forgetful(), GREEDY)
    answers = talk(conversation)
    expected = as_generated(conversation.messages, tokenizer, make_engine())
    assert answers[0][0].text == expected[0] and answers[1][0].text != expected[1]


def test_earlier_turns_are_found_in_the_prefix_cache(
    tokenizer: TextTokenizer, make_engine: Callable[..., Engine]
) -> None:
    conversation = Conversation(make_engine(), tokenizer, GREEDY)
    (first, _), (second, _), (third, _) = talk(conversation)
    assert first.num_cached_tokens == 0
    for earlier, later in ((first, second), (second, third)):  # all but what no whole block holds
        assert later.num_cached_tokens >= len(earlier.prompt_ids) + len(earlier.token_ids) - 8


def test_a_system_message_stays_in_front(tokenizer: TextTokenizer, make_engine: Callable[..., Engine]) -> None:
    conversation = Conversation(make_engine(), tokenizer, GREEDY, system="w40 w41")
    plain = Conversation(make_engine(), tokenizer, GREEDY)
    assert talk(conversation)[0][0].text != talk(plain)[0][0].text
    conversation.reset()
    assert conversation.messages == ({"role": "system", "content": "w40 w41"},)


def test_nothing_behind_a_stop_is_ever_shown(tokenizer: TextTokenizer, make_engine: Callable[..., Engine]) -> None:
    whole = talk(Conversation(make_engine(), tokenizer, GREEDY), QUESTIONS[:1])[0][0].text
    stop = " ".join(whole.split()[4:6])
    conversation = Conversation(make_engine(), tokenizer, replace(GREEDY, stop=(stop,)))
    result, shown = talk(conversation, QUESTIONS[:1])[0]
    assert shown == result.text == whole[: whole.index(stop)] and result.stop_reason == stop
    assert conversation.messages[-1]["content"] == shown


def test_a_full_context_costs_nothing(tokenizer: TextTokenizer, make_engine: Callable[..., Engine]) -> None:
    conversation = Conversation(make_engine(max_model_len=48), tokenizer, GREEDY)
    talk(conversation, QUESTIONS[:2])
    before, long = conversation.messages, "w9 " * 30
    num_tokens = len(tokenizer.encode_chat([*before, {"role": "user", "content": long}]))
    with pytest.raises(RequestError, match=f"has {num_tokens} tokens.*a context of 48") as refused:
        conversation.ask(long, print)
    assert refused.value.hint is not None and "/reset" in refused.value.hint
    assert conversation.messages == before
    conversation.reset()
    conversation.retry(lambda text: None)
    assert conversation.messages[0]["content"] == long and len(conversation.messages) == 2


def test_the_last_token_of_the_context_is_used(tokenizer: TextTokenizer, make_engine: Callable[..., Engine]) -> None:
    question = {"role": "user", "content": QUESTIONS[0]}
    size = len(tokenizer.encode_chat([question])) + 1
    conversation = Conversation(make_engine(max_model_len=size), tokenizer, GREEDY)
    ((result, _),) = talk(conversation, QUESTIONS[:1])
    assert len(result.token_ids) == 1 and result.finish_reason == "length"
    full = Conversation(make_engine(max_model_len=size - 1), tokenizer, GREEDY)
    with pytest.raises(RequestError, match="the conversation has"):
        talk(full, QUESTIONS[:1])


def test_ctrl_c_keeps_what_came() -> None:
    engine: Any = FakeEngine(interrupt_after=3)
    conversation = Conversation(engine, FakeTokenizer(), SamplingParameters(max_tokens=100))
    ((result, shown),) = talk(conversation, ["one"])
    assert result.finish_reason == "abort" and shown == "hello wid" == conversation.messages[-1]["content"]
    assert not engine.has_unfinished()
    assert talk(conversation, ["two"])[0][1] == ANSWER
    assert engine.results["answer-2"].prompt_ids == tuple(map(ord, "onehello widtwo"))


def test_text_that_was_held_back_is_shown_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ends of answers wait for the rest of a character or of a stop text."""
    engine: Any = FakeEngine(interrupt_after=3)
    abort = engine.abort

    def abort_with_rest(name: str) -> None:
        engine.running[name].text += "e"
        abort(name)

    monkeypatch.setattr(engine, "abort", abort_with_rest)
    conversation = Conversation(engine, FakeTokenizer(), SamplingParameters(max_tokens=100))
    assert talk(conversation, ["one"])[0][1] == "hello wide" == conversation.messages[-1]["content"]


def test_ctrl_c_before_any_text_takes_the_question_back(monkeypatch: pytest.MonkeyPatch) -> None:
    engine: Any = FakeEngine(interrupt_after=1)
    conversation = Conversation(engine, FakeTokenizer(), SamplingParameters(max_tokens=100))
    abort = engine.abort

    def abort_without_text(name: str) -> None:
        if name in engine.running:
            engine.running[name].text = ""
        abort(name)

    monkeypatch.setattr(engine, "abort", abort_without_text)
    assert talk(conversation, ["one"])[0][1] == "" and conversation.messages == ()
    conversation.retry(lambda text: None)
    assert [message["content"] for message in conversation.messages] == ["one", ANSWER]


def test_retry_replaces_an_answer_and_undo_takes_it_back() -> None:
    engine: Any = FakeEngine()
    conversation = Conversation(engine, FakeTokenizer(), SamplingParameters(max_tokens=100, temperature=1.0, seed=7))
    talk(conversation, ["one", "two"])
    engine.answer = "other"
    conversation.retry(lambda text: None)
    assert [message["content"] for message in conversation.messages] == ["one", ANSWER, "two", "other"]
    assert engine.seeds == [7, 8, 9]  # so that it is another answer
    assert conversation.undo() == "two"
    assert [message["content"] for message in conversation.messages] == ["one", ANSWER]
    conversation.undo()
    for act in (conversation.undo, lambda: conversation.retry(print)):
        with pytest.raises(RequestError, match="there is no"):
            act()


@pytest.mark.parametrize(("has_dead_end", "error"), [(False, NumericError), (True, RequestError)])
def test_a_failed_answer_leaves_the_messages(has_dead_end: bool, error: type[Exception]) -> None:
    engine: Any = FakeEngine()
    conversation = Conversation(engine, FakeTokenizer(), SamplingParameters(max_tokens=100))
    talk(conversation, ["one"])
    before = conversation.messages
    engine.last_reason, engine.has_dead_end = "error", has_dead_end
    for ask in (lambda: conversation.retry(print), lambda: conversation.ask("two", print)):
        with pytest.raises(error, match="the answer ended after 17 tokens: the logits hold"):
            ask()
        assert conversation.messages == before and not engine.has_unfinished()


def test_a_broken_output_frees_the_engine() -> None:
    def show(text: str) -> None:
        raise BrokenPipeError

    engine: Any = FakeEngine()
    conversation = Conversation(engine, FakeTokenizer(), SamplingParameters(max_tokens=100))
    with pytest.raises(BrokenPipeError):
        conversation.ask("one", show)
    assert not engine.has_unfinished() and conversation.messages == ()


def test_saving_never_overwrites(tmp_path: Path) -> None:
    conversation = Conversation(FakeEngine(), FakeTokenizer(), SamplingParameters(max_tokens=100), system="be kind")
    talk(conversation, ["größer\\n"])
    assert conversation.save(tmp_path / "chat.jsonl") == 3
    written = (tmp_path / "chat.jsonl").read_bytes()
    assert tuple(json.loads(line) for line in written.decode().splitlines()) == conversation.messages
    assert "größer" in written.decode()
    conversation.reset()
    with pytest.raises(DataError, match="exists, and nothing is written over it"):
        conversation.save(tmp_path / "chat.jsonl")
    assert (tmp_path / "chat.jsonl").read_bytes() == written
    with pytest.raises(DataError, match="cannot be written"):
        conversation.save(tmp_path / "gone" / "chat.jsonl")


def test_a_target_without_template_is_refused() -> None:
    tokenizer = FakeTokenizer()
    tokenizer.has_chat_template = False
    with pytest.raises(RequestError, match="no chat template") as refused:
        Conversation(FakeEngine(), tokenizer, SamplingParameters())
    assert refused.value.hint is not None and "generate --raw" in refused.value.hint
