"""Text: whole characters, nothing behind a stop, the same whatever the cut into steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes import ByteTokenizer

from paceline.checkpoint.locate import locate_target
from paceline.checkpoint.tokenizer import TextTokenizer, open_tokenizer
from paceline.engine.output import IncrementalDecoder, RequestOutput, find_stop, held_back
from paceline.engine.request import SamplingParameters
from paceline.errors import PacelineError

HARD_TEXTS = [
    "👩‍👩‍👧‍👦 family, 🏳️‍🌈 flag, 👍🏽 thumb",
    "日本語と中文、한국어 mixed with ASCII",
    "e\u0301 a\u0308\u0323 combining, ไทย, हिन्दी",
    "plain text\n\twith   spaces\n\n and 1234567",
    "\ufffd a real replacement character \ufffd",
]


@st.composite
def cuts(draw: st.DrawFn, length: int) -> list[int]:
    """Sizes of steps that add up to a length."""
    sizes = []
    while length > 0:
        sizes.append(draw(st.integers(1, min(8, length))))
        length -= sizes[-1]
    return sizes


def stream(decoder: IncrementalDecoder, token_ids: Sequence[int], sizes: Sequence[int]) -> list[str]:
    pieces, start = [], 0
    for size in sizes:
        pieces.append(decoder.push(token_ids[start : start + size]))
        start += size
    return [*pieces, decoder.flush()]


@given(st.data())
def test_pieces_join_to_the_whole_for_any_bytes(data: st.DataObject) -> None:
    pieces = {256 + index: chunk for index, chunk in enumerate(data.draw(st.lists(st.binary(max_size=5), max_size=6)))}
    tokenizer = ByteTokenizer(pieces)
    token_ids = data.draw(st.lists(st.integers(0, 263), max_size=40))  # 262 and 263 may be special: no text
    sizes = data.draw(cuts(len(token_ids)))
    assert "".join(stream(IncrementalDecoder(tokenizer), token_ids, sizes)) == tokenizer.decode(token_ids)


@pytest.mark.parametrize("text", HARD_TEXTS)
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_no_step_shows_half_a_character(text: str, size: int) -> None:
    tokenizer = ByteTokenizer()
    token_ids = tokenizer.encode(text)
    sizes = [min(size, len(token_ids) - start) for start in range(0, len(token_ids), size)]
    pieces = stream(IncrementalDecoder(tokenizer), token_ids, sizes)
    assert "".join(pieces) == text
    assert sum(piece.count("\ufffd") for piece in pieces) == text.count("\ufffd")


def test_bytes_that_never_become_a_character_are_flushed() -> None:
    decoder = IncrementalDecoder(ByteTokenizer())
    assert decoder.push(b"ab\xf0\x9f") == "ab"
    assert decoder.flush() == "\ufffd"


@pytest.fixture(scope="module")
def real_tokenizer() -> TextTokenizer:
    pytest.importorskip("gguf")
    try:
        return open_tokenizer(locate_target("smollm2-135m-instruct", offline=True))
    except PacelineError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("text", HARD_TEXTS)
def test_pieces_join_to_the_whole_for_a_real_tokenizer(real_tokenizer: TextTokenizer, text: str) -> None:
    token_ids = real_tokenizer.encode(f"{text}<|im_end|>\n<|im_start|>{text}")
    for size in (1, 2, 3, 8):
        sizes = [min(size, len(token_ids) - start) for start in range(0, len(token_ids), size)]
        pieces = stream(IncrementalDecoder(real_tokenizer), token_ids, sizes)
        assert "".join(pieces) == real_tokenizer.decode(token_ids)
        assert sum(piece.count("\ufffd") for piece in pieces) == 2 * text.count("\ufffd")


def test_the_stop_that_completes_first_wins_however_text_is_cut() -> None:
    match = find_stop("abcd", ["bcd", "c"])
    assert match is not None
    assert (match.stop, match.start, match.end) == ("c", 2, 3)
    longer = find_stop("xabc", ["c", "abc"])
    assert longer is not None
    assert longer.stop == "abc"
    assert find_stop("abab", ["ba"], from_index=2) is not None
    assert find_stop("abab", ["ab"], from_index=4) is None


def test_only_possible_beginnings_are_held_back() -> None:
    assert held_back("hello wor", ["world"]) == 3
    assert held_back("hello world!", ["world"]) == 0
    assert held_back("aab", ["abc", "bbb", "aabx"]) == 3
    assert held_back("", ["abc"]) == 0


def make_output(sampling: SamplingParameters, tokenizer: ByteTokenizer | None = None, eos: int = 0) -> RequestOutput:
    return RequestOutput(tokenizer or ByteTokenizer(), sampling, max_tokens=sampling.max_tokens, target_stop_ids=(eos,))


def run(output: RequestOutput, token_ids: Sequence[int], sizes: Sequence[int]) -> tuple[list[str], object]:
    """Feed until the end; returns the texts of all steps and the last extension's reasons."""
    texts, start, last = [], 0, None
    for size in sizes:
        last = output.extend(token_ids[start : start + size])
        texts.append(last.text)
        start += size
        if last.finish_reason is not None:
            return texts, (last.finish_reason, last.stop_reason)
    texts.append(output.finish())
    return texts, None


@given(st.data())
def test_ends_do_not_depend_on_the_cut(data: st.DataObject) -> None:
    """Stops, budget and text come out the same token by token and block by block: the engine's whole promise."""
    letters = st.sampled_from(b"abc\xc3\xa9")
    tokenizer = ByteTokenizer({256: b"ab", 257: b"bca", 258: b"\xc3", 259: "é".encode()})
    token_ids = data.draw(st.lists(st.one_of(letters, st.sampled_from([0, 7, 256, 257, 258, 259])), max_size=30))
    stops = data.draw(st.lists(st.sampled_from(["a", "ab", "bc", "abca", "éa", "é", "cc"]), max_size=3))
    sampling = SamplingParameters(
        max_tokens=data.draw(st.integers(1, 30)),
        stop=tuple(stops),
        stop_token_ids=data.draw(st.sampled_from([(), (7,), (256,)])),
        ignore_eos=data.draw(st.booleans()),
        include_stop_str_in_output=data.draw(st.booleans()),
    )
    singly, blocks = make_output(sampling, tokenizer), make_output(sampling, tokenizer)
    expected_texts, expected_end = run(singly, token_ids, [1] * len(token_ids))
    texts, end = run(blocks, token_ids, data.draw(cuts(len(token_ids))))
    assert (end, "".join(texts)) == (expected_end, "".join(expected_texts))
    assert blocks.token_ids == singly.token_ids
    assert blocks.text == "".join(texts)
    assert len(blocks.token_ids) <= sampling.max_tokens
    for stop in stops:
        assert sampling.include_stop_str_in_output or stop not in blocks.text


def test_text_before_a_stop_and_ids_up_to_the_token_that_completes_it() -> None:
    for shows, expected in ((False, "one"), (True, "one<end>")):
        output = make_output(SamplingParameters(stop=("<end>",), include_stop_str_in_output=shows))
        texts, end = run(output, b"one<end>two", [4, 7])
        assert ("".join(texts), end) == (expected, ("stop", "<end>"))
        assert bytes(output.token_ids) == b"one<end>"
        assert texts[0] == "one", "the possible beginning of the stop was held back"


def test_a_stop_token_is_delivered_without_its_text() -> None:
    output = make_output(SamplingParameters(stop_token_ids=(ord("."),)))
    texts, end = run(output, b"Yes. No.", [8])
    assert (texts, end, bytes(output.token_ids)) == (["Yes"], ("stop", ord(".")), b"Yes.")


def test_a_stop_beats_the_budget_on_the_same_token_and_the_budget_beats_a_later_stop() -> None:
    for max_tokens, expected in ((3, ("length", None)), (4, ("stop", ord("."))), (5, ("stop", ord(".")))):
        output = make_output(SamplingParameters(max_tokens=max_tokens, stop_token_ids=(ord("."),)))
        assert run(output, b"Yes. No.", [8])[1] == expected


def test_ignoring_the_end_of_text_ignores_only_the_targets_own_ids() -> None:
    sampling = SamplingParameters(ignore_eos=True, stop_token_ids=(7,))
    assert run(make_output(sampling, eos=0), [65, 0, 66, 7, 67], [5])[1] == ("stop", 7)
    assert run(make_output(SamplingParameters(), eos=0), [65, 0, 66], [3])[1] == ("stop", 0)


def test_a_half_emoji_at_the_end_is_flushed_with_the_budget() -> None:
    output = make_output(SamplingParameters(max_tokens=3))
    texts, end = run(output, "😀".encode(), [2, 2])
    assert (texts, end) == (["", "\ufffd"], ("length", None))


# min_tokens and grammars


@pytest.mark.parametrize("sizes", [[10], [1] * 10, [3, 3, 4], [2, 8]])
def test_the_first_min_tokens_complete_no_stop(sizes: list[int]) -> None:
    """A stop text over the border counts, one within does not, wherever the steps end."""
    text, start = b"ab.ab.abxy", 0
    sampling = SamplingParameters(min_tokens=4, stop=("b.", ".ab"), stop_token_ids=(ord("x"),))
    output = RequestOutput(ByteTokenizer(), sampling, max_tokens=10, target_stop_ids=(ord("b"),))
    reason = None
    for size in sizes:
        if reason is None:
            reason = output.extend(list(text[start : start + size])).finish_reason
        start += size
    assert (reason, bytes(output.token_ids), output.text) == ("stop", b"ab.ab", "ab.a"), "b, the target's stop, at last"
    late = RequestOutput(ByteTokenizer(), replace(sampling, ignore_eos=True), max_tokens=10, target_stop_ids=())
    found = [late.extend([token]) for token in text]
    assert next(index for index, one in enumerate(found) if one.finish_reason) == 4
    assert (found[4].stop_reason, late.text[:2]) == (".ab", "ab")


def test_a_complete_grammar_ends_the_text_at_its_last_token() -> None:
    output = RequestOutput(ByteTokenizer(), SamplingParameters(stop=("zz",)), max_tokens=3, target_stop_ids=())
    first = output.extend(list(b"a"))
    last = output.extend(list(b"bz"), is_complete=True)
    assert (first.finish_reason, last.finish_reason, last.stop_reason, output.text) == (None, "stop", None, "abz")
    short = RequestOutput(ByteTokenizer(), SamplingParameters(), max_tokens=2, target_stop_ids=())
    assert short.extend(list(b"abc"), is_complete=True).finish_reason == "length", "its end lies behind the budget"


@pytest.mark.parametrize(("stops", "tokens"), [((), b"cd"), ((), b"s"), (("zz",), b"c")])
def test_tokens_that_may_end_the_request_are_not_taken_in_unseen(stops: tuple[str, ...], tokens: bytes) -> None:
    """The last of the budget, a stop token, anything where there are stop texts."""
    sampling = SamplingParameters(stop=stops)
    output = RequestOutput(ByteTokenizer(), sampling, max_tokens=4, target_stop_ids=(ord("s"),))
    if not stops:
        assert output.extend_within(list(b"ab")) == "ab"
    before = list(output.token_ids), output.text
    assert output.extend_within(list(tokens)) is None
    assert (output.token_ids, output.text) == before
