"""A client for one ASGI call: what is sent is given message by message, and what comes back is kept."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp, Message, Scope


@dataclass
class Answer:
    """What an application sent, and how much of the body it took."""

    messages: list[Message] = field(default_factory=list)
    num_received: int = 0

    @property
    def status(self) -> int:
        return int(self._start["status"])

    @property
    def headers(self) -> list[tuple[str, str]]:
        return [(name.decode("latin-1"), value.decode("latin-1")) for name, value in self._start["headers"]]

    def header(self, name: str) -> str | None:
        """Its only value; None where it is not there."""
        values = [value for key, value in self.headers if key.lower() == name.lower()]
        assert len(values) < 2, values
        return values[0] if values else None

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages[1:])

    @property
    def error(self) -> dict[str, Any]:
        parsed = json.loads(self.body)
        assert list(parsed) == ["error"] and list(parsed["error"]) == ["message", "type", "param", "code"]
        assert parsed["error"]["code"] == self.status
        return dict(parsed["error"])

    @property
    def _start(self) -> Message:
        assert [message["type"] for message in self.messages].count("http.response.start") == 1
        assert self.messages[0]["type"] == "http.response.start"
        return self.messages[0]


def call(
    app: ASGIApp,
    path: str = "/",
    *,
    method: str = "GET",
    headers: Iterable[tuple[str, str]] = (),
    body: bytes | Sequence[bytes] = b"",
    root_path: str = "",
    scope: Scope | None = None,
) -> Answer:
    """Call an application once; the client stays until it was answered.

    Args:
        app: to call.
        path: as the server decoded it.
        method: of the request.
        headers: as they are; no length is added.
        body: in as many messages as it has parts.
        root_path: where the application is mounted.
        scope: filled, for a look at it behind the call.
    """
    chunks = [body] if isinstance(body, bytes) else list(body)
    scope = {} if scope is None else scope
    scope |= {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "scheme": "http",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "root_path": root_path,
        "query_string": b"",
        "server": ("test", 80),
        "client": ("test", 1),
        "headers": [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers],
    }
    answer = Answer()

    async def receive() -> Message:
        index, answer.num_received = answer.num_received, answer.num_received + 1
        if index < len(chunks):
            return {"type": "http.request", "body": chunks[index], "more_body": index < len(chunks) - 1}
        await asyncio.sleep(3600)
        raise AssertionError("nobody waits so long")

    async def send(message: Message) -> None:
        answer.messages.append(dict(message))

    asyncio.run(app(scope, receive, send))
    return answer
