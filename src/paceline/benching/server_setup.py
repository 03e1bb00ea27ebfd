"""A set-up behind HTTP: any server of the OpenAI API, asked as a client asks it, streamed or whole.

Every failure of a request - no connection, a status, an error in mid-stream, an end before the answer's - is in its
record; nothing is retried, as a retry would hide what a client sees.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import httpx2

from paceline.benching.records import AnswerRecord, Question
from paceline.benching.server_counters import read_counters
from paceline.benching.server_stream import HeardAnswer, complaint, hear_stream, lines_of, shortened
from paceline.errors import RequestError, ServerError
from paceline.evaluation.prompts import Message, Prompt
from paceline.trace.acceptance import DraftTotals

Endpoint = Literal["auto", "chat", "completions"]
_PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
_PATIENCE_S = 10.0  # for what is no answer: a connection, a list of models, a scrape


@dataclass(frozen=True)
class ServerOptions:
    """How servers are asked.

    Attributes:
        sampling: fields of every body, `max_tokens` and `temperature` among them.
        endpoint: "auto" asks chats as chats and prompts of token ids as completions.
        raw: texts are completions, without a chat template.
        system: message in front of chats that bring none.
        api_key: sent as a bearer's.
        timeout_s: of an answer as a whole.
        is_streamed: whether answers are streams.
    """

    sampling: Mapping[str, object] = field(default_factory=dict)
    endpoint: Endpoint = "auto"
    raw: bool = False
    system: str | None = None
    api_key: str | None = None
    timeout_s: float = 600.0
    is_streamed: bool = True


class ServerSetUp:
    """Answers questions with a server; `async with` opens and closes its connections.

    Args:
        name: of the set-up.
        url: of the server, without `/v1`.
        model: name to ask for; None takes what the server has, where that is one.
        options: how it is asked.
    """

    def __init__(self, name: str, url: str, model: str | None, options: ServerOptions) -> None:
        self._name, self._url, self._model, self._options = name, url, model, options
        self._has_counters = True
        headers = {} if options.api_key is None else {"Authorization": f"Bearer {options.api_key}"}
        self._client = httpx2.AsyncClient(
            base_url=url,
            headers=headers,
            timeout=httpx2.Timeout(options.timeout_s, connect=_PATIENCE_S),
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=None),
        )

    @property
    def name(self) -> str:
        """Of the set-up."""
        return self._name

    async def close(self) -> None:
        """Let go of its connections."""
        await self._client.aclose()

    async def prepare(self) -> dict[str, object]:
        """See that it is there and has the model.

        Returns:
            What is known of it: `url`, `model`, `version` if it tells.

        Raises:
            ServerError: it is out of reach, is not ready, or has no such model.
        """
        names = await self._model_names()
        if self._model is None and len(names) != 1:
            raise ServerError(
                f"it is not told which model to ask for, and {self._url} has {', '.join(names) or 'no list of models'}",
                hint="--model NAME",
            )
        self._model = self._model or names[0]
        if names and self._model not in names:
            raise ServerError(
                f"{self._url} has no model {self._model!r}; it has {', '.join(names)}", hint=f"--model {names[0]}"
            )
        return {"url": self._url, "model": self._model, "version": await self._version()}

    async def ask(self, question: Question) -> AnswerRecord:
        """Ask, and record.

        Raises:
            RequestError: the prompt cannot be asked in this form.
        """
        sent_s = time.perf_counter()
        heard, error = HeardAnswer(), None
        try:
            async with asyncio.timeout(self._options.timeout_s):
                heard = await self._answer(question)
        except TimeoutError:
            error = f"no whole answer within {self._options.timeout_s:g} s"
        except ServerError as failure:
            error = failure.message
        except httpx2.TransportError as failure:
            error = f"{type(failure).__name__}: {shortened(failure) or 'no answer'}"
        if error is not None:
            total_s = time.perf_counter() - sent_s
            return AnswerRecord(question.index, question.prompt.id, sent_s, total_s, error=error)
        assert heard.last_s is not None, "an answer with a reason has a choice"
        return AnswerRecord(
            index=question.index,
            prompt_id=question.prompt.id,
            sent_s=sent_s,
            total_s=heard.last_s - sent_s,
            first_s=heard.delta_s[0] - sent_s if heard.delta_s and self._options.is_streamed else None,
            delta_s=tuple(clock - sent_s for clock in heard.delta_s) if self._options.is_streamed else (),
            num_prompt_tokens=heard.num_prompt_tokens,
            num_tokens=heard.num_tokens,
            finish_reason=heard.finish_reason,
            output_sha256=hashlib.sha256(heard.text.encode("utf-8", "surrogatepass")).hexdigest(),
            drafting=heard.drafting,
        )

    async def counters(self) -> DraftTotals | None:
        """By `/metrics`; None where there is none."""
        if not self._has_counters:
            return None
        try:
            response = await self._client.get("/metrics", timeout=_PATIENCE_S)
        except httpx2.HTTPError:
            return None
        found = read_counters(response.text) if response.status_code == 200 else None
        self._has_counters = found is not None
        return found

    async def _answer(self, question: Question) -> HeardAnswer:
        path, body = self._body(question)
        async with self._client.stream("POST", path, json=body) as response:
            if response.status_code != 200:
                raise ServerError(f"status {response.status_code}: {await _said(response)}")
            if self._options.is_streamed and "json" in response.headers.get("content-type", ""):
                raise ServerError(f"no stream but one body: {await _said(response)}")
            if self._options.is_streamed:
                return await hear_stream(lines_of(response.aiter_bytes()))
            heard = HeardAnswer()
            await response.aread()
            try:
                heard.take(response.json(), time.perf_counter())
            except ValueError as error:
                raise ServerError(f"the answer is not JSON: {shortened(response.text)}") from error
            if heard.last_s is None or heard.finish_reason is None:
                raise ServerError(f"the answer has no choice that has ended: {shortened(response.text)}")
            return heard

    def _body(self, question: Question) -> tuple[str, dict[str, object]]:
        """Path and body of a request."""
        body: dict[str, object] = {"model": self._model, "stream": self._options.is_streamed}
        if self._options.is_streamed:
            body["stream_options"] = {"include_usage": True}
        body |= prompt_fields(question.prompt, self._options)
        if question.seed is not None:
            body["seed"] = question.seed
        return _PATHS["chat" if "messages" in body else "completions"], body | dict(self._options.sampling)

    async def _model_names(self) -> list[str]:
        """Models that the server lists; none where it has no such list."""
        try:
            response = await self._client.get("/v1/models", timeout=_PATIENCE_S)
        except httpx2.TransportError as error:
            raise ServerError(
                f"{self._url} cannot be reached: {shortened(error) or type(error).__name__}",
                hint="a server that runs, and its address as http://host:port",
            ) from error
        except (httpx2.InvalidURL, httpx2.HTTPError) as error:
            raise ServerError(f"{self._url} cannot be asked: {shortened(error)}") from error
        if response.status_code == 401:
            raise ServerError(f"{self._url} wants a key, or another one", hint="--api-key KEY, or PACELINE_API_KEY")
        if response.status_code == 503:
            raise ServerError(f"{self._url} is not ready: {await _said(response)}", hint="again, once it is")
        try:
            rows = response.json()["data"] if response.status_code == 200 else []
            return [str(row["id"]) for row in rows]
        except (ValueError, KeyError, TypeError):
            return []

    async def _version(self) -> str | None:
        try:
            response = await self._client.get("/version", timeout=_PATIENCE_S)
            return str(response.json()["version"]) if response.status_code == 200 else None
        except (httpx2.HTTPError, ValueError, KeyError, TypeError):
            return None


def prompt_fields(prompt: Prompt, options: ServerOptions) -> dict[str, object]:
    """What a body says of its prompt.

    Args:
        prompt: what is asked; of several turns the first.
        options: how.

    Raises:
        RequestError: a prompt that cannot be asked in this form.
    """
    if prompt.token_ids is not None:
        if options.endpoint == "chat":
            raise RequestError(f"prompt {prompt.id!r} is token ids, which no chat takes", hint="--endpoint completions")
        return {"prompt": list(prompt.token_ids)}
    if options.raw or options.endpoint == "completions":
        if prompt.messages or not prompt.turns:
            raise RequestError(f"prompt {prompt.id!r} is a chat, which is no completion", hint="--endpoint chat")
        return {"prompt": prompt.turns[0]}
    messages = list(prompt.messages)
    if options.system is not None and not any(message.role == "system" for message in messages):
        messages.insert(0, Message("system", options.system))
    messages += [Message("user", turn) for turn in prompt.turns[:1]]
    return {"messages": [{"role": message.role, "content": message.content} for message in messages]}


async def _said(response: httpx2.Response) -> str:
    await response.aread()
    try:
        return shortened(complaint(response.json()))
    except ValueError:
        return shortened(response.text)
