"""Chat templates: jinja programs from a model folder, run in a sandbox, as Hugging Face templates expect it."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.errors import RequestError

_FAILURES = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


class ChatTemplate:
    """One template, compiled.

    Args:
        source: the jinja text.
        origin: where it was read, for messages.
    Raises:
        RequestError: the text is no valid template.
    """

    def __init__(self, source: str, origin: str) -> None:
        import jinja2

        self._origin = origin
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise self._error("is not valid", error) from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        special_tokens: Mapping[str, str],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, object] | None = None,
        today: datetime.date | None = None,
    ) -> str:
        """Render messages.

        Args:
            messages: each with `role` and `content`.
            special_tokens: `bos_token` and the like, as variables of the template.
            add_generation_prompt: end with what opens the assistant's turn.
            tools: functions that the model may call, in the form of the OpenAI API.
            variables: further ones, such as `enable_thinking`; what a template does not look at changes nothing.
            today: what a template is told that asks for the date; None for the day on which it asks.
        Returns:
            The prompt.
        Raises:
            RequestError: the template fails, or refuses the messages, or a further variable has the name of another.
        """
        import jinja2

        values: dict[str, object] = {
            "messages": [dict(message) for message in messages],
            "tools": None if tools is None else [dict(tool) for tool in tools],
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **special_tokens,
        }
        if today is not None:
            values["strftime_now"] = datetime.datetime.combine(today, datetime.time()).strftime
        for name in variables or {}:
            if name in values:
                raise RequestError(f"the variable {name!r} of the chat template is not the caller's to set")
        try:
            rendered = self._template.render({**values, **(variables or {})})
        # a template is a program: besides jinja's own errors it can raise what any operation on its data can
        except (jinja2.TemplateError, *_FAILURES) as error:
            raise self._error("refused these messages", error) from error
        return str(rendered)

    def _error(self, what: str, error: Exception) -> RequestError:
        line = getattr(error, "lineno", None)
        place = f" (line {line})" if line else ""
        return RequestError(
            f"the chat template {what}{place}: {error}",
            origin={"template": self._origin},
            hint="roles and order as the model expects them, or a plain prompt",
        )


def _environment() -> Any:
    """Jinja as Hugging Face templates expect it: sandboxed, block tags without their line, two functions, one tag."""
    import jinja2.ext
    import jinja2.nodes
    import jinja2.parser
    import jinja2.sandbox

    class GenerationTag(jinja2.ext.Extension):
        """`{% generation %}` marks assistant text for training masks; rendering only needs its body."""

        tags = {"generation"}  # noqa: RUF012 - jinja declares it as an instance attribute

        def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", GenerationTag]
    )
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.filters["tojson"] = _to_json
    return environment


def _raise_exception(message: str) -> None:
    import jinja2

    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.datetime.now().strftime(layout)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja's own filter escapes <, > and & for HTML, which would change prompts
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
