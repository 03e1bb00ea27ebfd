"""How answers end that cannot go on, and prompts that are refused before they cost anything; over a real port."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from tests.served import MAX_MODEL_LEN, Running, opener, running

from paceline.errors import EngineClosedError
from paceline.serving.server import Server, ServerOptions

DEAD_END = {"prompt": "tea", "max_tokens": 4, "structured_outputs": {"choice": ["z"]}, "bad_words": ["z"]}


@pytest.fixture(scope="module")
def served() -> Iterator[Running]:
    with running() as server:
        yield server


def _error(body: Any) -> tuple[int, str]:
    return body["error"]["code"], body["error"]["type"]


def test_rules_that_leave_no_token_are_the_callers_mistake(served: Running, caplog: pytest.LogCaptureFixture) -> None:
    answer = served.client.post("/v1/completions", json=DEAD_END)
    assert (answer.status_code, *_error(answer.json())) == (400, 400, "invalid_request_error")
    assert "structured_output, bad_words left none" in answer.json()["error"]["message"]
    *frames, end, rest = served.client.post("/v1/completions", json=DEAD_END | {"stream": True}).text.split("\n\n")
    assert (end, rest) == ("data: [DONE]", "")
    assert _error(json.loads(frames[-1].removeprefix("data: "))) == (400, "invalid_request_error")
    assert "failed" not in caplog.text  # nothing is wrong with the server


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_prompt_of_millions_of_characters_is_refused_at_once(served: Running, path: str) -> None:
    text = "tea " * 2_000_000
    name, value = ("messages", [{"role": "user", "content": text}]) if "chat" in path else ("prompt", text)
    began_s = time.monotonic()
    answer = served.client.post(path, json={name: value})
    assert time.monotonic() - began_s < 5  # encoding takes several times as long
    assert answer.status_code == 400 and answer.json()["error"]["param"] == name
    assert f"tokens or more; the context of {MAX_MODEL_LEN} leaves no room" in answer.json()["error"]["message"]


def test_a_prompt_that_may_fit_is_encoded(served: Running) -> None:
    answer = served.client.post("/v1/completions", json={"prompt": "te" * (MAX_MODEL_LEN - 8), "max_tokens": 2})
    assert answer.status_code == 200


def test_an_engine_that_the_loop_has_not_heard_of_is_not_ready() -> None:
    """Its thread serves from one moment to the next; a request that comes between is told to come again."""

    async def ask_early() -> None:
        server = Server(opener(), ServerOptions(checks_at_start=False))
        await server.host.engine.start()
        assert server.host.is_ready and not server.is_ready
        with pytest.raises(EngineClosedError, match="not ready"):
            server.models()
        await server.start()
        assert server.is_ready and len(server.models()) == 1
        await server.stop()
        assert not server.is_ready

    asyncio.run(ask_early())
