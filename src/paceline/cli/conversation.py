"""A chat with one target: its messages, and the answer to the next one. It knows an engine, and no terminal.

Every answer is to the whole conversation, rendered with the target's own template and encoded anew, so that it is what
the engine says to that prompt; the keys of earlier turns are found again in the prefix cache.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from paceline.errors import DataError, NumericError, RequestError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.engine.engine import Engine
    from paceline.engine.request import RequestResult, SamplingParameters

Message = Mapping[str, str]
Show = Callable[[str], object]


class ChatTokenizer(Protocol):
    """The part of a tokenizer that a conversation needs."""

    @property
    def has_chat_template(self) -> bool:
        """Whether messages can be rendered."""
        ...

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Messages to the ids of a prompt that opens the next answer."""
        ...


class Conversation:
    """Messages of a chat, and what can be done with them.

    A question that gets no answer (the context is full, Ctrl-C came before any text, the engine failed) leaves the
    messages as they were; `retry` asks it again.

    Args:
        engine: answers; nobody else runs requests on it meanwhile.
        tokenizer: the target's.
        sampling: of every answer; where it is sampled, answer i draws with `seed` + i.
        system: what stands in front of all turns; None leaves it to the template.

    Raises:
        RequestError: the target has no chat template.
    """

    def __init__(
        self, engine: Engine, tokenizer: ChatTokenizer, sampling: SamplingParameters, *, system: str | None = None
    ) -> None:
        if not tokenizer.has_chat_template:
            raise RequestError(
                "the target has no chat template, so there is no telling its turns apart",
                hint="`paceline generate --raw`, which takes a prompt as it is",
            )
        self._engine = engine
        self._tokenizer = tokenizer
        self._sampling = sampling
        self._first_seed = sampling.seed if sampling.seed is not None else secrets.randbits(31)
        self._num_asked = 0
        self._system: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        self._turns: list[Message] = []
        self._unanswered: str | None = None

    @property
    def messages(self) -> tuple[Message, ...]:
        """The system message, if there is one, then questions and answers in turn."""
        return (*self._system, *self._turns)

    @property
    def max_tokens(self) -> int:
        """Largest number of tokens of an answer."""
        return self._sampling.max_tokens

    def ask(self, question: str, show: Show) -> RequestResult:
        """Let the target answer, and add both to the messages.

        Args:
            question: the user's next message.
            show: gets the answer piece by piece; all of them together are the answer, and nothing is taken back.

        Returns:
            What the engine says of the answer. Ctrl-C ends it where it is, with the finish reason "abort".

        Raises:
            RequestError: there is no room in the context, or rules on tokens leave no token.
            NumericError: the model computed NaN or infinity.
        """
        self._unanswered = question
        turns = [*self._turns, {"role": "user", "content": question}]
        ids = self._tokenizer.encode_chat([*self._system, *turns])
        if len(ids) >= self._engine.max_model_len:
            raise RequestError(
                f"the conversation has {len(ids)} tokens with this message; a context of {self._engine.max_model_len} "
                "leaves no room for an answer",
                hint="/reset or /undo, and then /retry; or a larger --max-model-len",
            )
        result = self._run(ids, show)
        if result.finish_reason == "error":
            message = f"the answer ended after {len(result.token_ids)} tokens: {result.error}"
            if result.has_dead_end:
                raise RequestError(message)
            raise NumericError(message, hint="--dtype float32")
        if result.text or result.finish_reason != "abort":
            self._turns = [*turns, {"role": "assistant", "content": result.text}]
            self._unanswered = None
        return result

    def retry(self, show: Show) -> RequestResult:
        """Ask the question again that got no answer, or else the last one, whose answer is replaced.

        Raises:
            RequestError: there is no question; and as `ask`, which leaves question and answer as they were.
        """
        if self._unanswered is not None:
            return self.ask(self._unanswered, show)
        if not self._turns:
            raise RequestError("there is no message to answer again")
        before = self._turns
        self._turns = before[:-2]
        try:
            return self.ask(before[-2]["content"], show)
        finally:
            if self._unanswered is not None:  # no new answer: the old one stands
                self._turns, self._unanswered = before, None

    def undo(self) -> str:
        """Take back the last question with its answer; returns the question.

        Raises:
            RequestError: there is none.
        """
        if not self._turns:
            raise RequestError("there is no message to take back")
        question = self._turns[-2]["content"]
        self._turns = self._turns[:-2]
        return question

    def reset(self) -> None:
        """Forget all turns; the system message stays, and so does a question that got no answer, for `retry`."""
        self._turns = []

    def save(self, path: Path) -> int:
        """Write the messages to a new file, one JSON object a line; returns how many.

        Raises:
            DataError: the file exists, or cannot be written.
        """
        lines = [json.dumps(message, ensure_ascii=False) + "\n" for message in self.messages]
        try:
            data = "".join(lines).encode("utf-8")
        except UnicodeEncodeError:  # half a surrogate pair, out of bytes that were no text
            data = "".join(json.dumps(message) + "\n" for message in self.messages).encode("ascii")
        try:
            path = path.expanduser()
            with path.open("xb") as file:
                file.write(data)
        except FileExistsError as error:
            raise DataError(f"{path} exists, and nothing is written over it", hint="another name") from error
        except (OSError, RuntimeError) as error:  # the latter for the home of somebody who has none
            raise DataError(f"{path} cannot be written: {error}") from error
        return len(lines)

    def _run(self, ids: Sequence[int], show: Show) -> RequestResult:
        """Run one request to its end, or to Ctrl-C."""
        sampling = self._sampling
        if not sampling.is_greedy:
            sampling = replace(sampling, seed=(self._first_seed + self._num_asked) % 2**63)
        self._num_asked += 1
        engine, request_id, num_shown = self._engine, f"answer-{self._num_asked}", 0
        try:
            engine.add_request(ids, sampling, request_id)
            try:
                while engine.has_unfinished():
                    for delta in engine.step():
                        if delta.text:
                            num_shown += len(delta.text)
                            show(delta.text)
            except KeyboardInterrupt:
                engine.abort(request_id)
            result = engine.take_result(request_id)
        except BaseException:
            engine.abort(request_id)
            raise
        if len(result.text) > num_shown:  # the end of an answer that was interrupted may not have come in a delta
            show(result.text[num_shown:])
        return result
