from __future__ import annotations

import itertools
import json
import random
import time
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher
from tests.fakes import ByteTokenizer
from tests.unit.engine.test_grammar_tokenizer import text_tokenizer

from paceline.engine import grammar as module
from paceline.engine.grammar import BlockMasks, GrammarCompiler, GrammarState
from paceline.engine.structured import StructuredOutput
from paceline.errors import RequestError
from paceline.ops.verify_block import verify_block

EOS = 2
VOCAB_SIZE = 301  # no multiple of 32; ids from 264 have no token
# Pieces that cut JSON punctuation, words, the marker and a character anywhere.
PIECES = {256: b'{"', 257: b'":', 258: b"al", 259: b"pha", 260: b"</", 261: b"think>x", 262: "é".encode(), 263: b"\xc3"}
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 6},
            "kind": {"enum": ["alpha", "alphabet", 3, None]},
            "list": {"type": "array", "items": {"type": "integer"}, "maxItems": 2},
        },
        "required": ["name", "kind"],
        "additionalProperties": False,
    }
)
INTEGER_A = '{"type":"object","properties":{"a":{"type":"integer"}},"required":["a"],"additionalProperties":false}'


def compiler(**options: Any) -> GrammarCompiler:
    return GrammarCompiler(ByteTokenizer(PIECES), **({"vocab_size": VOCAB_SIZE, "stop_token_ids": (EOS,)} | options))


def byte_compiler() -> GrammarCompiler:
    return GrammarCompiler(ByteTokenizer(), vocab_size=VOCAB_SIZE, stop_token_ids=(EOS,))


def bpe_compiler() -> GrammarCompiler:
    """Its alphabet is ordered otherwise than bytes are; token 258 is its stop token."""
    return GrammarCompiler(text_tokenizer(), vocab_size=VOCAB_SIZE, stop_token_ids=(258,))


def form(kind: Any, value: Any = "", begins_after: str | None = None) -> StructuredOutput:
    return StructuredOutput(kind, value, begins_after)


def allowed(mask_W: torch.Tensor) -> set[int]:
    words = mask_W.numpy().view(np.uint8)
    return set(np.unpackbits(words, bitorder="little").nonzero()[0].tolist())


def addend(mask_LW: torch.Tensor) -> torch.Tensor:
    allowed_LV = np.unpackbits(mask_LW.numpy().view(np.uint8), axis=1, bitorder="little")
    return torch.from_numpy(allowed_LV).log()


def allowed_now(state: GrammarState) -> set[int]:
    return allowed(state.masks([], 1).mask_LW[0])


def after(tokens: Sequence[int], wanted: StructuredOutput, **options: Any) -> GrammarState:
    state = compiler().start(wanted, **options)
    state.advance(tokens)
    return state


ANY_FORM = st.sampled_from(
    [
        form("json_schema", SCHEMA),
        form("json_schema", SCHEMA, "</think>"),
        form("json_object"),
        form("regex", "(a|b)*é{2}"),
        form("choice", ("alpha", "al", "éa")),
        form("grammar", 'start: "(" start ")" | "x"'),
    ]
)


@given(wanted=ANY_FORM, seed=st.integers(0, 2**32))
def test_masks_of_a_block_are_those_got_token_by_token(wanted: StructuredOutput, seed: int) -> None:
    draws = random.Random(seed)
    compiled = draws.choice([compiler, bpe_compiler])()
    state = compiled.start(wanted)
    text: list[int] = []
    for _ in range(6):
        stepwise = compiled.start(wanted)
        stepwise.advance(text)
        num_drafts = draws.randrange(8)
        drafts: list[int] = []
        rows: list[torch.Tensor] = []
        is_valid = True
        while is_valid:
            rows.append(stepwise.masks([], 1).mask_LW[0])
            if len(drafts) == num_drafts:
                break
            choices = sorted(allowed(rows[-1]))
            drafts.append(draws.choice(choices) if draws.random() < 0.85 else draws.randrange(VOCAB_SIZE))
            is_valid = drafts[-1] in choices
            stepwise.advance(drafts[-1:])
        behind = [draws.randrange(VOCAB_SIZE) for _ in range(num_drafts - len(drafts))]
        block = state.masks(drafts + behind, num_drafts + 1)
        assert block.num_kept_drafts == len(drafts)
        assert torch.equal(block.mask_LW[: len(rows)], torch.stack(rows))
        assert (block.mask_LW[len(rows) :] == -1).all()
        assert torch.equal(state.masks([], 1).mask_LW[0], rows[0]), "looking ahead leaves the state as it was"
        num_emitted = draws.randint(0, len(drafts) - (not is_valid))
        emitted = [*drafts[:num_emitted], draws.choice(sorted(allowed(rows[num_emitted])))]
        state.advance(emitted)
        text += emitted
        if compiled.stop_token_ids[0] in emitted:
            assert state.is_finished
            break


def test_a_missing_rollback_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GrammarState, "_roll_back", lambda self, num_consumed: None)
    state = compiler().start(form("regex", "ab*c"))
    before = allowed_now(state)
    state.masks(list(b"ab"), 3)
    assert allowed_now(state) != before


def test_the_first_invalid_draft_is_kept_and_its_own_row_refuses_it() -> None:
    state = byte_compiler().start(form("json_schema", INTEGER_A))
    block = state.masks(list(b'{"a":x12'), 9)
    assert block.num_kept_drafts == 6
    assert ord("x") not in allowed(block.mask_LW[5])
    assert (block.mask_LW[6:] == -1).all()
    assert block.error is None


def test_a_placeholder_ends_the_drafts() -> None:
    block = compiler().start(form("regex", "a{9}")).masks([97, -1, 97], 4)
    assert block.num_kept_drafts == 1
    assert [len(allowed(row)) for row in block.mask_LW] == [1, 1, 320, 320]


# The table of the selection lemma: token 2 is forbidden by the grammar.
P = (Fraction(1, 2), Fraction(1, 2), Fraction(0))
Q = (Fraction(6, 10), Fraction(1, 10), Fraction(3, 10))
DROPPED_TOO_EARLY = (Fraction(65, 100), Fraction(35, 100), Fraction(0))


def outcome_of(num_kept_drafts: Sequence[int]) -> list[Fraction]:
    """Distribution of the first token, when `num_kept_drafts[x]` says whether draft x is verified."""
    left = [max(p - q, Fraction(0)) for p, q in zip(P, Q, strict=True)]
    out = [Fraction(0)] * 3
    for x, kept in enumerate(num_kept_drafts):
        accept = min(Fraction(1), P[x] / Q[x]) if kept else Fraction(0)
        instead = [weight / sum(left) for weight in left] if kept else list(P)
        out[x] += Q[x] * accept
        out = [total + Q[x] * (1 - accept) * share for total, share in zip(out, instead, strict=True)]
    return out


def three_tokens() -> GrammarCompiler:
    return GrammarCompiler(ByteTokenizer({0: b"a", 1: b"b", 2: b"c"}), vocab_size=256, stop_token_ids=(3,))


def test_keeping_the_first_invalid_draft_leaves_the_targets_distribution() -> None:
    state = three_tokens().start(form("choice", ("a", "b")))
    kept = [state.masks([draft], 2).num_kept_drafts for draft in range(3)]
    assert outcome_of(kept) == list(P)
    assert outcome_of([1, 1, 0]) == list(DROPPED_TOO_EARLY)


@pytest.mark.parametrize(("num_dropped", "expected"), [(0, P), (1, DROPPED_TOO_EARLY)])
def test_the_verifier_agrees_with_the_table(num_dropped: int, expected: Sequence[Fraction]) -> None:
    num_requests = 100_000
    generator = torch.Generator().manual_seed(5)
    q = torch.tensor([float(value) for value in Q])
    drafts_BK = torch.multinomial(q, num_requests, replacement=True, generator=generator).unsqueeze(1)
    state = three_tokens().start(form("choice", ("a", "b")))
    blocks = [state.masks([draft], 2) for draft in range(3)]
    raw_V = torch.full((256,), -9.0)
    raw_V[:3] = 0.0  # the head likes all three equally
    processed_XLV = torch.stack([raw_V + addend(block.mask_LW) for block in blocks])
    kept_X = torch.tensor([block.num_kept_drafts - num_dropped * (x == 2) for x, block in enumerate(blocks)])
    processed_BLV = processed_XLV[drafts_BK[:, 0]][..., :4]
    verified = verify_block(
        drafts_BK.masked_fill(kept_X[drafts_BK] == 0, -1),
        processed_BLV,
        temperature_B=torch.ones(num_requests),
        seed_B=torch.arange(num_requests),
        anchor_position_B=torch.full((num_requests,), 7),
        step_B=torch.zeros(num_requests, dtype=torch.long),
        candidate_ids_BKC=torch.arange(3).expand(num_requests, 1, 3),
        log_q_BKC=q.log().expand(num_requests, 1, 3),
    )
    first_B = torch.where(verified.accepted_B > 0, drafts_BK[:, 0], verified.bonus_ids_B)
    share = torch.bincount(first_B, minlength=4)[:3] / num_requests
    wanted = torch.tensor([float(value) for value in expected])
    assert (share - wanted).abs().max() < 0.008  # five standard deviations
    distance = (share - torch.tensor([0.5, 0.5, 0.0])).abs().sum() / 2
    assert (distance > 0.1) == bool(num_dropped), "the early drop is off by 0.15"


def test_ids_without_a_token_are_never_allowed() -> None:
    free = compiler().start(form("regex", "(?s:.)*", "</think>"))
    assert allowed_now(free) == set(range(264)) - {EOS}
    anything = compiler().start(form("regex", "(?s:.)*"))
    assert max(allowed_now(anything)) < 264
    named = compiler().start(form("regex", r"<\[299\]>"))
    assert allowed_now(named) == {ord("<")}, "the name that llguidance gives to an empty id is no text"


@pytest.mark.parametrize("vocab_size", [264, 288, 289, 320])
def test_masks_have_the_words_of_the_vocabulary(vocab_size: int) -> None:
    state = compiler(vocab_size=vocab_size).start(form("regex", "é"))
    block = state.masks([262], 2)
    assert block.mask_LW.shape == (2, (vocab_size + 31) // 32)
    assert block.mask_LW.dtype == torch.int32
    assert allowed(block.mask_LW[0]) == {262}, "the spelling of what the grammar forces"
    assert allowed(block.mask_LW[1]) == {EOS}


def test_a_head_smaller_than_the_tokenizer_gets_its_own_ids_only() -> None:
    state = compiler(vocab_size=260).start(form("regex", "(?s:.)*"))
    assert max(allowed_now(state)) == 259


def test_stop_tokens_are_allowed_exactly_where_the_grammar_accepts() -> None:
    state = compiler().start(form("regex", "ab?"))
    rows = state.masks(list(b"ab"), 3).mask_LW
    assert [EOS in allowed(row) for row in rows] == [False, True, True]
    assert allowed(rows[1]) == {EOS, ord("b")}
    assert allowed(rows[2]) == {EOS}


def test_a_stop_token_is_never_text() -> None:
    state = compiler().start(form("regex", r"\x02+|a"))
    assert allowed_now(state) == {ord("a")}


def test_after_the_end_only_stop_tokens_follow_and_the_matcher_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    class Watched:
        """Fails when it is asked after it stopped."""

        def __init__(self, matcher: LLMatcher) -> None:
            self.matcher, self.num_asked = matcher, 0

        def __getattr__(self, name: str) -> Any:
            if name in ("compute_bitmask", "consume_token", "is_accepting", "validate_tokens"):
                assert not self.matcher.is_stopped(), f"{name} after the end"
                self.num_asked += 1
            return getattr(self.matcher, name)

    state = byte_compiler().start(form("json_schema", INTEGER_A))
    monkeypatch.setattr(state, "_matcher", Watched(state._matcher))
    text = list(b'{"a":12}')
    block = state.masks([*text, EOS, EOS, ord(" "), 5], 13)
    assert block.num_kept_drafts == 11, "the drafts that go on past the end are dropped behind the first"
    assert [allowed(row) for row in block.mask_LW[8:11]] == [{EOS}] * 3
    state.advance(text)
    assert state.is_finished and allowed_now(state) == {EOS}
    state.advance([EOS])
    assert state.is_finished and allowed_now(state) == {EOS}
    assert state.masks([EOS, 7, 7], 4).num_kept_drafts == 2
    assert state._matcher.num_asked > 0


def test_a_stop_token_ends_a_grammar_that_could_go_on() -> None:
    state = after([*b"12", EOS], form("regex", "[0-9]+"))
    assert state.is_finished
    assert allowed_now(state) == {EOS}


def test_stop_tokens_of_the_request_wait_for_the_end_unless_they_are_text() -> None:
    state = compiler().start(form("regex", "a7?b"), stop_token_ids=[ord("7"), 300])
    assert allowed_now(state) == {ord("a")}
    block = state.masks(list(b"a7b"), 4)
    assert [allowed(row) for row in block.mask_LW] == [{97}, {55, 98}, {98}, {EOS, 55, 300}]
    state.advance(list(b"ab7"))
    assert state.is_finished


def test_a_request_can_bring_the_only_stop_token() -> None:
    compiled = compiler(stop_token_ids=())
    with pytest.raises(RequestError, match="needs a token that ends the text"):
        compiled.start(form("regex", "a"))
    with pytest.raises(RequestError, match="needs a token that ends the text"):
        compiled.start(form("regex", "a"), stop_token_ids=[VOCAB_SIZE])
    state = compiled.start(form("regex", "a"), stop_token_ids=[9])
    assert [allowed(row) for row in state.masks([97], 2).mask_LW] == [{97}, {9}]


def test_the_grammar_begins_inside_a_block() -> None:
    state = compiler().start(form("choice", ("yes", "no"), "</think>"))
    drafts = [*b"so", 260, 261, *b"yes", EOS]  # `</` and `think>x`: the marker ends in the middle of a token
    block = state.masks(drafts, 9)
    assert block.num_kept_drafts == 8
    assert [len(allowed(row)) for row in block.mask_LW] == [263, 263, 263, 263, 2, 1, 1, 1, 1]
    assert allowed(block.mask_LW[4]) == {ord("y"), ord("n")}, "the x behind the marker is free text"
    assert len(allowed_now(state)) == 263, "nothing has begun yet"
    assert not state.is_finished


@pytest.mark.parametrize(
    "text", [[260, 261], [*b"</think>"], [*b"<", *b"/think>"], [*b"</t", *b"</think>"], [*b"<</think>"]]
)
def test_the_marker_completes_however_it_is_cut(text: list[int]) -> None:
    wanted = form("choice", ("yes", "no"), "</think>")
    for num_before in range(len(text)):
        assert len(allowed_now(after(text[:num_before], wanted))) == 263
    assert allowed_now(after(text, wanted)) == {ord("y"), ord("n")}


def test_free_text_may_hold_anything_but_a_stop_token() -> None:
    state = compiler().start(form("regex", "a", "#"), stop_token_ids=[9])
    assert {EOS, 9} & allowed_now(state) == set()
    assert state.masks([EOS, 35], 3).num_kept_drafts == 1
    state.advance(list(b"##"))
    assert state.masks([], 1).error is not None, "the second # is the grammar's, which refuses it"


def test_special_and_added_tokens_complete_a_marker() -> None:
    compiled = GrammarCompiler(text_tokenizer(), vocab_size=300, stop_token_ids=(258,))
    for marker in ("</think>", "nk>", "<|end|>"):
        state = compiled.start(form("regex", "a", marker))
        state.advance([256, 259 if "nk" in marker else 258])
        assert len(allowed_now(state)) == 1, marker


def test_a_mask_without_a_token_is_empty_and_says_why() -> None:
    tokenizer = ByteTokenizer({ord("q"): b""})
    state = GrammarCompiler(tokenizer, vocab_size=256, stop_token_ids=(EOS,)).start(form("regex", "a(q|[b]q|c)"))
    for _ in range(2):
        block = state.masks(list(b"abz"), 4)
        assert [allowed(row) for row in block.mask_LW[:3]] == [{97}, {98, 99}, set()]
        assert block.num_kept_drafts == 3, "the draft in the empty row is refused there"
        assert block.error == "no token of the vocabulary fits the grammar here"
    state.advance(list(b"a"))
    assert state.masks([99], 2).error is None, "an end that was only looked at does not stay"
    state.advance(list(b"b"))
    assert not state.is_finished
    assert state.masks([], 1).error is not None


def test_a_token_that_does_not_fit_leaves_an_error_and_other_requests_go_on() -> None:
    compiled = compiler()
    state, other = (compiled.start(form("regex", "ab")) for _ in range(2))
    state.advance(list(b"ax"))
    block = state.masks(list(b"b"), 2)
    assert allowed(block.mask_LW[0]) == set() and block.num_kept_drafts == 1
    assert "token 120 does not fit the grammar" in (block.error or "")
    assert not state.is_finished
    other.advance(list(b"a"))
    assert allowed_now(other) == {98}
    early = after([EOS], form("regex", "ab"))
    assert "token 2 came where" in (early.masks([], 1).error or "")
    late = after([97, 98, 97], form("regex", "ab"))
    assert "token 97 came where" in (late.masks([], 1).error or "")


def test_an_exhausted_matcher_is_this_requests_error_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from llguidance import LLParserLimits

    monkeypatch.setattr("llguidance.LLParserLimits", lambda **options: LLParserLimits(step_max_items=3, **options))
    compiled = compiler()
    state = compiled.start(form("json_object"))
    block = state.masks(list(b'{"a"'), 5)
    assert "Too many items" in (block.error or "")
    failed = next(row for row in range(5) if not allowed(block.mask_LW[row]))
    assert block.num_kept_drafts == failed + 1
    easy = compiled.start(form("regex", "a"))
    assert allowed_now(easy) == {97}


@pytest.mark.parametrize(
    ("wanted", "names"),
    [
        (form("regex", "a(b"), "regex 'a\\(b'.*unclosed group"),
        (form("regex", "(?=a)b"), "look-around"),
        (form("json_schema", '{"type":"thing"}'), "JSON schema.*thing"),
        (form("json_schema", '{"not":{"type":"string"}}'), 'Unimplemented keys: \\["not"\\]'),
        (form("json_schema", '{"properties":{"a":{"uniqueItems":true}}}'), "uniqueItems"),
        (form("json_schema", '{"$ref":"https://example.org/a.json"}'), "example.org"),
        (form("json_schema", '{"type":"integer","minimum":5,"maximum":3}'), r"minimum \(5\)"),
        (form("json_schema", '{"items":' * 200 + "{}" + "}" * 200), "recursion"),
        (form("json_schema", '{"const": NaN}'), "JSON schema cannot be read"),
        (form("grammar", "start: foo"), 'unknown name: "foo"'),
        (form("grammar", "x" * 500), "grammar 'x{70,80}"),
        (form("choice", ("yes", "caffè")), "choice 1 is 'caffè'.*from byte 5 on"),
    ],
)
def test_a_form_that_cannot_be_compiled_is_refused_by_name(wanted: StructuredOutput, names: str) -> None:
    compiled = (
        compiler()
        if wanted.kind != "choice"
        else GrammarCompiler(ByteTokenizer({0xA8: b""}), vocab_size=256, stop_token_ids=(EOS,))
    )
    with pytest.raises(RequestError, match=f"(?s){names}"):
        compiled.start(wanted)
    assert allowed_now(compiled.start(form("regex", "a"))) == {97}


@pytest.mark.parametrize(
    "choice", ['a"b', "a\\n", "a\nb", "😀", "\x01\x7f\u2028", "/x/", "%json", "é²ⅷ٣", "<|end|>", "[a-z]{2}|(?i)^$"]
)
def test_a_choice_is_taken_literally(choice: str) -> None:
    state = compiler().start(form("choice", (choice, "zz")))
    for token in choice.encode():
        block = state.masks([token], 2)
        if token not in allowed(block.mask_LW[0]):  # spelled with a longer piece
            break
        state.advance([token])
    spelled = compiler()._tokenizer.tokenize_bytes(choice.encode())
    state = after(spelled, form("choice", (choice, "zz")))
    assert state.is_finished and state.masks([], 1).error is None


def test_json_is_compact_unless_the_schema_asks_for_blanks() -> None:
    blanks = {ord(" "), ord("\n"), ord("\t")}
    state = after([256], form("json_schema", INTEGER_A))
    state.advance(list(b"a"))
    assert allowed_now(state) == {257}
    roomy = INTEGER_A[:-1] + ',"x-guidance":{"whitespace_flexible":true}}'
    assert blanks <= allowed_now(after([ord("{")], form("json_schema", roomy)))
    assert not blanks & allowed_now(after([ord("{")], form("json_object")))


def test_the_schema_true_allows_any_value() -> None:
    assert {ord("{"), ord("["), ord("1"), ord("t"), ord('"')} <= allowed_now(
        compiler().start(form("json_schema", " true "))
    )


def test_compiled_grammars_are_kept_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "NUM_KEPT_GRAMMARS", 2)
    compiled = compiler()
    num_compiled = itertools.count()

    def counted(wanted: StructuredOutput) -> str:
        next(num_compiled)
        return LLMatcher.grammar_from_regex(str(wanted.value))

    monkeypatch.setattr(module, "_grammar_text", counted)
    for value in ("a", "b", "a", "c", "a", "b"):
        compiled.start(form("regex", value))
        compiled.start(form("regex", value, "#"))
    assert next(num_compiled) == 4, "a, b, c, and b again"


def test_states_of_one_grammar_do_not_touch_each_other() -> None:
    compiled = compiler()
    first, second = (compiled.start(form("regex", "abc")) for _ in range(2))
    first.advance(list(b"ab"))
    assert (allowed_now(first), allowed_now(second)) == ({99}, {97})
    second.advance(list(b"a"))
    first.masks(list(b"c"), 2)
    assert (allowed_now(first), allowed_now(second)) == ({99}, {98})


def test_no_rows_but_the_block() -> None:
    block = compiler().start(form("regex", "aaaa")).masks([97, 97, 97], 2)
    assert isinstance(block, BlockMasks)
    assert block.mask_LW.shape[0] == 2


def test_long_choices_are_looked_through_byte_by_byte_only_where_bytes_are_missing() -> None:
    choices = tuple(f"{'x' * 2000}{index}" for index in range(400))
    began_s = time.process_time()
    byte_compiler()._require_pieces(choices)
    assert time.process_time() - began_s < 0.5  # it took seconds, for which no other request got a token
