"""Every failure in one form, with the status that fits and nothing that is not the client's business."""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Sequence
from typing import Annotated

import pytest
from fastapi import FastAPI, HTTPException, Query, Response
from fastapi.testclient import TestClient
from pydantic import BaseModel

import paceline.errors
from paceline.errors import (
    CapacityError,
    CheckpointError,
    ConfigError,
    EngineClosedError,
    EngineDeadError,
    EngineFaultError,
    MissingExtraError,
    NumericError,
    OfflineError,
    PacelineError,
    QueueFullError,
    RequestError,
    ShapeError,
)
from paceline.serving.failures import (
    TooLargeError,
    UnauthorizedError,
    UnknownModelError,
    error_body,
    failure_response,
    install_failures,
)

SECRET = "planted-secret"


class Question(BaseModel):
    n: int
    stop: str | list[str] | None = None


class NamedError(RequestError):
    param = "top_p"


def failing_app(*, debug: bool = False) -> FastAPI:
    app = FastAPI()
    install_failures(app, debug=debug)

    @app.post("/ask")
    async def ask(question: Question, limit: Annotated[int, Query()] = 1) -> int:
        return question.n + limit

    @app.get("/raises/{name}")
    async def raises(name: str) -> None:
        raise ERRORS[name]

    @app.get("/sync")
    def sync() -> None:
        raise RequestError("from a thread")

    return app


ERRORS: dict[str, Exception] = {
    "request": RequestError("top_k is -5; it has to be at least 0", origin={"file": SECRET}, hint="top_k=0"),
    "full": QueueFullError("5 requests wait", hint="the same request later"),
    "bug": ZeroDivisionError(SECRET),
    "teapot": HTTPException(418, "short and stout", headers={"X-Pot": "tea"}),
    "unchanged": HTTPException(304, headers={"ETag": '"a"'}),
    "empty": HTTPException(400),
}


@pytest.fixture
def client() -> TestClient:
    return TestClient(failing_app(), raise_server_exceptions=False)


def error_of(response: object) -> dict[str, object]:
    """The parsed error, whose form is checked."""
    status, body = response.status_code, response.json()  # type: ignore[attr-defined]
    assert list(body) == ["error"] and list(body["error"]) == ["message", "type", "param", "code"]
    assert body["error"]["code"] == status
    return dict(body["error"])


# One error


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (RequestError("a"), 400, "invalid_request_error"),
        (ConfigError("a"), 400, "invalid_request_error"),
        (UnauthorizedError("a"), 401, "authentication_error"),
        (UnknownModelError("a", known="b"), 404, "NotFoundError"),
        (HTTPException(405, "a"), 405, "invalid_request_error"),
        (TooLargeError("a"), 413, "invalid_request_error"),
        (QueueFullError("a"), 429, "rate_limit_error"),
        (CapacityError("a"), 429, "rate_limit_error"),
        (EngineClosedError("a"), 503, "service_unavailable_error"),
        (EngineDeadError("a"), 503, "service_unavailable_error"),
        (OfflineError("a"), 503, "service_unavailable_error"),
        (CheckpointError("a"), 500, "server_error"),
        (NumericError("a"), 500, "server_error"),
        (RuntimeError("a"), 500, "server_error"),
        (HTTPException(502, "a"), 502, "server_error"),
    ],
)
def test_statuses_and_types_are_those_of_the_table(error: Exception, status: int, kind: str) -> None:
    response = failure_response(error)
    assert response.status_code == status
    body = json.loads(bytes(response.body))
    assert body == error_body(error)
    assert (body["error"]["type"], body["error"]["code"]) == (kind, status)
    assert ("retry-after" in response.headers) == (status == 429)
    assert ("www-authenticate" in response.headers) == (status == 401)


def test_what_is_wrong_with_a_request_is_told_with_its_hint_and_without_its_origin() -> None:
    told = error_body(ERRORS["request"])["error"]
    assert told["message"] == "top_k is -5; it has to be at least 0. Try: top_k=0"
    assert error_body(RequestError("no hint", origin={"file": SECRET}))["error"]["message"] == "no hint"


def test_an_error_may_name_its_field() -> None:
    assert error_body(NamedError("a"))["error"]["param"] == "top_p"
    assert error_body(UnknownModelError("a", known="b"))["error"]["param"] == "model"
    assert error_body(RequestError("a"))["error"]["param"] is None


def test_an_unknown_model_is_told_of_the_one_that_is_there() -> None:
    told = error_body(UnknownModelError("x" * 10_000, known="qwen"))["error"]
    assert "'qwen'" in told["message"] and len(told["message"]) < 300


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(SECRET),
        CheckpointError(SECRET, origin={SECRET: SECRET}, hint=SECRET),
        ShapeError(SECRET, expected=SECRET, found=[1]),
        EngineFaultError(SECRET),
        MissingExtraError(SECRET),
        OfflineError(SECRET),
        NumericError("a number", origin={SECRET: SECRET}, hint=SECRET),
    ],
)
def test_faults_of_ours_are_for_the_log(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    try:
        raise error
    except Exception as raised:
        with caplog.at_level(logging.ERROR, "paceline"):
            told = error_body(raised, request_id="req-7")["error"]
    assert SECRET not in json.dumps(told)
    (record,) = caplog.records
    assert "req-7" in record.getMessage() and type(error).__name__ in record.getMessage()
    assert record.exc_info is not None and record.exc_info[1] is error and record.exc_info[2] is not None
    assert SECRET in caplog.text
    assert SECRET in error_body(error, debug=True)["error"]["message"] + caplog.text


def test_debug_tells_clients_too() -> None:
    told = error_body(RuntimeError(SECRET), debug=True)["error"]
    assert told["message"] == f"RuntimeError: {SECRET}"
    assert told["code"] == 500


@pytest.mark.parametrize(
    "error",
    [RequestError("a"), QueueFullError("a"), HTTPException(404), EngineClosedError("a"), EngineDeadError("a")],
)
def test_what_is_no_fault_of_ours_or_was_told_before_is_not_logged(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    """A client could fill the log, and a dead engine has said of what it died."""
    error_body(error)
    assert not caplog.records


def test_a_request_that_ended_in_an_error_is_told_why() -> None:
    assert error_body(NumericError("logits held NaN"))["error"]["message"] == "logits held NaN"


def test_an_engine_that_ended_says_so_without_hints_for_programs() -> None:
    closed = error_body(EngineClosedError("the engine is stopping", hint="AsyncEngine.start()"))["error"]
    assert closed["message"] == "the engine is stopping"
    dead = error_body(EngineDeadError(f"the engine is dead: KeyError: {SECRET}"))["error"]
    assert SECRET not in dead["message"] and "started again" in dead["message"]


def test_every_error_of_ours_has_an_answer() -> None:
    found: Sequence[type[PacelineError]] = [
        kind
        for _, kind in inspect.getmembers(paceline.errors, inspect.isclass)
        if issubclass(kind, PacelineError) and kind is not ShapeError
    ]
    assert len(found) > 10
    for kind in found:
        response = failure_response(kind("a message"))
        assert response.status_code == kind.http_status


@pytest.mark.parametrize("text", ["half \ud800 pair", "\udcff"])
def test_text_that_is_no_utf_8_can_be_told(text: str) -> None:
    assert failure_response(RequestError(text)).body
    assert failure_response(HTTPException(400, text)).body


# An application


def test_handlers_answer_in_the_form(client: TestClient) -> None:
    told = error_of(client.get("/raises/request"))
    assert told["message"] == "top_k is -5; it has to be at least 0. Try: top_k=0"
    response = client.get("/raises/full")
    assert (response.status_code, response.headers["Retry-After"]) == (429, "1")
    assert error_of(client.get("/sync"))["message"] == "from a thread"
    response = client.get("/raises/bug")
    assert SECRET not in str(error_of(response)) and response.status_code == 500
    response = client.get("/raises/teapot")
    assert (error_of(response)["message"], response.headers["X-Pot"]) == ("short and stout", "tea")
    assert error_of(client.get("/raises/empty"))["message"] == "Bad Request"
    response = client.get("/raises/unchanged")
    assert (response.status_code, response.content, response.headers["ETag"]) == (304, b"", '"a"')


def test_an_application_that_debugs_tells_clients() -> None:
    client = TestClient(failing_app(debug=True), raise_server_exceptions=False)
    assert error_of(client.get("/raises/bug"))["message"] == f"ZeroDivisionError: {SECRET}"


def test_paths_and_methods_that_are_not_there(client: TestClient) -> None:
    told = error_of(client.get("/nowhere"))
    assert (told["code"], told["type"], told["message"]) == (404, "NotFoundError", "there is nothing at /nowhere")
    response = client.get("/ask")
    assert (response.status_code, response.headers["Allow"]) == (405, "POST")
    assert error_of(response)["message"] == "/ask does not take GET; it takes POST"
    assert len(str(error_of(client.get("/" + "x" * 5000))["message"])) < 300


@pytest.mark.parametrize(
    ("content", "kind", "param", "part"),
    [
        (b'{"n": "a"}', "application/json", "n", 'n is "a"; it has to be an integer'),
        (b"{}", "application/json", "n", "n is missing; it has to be given"),
        (b'{"n": 1, "stop": ["a", 2]}', "application/json", "stop[1]", "stop[1] is 2; it has to be a string"),
        (b"[1]", "application/json", None, "the body is an array; it has to be an object"),
        (b'{"n": }', "application/json", None, "the body is not valid JSON: expecting value at character 6"),
        (b"", "application/json", None, "the request has no body; send a JSON object"),
        (b'{"n": "\xff"}', "application/json", None, "the body is not valid JSON: it is not UTF-8"),
        (b"[" * 100_000, "application/json", None, "the body is nested too deeply"),
        (b'{"n": ' + b"1" * 5000 + b"}", "application/json", None, "a number has too many digits"),
        (b'{"n": 1}', "text/plain", None, "its Content-Type has to be application/json"),
        (b"n=1", "application/x-www-form-urlencoded", None, "its Content-Type has to be application/json"),
    ],
)
def test_bodies_that_cannot_be_read_are_400(
    client: TestClient, content: bytes, kind: str, param: str | None, part: str
) -> None:
    response = client.post("/ask", content=content, headers={"Content-Type": kind})
    told = error_of(response)
    assert (response.status_code, told["type"], told["param"]) == (400, "invalid_request_error", param)
    assert part in str(told["message"])
    assert "pydantic" not in response.text


def test_parameters_of_the_address_are_400_too(client: TestClient) -> None:
    told = error_of(client.post("/ask?limit=a", json={"n": 1}))
    assert (told["param"], told["message"]) == ("limit", 'limit is "a"; it has to be an integer')
    assert client.post("/ask?limit=2", json={"n": 1}).json() == 3


def test_half_a_surrogate_pair_in_a_body_is_told_and_no_fault_of_ours(client: TestClient) -> None:
    body = b'{"n": "\\ud800", "stop": {"\\udfff": 1}}'
    response = client.post("/ask", content=body, headers={"Content-Type": "application/json"})
    assert (response.status_code, error_of(response)["param"]) == (400, "n")


def test_other_answers_are_left_alone() -> None:
    app = failing_app()

    @app.get("/fine")
    async def fine() -> Response:
        return Response("fine", 202)

    response = TestClient(app).get("/fine")
    assert (response.status_code, response.text) == (202, "fine")
