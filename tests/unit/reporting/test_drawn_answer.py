from __future__ import annotations

from dataclasses import replace

from tests.unit.reporting.traces import TOKENS, WORDS, answer

from paceline.reporting.drawn_answer import draw_answer, first_refusal_is
from paceline.trace.answer import TracedAnswer
from paceline.trace.step import StepDetails

DETAILS = StepDetails(
    draft_logprobs=(-0.1, -2.3, -5.0),
    draft_entropies=(0.1, 0.2, 0.3),
    confidences=(0.9, 0.5, 0.4),
    target_logprobs=(-0.2, -7.5),
    target_entropies=(0.5, 0.6),
    target_top=(((1, -0.2), (6, -2.0)), ((7, -0.01), (5, -50.0))),
    bonus_logprob=-0.01,
)


def test_every_token_has_its_fate_its_text_and_what_is_known_of_it() -> None:
    drawn = draw_answer(answer("a", [([1, 2, 8], 1, 7)], details=DETAILS, category="prose"), most_steps=9)
    first, (accepted, refused, bonus) = drawn.steps
    assert [(chip.fate, chip.text, chip.title) for chip in first] == [("bonus", "The", "from the prompt pass")]
    assert [(chip.fate, chip.text) for chip in (accepted, refused, bonus)] == [
        ("accepted", " cat"),
        ("refused", " sat"),
        ("bonus", "."),
    ]
    assert accepted.title.splitlines() == [
        "step 0, draft 0, position 11: accepted",
        "drafter 90.5 %, target 81.9 %, confidence 0.90",
        "target's five: ' cat' 81.9 %, ' Anna' 13.5 %",
    ]
    assert refused.title.splitlines()[:2] == [
        "step 0, draft 1, position 12: refused",
        "drafter 10.0 %, target below 0.1 %, confidence 0.50",
    ]
    assert bonus.title.splitlines() == [
        "step 0, position 12: the target's own",
        "target 99.0 %",
        "target's five: '.' 99.0 %, '\\n' below 0.1 %",
    ]
    assert (drawn.name, drawn.category, drawn.question, drawn.num_tokens) == ("a", "prose", "ask a", 3)


def test_the_map_has_a_cell_per_draft_and_the_token_that_came() -> None:
    drawn = draw_answer(answer("a", [([1, 2, 8], 1, 7), ([5, 6], 2, 11)]), most_steps=9)
    first, second = drawn.rows
    assert (first.anchor, first.first_refusal, first.bonus, first.num_kept) == ("The", "1", ".", 1)
    assert [(cell.fate, cell.text, cell.chosen) for cell in first.cells] == [
        ("accepted", " cat", ""),
        ("refused", " sat", "."),
        ("unseen", " on", ""),
    ]
    assert (second.anchor, second.first_refusal) == (".", "none")
    assert drawn.depth == 3


def test_the_filter_and_the_limit_are_of_what_is_drawn() -> None:
    whole = answer("a", [([1, 2], 0, 3), ([1, 2], 1, 3), ([1, 2], 0, 3), ([1, 2], 2, 3)])
    drawn = draw_answer(whole, most_steps=9, wanted=first_refusal_is(0))
    assert [row.number for row in drawn.rows] == [0, 2] and len(drawn.steps) == 5
    few = draw_answer(whole, most_steps=2)
    assert few.left_out == "the first 2 of 4 steps are drawn" and len(few.rows) == 2
    assert few.summary.num_steps == 4 and few.num_tokens == 8


def test_a_step_that_a_stop_cut_shows_what_was_lost() -> None:
    whole = answer("a", [([1, 2, 8], 3, 3)])
    record = whole.trace.records[0]
    whole.trace.records[0] = type(record)("a", 0, 10, 0, (1, 2, 8), 2, 1, (1,), None, 1.0)
    drawn = draw_answer(whole, most_steps=9)
    assert [cell.fate for cell in drawn.rows[0].cells] == ["accepted", "cut", "refused"]
    assert drawn.rows[0].bonus is None and [chip.fate for chip in drawn.steps[1]] == ["accepted"]


def test_texts_of_several_tokens_and_unknown_ids() -> None:
    tokens = {**TOKENS, 1: b"\xc3", 2: b"\xa9"}
    drawn = draw_answer(answer("a", [([1, 2], 2, 99)], tokens=tokens), most_steps=9)
    assert [chip.text for chip in drawn.steps[1]] == ["…", "é", "<99>"]


def test_control_characters_become_escapes_everywhere() -> None:
    tokens = {token: f"\x00\x1b{word}".encode() for token, word in enumerate(WORDS)}
    made = answer("a\x1b[2J", [([1, 2], 1, 3)], tokens=tokens, details=DETAILS, category="\x07")
    assert made.prompt is not None
    made = TracedAnswer(made.trace, replace(made.prompt, text="x\x1b\ny\ud800"), made.tokens, made.run)
    drawn = draw_answer(made, most_steps=9)
    texts = [drawn.name, drawn.category or "", drawn.question or ""]
    texts += [text for step in drawn.steps for chip in step for text in (chip.text, chip.title)]
    texts += [text for row in drawn.rows for text in (row.anchor, row.bonus or "", *(cell.text for cell in row.cells))]
    assert all(letter.isprintable() or letter == "\n" for text in texts for letter in text)
