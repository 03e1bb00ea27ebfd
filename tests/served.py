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
from tests.tiny import EOS_ID, VOCAB_SIZE, loaded
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from paceline.checkpoint.generation_defaults import SamplingDefaults
from paceline.checkpoint.tokenizer import TextTokenizer
from paceline.engine.engine import Engine, EngineSettings
from paceline.models.loading import LoadedDrafter, LoadedTarget
from paceline.serving.app import create_app
from paceline.serving.model import OpenModel, ServedModel
from paceline.serving.server import ServerOptions
from paceline.serving.token_texts import byte_of_character

NAME = "tiny/qwen3"
MAX_MODEL_LEN = 512
TEMPLATE = (
    "{% if tools %}<|system|>{% for tool in tools %}{{ tool.function | tojson }}{% endfor %} <tool_call>{% endif %}"
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if mood %}({{ mood }}){% endif %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_SPECIAL = ("<|begin|>", "<|unused|>", "<|end|>", "<|mask|>", "<|user|>", "<|assistant|>", "<|system|>")
assert _SPECIAL[EOS_ID] == "<|end|>"


@functools.cache
def byte_level_tokenizer(template: str = TEMPLATE) -> TextTokenizer:
    """Special tokens, every byte, and pairs of letters, which leave parts of characters to single bytes."""
    characters = {byte: character for character, byte in byte_of_character().items()}
    tokens = [*_SPECIAL, *(characters[byte] for byte in range(256))]
    letters = "etaoinshrdlu"
    merges = [(one, other) for one in letters for other in letters]
    tokens += ["".join(pair) for pair in merges]
    tokens += [f"<filler-{index}>" for index in range(VOCAB_SIZE - len(tokens))]
    backend = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _SPECIAL])
    return TextTokenizer(
        backend, chat_template=template or None, special_tokens={"eos_token": "<|end|>"}, origin="tests/served"
    )


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
