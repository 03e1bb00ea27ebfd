from __future__ import annotations

import io
import re
import subprocess
import sys
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from paceline.reporting.terminal import ChipPrinter, print_block_map, print_chips, print_summary, visible
from paceline.trace.acceptance import AcceptanceSummary
from paceline.trace.step import RequestTrace, StepRecord

WORDS = ["The", " cat", " sat", " on", " it", ".", "\n", " Then", " dog", " ran", "\x1b[31m", " far"]


def decode(ids: Sequence[int]) -> str:
    return "".join(WORDS[token] for token in ids)


def step(
    proposed: Sequence[int], verified: int, bonus: int | None, *, kept: int | None = None, index: int = 0
) -> StepRecord:
    kept = verified if kept is None else kept
    emitted = tuple(proposed[:kept]) + (() if bonus is None else (bonus,))
    return StepRecord("r", index, 10, 0, tuple(proposed), verified, kept, emitted, bonus, 1.0)


TRACE = RequestTrace(
    "r",
    10,
    first_token_id=0,
    records=[
        step([1, 8, 9, 3], 1, 2),  # " cat" kept, " dog" refused for " sat"
        step([3, 4, 5, 6], 4, 7),  # all kept
        step([8, 9], 2, None, kept=1),  # " dog" kept, " ran" cut off
    ],
)


def render(function: object, *arguments: object, width: int = 200, colour: bool = False, **options: object) -> str:
    assert callable(function)
    file = io.StringIO()
    console = Console(
        file=file,
        width=width,
        force_terminal=colour,
        color_system="standard" if colour else None,
        no_color=not colour,
        legacy_windows=False,
    )
    function(console, *arguments, **options)
    return file.getvalue()


def without_colour(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def test_chips_mark_every_token() -> None:
    lines = render(print_chips, TRACE, decode).splitlines()
    assert lines[0] == "[accepted]  ~refused~  (the target's own)"
    assert lines[1:] == ["(The)|[ cat]~ dog~( sat)|[ on][ it][.][\\n]", "( Then)|[ dog]"]


def test_colour_says_the_same_as_the_marks() -> None:
    coloured = render(print_chips, TRACE, decode, colour=True)
    assert without_colour(coloured) == render(print_chips, TRACE, decode)
    assert "\x1b[32m[ cat]\x1b[0m" in coloured  # green
    assert "\x1b[9;31m~ dog~\x1b[0m" in coloured  # red, struck out
    assert "\x1b[1;33m( sat)\x1b[0m" in coloured  # bold yellow


def test_no_color_keeps_the_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    file = io.StringIO()
    print_chips(Console(file=file, force_terminal=True, color_system="standard", width=200), TRACE, decode)
    assert not re.search(r"\x1b\[[0-9;]*3[0-7]", file.getvalue())
    assert without_colour(file.getvalue()) == render(print_chips, TRACE, decode)


def test_a_terminal_breaks_lines_between_chips_and_a_pipe_does_not() -> None:
    wrapped = without_colour(render(print_chips, TRACE, decode, width=16, colour=True)).splitlines()[1:]
    assert all(len(line) <= 16 for line in wrapped)
    assert "".join(wrapped) == "".join(render(print_chips, TRACE, decode, width=16).splitlines()[1:])


def test_chips_can_be_printed_while_the_text_grows() -> None:
    def stream(console: Console) -> None:
        printer = ChipPrinter(console, decode)
        printer.first(0)
        for record in TRACE.records:
            printer.step(record)
        printer.finish()

    assert render(stream).splitlines() == render(print_chips, TRACE, decode).splitlines()[1:]


def test_text_cannot_reach_the_terminal_as_a_command() -> None:
    trace = RequestTrace("r", 1, first_token_id=10, records=[step([10], 0, 10)])
    for function in (print_chips, print_block_map):
        assert "\x1b" not in render(function, trace, decode)
    assert visible("a\x1b[2J\r\u202e") == "a\\x1b[2J\\r\\u202e"
    assert visible(" é你") == " é你"
    assert visible("é你", "ascii") == "\\xe9\\u4f60"
    assert visible("", "ascii") == "\\u2026"


@given(st.text(alphabet=st.characters(), max_size=20))
def test_visible_text_stays_on_its_line(piece: str) -> None:
    assert visible(piece).isprintable()
    visible(piece, "latin-1").encode("latin-1")


BYTES = ["é".encode()[:1], "é".encode()[1:], b"a", "你".encode()[:1], "你".encode()[1:2], "你".encode()[2:], b"\xff"]


def decode_bytes(ids: Sequence[int]) -> str:
    return b"".join(BYTES[token] for token in ids).decode(errors="replace")


def test_characters_of_several_tokens_show_where_they_end() -> None:
    trace = RequestTrace("r", 1, first_token_id=2, records=[step([0, 1, 3], 2, 3), step([4, 5], 2, 2)])
    assert render(print_chips, trace, decode_bytes).splitlines()[1] == "(a)|[…][é]~…~(…)|[…][你](a)"


def test_a_character_that_never_ends_is_given_up() -> None:
    trace = RequestTrace("r", 1, first_token_id=6, records=[step([6] * 9, 9, 2)])
    line = render(print_chips, trace, decode_bytes).splitlines()[1]
    assert "\ufffd" in line and line.endswith("a)")


def strips_leading_space(ids: Sequence[int]) -> str:
    return decode(ids).removeprefix(" ")


def test_a_tokenizer_that_strips_the_first_space_keeps_the_others() -> None:
    line = render(print_chips, TRACE, strips_leading_space).splitlines()[1]
    assert line.startswith("(The)|[ cat]~ dog~( sat)|[ on]")


def test_block_map_has_a_cell_per_draft() -> None:
    lines = render(print_block_map, TRACE, decode).splitlines()
    assert lines[0].endswith("(the target's own)  .not looked at.  /cut off by a stop or the budget/")
    rows = [re.split(r"\s{2,}", line) for line in lines[1:]]
    assert rows[0] == ["0", "The", "[ cat]", "~ dog~> sat", ". ran.", ". on.", "( sat)"]
    assert rows[1] == ["1", " sat".strip(), "[ on]", "[ it]", "[.]", "[\\n]", "( Then)"]
    assert rows[2] == ["2", "Then", "[ dog]", "/ ran/"]


def test_columns_of_the_map_line_up() -> None:
    lines = render(print_block_map, TRACE, decode).splitlines()[1:]
    assert {lines[0].index("[ cat]"), lines[1].index("[ on]"), lines[2].index("[ dog]")} == {20}
    assert lines[0].index("~ dog~") == lines[1].index("[ it]") == lines[2].index("/ ran/")


def test_a_narrow_map_keeps_the_marks_and_the_refused_pair() -> None:
    lines = render(print_block_map, TRACE, decode, width=40).splitlines()[1:]
    assert lines == ["0  []~~.... ~ dog~>( sat)", "1  [][][][] ( Then)", "2  []//"]


def test_the_map_looks_the_same_without_colour() -> None:
    for width in (40, 200):
        coloured = render(print_block_map, TRACE, decode, width=width, colour=True)
        assert "\x1b[" in coloured
        assert without_colour(coloured) == render(print_block_map, TRACE, decode, width=width)


def test_plain_decoding_and_empty_requests_can_be_drawn() -> None:
    plain = RequestTrace("r", 1, first_token_id=0, records=[step([], 0, 1), step([], 0, 2)])
    assert render(print_chips, plain, decode).splitlines()[1] == "(The)|( cat)|( sat)"
    assert render(print_block_map, plain, decode).count("\n") == 3
    assert render(print_chips, RequestTrace("r", 1), decode).count("\n") == 1
    assert render(print_block_map, RequestTrace("r", 1), decode).count("\n") == 1


def test_summary_names_its_numbers() -> None:
    summary = AcceptanceSummary.from_steps(TRACE.records)
    text = render(
        print_summary,
        summary,
        num_output_tokens=9,
        tokens_per_second=50.0,
        plain_tokens_per_second=20.0,
        identical=True,
        lossless=True,
    )
    lines = {line[:22].strip(): line[22:].split(maxsplit=1) for line in text.splitlines()}
    assert lines["acceptance length"] == [
        "3.000",
        "committed tokens per step: 1 + accepted drafts / steps, bonus included",
    ]
    assert lines["delivered per step"][0] == "2.667"
    assert lines["draft acceptance rate"] == ["0.600", "accepted / proposed drafts, bonus excluded: 6 / 10"]
    assert lines["kept at position 0"][0] == "1.000" and lines["kept at position 1"][0] == "0.333"
    assert lines["speed-up"] == ["2.50x", "speculative / plain"]
    assert lines["identical"][0] == "yes"
    assert "lossless" not in lines


def test_summary_leaves_out_what_was_not_measured_and_shouts_a_no() -> None:
    summary = AcceptanceSummary.from_steps([])
    text = render(print_summary, summary)
    assert re.search(r"acceptance length\s+-\s", text)
    assert "identical" not in text and "tokens/s" not in text
    failed = render(print_summary, summary, identical=False, lossless=False)
    assert re.search(r"identical\s+NO", failed) and re.search(r"lossless\s+NO", failed)


def test_an_ascii_console_gets_ascii() -> None:
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    console = Console(file=file, width=120)
    trace = RequestTrace("r", 1, first_token_id=2, records=[step([0, 1, 3], 2, 3), step([4, 5], 2, 2)])
    print_chips(console, trace, decode_bytes)
    print_block_map(console, trace, decode_bytes)
    print_summary(console, AcceptanceSummary.from_steps(trace.records))


def test_reporting_loads_no_torch() -> None:
    script = "import sys, paceline.reporting.terminal; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True, env={"PYTHONPATH": ":".join(filter(None, sys.path))})
