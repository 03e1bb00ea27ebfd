"""The application: routes, their documentation, what surrounds them, and the life of the model behind them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from fastapi import FastAPI, Request, Response
from fastapi.middleware.cors import CORSMiddleware

from paceline import __version__
from paceline.serving.access import ApiKeys, BodyLimit, RequestIds
from paceline.serving.failures import install_failures
from paceline.serving.model import OpenModel
from paceline.serving.protocol import (
    ChatCompletion,
    ChatCompletionRequest,
    Completion,
    CompletionRequest,
    Detokenized,
    DetokenizeRequest,
    ModelCard,
    ModelList,
    Tokenized,
    TokenizeRequest,
)
from paceline.serving.server import Server, ServerOptions


def create_app(
    open_model: OpenModel,
    options: ServerOptions,
    *,
    on_ready: Callable[[], None] = lambda: None,
    on_failure: Callable[[BaseException], None] = lambda _error: None,
) -> FastAPI:
    """The whole server as an ASGI application.

    It answers at once; until the model is loaded, with 503 to everything that needs it.

    Args:
        open_model: loads the model and makes its engine; called on the engine's thread.
        options: how clients are treated.
        on_ready: called once requests are served.
        on_failure: called with what prevented that.
    """
    server = Server(open_model, options)

    async def load() -> None:
        try:
            await server.start()
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            on_failure(error)
        else:
            on_ready()

    @contextlib.asynccontextmanager
    async def life(_app: FastAPI) -> AsyncIterator[None]:
        loading = asyncio.create_task(load())
        try:
            yield
        finally:
            loading.cancel()
            await asyncio.gather(loading, return_exceptions=True)
            await server.stop()

    app = FastAPI(
        title="paceline",
        version=__version__,
        summary="Text from a target model, faster with a drafter; the routes and forms of the OpenAI API.",
        lifespan=life,
    )
    app.state.server = server
    install_failures(app)
    _add_routes(app, server)
    # The one that is added last is the first to see a request.
    app.add_middleware(ApiKeys, keys=options.api_keys)
    if options.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(options.allowed_origins),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id"],
        )
    app.add_middleware(BodyLimit, max_bytes=options.max_body_bytes)
    app.add_middleware(RequestIds)
    return app


def _add_routes(app: FastAPI, server: Server) -> None:
    @app.post("/v1/chat/completions", response_model=ChatCompletion, response_model_exclude_none=True, tags=["text"])
    async def chat_completions(body: ChatCompletionRequest, request: Request) -> Response | ChatCompletion:
        """Answer a chat, whole or, with `stream`, as server-sent events."""
        return await server.chat(body, request)

    @app.post("/v1/completions", response_model=Completion, response_model_exclude_none=True, tags=["text"])
    async def completions(body: CompletionRequest, request: Request) -> Response | Completion:
        """Go on with one or several prompts, given as texts or as token ids."""
        return await server.complete(body, request)

    @app.get("/v1/models", response_model=ModelList, tags=["models"])
    async def models() -> ModelList:
        """The model that is served, and its drafter."""
        return ModelList(data=server.models())

    @app.get("/v1/models/{name:path}", response_model=ModelCard, tags=["models"])
    async def one_model(name: str) -> ModelCard:
        """One model by its name."""
        return server.card(name)

    @app.post("/tokenize", response_model=Tokenized, response_model_exclude_none=True, tags=["tokens"])
    def tokenize(body: TokenizeRequest) -> Tokenized:
        """The token ids of a prompt, or of messages under the chat template."""
        return server.tokenize(body)

    @app.post("/detokenize", response_model=Detokenized, tags=["tokens"])
    def detokenize(body: DetokenizeRequest) -> Detokenized:
        """The text of token ids, special tokens written out."""
        return server.detokenize(body)

    @app.get("/health", tags=["server"])
    async def health() -> Response:
        """200 while requests are served; 503 before, behind a failure, and where a check found the engine wrong."""
        return Response(status_code=200 if server.is_ready else 503)

    @app.get("/ping", tags=["server"])
    async def ping() -> Response:
        """200 as long as the process lives."""
        return Response(status_code=200)

    @app.get("/metrics", tags=["server"])
    async def metrics() -> Response:
        """Counters and histograms for Prometheus."""
        return await server.metrics()

    @app.get("/version", tags=["server"])
    async def version() -> dict[str, str]:
        """Of the program."""
        return {"version": __version__}

    @app.get("/server_info", tags=["server"])
    async def server_info() -> dict[str, object]:
        """What is served and how: settings, target, drafter, versions."""
        return server.info()
