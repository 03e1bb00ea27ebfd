"""Who may ask, how much, and under which name: what surrounds the application, each part a plain ASGI application.

None of them holds back a byte of an answer or stands between a stream and the end of its reader. `RequestIds` belongs
around the others, so that their refusals carry the id, too. Websockets and the application's own start and end pass.
"""

from __future__ import annotations

import hashlib
import hmac
import uuid
from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.errors import ConfigError
from paceline.serving.failures import TooLargeError, UnauthorizedError, failure_response

REQUEST_ID = "X-Request-Id"
LONGEST_ID = 128
_KEPT_PATHS = frozenset({"/v1", "/tokenize", "/detokenize", "/server_info"})


class RequestIds:
    """Gives each request an id, its client's own where it sends a usable one, and says it with every answer.

    Others read it as `scope["state"]["request_id"]`.

    Args:
        app: what is inside.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        sent = Headers(scope=scope).get(REQUEST_ID, "")
        is_usable = 1 <= len(sent) <= LONGEST_ID and all("!" <= character <= "~" for character in sent)
        request_id = sent if is_usable else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REQUEST_ID] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)


class ApiKeys:
    """Asks for a bearer key wherever text is made or told of: under /v1, /tokenize, /detokenize and /server_info.

    Args:
        app: what is inside.
        keys: any of them will do; without any, nobody is asked.

    Raises:
        ConfigError: a key is empty.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        if not all(key.strip() for key in keys):
            raise ConfigError("an API key is empty; everybody would have it")
        self._app = app
        # Compared are digests, which have one length whatever the key's.
        self._digests = [_digest(key.encode("utf-8", "surrogateescape")) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_asked = scope["type"] == "http" and self._digests and scope["method"] != "OPTIONS" and _is_kept(scope)
        if is_asked and not self._knows(Headers(scope=scope)):
            error = UnauthorizedError(
                "this needs an API key that the server knows", hint="the header Authorization: Bearer KEY"
            )
            await failure_response(error)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _knows(self, headers: Headers) -> bool:
        values = headers.getlist("Authorization")
        if len(values) != 1:
            return False
        scheme, _, key = values[0].partition(" ")
        given = _digest(key.strip(" ").encode("latin-1"))
        # All are compared, so that the time does not tell which one it was.
        is_known = [hmac.compare_digest(given, digest) for digest in self._digests]
        return scheme.lower() == "bearer" and any(is_known)


class BodyLimit:
    """Refuses bodies that are too large: at once where their length is said, else while they are read.

    Args:
        app: what is inside.
        max_bytes: of a body.

    Raises:
        ConfigError: no body would be small enough.
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        if max_bytes < 1:
            raise ConfigError(f"the largest body is {max_bytes} bytes; it has to be at least 1")
        self._app, self._max_bytes = app, max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        said = Headers(scope=scope).get("Content-Length", "")
        if said.isascii() and said.isdecimal() and _exceeds(said, self._max_bytes):
            await self._refuse(scope, receive, send)
            return
        num_bytes, is_too_large, has_begun = 0, False, False

        async def receive_counted() -> Message:
            nonlocal num_bytes, is_too_large
            message = await receive()
            if message["type"] == "http.request":
                num_bytes += len(message.get("body", b""))
                if num_bytes > self._max_bytes:
                    is_too_large = True
                    raise self._error()
            return message

        async def send_unless_refused(message: Message) -> None:
            nonlocal has_begun
            if is_too_large and not has_begun:
                return  # what the application makes of a body that ends in an error is not told
            has_begun = True
            await send(message)

        try:
            await self._app(scope, receive_counted, send_unless_refused)
        except Exception:
            if not is_too_large or has_begun:
                raise
        if is_too_large and not has_begun:
            await self._refuse(scope, receive, send)

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = failure_response(self._error())
        response.headers["Connection"] = "close"  # the rest of the body is not read, and no request can follow it
        await response(scope, receive, send)

    def _error(self) -> TooLargeError:
        return TooLargeError(f"the body is larger than {self._max_bytes} bytes, which is as much as the server reads")


def _is_kept(scope: Scope) -> bool:
    """Whether a path needs a key, with or without what a proxy put before it."""
    path, root = scope["path"], scope.get("root_path", "")
    return any(
        name == kept or name.startswith(f"{kept}/") for name in (path, path.removeprefix(root)) for kept in _KEPT_PATHS
    )


def _exceeds(digits: str, limit: int) -> bool:
    """Whether a number is larger; it may have more digits than Python reads."""
    digits = digits.lstrip("0")
    return len(digits) > len(str(limit)) or int(digits or "0") > limit


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
