"""A tiny model behind the real server: byte-level tokens, a chat template, uvicorn in a thread, a real port."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx2
import uvicorn
from tests.byte_level import byte_level_tokenizer
from tests.tiny import loaded

from paceline.checkpoint.generation_defaults import SamplingDefaults
from paceline.engine.engine import Engine, EngineSettings
from paceline.models.loading import LoadedDrafter, LoadedTarget
from paceline.serving.app import create_app
from paceline.serving.model import OpenModel, ServedModel
from paceline.serving.server import ServerOptions

NAME = "tiny/qwen3"
MAX_MODEL_LEN = 512


@functools.cache
def models_of(drafter_family: Any = "dflash") -> tuple[LoadedTarget, LoadedDrafter]:
    """A pair with that tokenizer, in row-invariant arithmetic."""
    return loaded("qwen3", tokenizer=byte_level_tokenizer(), drafter_family=drafter_family)


def make_engine(*, with_drafter: bool = True, template: str | None = None, **settings: Any) -> Engine:
    """An engine of the pair."""
    target, drafter = models_of()
    if template is not None:
        target = dataclasses.replace(target, tokenizer=byte_level_tokenizer(template))
    values = {"max_num_seqs": 4, "max_model_len": MAX_MODEL_LEN} | settings
    return Engine(target, drafter if with_drafter else None, EngineSettings(**values))


def opener(
    make: Callable[[], Any] = make_engine, *, template: str | None = None, defaults: SamplingDefaults | None = None
) -> OpenModel:
    """What a server loads."""

    def open_model() -> tuple[ServedModel, Any]:
        engine = make()
        target, drafter = models_of()
        model = ServedModel(
            name=NAME,
            root="tests/served",
            draft_name="tests/drafter",
            tokenizer=target.tokenizer if template is None else byte_level_tokenizer(template),
            stop_token_ids=target.contract.stop_token_ids,
            vocab_size=target.contract.vocab_size,
            max_model_len=MAX_MODEL_LEN,
            num_draft_tokens=drafter.num_draft_tokens,
            defaults=defaults or SamplingDefaults(temperature=0.0),
            facts={"target": {"name": NAME}},
        )
        return model, engine

    return open_model


@dataclasses.dataclass
class Running:
    """A server that runs.

    Attributes:
        url: without a path.
        server: of uvicorn.
        client: that talks to it.
    """

    url: str
    server: uvicorn.Server
    client: httpx2.Client


@contextlib.contextmanager
def running(open_model: OpenModel | None = None, *, waits: bool = True, **options: Any) -> Iterator[Running]:
    """Run a server until the end of the block; by default it is ready when the block begins."""
    app = create_app(open_model or opener(), ServerOptions(**({"checks_at_start": False} | options)))
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="on", timeout_graceful_shutdown=10))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, name="tests-server")
    thread.start()
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    try:
        with httpx2.Client(base_url=url, timeout=60) as client:
            if waits:
                await_status(client, "/health", 200)
            yield Running(url, server, client)
    finally:
        server.should_exit = True
        thread.join(30)
        listening.close()
    assert not thread.is_alive(), "the server does not end"


def await_status(client: httpx2.Client, path: str, status: int, *, patience_s: float = 30) -> None:
    """Ask until the answer has this status."""
    deadline_s = time.monotonic() + patience_s
    while client.get(path).status_code != status:
        assert time.monotonic() < deadline_s, f"{path} does not get to {status}"
        time.sleep(0.01)
