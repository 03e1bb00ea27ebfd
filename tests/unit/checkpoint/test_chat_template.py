"""Chat templates run as Hugging Face runs them, in a sandbox, and their failures are one message."""

from __future__ import annotations

import datetime
import re
from typing import Any

import pytest

from paceline.checkpoint.chat_template import ChatTemplate
from paceline.errors import RequestError

MESSAGES = [{"role": "user", "content": "a <b> & 'c'"}, {"role": "assistant", "content": "d"}]
TEMPLATES = [
    "{% for m in messages %}\n    {% if m.role == 'user' %}\nU:{{ m['content'] }}\n    {% else %}\nA:{{ m.content }}\n"
    "    {% endif %}\n{% endfor %}\n{% if add_generation_prompt %}>{% endif %}\n",
    "{{ bos_token }}{% for m in messages %}{{ m | tojson }}{% if loop.last %}{% break %}{% endif %}{% endfor %}",
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}",
    "{{ messages | tojson(indent=2) }}{% if tools %}T{% endif %}{{ eos_token }}",
    "{%- set ns = namespace(n=0) -%}\n{%- for m in messages -%}{%- set ns.n = ns.n + 1 -%}{%- endfor -%}\n{{ ns.n }}",
]


@pytest.mark.parametrize("source", TEMPLATES)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_renders_as_transformers_does(source: str, add_generation_prompt: bool) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    special = {"bos_token": "<s>", "eos_token": "</s>"}
    expected, _ = render_jinja_template(
        [MESSAGES], chat_template=source, add_generation_prompt=add_generation_prompt, **special
    )
    found = ChatTemplate(source, "t").render(MESSAGES, special, add_generation_prompt=add_generation_prompt)
    assert found == expected[0]


def test_block_lines_leave_no_trace() -> None:
    source = "{% if true %}\nx\n{% endif %}\ny"
    assert ChatTemplate(source, "t").render(MESSAGES, {}, add_generation_prompt=False) == "x\ny"


def test_time_is_available() -> None:
    found = ChatTemplate("{{ strftime_now('%Y-%m-%d') }}", "t").render(MESSAGES, {}, add_generation_prompt=False)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", found)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[7].content }}", "refused these messages"),
        ("{{ 1 // 0 }}", "refused these messages"),
        ("{{ messages + 1 }}", "refused these messages"),
        ("{{ messages.append(1) }}", "refused these messages"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "refused these messages"),
        ("{% if %}", r"is not valid \(line 1\)"),
        ("{% unknown_tag %}", "is not valid"),
    ],
)
def test_failures_are_request_errors(source: str, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        ChatTemplate(source, "some/folder").render(MESSAGES, {}, add_generation_prompt=True)
    assert "some/folder" in str(caught.value)


def test_messages_of_the_caller_stay_untouched() -> None:
    messages = [{"role": "user", "content": "x"}]
    with pytest.raises(RequestError):
        ChatTemplate("{{ messages[0].update({'role': 'z'}) }}", "t").render(messages, {}, add_generation_prompt=True)
    assert messages == [{"role": "user", "content": "x"}]


TOOLS = [
    {
        "type": "function",
        "function": {"name": "f", "description": "<b> & 'é'", "parameters": {"type": "object", "properties": {}}},
    }
]


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("variables", [{}, {"enable_thinking": False, "mood": "calm"}])
def test_tools_and_variables_are_rendered_as_transformers_does(tools: Any, variables: dict[str, Any]) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    source = (
        "{%- if tools %}{% for tool in tools %}{{ tool | tojson }};{% endfor %}{% endif %}{{ messages | tojson }}"
        "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{{ mood }}"
    )
    calls = [{"type": "function", "function": {"name": "f", "arguments": {"a": [1, None]}}}]
    messages = [*MESSAGES, {"role": "assistant", "content": "", "tool_calls": calls}]
    expected, _ = render_jinja_template([messages], chat_template=source, tools=tools, **variables)
    found = ChatTemplate(source, "t").render(
        messages, {}, add_generation_prompt=False, tools=tools, variables=variables
    )
    assert found == expected[0]


@pytest.mark.parametrize("name", ["messages", "tools", "documents", "add_generation_prompt", "bos_token"])
def test_variables_override_nothing(name: str) -> None:
    with pytest.raises(RequestError, match=f"'{name}' of the chat template is not the caller's to set"):
        ChatTemplate("{{ messages }}", "t").render(
            MESSAGES, {"bos_token": "<s>"}, add_generation_prompt=True, variables={name: "x"}
        )


def test_functions_of_templates_that_a_variable_hides_are_a_request_error() -> None:
    template = ChatTemplate("{{ raise_exception('no') }}", "t")
    with pytest.raises(RequestError, match="refused these messages"):
        template.render(MESSAGES, {}, add_generation_prompt=True, variables={"raise_exception": "x"})


def test_variables_stay_with_their_chat() -> None:
    template = ChatTemplate("{{ mood }}{% if tools %}T{% endif %}", "t")
    assert template.render(MESSAGES, {}, add_generation_prompt=True, tools=TOOLS, variables={"mood": "calm"}) == "calmT"
    assert template.render(MESSAGES, {}, add_generation_prompt=True) == ""


def test_nesting_without_end_is_a_request_error() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(RequestError, match="refused these messages"):
        ChatTemplate("{{ deep | tojson }}", "t").render(
            MESSAGES, {}, add_generation_prompt=True, variables={"deep": deep}
        )
    while deep:  # from outside in
        deep = deep.pop()


def test_a_template_is_told_the_day_that_was_fixed() -> None:
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", "a test")
    messages = [{"role": "user", "content": "x"}]
    day = datetime.date(2026, 12, 1)
    assert template.render(messages, {}, add_generation_prompt=False, today=day) == "01 Dec 2026"
    assert template.render(messages, {}, add_generation_prompt=False) == datetime.date.today().strftime("%d %b %Y")
