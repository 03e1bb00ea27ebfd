"""What the routes do: answer chats and completions, whole or as streams, and what else clients ask for."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from paceline.checkpoint.answer_parts import AnswerReader, PlainText
from paceline.engine.request import RequestResult
from paceline.serving.answers import chat_choice, completion_choice, drafting_metrics, usage_of
from paceline.serving.chat import render_messages
from paceline.serving.failures import UnknownModelError, error_body
from paceline.serving.fields import FieldError, UnknownFields
from paceline.serving.metrics import ServerMetrics
from paceline.serving.model import MetricsLevel, ModelHost, OpenModel, ServedModel, not_ready
from paceline.serving.prepare import prepare_chat, prepare_completion
from paceline.serving.protocol import (
    ChatCompletion,
    ChatCompletionRequest,
    Completion,
    CompletionRequest,
    Detokenized,
    DetokenizeRequest,
    ModelCard,
    SamplingFields,
    Tokenized,
    TokenizeRequest,
    Usage,
)
from paceline.serving.samples import Asked, Event, run_samples
from paceline.serving.stream import DEFAULT_PING_S, ChunkWriter, EventStream, frames_of, kept_alive, until_gone
from paceline.serving.token_texts import TokenTexts
from paceline.serving.tools import for_template

T = TypeVar("T")
_CLIENT_HAS_GONE = 499  # nobody reads it; the log shows it


@dataclass(frozen=True)
class ServerOptions:
    """How a server treats its clients.

    Attributes:
        checks_at_start: whether nothing is served before the drafter has passed its canary.
        api_keys: of which they need one; none lets everybody in.
        max_body_bytes: of a request.
        metrics_level: what answers tell of drafting.
        request_timeout_s: after which an answer ends; None for never.
        stream_interval_s: least time between two chunks of an answer.
        ping_s: after so much silence a stream says that it is there.
        allowed_origins: of pages that may ask, as browsers name them; "*" for all.
    """

    checks_at_start: bool = True
    api_keys: tuple[str, ...] = ()
    max_body_bytes: int = 32 * 2**20
    metrics_level: MetricsLevel = "none"
    request_timeout_s: float | None = None
    stream_interval_s: float = 0.0
    ping_s: float = DEFAULT_PING_S
    allowed_origins: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Ready:
    """What there is once the model is loaded."""

    model: ServedModel
    texts: TokenTexts
    metrics: ServerMetrics


class Server:
    """One model and those who ask it.

    Args:
        open_model: loads it and makes its engine.
        options: how clients are treated.

    Attributes:
        host: of the model and its engine.
        options: as given.
    """

    def __init__(self, open_model: OpenModel, options: ServerOptions) -> None:
        self.host, self.options = ModelHost(open_model, checks_at_start=options.checks_at_start), options
        self._ready: _Ready | None = None
        self._unknown_fields = UnknownFields()

    # Beginning and end

    async def start(self) -> None:
        """Load the model.

        Raises:
            PacelineError: it cannot be loaded or served.
        """
        await self.host.engine.start()
        model = self.host.model
        self._ready = _Ready(model, TokenTexts(model.tokenizer), ServerMetrics(model.name, model.num_draft_tokens))

    async def stop(self) -> None:
        """End at once: answers had their time before, while the front end let connections end."""
        await self.host.engine.stop(drain=False)

    @property
    def is_ready(self) -> bool:
        """Whether requests are served."""
        return self._ready is not None and self.host.is_ready

    # Completions

    async def chat(self, body: ChatCompletionRequest, request: Request) -> Response | ChatCompletion:
        """Answer POST /v1/chat/completions."""
        ready = self._for(body)
        prepared = await asyncio.to_thread(prepare_chat, body, ready.model, self.options.request_timeout_s)
        asked, make_reader = self._paced(prepared.asked, body), prepared.form.make_reader
        hidden = self._hidden_ids(body, ready)
        name = f"chatcmpl-{uuid.uuid4().hex}"
        events = run_samples(self.host.engine, asked, name, ready.metrics)
        if body.stream:
            writer = self._writer(body, ready, name, asked, is_chat=True, make_reader=make_reader)
            return await self._streamed(events, writer, asked, request)
        results = await unless_gone(request, _collect(events))
        if results is None:
            return Response(status_code=_CLIENT_HAS_GONE)
        return ChatCompletion(
            id=name,
            created=_now_s(),
            model=ready.model.name,
            choices=[chat_choice(index, one, ready.texts, hidden, make_reader()) for index, one in enumerate(results)],
            usage=usage_of(results, asked.sampling.n),
            metrics=drafting_metrics(results, ready.model.num_draft_tokens, self.options.metrics_level),
        )

    async def complete(self, body: CompletionRequest, request: Request) -> Response | Completion:
        """Answer POST /v1/completions."""
        ready = self._for(body)
        prepared = await asyncio.to_thread(prepare_completion, body, ready.model, self.options.request_timeout_s)
        asked = self._paced(prepared, body)
        hidden = self._hidden_ids(body, ready)
        name = f"cmpl-{uuid.uuid4().hex}"
        events = run_samples(self.host.engine, asked, name, ready.metrics)
        if body.stream:
            writer = self._writer(body, ready, name, asked, is_chat=False)
            return await self._streamed(events, writer, asked, request)
        results = await unless_gone(request, _collect(events))
        if results is None:
            return Response(status_code=_CLIENT_HAS_GONE)
        num_top = body.logprobs or 0
        return Completion(
            id=name,
            created=_now_s(),
            model=ready.model.name,
            choices=[completion_choice(index, one, ready.texts, hidden, num_top) for index, one in enumerate(results)],
            usage=usage_of(results, asked.sampling.n),
            metrics=drafting_metrics(results, ready.model.num_draft_tokens, self.options.metrics_level),
        )

    def _paced(self, asked: Asked, body: SamplingFields) -> Asked:
        """Nobody reads a whole answer before its end, so nobody is woken before it."""
        return replace(asked, interval_s=self.options.stream_interval_s if body.stream else math.inf)

    def _writer(
        self,
        body: SamplingFields,
        ready: _Ready,
        name: str,
        asked: Asked,
        *,
        is_chat: bool,
        make_reader: Callable[[], AnswerReader] = PlainText,
    ) -> ChunkWriter:
        options = body.stream_options
        return ChunkWriter(
            head={
                "id": name,
                "object": "chat.completion.chunk" if is_chat else "text_completion",
                "created": _now_s(),
                "model": ready.model.name,
            },
            is_chat=is_chat,
            texts=ready.texts,
            hidden_ids=self._hidden_ids(body, ready),
            num_prompt_tokens=tuple(map(len, asked.prompts)),
            n=asked.sampling.n,
            num_top=asked.sampling.logprobs or 0,
            make_reader=make_reader,
            includes_usage=options is not None and options.include_usage is True,
            has_usage_everywhere=options is not None and options.continuous_usage_stats is True,
        )

    async def _streamed(
        self, events: AsyncGenerator[Event, None], writer: ChunkWriter, asked: Asked, request: Request
    ) -> Response:
        """A stream whose first event is there, or awaited for long: what is refused at once gets its own status."""
        begun = await _begun(events, self.options.ping_s)
        num_draft_tokens = self.host.model.num_draft_tokens

        def last_words(results: list[RequestResult]) -> dict[str, Any]:
            metrics = drafting_metrics(results, num_draft_tokens, self.options.metrics_level)
            return {} if metrics is None else {"metrics": metrics.model_dump(exclude_none=True)}

        def usage(results: list[RequestResult]) -> Usage:
            return usage_of(results, asked.sampling.n)

        say_failure = functools.partial(error_body, request_id=getattr(request.state, "request_id", None))
        frames = frames_of(begun, writer, usage, last_words, say_failure)
        return EventStream(kept_alive(frames, self.options.ping_s))

    # The rest

    def models(self) -> list[ModelCard]:
        """Answer GET /v1/models."""
        model = self._require_ready().model
        return [
            ModelCard(
                id=model.name,
                created=model.created_s,
                root=model.root,
                max_model_len=model.max_model_len,
                draft_model=model.draft_name,
            )
        ]

    def card(self, name: str) -> ModelCard:
        """Answer GET /v1/models/{name}."""
        self._check_name(name, self._require_ready())
        return self.models()[0]

    async def metrics(self) -> Response:
        """Answer GET /metrics."""
        ready = self._require_ready()
        data, kind = ready.metrics.exposition(await self.host.engine.stats())
        return Response(data, headers={"Content-Type": kind})

    def tokenize(self, body: TokenizeRequest) -> Tokenized:
        """Answer POST /tokenize."""
        ready = self._require_ready()
        self._check_name(body.model, ready)
        self._unknown_fields.note(body)
        tokenizer = ready.model.tokenizer
        if (body.prompt is None) == (body.messages is None):
            raise FieldError("either prompt or messages has to be given", param="prompt")
        if body.prompt is not None:
            ids = tokenizer.encode(body.prompt, add_special_tokens=body.add_special_tokens is not False)
        else:
            rendered = render_messages(
                body.messages or [],
                tokenizer,
                tools=for_template(body.tools) if body.tools else None,
                variables=body.chat_template_kwargs,
                add_generation_prompt=body.add_generation_prompt is not False,
                continue_final_message=body.continue_final_message is True,
            )
            ids = tokenizer.encode_rendered(rendered)
        return Tokenized(
            count=len(ids),
            max_model_len=ready.model.max_model_len,
            tokens=ids,
            token_strs=[ready.texts.text_of(token) for token in ids] if body.return_token_strs else None,
        )

    def detokenize(self, body: DetokenizeRequest) -> Detokenized:
        """Answer POST /detokenize."""
        ready = self._require_ready()
        self._check_name(body.model, ready)
        for token in body.tokens:
            if not 0 <= token < ready.model.vocab_size:
                message = f"tokens holds an id outside the vocabulary, which has ids 0 to {ready.model.vocab_size - 1}"
                raise FieldError(message, param="tokens")
        return Detokenized(prompt=ready.model.tokenizer.decode(body.tokens, skip_special_tokens=False))

    def info(self) -> dict[str, object]:
        """Answer GET /server_info."""
        return dict(self._require_ready().model.facts)

    def _for(self, body: SamplingFields) -> _Ready:
        ready = self._require_ready()
        self._check_name(body.model, ready)
        self._unknown_fields.note(body)
        return ready

    def _require_ready(self) -> _Ready:
        _ = self.host.model  # raises while there is none
        if self._ready is None:  # the engine's thread serves already, and this loop has not heard of it
            raise not_ready()
        return self._ready

    def _check_name(self, name: str | None, ready: _Ready) -> None:
        if name not in (None, ready.model.name):
            raise UnknownModelError(name, known=ready.model.name)

    @staticmethod
    def _hidden_ids(body: SamplingFields, ready: _Ready) -> frozenset[int]:
        """Stop tokens whose text is not delivered."""
        if body.include_stop_str_in_output:
            return frozenset()
        own = () if body.ignore_eos else ready.model.stop_token_ids
        return frozenset((*own, *(body.stop_token_ids or ())))


def _now_s() -> int:
    return int(time.time())


async def _collect(events: AsyncGenerator[Event, None]) -> list[RequestResult]:
    """All results, in order."""
    results: dict[int, RequestResult] = {}
    async with contextlib.aclosing(events):
        async for index, news in events:
            if isinstance(news, RequestResult):
                results[index] = news
    return [results[index] for index in sorted(results)]


async def _begun(events: AsyncGenerator[Event, None], patience_s: float) -> AsyncGenerator[Event, None]:
    """The same events, once the first is there or has been awaited for a while.

    Raises:
        PacelineError: the request was refused.
    """
    first = asyncio.ensure_future(anext(events))
    try:
        await asyncio.wait({first}, timeout=patience_s)
        if first.done():
            first.result()
    except BaseException:
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await events.aclose()
        raise

    async def all_of_them() -> AsyncGenerator[Event, None]:
        try:
            async with contextlib.aclosing(events):
                yield await first
                async for event in events:
                    yield event
        finally:
            first.cancel()

    return all_of_them()


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T | None:
    """Do some work for a client, and end it where the client hangs up.

    Args:
        request: whose body has been read.
        work: for it.
    Returns:
        What it gave; None where nobody waits for it any more.
    """
    doing = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(until_gone(request.receive))
    try:
        await asyncio.wait({doing, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return doing.result() if doing.done() else None
    finally:
        for task in (doing, leaving):
            task.cancel()
        await asyncio.gather(doing, leaving, return_exceptions=True)
