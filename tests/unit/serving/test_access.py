"""Ids on every answer, keys where text is made, bodies no larger than allowed; nothing is held back on the way."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable

import pytest
from fastapi import FastAPI, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from tests.unit.serving.asgi_calls import call

from paceline.errors import ConfigError
from paceline.serving.access import ApiKeys, BodyLimit, RequestIds
from paceline.serving.failures import install_failures

MIDDLEWARES: list[Callable[[ASGIApp], ASGIApp]] = [
    RequestIds,
    lambda app: ApiKeys(app, ["k"]),
    lambda app: BodyLimit(app, 1),
]


async def reads_all(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with how much it read."""
    num_bytes, has_more = 0, True
    while has_more:
        message = await receive()
        num_bytes, has_more = num_bytes + len(message["body"]), message["more_body"]
    await send({"type": "http.response.start", "status": 200, "headers": [(b"x-request-id", b"theirs")]})
    await send({"type": "http.response.body", "body": str(num_bytes).encode()})


# Ids


@pytest.mark.parametrize("sent", ["a", "req-1/a:~", "!" * 128])
def test_a_usable_id_is_kept(sent: str) -> None:
    scope: Scope = {}
    answer = call(RequestIds(reads_all), headers=[("X-Request-ID", sent)], scope=scope)
    assert answer.header("X-Request-Id") == sent == scope["state"]["request_id"]


@pytest.mark.parametrize("sent", [None, "", "two words", "!" * 129, "ä", "a\x7f", "a\tb", "a\r\nSet-Cookie: b=c"])
def test_another_id_is_made_up(sent: str | None) -> None:
    headers = [] if sent is None else [("X-Request-Id", sent)]
    first, second = (call(RequestIds(reads_all), headers=headers).header("X-Request-Id") for _ in range(2))
    assert first is not None and second is not None and first != second
    assert first.isalnum() and len(first) == 32


def test_an_id_joins_what_the_server_keeps_for_the_application() -> None:
    state = {"pool": 1}
    scope: Scope = {"state": state}
    call(RequestIds(reads_all), headers=[("X-Request-Id", "a")], scope=scope)
    assert scope["state"] == {"pool": 1, "request_id": "a"}


def served_app() -> FastAPI:
    app = FastAPI()
    install_failures(app)

    @app.get("/fails")
    async def fails() -> None:
        raise RuntimeError("planted")

    @app.post("/reads")
    async def reads(request: Request) -> int:
        return len(await request.body())

    @app.post("/v1/parses")
    async def parses(body: dict[str, int]) -> dict[str, int]:
        return body

    app.add_middleware(ApiKeys, keys=["k"])
    app.add_middleware(BodyLimit, max_bytes=10)
    app.add_middleware(RequestIds)
    return app


@pytest.mark.parametrize(
    ("path", "method", "body", "status"),
    [
        ("/reads", "POST", b"12", 200),
        ("/nowhere", "GET", b"", 404),
        ("/reads", "GET", b"", 405),
        ("/v1/parses", "POST", b"{}", 401),
        ("/reads", "POST", b"12345678901", 413),
    ],
)
def test_every_answer_of_an_application_carries_the_id(path: str, method: str, body: bytes, status: int) -> None:
    answer = call(served_app(), path, method=method, body=body, headers=[("X-Request-Id", "mine")])
    assert (answer.status, answer.header("X-Request-Id")) == (status, "mine")


def test_a_fault_of_ours_carries_the_id_though_it_is_answered_outside_of_all() -> None:
    sent: list[Message] = []

    async def scenario() -> None:
        async def receive() -> Message:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Message) -> None:
            sent.append(message)

        headers = [(b"x-request-id", b"mine")]
        scope = {"type": "http", "method": "GET", "path": "/fails", "headers": headers, "query_string": b""}
        with pytest.raises(RuntimeError, match="planted"):  # for the server, which logs it, too
            await served_app()(scope, receive, send)

    asyncio.run(scenario())
    assert sent[0]["status"] == 500
    assert [value for name, value in sent[0]["headers"] if name == b"x-request-id"] == [b"mine"]


# Keys


@pytest.mark.parametrize(
    "path", ["/v1", "/v1/models", "/v1/chat/completions", "/tokenize", "/detokenize", "/server_info", "/tokenize/"]
)
def test_a_key_is_asked_for_where_text_is_made_or_told_of(path: str) -> None:
    app = ApiKeys(reads_all, ["right", "other"])
    answer = call(app, path)
    assert (answer.status, answer.header("WWW-Authenticate"), answer.num_received) == (401, "Bearer", 0)
    assert answer.error["type"] == "authentication_error"
    for key in ("right", "other"):
        assert call(app, path, headers=[("Authorization", f"Bearer {key}")]).status == 200
    assert call(app, path, method="OPTIONS").status == 200, "a browser asks without a key"
    assert call(ApiKeys(reads_all, []), path).status == 200


@pytest.mark.parametrize("path", ["/health", "/metrics", "/", "/v10/models", "/version", "/tokenizer"])
def test_other_paths_need_none(path: str) -> None:
    assert call(ApiKeys(reads_all, ["right"]), path).status == 200


def test_a_mounted_application_keeps_the_same_paths() -> None:
    app = ApiKeys(reads_all, ["right"])
    assert call(app, "/proxy/v1/models", root_path="/proxy").status == 401
    assert call(app, "/v1/models", root_path="/proxy").status == 401
    assert call(app, "/proxy/health", root_path="/proxy").status == 200
    assert call(app, "/v1/models", root_path="/v1").status == 401, "a name that is kept, wherever it is mounted"


@pytest.mark.parametrize(
    "values",
    [
        ["Bearer wrong"],
        ["Bearer right1"],
        ["Bearer rig"],
        ["Bearer "],
        ["Bearer"],
        ["right"],
        ["Basic right"],
        ["Bearer right", "Bearer right"],
        ["Bearer \xff\xfe"],
        ["Bearer right, other"],
    ],
)
def test_what_is_not_the_key_is_refused(values: list[str]) -> None:
    headers = [("Authorization", value) for value in values]
    assert call(ApiKeys(reads_all, ["right", "other"]), "/v1/models", headers=headers).status == 401


def test_the_name_of_the_scheme_has_no_case() -> None:
    app = ApiKeys(reads_all, ["right"])
    for value in ("bearer right", "BEARER right", "Bearer  right"):
        assert call(app, "/v1/models", headers=[("Authorization", value)]).status == 200, value


def test_a_key_may_be_any_text() -> None:
    key = "schlüssel"
    sent = f"Bearer {key}".encode().decode("latin-1")  # headers are bytes
    assert call(ApiKeys(reads_all, [key]), "/v1/models", headers=[("Authorization", sent)]).status == 200


def test_all_keys_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = []
    real = hmac.compare_digest

    def watched(first: bytes, second: bytes) -> bool:
        lengths.append((len(first), len(second)))
        return real(first, second)

    monkeypatch.setattr(hmac, "compare_digest", watched)
    app = ApiKeys(reads_all, ["right", "a longer one"])
    for key in ("right", "wrong", ""):
        lengths.clear()
        call(app, "/v1/models", headers=[("Authorization", f"Bearer {key}")])
        assert lengths == [(32, 32), (32, 32)]


@pytest.mark.parametrize("keys", [[""], ["right", " "]])
def test_an_empty_key_is_refused_at_the_start(keys: list[str]) -> None:
    with pytest.raises(ConfigError, match="API key is empty"):
        ApiKeys(reads_all, keys)


# Bodies


@pytest.mark.parametrize("size", [0, 9, 10])
def test_a_body_up_to_the_limit_is_read(size: int) -> None:
    headers = [("Content-Length", str(size))]
    assert call(BodyLimit(reads_all, 10), body=b"x" * size, headers=headers).body == str(size).encode()
    assert call(BodyLimit(reads_all, 10), body=b"x" * size, headers=[("Content-Length", f"000{size}")]).status == 200
    parts = [b"x"] * size or [b""]
    assert call(BodyLimit(reads_all, 10), body=parts).body == str(size).encode()


@pytest.mark.parametrize("length", ["11", "0011", "9" * 5000])
def test_a_larger_one_is_refused_by_its_length_before_anything_is_read(length: str) -> None:
    answer = call(BodyLimit(reads_all, 10), body=b"x" * 11, headers=[("Content-Length", length)])
    assert (answer.status, answer.num_received, answer.header("Connection")) == (413, 0, "close")
    assert answer.error["type"] == "invalid_request_error"
    assert "10 bytes" in answer.error["message"]


@pytest.mark.parametrize("length", [None, "2", "-1", "1e9", "²"])
def test_a_body_whose_length_is_not_said_or_not_true_is_refused_while_it_is_read(length: str | None) -> None:
    headers = [] if length is None else [("Content-Length", length)]
    answer = call(BodyLimit(reads_all, 10), body=[b"x" * 4] * 100, headers=headers)
    assert (answer.status, answer.num_received) == (413, 3)


@pytest.mark.parametrize("path", ["/reads", "/v1/parses"])
def test_an_application_that_makes_something_else_of_it_is_overruled(path: str) -> None:
    """FastAPI answers 400 to whatever goes wrong while it reads a body."""
    headers = [("Content-Type", "application/json"), ("Authorization", "Bearer k")]
    answer = call(served_app(), path, method="POST", body=[b'{"a": ', b"1234567}"], headers=headers)
    assert (answer.status, answer.header("Connection")) == (413, "close")
    assert "10 bytes" in answer.error["message"]
    assert answer.header("X-Request-Id") is not None


def test_an_answer_that_has_begun_is_not_answered_again() -> None:
    async def begins_first(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await receive()

    with pytest.raises(Exception, match="larger than 1 bytes"):
        call(BodyLimit(begins_first, 1), body=b"12")


def test_an_error_of_another_kind_passes() -> None:
    async def fails(scope: Scope, receive: Receive, send: Send) -> None:
        raise KeyError("planted")

    with pytest.raises(KeyError, match="planted"):
        call(BodyLimit(fails, 1))


def test_a_limit_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        BodyLimit(reads_all, 0)


# All of them


@pytest.mark.parametrize("around", MIDDLEWARES)
@pytest.mark.parametrize("kind", ["websocket", "lifespan"])
def test_other_scopes_pass_untouched(around: Callable[[ASGIApp], ASGIApp], kind: str) -> None:
    seen: list[object] = []

    async def inner(*parts: object) -> None:
        seen.extend(parts)

    async def receive() -> Message:
        raise AssertionError

    async def send(message: Message) -> None:
        raise AssertionError

    scope = {"type": kind, "path": "/v1/models", "headers": []}
    asyncio.run(around(inner)(scope, receive, send))  # type: ignore[arg-type]
    assert len(seen) == 3 and seen[0] is scope and seen[1] is receive and seen[2] is send
    assert scope == {"type": kind, "path": "/v1/models", "headers": []}


@pytest.mark.parametrize("around", MIDDLEWARES)
def test_a_stream_passes_piece_by_piece_and_its_reader_s_end_is_seen(around: Callable[[ASGIApp], ASGIApp]) -> None:
    """Each piece is with the client before the next is made, and a client that leaves is noticed at once."""
    log: list[str] = []

    async def stream(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for index in range(3):
            log.append(f"made {index}")
            await send({"type": "http.response.body", "body": str(index).encode(), "more_body": True})
        log.append((await receive())["type"])

    async def scenario() -> None:
        coming = iter([{"type": "http.request", "body": b"", "more_body": False}, {"type": "http.disconnect"}])

        async def receive() -> Message:
            return next(coming)

        async def send(message: Message) -> None:
            if message["type"] == "http.response.body":
                log.append(f"sent {message['body'].decode()}")

        scope = {
            "type": "http",
            "path": "/v1/x",
            "method": "POST",
            "headers": [(b"authorization", b"Bearer k")],
        }
        await around(stream)(scope, receive, send)

    asyncio.run(scenario())
    assert log == ["made 0", "sent 0", "made 1", "sent 1", "made 2", "sent 2", "http.disconnect"]
