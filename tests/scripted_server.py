"""A server that says exactly what a test tells it to, faults included: raw bytes for each request, over a real port."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


def chunk(text: str | None = None, **fields: Any) -> bytes:
    """A frame of a stream of completions; without a text it has no choice."""
    choices = [] if text is None else [{"index": 0, "text": text, "finish_reason": fields.pop("finish_reason", None)}]
    return b"data: " + json.dumps({"choices": choices, **fields}).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


def usage(num_prompt_tokens: int, num_tokens: int) -> dict[str, int]:
    return {"prompt_tokens": num_prompt_tokens, "completion_tokens": num_tokens}


def whole_stream(text: str = "ab", num_tokens: int = 2, **fields: Any) -> list[bytes]:
    """A sound answer of two deltas, which both hold half of the text."""
    half = len(text) // 2
    end = [chunk("", finish_reason="length"), chunk(usage=usage(3, num_tokens), **fields), DONE]
    return [chunk(text[:half]), chunk(text[half:]), *end]


@dataclass
class Reply:
    """What is sent: a status, frames of a stream or one body; or the connection is cut where `frames` end."""

    frames: Sequence[bytes] = ()
    status: int = 200
    body: object = None
    is_cut: bool = False


@dataclass
class Scripted:
    """A server that runs.

    Attributes:
        url: without a path.
        asked: path and body of each request for an answer, in order.
        headers: of the last request.
    """

    url: str
    asked: list[tuple[str, Any]] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)


@contextlib.contextmanager
def scripted(
    reply: Callable[[int], Reply],
    *,
    models: Sequence[str] = ("tiny",),
    metrics: Callable[[int], str | None] = lambda _: None,
) -> Iterator[Scripted]:
    """Run a server until the end of the block.

    Args:
        reply: to the n-th request for an answer, from 0.
        models: that it lists.
        metrics: answer to /metrics after n requests; None has none.
    """
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            return

        def do_GET(self) -> None:
            if self.path == "/v1/models":
                self._send(200, json.dumps({"data": [{"id": name} for name in models]}).encode())
            elif self.path == "/metrics" and metrics(len(found.asked)) is not None:
                self._send(200, (metrics(len(found.asked)) or "").encode())
            else:
                self._send(404, b"{}")

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                found.asked.append((self.path, body))
                number = len(found.asked) - 1
            found.headers = dict(self.headers)
            told = reply(number)
            if told.body is not None:
                self._send(told.status, json.dumps(told.body).encode())
                return
            self.send_response(told.status)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for frame in told.frames:
                self.wfile.write(b"%x\r\n%s\r\n" % (len(frame), frame))
                self.wfile.flush()
            if told.is_cut:
                self.close_connection = True
                return
            self.wfile.write(b"0\r\n\r\n")

        def _send(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: object) -> None:
            return  # clients that leave are what some tests are about

    server = Server(("127.0.0.1", 0), Handler)
    found = Scripted(f"http://127.0.0.1:{server.server_address[1]}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield found
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
