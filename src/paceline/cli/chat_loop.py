"""The terminal's side of `paceline chat`: lines in, commands, answers out, a line of figures behind each.

Answers go to stdout, everything else to stderr. Where stdin is no terminal there are no signs and no greeting, and a
message that got no answer shows in the exit code.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from paceline.errors import EXIT_DONE, EXIT_FAILED, DataError, PacelineError, RequestError

if TYPE_CHECKING:
    from paceline.cli.conversation import Conversation, Show
    from paceline.engine.request import RequestResult

SIGN, CONTINUED_SIGN = "> ", ". "
HELP = """\
/help       show this
/reset      forget the conversation, not the system message
/undo       take back the last message and its answer
/retry      answer the last message again, or the one that got no answer
/save FILE  write the messages to a new file, a JSON object a line
/exit       leave, as Ctrl-D does
A line that ends with \\ goes on in the next. A blank in front makes a message of a line that begins with /.
Ctrl-C ends an answer, and at the sign the program."""


class InputLines:
    """Messages from stdin: behind signs and with a line editor on a terminal, plain lines elsewhere."""

    def __init__(self) -> None:
        self.is_terminal = sys.stdin is not None and sys.stdin.isatty()
        self._has_editor = self.is_terminal and sys.stdout.isatty()  # `input` shows its sign on stdout
        if self._has_editor:
            with contextlib.suppress(ImportError):  # not everywhere; a terminal's own editing stays
                import readline  # noqa: F401
        self._is_first = True

    def next_message(self) -> str | None:
        """The next line, with those that it goes on in; None at the end of the input.

        Raises:
            DataError: the input is no text.
        """
        parts: list[str] = []
        try:
            while (line := self._line(CONTINUED_SIGN if parts else SIGN)) is not None:
                if not line.endswith("\\"):
                    return "\n".join([*parts, line])
                parts.append(line[:-1])
        except UnicodeDecodeError as error:
            raise DataError(f"the text on stdin is not {error.encoding}: {error.reason}", hint="UTF-8") from error
        return "\n".join(parts) if parts else None

    def _line(self, sign: str) -> str | None:
        try:
            line = self._read(sign)
        except KeyboardInterrupt:
            self._leave_sign()
            raise
        if not line:
            self._leave_sign()
            return None
        if self._is_first:
            line, self._is_first = line.removeprefix("\ufeff"), False
        return line.removesuffix("\n").removesuffix("\r")

    def _read(self, sign: str) -> str:
        """A line with its end, as `readline` gives it; nothing at the end of the input."""
        if self._has_editor:
            try:
                return input(sign) + "\n"
            except EOFError:
                return ""
        if self.is_terminal:
            typer.echo(sign, err=True, nl=False)
        return sys.stdin.readline() if sys.stdin is not None else ""

    def _leave_sign(self) -> None:
        if self.is_terminal:
            typer.echo("", err=True)  # what comes next is not to stand behind the sign


class ChatLoop:
    """Reads messages and commands until there are no more.

    Args:
        conversation: what they go to.
        next_message: the next of them; None at the end.
        is_terminal: somebody sits in front of it: greet, and take refusals for no failure.
        is_quiet: show answers and errors alone.
        has_color: figures may be dim.
    """

    def __init__(
        self,
        conversation: Conversation,
        next_message: Callable[[], str | None],
        *,
        is_terminal: bool,
        is_quiet: bool,
        has_color: bool,
    ) -> None:
        self._conversation = conversation
        self._next_message = next_message
        self._is_terminal = is_terminal
        self._is_quiet = is_quiet
        self._has_color = has_color
        self._is_mid_line = False
        self._has_left = False

    def run(self) -> int:
        """Until the end of the input or `/exit`; returns the exit code. Ctrl-C at the sign is not caught."""
        code = EXIT_DONE
        if self._is_terminal:
            self._note("/help shows the commands, Ctrl-D leaves")
        while not self._has_left:
            message = self._next_message()
            if message is None:
                break
            try:
                self._take(message)
            except PacelineError as error:
                typer.echo(f"{type(error).__name__}: {error}", err=True)
                code = code if self._is_terminal else EXIT_FAILED
        return code

    def _take(self, message: str) -> None:
        if message.startswith("/"):
            self._obey(message)
        elif message.strip():
            self._answer(lambda show: self._conversation.ask(message, show))

    def _obey(self, line: str) -> None:
        name, _, argument = line.strip().partition(" ")
        argument = argument.strip()
        if argument and name in ("/help", "/reset", "/undo", "/retry", "/exit"):
            raise RequestError(f"{name} takes nothing behind it, found {argument!r}")
        match name:
            case "/help":
                typer.echo(HELP, err=True)
            case "/reset":
                self._conversation.reset()
                self._note("the conversation is forgotten")
            case "/undo":
                self._note(f"taken back: {_shortened(self._conversation.undo())}")
            case "/retry":
                self._answer(self._conversation.retry)
            case "/save":
                if not argument:
                    raise RequestError("/save needs the name of a file", hint="/save chat.jsonl")
                num_messages = self._conversation.save(Path(argument))
                self._note(f"{num_messages} messages written to {argument}")
            case "/exit":
                self._has_left = True
            case _:
                raise RequestError(
                    f"there is no command {name}", hint="/help; a blank in front where it is meant as a message"
                )

    def _answer(self, ask: Callable[[Show], RequestResult]) -> None:
        try:
            result = ask(self._show)
        except KeyboardInterrupt:  # before the engine's first step
            self._note("interrupted; /retry asks again")
            return
        except PacelineError:
            if self._is_mid_line:
                self._show("\n")
            raise
        if not result.text.endswith("\n"):
            self._show("\n")
        self._note(describe(result, max_tokens=self._conversation.max_tokens))

    def _show(self, text: str) -> None:
        self._is_mid_line = not text.endswith("\n")
        sys.stdout.write(text)
        sys.stdout.flush()

    def _note(self, text: str) -> None:
        if not self._is_quiet:
            typer.secho(text, err=True, dim=self._has_color)


def describe(result: RequestResult, *, max_tokens: int) -> str:
    """One answer in figures: `40 tokens, 51.2 tokens/s, acceptance length 2.60 over 15 steps, ...`."""
    from paceline.cli.generate_report import pooled_speed
    from paceline.trace.acceptance import AcceptanceSummary

    parts = [f"{len(result.token_ids)} tokens"]
    speed = pooled_speed([result])
    if speed is not None:
        parts.append(f"{speed:.1f} tokens/s")
    summary = AcceptanceSummary.from_steps(result.trace.records)
    if summary.num_steps:
        parts.append(f"acceptance length {summary.acceptance_length:.2f} over {summary.num_steps} steps")
    parts.append(f"{result.num_cached_tokens} of {len(result.prompt_ids)} prompt tokens cached")
    if result.finish_reason == "abort":
        parts.append("interrupted" if result.text else "interrupted; /retry asks again")
    elif result.finish_reason == "length":
        is_full = len(result.token_ids) < max_tokens
        parts.append("cut: the context is full; /reset" if is_full else f"cut at max_tokens {max_tokens}")
    return ", ".join(parts)


def _shortened(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 60 else line[:57] + "..."
