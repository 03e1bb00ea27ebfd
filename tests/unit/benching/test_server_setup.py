"""Servers as set-ups: a tiny one of ours, and ones that do what servers should not."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import pytest
from tests.scripted_server import DONE, Reply, chunk, scripted, whole_stream
from tests.served import NAME, running

from paceline.benching.records import AnswerRecord, Question
from paceline.benching.server_setup import ServerOptions, ServerSetUp, prompt_fields
from paceline.errors import RequestError, ServerError
from paceline.evaluation.prompts import Message, Prompt, single_prompt
from paceline.trace.acceptance import DraftTotals

IDS = Prompt(id="ids", token_ids=(9, 10, 11))
GREEDY = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True}


def asked(
    url: str, *prompts: Prompt, model: str | None = None, **options: Any
) -> tuple[dict[str, object], list[AnswerRecord]]:
    """What `prepare` finds, and an answer to each prompt."""

    async def ask() -> tuple[dict[str, object], list[AnswerRecord]]:
        setup = ServerSetUp("here", url, model, ServerOptions(**({"sampling": GREEDY} | options)))
        try:
            facts = await setup.prepare()
            return facts, [await setup.ask(Question(index, prompt)) for index, prompt in enumerate(prompts)]
        finally:
            await setup.close()

    return asyncio.run(ask())


def counters_of(url: str) -> DraftTotals | None:
    async def read() -> DraftTotals | None:
        setup = ServerSetUp("here", url, None, ServerOptions())
        try:
            return await setup.counters()
        finally:
            await setup.close()

    return asyncio.run(read())


@pytest.mark.parametrize("prompt", [IDS, single_prompt("abc")])
def test_a_real_server(prompt: Prompt) -> None:
    with running(metrics_level="detailed", stream_interval_s=0.0) as server:
        facts, (record,) = asked(server.url, prompt)
        counted = counters_of(server.url)
    assert facts["model"] == NAME and facts["url"] == server.url and facts["version"]
    assert record.error is None and record.finish_reason == "length"
    assert record.num_tokens == 12 and record.num_prompt_tokens is not None
    assert record.first_s is not None and record.first_s == record.delta_s[0] <= record.delta_s[-1] <= record.total_s
    assert record.drafting is not None and record.drafting.num_steps > 0 and counted is not None
    for name in ("num_steps", "num_draft_tokens", "num_accepted", "kept"):  # the two ways agree
        assert getattr(record.drafting, name) == getattr(counted, name)


def test_equal_texts_are_equal() -> None:
    with running() as server:
        _, records = asked(server.url, single_prompt("abc"), single_prompt("abc"), single_prompt("xyz"))
    first, second, third = (record.output_sha256 for record in records)
    assert first == second != third


def test_whole_answers_have_no_first_token() -> None:
    with running() as server:
        _, (record,) = asked(server.url, IDS, is_streamed=False)
    assert record.error is None and record.num_tokens == 12 and record.total_s > 0
    assert record.first_s is None and record.delta_s == ()


def test_what_is_sent() -> None:
    with scripted(lambda _: Reply(whole_stream())) as server:
        asked(server.url, single_prompt("why"), IDS, model="tiny", api_key="secret", system="be brief")
    (chat_path, chat), (path, body) = server.asked
    assert (chat_path, path) == ("/v1/chat/completions", "/v1/completions")
    assert chat["messages"] == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "why"}]
    assert body["prompt"] == [9, 10, 11] and body["model"] == "tiny" and "seed" not in body
    assert body["stream"] is True and body["stream_options"] == {"include_usage": True}
    assert {key: body[key] for key in GREEDY} == GREEDY
    assert server.headers["Authorization"] == "Bearer secret"


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (Reply(status=500, body={"error": {"message": "out of luck"}}), "status 500: out of luck"),
        (Reply(status=429, body={"error": "queue full"}), "status 429: queue full"),
        (Reply([chunk("a")], is_cut=True), "RemoteProtocolError"),
        (Reply([chunk("a")]), "ended before its answer did"),
        (Reply([chunk("a"), b'data: {"error": {"message": "dead"}}\n\n', DONE]), "mid-stream: dead"),
        (Reply([b"data: {{{\n\n"]), "not JSON"),
        (Reply(body={"choices": []}), "no stream but one body"),
    ],
)
def test_faults_are_of_one_request_alone(reply: Reply, said: str) -> None:
    with scripted(lambda number: reply if number == 1 else Reply(whole_stream())) as server:
        _, records = asked(server.url, IDS, IDS, IDS)
    assert [record.is_whole for record in records] == [True, False, True]
    broken = records[1]
    assert broken.error is not None and said in broken.error
    assert broken.first_s is None and broken.num_tokens is None and broken.output_sha256 is None


def test_a_line_separator_in_a_text_breaks_nothing() -> None:
    raw = 'data: {"choices": [{"text": "a\u2028b", "finish_reason": "stop"}]}\n\n'.encode()
    with scripted(lambda _: Reply([raw, DONE])) as server:
        _, (record,) = asked(server.url, IDS)
    assert record.error is None and len(record.delta_s) == 1


def test_a_stream_without_usage_is_an_answer_of_unknown_length() -> None:
    with scripted(lambda _: Reply([chunk("a"), chunk("b", finish_reason="stop"), DONE])) as server:
        _, (record,) = asked(server.url, IDS)
    assert record.error is None and record.num_tokens is None and len(record.delta_s) == 2


def test_an_answer_that_takes_too_long() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections and says nothing
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"

        async def ask() -> AnswerRecord:
            setup = ServerSetUp("here", url, "tiny", ServerOptions(timeout_s=0.2))
            try:
                return await setup.ask(Question(0, IDS))
            finally:
                await setup.close()

        record = asyncio.run(ask())
    assert record.error is not None and ("0.2 s" in record.error or "Timeout" in record.error)


def dead_url() -> str:
    with socket.create_server(("127.0.0.1", 0)) as once:
        return f"http://127.0.0.1:{once.getsockname()[1]}"


def test_a_server_that_is_not_there() -> None:
    with pytest.raises(ServerError, match="cannot be reached"):
        asked(dead_url())


def test_models() -> None:
    with scripted(lambda _: Reply(whole_stream()), models=("a", "b")) as server:
        assert asked(server.url, model="b")[0]["model"] == "b"
        with pytest.raises(ServerError, match="no model 'c'; it has a, b"):
            asked(server.url, model="c")
        with pytest.raises(ServerError, match="which model to ask for") as raised:
            asked(server.url)
    assert raised.value.hint == "--model NAME"
    with scripted(lambda _: Reply(whole_stream()), models=()) as server:
        assert asked(server.url, model="b")[0]["model"] == "b"  # a server that lists nothing is believed


def test_a_server_that_wants_a_key_or_still_loads() -> None:
    with running(api_keys=("k",)) as server:
        with pytest.raises(ServerError, match="wants a key"):
            asked(server.url)
        assert asked(server.url, api_key="k")[0]["model"] == NAME


def test_counters_are_read_where_there_are_any() -> None:
    text: Callable[[int], str | None] = lambda _: "vllm:spec_decode_num_drafts_total 4\n"  # noqa: E731
    with scripted(lambda _: Reply(whole_stream()), metrics=text) as server:
        assert counters_of(server.url) == DraftTotals(4, 0, 0, (), None)
    with scripted(lambda _: Reply(whole_stream())) as server:
        assert counters_of(server.url) is None
    assert counters_of(dead_url()) is None


def test_prompts_in_forms_that_do_not_fit() -> None:
    chat = Prompt(id="c", messages=(Message("user", "why"),))
    with pytest.raises(RequestError, match="token ids, which no chat takes"):
        prompt_fields(IDS, ServerOptions(endpoint="chat"))
    for options in (ServerOptions(raw=True), ServerOptions(endpoint="completions")):
        with pytest.raises(RequestError, match="a chat, which is no completion"):
            prompt_fields(chat, options)
        assert prompt_fields(Prompt(id="t", turns=("why", "how")), options) == {"prompt": "why"}
    assert prompt_fields(chat, ServerOptions(system="s"))["messages"][0] == {"role": "system", "content": "s"}  # type: ignore[index]
