"""The whole server over a real port, asked by the real client of the OpenAI API: it gives what the engine gives.

One tiny pair in row-invariant arithmetic, so that text can be compared character by character.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx2
import openai
import pytest
from tests.served import MAX_MODEL_LEN, NAME, Running, await_status, make_engine, models_of, opener, running

from paceline.engine.request import RequestResult, SamplingParameters
from paceline.errors import CompatibilityError
from paceline.serving.metrics import ServerMetrics

MESSAGES = [{"role": "user", "content": "the sea \u00e9 \U0001f642 tells no tales"}]
IMAGE = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}
SAMPLED = {"temperature": 1.0, "seed": 11, "top_p": 0.95}


@pytest.fixture(scope="module")
def served() -> Iterator[Running]:
    with running(metrics_level="detailed") as server:
        yield server


@pytest.fixture
def client(served: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def alone(prompt: list[int], **sampling: Any) -> RequestResult:
    """The same request, without drafts, of an engine of its own."""
    return make_engine(with_drafter=False).generate([prompt], SamplingParameters(**sampling))[0]


def chat_ids() -> list[int]:
    return models_of()[0].tokenizer.encode_chat(MESSAGES)


@pytest.mark.parametrize(
    "sampling", [{"temperature": 0.0}, SAMPLED | {"verify_method": "match"}], ids=["greedy", "T=1"]
)
def test_a_chat_is_what_plain_decoding_gives(sampling: dict[str, Any]) -> None:
    method = sampling.get("verify_method", "standard")
    own = {name: value for name, value in sampling.items() if name != "verify_method"}
    expected = alone(chat_ids(), max_tokens=40, **own)
    with running(opener(lambda: make_engine(verify_method=method))) as server:
        body = {"messages": MESSAGES, "max_tokens": 40, **own}
        found = server.client.post("/v1/chat/completions", json=body).json()
        lines = server.client.post("/v1/chat/completions", json=body | {"stream": True}).text.split("\n\n")
    assert found["choices"][0]["message"]["content"] == expected.text
    assert found["choices"][0]["finish_reason"] == expected.finish_reason
    assert found["usage"]["completion_tokens"] == len(expected.token_ids)
    assert found["usage"]["prompt_tokens"] == len(chat_ids())
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line not in ("", "data: [DONE]")]
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == expected.text


def test_the_client_reads_answers_and_streams(client: openai.OpenAI) -> None:
    expected = alone(chat_ids(), max_tokens=30).text
    whole = client.chat.completions.create(model=NAME, messages=MESSAGES, max_tokens=30, temperature=0)
    assert whole.choices[0].message.content == expected
    assert whole.choices[0].message.role == "assistant"
    stream = client.chat.completions.create(
        model=NAME,
        messages=MESSAGES,
        max_completion_tokens=30,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[0].choices[0].delta.content == ""
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == expected
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    assert chunks[-1].choices == [] and chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 30 == whole.usage.completion_tokens
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_log_probabilities_are_the_targets(client: openai.OpenAI) -> None:
    expected = alone(chat_ids(), max_tokens=12, logprobs=3)
    assert expected.logprobs is not None
    answer = client.chat.completions.create(
        model=NAME, messages=MESSAGES, max_tokens=12, temperature=0, logprobs=True, top_logprobs=3
    )
    found = answer.choices[0].logprobs.content
    assert [entry.logprob for entry in found] == pytest.approx([entry.logprob for entry in expected.logprobs])
    assert [[top.logprob for top in entry.top_logprobs] for entry in found] == [
        pytest.approx([logprob for _, logprob in entry.top]) for entry in expected.logprobs
    ]
    special = models_of()[0].tokenizer.special_ids
    shown = [entry for entry, token in zip(found, expected.token_ids, strict=True) if token not in special]
    joined = b"".join(bytes(entry.bytes) for entry in shown)
    assert joined.decode(errors="replace") == expected.text
    streamed = client.chat.completions.create(
        model=NAME, messages=MESSAGES, max_tokens=12, temperature=0, logprobs=True, top_logprobs=3, stream=True
    )
    pieces = [chunk.choices[0].logprobs.content for chunk in streamed if chunk.choices[0].logprobs]
    assert [entry for piece in pieces for entry in piece] == found


def test_completions_take_every_form_of_prompt(client: openai.OpenAI) -> None:
    tokenizer = models_of()[0].tokenizer
    texts = ["tea", "a hot sea"]
    ids = [tokenizer.encode(text) for text in texts]
    expected = [alone(each, max_tokens=9).text for each in ids]
    for prompt in (texts, ids):
        answer = client.completions.create(model=NAME, prompt=prompt, max_tokens=9, temperature=0)
        assert [choice.text for choice in answer.choices] == expected
        assert answer.usage.prompt_tokens == sum(map(len, ids)) and answer.usage.completion_tokens == 18
    for single in (texts[1], ids[1]):
        assert (
            client.completions.create(model=NAME, prompt=single, max_tokens=9, temperature=0).choices[0].text
            == expected[1]
        )
    assert client.completions.create(model=NAME, prompt="tea", temperature=0).usage.completion_tokens == 16
    streamed = client.completions.create(model=NAME, prompt=texts, max_tokens=9, temperature=0, stream=True)
    parts = ["", ""]
    for chunk in streamed:
        parts[chunk.choices[0].index] += chunk.choices[0].text
    assert parts == expected


def test_samples_are_those_of_seeds_that_count_up(client: openai.OpenAI) -> None:
    expected = [alone(chat_ids(), max_tokens=8, temperature=1.0, seed=5 + index).text for index in range(3)]
    with running(opener(lambda: make_engine(verify_method="match"))) as server:
        body = {"messages": MESSAGES, "max_tokens": 8, "temperature": 1.0, "seed": 5, "n": 3}
        found = server.client.post("/v1/chat/completions", json=body).json()
    assert [choice["message"]["content"] for choice in found["choices"]] == expected
    assert [choice["index"] for choice in found["choices"]] == [0, 1, 2]
    assert found["usage"]["prompt_tokens"] == len(chat_ids())


def test_stop_texts_are_never_told(client: openai.OpenAI) -> None:
    text = alone(chat_ids(), max_tokens=40).text
    stop = text[15:18]
    assert text.index(stop) > 3
    for is_streamed in (False, True):
        answer = client.chat.completions.create(
            model=NAME, messages=MESSAGES, max_tokens=40, temperature=0, stop=[stop], stream=is_streamed
        )
        if is_streamed:
            chunks = list(answer)
            told = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
            assert chunks[-1].choices[0].finish_reason == "stop"
        else:
            told = answer.choices[0].message.content
            assert answer.choices[0].finish_reason == "stop"
        assert told == text[: text.index(stop)]


def one_of(name: str, values: list[Any]) -> dict[str, Any]:
    """A schema: an object with one property."""
    properties = {name: {"enum": values}}
    return {"type": "object", "properties": properties, "required": [name], "additionalProperties": False}


def test_a_schema_is_obeyed(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"sea": {"enum": ["calm", "rough"]}}, "required": ["sea"]}
    form = {
        "type": "json_schema",
        "json_schema": {"name": "weather", "schema": schema | {"additionalProperties": False}},
    }
    for seed in range(3):
        answer = client.chat.completions.create(
            model=NAME, messages=MESSAGES, max_tokens=200, temperature=1, seed=seed, response_format=form
        )
        if answer.choices[0].finish_reason == "stop":
            assert json.loads(answer.choices[0].message.content)["sea"] in ("calm", "rough")


def tool(name: str) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": {"x": {"enum": [1, 2]}},
        "required": ["x"],
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_call_that_is_wanted_is_made(client: openai.OpenAI, is_streamed: bool) -> None:
    """With white space banned by a bias, a random model has to come to the end of its call."""
    tokenizer = models_of()[0].tokenizer
    spaces = {str(tokenizer.encode(space)[0]): -100 for space in " \n\t\r"}
    choice = {"type": "function", "function": {"name": "second"}}
    arguments: dict[str, Any] = {
        "model": NAME,
        "messages": MESSAGES,
        "tools": [tool("first"), tool("second")],
        "tool_choice": choice,
        "temperature": 0,
        "max_tokens": 100,
        "logit_bias": spaces,
    }
    if is_streamed:
        chunks = list(client.chat.completions.create(**arguments, stream=True))
        deltas = [chunk.choices[0].delta for chunk in chunks]
        calls = [call for delta in deltas for call in delta.tool_calls or ()]
        text = "".join(delta.content or "" for delta in deltas)
        reason = chunks[-1].choices[0].finish_reason
    else:
        answer = client.chat.completions.create(**arguments).choices[0]
        calls, text, reason = answer.message.tool_calls, answer.message.content or "", answer.finish_reason
    assert [call.function.name for call in calls] == ["second"]
    assert json.loads(calls[0].function.arguments)["x"] in (1, 2)
    assert (text, reason) == ("", "tool_calls")


def test_the_statistics_of_drafting_add_up(served: Running) -> None:
    body = {"messages": MESSAGES, "max_tokens": 30, "temperature": 0}
    found = served.client.post("/v1/chat/completions", json=body).json()["metrics"]["speculative_decoding"]
    assert sum(found["acceptance_histogram"]) == found["num_spec_steps"] == len(found["per_step_accepted"])
    assert sum(found["per_step_accepted"]) == found["num_accepted_draft_tokens"]
    assert sum(found["per_step_drafted"]) == found["num_draft_tokens"]
    assert found["num_spec_tokens"] == 7
    twice = served.client.post("/v1/chat/completions", json=body | {"n": 2}).json()
    assert "metrics" not in twice
    text = served.client.post(
        "/v1/chat/completions", json=body | {"stream": True, "stream_options": {"include_usage": True}}
    ).text
    last = json.loads(text.split("\n\n")[-3].removeprefix("data: "))
    assert last["metrics"]["speculative_decoding"] == found


def test_a_prompt_that_comes_again_is_found(served: Running) -> None:
    prompt = "tales of tall seas " * 6
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "cache_salt": "this test"}
    first, second = (served.client.post("/v1/completions", json=body).json() for _ in range(2))
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= 32
    assert first["choices"][0]["text"] == second["choices"][0]["text"]


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("chat/completions", {"messages": []}, 400, "messages"),
        ("chat/completions", {"messages": "hello"}, 400, "messages"),
        ("chat/completions", {}, 400, "messages"),
        ("chat/completions", {"messages": MESSAGES, "temperature": "hot"}, 400, "temperature"),
        ("chat/completions", {"messages": MESSAGES, "temperature": -1}, 400, "temperature"),
        ("chat/completions", {"messages": MESSAGES, "top_p": 0}, 400, "top_p"),
        ("chat/completions", {"messages": MESSAGES, "n": 0}, 400, "n"),
        ("chat/completions", {"messages": MESSAGES, "n": 1.5}, 400, "n"),
        ("chat/completions", {"messages": MESSAGES, "stream": "yes"}, 400, "stream"),
        ("chat/completions", {"messages": MESSAGES, "max_tokens": 0}, 400, "max_tokens"),
        ("chat/completions", {"messages": MESSAGES, "stop": ["a"] * 5}, 400, "stop"),
        ("chat/completions", {"messages": MESSAGES, "logit_bias": {"x": 1}}, 400, "logit_bias"),
        ("chat/completions", {"messages": MESSAGES, "logit_bias": {"511": 1, "512": 1}}, 400, "logit_bias"),
        ("chat/completions", {"messages": MESSAGES, "top_logprobs": 2}, 400, "top_logprobs"),
        ("chat/completions", {"messages": MESSAGES, "tool_choice": "required"}, 400, "tool_choice"),
        ("chat/completions", {"messages": MESSAGES, "response_format": {"type": "xml"}}, 400, "response_format.type"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            400,
            "messages[0].content[0]",
        ),
        ("chat/completions", {"messages": MESSAGES, "model": "another"}, 404, "model"),
        ("completions", {"prompt": []}, 400, "prompt"),
        ("completions", {"prompt": ""}, 400, "prompt"),
        ("completions", {"prompt": [1, "a"]}, 400, "prompt"),
        ("completions", {"prompt": [1, 100_000]}, 400, "prompt"),
        ("completions", {"prompt": [5] * MAX_MODEL_LEN}, 400, "prompt"),
        ("completions", {"prompt": "tea", "echo": True}, 400, "echo"),
        ("completions", {"prompt": "tea", "suffix": "x"}, 400, "suffix"),
        ("completions", {"prompt": "tea", "best_of": 4}, 400, "best_of"),
        ("completions", {"prompt": "tea", "logprobs": 33}, 400, "logprobs"),
        ("completions", {"prompt": ["tea"] * 1025}, 400, "prompt"),
    ],
)
def test_what_cannot_be_served_is_said(served: Running, path: str, body: Any, status: int, param: str | None) -> None:
    for extra in ({}, {"stream": True}):
        answer = served.client.post(f"/v1/{path}", json=extra | body)
        error = answer.json()["error"]
        assert answer.status_code == status, error
        assert set(error) == {"message", "type", "param", "code"}
        assert (error["param"] or "").split("[")[0] == (param or "").split("[")[0], error
        assert len(error["message"]) > 10


def test_clients_raise_the_right_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model=NAME, messages=MESSAGES, temperature=-1)
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="another", messages=MESSAGES)
    assert [model.id for model in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).id == NAME
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("another/one")


def test_a_reader_that_leaves_frees_its_place(served: Running) -> None:
    """Whether it waits for a whole answer or reads a stream; and nothing of it is left in the engine."""
    body = {"messages": MESSAGES, "max_tokens": 200, "temperature": 0, "ignore_eos": True, "n": 4}
    before = scraped(served, "generation_tokens_total")
    for is_streamed in (True, False):

        async def leave(is_streamed: bool = is_streamed) -> None:
            async with httpx2.AsyncClient(base_url=served.url) as client:
                request = client.build_request("POST", "/v1/chat/completions", json=body | {"stream": is_streamed})
                sending = asyncio.create_task(client.send(request, stream=True))
                await asyncio.sleep(0.15)
                sending.cancel()
                await asyncio.gather(sending, return_exceptions=True)

        asyncio.run(leave())
        deadline_s = time.monotonic() + 20
        while scraped(served, "num_requests_running") + scraped(served, "num_requests_waiting"):
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
    assert scraped(served, "generation_tokens_total") - before < 2 * 4 * 200


def scraped(served: Running, name: str) -> float:
    for line in served.client.get("/metrics").text.splitlines():
        if line.startswith(f"paceline:{name}{{"):
            return float(line.rsplit(" ", 1)[1])
    raise AssertionError(f"{name} is not told")


def test_many_clients_at_once_get_their_own(served: Running) -> None:
    prompts = [f"tale {index} of the sea" for index in range(12)]
    tokenizer = models_of()[0].tokenizer
    expected = [alone(tokenizer.encode(prompt), max_tokens=20).text for prompt in prompts]

    async def ask_all() -> list[str]:
        async with httpx2.AsyncClient(base_url=served.url, timeout=60) as client:
            bodies = [{"prompt": prompt, "max_tokens": 20, "temperature": 0} for prompt in prompts]
            answers = await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies))
            return [answer.json()["choices"][0]["text"] for answer in answers]

    assert asyncio.run(ask_all()) == expected


def test_a_full_queue_says_try_again() -> None:
    with running(opener(lambda: make_engine(max_num_seqs=1, max_num_waiting=0))) as server:

        async def ask_all() -> list[httpx2.Response]:
            async with httpx2.AsyncClient(base_url=server.url, timeout=60) as client:
                body = {"prompt": "tea", "max_tokens": 100, "ignore_eos": True}
                return await asyncio.gather(*(client.post("/v1/completions", json=body) for _ in range(6)))

        answers = asyncio.run(ask_all())
    refused = [answer for answer in answers if answer.status_code == 429]
    assert {answer.status_code for answer in answers} == {200, 429}
    assert all("retry-after" in answer.headers for answer in refused)


def test_before_the_model_is_there_the_server_says_so() -> None:
    may_load = threading.Event()

    def load() -> Any:
        assert may_load.wait(30)
        return make_engine()

    with running(opener(load), waits=False) as server:
        await_status(server.client, "/ping", 200)
        assert server.client.get("/health").status_code == 503
        assert server.client.post("/v1/completions", json={"prompt": "tea"}).status_code == 503
        assert server.client.get("/v1/models").status_code == 503
        may_load.set()
        await_status(server.client, "/health", 200)
        assert server.client.post("/v1/completions", json={"prompt": "tea"}).status_code == 200


def test_an_answer_under_way_is_finished_before_the_server_ends() -> None:
    answers: list[httpx2.Response] = []
    with running() as server:
        body = {"prompt": "tea", "max_tokens": 120, "temperature": 0, "ignore_eos": True}
        asking = threading.Thread(
            target=lambda: answers.append(httpx2.post(f"{server.url}/v1/completions", json=body, timeout=60))
        )
        asking.start()
        deadline_s = time.monotonic() + 20
        while scraped(server, "num_requests_running") < 1 and not answers:
            assert time.monotonic() < deadline_s
    asking.join(30)
    assert answers[0].json()["usage"]["completion_tokens"] == 120


def test_a_model_that_cannot_be_loaded_ends_it() -> None:
    from paceline.serving.app import create_app
    from paceline.serving.server import ServerOptions

    failures: list[BaseException] = []

    def refuse() -> Any:
        raise CompatibilityError("these two do not fit")

    async def live() -> int:
        app = create_app(refuse, ServerOptions(), on_failure=failures.append)
        async with app.router.lifespan_context(app):
            while not failures:
                await asyncio.sleep(0.01)
            async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app), base_url="http://here") as client:
                return (await client.get("/health")).status_code

    assert asyncio.run(live()) == 503
    assert [str(failure) for failure in failures] == ["these two do not fit"]


def test_whoever_uses_the_metrics_by_hand_can() -> None:
    data, kind = ServerMetrics("tiny", 7).exposition(None)
    assert b"paceline:" in data and kind.startswith("text/plain")
