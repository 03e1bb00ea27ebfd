"""What a client is told when something fails: one form for all of it, in an answer or in the middle of a stream.

    {"error": {"message": "top_p is 2; ...", "type": "invalid_request_error", "param": "top_p", "code": 400}}

| status | type | when |
| --- | --- | --- |
| 400, 405, 413 | `invalid_request_error` | a value, a body, a method or a size that cannot be served |
| 401 | `authentication_error` | no key, or one that is not known |
| 404 | `NotFoundError` | a path or a model that is not there |
| 429 | `rate_limit_error` | too many requests wait; `Retry-After` says when to come again |
| 503 | `service_unavailable_error` | the model is being loaded, or the engine has ended |
| 500 | `server_error` | a fault of ours, of which the log tells more than the client |

`code` repeats the status. `param` is the field at fault, with dots between names and indices in brackets, or null.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from paceline.errors import EngineClosedError, EngineDeadError, NumericError, PacelineError, RequestError, shown
from paceline.serving.body_faults import say_faults

RETRY_AFTER_S = 1  # a step takes far less, and nobody knows when an answer will be done
_TYPES = {401: "authentication_error", 404: "NotFoundError", 429: "rate_limit_error", 503: "service_unavailable_error"}
_HIDDEN = "the server failed at this request, and not because of what was asked; its log says why"
_DEAD = "the engine has failed and serves nothing until the server is started again"

_log = logging.getLogger(__name__)


class UnknownModelError(RequestError):
    """A request names a model that is not served here.

    Args:
        name: of the request.
        known: the name that is served.
    """

    http_status = 404

    def __init__(self, name: object, *, known: str) -> None:
        super().__init__(f"there is no model {shown(name)} here", hint=f"{known!r}, or leave the field out")
        self.param = "model"


class UnauthorizedError(RequestError):
    """A request brings no key, or one that is not known."""

    http_status = 401


class TooLargeError(RequestError):
    """A request's body is larger than the server reads."""

    http_status = 413


def error_body(error: Exception, *, debug: bool = False, request_id: str | None = None) -> dict[str, Any]:
    """The body that tells of an error; also the frame of one in mid-stream. Faults of ours go to the log, too.

    Args:
        error: what happened.
        debug: tell what is wrong inside the server.
        request_id: for the log.
    """
    told = _tell(error, debug=debug, request_id=request_id)
    kind = _TYPES.get(told.status, "invalid_request_error" if told.status < 500 else "server_error")
    return {"error": {"message": told.message, "type": kind, "param": told.param, "code": told.status}}


def failure_response(error: Exception, *, debug: bool = False, request_id: str | None = None) -> JSONResponse:
    """The answer that tells of an error.

    Args:
        error: what happened.
        debug: tell what is wrong inside the server.
        request_id: for the log.
    """
    body = error_body(error, debug=debug, request_id=request_id)
    status = body["error"]["code"]
    headers = dict(error.headers or {}) if isinstance(error, HTTPException) else {}
    if status == 401:
        headers.setdefault("WWW-Authenticate", "Bearer")
    if status == 429:
        headers.setdefault("Retry-After", str(RETRY_AFTER_S))
    return JSONResponse(body, status_code=status, headers=headers)


def install_failures(app: FastAPI, *, debug: bool = False) -> None:
    """Let an application answer everything that fails in the form of this file.

    Args:
        app: the application.
        debug: tell clients what is wrong inside the server.
    """

    async def answer(request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException):
            if error.status_code < 200 or error.status_code in (204, 304):  # these have no body
                return Response(status_code=error.status_code, headers=error.headers)
            error = _explained(error, request)
        request_id = request.scope.get("state", {}).get("request_id")
        response = failure_response(error, debug=debug, request_id=request_id)
        if request_id is not None:  # faults of ours are answered outside of all middlewares
            response.headers["X-Request-Id"] = request_id
        return response

    for kind in (PacelineError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, answer)


@dataclass(frozen=True)
class _Told:
    """What a client learns of an error."""

    status: int
    message: str
    param: str | None = None

    def __post_init__(self) -> None:
        # Half a surrogate pair is valid JSON, so a client may send it, and cannot be sent back as UTF-8.
        for name in ("message", "param"):
            text = getattr(self, name)
            if text is not None:
                object.__setattr__(self, name, text.encode("utf-8", "backslashreplace").decode("utf-8"))


def _tell(error: Exception, *, debug: bool, request_id: str | None) -> _Told:
    if isinstance(error, RequestValidationError):
        message, param = say_faults(error.errors(), error.body)
        return _Told(400, message, param)
    if isinstance(error, HTTPException):
        return _Told(error.status_code, str(error.detail))
    status = error.http_status if isinstance(error, PacelineError) else 500
    if status >= 500 and not isinstance(error, EngineClosedError):
        _log.error(
            "request %s failed: %s: %s", request_id or "without an id", type(error).__name__, error, exc_info=error
        )
    if status < 500 and isinstance(error, PacelineError):
        # Without its origin, which names files of the server.
        message = error.message if error.hint is None else f"{error.message}. Try: {error.hint}"
        return _Told(status, message, getattr(error, "param", None))
    if debug:
        return _Told(status, f"{type(error).__name__}: {error}")
    if isinstance(error, EngineDeadError):
        return _Told(status, _DEAD)
    if isinstance(error, EngineClosedError | NumericError):  # of the request or of the moment; hints are for programs
        return _Told(status, error.message)
    return _Told(status, _HIDDEN)


def _explained(error: HTTPException, request: Request) -> HTTPException:
    """The same with a sentence in place of the bare name of its status."""
    detail, cause = error.detail, error.__cause__
    if error.status_code == 404 and detail == HTTPStatus.NOT_FOUND.phrase:
        detail = f"there is nothing at {_shown(request.url.path)}"
    elif error.status_code == 405 and detail == HTTPStatus.METHOD_NOT_ALLOWED.phrase:
        detail = f"{_shown(request.url.path)} does not take {_shown(request.method)}{_methods(error.headers)}"
    elif error.status_code == 400 and isinstance(cause, UnicodeDecodeError):
        detail = "the body is not valid JSON: it is not UTF-8"
    elif error.status_code == 400 and isinstance(cause, RecursionError):
        detail = "the body is nested too deeply"
    elif error.status_code == 400 and isinstance(cause, ValueError):
        detail = "the body is JSON that cannot be read: a number has too many digits"
    return HTTPException(error.status_code, detail, error.headers)


def _methods(headers: Mapping[str, str] | None) -> str:
    allowed = {name.lower(): value for name, value in (headers or {}).items()}.get("allow")
    return f"; it takes {allowed}" if allowed else ""


def _shown(text: str) -> str:
    return text if len(text) <= 200 else text[:190] + " and so on"
