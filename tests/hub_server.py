"""A small HTTP server that speaks as much of the hub's API as a download needs.

    GET  /api/models/OWNER/NAME/revision/REVISION     the commit behind a branch, tag or commit
    GET  /api/models/OWNER/NAME/tree/COMMIT           files with sizes and digests
    HEAD /OWNER/NAME/resolve/COMMIT/FILE              ETag, size, commit
    GET  the same                                     content, also by Range

Files of a megabyte's name and weights have SHA-256 digests, as the hub keeps them in large-file storage; the others are
git blobs. A repository may be gated, and the server may break off, stall or fail.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

_LARGE = (".safetensors", ".gguf", ".bin", ".pt")


@dataclass
class Repository:
    """Files at commits, and branches that point at them."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    needs_token: str | None = None  # gated: only who has it may read

    def commit(self, files: Mapping[str, bytes], branch: str = "main") -> str:
        """Make a commit of whole contents, and move a branch to it."""
        sha = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        self.commits[sha] = dict(files)
        self.branches[branch] = sha
        return sha

    def find(self, revision: str) -> str | None:
        """The commit behind a name."""
        return revision if revision in self.commits else self.branches.get(revision)


@dataclass
class Hub:
    """What the server holds, how it misbehaves, and what it was asked."""

    repositories: dict[str, Repository] = field(default_factory=dict)
    status: int | None = None  # answers everything with it
    breaks_behind: int | None = None  # bytes of weights after which a connection ends
    stall: threading.Event | None = None  # weights stop half-way until it is set
    stalled: threading.Event = field(default_factory=threading.Event)
    requests: list[str] = field(default_factory=list)  # "GET path range", and the bytes that went out
    num_bytes: int = 0
    url: str = ""

    def add(self, name: str, files: Mapping[str, bytes], branch: str = "main") -> str:
        """A commit of a repository, which is made if it is new."""
        return self.repositories.setdefault(name, Repository()).commit(files, branch)

    def asked(self, method: str, part: str) -> list[str]:
        """Requests of a kind."""
        return [request for request in self.requests if request.startswith(f"{method} ") and part in request]


def files_of(folder: Path) -> dict[str, bytes]:
    """A folder as the content of a repository."""
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def digest_of(name: str, content: bytes) -> str:
    """As the hub tells it in an ETag."""
    if name.endswith(_LARGE):
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()


@contextmanager
def serve_hub() -> Iterator[Hub]:
    """Run the server on a port of its own."""
    hub = Hub()

    class Handler(_Handler):
        held = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        if hub.stall is not None:
            hub.stall.set()
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    held: Hub
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # headers and body are two packets, and the second waited 40 ms

    def log_message(self, format: str, *args: object) -> None:
        """Tests read `Hub.requests`."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        hub, path = self.held, unquote(urlsplit(self.path).path)
        hub.requests.append(f"{self.command} {path} {self.headers.get('Range', '')}".strip())
        if hub.status is not None:
            return self._refuse(hub.status, "", "out of order")
        is_api = path.startswith("/api/models/")
        owner, name, *rest = path.removeprefix("/api/models" if is_api else "").strip("/").split("/")
        repository = hub.repositories.get(f"{owner}/{name}")
        if repository is None:
            return self._refuse(404 if self.headers.get("Authorization") else 401, "RepoNotFound", "not found")
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if repository.needs_token is not None and token != repository.needs_token and not (is_api and len(rest) < 3):
            return self._refuse(403 if token else 401, "GatedRepo", "ask for access")
        revision = rest[1] if len(rest) > 1 else "main"
        commit = repository.find(revision)
        if commit is None:
            return self._refuse(404, "RevisionNotFound", "no such revision")
        files = repository.commits[commit]
        if not is_api:
            return self._send_file("/".join(rest[2:]), files, commit)
        if rest[:1] == ["tree"]:
            return self._send_json([_entry(name, content) for name, content in files.items()])
        return self._send_json({"id": f"{owner}/{name}", "sha": commit, "siblings": []})

    def _send_json(self, value: object) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _send_file(self, name: str, files: Mapping[str, bytes], commit: str) -> None:
        if name not in files:
            return self._refuse(404, "EntryNotFound", "no such file")
        content, hub = files[name], self.held
        start = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").split("-")[0])
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.send_header("ETag", f'"{digest_of(name, content)}"')
        self.send_header("X-Repo-Commit", commit)
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        if self.command == "HEAD":
            return
        end = len(content)
        if name.endswith(_LARGE):
            if hub.breaks_behind is not None and start < hub.breaks_behind < end:
                end = hub.breaks_behind
            if hub.stall is not None:
                self._write(content[start : end // 2])
                start = end // 2
                hub.stalled.set()
                hub.stall.wait(60)
        self._write(content[start:end])
        self.close_connection = self.close_connection or end < len(content)

    def _write(self, content: bytes) -> None:
        try:
            self.wfile.write(content)
            self.wfile.flush()
            self.held.num_bytes += len(content)
        except OSError:  # whoever asked has gone
            self.close_connection = True

    def _refuse(self, status: int, code: str, message: str) -> None:
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", message)
        self.send_header("Content-Length", "0")
        self.end_headers()


def _entry(name: str, content: bytes) -> dict[str, object]:
    entry: dict[str, object] = {"type": "file", "path": name, "size": len(content), "oid": "0" * 40}
    if name.endswith(_LARGE):
        entry["lfs"] = {"oid": digest_of(name, content), "size": len(content), "pointerSize": 130}
    else:
        entry["oid"] = digest_of(name, content)
    return entry


def ask(hub: Hub, monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    """Let huggingface_hub, which read the environment when it was imported, ask this server and cache below `home`."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
