"""Calls are found however text is cut, and grammars of calls hold for every schema."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.byte_level import byte_level_tokenizer
from tests.tiny import EOS_ID, VOCAB_SIZE
from tests.tiny_kimi_text import write_kimi_text
from tokenizers import AddedToken

from paceline.checkpoint.answer_parts import FoundCall
from paceline.checkpoint.tokenizer import open_tokenizer
from paceline.engine.grammar import GrammarCompiler
from paceline.engine.structured import StructuredOutput
from paceline.serving.call_forms import HERMES, HERMES_TAGS, KIMI, KIMI_TAGS, LLAMA, form_of
from paceline.serving.call_reader import CallReader
from paceline.serving.fields import FieldError
from paceline.serving.protocol import ChatCompletionRequest, ChatMessage
from paceline.serving.tools import ToolUse, tool_use

Piece = str | FoundCall
OPEN, CLOSE = HERMES_TAGS.opening, HERMES_TAGS.closing
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


def joined(pieces: Sequence[Piece]) -> list[Piece]:
    """Neighbouring texts as one."""
    whole: list[Piece] = []
    for piece in pieces:
        if isinstance(piece, str) and whole and isinstance(whole[-1], str):
            whole[-1] += piece
        else:
            whole.append(piece)
    return whole


def read(*pieces: str, takes_several: bool = True) -> list[Piece]:
    reader = CallReader(HERMES_TAGS, takes_several=takes_several)
    found = [piece for text in pieces for piece in reader.feed(text)]
    return joined([*found, *reader.finish()])


def call(name: str, **arguments: Any) -> str:
    return f"{OPEN}\n{json.dumps({'name': name, 'arguments': arguments})}\n{CLOSE}"


PARTS = st.sampled_from(
    [
        OPEN,
        CLOSE,
        call("f", a=1),
        call("g", text=CLOSE),
        call("g", text=f"{OPEN} é"),
        OPEN + '{"name": "open string',
        OPEN + '{"name": 1}' + CLOSE,
        OPEN + "[" * 30,
        "<tool",
        "_call>",
        "</tool_call",
        '"',
        "\n",
        " ",
        "text",
        "é<",
    ]
)


@given(st.data(), st.lists(PARTS, max_size=7).map("".join), st.booleans())
def test_no_cut_makes_a_difference(data: st.DataObject, text: str, takes_several: bool) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    edges = [0, *cuts, len(text)]
    pieces = [text[start:end] for start, end in itertools.pairwise(edges)]
    assert read(*pieces, takes_several=takes_several) == read(text, takes_several=takes_several)
    assert read(*text, takes_several=takes_several) == read(text, takes_several=takes_several)


@given(st.lists(st.sampled_from([OPEN, "<tool", "<", ">", "_call>", " ", "\n", "x", CLOSE]), max_size=8).map("".join))
def test_text_without_calls_comes_back_unchanged(text: str) -> None:
    assert read(*text) == ([text] if text else [])


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Let me see.\n" + call("f", a=1), ["Let me see.\n", FoundCall("f", '{"a": 1}')]),
        (call("f") + "\n" + call("g"), [FoundCall("f", "{}"), FoundCall("g", "{}")]),
        (call("f") + "\n\nDone here.\n", [FoundCall("f", "{}"), "Done here.\n"]),
        (OPEN + '{"name": "f"}' + CLOSE, [FoundCall("f", "{}")]),
        (OPEN + '{"name": "f", "arguments": "{\\"a\\": 1}"}' + CLOSE, [FoundCall("f", '{"a": 1}')]),
        (call("f", text=f"a {CLOSE} b"), [FoundCall("f", json.dumps({"text": f"a {CLOSE} b"}))]),
        (OPEN + '{"name": "f", "arguments": {"a": "é"}}' + CLOSE, [FoundCall("f", '{"a": "é"}')]),
        (OPEN + '\n{"name": "f", "arguments": {}}\n', [FoundCall("f", "{}")]),  # its end was a stop text
        (OPEN + '{"name": "f', [OPEN + '{"name": "f']),
        (OPEN + "no JSON" + CLOSE + call("f"), [OPEN + "no JSON" + CLOSE, FoundCall("f", "{}")]),
        (OPEN + '{"name": "f"' + CLOSE + " b", [OPEN + '{"name": "f"' + CLOSE + " b"]),
        (OPEN + '{"name": "' + CLOSE + "\n" + call("f"), [OPEN + '{"name": "' + CLOSE + "\n", FoundCall("f", "{}")]),
        (OPEN + "[" * 100_000 + CLOSE, [OPEN + "[" * 100_000 + CLOSE]),
        (OPEN + "9" * 5000 + CLOSE, [OPEN + "9" * 5000 + CLOSE]),
        (OPEN + '["name"]' + CLOSE, [OPEN + '["name"]' + CLOSE]),
        (call("f", a=math.nan), [call("f", a=math.nan)]),
    ],
)
def test_calls_and_what_is_none(text: str, found: list[Piece]) -> None:
    assert read(text) == found


def test_white_space_within_text_behind_a_call_stays() -> None:
    reader = CallReader(HERMES_TAGS)
    given = [call("f"), "\n", " ", "a", " ", "b", "\n"]
    assert joined([piece for text in given for piece in reader.feed(text)]) == [FoundCall("f", "{}"), "a b\n"]


def test_only_the_first_call_where_one_is_wanted() -> None:
    assert read("a" + call("f") + "b" + call("g") + "c", takes_several=False) == ["a", FoundCall("f", "{}")]


def test_plain_text_is_not_held_back() -> None:
    reader = CallReader(HERMES_TAGS)
    assert reader.feed("a < b") == ["a < b"]
    assert reader.feed(" and <tool") == [" and "]
    assert reader.feed("box>") == ["<toolbox>"]
    assert reader.feed(call("f")[:-1]) == []
    assert reader.feed(">") == [FoundCall("f", "{}")]


@pytest.mark.parametrize(
    "written",
    [
        '{"name": "f", "arguments": ' + "[" * 100_000,
        '{"name": "f", "arguments": ' + "1" * 5000 + "}",
        r'{"name": "f", "arguments": {"x": "\ud83d"}}',
        r'{"name": "f", "arguments": "\ud83d"}',
        r'{"name": "\ud83d", "arguments": {}}',
    ],
    ids=["deep", "digits", "half a pair", "half a pair in a text", "half a pair in a name"],
)
@pytest.mark.parametrize("is_cut", [False, True])
def test_what_cannot_be_read_or_sent_stays_text(written: str, is_cut: bool) -> None:
    text = OPEN + written + ("" if is_cut else CLOSE)
    reader = CallReader(HERMES_TAGS)
    found = [*reader.feed(text), *reader.finish()]
    assert "".join(piece for piece in found if isinstance(piece, str)) == text


def test_a_whole_pair_is_sent_as_its_character() -> None:
    found = CallReader(HERMES_TAGS).feed(OPEN + r'{"name": "f", "arguments": {"x": "\ud83d\ude00"}}' + CLOSE)
    assert found == [FoundCall("f", '{"x": "\U0001f600"}')]


# Requests


def body(parameters: Any = SCHEMA, *, others: Sequence[str] = (), **fields: Any) -> ChatCompletionRequest:
    tools = [{"type": "function", "function": {"name": "f.1-_", "parameters": parameters}}]
    tools += [{"type": "function", "function": {"name": name}} for name in others]
    return ChatCompletionRequest.model_validate({"messages": [], "tools": tools, **fields})


def test_without_tools_nothing_is_read() -> None:
    for fields in ({}, {"tools": []}, {"tools": None}, {"tool_choice": "none"}, {"tool_choice": "auto"}):
        asked = ChatCompletionRequest.model_validate({"messages": [], **fields})
        assert tool_use(asked, byte_level_tokenizer("")) == ToolUse()
    assert tool_use(body(tool_choice="none"), byte_level_tokenizer("")) == ToolUse()


def test_a_template_gets_tools_as_they_were_sent() -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, None], "default": None}}}
    use = tool_use(body(schema, parallel_tool_calls=False), byte_level_tokenizer())
    assert use.for_template == ({"type": "function", "function": {"name": "f.1-_", "parameters": schema}},)
    assert use.reads_calls and not use.takes_several and use.grammar is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}, "tools": None}, "tool_choice"),
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice"),
        ({"tool_choice": "required", "structured_outputs": {"regex": "a"}}, "tool_choice"),
        ({"others": ["g", "g"]}, "tools[2].function.name"),
    ],
)
def test_wishes_that_contradict(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(FieldError) as caught:
        tool_use(body(**fields), byte_level_tokenizer())
    assert caught.value.param == param


@pytest.mark.parametrize(
    "template",
    [
        "",
        "{{ messages }}",
        "{{ tools }}",
        f"{OPEN}",
        f"{{{{ tools }}}}{OPEN}<function=name><parameter=a>",  # the form of Qwen3-Coder
    ],
)
def test_models_that_write_no_such_calls_are_refused(template: str) -> None:
    with pytest.raises(FieldError, match="does not write calls") as caught:
        tool_use(body(), byte_level_tokenizer(template))
    assert caught.value.param == "tools"


def test_tags_that_texts_leave_out_are_refused() -> None:
    """A reader would wait for a tag that never comes."""
    tokenizer = byte_level_tokenizer.__wrapped__()
    tokenizer.backend.add_special_tokens([AddedToken(OPEN, special=True, normalized=False)])
    tokenizer.special_ids |= {tokenizer.token_id(OPEN)}
    with pytest.raises(FieldError, match="special tokens"):
        tool_use(body(), tokenizer)


# Grammars


def fits(asked: ChatCompletionRequest, text: str) -> bool:
    """Whether a whole text, and then its end, is what the grammar takes."""
    tokenizer = byte_level_tokenizer()
    wanted = tool_use(asked, tokenizer).grammar
    assert isinstance(wanted, StructuredOutput)
    state = GrammarCompiler(tokenizer, vocab_size=VOCAB_SIZE, stop_token_ids=(EOS_ID,)).start(wanted)
    ids = [*tokenizer.encode(text), EOS_ID]
    num_allowed = 0
    for token in ids:
        mask = int(state.masks([], 1).mask_LW[0, token // 32]) >> (token % 32) & 1
        if not mask:
            break
        state.advance([token])
        num_allowed += 1
    return num_allowed == len(ids)


def written(name: str, arguments: str) -> str:
    return f'{OPEN}\n{{"name": "{name}", "arguments": {arguments}}}\n{CLOSE}'


def test_a_grammar_takes_right_calls_alone() -> None:
    asked = body(others=["g"], tool_choice="required")
    assert fits(asked, written("f.1-_", '{"a": 1}'))
    assert fits(asked, written("g", '{"anything": [1, {"b": null}]}'))
    for text in (
        "hello",
        written("h", "{}"),
        written("f.1-_", "{}"),
        written("f.1-_", '{"a": "1"}'),
        written("f.1-_", '{"a": 1, "b": 2}'),
        written("g", "5"),
        written("f.1-_", '{"a": 1}') + "\n" + written("g", "{}"),
        written("f.1-_", '{"a": 1}').removesuffix(CLOSE),
    ):
        assert not fits(asked, text), text


def test_a_named_tool_is_the_only_one() -> None:
    asked = body(others=["g"], tool_choice={"type": "function", "function": {"name": "g"}})
    assert fits(asked, written("g", "{}"))
    assert not fits(asked, written("f.1-_", '{"a": 1}'))


@pytest.mark.parametrize(
    ("parameters", "right", "wrong"),
    [
        ({"type": "object", "properties": {"a": {"const": 'é"\\ \n'}}}, '{"a": "é\\"\\\\ \\n"}', '{"a": "e"}'),
        ({"type": "object", "properties": {"é \"'": {"type": "null"}}}, '{"é \\"\'": null}', '{"é \\"\'": 1}'),
        ({"$ref": "#/$defs/A", "$defs": {"A": SCHEMA}}, '{"a": 1}', '{"a": "b"}'),
        (
            {"type": "object", "properties": {"x": {"$ref": "#/$defs/A"}}, "$defs": {"A": SCHEMA}},
            '{"x": {"a": 1}}',
            '{"x": 1}',
        ),
        ({"properties": {"a": {"type": "integer"}}}, '{"a": 1}', "5"),
        ({}, '{"a": 1}', '"text"'),
        (None, "{}", "[]"),
        (SCHEMA, '{"a": 1}', '{   "a": 1}'),  # blanks without end would be an answer without end
    ],
)
def test_grammars_of_all_kinds_of_schemas(parameters: Any, right: str, wrong: str) -> None:
    asked = body(parameters, tool_choice="required")
    assert fits(asked, written("f.1-_", right))
    assert not fits(asked, written("f.1-_", wrong))


def test_what_a_grammar_allows_is_read_as_a_call() -> None:
    text = written("f.1-_", '{"a": 1}')
    assert fits(body(tool_choice="required"), text)
    assert read(*text) == [FoundCall("f.1-_", '{"a": 1}')]


LLAMA_TEMPLATE = (
    "{{ tools | tojson }}{{ messages | tojson }}{# <|start_header_id|>ipython<|end_header_id|> #}"
    '{# {"name": x, "parameters": y} #}'
)


def test_llama_is_known_by_what_all_its_templates_have() -> None:
    """Those of Llama 3.2 have no `<|python_tag|>`; others that have it are not Llama's."""
    assert form_of(LLAMA_TEMPLATE) is LLAMA
    assert form_of('{{ tools }}<|python_tag|>{"name": x, "parameters": y}') is None


@pytest.mark.parametrize("between", ["<function=f>", "f\n<arg_key>a</arg_key>", "f<tool_sep>"])
def test_other_forms_between_the_tags_of_hermes(between: str) -> None:
    assert form_of("{{ tools }}<tool_call>{{ call }}</tool_call>") is HERMES
    assert form_of(f"{{{{ tools }}}}<tool_call>{between}</tool_call>") is None


def test_a_llama_call_is_forced_as_it_is_read() -> None:
    use = tool_use(body(tool_choice="required"), byte_level_tokenizer(LLAMA_TEMPLATE))
    assert use.form is LLAMA and use.grammar is not None
    begin = json.dumps('{"name": "f.1-_", "parameters": ')
    assert str(use.grammar.value).splitlines()[1] == f'call_0: {begin} arguments_0 "}}"'


# Calls of Kimi targets

KIMI_TEMPLATE = "{{ tools | tojson }}{% if false %}<|tool_call_begin|>{% endif %}{{ messages | tojson }}"


def kimi_call(name: str, arguments: str, index: int = 0) -> str:
    return f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"


def read_kimi(*pieces: str, takes_several: bool = True) -> list[Piece]:
    reader = CallReader(KIMI_TAGS, takes_several=takes_several)
    found = [piece for text in pieces for piece in reader.feed(text)]
    return joined([*found, *reader.finish()])


SECTION = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"


def test_calls_of_kimi_targets() -> None:
    calls = kimi_call("f", '{"a": "<|tool_call_end|>"}') + kimi_call("g.h-i", "{}", 1)
    text = f"One moment.{SECTION[0]}{calls}{SECTION[1]}\n"
    first = FoundCall("f", '{"a": "<|tool_call_end|>"}', "functions.f:0")
    assert read_kimi(text) == ["One moment.", first, FoundCall("g.h-i", "{}", "functions.g.h-i:1")]
    assert read_kimi(*text) == read_kimi(text)
    assert read_kimi(text, takes_several=False) == ["One moment.", first]
    for broken in (
        kimi_call("f", "[1]"),
        "<|tool_call_begin|>f<|tool_call_argument_begin|>{}<|tool_call_end|>",
        "<|tool_call_begin|>functions.f:0{}<|tool_call_end|>",
        "<|tool_call_begin|>functions.f:0",
    ):
        assert read_kimi(*broken) == [broken]


def test_a_kimi_call_is_forced_with_the_next_number() -> None:
    tokenizer = byte_level_tokenizer(KIMI_TEMPLATE)
    called = {"function": {"name": "f.1-_", "arguments": "{}"}, "id": "functions.f.1-_:0"}
    asked = body(tool_choice="required").model_copy(
        update={"messages": [ChatMessage.model_validate({"role": "assistant", "tool_calls": [called, called]})]}
    )
    use = tool_use(asked, tokenizer)
    assert use.form is KIMI and use.grammar is not None
    begin = "<|tool_calls_section_begin|><|tool_call_begin|>functions.f.1-_:2<|tool_call_argument_begin|>"
    assert str(use.grammar.value).splitlines()[1].startswith(f'call_0: "{begin}" arguments_0')


def test_kimi_k3_is_told_and_not_forced(tmp_path: Path) -> None:
    write_kimi_text(tmp_path)
    tokenizer = open_tokenizer(tmp_path)
    use = tool_use(body(tool_choice="required"), tokenizer)
    assert use.reads_calls and use.form is None and use.grammar is None
    assert use.variables == {"tool_choice": "required"}
    with pytest.raises(FieldError, match="not which function") as caught:
        tool_use(body(tool_choice={"type": "function", "function": {"name": "f.1-_"}}), tokenizer)
    assert caught.value.param == "tool_choice"
